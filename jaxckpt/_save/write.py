"""Writes a process's share: its objects in the order of their data, and its state."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from jaxckpt._format import manifest as manifests
from jaxckpt._format.pieces import Pieces
from jaxckpt._runtime.clock import Clock
from jaxckpt._runtime.progress import Report
from jaxckpt._runtime.threads import POLL_SECONDS, ending
from jaxckpt._save.handover import Handover
from jaxckpt._save.plan import WRITE_COPIES, Object
from jaxckpt._save.prepare import Prepared
from jaxckpt._save.publish import Share
from jaxckpt._save.reuse import Written
from jaxckpt._save.staging import Staged
from jaxckpt._storage.objects import ArrayWriter, Pending


def write(save: Prepared, data: str, handover: Handover, rate: float | None, report: Report) -> Share:
    """Write this process's objects as their data arrives, at most `rate` bytes per second, and its state."""
    with save.clock.timed("write"):
        written = _write_objects(save, data, handover, rate, report)
        state = None
        if save.state is not None:
            name = f"{data}/{manifests.state_name(save.group.index)}"
            with save.group.watch.doing(f"writing to {save.store.url}"):
                save.store.put(name, save.state, sync=save.options.sync)
            state = len(save.state), hashlib.sha256(save.state).hexdigest()
    objects = [(obj.stack, obj.place, one.length, one.digest, one.content) for obj, one in written]
    linked_bytes = sum(one.length for _, one in written if one.linked)
    return Share(objects, linked_bytes, state, save.clock.manifest_seconds())


def _write_objects(
    save: Prepared, data: str, handover: Handover, rate: float | None, report: Report
) -> list[tuple[Object, Written]]:
    """Write the objects as they arrive, and sync their folders. Returns each object with its record."""
    store, stacks, clock, watch = save.store, save.plan.stacks, save.clock, save.group.watch
    flights = _Flights(save.options.host_bytes // WRITE_COPIES)
    written: list[tuple[Object, Written]] = []
    indices: dict[int, list[tuple[int, ...]]] = {}
    writers: dict[int, ArrayWriter] = {}
    paced_until = 0.0

    def land(done: Iterable[Landed]) -> None:
        with watch.doing(f"writing to {store.url}"):
            for one, found in done:
                watch.moved()
                handover.landed(one)
                report(one.obj.n_bytes)
                written.append((one.obj, found))

    try:
        for one in _timed(handover, clock):
            obj, stack = one.obj, stacks[one.obj.stack]
            if obj.stack not in writers:
                writers[obj.stack] = store.array_writer(data, stack, sync=save.options.sync)
            indices.setdefault(obj.stack, []).append(obj.index)
            land(flights.make_room(obj.n_bytes))
            if rate is not None and obj not in save.reuse.originals:
                sleep_until(paced_until, handover.check)
                paced_until = max(paced_until, time.monotonic()) + obj.n_bytes / rate
            with clock.timed("device_to_host"):
                pending, source = save.reuse.begin(one, stack, writers[obj.stack], data)
            flights.launch(one, pending, source)
            if handover.starves():
                land(flights.land_all())  # running writes may occupy the room that the next object needs
        land(flights.land_all())
    except BaseException:
        flights.abandon()  # otherwise a late write would recreate its file in a folder that is being deleted
        raise
    if save.options.sync:
        with clock.timed("sync"), watch.doing(f"syncing {store.url}"):
            for stack, found in indices.items():
                store.sync_folders(data, stacks[stack], found)
    return written


def sleep_until(moment: float, check: Callable[[], None]) -> None:
    """Sleep until a time on the monotonic clock. Returns early if the interpreter is shutting down. Raises what `check`
    raises."""
    while (left := moment - time.monotonic()) > 0 and not ending():
        check()
        time.sleep(min(left, POLL_SECONDS))


# Timing, and running writes -------------------------------------------------------------------------------


def _timed(staged: Iterable[Staged], clock: Clock) -> Iterator[Staged]:
    waiting = iter(staged)
    while True:
        with clock.timed("device_to_host"):
            one = next(waiting, None)
        if one is None:
            return
        yield one


Landed = tuple[Staged, Written]
"""A written object and its record."""


class _Flights:
    """Running writes, with a limit on their total bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queue: deque[tuple[Staged, Pending, Pieces | None]] = deque()

    def make_room(self, n_bytes: int) -> Iterator[Landed]:
        """Wait until `n_bytes` more may be in flight. Yields completed writes."""
        while self._queue and (self._bytes + n_bytes > self._max_bytes or self._queue[0][1].done()):
            yield self._land()

    def launch(self, one: Staged, pending: Pending, source: Pieces | None) -> None:
        """Add a write. Its data, `source`, is kept until it completes."""
        self._queue.append((one, pending, source))
        self._bytes += one.obj.n_bytes

    def land_all(self) -> Iterator[Landed]:
        while self._queue:
            yield self._land()

    def abandon(self) -> None:
        """Wait until no write is running, and ignore errors."""
        for _, pending, _ in self._queue:
            with contextlib.suppress(Exception):
                pending.result()

    def _land(self) -> Landed:
        one, pending, _ = self._queue.popleft()
        written = pending.result()
        self._bytes -= one.obj.n_bytes
        return one, written
