"""Property tests of which process writes which object, without devices or a disk."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt import Options
from jaxckpt._devices.shardings import PlannedSharding
from jaxckpt._model import grid as _grid
from jaxckpt._model import stacks as _plan
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, Spec
from jaxckpt._save import write_plan as _save_plan
from jaxckpt._save.write_plan import ArrayLeaf, Object, SavePlan, plan_save

OPTIONS = [
    Options(),
    Options(chunk_bytes=16, object_bytes=64),
    Options(chunk_bytes=7, object_bytes=1000),
    Options(chunk_bytes=256, object_bytes=256, compression="zstd"),
    Options(chunk_bytes=256, object_bytes=256, compression="blosc"),
]
options = st.sampled_from(OPTIONS)


def plan_all(
    leaves: Sequence[ArrayLeaf], options: Options, processes: int
) -> tuple[SavePlan, list[tuple[int, Object]]]:
    """The part of the plan that all processes share, and (process, object) for all objects."""
    plans = [plan_save(leaves, options, process, processes) for process in range(processes)]
    for plan in plans:
        assert shared(plan) == shared(plans[0]), "all processes make the same plan"
    found = [(process, obj) for process, plan in enumerate(plans) for obj in plan.objects]
    return plans[0], sorted(found, key=lambda one: (one[1].stack, one[1].index))


def shared(plan: SavePlan) -> tuple[object, ...]:
    return plan.stacks, plan.leaves, plan.exchanged, plan.layouts, plan.process_bytes, plan.n_objects


# Each byte once -------------------------------------------------------------------------------------------


def check_cover(leaves: Sequence[ArrayLeaf], options: Options, processes: int) -> None:
    """Check that every element of every leaf is in one object, written by one process that holds it completely."""
    plan, found = plan_all(leaves, options, processes)
    placed = sorted(leaf for members in plan.leaves for leaf in members)
    assert placed == [leaf.number for leaf in leaves]
    for number, (stack, members) in enumerate(zip(plan.stacks, plan.leaves, strict=True)):
        assert stack.rows == len(members)
        assert {(leaves[leaf].dtype, leaves[leaf].shape) for leaf in members} == {(stack.dtype, stack.shape)}
        of_stack = [(process, obj) for process, obj in found if obj.stack == number]
        assert [(obj.index, obj.box) for _, obj in of_stack] == list(stack.objects()), "each once, at Zarr's index"
        assert (strategies.paint(stack.array_shape, [obj.box for _, obj in of_stack]) == 1).all()
        (layout,) = {leaves[leaf].layout for leaf in members}
        cells = [cell for _, cell in _grid.grid_cells(stack.shape, _grid.cell_shape(layout, stack.shape))]
        for process, obj in of_stack:
            assert obj.n_bytes == _grid.volume(obj.box) * DTYPES[stack.dtype].itemsize
            for cell, holders in zip(cells, layout.holders, strict=True):
                assert _grid.intersection(cell, obj.box[1:]) is None or process in holders
    assert plan.n_objects == len(found)
    for process, n_bytes in enumerate(plan.process_bytes):
        assert n_bytes == sum(obj.n_bytes for writer, obj in found if writer == process)
    assert sum(plan.process_bytes) == sum(math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize for leaf in leaves)


@pytest.mark.slow
@given(strategies.array_leaves(), options)
def test_every_element_is_written_once_by_a_holder(leaves: list[ArrayLeaf], options: Options) -> None:
    check_cover(leaves, options, 4)


@st.composite
def meshes_of_leaves(draw: st.DrawFn) -> tuple[list[ArrayLeaf], int]:
    """Leaves on one mesh, whose axes need not consist of whole processes, and the number of processes."""
    axes = tuple(zip("abc", draw(st.permutations([2, 3, draw(st.sampled_from([1, 2, 4]))])), strict=True))
    devices = math.prod(size for _, size in axes)
    devices_per_process = draw(st.integers(1, devices))
    leaves: list[ArrayLeaf] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([1, 6, 8, 12, 13, 24]), max_size=3).map(tuple))
        spec = draw(strategies.mesh_specs(dict(axes), shape))
        layout = PlannedSharding(axes, spec, devices_per_process).layout(shape)
        for _ in range(draw(st.integers(1, 5))):
            leaves.append(ArrayLeaf(len(leaves), "float32", shape, layout))
    return leaves, -(-devices // devices_per_process)


@given(meshes_of_leaves(), options, st.sampled_from([1, 64, 32 << 10]))
def test_every_element_on_an_unusual_mesh_is_written_once_by_a_holder(
    case: tuple[list[ArrayLeaf], int], options: Options, shared_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_save_plan, "SHARED_BYTES", shared_bytes)
        patch.setattr(_save_plan, "PACK_BELOW_BYTES", shared_bytes)
        patch.setattr(_plan, "PACK_BELOW_BYTES", shared_bytes)
        check_cover(case[0], options, case[1])


@given(strategies.array_leaves(), options)
def test_chunks_tile_objects_and_names_of_stacks_are_unique(leaves: list[ArrayLeaf], options: Options) -> None:
    plan = plan_save(leaves, options, 0, 4)
    assert len({stack.name for stack in plan.stacks}) == len(plan.stacks)
    for stack in plan.stacks:
        assert all(c >= 1 and o % c == 0 for o, c in zip(stack.object_sides, stack.chunk_sides, strict=True))
        assert stack.chunks_per_object == math.prod(stack.object_sides) // math.prod(stack.chunk_sides)
        assert stack.compression == options.compression


@given(strategies.array_leaves(), options)
def test_equal_layouts_make_equal_plans(leaves: list[ArrayLeaf], options: Options) -> None:
    again = [
        ArrayLeaf(leaf.number, leaf.dtype, leaf.shape, Layout(leaf.layout.grid, leaf.layout.holders)) for leaf in leaves
    ]
    assert plan_save(again, options, 1, 4) == plan_save(leaves, options, 1, 4)


def test_leaves_without_elements_have_a_row_and_no_object() -> None:
    leaves = [ArrayLeaf(n, "float32", (0, 3), Layout((1, 1), ((0,),))) for n in range(2)]
    plan = plan_save(leaves, Options(), 0, 1)
    assert plan.leaves == ((0, 1),)
    assert (plan.objects, plan.n_objects, plan.process_bytes) == ((), 0, (0,))


def test_exchanged_leaves_have_separate_stacks() -> None:
    layout = Layout((1,), ((0, 1),))
    leaves = [ArrayLeaf(n, "float32", (8,), layout, is_exchanged=n % 2 == 1) for n in range(6)]
    plan = plan_save(leaves, Options(), 0, 2)
    assert plan.leaves == ((0, 2, 4), (1, 3, 5))
    assert plan.exchanged == (False, True)


# Even shares ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 200), st.integers(1, 20))
def test_equal_objects_are_assigned_to_the_process_with_the_least_load(loads: list[int], count: int, size: int) -> None:
    (shares,) = _save_plan._water_fill(np.array([loads]), count, size).tolist()
    one_by_one = list(loads)
    for _ in range(count):
        lowest = min(range(len(loads)), key=lambda column: (one_by_one[column], column))
        one_by_one[lowest] += size
    assert sum(shares) == count
    assert min(shares) >= 0
    dealt = [load + size * share for load, share in zip(loads, shares, strict=True)]
    assert max(dealt) == max(one_by_one)


WIDTH, VOCABULARY, LAYERS = 3360, 50400, 12
MODEL: dict[str, tuple[tuple[int, ...], Spec]] = {
    "embedding": ((VOCABULARY, WIDTH), (("model",), ("data",))),
    "qkv": ((WIDTH, 3 * WIDTH), (("data",), ("model",))),
    "out": ((WIDTH, WIDTH), (("model",), ("data",))),
    "up": ((WIDTH, 4 * WIDTH), ((), ("model",))),  # one replica for each index along "data"
    "down": ((4 * WIDTH, WIDTH), (("model",), ())),
    "scale": ((WIDTH,), ()),  # replicated on every device
    "bias": ((4 * WIDTH,), (("model",),)),
}


def training_state(processes: int, devices_per_process: int, model: int) -> list[ArrayLeaf]:
    """Parameters in bfloat16, two moments in float32, on a mesh data × model; and a step counter of process 0."""
    axes = (("data", processes * devices_per_process // model), ("model", model))
    leaves: list[ArrayLeaf] = []
    for name, (shape, spec) in MODEL.items():
        layout = PlannedSharding(axes, spec, devices_per_process).layout(shape)
        for dtype in ("bfloat16", "float32", "float32"):
            for _ in range(1 if name == "embedding" else LAYERS):
                leaves.append(ArrayLeaf(len(leaves), dtype, shape, layout))
    leaves.append(ArrayLeaf(len(leaves), "int32", (), Layout((), ((0,),))))
    return leaves


def assert_even(plan: SavePlan) -> None:
    """Check that the busiest process writes at most a twentieth more than the mean."""
    loads = plan.process_bytes
    assert min(loads) > 0
    assert max(loads) <= 1.05 * sum(loads) / len(loads)


@pytest.mark.parametrize("model", [1, 2, 4])
@pytest.mark.parametrize("processes", range(2, 9))
def test_a_training_state_is_shared_evenly(processes: int, model: int) -> None:
    assert_even(plan_save(training_state(processes, 4, model), Options(), 0, processes))


def replicated_state(processes: int) -> SavePlan:
    """Data parallelism: every process holds everything, and each writes its share."""
    everyone = tuple(range(processes))
    shapes = [shape for shape, _ in MODEL.values()] + [(WIDTH,)] * 50
    leaves = [ArrayLeaf(n, "float32", shape, Layout((1,) * len(shape), (everyone,))) for n, shape in enumerate(shapes)]
    return plan_save(leaves, Options(), 0, processes)


@pytest.mark.parametrize("processes", [*range(2, 9), 64])
def test_replicated_state_is_shared_evenly(processes: int) -> None:
    assert_even(replicated_state(processes))


@pytest.mark.parametrize(("count", "processes", "objects"), [(1, 4, 4), (1, 2, 2), (16, 4, 16), (1, 3, 128)])
def test_replicated_leaves_are_split_into_few_even_objects(count: int, processes: int, objects: int) -> None:
    """Leaves of 64 MiB: each of four processes writes 16 MiB of each leaf, not 64 objects of 256 KiB."""
    everyone = Layout((1, 1), (tuple(range(processes)),))
    plan, found = plan_all(
        [ArrayLeaf(n, "float32", (4096, 4096), everyone) for n in range(count)], Options(), processes
    )
    assert len(found) == plan.n_objects == objects
    assert_even(plan)


@pytest.mark.parametrize("processes", [256, 1000, 4096])
def test_many_replicas_write_few_objects(processes: int) -> None:
    """Each replica later reads all objects, and object stores limit requests. 4,096 replicas once wrote 40 each."""
    plan = replicated_state(processes)
    assert plan.n_objects <= 2 * _save_plan.SHARED_OBJECTS
    largest = max(math.prod(stack.object_sides) * stack.itemsize for stack in plan.stacks)
    assert max(plan.process_bytes) <= sum(plan.process_bytes) / processes + largest


def test_sets_of_holders_that_overlap_share_evenly() -> None:
    """A piece has three devices and a process has four, so some pieces are held by two processes with other pieces."""
    layout = PlannedSharding((("a", 8), ("b", 3)), (("a",),), 4).layout((8 * 4096, 512))
    leaves = [ArrayLeaf(n, "float32", (8 * 4096, 512), layout) for n in range(100)]
    assert_even(plan_save(leaves, Options(), 0, 6))


# Sizes ----------------------------------------------------------------------------------------------------


def test_a_training_state_has_few_stacks_and_objects_of_the_requested_size() -> None:
    plan, found = plan_all(training_state(4, 4, 2), Options(), 4)
    assert len(plan.stacks) == 2 * len(MODEL) + 1
    assert max(obj.n_bytes for _, obj in found) <= Options().object_bytes
    assert sum(plan.process_bytes) / plan.n_objects > 8 << 20


@pytest.mark.parametrize("shape", [(64, 64), (8,), ()])
def test_small_leaves_are_packed_many_to_an_object(shape: tuple[int, ...]) -> None:
    leaves = [ArrayLeaf(n, "float32", shape, Layout((1,) * len(shape), ((0,),))) for n in range(2000)]
    plan = plan_save(leaves, Options(), 0, 1)
    total = 2000 * math.prod(shape) * 4
    assert len(plan.stacks) == 1
    assert plan.n_objects == math.ceil(total / _plan.MAX_PACKED_OBJECT_BYTES)
    assert math.prod(plan.stacks[0].chunk_sides) * 4 <= max(4 * _plan.TINY_BYTES, math.prod(shape) * 4)


def test_small_leaves_are_stored_alike_for_any_split_in_one_process() -> None:
    planned = PlannedSharding((("data", 4), ("model", 8)), (("model",), ("data",)), 16)
    leaves = [ArrayLeaf(n, "float32", (64, 64), planned.layout((64, 64))) for n in range(100)]
    _, found = plan_all(leaves, Options(), 2)
    boxes: list[Box] = [((0, 100), (0, 64), (0, 32)), ((0, 100), (0, 64), (32, 64))]
    assert [(process, obj.box) for process, obj in found] == list(enumerate(boxes))


def test_chunks_are_within_pieces_that_are_not_small() -> None:
    """Eight devices of one process share an object but no chunk, so each chunk is written directly from its piece."""
    layout = PlannedSharding((("x", 2), ("y", 4)), (("x",), ("y",)), 8)
    for side, chunk in ((1024, (1, 128, 256)), (128, (1, 128, 128))):
        held = [(box, process) for _, process, box in layout.placement((side, side))]
        leaves = [ArrayLeaf(number, "bfloat16", (side, side), _grid.layout_of(held, (side, side))) for number in (0, 1)]
        (stack,) = plan_save(leaves, Options(), 0, 1).stacks
        assert (stack.chunk_sides, stack.object_sides) == (chunk, (2, side, side))


def test_large_pieces_are_separate_objects() -> None:
    layout = PlannedSharding((("data", 8),), (("data",),), 8).layout((8192, 1024))
    plan = plan_save([ArrayLeaf(n, "float32", (8192, 1024), layout) for n in range(2)], Options(), 0, 1)
    pieces = [((row, row + 1), (1024 * i, 1024 * (i + 1)), (0, 1024)) for row in range(2) for i in range(8)]
    assert [obj.box for obj in plan.objects] == pieces


# A job of 4,096 processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("fsdp", "replica"), [(2048, 1), (128, 16), (1, 2048)])
def test_a_process_of_a_large_job_lists_only_its_own_objects(fsdp: int, replica: int) -> None:
    processes, width = 4096, 16384
    axes = (("replica", replica), ("fsdp", fsdp), ("tensor", 8))
    kinds: list[tuple[tuple[int, ...], Spec]] = [
        ((width, width), (("fsdp",), ("tensor",))),
        ((4 * width, width), (("tensor",), ("fsdp",))),
        ((width,), ()),
    ]
    layouts = [(shape, PlannedSharding(axes, spec, 4).layout(shape)) for shape, spec in kinds]
    of_each = itertools.product(("bfloat16", "float32"), layouts, range(100))
    leaves = [ArrayLeaf(number, dtype, *of) for number, (dtype, of, _) in enumerate(of_each)]
    of_some = {process: plan_save(leaves, Options(), process, processes) for process in (0, 1, 1234, 4095)}
    plan = of_some[0]
    assert_even(plan)
    assert plan.n_objects == sum(
        math.prod(-(-n // side) for n, side in zip(stack.array_shape, stack.object_sides, strict=True))
        for stack in plan.stacks
    )
    assert sum(plan.process_bytes) == sum(math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize for leaf in leaves)
    for process, own in of_some.items():
        assert shared(own) == shared(plan)
        assert sum(obj.n_bytes for obj in own.objects) == own.process_bytes[process]
        assert 0 < len(own.objects) <= 3 * plan.n_objects / processes
    indices = [(obj.stack, obj.index) for own in of_some.values() for obj in own.objects]
    assert len(set(indices)) == len(indices), "each object has one writer"
