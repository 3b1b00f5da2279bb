"""Rendezvous of the processes of one job, over JAX's own coordination service.

    with call.rendezvous("saving") as rendezvous:
        texts = rendezvous.gather(mine)             # every process sends a text; process 0 gets all of them
        if call.index == 0:
            decision = decide(texts)
        decision = rendezvous.broadcast(decision)   # every process gets the decision of process 0

In a job of one process, nothing is sent: each method returns what it is given.

If one process raises inside the block, all raise, and the message names that process. The message also names a process
that does not respond for `timeout_seconds`. During a rendezvous each process sends heartbeats, so a slow process counts
as responding. A process that joins and then stops counts as dead after one minute, before JAX itself ends the job.

If a process dies while JAX moves data between them, JAX raises an error in some of the others, which does not name it,
and never returns in the rest. The former meet once more before they raise, and name those that do not come. In the
latter, the thread that posts heartbeats ends the wait once process 0 has missed those of another process.

JAX's service runs in one process, usually process 0. While that process is stopped, only calls with a timeout return,
so a waiting process makes no other calls. A separate thread posts its texts and heartbeats.

Process 0 posts a sequence: its heartbeats, and finally the text that it shares. The others wait for the next item, so
their requests never stay in the service for long. The texts of the others are grouped in blocks, and process 0 gets
each block in one request.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.progress import Moved
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import POLL_SECONDS, Task, awake_seconds, start_thread
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt.errors import (
    CorruptError,
    NotACheckpointError,
    PathNotSharedError,
    PeerError,
    PeerFailedError,
    PeersDisagreeError,
    PeerTimeoutError,
    StorageError,
    show_lines,
)

if TYPE_CHECKING:
    from jaxckpt._job.call import Call


# Errors about peers, and errors that are equal in all processes, keep their type. Others become PeerFailedError.
_KINDS: dict[str, type[PeerError]] = {
    kind.__name__: kind for kind in (PeerFailedError, PeerTimeoutError, PeersDisagreeError, PathNotSharedError)
}


def cause_of(error: BaseException) -> str:
    """What has failed, in this process or in others: "storage", "data" (what was stored), or "" for anything else."""
    if isinstance(error, StorageError):
        return "storage"
    if isinstance(error, CorruptError | NotACheckpointError):
        return "data"
    return error.cause if isinstance(error, PeerError) else ""


def is_unexplained(error: BaseException | None) -> TypeGuard[PeerError]:
    """Whether JAX could not move data between processes, and this process does not know because of which."""
    return isinstance(error, PeerError) and error.in_exchange


def combined_error(failures: list[dict[str, Any]], what: str) -> PeerError:
    """One error for all failures, of the type of the first."""
    errors = list(dict.fromkeys(failure["error"] for failure in failures))
    several = f"{len(errors)} failures while {what}:\n{show_lines(errors)}"
    combined = _KINDS[failures[0]["kind"]](errors[0] if len(errors) == 1 else several)
    combined.repeats_earlier = all(failure.get("repeats_earlier", False) for failure in failures)
    combined.silent = tuple(process for failure in failures for process in failure.get("silent", ()))
    causes = {failure.get("cause", "") for failure in failures}
    combined.cause = "" if "" in causes else causes.pop() if len(causes) == 1 else "data"
    return combined


# The rendezvous -------------------------------------------------------------------------------------------


T = TypeVar("T")

_STOPPED_SECONDS = 60.0  # JAX's service gives a process 100 s by default, and then aborts all the others

_REQUESTS_PER_SECOND = 2000
"""The most requests per second from all waiting processes, and heartbeats: the service handles a few thousand."""

_LONGEST_POLL_SECONDS = 30.0
"""A request whose key is not posted in time stays in the service and takes 14 KB there until the key is posted (jaxlib
0.6 to 0.10). 16,384 processes that ask every 0.5 s would cost process 0 460 MB for each second of a save."""

_IN_EXCHANGE = '"in_exchange": true'
"""Part of the message of a process in which an exchange has failed."""

_EXCHANGE_SECONDS = 60.0
"""For how long an exchange may still run in other processes after it has failed in one (gloo: 30 s)."""

_BLOCK = 64
"""Number of processes whose texts process 0 gets in one request."""


@dataclass(slots=True)
class Rendezvous:
    """One round: all send a text, process 0 decides, all receive its text. Every process must call `gather` once, then
    `broadcast` once."""

    call: Call
    what: str
    key: str
    is_first: bool = False
    """Whether this is the first rendezvous of its call, in which the processes also compare their calls."""

    after_caller: bool = False
    """Whether processes may come late, because they did a part of the call in the caller's thread before."""

    _has_sent: bool = False
    _has_broadcast: bool = False
    _is_failed: bool = False
    """Whether process 0 has sent an error to all processes."""

    _ends: float = math.inf
    """After an exchange has failed: when to stop waiting for the others."""

    _exchange_failed_at: float = math.inf
    """In process 0, while its exchange runs: when another process was first seen to have failed in it."""

    _n_posted: int = 0
    """Number of items that process 0 has posted for the others: heartbeats, and its shared text."""

    _is_service_lost: bool = False
    """Whether process 0 or the service has stopped responding. Posts may then never end."""

    _posts: queue.SimpleQueue[tuple[str, str] | None] = field(default_factory=queue.SimpleQueue)
    _poster: Task[None] | None = None
    _post_error: Exception | None = None
    """The error that stopped the thread that posts."""

    _own_report: Sequence[str] = ()
    """The earlier rendezvous that this process has reported to have left. Process 0 counts it if it shares a text."""

    _reports: Sequence[Sequence[str]] = ()
    """In process 0: the reports of all processes."""

    def __enter__(self) -> Self:
        if self.call.count > 1:
            assert lanes.is_watched(), f"{self.what}: an interrupt must not end a rendezvous"
            self._start_posting()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._poster is None:
            return
        original = error
        if is_unexplained(error) and not self._has_sent:
            error = self.call.watchdog.stall_error() or self._explain(error)  # the others may have left because of it
        if self._is_failed or (error is not None and self.call.index == 0 and not self._has_broadcast):
            self.call.departures.add(*self._own_report)  # process 0 has not counted it
        if error is not None:
            self.call.notified_error = error
            self._notify(error)
        try:
            self._stop_posting(error)
        finally:
            self.call.departures.add(self.key)
        if error is not None and error is not original:
            raise error from original

    def _explain(self, error: PeerError) -> PeerError:
        """After an exchange has failed in this process, and so in all: an error that names those that have stopped, or
        the failures of all."""
        self._post("in", self._failure(error))
        self._has_sent = True
        self._ends = awake_seconds() + self._timeout_seconds(has_joined=True) + _EXCHANGE_SECONDS
        try:
            with self.call.cancellation.paused():
                self._gather_messages() if self.call.index == 0 else self._await_broadcast()
        except PeerError as reason:
            return reason
        except TimeoutError:  # the others respond, and their exchange has not ended
            return error
        return error

    def _start_posting(self) -> None:
        self._poster = Task(self._run_poster)
        start_thread(self._poster.run, "jaxckpt-heartbeats")

    def _stop_posting(self, error: BaseException | None) -> None:
        self._posts.put(None)
        if self._poster is not None and not self._is_service_lost:
            self._poster.wait(self.call.timeout_seconds)
        if error is None and self._post_error is not None and self.call.index == 0:
            # The others never received the shared text.
            raise self._service_failed(self._post_error) from self._post_error

    def start_next(self) -> None:
        """Become the next rendezvous, after all have gathered and shared, without a gap in the heartbeats."""
        if self._poster is None:
            return
        self._stop_posting(None)
        if not self._poster.done():
            raise self._service_failed(TimeoutError(f"no answer for {self.call.timeout_seconds:g} s"))
        following = self.call.rendezvous(self.what)
        following._post_error = self._post_error
        for entry in fields(self):
            setattr(self, entry.name, getattr(following, entry.name))
        self._start_posting()

    def _notify(self, error: BaseException) -> None:
        """Notify the processes that wait for this one, in this rendezvous or in the next."""
        if self._has_broadcast if self.call.index == 0 else self._has_sent:
            if self._is_failed or self._is_service_lost:
                return  # all processes raise
            with contextlib.suppress(Exception):
                self.start_next()
        self._post_failure(error)

    def _post_failure(self, error: BaseException) -> None:
        """Notify the processes that still wait for this one in this rendezvous."""
        failure = self._failure(error)
        if not self._has_sent:
            self._post("in", failure)
        if self.call.index == 0 and not self._has_broadcast:
            self._post("out", failure)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        """The message of this process's error."""
        text, kind = str(error), type(error).__name__
        if kind not in _KINDS:
            text, kind = f"process {self.call.index} failed with {kind}: {error}", PeerFailedError.__name__
        return {
            "error": text,
            "kind": kind,
            "repeats_earlier": self.call.repeats_earlier or (isinstance(error, PeerError) and error.repeats_earlier),
            "cause": "" if self.call.watchdog.stall_error() else cause_of(error),
            "silent": error.silent if isinstance(error, PeerError) else (),
            "in_exchange": is_unexplained(error),
        }

    def gather(self, text: str) -> list[str]:
        """Send a text. Process 0 waits for all texts and gets them in process order. The others return immediately.

        In process 0, raises PeerFailedError or PeerTimeoutError after all have answered or timed out.
        """
        call = self.call
        if call.count == 1:
            return [text]
        self._own_report = left = call.departures.report()
        self._post("in", {"ok": text, "left": left} if left else {"ok": text})
        self._has_sent = True
        if call.index != 0:
            return []
        messages = self._gather_messages()
        self._reports = [message.get("left", ()) for message in messages]
        self._delete(f"{self.key}/in")  # only process 0 reads these
        if call.n_rendezvous > 1:  # all have answered this rendezvous, so all have left the previous one of this call
            self._delete(f"{call.prefix}/{call.n_rendezvous - 1}")
        return [message["ok"] for message in messages]

    def broadcast(self, text: str) -> str:
        """Wait for the text of process 0; the texts of other processes are ignored. Raises if process 0 raised."""
        if self.call.count == 1:
            return text
        if self.call.index == 0:
            self._post("out", {"ok": text})
            self._has_broadcast = True
            with contextlib.suppress(PeerError):  # the text is posted, and the others receive it
                for key in self.call.departures.left_by_all(self._reports, self.call.count):
                    self._delete(key)
            return text
        return self._await_broadcast()

    def _delete(self, key: str) -> None:
        """Delete all that was posted below a key. Only for process 0."""
        self._request(functools.partial(self.call.client.key_value_delete, f"{key}/"))

    @contextlib.contextmanager
    def joined_by_all(self) -> Generator[None]:
        """A block before `gather` in which all processes write. If process 0 fails, it raises its error only after the
        others have left the block too, so that it does not delete data that they still write."""
        try:
            yield
        except BaseException as error:
            if self.call.index == 0 and not is_unexplained(error):  # all meet below in any case
                with contextlib.suppress(PeerError), self.call.cancellation.paused():
                    self.gather("")
            raise

    def barrier(self) -> None:
        """Wait until all processes have reached this point. No text is exchanged."""
        self.gather("")
        self.broadcast("")

    def _post(self, folder: str, message: dict[str, Any]) -> None:
        if self.is_first:
            call = self.call
            message = {**message, "call": f"{call.verb} {call.where!r}", "number": call.number}
        self._posts.put((folder, json.dumps(message)))

    def _run_poster(self) -> None:
        """Post the texts, and heartbeats in between."""
        call, beats, silence = self.call, 0, None
        # In an exchange, each heartbeat comes with another request.
        interval = min(max(5.0, 2 * call.count / _REQUESTS_PER_SECOND), _STOPPED_SECONDS / 4, call.timeout_seconds / 4)
        try:
            while True:
                try:
                    post = self._next_post(interval)
                except queue.Empty:
                    silence = self._watch_exchange(silence)
                    if error := call.watchdog.stall_error():  # the others must not wait for a lane that hangs
                        self._post_failure(error)
                        self._posts.put(None)
                        continue
                    post = "beat", heartbeat(beats := beats + 1, call.watchdog)
                if post is None:
                    break
                if post[0] == "beat" or call.watchdog.is_exchanging:  # it never ends if process 0 is suspended
                    self._answer(functools.partial(self._set, *post), in_exchange=True)
                else:
                    self._set(*post)
                if post[0] == "beat" and call.index == 0 and call.runs_service:
                    self._note_others()
            if beats and call.index != 0:
                call.client.key_value_delete(self._key_of("beat", call.index))
        except Exception as error:
            self._post_error = error
            if call.watchdog.is_exchanging and call.index != 0:
                reason = self._service_failed(error)
                if isinstance(error.__cause__ or error, TimeoutError):
                    seconds = self._timeout_seconds(has_joined=True)
                    reason = combined_error(self._timeout_failures({0: seconds}, {0: None}), self.what)
                call.watchdog.abandon(reason)

    def _next_post(self, seconds: float) -> tuple[str, str] | None:
        """The next text to post. Raises queue.Empty after so many seconds; meanwhile, `awake_seconds` keeps going."""
        until = time.monotonic() + seconds  # by this clock, because the others wait for a heartbeat
        while True:
            left = until - time.monotonic()
            try:
                return self._posts.get(timeout=max(0.0, min(POLL_SECONDS, left)))
            except queue.Empty:
                awake_seconds()
                if left <= POLL_SECONDS:
                    raise

    def _watch_exchange(self, silence: _Silence | None) -> _Silence | None:
        """While the lane is in an exchange, end the wait for it if another process has died or has long failed. For the
        thread that posts, which passes what it has observed so far. Process 0 decides for all."""
        call = self.call
        if not call.watchdog.is_exchanging:
            return None
        if call.index != 0:
            posted = map(json.loads, self._read_posted("out").values())
            failures = [message for message in posted if "error" in message]
        else:
            silence = silence or _Silence(range(1, call.count))
            silence.note(self._read_posted("beat"))
            seconds = self._timeout_seconds(has_joined=True)
            silent = dict.fromkeys(silence.longer_than(dict.fromkeys(range(1, call.count), seconds)), seconds)
            failures = self._timeout_failures(silent, silence.beats)
            failed = [message for message in map(json.loads, self._read_posted("in").values()) if "error" in message]
            if failed:
                self._exchange_failed_at = min(self._exchange_failed_at, awake_seconds())
            if not failures and awake_seconds() > self._exchange_failed_at + _EXCHANGE_SECONDS:
                failures = failed
        if failures:
            call.watchdog.abandon(combined_error(failures, self.what))
        return silence

    def _note_others(self) -> None:
        """While this process, process 0, is busy itself, its display shows the job. For the thread that posts."""
        work = self.call.watchdog.work
        if work is not None and work.is_shown:
            work.note_others(filter(None, map(moved, self._read_posted("beat").values())))

    def _set(self, folder: str, text: str) -> None:
        if self.call.index == 0 and folder != "in":
            self._n_posted += 1
            key = f"{self.key}/out/{self._n_posted}"
        else:
            key = self._key_of(folder, self.call.index)
        self.call.client.key_value_set(key, text, allow_overwrite=True)

    def _key_of(self, folder: str, process: int) -> str:
        """The key under which a process posts in a folder."""
        return f"{self.key}/{folder}/{process // _BLOCK}/{process}"

    def _await_broadcast(self) -> str:
        """The text that process 0 shares. Raises if process 0 raised or stopped responding."""
        number, since, has_joined = 1, awake_seconds(), not (self.is_first or self.after_caller)
        slow, beat = SlowProcesses(self.what, self.call.count), None
        while True:
            self.call.cancellation.check()
            if self.call.index == 1:  # process 0 does not log that it is slow itself
                slow.log({0: beat})
            waited, timeout_seconds = awake_seconds() - since, self._timeout_seconds(has_joined)
            # The more processes wait, the less often each asks. All receive a posted text immediately.
            most = min(self.call.count / 16, _LONGEST_POLL_SECONDS, waited, timeout_seconds - waited)
            text = self._get(f"{self.key}/out/{number}", max(most, self.call.count / _REQUESTS_PER_SECOND))
            if text is None:
                if awake_seconds() - since > timeout_seconds:
                    self._is_service_lost = True
                    raise combined_error(self._timeout_failures({0: timeout_seconds}, {0: beat}), self.what)
                if awake_seconds() > self._ends:
                    raise TimeoutError
                continue
            message = json.loads(text)
            if "error" in message:
                self._is_failed = True
                if self.call.index in message.get("silent", ()):  # it was suspended, and runs again
                    message["error"] += (
                        f" This is process {self.call.index}: it was suspended or could not run for that long, and the"
                        " others have given up this call."
                    )
                raise combined_error([message], self.what)
            if "ok" in message:
                return message["ok"]
            number, since, has_joined, beat = number + 1, awake_seconds(), True, text

    def _gather_messages(self) -> list[dict[str, Any]]:
        """The messages of the processes, in process order. Raises one error for all that failed or stopped responding.

        The timeouts run concurrently, from each process's last heartbeat: many dead processes take no longer than one.
        """
        everyone = range(self.call.count)
        blocks = deque(set(everyone[start : start + _BLOCK]) for start in everyone[::_BLOCK])
        answers = dict[int, str]()
        silence = _Silence(everyone)
        timed_out: dict[int, float] = {}
        slow = SlowProcesses(self.what, self.call.count)
        while blocks:
            self.call.cancellation.check()
            block = blocks[0]
            answers |= self._read_posted(f"in/{min(block) // _BLOCK}")
            block.difference_update(answers)
            while block and (text := self._get(self._key_of("in", min(block)))) is not None:
                answers[min(block)] = text
                block.remove(min(block))
            if not block:
                blocks.popleft()
                continue
            blocks.rotate(-1)  # other blocks may be complete while the first one is not
            awaited = list(itertools.chain.from_iterable(blocks))
            beats = self._read_posted("beat")
            silence.note(beats)
            slow.log({process: silence.beats[process] for process in sorted(awaited)})
            if (work := self.call.watchdog.work) is not None and work.is_shown:
                work.note_others(filter(None, map(moved, beats.values())))
                work.add(0)
            timeouts = {process: self._timeout_seconds(self._has_joined(silence.beats[process])) for process in awaited}
            silent = silence.longer_than(timeouts)
            # After a failed exchange, the processes in which it still runs wait for the outcome, as the failed ones do.
            is_over = silent and (self._ends < math.inf or any(_IN_EXCHANGE in text for text in answers.values()))
            if is_over or len(silent) == len(awaited) or awake_seconds() > self._ends:
                for block in blocks:  # a process may have posted its text, left, and deleted its heartbeat
                    answers |= self._read_posted(f"in/{min(block) // _BLOCK}")
                timed_out = {process: timeouts[process] for process in sorted(silent) if process not in answers}
                break
        self._is_service_lost = 0 in timed_out
        messages: list[dict[str, Any]] = [json.loads(text) for _, text in sorted(answers.items())]
        failures = self._timeout_failures(timed_out, silence.beats) + self._mismatch_failures(sorted(answers), messages)
        failed = [message for message in messages if "error" in message]
        failures += [message for message in failed if not message["in_exchange"]]
        if failures := failures or failed:
            raise combined_error(failures, self.what)
        return messages

    def _has_joined(self, last_beat: str | None) -> bool:
        """Whether a process has joined this call."""
        return last_beat is not None or not (self.is_first or self.after_caller) or self._ends < math.inf

    def _timeout_seconds(self, has_joined: bool) -> float:
        """Seconds without a heartbeat after which a process counts as dead.

        A process that has not joined yet may be busy with something else. A process that has joined sends heartbeats.
        After a failed exchange, the call ends in any case, and some time has passed: two heartbeats are then enough.
        """
        seconds = min(self.call.timeout_seconds, _STOPPED_SECONDS) if has_joined else self.call.timeout_seconds
        return seconds if self._ends == math.inf else seconds / 2

    def _timeout_failures(self, silent: dict[int, float], beats: Mapping[int, str | None]) -> list[dict[str, Any]]:
        """Failure messages for processes that did not respond, one for all that were silent for the same time. `beats`
        are their last heartbeats."""
        by_seconds = dict[float, list[int]]()
        for process, seconds in silent.items():
            by_seconds.setdefault(seconds, []).append(process)
        return [
            {
                "error": f"{process_names(processes)} of {self.call.count} did not respond for {seconds:g} s while"
                f" {self.what}: dead, suspended, or not making the same call, which every process must make."
                " Options.timeout_seconds sets how long to wait."
                + last_reported({process: beats[process] for process in processes}),
                "kind": PeerTimeoutError.__name__,
                "silent": processes,
            }
            for seconds, processes in by_seconds.items()
        ]

    def _mismatch_failures(self, processes: Sequence[int], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The failure message that lists the processes whose calls differ."""
        by_call = dict[str, list[int]]()
        numbers = dict[str, int]()
        for process, message in zip(processes, messages, strict=True):
            if "call" in message and "ok" in message:
                by_call.setdefault(message["call"], []).append(process)
                numbers.setdefault(message["call"], message["number"])
        if len(by_call) < 2:
            return []
        made = "; ".join(
            f"{process_names(callers)}: {call}, for the {_ordinal(numbers[call] + 1)} time"
            for call, callers in by_call.items()
        )
        return [
            {
                "error": f"the processes made different jaxckpt calls. {made}. Every process must make the same"
                " calls in the same order, with the same paths: a process may have skipped a call or made an extra one",
                "kind": PeersDisagreeError.__name__,
            }
        ]

    def _get(self, key: str, seconds: float = 0.0) -> str | None:
        """The text posted under a key. Waits for this many seconds, at least a moment; None if nothing is posted."""
        if self._post_error is not None:
            raise self._service_failed(self._post_error) from self._post_error
        milliseconds = int(1000 * min(max(seconds, POLL_SECONDS), self.call.timeout_seconds / 4))
        waiting = Task(functools.partial(self.call.client.blocking_key_value_get, key, milliseconds))
        if milliseconds <= 1000 * POLL_SECONDS:
            waiting.run()
        else:
            start_thread(waiting.run, "jaxckpt-request")
        while not waiting.wait(POLL_SECONDS):
            self.call.cancellation.check()
        try:
            return waiting.result()
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise self._service_failed(error) from error

    def _read_posted(self, folder: str) -> dict[int, str]:
        """The texts posted in a folder so far, by process. Only for process 0."""
        get: Callable[[str], list[tuple[str, str]]] = self.call.client.key_value_dir_get
        posted = self._request(functools.partial(get, f"{self.key}/{folder}/"))
        return {int(key.rpartition("/")[2]): text for key, text in posted}

    def _request(self, request: Callable[[], T]) -> T:
        """The answer to a request that has no timeout of its own. Raises PeerFailedError."""
        try:
            return self._answer(request)
        except Exception as error:
            raise self._service_failed(error) from error

    def _answer(self, request: Callable[[], T], *, in_exchange: bool = False) -> T:
        """The answer to a request of the thread that posts, or of process 0. With `in_exchange`, it times out only
        while the lane is in an exchange, which may begin during the request."""
        if self.call.runs_service:
            return request()
        task, begun = Task(request), awake_seconds()  # the process that runs the service may be stopped
        try:
            start_thread(task.run, "jaxckpt-request")
        except RuntimeError:  # Python 3.12 starts none during its shutdown
            task.run()
        while not task.wait(POLL_SECONDS):
            is_late = awake_seconds() - begun > self._timeout_seconds(has_joined=True)
            if is_late and (self.call.watchdog.is_exchanging or not in_exchange):
                raise TimeoutError
        return task.result()

    def _service_failed(self, error: Exception) -> PeerFailedError:
        self._is_service_lost = True
        return PeerFailedError(
            f"JAX's coordination service failed while {self.what}; process 0, which usually runs it, may have"
            f" died: {str(error) or type(error).__name__}"
        )


class _Silence:
    """For how long processes have sent no heartbeat, as observed from now on."""

    def __init__(self, processes: Iterable[int]) -> None:
        self.beats = dict[int, str | None].fromkeys(processes)
        """The last heartbeat of each process."""

        self._since = dict.fromkeys(self.beats, awake_seconds())

    def note(self, beats: Mapping[int, str]) -> None:
        """Note the last heartbeats."""
        now = awake_seconds()
        for process, last in self.beats.items():
            if (beat := beats.get(process)) != last:
                self.beats[process], self._since[process] = beat, now

    def longer_than(self, seconds: Mapping[int, float]) -> list[int]:
        """The processes that have been silent for longer than this number of seconds, of those that have one."""
        now = awake_seconds()
        return [process for process, limit in seconds.items() if now - self._since[process] > limit]


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


# Slow processes -------------------------------------------------------------------------------------------
# Which processes are behind, and how far each of them is: in log lines, errors and the display of process 0.
# Each heartbeat says what its process has moved. No decision is made from that.

_SLOW_SECONDS = 10.0
"""How long a process waits until it logs for which processes; then it logs again each time it has waited twice as
long, from `_VERY_SLOW_SECONDS` on as a warning."""

_VERY_SLOW_SECONDS = 40.0


def heartbeat(number: int, watchdog: Watchdog) -> str:
    """The text of a heartbeat."""
    work = watchdog.work
    return json.dumps({"beat": number, "moved": work and work.moved})


def moved(beat: str | None) -> Moved | None:
    """What a process had moved at its last heartbeat; None if it has not reported that."""
    reported = json.loads(beat).get("moved") if beat else None
    return Moved(*reported) if reported else None


class SlowProcesses:
    """Logs for which processes this one waits, and how far they are."""

    def __init__(self, what: str, count: int) -> None:
        self._what = what
        self._count = count
        self._begun = awake_seconds()
        self._next = _SLOW_SECONDS

    def log(self, beats: Mapping[int, str | None]) -> None:
        """Log these processes, each with its last heartbeat, if it is time."""
        waited = awake_seconds() - self._begun
        if waited < self._next:
            return
        self._next = 2 * waited
        _log.log(
            logging.INFO if waited < _VERY_SLOW_SECONDS else logging.WARNING,
            "waited %.0f s for %s of %d while %s%s",
            waited,
            process_names([*beats]),
            self._count,
            self._what,
            _table(beats),
        )


def last_reported(beats: Mapping[int, str | None]) -> str:
    """For an error: how far the processes were at these heartbeats."""
    table = _table(beats)
    return f" They last reported{table}" if table else ""


def _table(beats: Mapping[int, str | None]) -> str:
    """How far processes are, as lines; empty if none is known."""
    known = {process: has for process, beat in beats.items() if (has := moved(beat))}
    return f":\n{show_lines(f'process {process}: {has}' for process, has in known.items())}" if known else ""


def process_names(processes: Sequence[int]) -> str:
    """Processes for a message: "process 1", "processes 1, 2"."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = ", ".join(map(str, processes[:20])) + (", …" if len(processes) > 20 else "")
    return f"processes {shown}"
