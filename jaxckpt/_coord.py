"""Meetings of the processes of one job, over JAX's own coordination service.

    with group.meeting("saving") as meeting:
        heard = meeting.gather(mine)        # every process gives a text; process 0 gets them all
        if group.index == 0:
            decision = decide(heard)
        decision = meeting.share(decision)  # every process gets process 0's

Whatever one process raises inside the block, all raise, and the message names that process. One that is silent for
`timeout_seconds` is named too. One that works on is not silent: while in a meeting each process beats, and only a beat
that stops counts.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from jax._src import distributed  # the only door to the coordination service; orbax and flax use it too

from jaxckpt._errors import (
    PathNotSharedError,
    PeerFailedError,
    PeersDisagreeError,
    PeerTimeoutError,
)

_POLL_SECONDS = 0.5
_operations = itertools.count()


@dataclass(slots=True)
class Group:
    """The processes of the job during one operation, which all of them must call, in the same order.

    Made without starting a JAX backend: a job of one process never needs one.
    """

    index: int
    count: int
    timeout_seconds: float
    client: Any
    prefix: str
    meetings: int = 0

    @classmethod
    def current(cls, timeout_seconds: float) -> Group:
        state: Any = distributed.global_state
        prefix = f"jaxckpt/{next(_operations)}"
        if state.client is None:
            return cls(0, 1, timeout_seconds, None, prefix)
        return cls(state.process_id, state.num_processes, timeout_seconds, state.client, prefix)

    def meeting(self, what: str) -> Meeting:
        """The next meeting; `what` the processes are doing, for messages ("saving")."""
        self.meetings += 1
        return Meeting(self, what, f"{self.prefix}/{self.meetings}")


@dataclass(slots=True)
class Meeting:
    """One round: all give, process 0 decides, all get. Every process must gather once, then share once."""

    group: Group
    what: str
    key: str
    _gave: bool = False
    _closed: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _beat: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.group.count > 1:
            self._beat = threading.Thread(target=self._keep_beating, daemon=True, name="jaxckpt-beat")
            self._beat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._beat is None:
            return
        try:
            if error is not None:
                failure = _failure(self.group.index, error)
                if not self._gave:
                    self._post(f"in/{self.group.index}", failure)
                if self.group.index == 0 and not self._closed:
                    self._post("out", failure)
        finally:
            self._done.set()
            self._beat.join()

    def gather(self, text: str) -> list[str]:
        """Give a text. Process 0 waits for all and gets them in order of process; the others get nothing, at once.

        Raises, in process 0, PeerFailedError or PeerTimeoutError once all have answered or fallen silent.
        """
        group = self.group
        if group.count == 1:
            return [text]
        self._post(f"in/{group.index}", {"ok": text})
        self._gave = True
        if group.index != 0:
            return []
        answers = [self._hear(f"in/{process}", process) for process in range(group.count)]
        # Only process 0 reads these; and all have answered this meeting, so all have left the one before.
        group.client.key_value_delete(f"{self.key}/in/")
        group.client.key_value_delete(f"{group.prefix}/{group.meetings - 1}/")
        return [_unwrap(answer) for answer in answers]

    def share(self, text: str) -> str:
        """Get process 0's text, once it has it; the others' own does not matter. Raises what process 0 raised."""
        if self.group.count == 1:
            return text
        if self.group.index == 0:
            self._post("out", {"ok": text})
            self._closed = True
            return text
        return _unwrap(self._hear("out", 0))

    def barrier(self) -> None:
        """Wait until all have come this far; nothing is given or got."""
        self.gather("")
        self.share("")

    def _post(self, name: str, message: dict[str, Any]) -> None:
        self.group.client.key_value_set(f"{self.key}/{name}", json.dumps(message))

    def _hear(self, name: str, process: int) -> dict[str, Any]:
        """The message that `process` posts under `name`; its silence as a message of failure."""
        group = self.group
        last_beat, heard = None, time.monotonic()
        while True:
            try:
                return json.loads(group.client.blocking_key_value_get(f"{self.key}/{name}", int(_POLL_SECONDS * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerFailedError(
                        f"JAX's coordination service failed while {self.what} (waiting for process {process}): {error}"
                    ) from error
            beat = self._beat_of(process)
            if beat != last_beat:
                last_beat, heard = beat, time.monotonic()
            elif time.monotonic() - heard > group.timeout_seconds:
                return {
                    "error": f"process {process} of {group.count} has been silent for {group.timeout_seconds:g} s while"
                    f" {self.what}. It may have died, be suspended, or not have made the same call: every process must."
                    " Options.timeout_seconds sets how long to wait.",
                    "kind": PeerTimeoutError.__name__,
                }

    def _beat_of(self, process: int) -> str | None:
        try:
            return self.group.client.key_value_try_get(f"{self.key}/beat/{process}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise PeerFailedError(f"JAX's coordination service failed while {self.what}: {error}") from error

    def _keep_beating(self) -> None:
        interval = min(5.0, self.group.timeout_seconds / 4)
        key = f"{self.key}/beat/{self.group.index}"
        for number in itertools.count():
            if self._done.wait(interval):
                return
            try:
                self.group.client.key_value_set(key, str(number), allow_overwrite=True)
            except Exception:  # the service is gone: whoever waits in this process reports it
                return


# What is about peers, or the same for all, keeps its kind on the way; any other is the failure of one process.
_KINDS = {kind.__name__: kind for kind in (PeerFailedError, PeerTimeoutError, PeersDisagreeError, PathNotSharedError)}


def _failure(process: int, error: BaseException) -> dict[str, Any]:
    if type(error).__name__ in _KINDS:
        return {"error": str(error), "kind": type(error).__name__}
    return {"error": f"process {process} failed with {type(error).__name__}: {error}", "kind": "PeerFailedError"}


def _unwrap(message: dict[str, Any]) -> str:
    if "error" in message:
        raise _KINDS[message["kind"]](message["error"])
    return message["ok"]
