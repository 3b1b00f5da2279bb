"""The chunks of an object's data in memory, in place or gathered, and the digest of their content."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.grid import Box, contains, extent, intersection, slices_within
from jaxckpt._model.pieces import Array, Bytes, Pieces, as_bits
from jaxckpt._model.stacks import Stack
from jaxckpt._model.zarr import Chunks

SAMPLE_BYTES = 1 << 10
"""Approximate bytes at each place of a sample."""

SAMPLE_EVERY_BYTES = 4 << 20
"""Bytes of an object for each place of its sample, up to 16 places. A place costs about 3 µs."""


def chunks_of(
    stack: Stack, index: tuple[int, ...], pieces: Pieces, flush: Callable[[], object], batch_bytes: int
) -> Iterator[tuple[Sequence[int], Bytes]]:
    """All chunks of an object, in groups: (chunk numbers, their data in that order).

    Gathers about `batch_bytes` of chunks. Then calls `flush`, which must finish using what was yielded before, because
    the memory is used again.
    """
    size = stack.chunk_stored_bytes - 4
    scratch, used = np.empty(0, np.uint8), 0

    def room_for(n_bytes: int) -> Bytes:
        nonlocal scratch, used
        if used + n_bytes > len(scratch):
            flush()
            used = 0
            if n_bytes > len(scratch):
                scratch = np.empty(max(n_bytes, batch_bytes), np.uint8)
        used += n_bytes
        return scratch[used - n_bytes : used]

    separate = pieces.separate_arrays(stack.chunk_sides)
    for box, array in [(pieces.box, None)] if separate is None else separate:
        in_order = array is not None and array.flags.c_contiguous
        run = zarr.contiguous_chunk_numbers(stack, index, box) if in_order else None
        if array is not None and run is not None:
            yield run, array.reshape(-1).view(np.uint8)
            continue
        tiles = None if array is None or batch_bytes < 2 * size else _tiles(stack.chunk_sides, box, array)
        if tiles is not None:
            for numbers, group in zarr.in_groups(stack, index, box, tiles, batch_bytes // size):
                data = room_for(len(numbers) * size)
                np.copyto(as_bits(data.view(pieces.dtype)).reshape(group.shape), as_bits(group))
                yield numbers, data
            continue
        source = pieces if array is None else Pieces(box, pieces.dtype, box[0][1] - box[0][0], [[(box, array)]])
        for block in zarr.chunk_runs(stack, index, box):
            data = None if array is None else contiguous_bytes(block.box, box, array)
            if data is None:
                data = source.gather(block.box, room_for(len(block.numbers) * size))
            yield block.numbers, data


def _tiles(chunk: Sequence[int], box: Box, array: Array) -> Array | None:
    """A view [*grid of chunks, *sides of a chunk] of an array that holds a box; None if its chunks are not whole, or
    contiguous in memory, so that they need not be gathered."""
    if any(start % side or stop % side for (start, stop), side in zip(box, chunk, strict=True)):
        return None
    sides = [part for length, side in zip(array.shape, chunk, strict=True) for part in (length // side, side)]
    rank = array.ndim
    tiles = array.reshape(sides).transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    return None if tiles[(0,) * rank].flags.c_contiguous else tiles


def contiguous_bytes(block: Box, box: Box, target: Array) -> Bytes | None:
    """The bytes of `target`, which holds `box`, that correspond to a block of chunks; None unless `box` contains the
    block and these bytes are contiguous."""
    if not contains(box, block):
        return None
    view = target[slices_within(block, box)]
    return view.reshape(-1).view(np.uint8) if view.flags.c_contiguous else None


def scatter(stack: Stack, chunks: Chunks, data: Bytes, targets: Sequence[tuple[Box, Array]]) -> None:
    """Copy the overlap of some chunks and each wanted box of the stack into the array of that box.

    `data` has the chunks in sequence, each followed by its checksum. One call copies all chunks that are inside a box.
    """
    sides = stack.chunk_sides
    grid = [(stop - start) // side for (start, stop), side in zip(chunks.box, sides, strict=True)]
    next_chunks = _strides(grid, chunks.slowest, stack.chunk_stored_bytes)
    next_elements = _strides(sides, range(len(sides)), stack.itemsize)
    for box, target in targets:
        common = intersection(box, chunks.box)
        if common is None:
            continue
        bits = as_bits(target)
        spans = [_spans(a - o, b - o, side) for (a, b), (o, _), side in zip(common, chunks.box, sides, strict=True)]
        shift = [origin - first for (origin, _), (first, _) in zip(chunks.box, box, strict=True)]
        for chosen in itertools.product(*spans):
            destination = bits[tuple([slice(a + s, b + s) for (a, b), s in zip(chosen, shift, strict=True)])]
            offset, shape, strides = 0, list[int](), list[int]()
            for (start, stop), side, next_chunk, next_element in zip(
                chosen, sides, next_chunks, next_elements, strict=True
            ):
                offset += start // side * next_chunk + start % side * next_element
                count = max(1, (stop - start) // side)
                for length, step in ((count, next_chunk), ((stop - start) // count, next_element)):
                    if length > 1:
                        shape.append(length)
                        strides.append(step)
            np.copyto(destination.reshape(shape), np.ndarray(shape, bits.dtype, data, offset, strides))


def _strides(sides: Sequence[int], slowest: Sequence[int], step: int) -> list[int]:
    """The stride of each dimension, in units of `step`, if the dimensions are ordered as in `slowest`."""
    steps = [0] * len(sides)
    for dim in reversed(slowest):
        steps[dim] = step
        step *= sides[dim]
    return steps


def _spans(start: int, stop: int, side: int) -> Iterator[tuple[int, int]]:
    """A range, cut into a run of whole chunks of this side and the partial chunks before and after it."""
    while start < stop:
        whole = start % side == 0 and stop - start >= side
        end = stop // side * side if whole else min(stop, (start // side + 1) * side)
        yield start, end
        start = end


def content_digest(stack: Stack, index: tuple[int, ...], pieces: Pieces) -> str:
    """128-bit XXH3 of the uncompressed content of an object's chunks, as docs/format.md defines it."""
    size = stack.chunk_stored_bytes - 4
    entries: list[tuple[int, bytes]] = []
    for numbers, data in chunks_of(stack, index, pieces, lambda: None, zarr.CHUNK_BATCH_BYTES):
        entries += zip(numbers, map(chunk_digest, data.reshape(-1, size)), strict=True)
    return combined_digest(entries)


def chunk_digest(data: Any) -> bytes:
    """128-bit XXH3 of the uncompressed content of a chunk."""
    import xxhash  # imported only by saves that compare content

    return xxhash.xxh3_128_digest(data)


def combined_digest(entries: Iterable[tuple[int, bytes]]) -> str:
    """The digest of an object's content from the number and the digest of each chunk."""
    import xxhash  # imported only by saves that compare content

    return xxhash.xxh3_128_hexdigest(
        b"".join(number.to_bytes(8, "little") + digest for number, digest in sorted(entries))
    )


def sample_digest(pieces: Pieces) -> bytes:
    """A digest of a few short runs of elements, spread evenly over an object. If it differs from that of an object with
    the same pieces, so does the content, or elements outside of the object; the reverse does not hold."""
    import xxhash  # imported only by saves that compare content

    last = min(16, 3 + math.prod(extent(pieces.box)) * pieces.dtype.itemsize // SAMPLE_EVERY_BYTES) - 1
    hasher = xxhash.xxh3_64()
    for sample in range(last + 1):
        group = pieces.groups[(len(pieces.groups) - 1) * sample // last]
        _, array = group[(len(group) - 1) * sample // last]
        count = min(array.size, SAMPLE_BYTES // array.itemsize)
        start = (array.size - count) * sample // last
        hasher.update(array.flat[start : start + count].tobytes())
    return hasher.digest()
