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
from jaxckpt._pipeline.workers import JoinedWork, MappedWork, note_progress, submit
from jaxckpt._rules.axis_layouts import AxisLayout
from jaxckpt._rules.mapped_data import MappedData, MappedSource
from jaxckpt._rules.rule import Rule
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan
from jaxckpt._sources.foreign import ArrayData, ForeignCheckpoint
from jaxckpt._store.files import file_system_kinds
from jaxckpt._store.folder import Folder
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store import ArrayWriter, ObjectRecord

SHARED_RUN_BYTES = 64 << 10
"""The shortest run of bytes that a process writes to a tensor that others write too. Shorter runs of many hosts make a
file system pass its locks from host to host."""

_COHERENT = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs", "overlay", "zfs", "f2fs", "lustre", "gpfs", "ceph"})
"""File systems that keep all that several hosts write to one file at the same time, or that only one host uses. NFS and
FUSE may lose writes: they cache pages, or whole files, without a lock."""


def is_coherent(folder: str) -> bool:
    """Whether several hosts can write one file of this folder at the same time."""
    kinds = file_system_kinds(os.stat(folder).st_dev)
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

    stack: str
    """Name of its stack."""

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


@dataclass(frozen=True, slots=True)
class DirectWrites:
    """The tensors of an export that are written from objects of a save."""

    folder: str
    """Where the files are written."""

    names: frozenset[str] = frozenset()
    """The tensors."""

    parts: Mapping[UnwrittenRow, Sequence[_Part]] = field(default_factory=dict[UnwrittenRow, "list[_Part]"])
    """The parts that come from each leaf."""

    stored: frozenset[str] = frozenset()
    """The stacks that other tensors are read from."""

    def files(self, plan: SavePlan) -> set[str]:
        """The files that this process writes to."""
        rows = {UnwrittenRow(plan.stacks[obj.stack].name, n) for obj in plan.objects for n in range(*obj.box[0])}
        return {part.file for row in rows for part in self.parts.get(row, ())}

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
    none = DirectWrites(folder, stored=frozenset(stack.name for stack in plan.stacks))
    if not is_coherent:
        return none
    paths, manifest = names_of(view), view.manifest
    parts_of_row: dict[UnwrittenRow, list[_Part]] = {}
    names: set[str] = set()
    stored: set[str] = set()
    for file in files.files:
        for name, offset in file.offsets.items():
            leaf = manifest.leaves[manifest.numbers[paths[name]]]
            if leaf.stack is None or leaf.row is None:
                continue
            stack = manifest.decoded_stacks[leaf.stack]
            pieces = _pieces(view.row_data[leaf.stack][leaf.row], stack)
            if pieces is None:
                return none
            parts = [part for box, source in pieces for part in _parts(box, source, file.name, offset, stack)]
            if all(contains(whole_box(stack.shape), box) for box, _ in pieces) and _fits(parts, plan):
                names.add(name)
                for row, part in parts:
                    parts_of_row.setdefault(row, []).append(part)
            else:
                stored.update(row.stack for row, _ in parts)
    return DirectWrites(folder, frozenset(names), parts_of_row, frozenset(stored))


def _pieces(data: ArrayData, stack: Stack) -> list[tuple[Box, MappedSource]] | None:
    """The pieces of a tensor whose values come from single leaves; None for other tensors."""
    if isinstance(data, UnwrittenRow):  # of the same name and shape as the leaf
        axes = tuple((f"_{number}",) for number in range(len(stack.shape)))
        sizes = {axis: side for (axis,), side in zip(axes, stack.shape, strict=True)}
        rule, start = Rule(source="leaf", target="leaf"), (0,) * len(axes)
        source = MappedSource(AxisLayout(axes, axes), sizes, (), {(): data}, stack.dtype, 0, start, {}, rule)
        return [(whole_box(stack.shape), source)]
    pieces = data.pieces if isinstance(data, MappedData) else ()
    mapped = [(box, source) for box, source in pieces if isinstance(source, MappedSource)]
    rows = [row for _, source in mapped for row in source.data.values()]
    return mapped if rows and all(isinstance(row, UnwrittenRow) for row in rows) else None


def _parts(
    box: Box, source: MappedSource, file: str, offset: int, stack: Stack
) -> Iterator[tuple[UnwrittenRow, _Part]]:
    """The parts of a piece of a tensor that is at an offset of a file, each with its leaf."""
    step, strides = stack.itemsize, list[int]()
    for dim, (first, _), side in reversed([*zip(source.layout.target, box, stack.shape, strict=True)]):
        offset += first * step
        inner = step
        for axis in reversed(dim):
            strides.insert(0, inner)
            inner *= source.sizes[axis]
        step *= side
    for index, row in source.data.items():
        assert isinstance(row, UnwrittenRow)
        yield row, _Part(file, offset, tuple(strides), DTYPES[stack.dtype], source, index)


def _fits(parts: Sequence[tuple[UnwrittenRow, _Part]], plan: SavePlan) -> bool:
    """Whether one process writes a tensor, or each of several processes writes long runs of it."""
    stacks = {stack.name: (stack, layout.processes) for stack, layout in zip(plan.stacks, plan.layouts, strict=True)}
    if len(frozenset[int]().union(*(stacks[row.stack][1] for row, _ in parts))) <= 1:
        return True
    for row, part in parts:
        stack, _ = stacks[row.stack]
        box = tuple((0, min(pair)) for pair in zip(stack.object_sides[1:], stack.shape, strict=True))
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
        assert self.direct is not None
        stored = super().array_writer(data, stack, sync=False) if stack.name in self.direct.stored else None
        return _PartWriter(self.url, self.direct, stack, stored)

    def sync_folders(self, data: str, keys: Iterable[str]) -> None:
        """Nothing of a temporary checkpoint need be durable."""

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Nothing of a temporary checkpoint need be durable."""


@dataclass(frozen=True, slots=True)
class _PartWriter:
    """Writes the parts of tensors that come from the objects of a stack."""

    target: str
    """The path of the export, for messages."""

    direct: DirectWrites
    stack: Stack
    stored: ArrayWriter | None
    """Also stores the objects."""

    memory_factor: ClassVar[int] = 3
    """An object is gathered, and its axes are put in the order of the tensor."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        written = submit(functools.partial(self._write, pieces))
        if self.stored is None:
            return written
        stored = self.stored.write(index, pieces, content)
        return MappedWork(JoinedWork([written, stored]), lambda both: (both.result(), stored.result())[1])

    def _write(self, pieces: Pieces) -> ObjectRecord:
        (first, stop), *region = pieces.box
        array: Array | None = None
        for row in range(first, stop):
            for part in self.direct.parts.get(UnwrittenRow(self.stack.name, row), ()):
                array = pieces.array() if array is None else array
                path = os.path.join(self.direct.folder, part.file)
                with translate_os_errors(f"cannot write {self.target}"):
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
