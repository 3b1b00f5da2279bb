"""Property tests of the shapes of chunks and objects: how many bytes readers read, relative to what they need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt import Options
from jaxckpt._model import stacks
from jaxckpt._model.grid import Box, Layout, touched_cells, whole_box
from jaxckpt._model.stacks import (
    COLUMN_CUTS,
    MIN_CHUNK_BYTES,
    MIN_GATHERED_BYTES,
    MIN_RUN_BYTES,
    TINY_BYTES,
    shape_stack,
)

CHUNK_BYTES = stacks.SMALL_CHUNK_BYTES


def arrays(cell: Sequence[int], free: Sequence[bool]) -> tuple[int, ...]:
    """The shape of an array with this cell, split along the dimensions that are not free."""
    return tuple(n if whole else 2 * n for n, whole in zip(cell, free, strict=True))


@given(st.data())
def test_cells_consist_of_objects_and_objects_of_chunks(data: st.DataObject) -> None:
    cell = data.draw(st.lists(st.integers(0, 3000), max_size=4).map(tuple))
    free = [data.draw(st.booleans()) for _ in cell]
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    chunk_bytes = data.draw(st.integers(1, 1 << 20))
    object_bytes = data.draw(st.integers(chunk_bytes, 1 << 24))
    shape = arrays(cell, free)
    chunk = stacks.chunk_shape(cell, itemsize, chunk_bytes, shape)
    sides = stacks.object_shape(cell, chunk, itemsize, object_bytes, shape)
    for length, c, o, n in zip(cell, chunk, sides, shape, strict=True):
        assert c >= 1
        assert o % c == 0
        assert c <= max(1, length)
        assert o < length + c or length == 0
        if n != length:
            assert length % c == 0
            assert length % o == 0
    assert math.prod(chunk) * itemsize <= 16 * chunk_bytes or math.prod(chunk) == 1
    assert math.prod(sides) * itemsize <= object_bytes or sides == chunk


@given(st.integers(4, 200), st.integers(4, 200))
def test_free_sides_are_split_to_about_the_requested_size(rows: int, columns: int) -> None:
    """97 unsplit columns must not make a chunk 16 times too large."""
    chunk = stacks.chunk_shape((rows, columns), 1, 64, (rows, columns))
    assert min(rows * columns, 64) / 4 <= math.prod(chunk) <= 64


@given(st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple), st.integers(1, 1 << 12), st.data())
def test_a_cell_that_fits_is_one_object(cell: tuple[int, ...], chunk_bytes: int, data: st.DataObject) -> None:
    shape = arrays(cell, [data.draw(st.booleans()) for _ in cell])
    chunk = stacks.chunk_shape(cell, 1, chunk_bytes, shape)
    stored = [math.ceil(n / c) * c for n, c in zip(cell, chunk, strict=True)]
    assert stacks.object_shape(cell, chunk, 1, math.prod(stored), shape) == tuple(stored)


# Readers --------------------------------------------------------------------------------------------------


@st.composite
def cells(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(cell, shape, itemsize) of typical leaves of models: [layers, in, out], [in, layers, out], [layers, experts,
    in, out], [layers, in, heads, width], [in, out], [n]."""
    even = st.sampled_from([n << k for n in (1, 3, 5) for k in range(4, 13)])
    rows, columns = draw(even), draw(even)
    layers, experts = draw(st.integers(1, 15)), draw(st.sampled_from([1, 2, 4, 8]))
    cell = draw(
        st.sampled_from(
            [
                (layers, rows, columns),
                (rows, layers, columns),
                (layers, experts, rows, columns),
                (layers, rows, experts, columns),
                (rows, columns),
                (columns,),
            ]
        )
    )
    shape = tuple(n if n < 16 else n * draw(st.sampled_from([1, 4, 16])) for n in cell)
    return cell, shape, draw(st.sampled_from([1, 2, 4, 8]))


def over_read(box: Box, chunk: Sequence[int]) -> float:
    """Elements of the chunks that a box touches, per element of the box."""
    read = math.prod(
        (stop - start) * side for (start, stop), side in zip(touched_cells(box, chunk), chunk, strict=True)
    )
    return read / math.prod(stop - start for start, stop in box)


def in_one_run(cell: Sequence[int], chunk: Sequence[int]) -> bool:
    """Whether a chunk is contiguous in the memory of its cell."""
    row = next((dim for dim, side in enumerate(chunk) if side > 1), len(chunk))
    return tuple(chunk[row + 1 :]) == tuple(cell[row + 1 :])


@given(cells(), st.data())
def test_layers_are_read_without_the_others(made: Any, data: st.DataObject) -> None:
    cell, shape, itemsize = made
    chunk = stacks.chunk_shape(cell, itemsize, CHUNK_BYTES, shape)
    size = math.prod(chunk) * itemsize
    for dim in range(len(cell) - 1):
        if cell[dim] < 16 and dim != max(range(len(cell) - 1), key=lambda dim: shape[dim]):
            first = data.draw(st.integers(0, cell[dim] - 1))
            last = data.draw(st.integers(first + 1, cell[dim]))
            box = (*whole_box(cell[:dim]), (first, last), *whole_box(cell[dim + 1 :]))
            short_runs = math.prod(cell[dim + 1 :]) * itemsize < 8 * stacks.MIN_LAYER_RUN_BYTES
            assert (
                over_read(box, chunk) <= over_read(whole_box(cell), chunk)
                or size < 8 * MIN_CHUNK_BYTES
                or (dim and short_runs)
            )


@given(cells())
def test_finer_splits_read_no_more_than_the_bound(made: Any) -> None:
    """Half, a quarter and an eighth of a cell along any dimension, unless its chunks are the smallest possible."""
    cell, shape, itemsize = made
    chunk = stacks.chunk_shape(cell, itemsize, CHUNK_BYTES, shape)
    size = math.prod(chunk) * itemsize
    row = next((dim for dim, side in enumerate(chunk) if side > 1), len(chunk) - 1)
    row_bytes = math.prod(n for n, side in zip(cell[row + 1 :], chunk[row + 1 :], strict=True) if side > 1) * itemsize
    least = MIN_CHUNK_BYTES if in_one_run(cell, chunk) else MIN_GATHERED_BYTES
    padded = over_read(whole_box(cell), chunk)
    for dim, length in enumerate(cell):
        for finer in (2, 4, 8):
            if length % finer == 0 and length >= 16:
                box = (*whole_box(cell[:dim]), (0, length // finer), *whole_box(cell[dim + 1 :]))
                found = over_read(box, chunk)
                assert found <= finer * padded, "no reader reads more than the cell"
                small_layer = math.prod(cell[row:]) * itemsize < COLUMN_CUTS**2 * MIN_GATHERED_BYTES
                whole_row = dim > row and (row_bytes < COLUMN_CUTS * MIN_RUN_BYTES or small_layer)
                assert found <= 2 * padded or size < 4 * least or whole_row


@given(cells())
def test_chunks_are_contiguous_unless_rows_are_long_or_layers_are_inside(made: Any) -> None:
    cell, shape, itemsize = made
    chunk = stacks.chunk_shape(cell, itemsize, CHUNK_BYTES, shape)
    row = next((dim for dim, side in enumerate(chunk) if side > 1), len(chunk) - 1)
    row_bytes = math.prod(cell[row + 1 :]) * itemsize
    inside = any(chunk[dim] < cell[dim] < 16 for dim in range(row + 1, len(cell)))
    assert in_one_run(cell, chunk) or row_bytes >= COLUMN_CUTS * MIN_RUN_BYTES or inside
    if not in_one_run(cell, chunk):
        assert math.prod(chunk[row + 1 :]) * itemsize >= min(MIN_RUN_BYTES, stacks.MIN_LAYER_RUN_BYTES)


@given(cells())
def test_any_box_reads_at_most_one_extra_chunk_at_each_border(made: Any) -> None:
    """Splits that do not nest with the saved ones, such as 3×2 after 4×2."""
    cell, shape, itemsize = made
    chunk = stacks.chunk_shape(cell, itemsize, CHUNK_BYTES, shape)
    assert math.prod(chunk) * itemsize <= CHUNK_BYTES or max(chunk) == 1
    for dim, length in enumerate(cell):
        start, stop = length // 3, length - length // 3
        box = (*whole_box(cell[:dim]), (start, stop), *whole_box(cell[dim + 1 :]))
        most = (stop - start + 2 * (chunk[dim] - 1)) / (stop - start)
        assert over_read(box, chunk) <= most * over_read(whole_box(cell), chunk)


@given(
    st.integers(1, 12), st.lists(st.integers(1, 300), max_size=3).map(tuple), st.sampled_from(["bfloat16", "float32"])
)
def test_a_chunk_spans_leaves_only_if_they_are_tiny(rows: int, shape: tuple[int, ...], dtype: str) -> None:
    layout = Layout((1,) * len(shape), ((0,),))
    stack = shape_stack("s", dtype, shape, rows, layout, layout, 64 << 20, Options())
    leaf_bytes = math.prod(shape) * stack.itemsize
    assert stack.chunk_sides[0] == 1 or leaf_bytes < TINY_BYTES


@pytest.mark.parametrize(
    ("cell", "split", "itemsize", "chunk"),
    [
        ((2048, 1024), "yy", 4, (128, 1024)),  # rows of 4 KiB: whole
        ((512, 16384), "yn", 4, (64, 2048)),  # rows of 64 KiB: in eight
        ((512, 2048), "yn", 4, (128, 512)),  # rows of 8 KiB: in four
        ((80, 512, 3584), "nyy", 2, (1, 64, 3584)),  # [layers, in, out], FSDP × TP
        ((80, 32, 3584), "nyy", 2, (1, 16, 3584)),  # more FSDP: fewer rows than layers in the cell
        ((12, 96, 3072), "nyn", 4, (1, 12, 3072)),  # rows of 12 KiB in a layer of 1.1 MiB: whole
        ((512, 32, 2752), "yny", 2, (64, 1, 2752)),  # [in, layers, out], as MaxText scans
        ((32, 8, 4096, 1792), "nyny", 2, (1, 1, 128, 1792)),  # [layers, experts, in, out]
        ((12, 1, 768), "nyn", 4, (12, 1, 768)),  # small: whole
    ],
)
def test_typical_leaves(cell: tuple[int, ...], split: str, itemsize: int, chunk: tuple[int, ...]) -> None:
    shape = tuple(n * 16 if is_split == "y" else n for n, is_split in zip(cell, split, strict=True))
    assert stacks.chunk_shape(cell, itemsize, CHUNK_BYTES, shape) == chunk
