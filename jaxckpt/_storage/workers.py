"""Threads of our own that move bytes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from jaxckpt._runtime.stalls import Watch
from jaxckpt._runtime.threads import POLL_SECONDS, Task, ending, start_thread

T = TypeVar("T")


class Workers:
    """Threads that move bytes. Unlike those of a ThreadPoolExecutor they still do while the interpreter ends, when a
    save_async is seen to its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo = SimpleQueue[Task[Any]]()
        self._lock = threading.Lock()
        self._started = False

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                # More than there are cores only take each other's turns: 4 on 2 cores made a restore 5 to 8 % slower.
                for number in range(min(32, max(2, os.cpu_count() or 1))):
                    start_thread(self._run, f"{self._name}-{number}")
                self._started = True

    def submit(self, work: Callable[[], T]) -> Task[T]:
        task = Task(work)
        try:
            if not self._started:
                self._start()
        except RuntimeError:
            if not ending():
                raise
            task.run()  # Python 3.12 starts no thread any more
        else:
            self._todo.put(task)
        return task

    def _run(self) -> None:
        while True:
            task = self._todo.get()
            task.run()
            del task  # it holds the data


_workers = Workers("jaxckpt-files")
_waiting = Workers("jaxckpt-rules")


def renew_workers() -> None:
    """Leave the threads as they are and start others with the next work: in a fork, or when these hang."""
    global _workers, _waiting
    _workers, _waiting = Workers("jaxckpt-files"), Workers("jaxckpt-rules")


os.register_at_fork(after_in_child=renew_workers)


def submit(work: Callable[[], T]) -> Task[T]:
    """Have the threads that move bytes do some work, which must not wait for other such work."""
    return _workers.submit(work)


def submit_waiting(work: Callable[[], T]) -> Task[T]:
    """Have other threads do some work that waits for the threads that move bytes, but not for other work like it."""
    return _waiting.submit(work)


class Aside:
    """Has another thread use storage: whoever waits for that thread gives up once no byte has moved for `seconds`.

    with Aside(seconds) as aside:
        content = aside.do("reading /ckpt", read)
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

    def do(self, what: str, work: Callable[[], T]) -> T:
        """What the work returns or raises. Raises StorageError, which names `what`, if the work hangs."""
        task = Task(work)
        if not self._started:
            try:
                start_thread(functools.partial(_run_all, self._todo), "jaxckpt-storage")
            except RuntimeError:
                if not ending():
                    raise
                return work()  # Python 3.12 starts no thread any more
            self._started = True
        self._todo.put(task)
        with self._watch.doing(what):
            while not task.wait(min(POLL_SECONDS, self._seconds / 4)):
                if error := self._watch.stalled():
                    renew_workers()  # they may hang too
                    raise error
        return task.result()


def _run_all(todo: SimpleQueue[Task[Any] | None]) -> None:
    while (task := todo.get()) is not None:
        task.run()
        del task  # it holds the data


@dataclass(frozen=True, slots=True)
class Then:
    """Work under way, and what makes its result."""

    pending: Any
    finish: Callable[[Any], Any]
    """Called with the work, whose own result may raise."""

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> Any:
        return self.finish(self.pending)


@dataclass(frozen=True, slots=True)
class All:
    """Several works as one."""

    works: Sequence[Any]

    def done(self) -> bool:
        return all(work.done() for work in self.works)

    def result(self) -> None:
        """Raises what the first of them raised, once none is under way: they write into the caller's memory."""
        error = None
        for work in self.works:
            try:
                work.result()
            except Exception as found:
                error = error or found
        if error is not None:
            raise error


@dataclass(frozen=True, slots=True)
class Continued:
    """Work whose result is further work, as one."""

    first: Any

    def done(self) -> bool:
        return self.first.done() and self.first.result().done()

    def result(self) -> Any:
        return self.first.result().result()


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """Work that nothing is left to do of, and its result."""

    value: T

    def done(self) -> bool:
        return True

    def result(self) -> T:
        return self.value
