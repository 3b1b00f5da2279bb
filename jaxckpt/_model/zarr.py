"""The bytes of a stack in Zarr v3: its metadata, and the positions of chunks in its objects."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._model.dtypes import DTYPES, stored_dtype
from jaxckpt._model.grid import Box, IntArray, touched_cells
from jaxckpt._model.stacks import Stack

CHUNK_BATCH_BYTES = 1 << 20
"""Bytes of chunks that are gathered and hashed together, so that they stay in a core's cache."""


def metadata(stack: Stack) -> bytes:
    """The stack's zarr.json. It depends only on the stack, so readers need not trust the stored copy."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    data_type = stored_dtype(stack.dtype)
    plain = {"name": "bytes"} if DTYPES[stack.dtype].itemsize == 1 else little
    codecs: list[dict[str, Any]] = [plain]
    if stack.compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    elif stack.compression == "blosc":
        size = DTYPES[stack.dtype].itemsize
        # Measured (docs/performance.md): grouping bits by position helps for elements of 2 bytes and more.
        shuffle = "noshuffle" if size == 1 else "bitshuffle"
        settings = {"cname": "zstd", "clevel": 1, "shuffle": shuffle, "typesize": size, "blocksize": 0}
        codecs.append({"name": "blosc", "configuration": settings})
    codecs.append({"name": "crc32c"})
    complex_dtype = data_type.startswith("complex")
    fill: Any = [0.0, 0.0] if complex_dtype else 0.0 if data_type.startswith("float") else 0
    sharding = {
        "chunk_shape": stack.chunk_sides,
        "codecs": codecs,
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": stack.array_shape,
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": stack.object_sides}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if data_type == "bool" else fill,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"jaxckpt": {"dtype": stack.dtype}},
        }
    ).encode()


def index_key(index: Iterable[int]) -> str:
    """An index of the grid of objects, as in keys and in the manifest."""
    return "/".join(map(str, index))


def object_key(stack: Stack, index: tuple[int, ...]) -> str:
    """The key of an object below the data folder."""
    return f"{stack.name}/c/{index_key(index)}"


def chunk_box(stack: Stack, index: tuple[int, ...], number: int) -> Box | None:
    """The box of the stack in a chunk, by the chunk's number in an object; None if it is outside of the array."""
    grid = [o // c for o, c in zip(stack.object_sides, stack.chunk_sides, strict=True)]
    position = np.unravel_index(number, grid)
    sides = zip(index, position, stack.object_sides, stack.chunk_sides, stack.array_shape, strict=True)
    box = tuple((i * o + int(p) * c, min(i * o + (int(p) + 1) * c, n)) for i, p, o, c, n in sides)
    return box if all(start < stop for start, stop in box) else None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of an object that together form one box."""

    numbers: Sequence[int]
    """Their numbers in the object, in the order of their positions in the box, `slowest` dimension first."""

    box: Box
    """Their box of the stack, which may extend beyond the stack."""

    slowest: Sequence[int]
    """The dimensions of the box, from the slowest to the fastest in the order of `numbers`."""


def chunk_runs(stack: Stack, index: tuple[int, ...], region: Box) -> Iterator[Chunks]:
    """The chunks of an object that `region`, a box of the stack, touches, grouped into boxes. The chunks of each box,
    in sequence, are the box in C order. No box is larger than `CHUNK_BATCH_BYTES` unless a chunk is."""
    counts, first_chunks, ranges = _chunks(stack, index, region)
    # Cut along one dimension, so that all chunks of a block have length 1 in the dimensions before it.
    row = next((dim for dim, side in enumerate(stack.chunk_sides) if side > 1), len(counts) - 1)
    along = max((dim for dim in range(row + 1) if ranges[dim][1] - ranges[dim][0] > 1), default=row)
    most = max(1, CHUNK_BATCH_BYTES // stack.chunk_stored_bytes)
    steps = [math.prod(counts[dim + 1 :]) for dim in range(len(counts))]
    # For each dimension and position along it: what the position adds to a chunk's number, and its range in the stack.
    positions = [
        [(position * step, ((first + position) * side, (first + position + 1) * side)) for position in range(*bounds)]
        for step, first, side, bounds in zip(steps, first_chunks, stack.chunk_sides, ranges, strict=True)
    ]
    stride, slowest = steps[along], range(len(counts))
    for at in range(0, len(positions[along]), most):
        run = positions[along][at : at + most]
        merged = [(run[0][0], (run[0][1][0], run[-1][1][1]))]
        for chosen in itertools.product(*positions[:along], merged, *positions[along + 1 :]):
            first = sum([number for number, _ in chosen])
            box = tuple([side for _, side in chosen])
            yield Chunks(range(first, first + len(run) * stride, stride), box, slowest)


def in_groups(
    stack: Stack, index: tuple[int, ...], region: Box, tiles: np.ndarray[Any, Any], most: int
) -> Iterator[tuple[list[int], np.ndarray[Any, Any]]]:
    """The chunks of an object that `region` touches, in C order, in groups of at most `most` that form a box: (their
    numbers, their part of `tiles`, which is [*grid of these chunks, …])."""
    counts, _, ranges = _chunks(stack, index, region)
    numbers = np.arange(math.prod(counts)).reshape(counts)[tuple(slice(*bounds) for bounds in ranges)]
    spans = list[range]()
    for length in reversed(numbers.shape):
        spans.insert(0, range(0, length, max(1, min(most, length))))
        most //= length
    for starts in itertools.product(*spans):
        group = tuple(slice(start, start + span.step) for start, span in zip(starts, spans, strict=True))
        yield numbers[group].ravel().tolist(), tiles[group]


def chunk_blocks(
    stack: Stack, index: tuple[int, ...], region: Box, starts: IntArray, max_bytes: int
) -> Iterator[Chunks]:
    """The chunks of an object that `region`, a box of the stack, touches, in as few boxes as possible. No box is larger
    than `max_bytes` unless a chunk is. Its chunks are neighbors in the file; `starts` has the offset of each chunk by
    its number."""
    counts, first_chunks, ranges = _chunks(stack, index, region)
    numbers = np.arange(len(starts)).reshape(counts)[tuple(slice(*bounds) for bounds in ranges)]
    steps, cuts = list[int](), list[list[int]]()
    for dim, length in enumerate(numbers.shape):
        if length == 1:
            steps.append(1 << 62)
            cuts.append([0, 1])
            continue
        spacing = np.diff(starts[numbers[(0,) * dim + (slice(None),) + (0,) * (numbers.ndim - dim - 1)]])
        steps.append(int(spacing[spacing > 0].min(initial=1 << 62)))
        # Cut where the spacing changes: the object was written in several parts.
        cuts.append([0, *(np.flatnonzero(spacing != steps[dim]) + 1).tolist(), length])
    slowest = sorted(range(numbers.ndim), key=lambda dim: steps[dim], reverse=True)
    room = max(1, max_bytes // stack.chunk_stored_bytes)
    spans = list[list[tuple[int, int]]]([[]] * numbers.ndim)
    for dim in reversed(slowest):
        pieces = list(itertools.pairwise(cuts[dim]))
        longest = max(b - a for a, b in pieces)
        side = -(-longest // -(-longest // room))
        spans[dim] = [(at, min(at + side, b)) for a, b in pieces for at in range(a, b, side)]
        room = room // longest if side == longest else 1
    origins = [first + start for first, (start, _) in zip(first_chunks, ranges, strict=True)]
    for block in itertools.product(*spans):
        block_numbers = numbers[tuple(slice(*span) for span in block)].transpose(slowest).ravel()
        box = tuple(((o + a) * c, (o + b) * c) for o, (a, b), c in zip(origins, block, stack.chunk_sides, strict=True))
        yield Chunks(block_numbers.tolist(), box, slowest)


def contiguous_chunk_numbers(stack: Stack, index: tuple[int, ...], box: Box) -> list[int] | None:
    """The numbers of the chunks of `box`, a box of the stack in one object, if the box in C order consists of these
    chunks in sequence; otherwise None."""
    row, side = index[0] * stack.object_sides[0], stack.chunk_sides[0]
    (start, stop), *rest = box
    origins = (i * o for i, o in zip(index[1:], stack.object_sides[1:], strict=True))
    region = tuple([(a - o, b - o) for (a, b), o in zip(rest, origins, strict=True)])
    pattern = _contiguous_in_rows(stack.chunk_sides[1:], stack.object_sides[1:], region, side > 1)
    if pattern is None or start % side or stop % side:
        return None
    count, numbers = pattern
    chunk_rows = range((start - row) // side, (stop - row) // side)
    return [chunk_row * count + number for chunk_row in chunk_rows for number in numbers]


@functools.lru_cache(maxsize=256)
def _contiguous_in_rows(
    chunk: tuple[int, ...], sides: tuple[int, ...], region: Box, begun: bool
) -> tuple[int, tuple[int, ...]] | None:
    """For `contiguous_chunk_numbers`, without the rows, because objects and rows repeat their regions: the number of
    chunks in the sides of an object, and the chunks' numbers. `begun`: a chunk has several rows."""
    count, numbers = 1, [0]
    for (start, stop), side, whole in zip(region, chunk, sides, strict=True):
        if start % side or stop % side or (begun and stop - start > side):
            return None
        begun = begun or side > 1
        count *= whole // side
        positions = range(start // side, stop // side)
        numbers = [number * (whole // side) + position for number in numbers for position in positions]
    return count, tuple(numbers)


def _chunks(stack: Stack, index: tuple[int, ...], region: Box) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """For each dimension of an object: its number of chunks, the stack's index of its first chunk, and the range of its
    chunks that `region` touches."""
    counts = [o // c for o, c in zip(stack.object_sides, stack.chunk_sides, strict=True)]
    first_chunks = [i * count for i, count in zip(index, counts, strict=True)]
    ranges = [(a - f, b - f) for (a, b), f in zip(touched_cells(region, stack.chunk_sides), first_chunks, strict=True)]
    return counts, first_chunks, ranges
