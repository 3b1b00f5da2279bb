"""Writes a process's share: its objects in the order of their data, and its state."""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxckpt._model import manifest as manifests
from jaxckpt._model.pieces import Pieces
from jaxckpt._pipeline.control import Phases, RateLimiter
from jaxckpt._pipeline.pipeline import Budget, Pending, pipeline
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._save.compose_manifest import Share
from jaxckpt._save.request import PreparedSave
from jaxckpt._save.reuse import Reuse, WrittenObject
from jaxckpt._save.running_saves import RunningSave
from jaxckpt._save.staging import StagedAhead, StagedObject
from jaxckpt._save.write_plan import Object
from jaxckpt._store.store import ArrayWriter

BACKGROUND_FACTOR = 4
"""An object of a save that nothing waits for takes this multiple of its bytes from the budget, so that fewer threads
write at the same time: on 2 cores one instead of two, on 16 cores 8 of 16."""

WrittenObjects = list[tuple[Object, WrittenObject]]


def write(
    save: PreparedSave, data: str, ahead: StagedAhead, running: RunningSave, display: Report
) -> tuple[Share, WrittenObjects]:
    """Write this process's objects as their data arrives, and its state. Returns its share, for process 0, and each
    object with its record."""
    with save.call.phases.timed("write"):
        written = _write_objects(save, data, ahead, running, display)
        state = None
        if save.state is not None:
            name = f"{data}/{manifests.state_file_name(save.call.index)}"
            with save.call.watchdog.operation(f"writing to {save.store.url}"):
                save.store.put(name, save.state, sync=save.options.sync)
            state = len(save.state), hashlib.sha256(save.state).hexdigest()
    objects = [(obj.stack, obj.index_key, record.length, record.digest, record.content) for obj, record in written]
    linked_bytes = sum(record.length for _, record in written if record.linked)
    unlinked = Counter[str]()
    for _, record in written:
        if record.unlinked:
            unlinked[record.unlinked] += record.length
    return Share(
        objects, linked_bytes, state, save.call.phases.manifest_seconds(), socket.gethostname(), unlinked
    ), written


def _write_objects(
    save: PreparedSave, data: str, ahead: StagedAhead, running: RunningSave, display: Report
) -> WrittenObjects:
    """Write the objects as they arrive, and sync their folders. Returns each object with its record."""
    store, phases, watchdog = save.store, save.call.phases, save.call.watchdog
    with watchdog.operation(f"reading the checkpoint before {store.url}"):
        reuse = save.reuse.with_stored_base()
    writer = _Writer(save, reuse, data, running.rate_limiter)
    budget = Budget(save.options.host_bytes)
    written: WrittenObjects = []
    moved = pipeline(_timed(ahead, phases), writer.n_bytes, writer.begin, budget, join=True)
    with contextlib.closing(moved):  # a late write would recreate its file in a folder that is being deleted
        for staged, record in moved:
            save.call.cancellation.check()
            ahead.mark_written(staged)
            running.add_done_bytes(staged.obj.n_bytes)
            display(staged.obj.n_bytes)
            written.append((staged.obj, record))
    if save.options.sync:
        with phases.timed("sync"), watchdog.operation(f"syncing {store.url}"):
            indices: dict[int, list[tuple[int, ...]]] = {}
            for obj, _ in written:
                indices.setdefault(obj.stack, []).append(obj.index)
            for stack, stack_indices in indices.items():
                store.sync_folders(data, save.plan.stacks[stack], stack_indices)
    return written


def _timed(staged: Iterable[StagedObject | None], phases: Phases) -> Iterator[StagedObject | None]:
    waiting = iter(staged)
    while True:
        with phases.timed("device_to_host"):
            try:
                staged_object = next(waiting)
            except StopIteration:
                return
        yield staged_object


@dataclass(frozen=True, slots=True)
class _Writer:
    """Begins to write objects, or to link them."""

    save: PreparedSave
    reuse: Reuse
    data: str
    rate_limiter: RateLimiter
    array_writers: dict[int, ArrayWriter] = field(default_factory=dict[int, ArrayWriter])
    """By stack."""

    def n_bytes(self, staged: StagedObject) -> int:
        """What an object takes from the budget: the host memory for writing it, in addition to its data."""
        factor = self._array_writer(staged.obj.stack).memory_factor
        return staged.obj.n_bytes * max(factor, BACKGROUND_FACTOR if self.save.call.watchdog.in_background else 1)

    def _array_writer(self, stack: int) -> ArrayWriter:
        if stack not in self.array_writers:
            save = self.save
            self.array_writers[stack] = save.store.array_writer(
                self.data, save.plan.stacks[stack], sync=save.options.sync
            )
        return self.array_writers[stack]

    def begin(self, staged: StagedObject) -> _WritingObject:
        save, obj = self.save, staged.obj
        stack, n_bytes = save.plan.stacks[obj.stack], self.n_bytes(staged)
        if self.rate_limiter.bytes_per_second is not None and obj not in self.reuse.originals:
            self.rate_limiter.wait(obj.n_bytes, save.call.cancellation.check)
        with save.call.phases.timed("device_to_host"):
            pending, source = self.reuse.begin_object(staged, stack, self._array_writer(obj.stack), self.data)
        return _WritingObject(n_bytes, pending, source, save.call.watchdog, save.store.url)


@dataclass(frozen=True, slots=True)
class _WritingObject:
    """An object that is being written."""

    n_bytes: int
    """Host memory that it takes."""

    pending: Pending[WrittenObject]
    source: Pieces | None
    """Its data, which is kept until it is written."""

    watchdog: Watchdog
    url: str

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> WrittenObject:
        with self.watchdog.operation(f"writing to {self.url}"):
            return self.pending.result()
