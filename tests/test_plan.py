"""Who writes and who reads which box, by properties: nothing here touches a device or a disk."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt import Options, _grid, _plan
from jaxckpt._grid import Box, Layout, Spec
from jaxckpt._plan import ArrayLeaf, ReadStep, Stack, Want
from jaxckpt._tree import DTYPES

OPTIONS = [
    Options(),
    Options(chunk_bytes=16, object_bytes=64),
    Options(chunk_bytes=7, object_bytes=1000),
    Options(chunk_bytes=256, object_bytes=256, compression="zstd"),
]
options = st.sampled_from(OPTIONS)
HOST_BYTES = Options().host_bytes


# Saving ---------------------------------------------------------------------------------------------------


@given(strategies.array_leaves(), options)
def test_every_element_of_every_leaf_is_in_exactly_one_object(leaves: list[ArrayLeaf], options: Options) -> None:
    plan = _plan.plan_save(leaves, options)
    placed = sorted(leaf for members in plan.members for leaf in members)
    assert placed == [leaf.number for leaf in leaves]
    for number, (stack, members) in enumerate(zip(plan.stacks, plan.members, strict=True)):
        assert stack.rows == len(members)
        assert {(leaves[leaf].dtype, leaves[leaf].shape) for leaf in members} == {(stack.dtype, stack.shape)}
        objects = [obj for obj in plan.objects if obj.stack == number]
        assert (strategies.paint(stack.array_shape, [obj.box for obj in objects]) == 1).all()
        for obj in objects:
            assert obj.index == tuple(start // side for (start, _), side in zip(obj.box, stack.object, strict=True)), (
                "it lies where Zarr looks for it"
            )
            assert obj.n_bytes == _grid.volume(obj.box) * DTYPES[stack.dtype].itemsize
    assert sum(plan.process_bytes().values()) == sum(
        math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize for leaf in leaves
    )


@given(strategies.array_leaves(), options)
def test_who_writes_an_object_holds_all_of_it(leaves: list[ArrayLeaf], options: Options) -> None:
    plan = _plan.plan_save(leaves, options)
    for obj in plan.objects:
        shape = plan.stacks[obj.stack].shape
        for layout in {leaves[leaf].layout for leaf in plan.members[obj.stack][slice(*obj.box[0])]}:
            cells = _grid.grid_cells(shape, _grid.cell_shape(layout, shape))
            for (_, cell), holders in zip(cells, layout.holders, strict=True):
                assert _grid.intersection(cell, obj.box[1:]) is None or obj.process in holders


@given(strategies.array_leaves(), options)
def test_chunks_tile_objects_and_no_stack_is_named_twice(leaves: list[ArrayLeaf], options: Options) -> None:
    plan = _plan.plan_save(leaves, options)
    assert len({stack.name for stack in plan.stacks}) == len(plan.stacks)
    for stack in plan.stacks:
        assert all(c >= 1 and o % c == 0 for o, c in zip(stack.object, stack.chunk, strict=True))
        assert stack.chunks_per_object == math.prod(stack.object) // math.prod(stack.chunk)
        assert stack.compression == options.compression


@given(strategies.array_leaves(), options)
def test_every_process_makes_the_same_plan(leaves: list[ArrayLeaf], options: Options) -> None:
    again = [
        ArrayLeaf(leaf.number, leaf.dtype, leaf.shape, Layout(leaf.layout.grid, leaf.layout.holders)) for leaf in leaves
    ]
    assert _plan.plan_save(again, options) == _plan.plan_save(leaves, options)


def test_leaves_of_no_elements_have_a_row_and_no_object() -> None:
    leaves = [ArrayLeaf(n, "float32", (0, 3), Layout((1, 1), ((0,),))) for n in range(2)]
    plan = _plan.plan_save(leaves, Options())
    assert plan.members == ((0, 1),)
    assert plan.objects == ()


def test_leaves_that_are_exchanged_are_kept_apart_from_those_that_are_not() -> None:
    layout = Layout((1,), ((0, 1),))
    leaves = [ArrayLeaf(n, "float32", (8,), layout, moved=n % 2 == 1) for n in range(6)]
    plan = _plan.plan_save(leaves, Options())
    assert plan.members == ((0, 2, 4), (1, 3, 5))
    assert plan.moved == (False, True)


# A transformer's training state over many processes -------------------------------------------------------

WIDTH, VOCABULARY, LAYERS = 3360, 50400, 12
MODEL: dict[str, tuple[tuple[int, ...], Spec]] = {
    "embedding": ((VOCABULARY, WIDTH), (("model",), ("data",))),
    "qkv": ((WIDTH, 3 * WIDTH), (("data",), ("model",))),
    "out": ((WIDTH, WIDTH), (("model",), ("data",))),
    "up": ((WIDTH, 4 * WIDTH), ((), ("model",))),  # a replica for each place along "data"
    "down": ((4 * WIDTH, WIDTH), (("model",), ())),
    "scale": ((WIDTH,), ()),  # whole on every device
    "bias": ((4 * WIDTH,), (("model",),)),
}


def laid_out(shape: tuple[int, ...], axes: dict[str, int], spec: Spec, devices_per_process: int) -> Layout:
    boxes = _grid.spec_boxes(axes, spec, shape)
    return _grid.layout_of(((box, device // devices_per_process) for device, box in enumerate(boxes)), shape)


def training_state(processes: int, devices_per_process: int, model: int) -> list[ArrayLeaf]:
    """Parameters in bfloat16 and two moments in float32, on a mesh data × model; a step counter of process 0's."""
    axes = {"data": processes * devices_per_process // model, "model": model}
    leaves: list[ArrayLeaf] = []
    for name, (shape, spec) in MODEL.items():
        layout = laid_out(shape, axes, spec, devices_per_process)
        for dtype in ("bfloat16", "float32", "float32"):
            for _ in range(1 if name == "embedding" else LAYERS):
                leaves.append(ArrayLeaf(len(leaves), dtype, shape, layout))
    leaves.append(ArrayLeaf(len(leaves), "int32", (), Layout((), ((0,),))))
    return leaves


@pytest.mark.parametrize("model", [1, 2, 4])
@pytest.mark.parametrize("processes", range(2, 9))
def test_the_busiest_process_writes_at_most_a_twentieth_more_than_the_mean(processes: int, model: int) -> None:
    plan = _plan.plan_save(training_state(processes, 4, model), Options())
    loads = plan.process_bytes()
    assert set(loads) == set(range(processes))
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / processes


@pytest.mark.parametrize("processes", range(2, 9))
def test_replicas_alone_are_shared_evenly(processes: int) -> None:
    """Data parallelism: every process holds everything, and each writes its part."""
    everyone = tuple(range(processes))
    shapes = [shape for shape, _ in MODEL.values()] + [(WIDTH,)] * 50
    leaves = [ArrayLeaf(n, "float32", shape, Layout((1,) * len(shape), (everyone,))) for n, shape in enumerate(shapes)]
    loads = _plan.plan_save(leaves, Options()).process_bytes()
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / processes


def test_a_training_state_is_a_few_stacks_and_objects_of_the_size_asked() -> None:
    plan = _plan.plan_save(training_state(4, 4, 2), Options())
    assert len(plan.stacks) == 2 * len(MODEL) + 1
    assert max(obj.n_bytes for obj in plan.objects) <= Options().object_bytes
    assert sum(plan.process_bytes().values()) / len(plan.objects) > 8 << 20


@pytest.mark.parametrize("shape", [(64, 64), (8,), ()])
def test_small_leaves_are_packed_many_to_an_object(shape: tuple[int, ...]) -> None:
    leaves = [ArrayLeaf(n, "float32", shape, Layout((1,) * len(shape), ((0,),))) for n in range(2000)]
    plan = _plan.plan_save(leaves, Options())
    total = 2000 * math.prod(shape) * 4
    assert len(plan.stacks) == 1
    assert len(plan.objects) == math.ceil(total / _plan.PACKED_BYTES)
    assert math.prod(plan.stacks[0].chunk) * 4 <= max(4 * _plan.TINY_BYTES, math.prod(shape) * 4)


def test_how_devices_of_one_process_split_small_leaves_does_not_show_on_disk() -> None:
    axes = {"data": 4, "model": 8}
    layout = laid_out((64, 64), axes, (("model",), ("data",)), 16)
    plan = _plan.plan_save([ArrayLeaf(n, "float32", (64, 64), layout) for n in range(100)], Options())
    assert [obj.box for obj in plan.objects] == [((0, 100), (0, 64), (0, 32)), ((0, 100), (0, 64), (32, 64))]
    assert [obj.process for obj in plan.objects] == [0, 1]


def test_large_pieces_are_objects_of_their_own_so_that_they_are_written_from_where_they_lie() -> None:
    layout = laid_out((8192, 1024), {"data": 8}, (("data",),), 8)
    plan = _plan.plan_save([ArrayLeaf(n, "float32", (8192, 1024), layout) for n in range(2)], Options())
    pieces = [((row, row + 1), (1024 * i, 1024 * (i + 1)), (0, 1024)) for row in range(2) for i in range(8)]
    assert [obj.box for obj in plan.objects] == pieces


# Reading --------------------------------------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Any stack that a save could have made, and some that only another writer would."""
    shape = draw(strategies.sides(2, 12))
    rows = draw(st.integers(1, 9))
    chunk = tuple(draw(st.integers(1, n)) for n in (rows, *shape))
    sides = tuple(c * draw(st.integers(1, 3)) for c in chunk)
    return Stack("s", "int32", shape, rows, chunk, sides)


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[Stack], list[Want]]:
    """Some rows of some stacks, several distinct boxes of each; neighbours often want the same."""
    found = draw(st.lists(stacks(), min_size=1, max_size=2))
    wants: list[Want] = []
    dtypes = st.sampled_from([None, None, np.dtype("int16"), np.dtype("int64")])
    for number, stack in enumerate(found):
        usual = draw(wanted_boxes(stack.shape))
        wants += [
            Want(
                number,
                row,
                usual if draw(st.booleans()) else draw(wanted_boxes(stack.shape)),
                draw(dtypes),
                draw(st.booleans()),
            )
            for row in draw(st.sets(st.integers(0, stack.rows - 1)))
        ]
    return found, draw(st.permutations(wants))


def wanted_boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[Box, ...]]:
    return st.lists(strategies.boxes(shape), min_size=1, max_size=3, unique=True).map(tuple)


def chunks_of(stack: Stack, box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(*side) for side in _grid.touched(box, stack.chunk)))


def carried_out(stacks: Sequence[Stack], steps: Sequence[ReadStep]) -> dict[tuple[int, int, Box], Any]:
    """What each wanted box is filled with by the steps; element i of row r of a stack is its own number."""
    filled: dict[tuple[int, int, Box], Any] = {}
    for step in steps:
        stack = stacks[step.stack]
        stored = np.arange(math.prod(stack.array_shape)).reshape(stack.array_shape)
        for number, run in enumerate(step.runs):
            for place, box in enumerate(run.boxes):
                held = (run.rows, *box)
                buffer = np.full(_grid.extent(held), -1)
                for region in step.regions:
                    common = _grid.intersection(region.box, held)
                    if (number, place) in region.serves and common is not None:
                        buffer[_grid.within(common, held)] = stored[tuple(slice(*side) for side in common)]
                for offset, row in enumerate(range(*run.rows)):
                    assert (step.stack, row, box) not in filled
                    filled[step.stack, row, box] = buffer[offset]
    return filled


host_sizes = st.sampled_from([1, 100, 400, 4000, 1 << 30])


@given(reads(), host_sizes)
def test_every_wanted_box_is_served_whole(case: tuple[list[Stack], list[Want]], host_bytes: int) -> None:
    stacks, wants = case
    filled = carried_out(stacks, _plan.plan_read(stacks, wants, host_bytes))
    assert set(filled) == {(want.stack, want.row, box) for want in wants for box in want.boxes}
    for (number, row, box), found in filled.items():
        shape = stacks[number].array_shape
        stored = np.arange(math.prod(shape)).reshape(shape)[row]
        np.testing.assert_array_equal(found, stored[tuple(slice(*side) for side in box)])


@given(reads(), host_sizes)
def test_no_chunk_is_read_twice_nor_one_that_nobody_wants(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    read = collections.Counter(
        (step.stack, index)
        for step in _plan.plan_read(stacks, wants, host_bytes)
        for region in step.regions
        for index in chunks_of(stacks[step.stack], region.box)
    )
    wanted = {
        (want.stack, index)
        for want in wants
        for box in want.boxes
        for index in chunks_of(stacks[want.stack], ((want.row, want.row + 1), *box))
    }
    assert set(read) == wanted
    assert set(read.values()) <= {1}


def chunk_bytes(stack: Stack, box: Box) -> int:
    return len(list(chunks_of(stack, box))) * math.prod(stack.chunk) * stack.itemsize


@given(reads(), host_sizes)
def test_a_step_is_no_larger_than_asked_unless_one_row_of_chunks_is(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    steps = _plan.plan_read(stacks, wants, host_bytes)
    assert sum(step.n_bytes for step in steps) == sum(_grid.volume(box) * 4 for want in wants for box in want.boxes)
    for step in steps:
        chunk_rows = {row // stacks[step.stack].chunk[0] for run in step.runs for row in range(*run.rows)}
        assert step.n_bytes <= host_bytes // 4 or len(chunk_rows) == 1
        assert sum(read.n_bytes for read in step.reads) == step.n_bytes


@given(reads(), host_sizes)
def test_a_read_is_of_a_quarter_of_the_bytes_that_may_be_held_unless_one_chunk_is_more(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_read(stacks, wants, host_bytes):
        stack = stacks[step.stack]
        for read in step.reads:
            stored = sum(chunk_bytes(stack, region.box) for region in read.regions)
            chunks = [index for region in read.regions for index in chunks_of(stack, region.box)]
            assert stored <= host_bytes // 4 or len(chunks) == 1
            assert read.held_bytes >= stored


@given(reads(), host_sizes)
def test_what_is_parted_is_read_object_by_object(case: tuple[list[Stack], list[Want]], host_bytes: int) -> None:
    stacks, wants = case
    for step in _plan.plan_read(stacks, wants, host_bytes):
        if len(step.reads) == 1:
            continue
        objects = [
            [index for index, _, _ in _plan.indexed_objects_of(stacks[step.stack], region.box)]
            for region in step.regions
        ]
        assert all(len(found) == 1 for found in objects)
        assert objects == sorted(objects)


@given(reads(), host_sizes)
def test_what_goes_to_devices_has_no_buffer_larger_than_a_read(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_read(stacks, wants, host_bytes):
        held = 0
        for run in step.runs:
            row = sum(map(_grid.volume, run.boxes)) * (4 if run.dtype is None else run.dtype.itemsize)
            assert run.streamed == (not run.kept and row > max(1, host_bytes // 4))
            held += 0 if run.kept or run.streamed else row * (run.rows[1] - run.rows[0])
        assert step.held_bytes == held


def test_rows_that_want_the_same_share_a_buffer_and_a_request() -> None:
    stack = Stack("s", "float32", (8,), 6, (2, 8), (6, 8))
    (step,) = _plan.plan_read([stack], [Want(0, row, (((0, 8),),)) for row in range(6)], HOST_BYTES)
    assert [run.rows for run in step.runs] == [(0, 6)]
    (read,) = step.reads
    assert [(region.box, region.staged) for region in read.regions] == [(((0, 6), (0, 8)), False)]
    assert (read.n_bytes, read.held_bytes, step.held_bytes) == (192, 192, 0)


@given(reads(), host_sizes)
def test_what_serves_one_buffer_is_read_into_it_and_all_else_is_staged(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    for step in _plan.plan_read(stacks, wants, host_bytes):
        for read in step.reads:
            staged = 0
            for region in read.regions:
                runs = [step.runs[run] for run, _ in region.serves]
                assert region.staged == (
                    len(region.serves) > 1 or any(run.dtype is not None or run.streamed for run in runs)
                )
                if region.staged:
                    staged += _grid.volume(region.box) * 4
                else:
                    ((_, box),) = region.serves
                    assert _grid.contains(runs[0].held(box), region.box)
            stored = sum(chunk_bytes(stacks[step.stack], region.box) for region in read.regions)
            cast = any(run.streamed and run.dtype is not None for run in step.runs)
            assert read.held_bytes == stored + staged or (cast and read.held_bytes > stored + staged)


def test_a_large_leaf_in_other_boxes_is_read_by_whole_objects() -> None:
    """Rows to columns: each object is one request, whatever the boxes that it is in."""
    stack = Stack("s", "float32", (4096, 4096), 1, (1, 256, 256), (1, 512, 4096))
    columns = tuple(((0, 4096), (512 * i, 512 * (i + 1))) for i in range(8))
    (step,) = _plan.plan_read([stack], [Want(0, 0, columns)], 32 << 20)
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
def test_an_aligned_read_costs_what_it_needs_with_checksums_and_indexes(
    shape: tuple[int, ...], options: Options
) -> None:
    axes, spec = {"a": 8}, (("a",),)
    layout = laid_out(shape, axes, spec, 1)
    plan = _plan.plan_save([ArrayLeaf(n, "float32", shape, layout) for n in range(3)], options)
    (stack,) = plan.stacks
    cost = _plan.ReadCost()
    for box in _grid.spec_boxes(axes, spec, shape):  # what the process that wrote it reads again
        steps = _plan.plan_read(plan.stacks, [Want(0, row, (box,)) for row in range(3)], HOST_BYTES)
        cost += _plan.read_cost(plan.stacks, steps, HOST_BYTES)
    needed = 3 * math.prod(shape) * 4
    chunks = sum(len(list(chunks_of(stack, obj.box))) for obj in plan.objects)
    assert cost.needed_bytes == needed
    assert cost.read_bytes == needed + 4 * chunks + stack.index_bytes * len(plan.objects)
    assert cost.requests == len(plan.objects), "each object is read whole, in one request"


@given(reads(), host_sizes)
def test_a_cost_counts_each_chunk_and_the_index_of_each_object(
    case: tuple[list[Stack], list[Want]], host_bytes: int
) -> None:
    stacks, wants = case
    steps = _plan.plan_read(stacks, wants, host_bytes)
    cost = _plan.read_cost(stacks, steps, host_bytes)
    read = requests = 0
    for step in steps:
        stack = stacks[step.stack]
        for region in step.regions:
            for _, obj in stack.objects():
                part = _grid.intersection(region.box, obj)
                if part is not None:
                    chunks = len(list(chunks_of(stack, part)))
                    read += chunks * stack.chunk_stored_bytes + stack.index_bytes
                    requests += 1 if part == obj else 1 + chunks
    assert (cost.read_bytes, cost.requests) == (read, requests)
    assert cost.needed_bytes == sum(_grid.volume(box) * 4 for want in wants for box in want.boxes)
    most = max((step.held_bytes + read.held_bytes for step in steps for read in step.reads), default=0)
    together = sum(step.held_bytes + sum(read.held_bytes for read in step.reads) for step in steps)
    assert most <= cost.peak_host_bytes <= together
    assert cost.peak_host_bytes <= max(most, host_bytes)


@given(stacks(), st.data())
def test_objects_of_a_box_are_those_that_it_meets(stack: Stack, data: st.DataObject) -> None:
    box = data.draw(strategies.boxes(stack.array_shape))
    expected = [
        (index, part, obj) for index, obj in stack.objects() if (part := _grid.intersection(box, obj)) is not None
    ]
    assert list(_plan.indexed_objects_of(stack, box)) == expected


def test_nothing_wanted_is_nothing_read() -> None:
    stack = Stack("s", "float32", (0, 3), 2, (1, 1, 3), (2, 1, 3))
    assert _plan.plan_read([stack], [Want(0, 0, (((0, 0), (0, 3)),)), Want(0, 1, ())], HOST_BYTES) == []
