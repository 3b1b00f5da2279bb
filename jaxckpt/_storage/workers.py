"""jaxckpt's own threads that move bytes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from jaxckpt._runtime.stalls import Watch
from jaxckpt._runtime.threads import POLL_SECONDS, Task, is_shutting_down, start_thread

T = TypeVar("T")

THREADS = min(32, max(2, os.cpu_count() or 1))
"""Threads that move bytes. More threads than cores compete with each other: 4 on 2 cores made a restore 5 to 8 %
slower."""


class Workers:
    """Threads that move bytes. Unlike a ThreadPoolExecutor, they also work while the interpreter shuts down, so that a
    running save_async can finish."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo = SimpleQueue[Task[Any]]()
        self._lock = threading.Lock()
        self._started = False

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                for number in range(THREADS):
                    start_thread(self._run, f"{self._name}-{number}")
                self._started = True

    def submit(self, work: Callable[[], T]) -> Task[T]:
        task = Task(work)
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

    def _run(self) -> None:
        while True:
            task = self._todo.get()
            task.run()
            note_progress()
            del task  # it holds the data


_moves = 0


def note_progress() -> None:
    """Note that some bytes have moved, for every `StorageThread` whose work waits for bytes."""
    global _moves
    _moves += 1  # two threads may count as one, but the number changes


_workers = Workers("jaxckpt-files")
_waiting = Workers("jaxckpt-rules")


def replace_workers() -> None:
    """Abandon the threads, and start new ones for the next work: after a fork, or if the threads hang."""
    global _workers, _waiting
    _workers, _waiting = Workers("jaxckpt-files"), Workers("jaxckpt-rules")


os.register_at_fork(after_in_child=replace_workers)


def submit(work: Callable[[], T]) -> Task[T]:
    """Run work in the threads that move bytes. It must not wait for other such work."""
    return _workers.submit(work)


def submit_waiting(work: Callable[[], T]) -> Task[T]:
    """Run work that waits for the threads that move bytes, in other threads. It must not wait for other such work."""
    return _waiting.submit(work)


class StorageThread:
    """Uses storage in another thread, and stops waiting for that thread if no bytes have moved for `seconds`.

    with StorageThread(seconds) as thread:
        content = thread.run("reading /ckpt", read)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watch = Watch(seconds)
        self._todo = SimpleQueue[Task[Any] | None]()
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.put(None)

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Return or raise what the work does. Raises StorageError, which names `what`, if the work hangs."""
        task = Task(work)
        if not self._started:
            try:
                start_thread(functools.partial(_run_all, self._todo), "jaxckpt-storage")
            except RuntimeError:
                if not is_shutting_down():
                    raise
                return work()  # Python 3.12 starts no threads during its shutdown
            self._started = True
        moves = _moves
        self._todo.put(task)
        with self._watch.operation(what):
            while not task.wait(min(POLL_SECONDS, self._seconds / 4)):
                if moves != _moves:
                    moves = _moves
                    self._watch.note_progress()
                if error := self._watch.stall_error():
                    replace_workers()  # these threads may also hang
                    raise error
        return task.result()


def _run_all(todo: SimpleQueue[Task[Any] | None]) -> None:
    while (task := todo.get()) is not None:
        task.run()
        del task  # it holds the data


@dataclass(frozen=True, slots=True)
class MappedWork:
    """Running work, and the function that computes its result."""

    pending: Any
    finish: Callable[[Any], Any]
    """Called with the work. It gets the result, which may raise."""

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Any:
        return self.finish(self.pending)


@dataclass(frozen=True, slots=True)
class JoinedWork:
    """Several pieces of running work as one."""

    works: Sequence[Any]

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def result(self) -> None:
        """Raises the first error after all work has ended, because the work writes into the caller's memory."""
        error = None
        for work in self.works:
            try:
                work.result()
            except Exception as found:
                error = error or found
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class ChainedWork:
    """Work that starts further work. Its result is the result of the further work."""

    first: Any

    def done(self) -> bool:
        return self.first.done() and self.first.result().done()

    def result(self) -> Any:
        return self.first.result().result()


@dataclass(frozen=True, slots=True)
class CompletedWork(Generic[T]):
    """Completed work, and its result."""

    value: T

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value
