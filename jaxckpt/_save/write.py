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
from jaxckpt._save.staging import StagedAhead, StagedObject, stage
from jaxckpt._save.write_plan import Object
from jaxckpt._store.store import ArrayWriter
from jaxckpt.errors import Problem, TreeError, show_count, show_path

_RETURNED_BYTES = 32 << 20
"""A save that has copied this much returns the memory of its copies to the system."""

_OBJECTS_AHEAD = 4
"""A save whose caller waits stages this many objects ahead of the one that is being written."""


StoredObject = tuple[int, str, int, str, str]
"""Stack, grid index, length, digest and content digest of an object. The last is empty if it was not computed."""


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

    save: PreparedSave
    running: RunningSave
    in_background: bool
    """Whether the caller waits only until everything is staged."""

    display: Report
    _copied_bytes: int = 0
    _written: list[tuple[Object, WrittenObject]] = field(default_factory=list["tuple[Object, WrittenObject]"])

    def stage_ahead(
        self,
        calls: CollectiveCalls[Any, Any] | None = None,
        with_others: Callable[[Generator[StagedObject]], Generator[StagedObject]] | None = None,
    ) -> StagedAhead:
        """The data that this process writes. When all of it is staged, the leaves are released.

        Makes the `calls` in which the processes exchange leaves. `with_others` adds the data that other processes send.
        """
        save, options, in_background = self.save, self.save.options, self.in_background
        own = stage(
            save.plan,
            save.draft,
            save.reuse.originals,
            calls,
            hold=in_background,
            stack_bytes=options.host_bytes // 2,
            whole_shards=in_background and options.staging_bytes is None,
        )
        if options.non_finite != "ignore":
            own = checked(save, own)
        held = None if save.plan.is_collective else save.request.held
        if held is not None and in_background:
            own = held.keep(own)
        elif held is not None:
            held.keep_nothing()
        if with_others is not None:
            own = with_others(own)
        return StagedAhead(
            self._releasing(own, frees_leaves=in_background or held is None),
            save.call.phases,
            max_objects=None if in_background else _OBJECTS_AHEAD,
            max_bytes=options.staging_bytes if in_background else options.host_bytes // 2,
            check=save.call.cancellation.check,
        )

    def _releasing(self, staged: Generator[StagedObject], *, frees_leaves: bool) -> Generator[StagedObject]:
        """The objects. After the last one, the leaves are not needed any more, and the caller is released."""
        yield from staged
        if frees_leaves:
            self.save.draft.values.clear()
        self.running.is_staged = True
        if self.in_background:
            release_caller()

    def write(self, data: str, ahead: StagedAhead) -> WrittenShare:
        """Write the objects as their data arrives, and the state, into a data folder. Returns what process 0 needs."""
        save, state = self.save, None
        with save.call.phases.timed("write"):
            self._write_objects(data, ahead)
            if save.state is not None:
                name = f"{data}/{manifests.state_file_name(save.call.index)}"
                with save.call.watchdog.operation(f"writing to {save.store.url}"):
                    save.store.put(name, save.state, sync=save.options.sync)
                state = len(save.state), hashlib.sha256(save.state).hexdigest()
        save.call.cancellation.check()
        self._copied_bytes = ahead.copied_bytes
        unlinked = Counter[str]()
        for _, record in self._written:
            if record.unlinked:
                unlinked[record.unlinked] += record.length
        return WrittenShare(
            [(obj.stack, obj.index_key, record.length, record.digest, record.content) for obj, record in self._written],
            sum(record.length for _, record in self._written if record.linked),
            state,
            save.call.phases.manifest_seconds(),
            socket.gethostname(),
            unlinked,
        )

    def _write_objects(self, data: str, ahead: StagedAhead) -> None:
        """Write the objects as they arrive, and sync their folders."""
        save, written = self.save, self._written
        store, phases, watchdog = save.store, save.call.phases, save.call.watchdog
        reuse = save.reuse
        if reuse.compares and reuse.base is None:
            with watchdog.operation(f"reading the checkpoint before {store.url}"):
                reuse = reuse.with_stored_base()
        writer = _Writer(save, reuse, data, self.running.rate_limiter)
        budget = Budget(save.options.host_bytes)
        moved = pipeline(ahead, writer.n_bytes, writer.begin, budget, join=True)
        with contextlib.closing(moved):  # a late write would recreate its file in a folder that is being deleted
            for staged, record in moved:
                save.call.cancellation.check()
                ahead.mark_written(staged)
                self.display(staged.obj.n_bytes)
                written.append((staged.obj, record))
        if save.options.sync:
            with phases.timed("sync"), watchdog.operation(f"syncing {store.url}"):
                indices: dict[int, list[tuple[int, ...]]] = {}
                for obj, _ in written:
                    indices.setdefault(obj.stack, []).append(obj.index)
                for stack, stack_indices in indices.items():
                    store.sync_folders(data, save.plan.stacks[stack], stack_indices)

    def free(self) -> None:
        """When nothing refers to the copies any more, return their memory to the system."""
        if self._copied_bytes >= _RETURNED_BYTES:
            with self.save.call.phases.timed("device_to_host"):
                _return_free_memory()

    def remember(self, data: str) -> None:
        """After the publication, remember the records of the objects for the next save."""
        if self.save.reuse.cache is not None:
            self.save.reuse.remember(data, self.save.plan.stacks, self._written)


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
        return staged.obj.n_bytes * self._array_writer(staged.obj.stack).memory_factor

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
            pending, source = self.reuse.write_or_link(staged, stack, self._array_writer(obj.stack), self.data)
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


# NaN and infinity -----------------------------------------------------------------------------------------

_BLOCK = 1 << 20
"""Elements that are checked at a time."""


def checked(save: PreparedSave, staged: Generator[StagedObject]) -> Generator[StagedObject]:
    """The objects, each of which is checked when its data is in host memory, as `Options.non_finite` says."""
    warned = set[int]()  # the leaves that were named before
    return (replace(one, check=functools.partial(_check, save, one.obj.stack, warned)) for one in staged)


def _check(save: PreparedSave, stack: int, warned: set[int], pieces: Pieces) -> None:
    for row, count in _counts(pieces).items():
        leaf = save.plan.leaves[stack][row]
        path = save.draft.records[leaf].path
        reason = f"has {show_count(count, 'value')} that {'is' if count == 1 else 'are'} NaN or infinite in one object"
        if save.options.non_finite == "error":
            remedy = 'Options(non_finite="warn") saves it nevertheless'
            raise TreeError.of(f"{save.store.url} was not saved", [Problem(path, reason, remedy)])
        if leaf not in warned:
            warned.add(leaf)
            _log.warning("%s: %s %s", save.store.url, show_path(path), reason)


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
    return sum(_count_block(flat[start : start + _BLOCK].view(dtype)) for start in range(0, flat.size, _BLOCK))


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
