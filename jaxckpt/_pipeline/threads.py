"""Threads that stay safe under Ctrl-C: an interrupt at any moment neither hangs the program nor leaves a lock held.

Python raises KeyboardInterrupt in the main thread, between any two bytecodes. `threading.Event`, `Condition`, `Future`
and `Thread.start` take a lock in Python code. An interrupt right after that leaves the lock held, and the next thread
that needs it waits forever. This module uses `queue.SimpleQueue` and plain locks, which do their work in one C call.
Work that must not be interrupted, for example while it holds a lock on a folder, runs in another thread, because Python
interrupts only the main thread.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.5
"""If an interrupt swallows a wake-up call, the thread that waits for it wakes up at most this many seconds late."""


class Latch:
    """An event that happens once."""

    def __init__(self) -> None:
        self.is_set = False
        self._wakeups = queue.SimpleQueue[None]()

    def set(self) -> None:
        self.is_set = True
        self._wakeups.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for `timeout` seconds; returns whether it is set."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_set:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return False
            try:
                self._wakeups.get(timeout=left)
            except queue.Empty:
                continue
            self._wakeups.put(None)  # for others that wait
        return True


class Task(Generic[T]):
    """Work that another thread does."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._ended = Latch()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work. `result` raises any exception of the work."""
        work, self._work = self._work, None  # it may hold much memory
        assert work is not None
        try:
            self._value = work()
        except BaseException as error:
            self._error = error
        finally:
            del work
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, or for `timeout` seconds; returns whether it is done."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises TimeoutError if the work is not done by then, or the exception of the work."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value


def start_thread(run: Callable[[], object], name: str) -> None:
    """Start a daemon thread. Raises RuntimeError if the system, or Python during its shutdown, cannot start it."""

    def named() -> None:
        threading.current_thread().name = name
        try:
            run()
        finally:
            # Before Python 3.13, `threading.enumerate` lists such a thread forever.
            threading._active.pop(threading.get_ident(), None)  # pyright: ignore[reportAttributeAccessIssue]

    _thread.start_new_thread(named, ())


def run_uninterrupted(work: Callable[[], T]) -> T:
    """Do work in a separate thread and wait for it. An interrupt ends the wait, but never the work."""
    if threading.current_thread() is not threading.main_thread() or is_shutting_down():
        return work()
    task = Task(work)
    try:
        start_thread(task.run, "jaxckpt-aside")
    except RuntimeError:  # the system cannot start a thread
        task.run()
    return task.result()


class OrderedCalls:
    """Calls that run one after another. An interrupt ends the wait for a call, but the next call starts after it."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._tasks = queue.SimpleQueue[Task[Any]]()

    def run(self, work: Callable[[], T]) -> T:
        """Run a call after all earlier ones have ended, and wait for it."""
        task = Task(work)
        self._tasks.put(task)  # an interrupt after this cannot change the order
        run_uninterrupted(self._run_tasks)
        return task.result()

    def _run_tasks(self) -> None:
        with self._lock, contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait().run()


def is_shutting_down() -> bool:
    """Whether the interpreter is shutting down: it runs the functions registered with atexit, or has run them."""
    # Not `threading.main_thread().is_alive()`: up to Python 3.12, an interrupt inside it makes it return False forever.
    return threading._SHUTTING_DOWN  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


_gc_lock = _thread.allocate_lock()


def _renew_lock() -> None:
    """In a forked child, in which no thread would release the lock."""
    global _gc_lock
    _gc_lock = _thread.allocate_lock()


os.register_at_fork(after_in_child=_renew_lock)


def _frame_of(thread: int, default: FrameType | None) -> FrameType | None:
    """The current frame of a thread; the default if it cannot be asked for now.

    Until Python 3.12, a garbage collection inside `sys._current_frames` may wait for a lock that this function holds:
    the process then hangs (https://github.com/python/cpython/issues/106883). So no collection may run there.
    """
    if thread == threading.get_ident():
        return sys._getframe()  # pyright: ignore[reportPrivateUsage]
    if sys.version_info >= (3, 12):
        return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if not _gc_lock.acquire(blocking=False):  # another thread would turn the collector on again too early
        return default
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    finally:
        if was_enabled:
            gc.enable()
        _gc_lock.release()


class RunningCall:
    """A running function call that other threads can check."""

    def __init__(self, depth: int = 0) -> None:
        """The call of the function that is `depth` levels above the creator of this object."""
        self._thread = threading.get_ident()
        self._frame: FrameType | None = sys._getframe(1 + depth)  # pyright: ignore[reportPrivateUsage]

    def is_in_this_thread(self) -> bool:
        """Whether the current thread is the one that made the call."""
        return self._thread == threading.get_ident() and self.is_running()

    def is_running(self) -> bool:
        """Whether the call has not returned yet. A call that was interrupted may not have called `mark_ended`."""
        frame = _frame_of(self._thread, self._frame)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return self._frame is not None and frame is not None

    def mark_ended(self) -> None:
        """Mark the call as ended, and release its frame with all its variables."""
        self._frame = None
