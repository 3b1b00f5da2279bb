"""Threads, events and tasks that stay safe under Ctrl-C.

Python raises KeyboardInterrupt in the main thread, between any two bytecodes. `threading.Event`, `Condition`, `Future`
and `Thread.start` take a lock in Python code. An interrupt right after that leaves the lock held, and the next thread
that needs it waits forever. This module uses `queue.SimpleQueue`, which does its work in one C call.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.5
"""If an interrupt swallows a wake-up call, the thread that waits for it wakes up at most this many seconds late."""

_LATE_SECONDS = 0.1
"""A busy machine delays a thread by less than this."""

_last_reading = time.monotonic(), 0.0
"""When `awake_seconds` was last read, on the monotonic clock, and how many seconds it had left out by then."""


def awake_seconds() -> float:
    """A clock that leaves out the time for which this process was suspended or could not run. Whatever is awaited, such
    as storage or another process, is not to blame for it.

    If a reading comes later than expected after the last one, it counts `POLL_SECONDS` for the time between. So
    something must read it that often: a caller that waits for a lane does, `Latch.wait`, and the heartbeats of a job.
    """
    global _last_reading
    last, left_out = _last_reading
    now = time.monotonic()
    if now - last > POLL_SECONDS + _LATE_SECONDS:
        left_out += now - last - POLL_SECONDS
    _last_reading = now, left_out  # without a lock: a late thread may set the clock back, never forward
    return now - left_out


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
                awake_seconds()  # keeps it going
                continue
            self._wakeups.put(None)  # for others that wait
        return True


_TAKEN = RuntimeError("the error of this work was raised before")


class Task(Generic[T]):
    """Work that is done once, by the thread that begins it first. Any number of threads may try."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = [work]
        self._ended = Latch()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless a thread has begun it. `result` raises any exception of the work."""
        try:
            work = self._work.pop()  # in one C call, so that one thread gets it
        except IndexError:
            return
        try:
            self._value = work()
        except BaseException as error:
            self._error = error
        finally:
            del work  # it may hold much memory
            self._ended.set()

    @property
    def has_begun(self) -> bool:
        """Whether a thread has begun it."""
        return not self._work

    def done(self) -> bool:
        return self._ended.is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, or for `timeout` seconds; returns whether it is done."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result. Raises TimeoutError if the work is not done by then, or the work's exception, once."""
        if not self._ended.wait(timeout):
            raise TimeoutError
        error = self._error
        if error is None:
            return self._value
        self._error = _TAKEN
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and the frames hold the data that was moved


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


def run_in_thread(work: Callable[[], T]) -> T:
    """Do work in a separate thread, if this is the main thread. An interrupt ends the wait, but never the work."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = Task(work)
    try:
        start_thread(task.run, "jaxckpt-once")
    except RuntimeError:  # the system, or Python during its shutdown, cannot start a thread
        task.run()
    return task.result()


def is_shutting_down() -> bool:
    """Whether the interpreter is shutting down: it runs the functions registered with atexit, or has run them."""
    # Not `threading.main_thread().is_alive()`: up to Python 3.12, an interrupt inside it makes it return False forever.
    return threading._SHUTTING_DOWN  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
