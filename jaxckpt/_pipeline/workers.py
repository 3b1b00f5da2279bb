"""jaxckpt's own threads that move bytes."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from jaxckpt._options import THREADS
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.threads import POLL_SECONDS, Latch, Task, is_shutting_down, start_thread
from jaxckpt._pipeline.watchdog import Watchdog, current_watchdog, under
from jaxckpt.errors import StorageError

S = TypeVar("S")
T = TypeVar("T")


class Workers:
    """Threads that move bytes. Unlike a ThreadPoolExecutor, they also work while the interpreter shuts down, so that a
    running save_async can finish, and a thread that hangs does not keep the program from exiting."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._name = name
        self._n_threads = threads
        self._todo = SimpleQueue[Task[Any] | None]()
        self._lock = threading.Lock()
        self._started = False

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                for number in range(self._n_threads):
                    start_thread(self._run, f"{self._name}-{number}")
                self._started = True

    def _run(self) -> None:
        _this_thread.workers = self
        _run_all(self._todo)

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Run work as a part of the storage operation of this thread, if there is one.

        What one of these threads submits is done before this returns, because all of them could otherwise wait for work
        that is left in the queue.
        """
        task = Task(functools.partial(_run_work, current_watchdog(), work))
        if _this_thread.workers is self:
            task.run()
            return task
        try:
            if not self._started:
                self._start()
        except RuntimeError:
            if not is_shutting_down():
                raise
            task.run()  # Python 3.12 starts no threads during its shutdown
        else:
            self._todo.put(task)
        return task

    def close(self) -> None:
        """End the threads after all submitted work."""
        for _ in range(self._n_threads if self._started else 0):
            self._todo.put(None)


class _Thread(threading.local):
    workers: Workers | None = None
    """Whose thread this is."""


_this_thread = _Thread()


def _run_work(watchdog: Watchdog | None, work: Callable[[], T]) -> T:
    with under(watchdog):
        try:
            return work()
        finally:
            note_progress()


def _run_all(todo: SimpleQueue[Task[Any] | None]) -> None:
    while (task := todo.get()) is not None:
        task.run()
        del task  # it holds the data


def note_progress() -> None:
    """Note that bytes have moved, or that storage has answered, in the storage operation of this thread."""
    if (watchdog := current_watchdog()) is not None:
        watchdog.note_progress()


_workers = Workers("jaxckpt-files")
_waiting = Workers("jaxckpt-rules")

_idle = deque[SimpleQueue[Task[Any] | None]]()
"""The queues of threads that have no `StorageThread` now."""

_MAX_IDLE = 8
_has_stalled = False


def replace_workers() -> None:
    """Abandon the threads, and start new ones for the next work: after a fork, or if the threads hang."""
    global _workers, _waiting
    _workers, _waiting = Workers("jaxckpt-files"), Workers("jaxckpt-rules")


def _forget_threads() -> None:
    """In a forked child, which has none of the threads."""
    global _idle
    replace_workers()
    _idle = deque()


os.register_at_fork(after_in_child=_forget_threads)


def submit(work: Callable[[], T]) -> Task[T]:
    """Run work in the threads that move bytes."""
    return _workers.submit(work)


def submit_waiting(work: Callable[[], T]) -> Task[T]:
    """Run work that waits for the threads that move bytes, in other threads."""
    return _waiting.submit(work)


def run_shared(works: Sequence[Callable[[], object]]) -> None:
    """Do several pieces of work in this thread, and in those of the threads that move bytes that are idle.

    It never waits for a thread that is busy with something else: what no other thread has begun is done here.
    """
    left, errors, n_left = list(works), list[BaseException](), itertools.count(len(works) - 1, -1)
    ended = Latch()

    def work_off() -> None:
        with contextlib.suppress(IndexError):
            while True:
                work = left.pop()
                try:
                    work()
                except BaseException as error:
                    errors.append(error)
                finally:
                    if not next(n_left):
                        ended.set()

    for _ in works[1:THREADS]:
        submit(work_off)
    work_off()
    if works:
        ended.wait()
    if errors:
        raise errors[0]


class StorageThread:
    """Uses storage in another thread, and stops waiting for that thread if no bytes have moved for `seconds`.

    with StorageThread(seconds) as thread:
        content = thread.run("reading /ckpt", read)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watchdog = Watchdog(seconds)
        self._todo: SimpleQueue[Task[Any] | None] | None = None
        self.hung: Task[Any] | None = None
        """The work that hung."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        todo, self._todo = self._todo, None
        if todo is None:
            return
        if len(_idle) < _MAX_IDLE:
            _idle.append(todo)
        else:
            todo.put(None)

    def run(self, what: str, work: Callable[[], T], meanwhile: Callable[[], object] | None = None) -> T:
        """Return or raise what the work does. Raises StorageError, which names `what`, if the work hangs.

        While it runs, `meanwhile` is called every 0.1 s, in this thread.

        If this thread already carries out a watched operation, the work is a part of that.
        """
        global _has_stalled
        outer = current_watchdog()
        if outer is not None:
            outer.require_not_stalled()
            result = work()
            outer.note_progress()
            return result
        self._watchdog.require_not_stalled()
        todo, self._todo = self._todo, None  # stays None if the work hangs or an interrupt ends the wait
        if todo is None and (todo := _idle_or_new()) is None:
            return work()
        task = Task(functools.partial(_run_operation, self._watchdog, what, work))
        try:
            todo.put(task)
            while not task.wait(min(0.1 if meanwhile else POLL_SECONDS, self._seconds / 4)):
                if meanwhile is not None:
                    meanwhile()
                if error := self._watchdog.stall_error():
                    _has_stalled, self.hung = True, task
                    replace_workers()  # these threads may also hang
                    raise error
            self._todo = todo
        finally:
            if self._todo is None:
                self._watchdog.abandon()
                todo.put(None)
        return task.result()


def run_watched(what: str, seconds: float, work: Callable[[], T]) -> T:
    """Do one piece of work in a StorageThread."""
    with StorageThread(seconds) as thread:
        return thread.run(what, work)


def _run_operation(watchdog: Watchdog, what: str, work: Callable[[], T]) -> T:
    with watchdog.operation(what):
        return work()


def _idle_or_new() -> SimpleQueue[Task[Any] | None] | None:
    """The queue of a thread; None if Python, during its shutdown, starts none."""
    with contextlib.suppress(IndexError):
        return _idle.pop()
    todo = SimpleQueue[Task[Any] | None]()
    try:
        start_thread(functools.partial(_run_all, todo), "jaxckpt-storage")
    except RuntimeError:  # Python 3.12 starts no threads during its shutdown
        if not is_shutting_down():
            raise
        if _has_stalled:  # without a thread, the program could hang instead of exiting
            raise StorageError(errno.ETIMEDOUT, "storage has stopped responding, and the program is exiting") from None
        return None
    return todo


@dataclass(frozen=True, slots=True)
class MappedWork(Generic[S, T]):
    """Running work, and the function that computes its result."""

    pending: Pending[S]
    finish: Callable[[Pending[S]], T]
    """Called with the work. It gets the result, which may raise."""

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> T:
        return self.finish(self.pending)


@dataclass(frozen=True, slots=True)
class JoinedWork:
    """Several pieces of running work as one."""

    works: Sequence[Pending[object]]

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def result(self) -> None:
        """Raises the first error after all work has ended, because the work writes into the caller's memory."""
        error = None
        for work in self.works:
            try:
                work.result()
            except Exception as failure:
                error = error or failure
        if error is not None:
            raise error
