"""Work that an executor does: units that other processes do, and what becomes of those that they lose.

    a call ─▶ units: paths, names and boxes, no data ─▶ Executor.submit ─▶ workers ─▶ results, in the order of the units
                 ▲────────── again: the worker died ◀─┘            └─▶ the caller: it failed, or the executor is broken

A unit can be done twice, also by two processes at once, with the same result. So whatever a worker cannot do, the
caller does: the outcome, and each error, is that of one process.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxckpt._model.select import Select
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import log
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

_TRIES = 3
"""How often an executor may lose a unit before the caller does it. A unit may itself kill workers."""

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


def _attempt(work: Callable[[T], R], unit: T, attempt: str) -> _Outcome:
    """Do a unit. In a worker. `attempt` differs for each attempt, because Dask does equal calls only once."""
    try:
        return _Outcome(work(unit))
    except Exception as error:
        return _Outcome(None, f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _Sent(Generic[T]):
    """A unit, and where it is done."""

    unit: T
    future: Future[_Outcome] | None
    """None if the caller does it."""

    tries: int = 1


class _Workers(Generic[T, R]):
    """The executor, until it is given up."""

    def __init__(self, executor: Executor, work: Callable[[T], R], seconds: float, check: Callable[[], object]) -> None:
        self._executor: Executor | None = executor
        self._work = work
        self._seconds = seconds
        self._check = check
        self._answered = time.monotonic()
        self._has_done_any = False

    def send(self, unit: T) -> Future[_Outcome] | None:
        """Start a unit; None if the executor takes no more."""
        if self._executor is None:
            return None
        try:
            return self._executor.submit(_attempt, self._work, unit, uuid.uuid4().hex)
        except Exception as error:  # such as BrokenExecutor, which stays broken; or it was shut down
            self._give_up(f"takes no more work ({_show(error)})")
            return None

    def _give_up(self, why: str) -> None:
        if self._executor is not None:
            self._executor = None
            log.warning("the executor %s: this process does the rest of the work itself", why)

    def result(self, sent: _Sent[T]) -> R:
        """The result of a unit. Does it here if no worker can."""
        while sent.future is not None and self._is_done(sent.future):
            try:
                outcome = sent.future.result()
            except Exception as error:  # of the executor: a worker died, or the unit does not pickle
                sent.future = self._send_again(sent, _show(error))
                continue
            self._answered, self._has_done_any = time.monotonic(), True
            if not outcome.error:
                return outcome.result
            log.info("a worker could not do a unit (%s): this process does it", outcome.error)
            break
        sent.future = None
        return self._work(sent.unit)

    def _send_again(self, sent: _Sent[T], lost: str) -> Future[_Outcome] | None:
        """Start a unit again that was lost for this reason; None if the caller does it."""
        if sent.tries < _TRIES:
            sent.tries += 1
            if (again := self.send(sent.unit)) is not None:
                log.warning("the executor lost a unit (%s): it is done again", lost)
            return again
        if self._has_done_any:
            log.warning("the executor lost a unit %d times (%s): this process does it", _TRIES, lost)
        else:  # such as arguments that do not pickle
            self._give_up(f"lost its first unit {_TRIES} times ({lost})")
        return None

    def _is_done(self, future: Future[_Outcome]) -> bool:
        """Wait for a unit. Returns whether it is done: false if no worker has answered for too long."""
        self._answered = max(self._answered, time.monotonic() - self._seconds / 2)  # the caller may have worked itself
        while not wait([future], _POLL_SECONDS).done:
            if self._executor is None:
                future.cancel()
                return False
            self._check()
            if time.monotonic() - self._answered > self._seconds:
                self._give_up(f"has not finished a unit for {self._seconds:g} s")
        return True


def _show(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def spread(
    executor: Executor,
    work: Callable[[T], R],
    units: Iterable[T],
    seconds: float,
    check: Callable[[], object] = require_not_stalled,
) -> Generator[tuple[T, R]]:
    """Each unit with the result of `work(unit)`, in order. Workers do the units; the caller does what they cannot.

    `work`, `units` and results must pickle. While this waits, it calls `check`, which may raise. If no worker finishes
    a unit for `seconds`, the caller does the rest. Also after an error, the generator ends only when no worker does a
    unit of it any more, as far as the executor knows. In a lane.
    """
    workers = _Workers[T, R](executor, work, seconds, check)
    left = deque[_Sent[T]]()
    try:
        for unit in units:
            left.append(_Sent(unit, workers.send(unit)))
            while left and (len(left) >= _SENT or left[0].future is None or left[0].future.done()):
                sent = left.popleft()
                yield sent.unit, workers.result(sent)
        while left:
            sent = left.popleft()
            yield sent.unit, workers.result(sent)
    finally:
        running = [sent.future for sent in left if sent.future is not None and not sent.future.cancel()]
        until = time.monotonic() + seconds
        while running and time.monotonic() < until:
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


def grouped(sizes: Iterable[tuple[T, int]]) -> Generator[tuple[T, ...]]:
    """Consecutive things, given with their bytes, in groups of about `UNIT_BYTES`."""
    group: list[T] = []
    n_bytes = 0
    for thing, size in sizes:
        if group and n_bytes + size > UNIT_BYTES:
            yield tuple(group)
            group, n_bytes = [], 0
        group.append(thing)
        n_bytes += size
    if group:
        yield tuple(group)
