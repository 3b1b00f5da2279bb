"""Meetings of the processes of one job, over JAX's own coordination service.

A meeting has one shape: every process contributes a text, process 0 hears them all and decides, all get the decision.
Where one fails, all raise, and the message names it. One that is silent for `timeout_seconds` is named too; one that
works on is not: while in a meeting each process beats, and only a beat that stops counts as silence.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jax._src import distributed  # the only door to the coordination service; orbax and flax use it too

from jaxckpt._errors import JaxckptError, PeerFailedError, PeerTimeoutError

_POLL_SECONDS = 0.5
_operations = itertools.count()


def process_index() -> int:
    """This process's number, without starting a JAX backend."""
    return distributed.global_state.process_id or 0 if distributed.global_state.client else 0


def process_count() -> int:
    """How many processes the job has, without starting a JAX backend."""
    return distributed.global_state.num_processes or 1 if distributed.global_state.client else 1


@dataclass(slots=True)
class Group:
    """The processes of the job during one operation, which all of them must call, in the same order."""

    index: int
    count: int
    timeout_seconds: float
    _client: Any
    _prefix: str
    _meetings: int = 0

    @classmethod
    def current(cls, timeout_seconds: float) -> Group:
        return cls(
            process_index(),
            process_count(),
            timeout_seconds,
            distributed.global_state.client,
            f"jaxckpt/{next(_operations)}",
        )

    def meet(
        self,
        phase: str,
        contribute: Callable[[], str],
        decide: Callable[[list[str]], str] = lambda contributions: "",
    ) -> str:
        """Run `contribute` here and `decide` in process 0 on what all contributed; return what it decided.

        Raises the error of this process's own `contribute` or `decide`; for another's, PeerFailedError; where one is
        silent, PeerTimeoutError.
        """
        if self.count == 1:
            return decide([contribute()])
        self._meetings += 1
        key = f"{self._prefix}/{self._meetings}"
        with self._beating(key):
            try:
                answer = {"ok": contribute()}
            except BaseException as error:
                self._post(f"{key}/in/{self.index}", _failure(self.index, error))
                if self.index == 0:
                    self._post(f"{key}/out", _failure(self.index, error))
                raise
            self._post(f"{key}/in/{self.index}", answer)
            if self.index == 0:
                return self._preside(phase, key, decide)
            return _unwrap(self._await(phase, f"{key}/out", key, 0))

    def _preside(self, phase: str, key: str, decide: Callable[[list[str]], str]) -> str:
        try:
            answers = [
                _unwrap(self._await(phase, f"{key}/in/{process}", key, process)) for process in range(self.count)
            ]
            decision = decide(answers)
        except BaseException as error:
            self._post(f"{key}/out", _failure(0, error))
            raise
        self._post(f"{key}/out", {"ok": decision})
        # All have answered this meeting, so all have left the one before.
        self._client.key_value_delete(f"{self._prefix}/{self._meetings - 1}/")
        return decision

    def _post(self, key: str, message: dict[str, Any]) -> None:
        self._client.key_value_set(key, json.dumps(message))

    def _await(self, phase: str, key: str, meeting: str, process: int) -> dict[str, Any]:
        """The message under `key`, which `process` is to post."""
        last_beat, heard = None, time.monotonic()
        while True:
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(_POLL_SECONDS * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise PeerFailedError(
                        f"the coordination service failed while {phase}, waiting for process {process}: {error}"
                    ) from error
            beat = self._beat_of(meeting, process)
            if beat != last_beat:
                last_beat, heard = beat, time.monotonic()
            elif time.monotonic() - heard > self.timeout_seconds:
                raise PeerTimeoutError(
                    f"process {process} of {self.count} has been silent for {self.timeout_seconds:g} s while {phase}."
                    " It may have died, be suspended, or not have made the same call; every process must."
                    " Options.timeout_seconds sets how long to wait."
                )

    def _beat_of(self, meeting: str, process: int) -> str | None:
        try:
            return self._client.key_value_try_get(f"{meeting}/beat/{process}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise PeerFailedError(f"the coordination service failed: {error}") from error

    @contextmanager
    def _beating(self, meeting: str) -> Iterator[None]:
        done = threading.Event()
        interval = min(5.0, self.timeout_seconds / 4)

        def beat() -> None:
            for number in itertools.count():
                if done.wait(interval):
                    return
                try:
                    self._client.key_value_set(f"{meeting}/beat/{self.index}", str(number), allow_overwrite=True)
                except Exception:  # the service is gone; the waiting thread reports it
                    return

        thread = threading.Thread(target=beat, daemon=True, name="jaxckpt-beat")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _failure(process: int, error: BaseException) -> dict[str, Any]:
    # A failure that is already another's keeps that one's name.
    if isinstance(error, (PeerFailedError, PeerTimeoutError)):
        return {"error": str(error), "timeout": isinstance(error, PeerTimeoutError)}
    kind = type(error).__name__
    return {
        "error": f"process {process} failed with {kind}: {error}"
        if isinstance(error, JaxckptError) or str(error)
        else f"process {process} failed with {kind}"
    }


def _unwrap(message: dict[str, Any]) -> str:
    if "error" in message:
        raise (PeerTimeoutError if message.get("timeout") else PeerFailedError)(message["error"])
    return message["ok"]
