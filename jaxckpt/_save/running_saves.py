"""The running saves, and what becomes of them at the next save, at exit, and in a fork.

A lane runs a save from its first lock to its last, even if the caller waits for it. An interrupt of the main thread can
therefore not leave the save half done.
"""

from __future__ import annotations

import contextlib
import numbers
import os
import reprlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxckpt._keywords import explain_names
from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.control import RateLimiter
from jaxckpt._pipeline.lanes import set_exit_status
from jaxckpt._pipeline.progress import Progress
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import POLL_SECONDS, Latch, is_shutting_down
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._pipeline.workers import replace_workers
from jaxckpt._store.store import register_running_writes
from jaxckpt.errors import InputError, PeerError

if TYPE_CHECKING:
    from jaxckpt._job.call import Call
    from jaxckpt._store.store import Store


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a save wrote.

    Attributes:
        path: The path or URL of the checkpoint.
        save_id: Unique id of the save.
        leaves: Leaves of the tree.
        total_bytes: Bytes of array data in the checkpoint, each replica counted once.
        process_bytes: Bytes of array data in the objects of each process.
        objects: Objects that hold the array data.
        files: Files of the checkpoint: the objects, a zarr.json for each stack, the state of each process if given,
            the manifest, and a copy of it.
        stored_bytes: Bytes of the objects, including checksums and indexes.
        reused_bytes: Bytes of the objects that are hard links to an earlier checkpoint and were not written; see
            `Options.reuse`.
        manifest_sha256: SHA-256 of manifest.json, in hexadecimal digits, for `restore(path, manifest_sha256=…)`.
        seconds: Seconds from the call until this process was notified that the checkpoint is published. They include
            the wait for an earlier save, which is in no phase.
        blocked_seconds: How many of these seconds the caller waited; all of them for `save`.
        phase_seconds: Seconds of each phase in this process: "plan" (includes claiming the path), "device_to_host",
            "write" (includes the fsync of files), "sync" (fsync of folders), "barrier" (waiting for the other
            processes), "publish".
    """

    path: str
    save_id: str
    leaves: int
    total_bytes: int
    process_bytes: tuple[int, ...]
    objects: int
    files: int
    stored_bytes: int
    reused_bytes: int
    manifest_sha256: str
    seconds: float
    blocked_seconds: float
    phase_seconds: Mapping[str, float]


# Running saves --------------------------------------------------------------------------------------------


_saves: list[RunningSave] = []
"""In order: saves that have not ended, and background saves whose end has not been reported yet."""

_abandoned: list[RunningSave] = []
"""Saves that nothing waits for, not even the end of the program."""


class RunningSave:
    """A save that a lane runs."""

    def __init__(
        self,
        store: Store,
        total_bytes: int,
        start_time: float,
        watchdog: Watchdog,
        step: int | None = None,
        *,
        bytes_per_second: float | None = None,
        awaited: bool = False,
        detached: bool = False,
    ) -> None:
        """`bytes_per_second` is the largest rate at which it writes; None: no limit."""
        self.path = store.url
        """The path or URL of the checkpoint."""

        self.owner = owner_of(store, step)
        """What the error of the save belongs to."""

        self.step = step
        """The step, if a Checkpointer saves it."""

        self.awaited = awaited
        """Whether its caller waits for it and receives its error."""

        self.detached = detached
        """Whether later saves do not wait for it."""

        self.watchdog = watchdog
        self.rate_limiter = RateLimiter(bytes_per_second)
        self.skipped = False
        """Whether nothing is saved, because another save was in progress and `Options.when_busy` is "skip"."""

        self.is_staged = False
        """Whether its data no longer depends on the caller's arrays."""

        self.is_published = False
        """Whether the checkpoint is published. Its `on_done` may not have ended yet."""

        self.error: BaseException | None = None
        """The error of the save, after it has ended."""

        self.is_raised = False
        """Whether a later save has raised its error, or a Checkpointer has dealt with it."""

        self.is_reported = False
        """Whether its end has been reported, or needs no report."""

        self._start_time = start_time
        self._total_bytes = total_bytes
        self._hurries = False
        self._seconds: float | None = None
        self._ended = Latch()
        self._settled = Latch()  # set when the checkpoint is published or the save has failed
        self._info: SaveInfo | None = None
        self._blocked_seconds = 0.0
        self._caller = threading.get_ident()
        self._has_returned = False
        self._has_waiter = False
        self._thread: int | None = None  # the lane that runs it

    def run(self, work: Callable[[RunningSave], SaveInfo]) -> None:
        """Do its work, and note the outcome. In a lane."""
        self._thread = threading.get_ident()
        _saves.append(self)  # here, because an interrupt could end the caller in between
        if self.is_reported:  # its caller had no time to wait until now
            _mark_reported(self)
        if not (self.awaited or is_shutting_down()):
            with contextlib.suppress(RuntimeError):  # too many threads
                lanes.begin(self._keep_awake_seconds)
        try:
            outcome: SaveInfo | BaseException = work(self)
        except BaseException as error:
            # The error may be kept for long, so its frames must not hold arrays.
            traceback.clear_frames(error.__traceback__)
            outcome = error
        del work
        self.end(outcome)
        if self.awaited or self.is_raised:
            _mark_reported(self)

    def _keep_awake_seconds(self) -> None:
        """Keep `awake_seconds` going while nobody waits. In a lane, but not in its own, which Python may choose during
        its shutdown."""
        if not self._runs_here:
            self._settled.wait()

    def cancel(self, call: Call, error: BaseException) -> None:
        """Cancel it because of an error of its caller, and wait until it has cleaned up. If the checkpoint is already
        published, a note on the error says so."""
        self.awaited = True
        if not call.cancellation.is_cancelled:  # otherwise the call has waited for the end, or a second interrupt came
            call.cancellation.cancel(error)
            if self._thread is not None:
                self._await(self._ended, None)
        if self.done and self.error is None:
            error.add_note(f"jaxckpt: the checkpoint at {self.path} was published before this took effect")
        _mark_reported(self)

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set

    @property
    def name(self) -> str:
        """How messages name it. A user of a Checkpointer has called neither `save_async` nor `wait`."""
        return f"the {'save_async' if self.step is None else f'save of step {self.step}'} to {self.path}"

    @property
    def progress(self) -> Progress:
        """Bytes that this process has written, and its total."""
        work = self.watchdog.work  # None until its lane writes
        done, total = (0, self._total_bytes) if work is None else work.moved[:2]
        return Progress("save", done, total, self._seconds_so_far)

    @property
    def _seconds_so_far(self) -> float:
        return time.perf_counter() - self._start_time if self._seconds is None else self._seconds

    def wait(self, timeout_seconds: float | None = None) -> SaveInfo:
        """Wait until the save has ended, for `timeout_seconds` at most. Returns its result, or raises its error, which
        then counts as reported. Raises TimeoutError if it has not ended."""
        if self.skipped:
            raise InputError(
                f"the save to {self.path} was skipped because another was in progress; check `.skipped` first"
            )
        given = timeout_seconds
        is_number = isinstance(given, numbers.Real) and not isinstance(given, bool) and given == given  # pyright: ignore
        if given is not None and not is_number:
            raise InputError(f"timeout_seconds must be a number of seconds or None, found {reprlib.repr(given)}")
        self._has_waiter = True
        try:
            has_ended = self.join(timeout_seconds)
        finally:
            self._has_waiter = False
        if not has_ended:
            raise TimeoutError(f"the save to {self.path} is not done after {timeout_seconds:g} s: {self.progress}")
        _mark_reported(self)
        if self.error is not None:
            raise self.error
        assert self._info is not None
        return self.with_times(self._info)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the save has ended, for `timeout_seconds` at most. Returns whether it has. Its error stays its
        owner's."""
        if self.done:
            return True
        if self._runs_here:
            raise InputError(
                f"this call waits for the save to {self.path}, and one of that save's own callbacks makes the call, so"
                " neither would end: call it after that save has ended, from your program's thread or, in a job of one"
                " process, from a thread that the callback starts"
            )
        self._use_all_threads()
        return self._await(self._ended, timeout_seconds)

    def settle(self) -> None:
        """Wait until the checkpoint is published or the save has failed; reads of its path call this. Returns at once
        in a thread without which the save cannot continue."""
        is_caller = threading.get_ident() == self._caller and not self._has_returned
        if not (is_caller or self._runs_here):
            self._use_all_threads()
            self._await(self._settled, None)

    @property
    def _runs_here(self) -> bool:
        """Whether this thread is its lane."""
        return threading.get_ident() == self._thread

    def with_times(self, info: SaveInfo) -> SaveInfo:
        """The result, with the times that are known so far."""
        return replace(info, seconds=self._seconds_so_far, blocked_seconds=self._blocked_seconds)

    def abandon(self) -> None:
        """Stop waiting for this save, even at the end of the program."""
        _keep_abandoned([self])
        _mark_reported(self)

    def lift_limits(self) -> None:
        """From now on, use all threads, and write at any rate."""
        self._use_all_threads()
        self.rate_limiter.end()

    def _use_all_threads(self) -> None:
        """From now on, because a caller waits."""
        self._hurries = True
        self.watchdog.yields_processors = False

    def hurry(self, timeout_seconds: float) -> None:
        """End the limit of its rate, and wait for at most `timeout_seconds` until the checkpoint is published or the
        save has failed. Does not wait for its `on_done`."""
        self.lift_limits()
        self._await(self._settled, timeout_seconds)

    def await_end(self, check: Callable[[], object]) -> SaveInfo | None:
        """Wait until the save has ended. Returns its result, or None if it failed. `check` may raise meanwhile."""
        while not self._await(self._ended, POLL_SECONDS):
            check()
        return self._info

    def _await(self, latch: Latch, timeout_seconds: float | None) -> bool:
        """Wait for `timeout_seconds` at most. Returns whether the latch is set. Hanging storage ends the save."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            if latch.wait(left):
                return True
            if error := self.watchdog.stall_error():
                replace_workers()
                self.end(error)
                return True
            if left <= 0:
                return False

    def skip(self) -> None:
        """Mark the save as skipped."""
        self.skipped = True
        self._seconds = self._seconds_so_far
        self._ended.set()

    def mark_returned(self, *, yields_processors: bool) -> None:
        """Note that the call that started the save has returned, for `SaveInfo.blocked_seconds`. With
        `yields_processors`, training continues, so that the save uses few threads unless it hurries already."""
        self._blocked_seconds = time.perf_counter() - self._start_time
        self._has_returned = True
        self.watchdog.yields_processors = yields_processors and not self._hurries

    def mark_published(self) -> None:
        """Note that the checkpoint is published."""
        self.is_published = True
        self._settled.set()

    def discard(self, error: InputError) -> None:
        """End it in this process, where no thread will. Logs nothing, because it has not failed."""
        self._has_waiter = True
        self.end(error)

    def end(self, outcome: SaveInfo | BaseException) -> None:
        """Note the end of the save. Only the first call has an effect."""
        if self.done:
            return
        if isinstance(outcome, SaveInfo):
            self._info, self.is_published = outcome, True
        else:
            self.error = outcome
            # The caller has raised it. An on_done may also exit.
            is_interrupt = not (isinstance(outcome, Exception) or self.is_published)
            if not (self.awaited or self._has_waiter or self.is_raised or is_interrupt):
                what = "was published, but its on_done failed" if self.is_published else "failed"
                _log.error("%s %s: %s", self.name, what, str(outcome) or type(outcome).__name__)
        self._seconds = self._seconds_so_far
        self._ended.set()
        self._settled.set()


def owner_of(store: Store, step: int | None) -> str:
    """What a running save belongs to: the directory of a Checkpointer's steps, or the path of a checkpoint."""
    url = store.absolute().url
    return url if step is None else url.rpartition("/")[0]


def _settleable() -> list[RunningSave]:
    """The running saves that reads of their path wait for."""
    return [save for save in _saves.copy() if not save.detached]


register_running_writes(_settleable)


def _keep_abandoned(saves: list[RunningSave]) -> None:
    """Note that nothing waits for these saves. Those that have ended since are forgotten, except for one that failed,
    which the exit status shows."""
    _abandoned.extend(saves)
    ended = [save for save in _abandoned if save.done]
    failed = [save for save in ended if save.error is not None]
    for save in ended:
        if save not in failed[:1]:
            with contextlib.suppress(ValueError):  # another thread has
                _abandoned.remove(save)


def _mark_reported(save: RunningSave) -> None:
    """Note that the end of a save has been reported."""
    save.is_reported = True
    with contextlib.suppress(ValueError):
        _saves.remove(save)


def unreported_saves(*, include_detached: bool = False) -> list[RunningSave]:
    """The background saves that have not ended or whose end has not been reported."""
    return [save for save in _saves.copy() if not save.awaited and (include_detached or not save.detached)]


def await_saves(owner: str) -> None:
    """Wait for the background saves, because there is one at a time. Raises the error of a failed one of the same
    owner, unless it has been reported.

    If a save failed only because another process raised the error of an earlier save, that is logged. Raising it would
    make the next save fail in the other processes, and so on: one failure would end all saves.
    """
    for save in unreported_saves():
        save.join()
        if save.owner != owner or save.is_raised:
            continue
        try:
            save.wait()
        except Exception as error:
            save.is_raised = True
            if isinstance(error, PeerError) and error.repeats_earlier:
                _log.warning("%s was not saved, because an earlier save had failed: %s", save.path, error)
                continue
            hint = ", whose wait() was not called" if save.step is None else ""
            error.add_note(f"jaxckpt: this error ended {save.name}{hint}")
            raise


def lift_limits() -> None:
    """End the limits of the rates of all running saves, because the job is being preempted."""
    for save in _saves.copy():
        save.lift_limits()


def hurry_saves(deadline: float) -> None:
    """Wait for the background saves before the last step of a preempted job is saved.

    Waits for at most half of the time until `deadline`, on the monotonic clock. The other half is for the last step.
    Logs errors: the last step must be saved even if another save failed.
    """
    until = (time.monotonic() + deadline) / 2
    for save in unreported_saves():
        save.hurry(max(0.0, until - time.monotonic()))
        if not save.is_published:
            _log.warning("an earlier save was not completed: %s: %s", save.path, save.error or "it still runs")
            if save.done:
                _mark_reported(save)


# At exit, and in a fork -----------------------------------------------------------------------------------


def _wait_at_exit() -> None:
    """Wait for the running saves, and report failures that no caller has received."""
    for save in unreported_saves(include_detached=True):
        try:
            save.wait()
        except KeyboardInterrupt:
            _keep_abandoned(unreported_saves(include_detached=True))
            set_exit_status(128 + signal.SIGINT)
            with contextlib.suppress(OSError, ValueError):  # stderr is gone
                print(f"jaxckpt: interrupted; {save.name} was abandoned", file=sys.stderr)
            break
        except BaseException:
            set_exit_status(1)
            hint = ", and wait() was not called" if save.step is None else ""
            with contextlib.suppress(OSError, ValueError):
                print(f"jaxckpt: {save.name} failed{hint}:", file=sys.stderr)
                traceback.print_exc()
    if any(not save.done or save.error is not None for save in _abandoned):  # its thread may hang
        set_exit_status(128 + signal.SIGTERM)
    for save in _abandoned:
        save.watchdog.abandon()  # its lane may end by itself, or hang


def _reset_after_fork() -> None:
    """In a forked child: discard the saves, which belong to the parent."""
    for save in _saves:  # no thread of this process will ever end it
        where = f"the save to {save.path} runs in process {os.getppid()}, from which this process was forked"
        save.discard(InputError(f"{where}: wait for it there"))
    _saves.clear()
    _abandoned.clear()


lanes.finish_at_exit(_wait_at_exit)
os.register_at_fork(after_in_child=_reset_after_fork)


# Their handle ---------------------------------------------------------------------------------------------


@explain_names
class PendingSave:
    """A save that runs in a background thread: the result of `save_async`."""

    def __init__(self, save: RunningSave) -> None:
        self._save = save

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return self._save.path

    @property
    def skipped(self) -> bool:
        """Whether nothing is saved, because another save was in progress and `Options.when_busy` is "skip"."""
        return self._save.skipped

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._save.done

    @property
    def error(self) -> BaseException | None:
        """The error of the save, which `wait` raises; None if it has not ended or was successful."""
        return self._save.error

    @property
    def progress(self) -> Progress:
        """Bytes that this process has written, and its total."""
        return self._save.progress

    def wait(self, timeout_seconds: float | None = None) -> SaveInfo:
        """Wait until the checkpoint is published.

        Args:
            timeout_seconds: Seconds to wait at most; None: no limit.

        Returns:
            What was written.

        Raises:
            TimeoutError: The save is not done yet (`done` is False). It continues. A PeerTimeoutError is also a
                TimeoutError, but ends the save.
            KeyboardInterrupt: Ctrl-C ends the wait. The save continues.
            InputError: The save was skipped.
            Exception: The error of the save; see `save`.
        """
        return self._save.wait(timeout_seconds)

    def __repr__(self) -> str:
        save = self._save
        state = "skipped" if save.skipped else "in progress" if not save.done else "failed" if save.error else "done"
        return f"<PendingSave to {save.path}: {state}>"
