"""jaxckpt's own threads that move bytes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from jaxckpt._options import THREADS
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.threads import Task, is_shutting_down, start_thread
from jaxckpt._pipeline.watchdog import Watchdog, current_watchdog, under

S = TypeVar("S")
T = TypeVar("T")


class Workers:
    """Threads that move bytes. Unlike a ThreadPoolExecutor, they also work while the interpreter shuts down, so that a
    running save_async can finish, and a thread that hangs does not keep the program from exiting."""

    def __init__(self, name: str, threads: int = THREADS, *, niceness: int = 0) -> None:
        self._name = name
        self._n_threads = threads
        self._niceness = niceness
        self._todo = SimpleQueue[Task[Any] | None]()
        self._lock = threading.Lock()
        self._started = False
        self._closed = False

    def _start(self) -> None:
        with self._lock:
            if not (self._started or self._closed):
                for number in range(self._n_threads):
                    start_thread(self._run, f"{self._name}-{number}")
                self._started = True

    def _run(self) -> None:
        _this_thread.workers = self
        if self._niceness and sys.platform == "linux":  # elsewhere, it applies to the whole process
            os.nice(self._niceness)
        while (task := self._todo.get()) is not None:
            task.run()
            del task  # it holds the data

    def submit(self, work: Callable[[], T]) -> Task[T]:
        """Run work as a part of the storage operation of this thread, if there is one.

        What one of these threads submits is done before this returns, because all of them could otherwise wait for work
        that is left in the queue. So is what a thread of lower priority submits to others: if it started them, they
        would keep its priority.
        """
        task = Task(functools.partial(_run_work, current_watchdog(), work))
        own = _this_thread.workers
        if own is self or _this_thread.works_alone or (own is not None and own._niceness):
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
            if self._closed:  # perhaps before that
                task.run()
        return task

    def close(self) -> None:
        """End the threads after all submitted work. What another thread still submits is done."""
        with self._lock:
            self._closed = True
            for _ in range(self._n_threads if self._started else 0):
                self._todo.put(None)


class _Thread(threading.local):
    workers: Workers | None = None
    """Whose thread this is."""

    works_alone = False
    """Whether it does itself what it submits."""


_this_thread = _Thread()


def _run_work(watchdog: Watchdog | None, work: Callable[[], T]) -> T:
    with under(watchdog, as_worker=True):
        try:
            return work()
        finally:
            note_progress()


def note_progress() -> None:
    """Note that bytes have moved, or that storage has answered, in the storage operation of this thread."""
    if (watchdog := current_watchdog()) is not None:
        watchdog.note_progress()


NICENESS = 3
"""How much lower the priority of threads for background saves is. On 2 cores, with a loop that always computes, the
slowest 1 % of its steps take 0.1 ms instead of 2, and a save of 1 GiB takes 0.5 s instead of 0.4; with a loop that
waits for a device, as long as before. 5 and 10 are no better for the loop. A program cannot raise a priority again, so
these threads do nothing else."""

BACKGROUND_THREADS = max(1, min(8, THREADS // 4))
"""Threads for background saves. Each competes with the training loop for Python's lock. On 16 cores and an H100, with
steps of 0.09 ms and saves of 4 GiB, 16 threads leave the loop 40 % of its speed, the slowest 1 % of steps take 1.8 ms,
and a save ends after 0.57 s; 8 threads: 67 %, 0.8 ms, 0.45 s; 4: 79 %, 0.5 ms, 0.79 s; 2: 81 %, 0.5 ms, 1.7 s."""


def _new_workers() -> tuple[Workers, Workers, Workers]:
    background = Workers("jaxckpt-background", BACKGROUND_THREADS, niceness=NICENESS)
    return Workers("jaxckpt-files"), background, Workers("jaxckpt-waiting")


_workers, _background, _waiting = _new_workers()


def replace_workers() -> None:
    """Start new threads for the next work, because the present ones may hang. Those that do not hang end."""
    abandoned = _workers, _background, _waiting
    _forget_workers()
    for workers in abandoned:
        workers.close()


def _forget_workers() -> None:
    """Start new threads for the next work. A forked child has none of the present ones."""
    global _workers, _background, _waiting
    _workers, _background, _waiting = _new_workers()


os.register_at_fork(after_in_child=_forget_workers)


def submit(work: Callable[[], T]) -> Task[T]:
    """Run work in the threads that move bytes."""
    watchdog = current_watchdog()
    workers = _background if watchdog is not None and watchdog.yields_processors else _workers
    return workers.submit(work)


@contextlib.contextmanager
def work_alone() -> Generator[None]:
    """A block in which this thread itself does what it submits: for work that takes less time than a hand-over to
    another thread and back, which is about 0.3 ms."""
    outside, _this_thread.works_alone = _this_thread.works_alone, True
    try:
        yield
    finally:
        _this_thread.works_alone = outside


def start(work: Callable[[], T], watchdog: Watchdog) -> Task[T]:
    """Run work that waits for the threads that move bytes, in a thread of its own."""
    task = Task(functools.partial(_run_work, watchdog, work))
    start_thread(task.run, "jaxckpt-shared-read")
    return task


def submit_waiting(work: Callable[[], T]) -> Task[T]:
    """Run work that waits for the threads that move bytes, in other threads."""
    return _waiting.submit(work)


def run_shared(works: Sequence[Callable[[], object]]) -> None:
    """Do several pieces of work in this thread, and in those of the threads that move bytes that are idle.

    It never waits for a thread that is busy with something else: what no other thread has begun is done here.
    """
    tasks = [Task(work) for work in works]

    def work_off() -> None:
        for task in tasks:
            task.run()

    for _ in tasks[1:THREADS]:
        submit(work_off)
    work_off()
    JoinedWork(tasks).result()


@dataclass(frozen=True, slots=True)
class MappedWork(Generic[S, T]):
    """Running work, and the function that computes its result."""

    pending: Pending[S]
    finish: Callable[[Pending[S]], T]
    """Called with `pending`, whose `result` it must call. That may raise."""

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
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
