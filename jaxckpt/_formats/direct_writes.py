"""Writes objects of a running save into the files of an export: each to the places that the rules give its leaves.

Every process writes the objects that it holds anyway. A tensor that several processes hold is written directly only if
their bytes are long runs, and if the file system keeps what several hosts write to one file.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from jaxckpt._formats.export import FolderPlan, names_of, raw
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, coarsen, contains, extent, whole_box
from jaxckpt._model.pieces import Array, Pieces, assign
from jaxckpt._model.stacks import Stack
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import MappedWork, note_progress, submit
from jaxckpt._rules.axis_layouts import AxisLayout
from jaxckpt._rules.mapped_data import MappedData, MappedSource
from jaxckpt._rules.rule import Rule
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._sources.foreign import ArrayData, ForeignCheckpoint
from jaxckpt._store.folder import Folder
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store import ArrayWriter, ObjectRecord

SHARED_RUN_BYTES = 64 << 10
"""The shortest run of bytes that a process writes to a tensor that others write too. Shorter runs of many hosts make a
file system pass its locks from host to host."""

_COHERENT = {"ext2", "ext3", "ext4", "xfs", "tmpfs", "overlay", "zfs", "f2fs", "lustre", "gpfs", "ceph"}
"""File systems that keep all that several hosts write to one file at the same time, or that only one host uses. NFS and
FUSE may lose writes: they cache pages, or whole files, without a lock."""


def is_coherent(folder: str) -> bool:
    """Whether several hosts can write one file of this folder at the same time."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split(" - ") for line in file]
    except OSError:  # not Linux
        return False
    kinds = {kind.split()[0] for mount, kind in mounts if mount.split()[2] == number}
    return bool(kinds) and kinds <= _COHERENT


# Which process writes what ----------------------------------------------------------------------------------


def with_single_writers(leaves: Sequence[ArrayLeaf]) -> list[ArrayLeaf]:
    """The same leaves, in as few cells as their processes hold, each with a single writer. Replicas share the leaves,
    instead of each leaf, so that the files are written in long runs."""
    loads: dict[int, int] = {}
    chosen: list[ArrayLeaf] = []
    for leaf in leaves:
        layout = coarsen(leaf.layout)
        n_bytes = math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize // len(layout.holders)
        writers: dict[tuple[int, ...], int] = {}
        for group in layout.groups:
            writers[group] = min(group, key=lambda process: loads.get(process, 0))
            loads[writers[group]] = loads.get(writers[group], 0) + n_bytes * layout.holders.count(group)
        holders = tuple((writers[group],) for group in layout.holders)
        chosen.append(msgspec.structs.replace(leaf, layout=Layout(layout.grid, holders)))
    return chosen


@dataclass(frozen=True, slots=True)
class UnwrittenRow(ArrayData):
    """A leaf of a tree that is being saved."""

    stack: int
    row: int

    def read(self, box: Box, target: Array) -> None:
        raise AssertionError("a tensor that is written directly is read")


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a tensor that comes from one leaf."""

    file: str
    """Name of the file."""

    offset: int
    """Where its first byte is in the file."""

    strides: tuple[int, ...]
    """Bytes from one index to the next, along each axis of the part."""

    dtype: np.dtype[Any]
    """Dtype of the tensor."""

    source: MappedSource
    index: tuple[int, ...]
    """Of the leaf in `source`."""

    def run_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """(number of leading axes that separate the runs, bytes of a run) of a box of this shape."""
        n_outer, n_bytes = len(shape), self.dtype.itemsize
        while n_outer and (shape[n_outer - 1] == 1 or self.strides[n_outer - 1] == n_bytes):
            n_outer -= 1
            n_bytes *= shape[n_outer]
        return n_outer, n_bytes

    def runs(self, box: Box, values: Array) -> Iterator[tuple[Array, Array]]:
        """The offsets in the file of equally long runs of bytes, and the runs, for a box of the leaf."""
        for place, part in self.source.parts_from(self.index, box, values):
            n_outer, n_bytes = self.run_of(part.shape)
            offsets = np.array(
                self.offset + sum(a * stride for (a, _), stride in zip(place, self.strides, strict=True))
            )
            for side, stride in zip(part.shape[:n_outer], self.strides, strict=False):
                offsets = np.add.outer(offsets, np.arange(side) * stride)
            if part.dtype != self.dtype:
                source, part = part, np.empty(part.shape, self.dtype)
                assign(part, source)
            yield offsets.reshape(-1), raw(part).reshape(-1, n_bytes)


_Rows = Mapping[tuple[int, int], Sequence[_Part]]
"""The parts that come from each leaf, by its stack and row."""


@dataclass(frozen=True, slots=True)
class DirectWrites:
    """The tensors of an export that are written from objects of a save."""

    folder: str
    """Where the files are written."""

    names: frozenset[str] = frozenset()
    parts: _Rows = field(default_factory=dict[tuple[int, int], "list[_Part]"])
    stored: frozenset[int] = frozenset()
    """The stacks that other tensors are read from."""

    def files(self, plan: SavePlan) -> set[str]:
        """The files that this process writes to."""
        rows = {(obj.stack, row) for obj in plan.objects for row in range(*obj.box[0])}
        return {part.file for key in rows for part in self.parts.get(key, ())}

    def create(self, plan: FolderPlan) -> None:
        """Create the files in full size, with holes in place of the tensors."""
        os.makedirs(self.folder)
        for file in plan.files:
            with open(os.path.join(self.folder, file.name), "wb") as new:
                new.truncate(file.n_bytes + min(file.offsets.values(), default=0))


def plan_writes(
    view: ForeignCheckpoint, files: FolderPlan, plan: SavePlan, folder: str, *, is_coherent: bool
) -> DirectWrites:
    """Which tensors of a view of a running save are written directly: none if several hosts would lose writes."""
    none = DirectWrites(folder, stored=frozenset(range(len(plan.stacks))))
    if not is_coherent:
        return none
    paths, manifest = names_of(view), view.manifest
    rows: dict[tuple[int, int], list[_Part]] = {}
    names: set[str] = set()
    stored: set[int] = set()
    for file in files.files:
        for name, offset in file.offsets.items():
            leaf = manifest.leaves[manifest.numbers[paths[name]]]
            if leaf.stack is None or leaf.row is None:
                continue
            stack, data = manifest.decoded_stacks[leaf.stack], view.row_data[leaf.stack][leaf.row]
            whole = whole_box(stack.shape)
            parts = _parts_of(data, file.name, offset, stack)
            if parts is None:
                return none
            truncated = isinstance(data, MappedData) and not all(contains(whole, box) for box, _ in data.pieces)
            if not truncated and _fits(parts, plan):
                names.add(name)
                for key, part in parts:
                    rows.setdefault(key, []).append(part)
            else:
                stored.update(number for (number, _), _ in parts)
    return DirectWrites(folder, frozenset(names), rows, frozenset(stored))


def _parts_of(data: ArrayData, file: str, offset: int, stack: Stack) -> list[tuple[tuple[int, int], _Part]] | None:
    """The parts of a tensor, each with its leaf; None if its values are computed from several leaves."""
    if isinstance(data, UnwrittenRow):
        axes = tuple((f"_{number}",) for number in range(len(stack.shape)))
        sizes = {axis: side for (axis,), side in zip(axes, stack.shape, strict=True)}
        rule, start = Rule(source="leaf", target="leaf"), (0,) * len(axes)
        source = MappedSource(AxisLayout(axes, axes), sizes, (), {(): data}, stack.dtype, 0, start, {}, rule)
        data = MappedData([(whole_box(stack.shape), source)])
    if not isinstance(data, MappedData):
        return None
    parts: list[tuple[tuple[int, int], _Part]] = []
    for box, source in data.pieces:
        if not isinstance(source, MappedSource) or any(
            stop > side for (_, stop), side in zip(box, stack.shape, strict=True)
        ):
            return None
        start, step, strides = offset, stack.itemsize, list[int]()
        for dim, (first, _), side in reversed([*zip(source.layout.target, box, stack.shape, strict=True)]):
            start += first * step
            inner = step
            for axis in reversed(dim):
                strides.insert(0, inner)
                inner *= source.sizes[axis]
            step *= side
        for index, row in source.data.items():
            if not isinstance(row, UnwrittenRow):
                return None
            part = _Part(file, start, tuple(strides), DTYPES[stack.dtype], source, index)
            parts.append(((row.stack, row.row), part))
    return parts


def _fits(parts: Sequence[tuple[tuple[int, int], _Part]], plan: SavePlan) -> bool:
    """Whether one process writes a tensor, or each of several processes writes long runs of it."""
    writers = frozenset[int]().union(*(plan.layouts[stack].processes for (stack, _), _ in parts))
    if len(writers) <= 1:
        return True
    for (number, _), part in parts:
        stack = plan.stacks[number]
        box = tuple((0, min(pair)) for pair in zip(stack.object[1:], stack.shape, strict=True))
        zeros = np.broadcast_to(np.zeros((), DTYPES[stack.dtype]), extent(box))
        for _, values in part.source.parts_from(part.index, box, zeros):
            n_outer, n_bytes = part.run_of(values.shape)
            if n_outer and n_bytes < SHARED_RUN_BYTES:
                return False
    return True


# Writing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportStore(Folder):
    """The temporary checkpoint of an export. It stores no data of the tensors that are written directly."""

    direct: DirectWrites | None = None

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        number = int(stack.name.partition("-")[0])
        assert self.direct is not None
        stored = super().array_writer(data, stack, sync=False) if number in self.direct.stored else None
        return _PartWriter(self.direct, number, stack, stored)

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        """Nothing of a temporary checkpoint need be durable."""

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Nothing of a temporary checkpoint need be durable."""


@dataclass(frozen=True, slots=True)
class _PartWriter:
    """Writes the parts of tensors that come from the objects of a stack."""

    direct: DirectWrites
    number: int
    stack: Stack
    stored: ArrayWriter | None
    """Also stores the objects."""

    memory_factor: ClassVar[int] = 3
    """An object is gathered, and its axes are put in the order of the tensor."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        written = submit(functools.partial(self._write, pieces))
        if self.stored is None:
            return written
        return MappedWork(
            self.stored.write(index, pieces, content), lambda stored: (written.result(), stored.result())[1]
        )

    def _write(self, pieces: Pieces) -> ObjectRecord:
        (first, stop), *region = pieces.box
        array: Array | None = None
        for row in range(first, stop):
            for part in self.direct.parts.get((self.number, row), ()):
                array = pieces.array() if array is None else array
                path = os.path.join(self.direct.folder, part.file)
                with translate_os_errors(f"cannot write {path}"):
                    handle = os.open(path, os.O_WRONLY)
                    try:
                        for offsets, runs in part.runs(tuple(region), array[row - first]):
                            for offset, run in zip(offsets.tolist(), runs, strict=True):
                                _write_all(handle, run, offset)
                            require_not_stalled()
                            note_progress()
                    finally:
                        os.close(handle)
        # What the object would take. The manifest describes it, but nothing reads it.
        return ObjectRecord(self.stack.index_bytes + self.stack.chunks_per_object * self.stack.chunk_stored_bytes, "")


def _write_all(handle: int, run: Array, offset: int) -> None:
    while (written := os.pwrite(handle, run.data, offset)) < len(run):
        run, offset = run[written:], offset + written
