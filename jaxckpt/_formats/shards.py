"""Arrays in other libraries' files: at an offset of a file, with strides, or assembled from several such pieces.

Coverage is checked before anything is read. If pieces overlap, leave a gap, or lie outside the array, the error names
the array and the box.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Spec, extent, flat_boxes, pieces_along, show_box, spec_box, spec_problem, volume
from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._model.records import MeshRecord
from jaxckpt._sources.foreign import ArrayData, ForeignArray, InMemoryData, Replicas, Tiled
from jaxckpt._store.foreign_files import OpenFile, opened
from jaxckpt.errors import DataError, SpecError, show_lines, show_path

SPAN_BYTES = 4 << 20
"""Elements that are scattered over at most this many bytes of a file are read in one call, with the bytes between them.
"""


@dataclass(frozen=True, slots=True)
class FileData(ArrayData):
    """An array in a file, uncompressed and little-endian."""

    path: str

    offset: int
    """Bytes from the start of the file to the first element."""

    dtype: str
    shape: tuple[int, ...]

    strides: tuple[int, ...] | None = None
    """Elements from one index to the next along each dimension, never negative; None: C order."""

    def read(self, box: Box, target: Array) -> None:
        if not target.size:
            return
        size, steps = DTYPES[self.dtype].itemsize, self.element_strides
        offset = self.offset + size * sum(start * step for (start, _), step in zip(box, steps, strict=True))
        with opened(self.path) as handle:
            _read_strided(handle, offset, tuple(size * step for step in steps), as_bits(target))

    @property
    def element_strides(self) -> tuple[int, ...]:
        """The strides, computed if the array is in C order."""
        return c_strides(self.shape) if self.strides is None else self.strides

    @property
    def end(self) -> int:
        """Bytes from the start of the file to the end of the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((side - 1) * step for side, step in zip(self.shape, self.element_strides, strict=True))
        return self.offset + DTYPES[self.dtype].itemsize * (last + 1)


@dataclass(frozen=True, slots=True)
class Swapped(ArrayData):
    """An array of numbers that is stored in big-endian order."""

    data: ArrayData

    def read(self, box: Box, target: Array) -> None:
        self.data.read(box, target)
        target.byteswap(inplace=True)

    @property
    def origins(self) -> tuple[ArrayData]:
        return (self.data,)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dimension, in C order."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1] if shape else ()


def f_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dimension, in Fortran order."""
    return c_strides(shape[::-1])[::-1]


def _read_strided(handle: OpenFile, offset: int, strides: tuple[int, ...], target: Array) -> None:
    """Read a strided array, with strides in bytes: in place if it is contiguous, in one call if its span and its gaps
    are small, otherwise in parts along the dimension with the longest stride."""
    shape = target.shape
    span = sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) + target.itemsize
    in_order = span == target.nbytes and all(
        side == 1 or stride == c_stride * target.itemsize
        for side, stride, c_stride in zip(shape, strides, c_strides(shape), strict=True)
    )
    if in_order and target.flags.c_contiguous:
        handle.read_into(offset, [target.reshape(-1).view(np.uint8)])
        return
    dim = max((dim for dim, side in enumerate(shape) if side > 1), key=lambda dim: strides[dim])
    # Several indices per part if they are small. Otherwise each row of a wide array would need its own call.
    per = max(1, SPAN_BYTES // max(1, strides[dim]))
    if shape[dim] * strides[dim] - span > handle.gap_bytes:  # between two indices
        per = 1
    elif span <= SPAN_BYTES:
        raw = np.empty(span, np.uint8)
        handle.read_into(offset, [raw])
        np.copyto(target, np.ndarray(shape, target.dtype, raw.data, 0, strides))
        return
    for first in range(0, shape[dim], per):
        rows, steps = target[(slice(None),) * dim + (slice(first, first + per),)], strides
        if per == 1:
            rows, steps = rows.squeeze(dim), (*strides[:dim], *strides[dim + 1 :])
        _read_strided(handle, offset + first * strides[dim], steps, rows)


def from_ranks(path: str, shards: Mapping[int, ForeignArray], axes: Mapping[str, int], spec: Spec) -> ForeignArray:
    """The array at a leaf path, from the shards of ranks, split by `spec` over a mesh with these axes.

    Ranks are numbered in row-major order of the mesh. Ranks with the same box are replicas: one is enough, and all must
    be equal. Raises DataError if shapes or dtypes differ between ranks, or if no rank has some box; SpecError if the
    spec does not fit.
    """
    _, first = min(shards.items())
    sides = tuple(axes.values())
    # Lengths of 0, so that divisibility is not checked: the ranks already hold shards.
    problem = spec_problem(axes, spec, first.shape if len(spec) > len(first.shape) else (0,) * len(first.shape))
    if problem:
        raise SpecError(f"{show_path(path)}: {problem}")
    counts = pieces_along(axes, spec, len(first.shape))
    shape = tuple(side * count for side, count in zip(first.shape, counts, strict=True))
    require_alike(path, [(f"rank {rank}", shard) for rank, shard in sorted(shards.items())])
    boxes: dict[int, Box] = {}
    for rank in shards:
        if rank >= math.prod(sides):
            raise DataError(f"{show_path(path)}: rank {rank} is beyond the mesh {dict(axes)}")
        boxes[rank] = spec_box(axes, spec, shape, [int(index) for index in np.unravel_index(rank, sides)])
    return replace(from_boxes(path, shards, boxes, shape), mesh=MeshRecord.of_axes(tuple(axes.items())), spec=spec)


def require_alike(path: str, named_arrays: Sequence[tuple[str, ForeignArray]], *, shapes: bool = True) -> None:
    """Raise DataError unless the parts of an array in several files or ranks, given as (name, part), have equal dtypes
    and shapes; without `shapes`, equal dtypes and numbers of dimensions."""
    (first_name, first), *others = named_arrays
    for name, array in others:
        fits = array.shape == first.shape if shapes else len(array.shape) == len(first.shape)
        if array.dtype != first.dtype or not fits:
            raise DataError(
                f"{show_path(path)} is {array.dtype}{list(array.shape)} in {name}, {first.dtype}{list(first.shape)} in"
                f" {first_name}"
            )


def from_boxes(
    path: str, shards: Mapping[int, ForeignArray], boxes: Mapping[int, Box], shape: tuple[int, ...]
) -> ForeignArray:
    """The array of `shape` at a leaf path, from the shard of each rank and its box.

    Ranks with the same box are replicas: one is enough, and all must be equal. Raises DataError if the shape of a shard
    and of its box differ, if dtypes differ, or if the boxes do not cover the array exactly.
    """
    return joined(path, shape, [(f"rank {rank}", boxes[rank], shard) for rank, shard in sorted(shards.items())])


def joined(path: str, shape: tuple[int, ...], shards: Sequence[tuple[str, Box, ForeignArray]]) -> ForeignArray:
    """The array of `shape` at a leaf path, from parts in files or ranks: (name for messages, box, part).

    Parts with the same box are replicas. Raises DataError if a part does not have the shape of its box, if dtypes
    differ, or if the boxes do not cover the array exactly.
    """
    require_alike(path, [(name, array) for name, _, array in shards], shapes=False)
    copies: dict[Box, dict[str, ArrayData]] = {}
    for name, box, array in shards:
        if array.shape != extent(box):
            raise DataError(
                f"{show_path(path)} has shape {list(array.shape)} in {name}, expected {list(extent(box))} for"
                f" {show_box(box)}"
            )
        copies.setdefault(box, {})[name] = array.data
    pieces = [(box, _replicas(path, data)) for box, data in copies.items()]
    return replace(shards[0][2], shape=shape, data=tiled(path, shape, pieces))


def replicated(path: str, copies: Mapping[str, ForeignArray]) -> ForeignArray:
    """The array at a leaf path, from complete copies in several files or ranks, by name. The copies are compared when
    the array is read. Raises DataError if shapes or dtypes differ."""
    named = list(copies.items())
    require_alike(path, named)
    return replace(named[0][1], data=_replicas(path, {name: array.data for name, array in named}))


def _replicas(path: str, copies: Mapping[str, ArrayData]) -> ArrayData:
    return Replicas(path, copies) if len(copies) > 1 else next(iter(copies.values()))


def tiled(path: str, shape: Sequence[int], pieces: Iterable[tuple[Box, ArrayData]]) -> ArrayData:
    """The data of an array from its pieces. Raises DataError unless they cover each element exactly once."""
    filled = [(box, data) for box, data in pieces if volume(box)]
    require_cover(path, shape, [box for box, _ in filled])
    return filled[0][1] if len(filled) == 1 else Tiled(filled)


def tiled_flat(path: str, shape: tuple[int, ...], chunks: Iterable[ForeignArray]) -> ArrayData:
    """The data of an array from its elements in C order, in chunks of one dimension, each in memory or in a file.

    Raises DataError unless they are all of its elements.
    """
    pieces: list[tuple[Box, ArrayData]] = []
    start = 0
    for chunk in chunks:
        at = 0
        for box in flat_boxes(shape, start, start + chunk.shape[0]):
            pieces.append((box, _reshaped(chunk, at, box)))
            at += volume(box)
        start += chunk.shape[0]
    return tiled(path, shape, pieces)


def _reshaped(chunk: ForeignArray, start: int, box: Box) -> ArrayData:
    """The elements of a chunk from number `start` on, which fill a box of an array."""
    if isinstance(chunk.data, FileData):
        offset = chunk.data.offset + start * DTYPES[chunk.dtype].itemsize
        return FileData(chunk.data.path, offset, chunk.dtype, extent(box))
    array = cast("InMemoryData", chunk.data).array
    return InMemoryData(array[start : start + volume(box)].reshape(extent(box)))


def require_cover(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise DataError, which names the array and the box, unless boxes cover each element of an array exactly once."""
    problems = [
        f"{show_box(box)} is outside its shape {list(shape)}"
        for box in boxes
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
    ]
    if not problems and math.prod(shape):
        problems = list(itertools.islice(_cover_problems(shape, boxes), 21))
    if problems:
        raise DataError(
            f"the shards of {show_path(path)} do not exactly cover its shape {list(shape)}:\n{show_lines(problems)}"
        )


def _cover_problems(shape: Sequence[int], boxes: Sequence[Box]) -> Iterable[str]:
    """The boxes that are covered several times or not at all, among the cells of the grid through all borders."""
    cuts = [sorted({0, side, *(edge for box in boxes for edge in box[dim])}) for dim, side in enumerate(shape)]
    if math.prod(len(cut) - 1 for cut in cuts) > 1 << 24:
        yield "there are too many irregular shards to check"
        return
    numbers = [{edge: number for number, edge in enumerate(cut)} for cut in cuts]
    count = np.zeros([len(cut) - 1 for cut in cuts], np.int32)
    for box in boxes:
        count[tuple(slice(numbers[dim][a], numbers[dim][b]) for dim, (a, b) in enumerate(box))] += 1
    for cell in np.argwhere(count != 1):
        box = tuple((cuts[dim][number], cuts[dim][number + 1]) for dim, number in enumerate(cell.tolist()))
        n = int(count[tuple(cell)])
        yield f"{show_box(box)} is not in any shard" if not n else f"{show_box(box)} is in {n} shards"
