"""Lanes: the threads in which calls do their work, while the caller waits.

Python raises KeyboardInterrupt in the main thread, between any two bytecodes. A call therefore does in a lane whatever
touches storage, devices or other processes, and an interrupt can only end a wait.

    the caller:   run ─▶ wait, and call what the lane asks for (`in_caller`) ─▶ result
    a lane:       work ─▶ … ─▶ release_caller, or the end

Nothing depends on what the caller notes: a lane marks itself as busy, a task is done once, by whichever thread begins
it first, and whoever waits for a task that no thread has begun starts it again.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import errno
import functools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jaxckpt._pipeline.threads import POLL_SECONDS, Task, awake_seconds, is_shutting_down, start_thread
from jaxckpt._pipeline.watchdog import Watchdog, current_watchdog, is_in_worker, under
from jaxckpt._pipeline.workers import replace_workers
from jaxckpt.errors import StorageError

T = TypeVar("T")

MAX_IDLE = 8
"""How many lanes wait for work. Starting a thread takes 50 µs, and sometimes Python's switch interval of 5 ms."""

_CLOSING_SECONDS = 0.1
"""How long an interrupted call waits until its lane has closed its files and its progress bar."""

Request = Callable[[], object]
"""What a lane asks the caller to call. None in its place lets the caller return."""


class _LaneTask(Task[T]):
    """Work in the context of the thread that creates this."""

    def __init__(
        self, work: Callable[[], T], watchdog: Watchdog | None, requests: SimpleQueue[Request | None] | None = None
    ) -> None:
        super().__init__(functools.partial(contextvars.copy_context().run, work))
        self.watchdog = watchdog
        self._requests = requests

    def run(self) -> None:
        _current.requests = self._requests
        try:
            with under(self.watchdog):
                super().run()
        finally:
            _current.requests = None
            if self._requests is not None:
                self._requests.put(None)


_Inbox = SimpleQueue[_LaneTask[Any]]

_idle = deque[_Inbox]()
_busy = dict[_Inbox, Watchdog]()
"""The lanes that do a task with a watchdog. Each lane adds and removes itself."""

_has_stalled = False


class _Current(threading.local):
    requests: SimpleQueue[Request | None] | None = None
    """Where the caller of this lane's task waits; None if nothing waits."""


_current = _Current()


def is_watched() -> bool:
    """Whether a watchdog watches this thread: it is a lane, except for a task of `begin`, or works for one."""
    return current_watchdog() is not None


# The caller -----------------------------------------------------------------------------------------------


def run(
    work: Callable[[], T],
    watchdog: Watchdog,
    interrupted: Callable[[Task[T], BaseException], object] | None = None,
    *,
    until: float | None = None,
) -> Task[T]:
    """Do work in a lane, and wait until it ends, releases the caller, or the time `until` on the monotonic clock.

    What the lane asks for is called here. If that raises, or an interrupt ends the wait, `interrupted` is called with
    the task and the error, which is then raised; without it, the work continues alone until its next storage operation.
    Raises StorageError if the storage of the task stalls. In a lane, the work is done at once.
    """
    if is_watched():
        task = Task(work)
        task.run()
        return task
    requests = SimpleQueue[Request | None]()
    task = _LaneTask(work, watchdog, requests)
    try:
        _start(task)
        _wait(task, watchdog, requests, until)
    except BaseException as error:
        if interrupted is None:
            watchdog.abandon()
            if not isinstance(error, Exception):
                task.wait(_CLOSING_SECONDS)
        else:
            interrupted(task, error)
        raise
    return task


def run_watched(what: str, seconds: float, work: Callable[[], T], folder: str = "") -> T:
    """Do work that is one storage operation, in `folder` if that is known: `what` names it, as in "reading /ckpt". An
    interrupt abandons it.

    Raises StorageError if no bytes move for `seconds`. In a lane, it is an operation of the lane's task, or a part of
    the operation that runs; then the time limit is the task's.
    """
    if is_watched():
        return operate(what, work)
    return run(functools.partial(operate, what, work), Watchdog(seconds, folder)).result()


def operate(what: str, work: Callable[[], T]) -> T:
    """Do work that is one storage operation of this lane's task, or a part of the operation that runs."""
    watchdog = current_watchdog()
    assert watchdog is not None, f"{what}: not in a lane"
    if not (watchdog.is_operating or is_in_worker()):
        with watchdog.operation(what):
            return work()
    watchdog.require_not_stalled()
    result = work()
    watchdog.note_progress()
    return result


def run_alone(work: Callable[[], T], seconds: float) -> T:
    """Do work that only reads in a lane. An interrupt abandons it. Raises StorageError if its storage stalls."""
    return run(work, Watchdog(seconds)).result()


def run_to_the_end(work: Callable[[], T], seconds: float) -> T:
    """Do work in a lane. An interrupt ends the wait for it, but not the work."""
    return run(work, Watchdog(seconds), lambda task, error: None).result()


def begin(work: Callable[[], T]) -> Task[T]:
    """Let a lane do work for which nothing waits, not even the end of the program. Each of its storage operations has a
    lane and a time limit of its own."""
    task = _LaneTask(work, None)
    _start(task)
    return task


def await_end(task: Task[T], watchdog: Watchdog) -> None:
    """Wait until a task has ended, or its storage has stalled."""
    poll = min(POLL_SECONDS, watchdog.seconds / 4)
    while not task.wait(poll):
        if watchdog.stall_error():
            return
        if isinstance(task, _LaneTask) and not task.has_begun:  # an interrupt prevented that
            _start(task)


def _wait(task: Task[T], watchdog: Watchdog, requests: SimpleQueue[Request | None], until: float | None) -> None:
    global _has_stalled
    while True:
        poll = min(POLL_SECONDS, watchdog.seconds / 4)
        left = poll if until is None else min(poll, until - time.monotonic())
        request = None
        try:
            request = requests.get(timeout=max(0.0, left))
            is_over = request is None
        except Empty:
            is_over = task.done() or left <= 0
        if is_over:
            return
        if request is not None:
            request()
            del request  # it may hold much memory
        if error := watchdog.stall_error():  # also while the lane reports that nothing moves
            _has_stalled |= isinstance(error, StorageError)  # not if another process has died
            replace_workers()  # these threads may also hang
            raise error


# The lane -------------------------------------------------------------------------------------------------


def _start(task: _LaneTask[Any]) -> None:
    """Let an idle lane do a task, or a new one. Without threads, while Python shuts down, it is done here."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = _Inbox()
        try:
            start_thread(functools.partial(_run_lane, inbox), "jaxckpt-lane")
            finish_first()
        except RuntimeError:  # Python 3.12 starts no threads during its shutdown
            if not is_shutting_down():
                raise
            if _has_stalled:  # without a thread, the program could hang instead of exiting
                message = "storage has stopped responding, and the program is exiting"
                raise StorageError(errno.ETIMEDOUT, message) from None
            task.run()
            return
    inbox.put(task)


def _run_lane(inbox: _Inbox) -> None:
    trace = profile = None
    while True:
        task = inbox.get()
        # Debuggers, coverage and profilers: Python gives these only to threads of `threading.Thread`.
        if threading.gettrace() is not trace:
            sys.settrace(trace := threading.gettrace())
        if threading.getprofile() is not profile:
            sys.setprofile(profile := threading.getprofile())
        if task.watchdog is not None:
            _busy[inbox] = task.watchdog
        task.run()
        del task  # it may hold much memory
        _busy.pop(inbox, None)
        if len(_idle) >= MAX_IDLE:
            break
        _idle.append(inbox)


def release_caller() -> None:
    """Let the caller of this lane's task return, while the task continues."""
    requests, _current.requests = _current.requests, None
    if requests is not None:
        requests.put(None)
        time.sleep(0)  # gives the caller the interpreter's lock now, instead of after the switch interval of 5 ms


def in_caller(request: Request) -> None:
    """Let the caller that waits for this lane's task call this, at some time before it returns. If none waits, it is
    called here."""
    if _current.requests is None:
        request()
    else:
        _current.requests.put(request)


# At exit, and in a fork -----------------------------------------------------------------------------------


_finishers = list[Callable[[], object]]()
_registered: Callable[[], object] | None = None

_ABANDONED_SECONDS = 2.0
"""How long the end of the program waits for lanes that were abandoned outside of a storage operation."""


def finish_at_exit(finish: Callable[[], object]) -> None:
    """Call this once when the program exits, after those that were given earlier."""
    if finish not in _finishers:
        _finishers.append(finish)


def finish_first() -> None:
    """At exit, finish before what was registered with atexit so far, such as the end of jax.distributed."""
    global _registered
    earlier, _registered = _registered, functools.partial(_finish)
    atexit.register(_registered)  # first, because an interrupt may come now
    if earlier is not None:
        atexit.unregister(earlier)
    elif (processes := sys.modules.get("multiprocessing.process")) and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _finish_child, exitpriority=0)  # a child that was forked calls nothing of atexit


def _finish_child() -> None:
    _finish()
    exit_with_status()


def _finish() -> None:
    """Let what has registered finish its work, then wait for busy lanes, unless their storage has stalled. If Python
    stops a thread inside JAX's C++ code, for example while it frees arrays, the process aborts."""
    for finish in _finishers:
        finish()
    until = awake_seconds() + _ABANDONED_SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        while any(
            watchdog.stall_error() is None or (not watchdog.is_operating and awake_seconds() < until)
            for watchdog in [*_busy.values()]
        ):
            time.sleep(0.002)


def _forget_lanes() -> None:
    """In a forked child, which has none of the threads."""
    _idle.clear()
    _busy.clear()
    global _registered
    if _registered is not None:
        atexit.unregister(_registered)
        _registered = None


os.register_at_fork(after_in_child=_forget_lanes)


# The exit status of the program ---------------------------------------------------------------------------
# Python prints errors in functions that are registered with atexit, but then exits with status 0.

_status = 0


def set_exit_status(status: int) -> None:
    """Make the program exit with this status, whatever it passes to sys.exit. Only the first call has an effect."""
    global _status
    _status = _status or status


def exit_with_status() -> None:
    """Register this with atexit. Functions that are registered later run before it. If there is a status, functions
    that were registered earlier do not run."""
    if _status:  # Python cannot exit cleanly while a thread is writing
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # it is None, gone or closed
                stream.flush()
        os._exit(_status)
