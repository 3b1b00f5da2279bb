"""Property tests of boxes, grids and cuts, without devices or a disk."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import strategies
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt._devices.shardings import placement
from jaxckpt._model import grid as _grid
from jaxckpt._model.grid import Box, Layout
from jaxckpt.errors import SpecError

axis_sizes = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), max_size=3)


# Boxes ----------------------------------------------------------------------------------------------------


@given(st.data())
def test_intersection_and_contains_match_sets_of_elements(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 9))
    one, other = data.draw(strategies.boxes(shape)), data.draw(strategies.boxes(shape))
    both = strategies.paint(shape, [one, other]) == 2
    common = _grid.intersection(one, other)
    if common is None:
        assert not both.any()
    else:
        np.testing.assert_array_equal(strategies.paint(shape, [common]) == 1, both)
        assert _grid.volume(common) == both.sum() == math.prod(_grid.extent(common))
    assert _grid.contains(one, other) == (common == other)


@given(st.data())
def test_within_addresses_a_box_in_the_array_of_another_box(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 9))
    origin = data.draw(strategies.boxes(shape))
    inner = _grid.intersection(origin, data.draw(strategies.boxes(shape)))
    assume(inner is not None)
    assert inner is not None
    array = np.arange(math.prod(shape)).reshape(shape)
    held = array[tuple(slice(*side) for side in origin)]
    np.testing.assert_array_equal(
        held[_grid.slices_within(inner, origin)], array[tuple(slice(*side) for side in inner)]
    )


@given(st.data())
def test_grid_cells_contain_every_element_once(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 12))
    sides = tuple(data.draw(st.integers(1, n + 2)) for n in shape)
    cells = list(_grid.grid_cells(shape, sides))
    assert (strategies.paint(shape, [box for _, box in cells]) == 1).all()
    for index, box in cells:
        assert _grid.touched_cells(box, sides) == tuple((i, i + 1) for i in index)


def test_an_empty_grid_has_no_cells_however_large_its_other_dimensions_are() -> None:
    assert list(_grid.grid_cells((0, 1 << 60), (1, 1))) == []


@given(st.data())
def test_touched_returns_the_cells_that_a_box_intersects(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(2, 12))
    sides = tuple(data.draw(st.integers(1, n)) for n in shape)
    box = data.draw(strategies.boxes(shape))
    met = {index for index, cell in _grid.grid_cells(shape, sides) if _grid.intersection(box, cell) is not None}
    assert set(itertools.product(*(range(*side) for side in _grid.touched_cells(box, sides)))) == met


@given(hnp.array_shapes(min_dims=0, max_dims=4, max_side=4), st.data())
def test_a_run_of_elements_is_split_into_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    array = np.arange(size).reshape(shape)
    boxes = list(_grid.flat_boxes(shape, start, stop))
    runs = [array[tuple(slice(*side) for side in box)].reshape(-1) for box in boxes]
    np.testing.assert_array_equal(np.concatenate([*runs, np.empty(0, np.int64)]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


# Specs on meshes ------------------------------------------------------------------------------------------


@given(st.data())
def test_spec_boxes_equal_jaxs(data: st.DataObject) -> None:
    mesh: Mesh = data.draw(strategies.meshes())
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 24]), max_size=3).map(tuple))
    spec = strategies.fitting(data.draw, mesh, shape)
    boxes = _grid.spec_boxes(dict(mesh.shape), _grid.spec_of(spec), shape)
    by_device = {device: box for device, _, box in placement(NamedSharding(mesh, spec), shape)}
    assert list(boxes) == [by_device[device] for device in mesh.devices.flat]


@given(st.data())
def test_a_spec_has_a_problem_exactly_if_jax_raises(data: st.DataObject) -> None:
    mesh: Mesh = data.draw(strategies.meshes())
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8]), max_size=3).map(tuple))
    entry = st.lists(st.sampled_from("abcd"), max_size=2).map(tuple)
    spec = tuple(data.draw(st.lists(entry, max_size=3)))
    try:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        sharding.check_compatible_aval(shape)
        sharding.shard_shape(shape)
        refused = False
    except Exception:  # JAX raises several classes, one of them private
        refused = True
    assert (_grid.spec_problem(dict(mesh.shape), spec, shape) is not None) == refused


@given(st.data())
def test_replicating_indivisible_dimensions_leaves_the_others_unchanged(data: st.DataObject) -> None:
    axes = data.draw(axis_sizes)
    shape = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple))
    left = data.draw(st.permutations(list(axes)))
    spec = tuple((axis,) for axis in left[: len(shape)])
    fitted = _grid.replicate_indivisible(axes, spec, shape)
    assert _grid.spec_problem(axes, fitted, shape) is None
    for dim, (before, after) in enumerate(zip(spec, fitted, strict=True)):
        assert after == (() if shape[dim] % axes[before[0]] else before)


@given(st.data())
def test_the_text_of_a_spec_is_its_code(data: st.DataObject) -> None:
    spec = data.draw(strategies.mesh_specs({"a": 2, "b": 3, "c": 1}, (24, 6, 12)))
    shown = _grid.show_spec(spec)
    assert _grid.spec_of(eval(shown, {"P": PartitionSpec})) == spec


def test_an_invalid_spec_is_refused() -> None:
    with pytest.raises(SpecError, match="mesh axis names"):
        _grid.spec_of([3])


# Layouts --------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_layout_has_the_cells_of_the_boxes_and_all_holders(data: st.DataObject) -> None:
    axes = data.draw(axis_sizes)
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 12, 24]), max_size=3).map(tuple))
    spec = data.draw(strategies.mesh_specs(axes, shape))
    boxes = list(_grid.spec_boxes(axes, spec, shape))
    held = [(box, data.draw(st.integers(0, 2))) for box in boxes]
    layout = _grid.layout_of(held, shape)
    cells = [box for _, box in _grid.grid_cells(shape, _grid.cell_shape(layout, shape))]
    assert set(cells) == set(boxes)
    for cell, holders in zip(cells, layout.holders, strict=True):
        assert holders == tuple(sorted({process for box, process in held if box == cell}))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 3),), ((3, 8),)],  # sides of two lengths
        [((0, 4),)],  # a hole
        [((0, 4),), ((2, 6),), ((4, 8),)],  # overlapping
        [((0, 3),), ((3, 6),)],  # a remainder
    ],
)
def test_boxes_that_are_not_a_regular_grid_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(SpecError, match="regular grid"):
        _grid.layout_of(((box, 0) for box in boxes), (8,))


@given(st.data())
def test_coarsening_merges_cells_and_keeps_their_common_holders(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 12))
    layout = data.draw(strategies.layouts(shape))
    coarse = _grid.coarsen(layout)
    fine = list(_grid.grid_cells(shape, _grid.cell_shape(layout, shape)))
    assert all(parts % merged == 0 for parts, merged in zip(layout.grid, coarse.grid, strict=True))
    for (_, cell), holders in zip(
        _grid.grid_cells(shape, _grid.cell_shape(coarse, shape)), coarse.holders, strict=True
    ):
        inside = [layout.holders[i] for i, (_, box) in enumerate(fine) if _grid.contains(cell, box)]
        assert len(inside) == len(fine) // len(coarse.holders)
        assert set(holders) == set.intersection(*map(set, inside))
        assert holders
    assert _grid.coarsen(coarse) == coarse


@given(st.data())
def test_cells_that_one_process_holds_completely_become_one(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 12))
    layout = data.draw(strategies.layouts(shape))
    held = Layout(layout.grid, tuple(tuple(sorted({*holders, 2})) for holders in layout.holders))
    assert _grid.coarsen(held).grid == (1,) * len(shape)


# Regular grids --------------------------------------------------------------------------------------------


@given(st.integers(0, 5000))
def test_divisors(n: int) -> None:
    assert _grid.divisors(n) == (tuple(d for d in range(1, n + 1) if n % d == 0) or (1,))


# Cuts at chunk borders ------------------------------------------------------------------------------------


@given(st.data())
def test_regions_cover_every_box_and_share_no_chunk(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(3, 14).filter(bool))
    chunk = tuple(data.draw(st.integers(1, n + 1)) for n in shape)
    boxes = data.draw(st.lists(strategies.boxes(shape), max_size=4))
    regions = list(_grid.cut_at_chunks(boxes, chunk))
    served = [[] for _ in boxes]
    for region, numbers in regions:
        assert numbers == tuple(n for n, box in enumerate(boxes) if _grid.intersection(region, box) is not None)
        assert len(numbers) > 1 or _grid.contains(boxes[numbers[0]], region)
        for number in numbers:
            common = _grid.intersection(region, boxes[number])
            assert common is not None
            served[number].append(common)
    for box, found in zip(boxes, served, strict=True):
        np.testing.assert_array_equal(strategies.paint(shape, found), strategies.paint(shape, [box]))

    def chunks(box: Box) -> set[tuple[int, ...]]:
        return set(itertools.product(*(range(*side) for side in _grid.touched_cells(box, chunk))))

    read = [index for region, _ in regions for index in chunks(region)]
    assert len(read) == len(set(read)), "a chunk is in two regions"
    assert set(read) == set().union(*map(chunks, boxes)), "an unneeded chunk is read, or a needed one is not"


def test_a_chunk_that_serves_several_boxes_is_a_separate_region() -> None:
    """Separate reads are limited to the chunks that several boxes share."""
    regions = dict(_grid.cut_at_chunks([((0, 10),), ((10, 20),)], (4,)))
    assert regions == {((0, 8),): (0,), ((8, 12),): (0, 1), ((12, 20),): (1,)}


@given(st.data())
def test_the_parts_of_a_box_cover_it(data: st.DataObject) -> None:
    shape = data.draw(strategies.sides(1, 12))
    box = data.draw(strategies.boxes(shape))
    chunk = tuple(data.draw(st.integers(1, n)) for n in shape)
    coarse = tuple(c * data.draw(st.integers(1, 3)) for c in chunk)
    most = data.draw(st.integers(1, 30))
    parts = list(_grid.cut_down(box, (coarse, chunk), lambda part: _grid.volume(part) <= most))
    assert (strategies.paint(shape, parts) == strategies.paint(shape, [box])).all()
    for part in parts:
        assert all(last - first == 1 for first, last in _grid.touched_cells(part, coarse)), (
            "in one cell of the first grid"
        )
        one_chunk = all(last - first == 1 for first, last in _grid.touched_cells(part, chunk))
        assert one_chunk or _grid.volume(part) <= most
    chunks = [set(itertools.product(*(range(*side) for side in _grid.touched_cells(part, chunk)))) for part in parts]
    assert sum(map(len, chunks)) == len(set().union(*chunks)), "no chunk is in two parts"
