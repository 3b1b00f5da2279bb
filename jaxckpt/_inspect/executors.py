"""Work that an executor does: units that other processes do, and what becomes of those that they lose.

    a call ─▶ units: paths, names and boxes, no data ─▶ Executor.submit ─▶ workers ─▶ results, in the order of the units
                                                                   └─▶ the caller: it failed, or the worker died

A unit can be done twice, also by two processes at once, with the same result. So whatever a worker cannot do, the
caller does: the outcome, and each error, is that of one process.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxckpt._model.select import Select
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import log
from jaxckpt._pipeline.threads import awake_seconds
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import local_path
from jaxckpt.errors import InputError, NotACheckpointError

T = TypeVar("T")
R = TypeVar("R")

UNIT_BYTES = 64 << 20
"""Approximate bytes of a unit. Its overhead is about 1 ms."""

_SENT = 1024
"""The most units that an executor has at a time."""

_MOST_LOST = 3
"""How many units an executor may lose before it has done any, as it does if they do not pickle."""

_POLL_SECONDS = 0.1


def require_executor(executor: object) -> None:
    """Raise InputError unless this is an executor, or None."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise InputError(
            "executor must be a concurrent.futures.Executor, such as ProcessPoolExecutor(8) or the get_executor() of a"
            f" Dask client, found a {type(executor).__name__}"
        )


class _Outcome(NamedTuple):
    """What a worker returns. An error is returned as text, because not all errors pickle."""

    result: Any
    error: str = ""


def _attempt(work: Callable[[T], R], unit: T) -> _Outcome:
    """Do a unit. In a worker. Dask does equal calls only once; the `work` of each call of jaxckpt differs."""
    try:
        return _Outcome(work(unit))
    except Exception as error:
        return _Outcome(None, f"{type(error).__name__}: {error}")


class _Workers(Generic[T, R]):
    """The executor, until it is given up."""

    def __init__(
        self, executor: Executor | None, work: Callable[[T], R], seconds: float, check: Callable[[], object]
    ) -> None:
        self._executor = executor
        self._work = work
        self._seconds = seconds
        self._check = check
        self._answered = awake_seconds()
        self._n_lost = 0
        self._has_done_any = False

    def send(self, unit: T) -> Future[_Outcome] | None:
        """Start a unit; None if the executor takes no more."""
        if self._executor is None:
            return None
        try:
            return self._executor.submit(_attempt, self._work, unit)
        except Exception as error:  # such as BrokenExecutor; or it was shut down
            self._give_up(f"takes no more work ({_show(error)})")
            return None

    def _give_up(self, why: str) -> None:
        if self._executor is not None:
            self._executor = None
            log.warning("the executor %s: this process does the rest of the work itself", why)

    def result(self, unit: T, future: Future[_Outcome] | None) -> R:
        """The result of a unit. Does it here if no worker can, or does not answer."""
        if future is None or not self._is_done(future):
            return self._work(unit)
        try:
            outcome = future.result()
        except Exception as error:  # of the executor: a worker died, or the unit does not pickle
            self._note_lost(error)
            return self._work(unit)
        self._answered, self._has_done_any = awake_seconds(), True
        if outcome.error:
            log.info("a worker could not do a unit (%s): this process does it", outcome.error)
            return self._work(unit)
        return outcome.result

    def _note_lost(self, error: Exception) -> None:
        self._n_lost += 1
        if isinstance(error, BrokenExecutor):  # it stays broken
            self._give_up(f"takes no more work ({_show(error)})")
        elif self._has_done_any or self._n_lost < _MOST_LOST:
            log.warning("the executor lost a unit (%s): this process does it", _show(error))
        else:
            self._give_up(f"lost its first {_MOST_LOST} units ({_show(error)})")

    def _is_done(self, future: Future[_Outcome]) -> bool:
        """Wait for a unit. Returns whether it is done: false if no worker has answered for too long."""
        self._answered = max(self._answered, awake_seconds() - self._seconds / 2)  # the caller may have worked itself
        while True:
            if wait([future], _POLL_SECONDS).done:
                return True
            if self._executor is None:
                future.cancel()
                return False
            self._check()
            if awake_seconds() - self._answered > self._seconds:
                self._give_up(f"has not finished a unit for {self._seconds:g} s")


def _show(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def spread(
    executor: Executor | None,
    work: Callable[[T], R],
    units: Iterable[T],
    seconds: float,
    check: Callable[[], object] = require_not_stalled,
) -> Generator[tuple[T, R]]:
    """Each unit with the result of `work(unit)`, in order. Workers do the units; the caller does what they cannot, and
    all of them without an executor.

    `work`, `units` and results must pickle. While this waits, it calls `check`, which may raise. If no worker finishes
    a unit for `seconds`, the caller does the rest. Also after an error, the generator ends only when no worker does a
    unit of it any more, as far as the executor knows. In a lane.
    """
    workers = _Workers[T, R](executor, work, seconds, check)
    left = deque[tuple[T, Future[_Outcome] | None]]()
    try:
        for unit in units:
            left.append((unit, workers.send(unit)))
            while left and (len(left) >= _SENT or (future := left[0][1]) is None or future.done()):
                sent, future = left.popleft()
                yield sent, workers.result(sent, future)
        while left:
            sent, future = left.popleft()
            yield sent, workers.result(sent, future)
    finally:
        running = [future for _, future in left if future is not None and not future.cancel()]
        until = awake_seconds() + seconds
        while running and awake_seconds() < until:
            running = [future for future in running if not future.done()]
            time.sleep(_POLL_SECONDS if running else 0)


# What a worker opens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedElsewhere:
    """A checkpoint that a call has opened, in a form that pickles: other processes open the same one."""

    location: Store | Location
    digest: str
    options: Options
    rename: Renaming | None = None
    select: Select | None = None

    @classmethod
    def of(
        cls,
        source: NativeCheckpoint | ForeignCheckpoint,
        location: Location,
        options: Options,
        rename: Renaming | None = None,
        select: Select | None = None,
    ) -> OpenedElsewhere:
        """A checkpoint that was opened at a location."""
        options = replace(options, progress=None)
        if isinstance(source, NativeCheckpoint):
            return cls(source.store.absolute(), source.digest, options, rename, select)
        if isinstance(location, str):
            location = local_path(location) or location
        return cls(location, source.digest, options, rename, select)

    def open(self) -> Source:
        """The same checkpoint in this process, with its leaves renamed and selected. Raises NotACheckpointError if
        another one is there."""
        location = self.location
        if isinstance(location, str | os.PathLike | ForeignCheckpoint):
            source = source_at(location, self.options)
        else:
            source = NativeCheckpoint.at(location, self.digest)
        if source.digest != self.digest:
            raise NotACheckpointError(f"the checkpoint at {source.url} has changed since the call began")
        return renamed_source(source, self.rename, self.select)


_REMEMBERED = 4

_remembered = dict[str, Any]()


@dataclass(frozen=True, slots=True)
class Remembered(Generic[T]):
    """What a process makes once for all units of a call, such as an open checkpoint."""

    key: str
    make: Callable[[], T]

    @classmethod
    def of(cls, make: Callable[[], T]) -> Remembered[T]:
        return cls(uuid.uuid4().hex, make)

    def get(self) -> T:
        """It, made now if this process has none. Two threads may both make it, and keep one."""
        made = _remembered.get(self.key)
        if made is None:
            made = _remembered.setdefault(self.key, self.make())
            for old in [*_remembered][:-_REMEMBERED]:
                _remembered.pop(old, None)
        return made


def grouped(sizes: Iterable[tuple[T, int]], most: int | None = None) -> Generator[tuple[T, ...]]:
    """Consecutive things, given with their bytes, in groups of about `most` bytes, by default `UNIT_BYTES`."""
    most = UNIT_BYTES if most is None else most
    group: list[T] = []
    n_bytes = 0
    for thing, size in sizes:
        if group and n_bytes + size > most:
            yield tuple(group)
            group, n_bytes = [], 0
        group.append(thing)
        n_bytes += size
    if group:
        yield tuple(group)
