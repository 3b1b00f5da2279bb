"""Boxes, and the grids that shardings cut arrays into.

Pure integer arithmetic, independent of devices, files and leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from jaxckpt.errors import SpecError, show_count

Box = tuple[tuple[int, int], ...]
"""A rectangular index region: (start, stop) of each dimension, with `stop` excluded."""

IntArray = np.ndarray[Any, np.dtype[np.int64]]

Spec = tuple[tuple[str, ...], ...]
"""A PartitionSpec as plain data: for each leading dimension, the mesh axes that split it."""


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def box_at(starts: Iterable[int], sides: Iterable[int]) -> Box:
    return tuple((start, start + side) for start, side in zip(starts, sides, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """The common region, or None if it would be empty."""
    common: list[tuple[int, int]] = []  # a loop, because this is the most frequently called function
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        start, stop = a0 if a0 > b0 else b0, a1 if a1 < b1 else b1
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def hull(boxes: Iterable[Box]) -> Box:
    """The smallest box that holds all of `boxes`."""
    sides = zip(*boxes, strict=True)
    return tuple((min(start for start, _ in side), max(stop for _, stop in side)) for side in sides)


def contains(outer: Box, inner: Box) -> bool:
    return all(a0 <= b0 and b1 <= a1 for (a0, a1), (b0, b1) in zip(outer, inner, strict=True))


def slices_within(box: Box, origin: Box) -> tuple[slice, ...]:
    """Slices that address `box` in an array whose content is the box `origin`."""
    return tuple([slice(a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True)])


def relative(box: Box, outer: Box) -> Box:
    """A box with its offsets relative to the start of the box `outer`, which contains it."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes whose elements, in sequence and each in C order, are the elements `start` to `stop` of an array."""
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


# Shardings as boxes ---------------------------------------------------------------------------------------


def spec_of(partition_spec: Iterable[object]) -> Spec:
    """A jax PartitionSpec as plain data. Raises SpecError."""
    if unreduced := getattr(partition_spec, "unreduced", None):
        raise SpecError(
            f"PartitionSpec has unreduced mesh axes {sorted(unreduced)}: sum the values over"
            " them first, with jax.reshard"
        )
    entries: list[tuple[str, ...]] = []
    for entry in getattr(partition_spec, "partitions", partition_spec):
        if entry is None:
            entries.append(())
        elif isinstance(entry, str):
            entries.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
            entries.append(entry)
        else:
            raise SpecError(f"PartitionSpec entries must be mesh axis names, found {entry!r}")
    return tuple(entries)


def spec_problem(axes: Mapping[str, int], spec: Spec, shape: Sequence[int]) -> str | None:
    """The reason why `spec` cannot split an array of `shape` over a mesh with these axis sizes, or None."""
    return axis_problem(axes, spec, shape) or divisibility_problem(axes, spec, shape)


def axis_problem(axes: Mapping[str, int], spec: Spec, shape: Sequence[int]) -> str | None:
    """The reason why `spec` does not fit the axes or the number of dimensions, or None. Lengths are not compared."""
    if len(spec) > len(shape):
        return (
            f"PartitionSpec {show_spec(spec)} has {len(spec)} {'entry' if len(spec) == 1 else 'entries'}, but the shape"
            f" {tuple(shape)} has {show_count(len(shape), 'dimension')}"
        )
    names = [axis for entry in spec for axis in entry]
    for axis in names:
        if axis not in axes:
            return f"PartitionSpec {show_spec(spec)} names mesh axis {axis!r}; the mesh has {dict(axes)}"
        if names.count(axis) > 1:
            return f"PartitionSpec {show_spec(spec)} names mesh axis {axis!r} twice"
    return None


def divisibility_problem(axes: Mapping[str, int], spec: Spec, shape: Sequence[int]) -> str | None:
    """The first dimension that its mesh axes do not divide, in words, or None. The axes of `spec` must fit."""
    for dim, (length, count) in enumerate(zip(shape, pieces_along(axes, spec, len(shape)), strict=True)):
        if length % count:
            return (
                f"dimension {dim} of {tuple(shape)} is not divisible by {count}, the size of mesh axes {spec[dim]}"
                f" in PartitionSpec {show_spec(spec)}"
            )
    return None


def pieces_along(axes: Mapping[str, int], spec: Spec, rank: int) -> list[int]:
    """The number of pieces into which `spec` cuts each dimension."""
    return [math.prod(axes[axis] for axis in entry) for entry in (*spec, *[()] * (rank - len(spec)))]


def replicate_indivisible(axes: Mapping[str, int], spec: Spec, shape: Sequence[int]) -> Spec:
    """`spec` without the mesh axes of dimensions that they do not divide."""
    counts = pieces_along(axes, spec, len(shape))
    return tuple(() if n % count else entry for n, count, entry in zip(shape, counts, spec, strict=False))


def spec_boxes(axes: Mapping[str, int], spec: Spec, shape: Sequence[int]) -> Iterator[Box]:
    """The box of each mesh position, in row-major order of the axes.

    Equal to `NamedSharding(mesh, spec).devices_indices_map(shape)`, but the devices of the mesh need not exist here.
    """
    for position in itertools.product(*(range(size) for size in axes.values())):
        yield spec_box(axes, spec, shape, position)


def spec_box(axes: Mapping[str, int], spec: Spec, shape: Sequence[int], position: Sequence[int]) -> Box:
    """The box of one mesh position."""
    at = dict(zip(axes, position, strict=True))
    box: list[tuple[int, int]] = []
    for dim, length in enumerate(shape):
        index, count = 0, 1
        for axis in spec[dim] if dim < len(spec) else ():
            index = index * axes[axis] + at[axis]
            count *= axes[axis]
        piece = length // count
        box.append((index * piece, (index + 1) * piece))
    return tuple(box)


def show_box(box: Box) -> str:
    """A box as an index expression: `[0:8, 4:16]`."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def show_spec(spec: Spec) -> str:
    """A spec as JAX writes it: `P('data', None, ('x', 'y'))`."""
    entries = ("None" if not entry else repr(entry[0]) if len(entry) == 1 else repr(entry) for entry in spec)
    return f"P({', '.join(entries)})"


def show_axes(axes: Mapping[str, int]) -> str:
    """The axis sizes of a mesh: `data=2×model=4`."""
    return "×".join(f"{name}={size}" for name, size in axes.items())


# Layouts: the regular grid of cells and their holders ----------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """An array cut into a regular grid of cells, and the processes that hold each complete cell."""

    grid: tuple[int, ...]
    """Number of cells along each dimension."""

    holders: tuple[tuple[int, ...], ...]
    """For each cell in row-major order, the processes that hold it, ascending."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached, because thousands of leaves may share a layout of thousands of cells.
        return hash((self.grid, self.holders))

    @cached_property
    def processes(self) -> frozenset[int]:
        """All processes that hold any cell."""
        return frozenset(itertools.chain.from_iterable(self.groups))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The distinct sets of holders, ordered by their first cells."""
        return tuple(dict.fromkeys(self.holders))

    @cached_property
    def group_of(self) -> IntArray:
        """For each cell in row-major order, the index of its set in `groups`."""
        numbers = {group: number for number, group in enumerate(self.groups)}
        return np.array([numbers[holders] for holders in self.holders], np.int64)


def mesh_layout(processes: IntArray, axes: Sequence[str], spec: Spec, rank: int) -> Layout:
    """The layout of any array of `rank` dimensions that `spec` divides. `processes` has the process of each mesh
    position."""
    entries = (*spec, *itertools.repeat((), rank - len(spec)))
    split = [axes.index(axis) for entry in entries for axis in entry]
    grid = tuple(math.prod(processes.shape[axes.index(axis)] for axis in entry) for entry in entries)
    replicated = [axis for axis in range(len(axes)) if axis not in split]
    by_cell = np.sort(processes.transpose(split + replicated).reshape(math.prod(grid), -1), axis=1)
    rows, number = np.unique(by_cell, axis=0, return_inverse=True)
    groups = [tuple(dict.fromkeys(row)) for row in rows.tolist()]
    return Layout(grid, tuple(groups[i] for i in number.ravel().tolist()))


def layout_of(pairs: Iterable[tuple[Box, int]], shape: tuple[int, ...]) -> Layout:
    """The layout of an array with these (box, process) pairs, as a JAX sharding returns them.

    Raises SpecError if the boxes do not form a regular grid; those of all known JAX shardings do.
    """
    holders: dict[Box, set[int]] = {}
    for box, process in pairs:
        holders.setdefault(box, set()).add(process)
    if 0 in shape:  # no elements, so no cells
        return Layout((1,) * len(shape), (tuple(sorted(set().union(*holders.values()))),))
    sides = extent(next(iter(holders)))
    grid = tuple(n // side for n, side in zip(shape, sides, strict=True))
    cells = [box for _, box in grid_cells(shape, sides)]
    if set(cells) != set(holders) or any(n % side for n, side in zip(shape, sides, strict=True)):
        raise SpecError(f"the sharding of an array of shape {shape} is not a regular grid of boxes")
    return Layout(grid, tuple(tuple(sorted(holders[cell])) for cell in cells))


def cell_shape(layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n // count for n, count in zip(shape, layout.grid, strict=True))


@lru_cache(maxsize=256)
def coarsen(layout: Layout) -> Layout:
    """The coarsest grid in which some process holds each cell completely.

    Small leaves are stored on this grid, because the devices of one process write together.
    """
    for dim in reversed(range(len(layout.grid))):
        for count in divisors(layout.grid[dim]):
            merged = _cut_along(layout, dim, count)
            if merged is not None:
                layout = merged
                break
    return layout


@lru_cache(maxsize=256)
def intersect_holders(layout: Layout, other: Layout) -> Layout | None:
    """The cells of `layout` with only the holders that also hold the complete cell in `other`; None if a cell has
    none."""
    cut: Layout | None = other
    # Dimensions that become coarser come first, so that no intermediate grid is finer than both grids.
    for dim in sorted(range(len(other.grid)), key=lambda dim: layout.grid[dim] / other.grid[dim]):
        cut = None if cut is None else _cut_along(cut, dim, layout.grid[dim])
    if cut is None:
        return None
    pairs = {
        (ours, theirs): tuple(sorted(set(ours).intersection(theirs)))
        for ours, theirs in dict.fromkeys(zip(layout.holders, cut.holders, strict=True))
    }
    holders = tuple(pairs[pair] for pair in zip(layout.holders, cut.holders, strict=True))
    return Layout(layout.grid, holders) if all(holders) else None


def _cut_along(layout: Layout, dim: int, count: int) -> Layout | None:
    """The layout with `count` cells along one dimension; None if some cell has no process that holds it completely."""
    if count == layout.grid[dim]:
        return layout
    grid = (*layout.grid[:dim], count, *layout.grid[dim + 1 :])
    # The cells that each new cell touches: the same number for all, with the last one repeated if there are fewer.
    borders = np.arange(count + 1) * layout.grid[dim]
    first, last = borders[:-1] // count, -(-borders[1:] // count) - 1
    touched = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
    cells = np.take(layout.group_of.reshape(layout.grid), touched, axis=dim)
    cells = np.moveaxis(cells, dim + 1, -1).reshape(math.prod(grid), -1)
    if (cells == cells[:, :1]).all():
        return Layout(grid, tuple(layout.groups[i] for i in cells[:, 0].tolist()))
    if not _common(layout, cells[0].tolist()):
        return None
    rows, number = np.unique(cells, axis=0, return_inverse=True)
    common: list[tuple[int, ...]] = []
    for row in rows.tolist():
        common.append(_common(layout, row))
        if not common[-1]:
            return None
    return Layout(grid, tuple(common[i] for i in number.ravel().tolist()))


def _common(layout: Layout, groups: Iterable[int]) -> tuple[int, ...]:
    """The intersection of several sets of processes."""
    first, *others = dict.fromkeys(groups)
    common = set(layout.groups[first])
    for other in others:
        common.intersection_update(layout.groups[other])
        if not common:
            break
    return tuple(sorted(common))


# Regular grids --------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Divisors of n, ascending; (1,) for 0."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)})) or (1,)


def grid_cells(shape: Sequence[int], sides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """(grid index, box clipped to the array) of every cell of a regular grid with these sides."""
    if 0 in shape:
        return  # `product` would first list the whole range of every other dimension
    counts = (-(-n // side) for n, side in zip(shape, sides, strict=True))
    for index in itertools.product(*map(range, counts)):
        yield (index, tuple((i * side, min((i + 1) * side, n)) for i, side, n in zip(index, sides, shape, strict=True)))


def touched_cells(box: Box, sides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """For each dimension, the range of grid indices of the cells that `box` touches."""
    return tuple((start // side, -(-stop // side)) for (start, stop), side in zip(box, sides, strict=True))


# Cutting wanted boxes at chunk borders --------------------------------------------------------------------


def cut_at_chunks(boxes: Sequence[Box], chunk: Sequence[int]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Regions that together cover `boxes`, each with the indices of the boxes that it serves.

    No chunk is in two regions, so reading each region once reads no chunk twice. Chunks that serve several boxes have
    separate regions. A region is the hull of the parts of its boxes there, so a region that serves one box lies in it.
    """
    if not boxes:
        return
    edges: list[list[int]] = []
    for dim, side in enumerate(chunk):
        cuts: set[int] = set()
        for box in boxes:
            for edge in box[dim]:
                cuts.update((edge // side * side, -(-edge // side) * side))
        edges.append(sorted(cuts))
    for cell in itertools.product(*(itertools.pairwise(cuts) for cuts in edges)):
        served = [
            (number, common) for number, box in enumerate(boxes) if (common := intersection(box, cell)) is not None
        ]
        if served:
            yield hull(box for _, box in served), tuple(number for number, _ in served)


def cut_to_size(box: Box, grids: Sequence[Sequence[int]], max_elements: int) -> Iterator[Box]:
    """As `cut_down`, until no box has more than `max_elements`."""
    return cut_down(box, grids, lambda cut: volume(cut) <= max_elements)


def cut_down(box: Box, grids: Sequence[Sequence[int]], fits: Callable[[Box], bool]) -> Iterator[Box]:
    """`box`, cut at the borders of the first grid. Cells that are too large are cut at the borders of the next grid.

    At the borders of the last grid, boxes are cut only until they fit; a box that is still too large is a single cell.
    Leading dimensions are cut first, so that the boxes are as contiguous as possible.
    """
    if not grids:
        yield box
        return
    sides, *finer = grids
    dims = [dim for dim, (first, last) in enumerate(touched_cells(box, sides)) if last - first > 1]
    if finer and not dims and not fits(box):
        yield from cut_down(box, finer, fits)
    elif not dims or (not finer and fits(box)):
        yield box
    else:
        first, last = touched_cells(box, sides)[dims[0]]
        border = (first + last) // 2 * sides[dims[0]]
        (start, stop), before, after = box[dims[0]], box[: dims[0]], box[dims[0] + 1 :]
        for side in ((start, border), (border, stop)):
            yield from cut_down((*before, side, *after), grids, fits)
