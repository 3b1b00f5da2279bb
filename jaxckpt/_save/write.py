"""Writes a process's share: its objects in the order of their data, and its state."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from jaxckpt._format import manifest as manifests
from jaxckpt._format.pieces import Pieces
from jaxckpt._runtime.progress import Report
from jaxckpt._save.clock import Clock
from jaxckpt._save.handover import Handover
from jaxckpt._save.pace import Pace
from jaxckpt._save.plan import WRITE_MEMORY_FACTOR, Object
from jaxckpt._save.prepare import PreparedSave
from jaxckpt._save.publish import Share
from jaxckpt._save.reuse import WrittenObject
from jaxckpt._save.staging import StagedObject
from jaxckpt._storage.objects import ArrayWriter, Pending

WrittenObjects = list[tuple[Object, WrittenObject]]


def write(
    save: PreparedSave, data: str, handover: Handover, pace: Pace, report: Report
) -> tuple[Share, WrittenObjects]:
    """Write this process's objects as their data arrives, and its state. Returns what it tells process 0, and each
    object with its record."""
    with save.clock.timed("write"):
        written = _write_objects(save, data, handover, pace, report)
        state = None
        if save.state is not None:
            name = f"{data}/{manifests.state_file_name(save.group.index)}"
            with save.group.watch.operation(f"writing to {save.store.url}"):
                save.store.put(name, save.state, sync=save.options.sync)
            state = len(save.state), hashlib.sha256(save.state).hexdigest()
    objects = [(obj.stack, obj.index_key, one.length, one.digest, one.content) for obj, one in written]
    linked_bytes = sum(one.length for _, one in written if one.linked)
    unlinked = Counter[str]()
    for _, one in written:
        if one.unlinked:
            unlinked[one.unlinked] += one.length
    return Share(objects, linked_bytes, state, save.clock.manifest_seconds(), unlinked), written


def _write_objects(save: PreparedSave, data: str, handover: Handover, pace: Pace, report: Report) -> WrittenObjects:
    """Write the objects as they arrive, and sync their folders. Returns each object with its record."""
    store, stacks, clock, watch = save.store, save.plan.stacks, save.clock, save.group.watch
    with watch.operation(f"reading the checkpoint before {store.url}"):
        reuse = save.reuse.with_stored_base()
    pending_writes = _PendingWrites(save.options.host_bytes // WRITE_MEMORY_FACTOR)
    written: WrittenObjects = []
    indices: dict[int, list[tuple[int, ...]]] = {}
    writers: dict[int, ArrayWriter] = {}

    def record_done(done: Iterable[CompletedWrite]) -> None:
        with watch.operation(f"writing to {store.url}"):
            for one, found in done:
                watch.note_progress()
                handover.mark_written(one)
                report(one.obj.n_bytes)
                written.append((one.obj, found))

    try:
        for staged in _timed(handover, clock):
            obj, stack = staged.obj, stacks[staged.obj.stack]
            if obj.stack not in writers:
                writers[obj.stack] = store.array_writer(data, stack, sync=save.options.sync)
            indices.setdefault(obj.stack, []).append(obj.index)
            record_done(pending_writes.make_room(obj.n_bytes))
            if pace.bytes_per_second is not None and obj not in reuse.originals:
                pace.wait(obj.n_bytes, handover.require_not_cancelled)
            with clock.timed("device_to_host"):
                pending, source = reuse.begin_object(staged, stack, writers[obj.stack], data)
            pending_writes.add(staged, pending, source)
            if handover.is_empty():
                record_done(pending_writes.drain())  # running writes may occupy the room that the next object needs
        record_done(pending_writes.drain())
    except BaseException:
        # Otherwise a late write would recreate its file in a folder that is being deleted.
        pending_writes.wait_ignoring_errors()
        raise
    if save.options.sync:
        with clock.timed("sync"), watch.operation(f"syncing {store.url}"):
            for stack, found in indices.items():
                store.sync_folders(data, stacks[stack], found)
    return written


# Timing, and running writes -------------------------------------------------------------------------------


def _timed(staged: Iterable[StagedObject], clock: Clock) -> Iterator[StagedObject]:
    waiting = iter(staged)
    while True:
        with clock.timed("device_to_host"):
            one = next(waiting, None)
        if one is None:
            return
        yield one


CompletedWrite = tuple[StagedObject, WrittenObject]
"""A written object and its record."""


class _PendingWrites:
    """Running writes, with a limit on their total bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queue: deque[tuple[StagedObject, Pending, Pieces | None]] = deque()

    def make_room(self, n_bytes: int) -> Iterator[CompletedWrite]:
        """Wait until `n_bytes` more may be in flight. Yields completed writes."""
        while self._queue and (self._bytes + n_bytes > self._max_bytes or self._queue[0][1].done()):
            yield self._await_first()

    def add(self, staged: StagedObject, pending: Pending, source: Pieces | None) -> None:
        """Add a write. Its data, `source`, is kept until it completes."""
        self._queue.append((staged, pending, source))
        self._bytes += staged.obj.n_bytes

    def drain(self) -> Iterator[CompletedWrite]:
        while self._queue:
            yield self._await_first()

    def wait_ignoring_errors(self) -> None:
        """Wait until no write is running, and ignore errors."""
        for _, pending, _ in self._queue:
            with contextlib.suppress(Exception):
                pending.result()

    def _await_first(self) -> CompletedWrite:
        one, pending, _ = self._queue.popleft()
        written = pending.result()
        self._bytes -= one.obj.n_bytes
        return one, written
