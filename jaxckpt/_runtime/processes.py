"""Meetings of the processes of one job, over JAX's own coordination service.

    with Group.current(options, Call.of("save", path)) as group, group.meeting("saving") as meeting:
        heard = meeting.gather(mine)        # every process gives a text; process 0 gets them all
        if group.index == 0:
            decision = decide(heard)
        decision = meeting.share(decision)  # every process gets process 0's

Whatever one process raises inside the block, all raise, and the message names that process. One that is silent for
`timeout_seconds` is named too. One that works on is not silent: while in a meeting each process beats, and only a beat
that stops counts; one that has come and stops is given up after a minute, before JAX itself ends the job.

JAX's service lives in process 0. While that process is stopped, only calls that have a timeout of their own return:
such are all that a waiting process makes. What it posts, and its beats, are left to a thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from jax._src import distributed  # the only door to the coordination service; orbax and flax use it too

from jaxckpt._runtime.errors import (
    InputError,
    PathNotSharedError,
    PeerFailedError,
    PeersDisagreeError,
    PeerTimeoutError,
    listing,
)
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.stalls import Watch
from jaxckpt._runtime.threads import Caller, Task, start_thread

_POLL_SECONDS = 0.5
_STOPPED_SECONDS = 60.0  # JAX's service gives a process 100 s by default, and then aborts all the others


@dataclass(frozen=True, slots=True)
class Call:
    """A call that every process makes."""

    verb: str
    """"save", "restore" and so on."""

    where: str
    """The path or URL that it is about."""

    number: int = 0
    """How many such calls this process had made before."""

    @classmethod
    def of(cls, verb: str, path: object) -> Call:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else getattr(path, "url", type(path).__name__)
        return cls(verb, str(text).rstrip("/"))


class _Count:
    """The calls that this process has made since JAX connected it to the job."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.calls = itertools.count()
        self.like = dict[Call, int]()

    def counted(self, call: Call) -> tuple[int, Call]:
        number = self.like.get(call, 0)
        self.like[call] = number + 1
        return next(self.calls), replace(call, number=number)


_count = _Count(None)
_running: list[tuple[Caller, Group]] = []
"""The calls that some thread is in."""


@dataclass(slots=True)
class Group:
    """The processes of the job during one call, which all of them must make, in the same order.

        with Group.current(options, Call.of("save", path)) as group:  # the first thing that the function does
            …

    Made without starting a JAX backend: a job of one process never needs one. What is raised inside the block, the
    other processes hear of in the meeting that they are waiting in, so that the next call of all finds them in step.
    """

    index: int
    count: int
    timeout_seconds: float
    client: Any
    prefix: str
    call: Call
    watch: Watch
    """What this process is doing with storage; once that has stalled, the others are notified."""

    meetings: int = 0
    told: BaseException | None = None
    """The error that the other processes were notified of, if any."""

    check: Callable[[], None] = lambda: None
    """Raises what the call was cancelled for, if it was; asked while it waits for others."""

    passed_on: bool = False
    """Whether another thread carries the call on after the block, and notifies the others."""

    @classmethod
    def current(cls, options: object, call: Call) -> Group:
        """Count the call, whatever its arguments; the options are as the user gave them.

        Raises InputError if it is made from within another call.
        """
        global _count
        within = next((other for caller, other in _running.copy() if caller.is_here()), None)
        if within is not None:
            raise InputError(
                f"{call.verb} of {call.where!r} was called from inside {within.call.verb} of {within.call.where!r}, by"
                " a signal handler or a callback: set a flag there, and make the call once the other has returned"
            )
        timeout_seconds = (options if isinstance(options, Options) else Options()).timeout_seconds
        watch = Watch(timeout_seconds)
        state: Any = distributed.global_state
        if state.client is None:
            return cls(0, 1, timeout_seconds, None, "", call, watch)
        if _count.client is not state.client:
            # Calls before jax.distributed.initialize, or of an earlier job of this process, were made with others.
            _count = _Count(state.client)
        number, call = _count.counted(call)
        return cls(
            state.process_id, state.num_processes, timeout_seconds, state.client, f"jaxckpt/{number}", call, watch
        )

    def __enter__(self) -> Self:
        _running.append((Caller(depth=1), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also those that an interrupt kept from leaving.
        for entry in _running.copy():
            if entry[0].is_here() or not entry[0].present():
                with contextlib.suppress(ValueError):  # another thread has
                    _running.remove(entry)
        if error is not None and error is not self.told and not self.passed_on and self.count > 1:
            with contextlib.suppress(type(error)), self.meeting(f"calling {self.call.verb}"):
                raise error

    def meeting(self, what: str) -> Meeting:
        """The next meeting; `what` the processes are doing, for messages ("saving")."""
        self.meetings += 1
        return Meeting(self, what, f"{self.prefix}/{self.meetings}", first=self.meetings == 1)


@dataclass(slots=True)
class Meeting:
    """One round: all give, process 0 decides, all get. Every process must gather once, then share once."""

    group: Group
    what: str
    key: str
    first: bool = False
    """Whether it is the first of its call: then the processes also compare what they have called."""

    _gave: bool = False
    _closed: bool = False
    _lost: bool = False
    """Whether process 0 does not answer, so that nothing more can be told to it."""

    _posts: queue.SimpleQueue[tuple[str, str] | None] = field(default_factory=queue.SimpleQueue)
    _voice: Task[None] | None = None
    _attendee: Caller | None = None
    """The function that is in the meeting."""

    _mute: Exception | None = None
    """What stopped the voice."""

    def __enter__(self) -> Self:
        if self.group.count > 1:
            self._attendee = Caller(depth=1)
            self._voice = Task(self._speak)
            start_thread(self._voice.run, "jaxckpt-voice")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._voice is None or self._attendee is None:
            return
        if error is not None:
            self.group.told = error
            self._fail(error)
        self._attendee.leave()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._posts.put(None)
        if self._voice is not None and not self._lost:
            self._voice.wait(self.group.timeout_seconds)
        if error is None and self._mute is not None and self.group.index == 0:
            raise self._service_failed(self._mute) from self._mute  # the others never got what was shared

    def renew(self) -> None:
        """Become the next meeting, once all have gathered and shared: none is ever out of a meeting, nor silent."""
        if self._voice is None:
            return
        self._end(None)
        if not self._voice.done():
            raise self._service_failed(TimeoutError(f"no answer for {self.group.timeout_seconds:g} s"))
        following = self.group.meeting(self.what)
        self.key, self.first, self._posts = following.key, False, following._posts
        self._gave = self._closed = self._lost = False
        self._voice = Task(self._speak)
        start_thread(self._voice.run, "jaxckpt-voice")

    def _fail(self, error: BaseException) -> None:
        """Notify the others, as far as they have yet to hear of this process."""
        failure = _failure(self.group.index, error)
        if not self._gave:
            self._post("in", failure)
        if self.group.index == 0 and not self._closed:
            self._post("out", failure)

    def gather(self, text: str) -> list[str]:
        """Give a text. Process 0 waits for all and gets them in order of process; the others get nothing, at once.

        Raises, in process 0, PeerFailedError or PeerTimeoutError once all have answered or fallen silent.
        """
        group = self.group
        if group.count == 1:
            return [text]
        self._post("in", {"ok": text})
        self._gave = True
        if group.index != 0:
            return []
        texts = self._hear("in", range(group.count))
        # Only process 0 reads these; and all have answered this meeting, so all have left the one before.
        group.client.key_value_delete(f"{self.key}/in/")
        group.client.key_value_delete(f"{group.prefix}/{group.meetings - 1}/")
        return texts

    def share(self, text: str) -> str:
        """Get process 0's text, once it has it; the others' own does not matter. Raises what process 0 raised."""
        if self.group.count == 1:
            return text
        if self.group.index == 0:
            self._post("out", {"ok": text})
            self._closed = True
            return text
        return self._hear("out", [0])[0]

    def barrier(self) -> None:
        """Wait until all have come this far; nothing is given or got."""
        self.gather("")
        self.share("")

    def _post(self, folder: str, message: dict[str, Any]) -> None:
        if self.first:
            call = self.group.call
            message = {**message, "call": f"{call.verb} {call.where!r}", "number": call.number}
        self._posts.put((folder, json.dumps(message)))

    def _speak(self) -> None:
        """Post what there is to post, and beat between."""
        interval, beats = min(5.0, self.group.timeout_seconds / 4), 0
        client, index = self.group.client, self.group.index
        try:
            while True:
                try:
                    post = self._posts.get(timeout=interval)
                except queue.Empty:
                    gone = self._attendee is not None and not self._attendee.present()
                    # The attendee may hang, or an interrupt ended it before it could say so: nobody must wait for it.
                    error = KeyboardInterrupt("interrupted") if gone else self.group.watch.stalled()
                    if error is not None:
                        self._fail(error)
                        self._posts.put(None)
                        continue
                    post = "beat", str(beats := beats + 1)
                if post is None:
                    break
                client.key_value_set(f"{self.key}/{post[0]}/{index}", post[1], allow_overwrite=True)
            if beats:
                client.key_value_delete(f"{self.key}/beat/{index}")
        except Exception as error:
            self._mute = error

    def _hear(self, folder: str, processes: Iterable[int]) -> list[str]:
        """The texts that some processes post, in their order. Raises one error for all that failed or fell silent.

        All are waited for at the same time, each against its own last beat: many that are silent cost no more than one.
        """
        awaited = deque(processes)
        answers = dict[int, str]()
        watched = dict.fromkeys(awaited, _Watched(None, time.monotonic()))
        silent: list[int] = []
        while awaited:
            self.group.check()
            text = self._get(f"{folder}/{awaited[0]}")
            if text is not None:
                answers[awaited.popleft()] = text
                continue
            awaited.rotate(-1)  # the others may be there behind one that is not
            beats, now = self._so_far("beat"), time.monotonic()
            for process in awaited:
                if beats.get(process) != watched[process].beat:
                    watched[process] = _Watched(beats.get(process), now)
            if all(now - watched[process].since > self._patience(watched[process]) for process in awaited):
                found = self._so_far(folder)  # one may have answered and left, and so have stopped beating
                answers.update((process, found[process]) for process in awaited if process in found)
                silent = sorted(process for process in awaited if process not in found)
                break
        self._lost = 0 in silent
        messages: list[dict[str, Any]] = [json.loads(text) for _, text in sorted(answers.items())]
        failures = self._silences({process: watched[process] for process in silent})
        failures += self._different_calls(sorted(answers), messages) if folder == "in" else []
        failures += [message for message in messages if "error" in message]
        if failures:
            raise _raised(failures, self.what)
        return [message["ok"] for message in messages]

    def _patience(self, watched: _Watched) -> float:
        """Seconds without a beat after which a process is given up.

        One that has not come yet may be busy with something else, but one that has come, beats.
        """
        came = watched.beat is not None or self.group.meetings > 1
        return min(self.group.timeout_seconds, _STOPPED_SECONDS) if came else self.group.timeout_seconds

    def _silences(self, silent: dict[int, _Watched]) -> list[dict[str, Any]]:
        """Processes that were given up, as messages of failure: one for all that have been waited for as long."""
        by_seconds = dict[float, list[int]]()
        for process, watched in silent.items():
            by_seconds.setdefault(self._patience(watched), []).append(process)
        return [
            {
                "error": f"{process_names(processes)} of {self.group.count} silent for {seconds:g} s while {self.what}:"
                " dead, suspended, or without the same call, which every process must make. Options.timeout_seconds"
                " sets how long to wait.",
                "kind": PeerTimeoutError.__name__,
            }
            for seconds, processes in by_seconds.items()
        ]

    def _different_calls(self, processes: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The processes that made another call than others, as a message of failure."""
        by_call = dict[str, list[int]]()
        numbers = dict[str, int]()
        for process, message in zip(processes, messages, strict=True):
            if "call" in message and "ok" in message:
                by_call.setdefault(message["call"], []).append(process)
                numbers.setdefault(message["call"], message["number"])
        if len(by_call) < 2:
            return []
        made = "; ".join(
            f"{process_names(made)}: {call}, for the {_ordinal(numbers[call] + 1)} time"
            for call, made in by_call.items()
        )
        return [
            {
                "error": f"the processes made different calls of jaxckpt. {made}. Every process must make the same"
                " calls in the same order, with the same paths: one has missed a call, or has made one more",
                "kind": PeersDisagreeError.__name__,
            }
        ]

    def _get(self, name: str) -> str | None:
        """The text posted under a name, waited for a moment; None where there is none."""
        if self._mute is not None:
            raise self._service_failed(self._mute) from self._mute
        milliseconds = int(1000 * min(_POLL_SECONDS, self.group.timeout_seconds / 4))
        try:
            return self.group.client.blocking_key_value_get(f"{self.key}/{name}", milliseconds)
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._service_failed(error) from error

    def _so_far(self, folder: str) -> dict[int, str]:
        """What is posted in a folder by now, by process; only process 0 asks for all of them."""
        if self.group.index != 0:
            text = self._get(f"{folder}/0")
            return {} if text is None else {0: text}
        try:
            found = self.group.client.key_value_dir_get(f"{self.key}/{folder}/")
        except Exception as error:
            raise self._service_failed(error) from error
        return {int(key.rpartition("/")[2]): text for key, text in found}

    def _service_failed(self, error: Exception) -> PeerFailedError:
        self._lost = True
        return PeerFailedError(
            f"JAX's coordination service failed while {self.what}; process 0, which runs it, may have died: {error}"
        )


@dataclass(frozen=True, slots=True)
class _Watched:
    """A process that is waited for: its last beat, and since when there was no newer one."""

    beat: str | None
    since: float


# What is about peers, or the same for all, keeps its kind on the way; any other is the failure of one process.
_KINDS = {kind.__name__: kind for kind in (PeerFailedError, PeerTimeoutError, PeersDisagreeError, PathNotSharedError)}


def _failure(process: int, error: BaseException) -> dict[str, Any]:
    if type(error).__name__ in _KINDS:
        return {"error": str(error), "kind": type(error).__name__}
    return {"error": f"process {process} failed with {type(error).__name__}: {error}", "kind": "PeerFailedError"}


def _raised(failures: list[dict[str, Any]], what: str) -> Exception:
    """One error for all failures, of the kind of the first."""
    errors = list(dict.fromkeys(failure["error"] for failure in failures))
    several = f"{len(errors)} failures while {what}:\n{listing(errors)}"
    return _KINDS[failures[0]["kind"]](errors[0] if len(errors) == 1 else several)


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def process_names(processes: Sequence[int]) -> str:
    """Processes for a message: "process 1", "processes 1, 2"."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = ", ".join(map(str, processes[:20])) + (", …" if len(processes) > 20 else "")
    return f"processes {shown}"
