"""Arrays in other libraries' files: where they lie, at an offset, with strides; and put together of such pieces.

Coverage is checked before anything is read: pieces that overlap, leave a hole, or lie outside are an error
that names the array and the box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxckpt._foreign.local_files import opened
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import (
    Box,
    Spec,
    extent,
    intersection,
    pieces_along,
    relative,
    show_box,
    spec_box,
    spec_problem,
    volume,
    within,
)
from jaxckpt._format.pieces import Array, as_bits
from jaxckpt._format.records import MeshRecord
from jaxckpt._restore.source import ArrayData, ForeignArray
from jaxckpt._runtime.errors import DataError, SpecError, listing, show
from jaxckpt._storage import files

SPAN_BYTES = 4 << 20
"""What lies scattered over no more bytes of a file than this is read with all that lies between."""


@dataclass(frozen=True, slots=True)
class FileData(ArrayData):
    """An array in a file, uncompressed and little-endian."""

    path: str

    offset: int
    """Bytes from the start of the file to the first element."""

    dtype: str
    shape: tuple[int, ...]

    strides: tuple[int, ...] | None = None
    """Elements from one index to the next along each dimension, none below zero; None: C order."""

    def read(self, box: Box, target: Array) -> None:
        if not target.size:
            return
        size, steps = DTYPES[self.dtype].itemsize, self.steps
        offset = self.offset + size * sum(start * step for (start, _), step in zip(box, steps, strict=True))
        with opened(self.path) as handle:
            _fill(self.path, handle, offset, tuple(size * step for step in steps), as_bits(target))

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, also if the array is in C order."""
        return c_strides(self.shape) if self.strides is None else self.strides

    @property
    def end(self) -> int:
        """Bytes from the start of the file to the end of the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((side - 1) * step for side, step in zip(self.shape, self.steps, strict=True))
        return self.offset + DTYPES[self.dtype].itemsize * (last + 1)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dimension, in C order."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()


def f_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The same in Fortran order."""
    return c_strides(shape[::-1])[::-1]


def _fill(path: str, handle: int, offset: int, strides: tuple[int, ...], target: Array) -> None:
    """Read a strided array: in place if it lies in one piece, in one go if it lies close together, else index by
    index of the dimension with the longest stride."""
    shape = target.shape
    span = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) + target.itemsize
    in_order = span == target.nbytes and all(
        side == 1 or stride == wanted * target.itemsize
        for side, stride, wanted in zip(shape, strides, c_strides(shape), strict=True)
    )
    if in_order and target.flags.c_contiguous:
        files.read_into(path, handle, offset, [target.reshape(-1).view(np.uint8)])
    elif span <= SPAN_BYTES:
        raw = np.empty(span, np.uint8)
        files.read_into(path, handle, offset, [raw])
        np.copyto(target, np.ndarray(shape, target.dtype, raw.data, 0, strides))
    else:
        dim = max((dim for dim, side in enumerate(shape) if side > 1), key=lambda dim: strides[dim])
        rest = (*strides[:dim], *strides[dim + 1 :])
        # Several at once if they are small: else each row of a wide array would take a call of its own.
        per = max(1, SPAN_BYTES // max(1, strides[dim]))
        for first in range(0, shape[dim], per):
            rows = target[(slice(None),) * dim + (slice(first, first + per),)]
            if per == 1:
                _fill(path, handle, offset + first * strides[dim], rest, rows.squeeze(dim))
            else:
                _fill(path, handle, offset + first * strides[dim], strides, rows)


@dataclass(frozen=True, slots=True)
class Tiled(ArrayData):
    """An array put together of pieces that cover it, each element once: `require_cover` has looked."""

    pieces: Sequence[tuple[Box, ArrayData]]

    def read(self, box: Box, target: Array) -> None:
        for held, data in self.pieces:
            common = intersection(held, box)
            if common is not None:
                data.read(relative(common, held), target[within(common, box)])

    def check(self) -> None:
        for _, data in self.pieces:
            data.check()


@dataclass(frozen=True, slots=True)
class Replicas(ArrayData):
    """Copies that must be the same: all are read, and compared bit for bit."""

    copies: Sequence[ArrayData]
    names: Sequence[str]
    """Who holds each, in words."""

    path: str
    """Of the leaf."""

    def read(self, box: Box, target: Array) -> None:
        self.copies[0].read(box, target)
        for copy, name in zip(self.copies[1:], self.names[1:], strict=True):
            other = np.empty_like(target)
            copy.read(box, other)
            if as_bits(other).tobytes() != as_bits(target).tobytes():
                raise DataError(
                    f"{show(self.path)}: {show_box(box)} of its shard is not the same in {self.names[0]} and {name},"
                    " which should hold replicas"
                )

    def check(self) -> None:
        for copy in self.copies:
            copy.check()


@dataclass(frozen=True, slots=True)
class Unreadable(ArrayData):
    """What a checkpoint holds and cannot be read; the leaves around it can."""

    reason: str

    def read(self, box: Box, target: Array) -> None:
        raise DataError(self.reason)


def from_ranks(path: str, shards: Mapping[int, ForeignArray], axes: Mapping[str, int], spec: Spec) -> ForeignArray:
    """The array at a leaf path from what each rank holds of it, split as `spec` says.

    Ranks are numbered row by row over the mesh. Ranks that hold the same box are replicas, one of which is enough, and
    all of which must be equal. Raises DataError if ranks disagree about shape or dtype, or if none has a box;
    SpecError if the spec does not fit.
    """
    _, first = min(shards.items())
    sides = tuple(axes.values())
    # Of any length a dimension divides: each rank has its shard already.
    problem = spec_problem(axes, spec, first.shape if len(spec) > len(first.shape) else (0,) * len(first.shape))
    if problem:
        raise SpecError(f"{show(path)}: {problem}")
    counts = pieces_along(axes, spec, len(first.shape))
    shape = tuple(side * count for side, count in zip(first.shape, counts, strict=True))
    require_alike(path, [(f"rank {rank}", shard) for rank, shard in sorted(shards.items())])
    boxes: dict[int, Box] = {}
    for rank in shards:
        if rank >= math.prod(sides):
            raise DataError(f"{show(path)}: rank {rank} is beyond the mesh {dict(axes)}")
        boxes[rank] = spec_box(axes, spec, shape, [int(place) for place in np.unravel_index(rank, sides)])
    return replace(from_boxes(path, shards, boxes, shape), mesh=MeshRecord.numbered(tuple(axes.items())), spec=spec)


def require_alike(path: str, held: Sequence[tuple[str, ForeignArray]], *, shapes: bool = True) -> None:
    """Raise DataError unless what files or ranks, each called by a name, hold of an array has one dtype and one
    shape; or, without `shapes`, one rank."""
    (first_name, first), *others = held
    for name, array in others:
        fits = array.shape == first.shape if shapes else len(array.shape) == len(first.shape)
        if array.dtype != first.dtype or not fits:
            raise DataError(
                f"{show(path)} is {array.dtype}{list(array.shape)} in {name}, {first.dtype}{list(first.shape)} in"
                f" {first_name}"
            )


def from_boxes(
    path: str, shards: Mapping[int, ForeignArray], boxes: Mapping[int, Box], shape: tuple[int, ...]
) -> ForeignArray:
    """The array at a leaf path from the box of it that each rank holds.

    Ranks that hold the same box are replicas, one of which is enough, and all of which must be equal. Raises DataError
    where a rank holds another shape than its box, where ranks disagree about the dtype, or where none has a box.
    """
    return joined(path, shape, [(f"rank {rank}", boxes[rank], shard) for rank, shard in sorted(shards.items())])


def joined(path: str, shape: tuple[int, ...], held: Sequence[tuple[str, Box, ForeignArray]]) -> ForeignArray:
    """The array at a leaf path from the boxes of it that files or ranks hold, each called by a name.

    The same box in several are replicas. Raises DataError if an array has another shape than its box, if dtypes differ,
    or if no box has an element.
    """
    require_alike(path, [(name, array) for name, _, array in held], shapes=False)
    copies: dict[Box, list[tuple[str, ArrayData]]] = {}
    for name, box, array in held:
        if array.shape != extent(box):
            raise DataError(
                f"{show(path)} has shape {list(array.shape)} in {name}, expected {list(extent(box))} for"
                f" {show_box(box)}"
            )
        copies.setdefault(box, []).append((name, array.data))
    pieces = [(box, _replicas(path, data)) for box, data in copies.items()]
    return replace(held[0][2], shape=shape, data=tiled(path, shape, pieces))


def replicated(path: str, copies: Mapping[str, ForeignArray]) -> ForeignArray:
    """The array at a leaf path that files or ranks, each called by a name, all hold whole; they are compared when it is
    read. Raises DataError if shapes or dtypes differ."""
    held = list(copies.items())
    require_alike(path, held)
    return replace(held[0][1], data=_replicas(path, [(name, array.data) for name, array in held]))


def _replicas(path: str, copies: Sequence[tuple[str, ArrayData]]) -> ArrayData:
    names, data = zip(*copies, strict=True)
    return data[0] if len(data) == 1 else Replicas(data, names, path)


def tiled(path: str, shape: Sequence[int], pieces: Iterable[tuple[Box, ArrayData]]) -> ArrayData:
    """The array at a leaf path from its pieces. Raises DataError unless they cover it, each element once."""
    filled = [(box, data) for box, data in pieces if volume(box)]
    require_cover(path, shape, [box for box, _ in filled])
    return filled[0][1] if len(filled) == 1 else Tiled(filled)


def require_cover(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise DataError unless boxes cover an array, each element once; the error names the array and the box."""
    problems = [
        f"{show_box(box)} is outside its shape {list(shape)}"
        for box in boxes
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
    ]
    if not problems and math.prod(shape):
        problems = list(itertools.islice(_cover_problems(shape, boxes), 21))
    if problems:
        raise DataError(
            f"the shards of {show(path)} do not exactly cover its shape {list(shape)}:\n{listing(problems)}"
        )


def _cover_problems(shape: Sequence[int], boxes: Sequence[Box]) -> Iterable[str]:
    """Boxes that are covered twice or not at all, of a grid drawn through all borders."""
    cuts = [sorted({0, side, *(edge for box in boxes for edge in box[dim])}) for dim, side in enumerate(shape)]
    if math.prod(len(cut) - 1 for cut in cuts) > 1 << 24:
        yield "the shards are too many and too irregular to be checked"
        return
    places = [{edge: number for number, edge in enumerate(cut)} for cut in cuts]
    count = np.zeros([len(cut) - 1 for cut in cuts], np.int32)
    for box in boxes:
        count[tuple(slice(places[dim][a], places[dim][b]) for dim, (a, b) in enumerate(box))] += 1
    for cell in np.argwhere(count != 1):
        box = tuple((cuts[dim][number], cuts[dim][number + 1]) for dim, number in enumerate(cell.tolist()))
        n = int(count[tuple(cell)])
        yield f"{show_box(box)} is not in any shard" if not n else f"{show_box(box)} is in {n} shards"
