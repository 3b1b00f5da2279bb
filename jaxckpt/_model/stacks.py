"""Stacks: Zarr arrays whose rows are equal leaves, and the shapes of their chunks and objects. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, cell_shape, divisors, extent, grid_cells, intersection, touched_cells
from jaxckpt._options import Options

# Shapes of chunks and objects -----------------------------------------------------------------------------
# A cell is the part of a leaf that lies in one piece of memory, or that one process holds. The cost of its chunks, in
# CPU time on one core (Intel Xeon, files on tmpfs, checksums included):
#
#     in place    0.55 ns a byte and 5 µs a chunk, for a chunk that is one run of the cell's memory
#     gathered    0.75 ns a byte and 40 µs a chunk, for any other chunk; more if its runs are shorter than
#                      `MIN_RUN_BYTES`
#     over-read   a reader pays for every byte of a chunk, even if it needs only a few of them
#     index       20 bytes a chunk
#
# Readers ask for a cell as it was saved; for single indices of its leading dimensions (the layers of a scanned model,
# the experts of a layer); and for 1/2, 1/4 or 1/8 of it along any dimension, because the mesh became larger or the
# split moved to another dimension. `chunk_shape` limits what they read to twice what they need, in three steps:
#
# 1. A leading dimension is cut to 1, so that reading one layer reads only that layer.
# 2. Rows (everything after the first remaining dimension) of at least `COLUMN_CUTS` × `MIN_RUN_BYTES` are cut into
#    `COLUMN_CUTS` parts, and rows of four times that length into twice as many, but only if as many cuts remain for the
#    number of rows: a mesh that splits the same dimension further is more common than one that splits another. Shorter
#    rows, and rows of a smaller layer, stay whole. Their chunks are then in place, which speeds up every save and
#    restore, and a reader of 1/8 of the columns reads whole rows.
# 3. The number of rows is cut until a chunk has at most `chunk_bytes`, and then until it has 1/`ROW_CUTS` of the rows.
#
# No step makes a chunk smaller than `MIN_CHUNK_BYTES`, or `MIN_GATHERED_BYTES` if it is not in place: a smaller chunk
# costs more than its readers would save. Leaves of a few times that size may therefore stay whole.

MIN_CHUNK_BYTES = 64 << 10
"""Smallest chunk in place."""

MIN_GATHERED_BYTES = 256 << 10
"""Smallest chunk that is not in place."""

MIN_RUN_BYTES = 2000
"""Rows are not cut into shorter runs. Measured on 1 GiB of float32 on a busy machine (tmpfs, 2 cores), CPU seconds to
save and to restore: 0.62 and 0.55 in place, 0.80 and 0.85 in runs of 4 KiB, 0.92 and 0.95 of 2 KiB, 1.75 and 1.7 of
384 bytes."""

MIN_LAYER_RUN_BYTES = 1 << 10
"""Shortest runs if the layers are not the first dimension, because reading all layers for one would cost more."""

COLUMN_CUTS = 4
"""Number of parts of a row that is cut: a reader of 1/8 of the columns then reads 1/4. Twice as many if the runs are
then at least twice as long as required."""

MAX_PADDING_RATIO = 1.125
"""Chunks that extend beyond the array may enlarge it by at most this factor."""

ROW_CUTS = 8
"""The least number of parts that the rows of a cell are cut into."""

SMALL_CHUNK_BYTES = 512 << 10
LARGE_CHUNK_BYTES = 2 << 20
CHUNKS_PER_CELL = 32
"""Without `Options.chunk_bytes`, a chunk has 1/32 of the bytes of its cell, between these limits. Each checksum makes a
thread take Python's lock again. On 16 cores and an H100, 4 GiB were saved in 0.61 s with chunks of 512 KiB and in 0.30
s with 2 MiB; on 2 cores the CPU time is the same."""


def largest_chunk_bytes(cell_bytes: int, chunk_bytes: int | None) -> int:
    """`Options.chunk_bytes`, or its default for a cell of this size."""
    if chunk_bytes is not None:
        return chunk_bytes
    return min(LARGE_CHUNK_BYTES, max(SMALL_CHUNK_BYTES, cell_bytes // CHUNKS_PER_CELL))


def chunk_shape(cell: Sequence[int], itemsize: int, chunk_bytes: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Sides of a chunk of at most about `chunk_bytes` in a cell of an array of `shape`, for the readers above.

    A cell's side is a multiple of the chunk's side. Along dimensions in which the array is not split, the last chunk
    may extend beyond the array.
    """
    sides, unsplit = [max(1, n) for n in cell], _unsplit_dims(cell, shape)
    least, gathered = min(MIN_CHUNK_BYTES, chunk_bytes), min(MIN_GATHERED_BYTES, chunk_bytes)

    def run(dim: int) -> int:
        """Bytes per index of a dimension."""
        return math.prod(sides[dim + 1 :]) * itemsize

    def halve(dim: int, least_bytes: int) -> bool:
        """Cut a dimension about in half, unless the chunk would become too small, a prime side would become 1, or the
        last chunk would be nearly empty. Returns whether it was cut."""
        if sides[dim] == 1:
            return False
        smaller = _halved(cell[dim], sides[dim], unsplit[dim])
        total = math.prod(sides) * itemsize // sides[dim] * smaller
        if (
            sides[dim] > 4 * smaller
            or total < least_bytes
            or _round_up(cell[dim], smaller) > MAX_PADDING_RATIO * cell[dim]
        ):
            return False
        sides[dim] = smaller
        return True

    for dim in _layer_dims(shape):
        if all(side == 1 for side in sides[:dim]) or run(dim) >= MIN_LAYER_RUN_BYTES:
            together = -(-least // (math.prod(sides) // sides[dim] * itemsize))
            if together < sides[dim]:
                sides[dim] = _at_least(sides[dim], together, unsplit[dim])
    row_dim = _row_dim(sides)
    row_bytes = run(row_dim) if sides else 0
    column_dim = next((dim for dim in range(row_dim + 1, len(sides)) if sides[dim] > 1), row_dim)
    cuts = COLUMN_CUTS * (2 if row_bytes >= 4 * COLUMN_CUTS * MIN_RUN_BYTES else 1)
    while cuts >= COLUMN_CUTS and math.prod(sides) * itemsize < cuts**2 * gathered:
        cuts //= 2
    if column_dim != row_dim and row_bytes >= COLUMN_CUTS * MIN_RUN_BYTES and cuts >= COLUMN_CUTS:
        while run(row_dim) * cuts > row_bytes and halve(column_dim, gathered):
            pass
    sides = list(bounded_shape(cell, itemsize, chunk_bytes, shape, sides))
    row_dim = _row_dim(sides)
    in_place = sides[row_dim + 1 :] == list(cell[row_dim + 1 :])
    while sides and sides[row_dim] * ROW_CUTS > cell[row_dim] and halve(row_dim, least if in_place else gathered):
        pass
    return tuple(sides)


def bounded_shape(
    cell: Sequence[int], itemsize: int, max_bytes: int, shape: Sequence[int], sides: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Sides of a part of a cell, or of `sides` in it, of at most about `max_bytes`. Leading dimensions are cut first,
    so that the part is one run. A prime side of a split dimension is cut last, and only if the part would exceed
    16 × `max_bytes`."""
    unsplit = _unsplit_dims(cell, shape)
    bounded = [max(1, n) for n in (cell if sides is None else sides)]
    while math.prod(bounded) * itemsize > max_bytes:
        smaller = {dim: _halved(cell[dim], side, unsplit[dim]) for dim, side in enumerate(bounded) if side > 1}
        gentle = [dim for dim, side in smaller.items() if bounded[dim] <= 4 * side]
        if not smaller or (not gentle and math.prod(bounded) * itemsize <= 16 * max_bytes):
            break
        dim = min(gentle or smaller)
        bounded[dim] = smaller[dim]
    return tuple(bounded)


def object_shape(
    cell: Sequence[int], chunk: Sequence[int], itemsize: int, object_bytes: int, shape: Sequence[int]
) -> tuple[int, ...]:
    """Sides of an object of at most `object_bytes` but at least one chunk, leading dimensions cut first."""
    unsplit = _unsplit_dims(cell, shape)
    counts = [math.ceil(max(1, n) / side) for n, side in zip(cell, chunk, strict=True)]
    whole_counts = tuple(counts)
    chunk_volume = math.prod(chunk) * itemsize
    while math.prod(counts) * chunk_volume > object_bytes and math.prod(counts) > 1:
        dim = next(dim for dim, count in enumerate(counts) if count > 1)
        counts[dim] = _halved(whole_counts[dim], counts[dim], unsplit[dim])
    return tuple(count * side for count, side in zip(counts, chunk, strict=True))


def _unsplit_dims(cell: Sequence[int], shape: Sequence[int]) -> list[bool]:
    """For each dimension, whether the array is not split along it."""
    return [side == length for side, length in zip(cell, shape, strict=True)]


def _layer_dims(shape: Sequence[int]) -> Iterator[int]:
    """The dimensions in which readers use single indices, shortest first: all except the columns (the last one) and the
    rows (the longest of the others). In [layers, experts, in, out] and [in, layers, out], `in` is the rows."""
    order = sorted(range(len(shape) - 1), key=lambda dim: (shape[dim], dim))
    yield from order[:-1]


def _row_dim(sides: Sequence[int]) -> int:
    """The first dimension along which a chunk is longer than 1, otherwise the last."""
    return next((dim for dim, side in enumerate(sides) if side > 1), len(sides) - 1)


def _halved(length: int, current: int, free: bool) -> int:
    """The next smaller side: about half of `current`, and a divisor of `length` unless the last chunk may extend
    beyond it."""
    if free:
        return math.ceil(length / (2 * math.ceil(length / current)))
    return max(d for d in divisors(length) if d == 1 or d <= current / 2)


def _at_least(length: int, least: int, free: bool) -> int:
    """The smallest side of at least `least`: a divisor of `length` unless the last chunk may extend beyond it."""
    most = MAX_PADDING_RATIO if free else 1
    return next(side for side in range(least, length + 1) if _round_up(length, side) <= most * length)


def _round_up(length: int, side: int) -> int:
    """A length rounded up to a multiple of this side."""
    return -(-length // side) * side


# Stacks ---------------------------------------------------------------------------------------------------

PACK_BELOW_BYTES = 4 << 20
"""Smaller pieces are packed through a host buffer, several rows per object. A larger piece is a separate object,
written from its place in memory. Measured on tmpfs with 8 MiB pieces: 2.1 GB/s in place, 1.2 GB/s packed."""

PIECE_BYTES = 128 << 10
"""Chunks lie within pieces of at least this size, so that most are written and read in place. Smaller pieces are
gathered into chunks, because each chunk takes a separate system call."""

MAX_PACKED_OBJECT_BYTES = 16 << 20
"""Largest object of packed rows, so that one is packed while another is written. Measured on 2,000 leaves of 64 KiB
(tmpfs, 2 cores): 0.17 s with 16 MiB or 8 MiB, 0.26 s with 64 MiB."""

TINY_BYTES = 4 << 10
"""Smaller rows share chunks, because a chunk costs 20 bytes of index and about 10 µs to decode."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A Zarr array whose rows are leaves of one shape and dtype."""

    name: str
    """Name of its folder."""

    dtype: str
    """Dtype of the leaves; `stored_dtype` is the Zarr data type."""

    shape: tuple[int, ...]
    """Shape of one leaf."""

    rows: int
    """Number of rows."""

    chunk_sides: tuple[int, ...]
    """Sides of a chunk, rows first."""

    object_sides: tuple[int, ...]
    """Sides of an object, rows first: each is a multiple of the chunk's side."""

    compression: str | None = None
    """Codec of the chunks."""

    @property
    def array_shape(self) -> tuple[int, ...]:
        return (self.rows, *self.shape)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def chunks_per_object(self) -> int:
        return math.prod(o // c for o, c in zip(self.object_sides, self.chunk_sides, strict=True))

    @property
    def chunk_stored_bytes(self) -> int:
        """Bytes of an uncompressed chunk with its checksum."""
        return math.prod(self.chunk_sides) * self.itemsize + 4

    @property
    def index_bytes(self) -> int:
        """Bytes of an object's index: the offset and length of each chunk, and a checksum."""
        return 16 * self.chunks_per_object + 4

    def objects(self) -> Iterator[tuple[tuple[int, ...], Box]]:
        """(grid index, box) of every object."""
        return grid_cells(self.array_shape, self.object_sides)


def shape_stack(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    rows: int,
    layout: Layout,
    pieces: Layout,
    object_bytes: int,
    options: Options,
) -> Stack:
    """Choose the chunk and object shapes of a stack. `layout` cuts its leaves into objects, and `pieces`, which is at
    least as fine, is their layout in memory."""
    itemsize = DTYPES[dtype].itemsize
    cell = cell_shape(layout, shape)
    cell_bytes = max(1, math.prod(cell) * itemsize)
    finest = cell_shape(pieces, shape)
    if math.prod(finest) * itemsize < PIECE_BYTES:
        finest = cell
    chunk_bytes = largest_chunk_bytes(math.prod(finest) * itemsize, options.chunk_bytes)
    chunk = chunk_shape(finest, itemsize, min(chunk_bytes, object_bytes), shape)
    if cell_bytes > object_bytes or cell_bytes >= PACK_BELOW_BYTES:
        obj = object_shape(cell, chunk, itemsize, object_bytes, shape)
        return Stack(name, dtype, shape, rows, (1, *chunk), (1, *obj), options.compression)
    # Whole cells, so that rows can be packed. A side that is not split is rounded up to a multiple of the chunk's side.
    sides = tuple(-(-max(1, n) // c) * c for n, c in zip(cell, chunk, strict=True))
    chunk_rows = 1 if cell_bytes >= TINY_BYTES else min(rows, max(1, 4 * TINY_BYTES // cell_bytes))
    max_rows = max(1, min(object_bytes, MAX_PACKED_OBJECT_BYTES) // cell_bytes)
    packed = -(-rows // -(-rows // max_rows))  # objects of about equal size
    packed = min(-(-packed // chunk_rows), -(-rows // chunk_rows)) * chunk_rows
    return Stack(name, dtype, shape, rows, (chunk_rows, *chunk), (packed, *sides), options.compression)


def indexed_objects_of(stack: Stack, box: Box) -> Iterator[tuple[tuple[int, ...], Box, Box]]:
    """(grid index, the part of `box` in the object, the object's box) for each object that `box` touches."""
    ranges = touched_cells(box, stack.object_sides)
    shifted = tuple(
        (start * side, min(stop * side, n))
        for (start, stop), side, n in zip(ranges, stack.object_sides, stack.array_shape, strict=True)
    )
    for offset, cell in grid_cells(extent(shifted), stack.object_sides):
        obj = tuple((a + s, b + s) for (a, b), (s, _) in zip(cell, shifted, strict=True))
        common = intersection(box, obj)
        if common is not None:
            yield tuple(o + start for o, (start, _) in zip(offset, ranges, strict=True)), common, obj
