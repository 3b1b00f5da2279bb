"""The thread that writes saves, and the saves that were not waited for: at the next save, at exit, in a fork.

A save is carried out in this thread from its first lock to its last, also for a caller that waits for it: an interrupt
of the main thread cannot leave it half done.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jaxckpt._runtime.errors import InputError, StorageError
from jaxckpt._runtime.progress import Progress
from jaxckpt._runtime.stalls import Watch
from jaxckpt._runtime.threads import POLL_SECONDS, Latch, ending, start_thread
from jaxckpt._storage.workers import renew_workers


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a save wrote."""

    path: str
    save_id: str

    leaves: int

    total_bytes: int
    """Bytes of array data in the checkpoint, each replica counted once."""

    process_bytes: tuple[int, ...]
    """Bytes of array data in the objects of each process."""

    objects: int
    """Objects that hold the array data."""

    files: int
    """Files of the checkpoint: objects, one zarr.json a stack, one for each process's state, and the manifest."""

    stored_bytes: int
    """Bytes of the objects, including checksums and indexes."""

    reused_bytes: int
    """Bytes of the objects that are hard links to an earlier checkpoint and were not written; see `Options.reuse`."""

    manifest_sha256: str
    """SHA-256 of manifest.json, in hexadecimal digits, for `Options.manifest_sha256`."""

    seconds: float
    """Seconds from the call until this process was notified that the checkpoint is published."""

    blocked_seconds: float
    """How many of these seconds the caller waited; all of them for `save`."""

    phase_seconds: Mapping[str, float]
    """Seconds of each phase in this process: "plan", "device_to_host", "write" (files reach the disk in it), "sync"
    (folders do), "barrier" (waiting for the other processes), "publish"."""


class PendingSave:
    """A save that runs in a background thread."""

    def __init__(self, path: str, total_bytes: int, begun: float, watch: Watch) -> None:
        self.path = path
        """The path or URL of the checkpoint."""

        self.skipped = False
        """Whether nothing is saved, because another save was in progress and `Options.when_busy` is "skip"."""

        self._begun = begun
        self._watch = watch
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._seconds: float | None = None
        self._ended = Latch()
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._blocked = 0.0

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set

    @property
    def progress(self) -> Progress:
        """Bytes that this process has written, and its total."""
        seconds = time.perf_counter() - self._begun if self._seconds is None else self._seconds
        return Progress("save", self._done_bytes, self._total_bytes, seconds)

    def wait(self, timeout: float | None = None) -> SaveInfo:
        """Wait until the checkpoint is published.

        Args:
            timeout: Seconds to wait at most; None: no limit.

        Returns:
            What was written.

        Raises:
            TimeoutError: The save is not done yet. It continues.
            InputError: The save was skipped.
            Exception: What the save raised; see `save`.
        """
        if self.skipped:
            raise InputError(
                f"the save to {self.path} was skipped because another was in progress; check `.skipped` first"
            )
        if not self.done and threading.get_ident() == _writer:
            raise InputError(f"wait() for the save to {self.path} was called from its own callback")
        wake()
        if not self._await_end(timeout):
            raise TimeoutError(f"the save to {self.path} is not done after {timeout:g} s: {self.progress}")
        _settled(self)
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self.timed(self._info)

    def timed(self, info: SaveInfo) -> SaveInfo:
        """What was written, with the times that are known by now."""
        seconds = time.perf_counter() - self._begun if self._seconds is None else self._seconds
        return replace(info, seconds=seconds, blocked_seconds=self._blocked)

    def abandon(self) -> None:
        """Stop waiting for it, also at the end of the program."""
        global _abandoned
        _abandoned = True
        _settled(self)

    def await_end(self) -> SaveInfo | None:
        """Wait until it has ended, well or not; returns what was written, if it ended well."""
        self._await_end(None)
        return self._info

    def _await_end(self, timeout: float | None) -> bool:
        """Wait until it has ended, or for `timeout` seconds; returns whether it has. One whose storage hangs ends."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            if self._ended.wait(left):
                return True
            if error := self._watch.stalled():
                _desert(self, error)
                return True
            if left <= 0:
                return False

    def skip(self) -> None:
        """Save nothing."""
        self.skipped = True
        self._ended.set()

    def moved(self, n_bytes: int) -> None:
        """So many bytes more are written."""
        self._done_bytes += n_bytes

    def returned(self) -> None:
        """The caller's part ends here."""
        self._blocked = time.perf_counter() - self._begun

    def end(self, outcome: SaveInfo | BaseException) -> None:
        """It ended, well or not; the first outcome counts."""
        if self.done:
            return
        if isinstance(outcome, SaveInfo):
            self._info = outcome
        else:
            self._error = outcome
        self._seconds = time.perf_counter() - self._begun
        self._ended.set()

    @property
    def error(self) -> BaseException | None:
        """What the save raised, once it has ended."""
        return self._error

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "in progress" if not self.done else "failed" if self._error else "done"
        return f"<PendingSave to {self.path}: {state}>"


# The thread -----------------------------------------------------------------------------------------------


class _Job:
    """A save that the thread is to carry out, or is carrying out."""

    def __init__(
        self, pending: PendingSave, work: Callable[[PendingSave], SaveInfo], *, awaited: bool, aside: bool
    ) -> None:
        self.pending = pending
        self.awaited = awaited
        """Whether its caller waits for it, and so hears of its end."""

        self.aside = aside
        """Whether later saves do not wait for it."""

        self._work: Callable[[PendingSave], SaveInfo] | None = work
        self._taken = threading.Lock()

        self.thread: int | None = None
        """The thread that carries it out."""

    def run(self) -> None:
        """Carry it out, unless another thread does already."""
        if not self._taken.acquire(blocking=False):
            return
        self.thread = threading.get_ident()
        work, self._work = self._work, None  # it holds all that is saved
        assert work is not None
        try:
            outcome: SaveInfo | BaseException = work(self.pending)
        except BaseException as error:
            # It may be kept for long: not with the arrays in its frames.
            traceback.clear_frames(error.__traceback__)
            outcome = error
        del work
        self.pending.end(outcome)


_jobs: list[_Job] = []
"""In order: those that have not ended, and those in the background whose end has not been reported yet. An append is
all that it takes to hand one over: an interrupt finds it done or not done."""

_wakes = queue.SimpleQueue[bool]()
"""True wakes the thread, False ends it."""

_starting = threading.Lock()
_ran_out: Latch | None = None
"""Set when the thread ends; None while there is none."""

_writer: int | None = None
"""The thread that carries out saves."""

_abandoned = False
_exit_status = 0


def hand_over(
    pending: PendingSave, work: Callable[[PendingSave], SaveInfo], *, awaited: bool, aside: bool = False
) -> None:
    """Have the thread carry out a save, or do so here if the interpreter is at its end.

    One that its caller waits for does not wait for those of other threads: it gets a thread of its own. So does one
    `aside`, for which later saves do not wait.
    """
    job = _Job(pending, work, awaited=awaited, aside=aside)
    if aside:
        if not ending():
            start_thread(job.run, "jaxckpt-flush")
        _jobs.append(job)
        if ending():
            job.run()
        return
    others = any(not other.pending.done for other in _jobs.copy())
    _jobs.append(job)
    if awaited and others and not ending():
        start_thread(functools.partial(_run_alone, job), "jaxckpt-save-alone")
    else:
        wake()


def wake() -> None:
    """Ensure that a thread carries out what was handed over. An interrupt may have come before that was done."""
    if not any(not job.pending.done for job in _jobs.copy()):
        return
    if ready():
        _wakes.put(True)
        return
    for job in _jobs.copy():
        job.run()


def ready() -> bool:
    """Start the thread, if there is none. It stays: starting one takes the caller up to Python's switch interval, 5 ms.

    Returns whether there is one: when it ends, Python 3.12 starts no more. Before that, raises RuntimeError if the
    system starts none.
    """
    global _ran_out
    with _starting:
        if _ran_out is None:
            ran_out = Latch()
            try:
                start_thread(functools.partial(_run, _wakes, ran_out), "jaxckpt-save")
            except RuntimeError:
                if not ending():
                    raise
                return False
            _ran_out = ran_out
    return True


def _run(wakes: queue.SimpleQueue[bool], ran_out: Latch) -> None:
    global _writer
    _writer = threading.get_ident()
    try:
        while wakes.get():
            for job in _jobs.copy():
                if job.aside:
                    continue
                job.run()
                if job.awaited:
                    _settled(job.pending)
            job = None  # it holds all that was saved
    finally:
        ran_out.set()


def _run_alone(job: _Job) -> None:
    job.run()
    _settled(job.pending)


def _settled(pending: PendingSave) -> None:
    """Somebody has heard of its end."""
    for job in _jobs.copy():
        if job.pending is pending:
            with contextlib.suppress(ValueError):
                _jobs.remove(job)


def _desert(pending: PendingSave, error: StorageError) -> None:
    """Give up a save whose thread hangs in a system call; later saves get another thread."""
    global _ran_out, _wakes
    with _starting:
        if not pending.done and any(job.pending is pending and job.thread == _writer for job in _jobs.copy()):
            _wakes.put(False)  # should it ever come back
            _wakes, _ran_out = queue.SimpleQueue(), None
        renew_workers()
        pending.end(error)


def under_way(*, aside: bool = False) -> list[PendingSave]:
    """The saves in the background that have not ended, or whose end has not been reported."""
    return [job.pending for job in _jobs.copy() if not job.awaited and aside >= job.aside]


def settle() -> None:
    """Wait for the saves in the background. Raises what one of them raised, unless it has been reported."""
    for pending in under_way():
        try:
            pending.wait()
        except Exception as error:
            error.add_note(f"jaxckpt: this ended the earlier save_async to {pending.path}, whose wait() was not called")
            raise


def give_up(pending: PendingSave) -> bool:
    """Wait until a save that was cancelled has cleaned up after itself. Its caller raises what it was cancelled for.

    Returns whether it was ever handed over.
    """
    found = [job for job in _jobs.copy() if job.pending is pending]
    for job in found:
        job.awaited = True
        wake()
        pending.await_end()
    _settled(pending)
    return bool(found) or pending.done


# At exit, and in a fork -----------------------------------------------------------------------------------


def finish_at_exit() -> None:
    """Have the interpreter wait, when it ends, for the saves in the background."""
    atexit.unregister(_wait_at_exit)
    atexit.register(_wait_at_exit)  # the last to be registered runs first: before jax.distributed shuts down


def _wait_at_exit() -> None:
    """Wait for the saves under way, and report the failures that were not waited for."""
    global _abandoned, _exit_status, _ran_out
    for pending in under_way(aside=True):
        try:
            pending.wait()
        except KeyboardInterrupt:
            print(f"jaxckpt: interrupted; the save_async to {pending.path} was abandoned", file=sys.stderr)
            _abandoned, _exit_status = True, 128 + signal.SIGINT
            break
        except BaseException:
            print(f"jaxckpt: the save_async to {pending.path} failed, and wait() was not called:", file=sys.stderr)
            traceback.print_exc()
            _exit_status = 1
    if not _abandoned and _ran_out is not None:
        # It may still be letting go of arrays, and a thread that Python stops within JAX's C++ aborts the process.
        _wakes.put(False)
        _ran_out.wait()
        _ran_out = None


@atexit.register
def _leave_with_status() -> None:
    # Registered when jaxckpt is imported, so it runs after what was registered later. What raises at exit is printed,
    # but Python still exits with 0. Nor can Python end well while the thread writes on.
    if _exit_status or _abandoned:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status or 128 + signal.SIGTERM)


def _forget_parent() -> None:
    """In a fork: the thread, and the saves that it was writing, are its parent's."""
    global _starting, _ran_out, _wakes, _writer
    _starting = threading.Lock()
    _ran_out = _writer = None
    _wakes = queue.SimpleQueue()
    for job in _jobs:  # no thread of this process will ever end it
        where = f"the save to {job.pending.path} runs in process {os.getppid()}, from which this process was forked"
        job.pending.end(InputError(f"{where}: wait for it there"))
    _jobs.clear()
    atexit.unregister(_wait_at_exit)


os.register_at_fork(after_in_child=_forget_parent)
