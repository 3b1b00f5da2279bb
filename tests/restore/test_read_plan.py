"""Property tests of the reading plan, without devices or a disk."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import chunks_of, stacks

from jaxckpt import Options
from jaxckpt._devices.shardings import PlannedSharding
from jaxckpt._model import grid as _grid
from jaxckpt._model import stacks as _stacks
from jaxckpt._model.grid import Box
from jaxckpt._model.stacks import Stack
from jaxckpt._restore import read_plan as _plan
from jaxckpt._restore.read_plan import ReadStep, Region, WantedRows
from jaxckpt._save.write_plan import ArrayLeaf, plan_save

HOST_BYTES = Options().host_bytes


# Reading --------------------------------------------------------------------------------------------------


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[Stack], list[WantedRows]]:
    """Some rows of some stacks, with several distinct boxes of each; neighbors often want the same boxes."""
    found = draw(st.lists(stacks(), min_size=1, max_size=2))
    wants: list[WantedRows] = []
    dtypes = st.sampled_from([None, None, np.dtype("int16"), np.dtype("int64")])
    for number, stack in enumerate(found):
        usual = draw(wanted_boxes(stack.shape))
        edges = sorted(draw(st.sets(st.integers(0, stack.rows), min_size=1)))
        wants += [
            WantedRows(
                number,
                rows,
                usual if draw(st.booleans()) else draw(wanted_boxes(stack.shape)),
                draw(dtypes),
                draw(st.booleans()),
            )
            for rows in itertools.pairwise(edges)
            if draw(st.booleans())
        ]
    return found, draw(st.permutations(wants))


def wanted_boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[Box, ...]]:
    return st.lists(strategies.boxes(shape), min_size=1, max_size=3, unique=True).map(tuple)


def regions_of(step: ReadStep) -> list[Region]:
    return [region for read in step.reads for region in read.regions]


def executed(stacks: Sequence[Stack], steps: Sequence[ReadStep]) -> dict[tuple[int, int, Box], Any]:
    """The content of each wanted box after the steps; each stored element's value is its index."""
    filled: dict[tuple[int, int, Box], Any] = {}
    for step in steps:
        stack = stacks[step.stack]
        stored = np.arange(math.prod(stack.array_shape)).reshape(stack.array_shape)
        for number, want in enumerate(step.wants):
            for place, box in enumerate(want.boxes):
                held = (want.rows, *box)
                buffer = np.full(_grid.extent(held), -1)
                for region in regions_of(step):
                    common = _grid.intersection(region.box, held)
                    if (number, place) in region.serves and common is not None:
                        buffer[_grid.slices_within(common, held)] = stored[tuple(slice(*side) for side in common)]
                for offset, row in enumerate(range(*want.rows)):
                    assert (step.stack, row, box) not in filled
                    filled[step.stack, row, box] = buffer[offset]
    return filled


host_sizes = st.sampled_from([1, 100, 400, 4000, 1 << 30])


@given(reads(), host_sizes)
def test_every_wanted_box_is_filled_completely(case: tuple[list[Stack], list[WantedRows]], host_bytes: int) -> None:
    stacks, wants = case
    filled = executed(stacks, _plan.plan_steps(stacks, wants, host_bytes))
    wanted = {(want.stack, row, box) for want in wants for row in range(*want.rows) for box in want.boxes}
    assert set(filled) == wanted
    for (number, row, box), found in filled.items():
        shape = stacks[number].array_shape
        stored = np.arange(math.prod(shape)).reshape(shape)[row]
        np.testing.assert_array_equal(found, stored[tuple(slice(*side) for side in box)])


@given(reads(), host_sizes)
def test_each_needed_chunk_is_read_once_and_no_other(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    read = collections.Counter(
        (step.stack, index)
        for step in _plan.plan_steps(stacks, wants, host_bytes)
        for region in regions_of(step)
        for index in chunks_of(stacks[step.stack], region.box)
    )
    wanted = {
        (want.stack, index)
        for want in wants
        for box in want.boxes
        for index in chunks_of(stacks[want.stack], (want.rows, *box))
    }
    assert set(read) == wanted
    assert set(read.values()) <= {1}


def chunk_bytes(stack: Stack, box: Box) -> int:
    return len(list(chunks_of(stack, box))) * math.prod(stack.chunk_sides) * stack.itemsize


@given(reads(), host_sizes)
def test_a_step_stays_within_its_limit_unless_it_is_one_row_of_chunks(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    steps = _plan.plan_steps(stacks, wants, host_bytes)
    wanted = sum(_grid.volume((want.rows, *box)) * 4 for want in wants for box in want.boxes)
    assert sum(step.n_bytes for step in steps) == wanted
    for step in steps:
        chunk_rows = {row // stacks[step.stack].chunk_sides[0] for want in step.wants for row in range(*want.rows)}
        assert step.n_bytes <= host_bytes // 4 or len(chunk_rows) == 1
        assert sum(read.n_bytes for read in step.reads) == step.n_bytes


@given(reads(), host_sizes)
def test_a_read_is_at_most_a_quarter_of_host_bytes_or_one_chunk(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_steps(stacks, wants, host_bytes):
        stack = stacks[step.stack]
        for read in step.reads:
            stored = sum(chunk_bytes(stack, region.box) for region in read.regions)
            chunks = [index for region in read.regions for index in chunks_of(stack, region.box)]
            assert stored <= host_bytes // 4 or len(chunks) == 1
            assert read.held_bytes >= stored


@given(reads(), host_sizes)
def test_divided_steps_are_read_object_by_object(case: tuple[list[Stack], list[WantedRows]], host_bytes: int) -> None:
    stacks, wants = case
    for step in _plan.plan_steps(stacks, wants, host_bytes):
        if len(step.reads) == 1:
            continue
        objects = [
            [index for index, _, _ in _stacks.indexed_objects_of(stacks[step.stack], region.box)]
            for region in regions_of(step)
        ]
        assert all(len(found) == 1 for found in objects)
        assert objects == sorted(objects)


@given(reads(), host_sizes)
def test_leaves_on_devices_have_no_buffer_larger_than_a_read(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_steps(stacks, wants, host_bytes):
        held = 0
        for want in step.wants:
            row = sum(map(_grid.volume, want.boxes)) * (4 if want.dtype is None else want.dtype.itemsize)
            assert want.streamed == (not want.keeps_buffers and row > max(1, host_bytes // 4))
            held += 0 if want.keeps_buffers or want.streamed else row * (want.rows[1] - want.rows[0])
        assert step.held_bytes == held


def test_equal_rows_share_a_buffer_and_a_request() -> None:
    stack = Stack("s", "float32", (8,), 6, (2, 8), (6, 8))
    (step,) = _plan.plan_steps([stack], [WantedRows(0, (row, row + 1), (((0, 8),),)) for row in range(6)], HOST_BYTES)
    assert [want.rows for want in step.wants] == [(0, 6)]
    (read,) = step.reads
    assert [(region.box, region.is_separate(shares_chunks=False)) for region in read.regions] == [
        (((0, 6), (0, 8)), False)
    ]
    assert (read.n_bytes, read.held_bytes, step.held_bytes) == (192, 192, 0)


@given(reads(), host_sizes)
def test_a_region_of_one_buffer_is_read_into_it_and_others_are_staged(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_steps(stacks, wants, host_bytes):
        for read in step.reads:
            staged = 0
            for region in read.regions:
                served = [step.wants[number] for number, _ in region.serves]
                assert region.is_separate(shares_chunks=False) == (
                    len(region.serves) > 1 or any(want.dtype is not None or want.streamed for want in served)
                )
                if region.is_separate(shares_chunks=False):
                    staged += _grid.volume(region.box) * 4
                else:
                    ((_, box),) = region.serves
                    assert _grid.contains(served[0].buffer_box(box), region.box)
            stored = sum(chunk_bytes(stacks[step.stack], region.box) for region in read.regions)
            cast = any(want.streamed and want.dtype is not None for want in step.wants)
            assert read.held_bytes == stored + staged or (cast and read.held_bytes > stored + staged)


def test_a_large_leaf_in_another_layout_is_read_in_whole_objects() -> None:
    """From rows to columns: each object is one request, regardless of the boxes that it covers."""
    stack = Stack("s", "float32", (4096, 4096), 1, (1, 256, 256), (1, 512, 4096))
    columns = tuple(((0, 4096), (512 * i, 512 * (i + 1))) for i in range(8))
    (step,) = _plan.plan_steps([stack], [WantedRows(0, (0, 1), columns)], 32 << 20)
    assert [len(read.regions) for read in step.reads] == [8] * 8
    for number, read in enumerate(step.reads):
        assert _grid.hull(region.box for region in read.regions) == (
            (0, 1),
            (512 * number, 512 * (number + 1)),
            (0, 4096),
        )
        assert read.held_bytes == read.n_bytes == 8 << 20


# Costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [Options(), Options(chunk_bytes=256, object_bytes=4096)])
@pytest.mark.parametrize("shape", [(8192, 2048), (4096, 1024), (64, 32), (512,)])
def test_an_aligned_read_costs_its_data_checksums_and_indexes(shape: tuple[int, ...], options: Options) -> None:
    axes, spec = {"a": 8}, (("a",),)
    layout = PlannedSharding((("a", 8),), spec, 1).layout(shape)
    plan = plan_save([ArrayLeaf(n, "float32", shape, layout) for n in range(3)], options, 0, 8)
    (stack,) = plan.stacks
    cost = _plan.ReadCost()
    for box in _grid.spec_boxes(axes, spec, shape):  # the boxes that the writers wrote
        steps = _plan.plan_steps(plan.stacks, [WantedRows(0, (row, row + 1), (box,)) for row in range(3)], HOST_BYTES)
        cost += _plan.read_cost(plan.stacks, steps, HOST_BYTES)
    needed = 3 * math.prod(shape) * 4
    chunks = sum(len(list(chunks_of(stack, obj))) for _, obj in stack.objects())
    assert cost.needed_bytes == needed
    assert cost.read_bytes == needed + 4 * chunks + stack.index_bytes * plan.n_objects
    assert cost.requests == plan.n_objects, "each object is read whole, in one request"


@given(reads(), host_sizes)
def test_a_cost_counts_each_chunk_and_the_index_of_each_object(
    case: tuple[list[Stack], list[WantedRows]], host_bytes: int
) -> None:
    stacks, wants = case
    steps = _plan.plan_steps(stacks, wants, host_bytes)
    cost = _plan.read_cost(stacks, steps, host_bytes)
    read = requests = 0
    for step in steps:
        stack = stacks[step.stack]
        for boxes, (_, obj) in itertools.product((found.boxes for found in step.reads), stack.objects()):
            parts = list(filter(None, (_grid.intersection(box, obj) for box in boxes)))
            if parts:
                chunks = sum(len(list(chunks_of(stack, part))) for part in parts)
                read += chunks * stack.chunk_stored_bytes + stack.index_bytes
                requests += 1 if sum(map(_grid.volume, parts)) == _grid.volume(obj) else 1 + chunks
    assert (cost.read_bytes, cost.requests) == (read, requests)
    assert cost.needed_bytes == sum(_grid.volume((want.rows, *box)) * 4 for want in wants for box in want.boxes)
    most = max((step.held_bytes + read.held_bytes for step in steps for read in step.reads), default=0)
    together = sum(step.held_bytes + sum(read.held_bytes for read in step.reads) for step in steps)
    assert most <= cost.peak_host_bytes <= together
    assert cost.peak_host_bytes <= max(most, host_bytes)


@given(stacks(), st.data())
def test_objects_of_a_box_are_those_that_it_intersects(stack: Stack, data: st.DataObject) -> None:
    box = data.draw(strategies.boxes(stack.array_shape))
    expected = [
        (index, part, obj) for index, obj in stack.objects() if (part := _grid.intersection(box, obj)) is not None
    ]
    assert list(_stacks.indexed_objects_of(stack, box)) == expected


def test_an_empty_request_reads_nothing() -> None:
    stack = Stack("s", "float32", (0, 3), 2, (1, 1, 3), (2, 1, 3))
    assert (
        _plan.plan_steps([stack], [WantedRows(0, (0, 1), (((0, 0), (0, 3)),)), WantedRows(0, (1, 2), ())], HOST_BYTES)
        == []
    )
