"""Arrays that lie in other libraries' files: as they are, at an offset, with strides; and put together of such parts.

Coverage is checked before anything is read: parts that overlap, that leave a hole, or that lie outside are an error
that names the array and the box.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, Spec, extent, intersection, show_spec, volume, within
from jaxckpt._format.pieces import Array, as_bits
from jaxckpt._format.records import MeshRecord
from jaxckpt._restore.source import Block, ForeignArray
from jaxckpt._runtime.errors import DataError, SpecError, StorageError, listing, show
from jaxckpt._storage import files

T = TypeVar("T")

MAX_INDEX_BYTES = 1 << 28
"""Of an index file in JSON."""

SPAN_BYTES = 4 << 20
"""What lies scattered over no more bytes of a file than this is read with all that lies between."""


@contextlib.contextmanager
def opened(path: str) -> Generator[int]:
    """A file to read. Raises DataError where it is missing or no plain file, StorageError where it cannot be read."""
    try:
        # Without O_NONBLOCK a pipe, which somebody has put there, would be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise DataError(f"{path} is no plain file")
            yield handle
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class FileBlock(Block):
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
        size = DTYPES[self.dtype].itemsize
        strides = c_strides(self.shape) if self.strides is None else self.strides
        offset = self.offset + size * sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        with opened(self.path) as handle:
            _fill(self.path, handle, offset, tuple(size * stride for stride in strides), as_bits(target))

    @property
    def end(self) -> int:
        """Bytes from the start of the file to the end of the last element."""
        strides = c_strides(self.shape) if self.strides is None else self.strides
        if 0 in self.shape:
            return self.offset
        last = sum((side - 1) * stride for side, stride in zip(self.shape, strides, strict=True))
        return self.offset + DTYPES[self.dtype].itemsize * (last + 1)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next along each dimension, in C order."""
    return tuple(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()


def _fill(path: str, handle: int, offset: int, strides: tuple[int, ...], target: Array) -> None:
    """Read a strided array: in place where it lies in one piece, in one go where it lies close together, else index by
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
        # Several at once where they are small: else each row of a wide array would take a call of its own.
        per = max(1, SPAN_BYTES // max(1, strides[dim]))
        for first in range(0, shape[dim], per):
            part = target[(slice(None),) * dim + (slice(first, first + per),)]
            if per == 1:
                _fill(path, handle, offset + first * strides[dim], rest, part.squeeze(dim))
            else:
                _fill(path, handle, offset + first * strides[dim], strides, part)


@dataclass(frozen=True, slots=True)
class Tiled(Block):
    """An array put together of parts that cover it, each element once: `require_cover` has looked."""

    parts: Sequence[tuple[Box, Block]]

    def read(self, box: Box, target: Array) -> None:
        for held, block in self.parts:
            common = intersection(held, box)
            if common is not None:
                block.read(within_box(common, held), target[within(common, box)])

    def check(self) -> None:
        for _, block in self.parts:
            block.check()


@dataclass(frozen=True, slots=True)
class Replicas(Block):
    """Copies that must be the same: all are read, and compared bit for bit."""

    blocks: Sequence[Block]
    names: Sequence[str]
    """Who holds each, in words."""

    path: str
    """Of the leaf."""

    def read(self, box: Box, target: Array) -> None:
        self.blocks[0].read(box, target)
        for block, name in zip(self.blocks[1:], self.names[1:], strict=True):
            other = np.empty_like(target)
            block.read(box, other)
            if as_bits(other).tobytes() != as_bits(target).tobytes():
                raise DataError(
                    f"{show(self.path)}: {show_box(box)} of its shard is not the same in {self.names[0]} and {name},"
                    " which should hold replicas"
                )

    def check(self) -> None:
        for block in self.blocks:
            block.check()


@dataclass(frozen=True, slots=True)
class Unreadable(Block):
    """What a checkpoint holds and nobody can read, so that the leaves around it can be."""

    reason: str

    def read(self, box: Box, target: Array) -> None:
        raise DataError(self.reason)


def from_ranks(path: str, parts: Mapping[int, ForeignArray], axes: Mapping[str, int], spec: Spec) -> ForeignArray:
    """The array at a leaf path from what each rank holds of it, split as `spec` says.

    Ranks are numbered row by row over the mesh. Ranks that hold the same box are replicas, one of which is enough, and
    all of which must be equal. Raises DataError where ranks disagree about shape or dtype, or where none has a box;
    SpecError where the spec does not fit.
    """
    first_rank, first = min(parts.items())
    dims, problem = split_of(axes, spec, len(first.shape))
    if problem:
        raise SpecError(f"{show(path)}: {problem}")
    boxes: dict[int, Box] = {}
    for rank, part in sorted(parts.items()):
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"{show(path)} is {part.dtype}{list(part.shape)} in rank {rank}, {first.dtype}{list(first.shape)} in"
                f" rank {first_rank}: every rank must hold an equal shard"
            )
        if rank >= math.prod(axes.values()):
            raise DataError(f"{show(path)}: rank {rank} is beyond the mesh {dict(axes)}")
        place = dict(zip(axes, map(int, np.unravel_index(rank, tuple(axes.values()))), strict=True))
        numbers = [functools.reduce(lambda n, axis: n * axes[axis] + place[axis], names, 0) for names in dims]
        boxes[rank] = tuple((n * side, (n + 1) * side) for n, side in zip(numbers, first.shape, strict=True))
    shape = tuple(side * math.prod(axes[axis] for axis in names) for side, names in zip(first.shape, dims, strict=True))
    return replace(from_boxes(path, parts, boxes, shape), mesh=_mesh(tuple(axes.items())), spec=spec)


@functools.lru_cache(maxsize=64)
def _mesh(axes: tuple[tuple[str, int], ...]) -> MeshRecord:
    """Devices numbered row by row: one record for all arrays that lay on such a mesh."""
    return MeshRecord(dict(axes), list(range(math.prod(side for _, side in axes))), ["Auto"] * len(axes))


def from_boxes(
    path: str, parts: Mapping[int, ForeignArray], boxes: Mapping[int, Box], shape: tuple[int, ...]
) -> ForeignArray:
    """The array at a leaf path from the box of it that each rank holds.

    Ranks that hold the same box are replicas, one of which is enough, and all of which must be equal. Raises DataError
    where a rank holds another shape than its box, where ranks disagree about the dtype, or where none has a box.
    """
    first_rank, first = min(parts.items())
    held: dict[Box, list[int]] = {}
    for rank, part in sorted(parts.items()):
        if part.dtype != first.dtype:
            raise DataError(f"{show(path)} is {part.dtype} in rank {rank}, {first.dtype} in rank {first_rank}")
        if part.shape != extent(boxes[rank]):
            raise DataError(
                f"{show(path)} has shape {list(part.shape)} in rank {rank}, expected"
                f" {list(extent(boxes[rank]))} for {show_box(boxes[rank])}"
            )
        held.setdefault(boxes[rank], []).append(rank)
    blocks = [
        (box, replicas([parts[rank].block for rank in ranks], [f"rank {rank}" for rank in ranks], path))
        for box, ranks in held.items()
    ]
    return replace(first, shape=shape, block=tiled(path, shape, blocks))


def split_of(axes: Mapping[str, int], spec: Spec, rank: int) -> tuple[list[tuple[str, ...]], str | None]:
    """The axes that split each dimension, and what is wrong with them."""
    named = [axis for names in spec for axis in names]
    if len(spec) > rank:
        return [], f"its spec {show_spec(spec)} has {len(spec)} entries, it has {rank} dimensions"
    if unknown := [axis for axis in named if axis not in axes]:
        return [], f"its spec {show_spec(spec)} names {unknown[0]!r}, which the mesh {dict(axes)} lacks"
    if len(set(named)) < len(named):
        return [], f"its spec {show_spec(spec)} names an axis twice"
    return [*spec, *[()] * (rank - len(spec))], None


def replicas(blocks: Sequence[Block], names: Sequence[str], path: str) -> Block:
    """Copies of one array, which are compared when it is read; `path` is the leaf's."""
    return blocks[0] if len(blocks) == 1 else Replicas(tuple(blocks), tuple(names), path)


def within_box(box: Box, outer: Box) -> Box:
    """A box as seen from the start of one around it."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


def tiled(path: str, shape: Sequence[int], parts: Iterable[tuple[Box, Block]]) -> Block:
    """The array at a leaf path from its parts. Raises DataError where they do not cover it, each element once."""
    found = [(box, block) for box, block in parts if volume(box)]
    require_cover(path, shape, [box for box, _ in found])
    if len(found) == 1:
        return found[0][1]
    return Tiled(found)


def require_cover(path: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise DataError unless boxes cover an array, each element once; the error names the array and the box."""
    problems = [
        f"{show_box(box)} lies outside of its shape {list(shape)}"
        for box in boxes
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
    ]
    if not problems and math.prod(shape):
        problems = list(itertools.islice(_cover_problems(shape, boxes), 21))
    if problems:
        raise DataError(f"the shards of {show(path)} do not make up its {list(shape)}:\n{listing(problems)}")


def _cover_problems(shape: Sequence[int], boxes: Sequence[Box]) -> Iterable[str]:
    """Boxes that are covered twice or not at all, of a grid drawn through all borders."""
    cuts = [sorted({0, side, *(edge for box in boxes for edge in box[dim])}) for dim, side in enumerate(shape)]
    if math.prod(len(cut) - 1 for cut in cuts) > 1 << 24:
        yield "they are too many and too irregular to be checked"
        return
    places = [{edge: number for number, edge in enumerate(cut)} for cut in cuts]
    count = np.zeros([len(cut) - 1 for cut in cuts], np.int32)
    for box in boxes:
        count[tuple(slice(places[dim][a], places[dim][b]) for dim, (a, b) in enumerate(box))] += 1
    for cell in np.argwhere(count != 1):
        box = tuple((cuts[dim][number], cuts[dim][number + 1]) for dim, number in enumerate(cell.tolist()))
        n = int(count[tuple(cell)])
        yield f"{show_box(box)} is in no shard" if not n else f"{show_box(box)} is in {n} shards"


def show_box(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def inside(folder: str, name: str, where: str) -> str:
    """The path of a file that an index names. Raises DataError where the name leads out of the folder."""
    parts = name.split("/")
    if not all(parts) or {".", ".."} & {*parts} or "\0" in name:
        raise DataError(f"{where} names the file {name[:200]!r}, which would lie outside of its folder")
    return os.path.join(folder, *parts)


def read_json(path: str, kind: type[T]) -> T:
    """An index in JSON. Raises DataError where it is damaged or none."""
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        if size > MAX_INDEX_BYTES:
            raise DataError(f"{path} is {size} bytes long, over {MAX_INDEX_BYTES}")
        text = os.pread(handle, size, 0)
    try:
        return msgspec.convert(json.loads(text, object_pairs_hook=distinct), kind)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {str(error)[:200]}") from error


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as a hook of `json.loads`. Of two equal keys, each reader would take another."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("two of its keys are the same")
    return record


_NUMBERED = re.compile(r"(.+?)-\d{5}(-of-\d{5})?(\.\w+)")


def require_named(folder: str, named: Collection[str], index: str) -> None:
    """Raise DataError if a numbered file belongs to the files that an index names, and the index does not name it."""
    series = {match.groups() for name in named if (match := _NUMBERED.fullmatch(name))}
    for name in sorted(set(os.listdir(folder)) - {*named}):
        if (match := _NUMBERED.fullmatch(name)) and match.groups() in series:
            raise DataError(f"{os.path.join(folder, name)} is not named by {index}, although files like it are")


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that, one after another in C order, are the elements `start` to `stop` of an array."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all of it lies within one row
        index = start // row
        yield from (((index, index + 1), *rest) for rest in flat_boxes(shape[1:], start % row, stop % row))
        return
    if start % row:
        yield from (((first - 1, first), *rest) for rest in flat_boxes(shape[1:], start % row, row))
    if first < last:
        yield ((first, last), *((0, side) for side in shape[1:]))
    if stop % row:
        yield from (((last, last + 1), *rest) for rest in flat_boxes(shape[1:], 0, stop % row))


def require_length(path: str, end: int) -> None:
    """Raise DataError where a file ends before what it should hold."""
    try:
        length = os.stat(path).st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    if length < end:
        raise DataError(f"{path} is {length} bytes long, expected at least {end}")
