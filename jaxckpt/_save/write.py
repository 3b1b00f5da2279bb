"""Writes a process's share: its objects in the order of their data, checked for NaN and infinity, and its state."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import socket
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from jaxckpt._devices.interconnect import CollectiveCalls
from jaxckpt._model import manifest as manifests
from jaxckpt._model import zarr
from jaxckpt._model.grid import intersection, slices_within
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._pipeline.control import RateLimiter
from jaxckpt._pipeline.lanes import release_caller
from jaxckpt._pipeline.pipeline import Budget, Pending, pipeline
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._save.request import PreparedSave
from jaxckpt._save.reuse import Reuse, WrittenObject
from jaxckpt._save.running_saves import RunningSave
from jaxckpt._save.staging import StagedObject, StagedObjects, stage
from jaxckpt._save.write_plan import Object
from jaxckpt._store.store import ArrayWriter, ObjectRecord
from jaxckpt.errors import Problem, TreeError, show_count, show_path

_RETURNED_BYTES = 32 << 20
"""A save that has copied this much returns the memory of its copies to the system."""

_OBJECTS_AHEAD = 4
"""A save whose caller waits stages this many objects ahead of the one that is being written."""


StoredObject = tuple[int, str, ObjectRecord]
"""Stack, grid index and record of an object."""


class WrittenShare(msgspec.Struct, frozen=True):
    """The files that one process has written."""

    objects: list[StoredObject]

    linked_bytes: int
    """Bytes of the objects that are links to an earlier checkpoint."""

    state: tuple[int, str] | None
    """Length and digest of the file for its state."""

    phase_seconds: dict[str, float]
    """Seconds of each phase until the share was written."""

    host: str
    """Name of the process's host."""

    unlinked: dict[str, int] = {}
    """Bytes of the objects that seem unchanged but were written, by the reason."""


@dataclass(slots=True)
class OwnShare:
    """The share of this process in a save: stages it, writes it, and remembers what a later save may reuse."""

    prepared: PreparedSave
    running: RunningSave
    holds_data: bool
    """Whether all data is kept safe from changes to the leaves, because the caller waits only until it is staged."""

    display: Report
    _copied_bytes: int = 0
    _written: list[tuple[Object, WrittenObject]] = field(default_factory=list["tuple[Object, WrittenObject]"])

    def staged_objects(
        self,
        calls: CollectiveCalls[Any, Any] | None = None,
        with_others: Callable[[Generator[StagedObject]], Generator[StagedObject]] | None = None,
    ) -> StagedObjects:
        """The data that this process writes. Nothing is staged yet. After all of it is staged, the leaves are released.

        Makes the `calls` in which the processes exchange leaves. `with_others` adds the data that other processes send.
        """
        prepared, options, holds_data = self.prepared, self.prepared.options, self.holds_data
        own = stage(
            prepared.plan,
            prepared.draft,
            prepared.reuse.originals,
            calls,
            hold=holds_data,
            stack_bytes=options.host_bytes // 2,
            whole_shards=holds_data and options.staging_bytes is None,
        )
        if options.non_finite != "ignore":
            own = checked(prepared, own)
        held = None if prepared.plan.is_collective else prepared.request.held
        if held is not None and holds_data:
            own = held.keep(own)
        elif held is not None:
            held.keep_nothing()
        if with_others is not None:
            own = with_others(own)
        return StagedObjects(
            self._then_release_leaves(own, frees_leaves=holds_data or held is None),
            prepared.call.phases,
            max_objects=None if holds_data else _OBJECTS_AHEAD,
            max_bytes=options.staging_bytes if holds_data else options.host_bytes // 2,
            check=prepared.call.cancellation.check,
        )

    def _then_release_leaves(self, staged: Generator[StagedObject], *, frees_leaves: bool) -> Generator[StagedObject]:
        """The objects. After the last one, the leaves are not needed any more, and the caller is released."""
        yield from staged
        if frees_leaves:
            self.prepared.draft.values.clear()
        self.running.is_staged = True
        if self.holds_data:
            release_caller()

    def write(self, folder: str, objects: StagedObjects) -> WrittenShare:
        """Write the objects as their data arrives, and the state, into a data folder. Returns what process 0 needs."""
        prepared, state = self.prepared, None
        with prepared.call.phases.timed("write"):
            self._write_objects(folder, objects)
            if prepared.state is not None:
                name = f"{folder}/{manifests.state_file_name(prepared.call.index)}"
                with prepared.call.watchdog.operation(f"writing to {prepared.store.url}"):
                    prepared.store.put(name, prepared.state, sync=prepared.options.sync)
                state = len(prepared.state), hashlib.sha256(prepared.state).hexdigest()
        prepared.call.cancellation.check()
        self._copied_bytes = objects.copied_bytes
        unlinked = Counter[str]()
        for _, written in self._written:
            if written.unlinked:
                unlinked[written.unlinked] += written.record.length
        return WrittenShare(
            [(obj.stack, obj.index_key, written.record) for obj, written in self._written],
            sum(written.record.length for _, written in self._written if written.linked),
            state,
            prepared.call.phases.manifest_seconds(),
            socket.gethostname(),
            unlinked,
        )

    def _write_objects(self, folder: str, objects: StagedObjects) -> None:
        """Write the objects as they arrive, and sync their folders."""
        prepared, reuse = self.prepared, self.prepared.reuse
        store, phases, watchdog = prepared.store, prepared.call.phases, prepared.call.watchdog
        if reuse.compares and reuse.base is None:
            with watchdog.operation(f"reading the checkpoint before {store.url}"):
                reuse = reuse.with_stored_base()
        writer = _Writer(prepared, reuse, folder, self.running.rate_limiter)
        budget = Budget(prepared.options.host_bytes)
        moved = pipeline(objects, writer.n_bytes, writer.begin, budget, join=True)
        with contextlib.closing(moved):  # a late write would recreate its file in a folder that is being deleted
            for staged, written in moved:
                prepared.call.cancellation.check()
                objects.mark_written(staged)
                self.display(staged.obj.n_bytes)
                self._written.append((staged.obj, written))
        if prepared.options.sync:
            with phases.timed("sync"), watchdog.operation(f"syncing {store.url}"):
                stacks = prepared.plan.stacks
                store.sync_folders(folder, [zarr.object_key(stacks[obj.stack], obj.index) for obj, _ in self._written])

    def free(self) -> None:
        """When nothing refers to the copies any more, return their memory to the system."""
        if self._copied_bytes >= _RETURNED_BYTES:
            with self.prepared.call.phases.timed("device_to_host"):
                _return_free_memory()

    def remember(self, folder: str) -> None:
        """After the publication, remember the records of the objects for the next save."""
        self.prepared.reuse.remember(folder, self.prepared.plan.stacks, self._written)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Begins to write objects, or to link them."""

    prepared: PreparedSave
    reuse: Reuse
    folder: str
    rate_limiter: RateLimiter
    array_writers: dict[int, ArrayWriter] = field(default_factory=dict[int, ArrayWriter])
    """By stack."""

    def n_bytes(self, staged: StagedObject) -> int:
        """What an object takes from the budget: the host memory for writing it, in addition to its data."""
        return staged.obj.n_bytes * self._array_writer(staged.obj.stack).memory_factor

    def _array_writer(self, stack: int) -> ArrayWriter:
        if stack not in self.array_writers:
            self.array_writers[stack] = self.prepared.store.array_writer(
                self.folder, self.prepared.plan.stacks[stack], sync=self.prepared.options.sync
            )
        return self.array_writers[stack]

    def begin(self, staged: StagedObject) -> _WritingObject:
        prepared, obj = self.prepared, staged.obj
        writer = self._array_writer(obj.stack)
        if obj not in self.reuse.originals:
            self.rate_limiter.wait(obj.n_bytes, prepared.call.cancellation.check)
        with prepared.call.phases.timed("device_to_host"):  # waits for the copy from the device
            pending, source = self.reuse.write_or_link(staged, prepared.plan.stacks[obj.stack], writer, self.folder)
        return _WritingObject(self.n_bytes(staged), pending, source, prepared.call.watchdog, prepared.store.url)


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


# NaN and infinity -----------------------------------------------------------------------------------------

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are checked at a time."""


def checked(prepared: PreparedSave, staged: Generator[StagedObject]) -> Generator[StagedObject]:
    """The objects, each of which is checked when its data is in host memory, as `Options.non_finite` says."""
    warned = set[int]()  # the leaves that were named before
    return (replace(one, check=functools.partial(_check, prepared, one.obj.stack, warned)) for one in staged)


def _check(prepared: PreparedSave, stack: int, warned: set[int], pieces: Pieces) -> None:
    for row, count in _counts(pieces).items():
        leaf = prepared.plan.leaves[stack][row]
        path = prepared.draft.records[leaf].path
        reason = f"has {show_count(count, 'value')} that {'is' if count == 1 else 'are'} NaN or infinite in one object"
        if prepared.options.non_finite == "error":
            remedy = 'Options(non_finite="warn") saves it nevertheless'
            raise TreeError.of(f"{prepared.store.url} was not saved", [Problem(path, reason, remedy)])
        if leaf not in warned:
            warned.add(leaf)
            _log.warning("%s: %s %s", prepared.store.url, show_path(path), reason)


def _counts(pieces: Pieces) -> dict[int, int]:
    """How many values of each row are not finite, for the rows that have any."""
    if not (pieces.dtype.kind in "fc" or "float" in pieces.dtype.name):
        return {}
    counts: dict[int, int] = {}
    for box, array in itertools.chain.from_iterable(pieces.groups):
        common = intersection(box, pieces.box)
        if common is None:
            continue
        values = array[slices_within(common, box)]
        for row, of_row in enumerate(values, common[0][0]):
            if count := _count(of_row, pieces.dtype):
                counts[row] = counts.get(row, 0) + count
    return counts


def _count(values: Array, dtype: np.dtype[Any]) -> int:
    """How many values are not finite, checked in blocks, which stay in the cache."""
    flat = values.reshape(-1)
    return sum(
        _count_block(flat[start : start + _CHECKED_ELEMENTS].view(dtype))
        for start in range(0, flat.size, _CHECKED_ELEMENTS)
    )


def _count_block(block: Array) -> int:
    if block.dtype.name == "bfloat16":  # NumPy calls ml_dtypes for each element
        exponents = block.view(np.uint16) & np.uint16(0x7F80)
        return int(np.count_nonzero(exponents == 0x7F80))
    finite = np.isfinite(block)
    return block.size - int(np.count_nonzero(finite))


def _return_free_memory() -> None:
    """Return the memory that malloc keeps for later to the system, if the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB in the arenas of the threads that took them, whichever thread needs memory
    next. Copies of 64 MiB of shards of 4 MiB left 240 MiB there, which grew for 100 saves. It took 6 to 14 ms for
    0.2 to 0.5 GiB and once 430 ms for 1.3 GiB (2 cores); threads that need memory from the same arena wait meanwhile.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
