"""Which process writes which object: a pure function from shapes and layouts to a frozen plan.

Every process computes the same plan from the same global layouts, without communication. Groups of equal objects are
assigned in one step, so that the cost does not grow with the number of objects in the job. A process lists only its own
objects.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.checks import MAX_OBJECT_INDEX_BYTES
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, IntArray, Layout, cell_shape, coarsen
from jaxckpt._model.stacks import PACK_BELOW_BYTES, SMALL_CHUNK_BYTES, Stack, shape_stack
from jaxckpt._options import Options
from jaxckpt.errors import InputError

MIN_OBJECTS_IN_FLIGHT = 4
"""Objects are small enough that this many fit `Options.host_bytes`."""

SHARED_BYTES = 32 << 10
"""Smallest object that is created to make shares even."""

SHARE_DIVISORS = (1, 2, 4, 8, 16, 40)
"""Candidate numbers of objects per process, smallest first. An object with several possible writers has at most the
bytes of a process divided by this number. Loads are even to within one object, so the largest number balances any tree.
The smallest number that balances almost as well is used, because each object costs requests. A leaf that four processes
hold becomes four objects."""

MAX_IMBALANCE = 1.02
"""Largest accepted load of the busiest process: when the size of objects is chosen, as a multiple of the busiest load
with the smallest objects; while objects are assigned, as a multiple of the mean load."""

SHARED_OBJECTS = 2_560
"""Approximate number of objects in the whole job that are created to make shares even: 64 processes get
`SHARE_DIVISORS` each. Each object costs one request, and one more from each process that reads it, and object stores
limit requests per second. S3 needs 47 s to accept 40 objects from each of 4,096 processes (benchmarks/cluster.py)."""

MAX_BALANCE_ROUNDS = 4
"""Largest number of balancing rounds. Each round moves excess load to overlapping sets of holders. With three devices
per piece and four per process, the busiest process is 12 % above the mean after one round, 4 % after two, and 0.5 %
after three."""


class ArrayLeaf(msgspec.Struct, frozen=True, gc=False):
    """The planner's view of a leaf that is stored as an array."""

    number: int
    """Its index among all leaves of the tree."""

    dtype: str
    shape: tuple[int, ...]

    layout: Layout
    """The cells in which it is stored, and the processes that could write each."""

    is_exchanged: bool = False
    """Whether the processes must first exchange its data, collectively."""

    subtree: int = 0
    """A bit for each subtree that it belongs to. Leaves that differ in it never share a stack, so that one subtree
    can be dropped and the others stay."""


@dataclass(frozen=True, slots=True)
class Object:
    """One file, which one process writes completely."""

    stack: int
    index: tuple[int, ...]
    """Its index in the stack's grid of objects."""

    box: Box
    """Its box of the stack, rows first."""

    n_bytes: int
    """Bytes of array data."""

    @property
    def index_key(self) -> str:
        """Its grid index, in the form that manifests use."""
        return zarr.index_key(self.index)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a save will write. Only `objects` differs between processes."""

    stacks: tuple[Stack, ...]
    leaves: tuple[tuple[int, ...], ...]
    """For each stack, the leaf number of each row."""

    exchanged: tuple[bool, ...]
    """For each stack, whether its leaves are exchanged between processes first."""

    layouts: tuple[Layout, ...]
    """For each stack, the cells whose borders no object crosses, and the processes that could write each cell."""

    process_bytes: tuple[int, ...]
    """Bytes that each process writes."""

    n_objects: int
    """Objects that all processes write together."""

    objects: tuple[Object, ...]
    """The objects that this process writes, by stack and grid index."""

    @property
    def is_collective(self) -> bool:
        """Whether the processes exchange data while they stage it."""
        return any(self.exchanged)

    def written_bytes(self, process: int) -> int:
        """Bytes of array data that a process writes. Subclasses know only those of this process."""
        return self.process_bytes[process]


_Form = tuple[str, tuple[int, ...], Layout, bool, int]
"""What the leaves of a stack have in common: dtype, shape, layout, whether they are exchanged, and subtrees."""


def plan_save(leaves: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> SavePlan:
    """Put equal leaves into the rows of a stack, cut stacks into objects, and deal the objects to the processes.

    Raises InputError if the index of an object would be larger than readers accept.
    """
    groups = defaultdict[_Form, list[int]](list)
    for leaf in leaves:
        groups[leaf.dtype, leaf.shape, leaf.layout, leaf.is_exchanged, leaf.subtree].append(leaf.number)
    total = sum(
        math.prod(shape) * DTYPES[dtype].itemsize * len(rows) for (dtype, shape, _, _, _), rows in groups.items()
    )
    writers = len(frozenset[int]().union(*(layout.processes for layout in {key[2] for key in groups})))
    # At least a chunk: a restore also needs the memory of one, and smaller objects would be too many files.
    least = options.chunk_bytes or SMALL_CHUNK_BYTES
    most = min(options.object_bytes, max(least, options.host_bytes // MIN_OBJECTS_IN_FLIGHT))
    sizes = [total // min(share * max(1, writers), SHARED_OBJECTS) for share in SHARE_DIVISORS]
    *larger, finest = dict.fromkeys(min(most, max(SHARED_BYTES, size)) for size in sizes)
    chosen = _plan_for_sizes(groups, most, finest, options, process, processes)
    if any(len(holders) > 1 for layout in chosen.layouts for holders in layout.groups):
        busiest = max(chosen.process_bytes)
        for max_shared_bytes in larger:
            plan = _plan_for_sizes(groups, most, max_shared_bytes, options, process, processes)
            if max(plan.process_bytes) <= MAX_IMBALANCE * busiest:
                chosen = plan
                break
    for stack in chosen.stacks:
        if stack.index_bytes > MAX_OBJECT_INDEX_BYTES:
            raise InputError(
                f"an object of stack {stack.name} would have {stack.chunks_per_object} chunks: give larger"
                " Options.chunk_bytes or smaller object_bytes"
            )
    return chosen


def _plan_for_sizes(
    groups: Mapping[_Form, Sequence[int]],
    max_object_bytes: int,
    max_shared_bytes: int,
    options: Options,
    process: int,
    processes: int,
) -> SavePlan:
    """The plan for these largest sizes of objects with one possible writer, and with several."""
    stacks: list[Stack] = []
    layouts: list[Layout] = []
    for (dtype, shape, layout, _, _), numbers in groups.items():
        pieces = layout
        if math.prod(cell_shape(layout, shape)) * DTYPES[dtype].itemsize < PACK_BELOW_BYTES:
            layout = coarsen(layout)
        name = f"{len(stacks):04d}-{dtype}-{'x'.join(map(str, shape)) or 'scalar'}"
        shared = min(map(len, layout.groups)) > 1  # its objects must be small, so that the shares become even
        object_bytes = max_shared_bytes if shared else max_object_bytes
        stacks.append(shape_stack(name, dtype, shape, len(numbers), layout, pieces, object_bytes, options))
        layouts.append(layout)
    cuts = [
        _Cut(number, *both) for number, both in enumerate(zip(stacks, layouts, strict=True)) if 0 not in both[0].shape
    ]
    loads, own = _assign_objects(cuts, process, processes)
    return SavePlan(
        tuple(stacks),
        tuple(tuple(numbers) for numbers in groups.values()),
        tuple(is_exchanged for _, _, _, is_exchanged, _ in groups),
        tuple(layouts),
        tuple(loads.tolist()),
        sum(len(cut.layout.holders) * math.prod(cut.counts) for cut in cuts),
        tuple(obj for cut in cuts for obj in _objects(cut, own.get(cut.number, ()))),
    )


# Equal objects --------------------------------------------------------------------------------------------


_Own = tuple[IntArray, IntArray]
"""Objects of a stack that this process writes, one per row: its cell, and its position along each side of the cell."""


class _Cut:
    """A stack cut into objects. Each cell of its layout has the same objects, in the same positions."""

    def __init__(self, number: int, stack: Stack, layout: Layout) -> None:
        self.number = number
        self.stack = stack
        self.layout = layout
        self.sides = (stack.rows, *cell_shape(layout, stack.shape))
        """Sides of all rows of a cell."""

        self.counts = tuple(-(-side // length) for side, length in zip(self.sides, stack.object_sides, strict=True))
        """Number of objects along each side."""

    def batches(self) -> Iterator[tuple[int, Box]]:
        """(bytes of an object, range of positions in the cell) of each group of equal objects. The last object along a
        side may be smaller than the others."""
        ranges: list[list[tuple[tuple[int, int], int]]] = []
        for side, length, count in zip(self.sides, self.stack.object_sides, self.counts, strict=True):
            last = side - (count - 1) * length
            groups = (
                [((0, count), length)] if last == length else [((0, count - 1), length), ((count - 1, count), last)]
            )
            ranges.append([group for group in groups if group[0][0] < group[0][1]])
        for chosen in itertools.product(*ranges):
            yield math.prod(length for _, length in chosen) * self.stack.itemsize, tuple(places for places, _ in chosen)


def _objects(cut: _Cut, own: Sequence[_Own]) -> Iterator[Object]:
    """The objects of a stack that this process writes, in grid order."""
    if not own:
        return
    indices = np.concatenate([places for _, places in own])
    cells = np.unravel_index(np.concatenate([cells for cells, _ in own]), (1, *cut.layout.grid))
    indices += np.stack(cells, axis=1) * np.array(cut.counts)
    itemsize, sides, shape = cut.stack.itemsize, cut.stack.object_sides, cut.stack.array_shape
    starts = indices[np.lexsort(indices.T[::-1])] * np.array(sides)
    stops = np.minimum(starts + np.array(sides), np.array(shape))
    sizes = (stops - starts).prod(axis=1) * itemsize
    for start, stop, size in zip(starts.tolist(), stops.tolist(), sizes.tolist(), strict=True):
        index = tuple(a // side for a, side in zip(start, sides, strict=True))
        yield Object(cut.number, index, tuple(zip(start, stop, strict=True)), size)


# Dealing --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HolderSets:
    """Disjoint sets of holders, with equal numbers of processes and of cells."""

    processes: IntArray
    """A row for each set: its processes, ascending."""

    cells: IntArray
    """A row for each set: the cells that it holds, ascending."""


@lru_cache(maxsize=256)
def _holder_sets(layout: Layout) -> tuple[_HolderSets, ...]:
    """The sets of several holders of a layout, in groups that are as large as possible."""
    order = np.argsort(layout.group_of, kind="stable")
    cells = np.split(order, np.cumsum(np.bincount(layout.group_of))[:-1])
    used: dict[int, int] = {}  # for each process, its rows, as bits
    rows: dict[tuple[int, int, int], list[int]] = {}
    for number, holders in enumerate(layout.groups):
        if len(holders) > 1:
            taken = 0
            for process in holders:
                taken |= used.get(process, 0)
            free = ~taken & (taken + 1)
            used.update((process, used.get(process, 0) | free) for process in holders)
            rows.setdefault((free, len(holders), len(cells[number])), []).append(number)
    return tuple(
        _HolderSets(np.array([layout.groups[number] for number in row]), np.stack([cells[number] for number in row]))
        for row in rows.values()
    )


def _assign_objects(
    cuts: Sequence[_Cut], process: int, processes: int
) -> tuple[IntArray, Mapping[int, Sequence[_Own]]]:
    """Bytes that each process writes, and the objects of each stack that one process writes, by stack number.

    Objects with a single holder are assigned first. The others follow, largest first, each to the least loaded of its
    holders (Graham's LPT rule, 1969), with all equal objects in one step.
    """
    loads = np.zeros(processes, np.int64)
    own = defaultdict[int, list[_Own]](list)
    alone = Counter[Layout]()
    for cut in cuts:
        alone[cut.layout] += math.prod(cut.sides) * cut.stack.itemsize
    for layout, cell_bytes in alone.items():
        holder = _single_holders(layout)
        loads += np.bincount(holder[holder >= 0], minlength=processes) * cell_bytes
    for cut in cuts:
        cells = np.flatnonzero(_single_holders(cut.layout) == process)
        if len(cells):
            places = _positions(np.arange(math.prod(cut.counts)), tuple((0, count) for count in cut.counts))
            own[cut.number].append((np.repeat(cells, len(places)), np.tile(places, (len(cells), 1))))
    batches = [
        _Batch(cut, size, places, holder_sets)
        for cut in cuts
        if (all_sets := _holder_sets(cut.layout))
        for size, places in cut.batches()
        for holder_sets in all_sets
    ]
    batches.sort(key=lambda batch: -batch.size)
    for _ in range(MAX_BALANCE_ROUNDS):
        for batch in batches:
            batch.rebalance(loads)
        if loads.max() * processes <= MAX_IMBALANCE * loads.sum():
            break
    for batch in batches:
        for row, column in np.argwhere(batch.holder_sets.processes == process):
            first = batch.shares[row, :column].sum()
            cell, number = np.divmod(np.arange(first, first + batch.shares[row, column]), batch.n_per_cell)
            own[batch.cut.number].append((batch.holder_sets.cells[row, cell], _positions(number, batch.places)))
    return loads, own


class _Batch:
    """Equal objects of a stack, and how many of them each of their holders writes."""

    def __init__(self, cut: _Cut, size: int, places: Box, holder_sets: _HolderSets) -> None:
        self.cut = cut
        self.size = size
        self.places = places
        self.holder_sets = holder_sets
        self.n_per_cell = math.prod(stop - start for start, stop in places)
        self.shares = np.zeros(holder_sets.processes.shape, np.int32)  # there may be tens of thousands of batches

    def rebalance(self, loads: IntArray) -> None:
        """Assign these objects again, given the loads from all other objects."""
        other_loads = loads[self.holder_sets.processes] - self.shares * np.int64(self.size)
        shares = _water_fill(other_loads, self.holder_sets.cells.shape[1] * self.n_per_cell, self.size)
        loads[self.holder_sets.processes] = other_loads + shares * self.size
        self.shares = shares.astype(np.int32)


@lru_cache(maxsize=256)
def _single_holders(layout: Layout) -> IntArray:
    """For each cell, its single holder, or -1 if it has several."""
    return np.array([holders[0] if len(holders) == 1 else -1 for holders in layout.groups])[layout.group_of]


def _positions(numbers: IntArray, ranges: Box) -> IntArray:
    """The positions in a cell, one per row, for these numbers in row-major order of a range of positions."""
    positions = np.unravel_index(numbers, tuple(stop - start for start, stop in ranges))
    return np.stack(positions, axis=1) + np.array([start for start, _ in ranges])


def _water_fill(loads: IntArray, count: int, size: int) -> IntArray:
    """How many of `count` equal objects each column gets, so that the loads in a row become even.

    Fills loads up to a common level, like water. Objects that remain because of rounding go, one each, to the columns
    with the lowest loads.
    """
    columns = loads.shape[1]
    filled = np.sort(loads, axis=1).cumsum(axis=1)
    level = ((filled + count * size) // np.arange(1, columns + 1)).min(axis=1, keepdims=True)
    shares = np.maximum(level - loads, 0) // size
    left = count - shares.sum(axis=1, keepdims=True)
    if left.any():
        lowest = np.argsort(loads + shares * size, axis=1, kind="stable")
        shares[np.arange(len(loads))[:, None], lowest] += np.arange(columns) < left
    return shares
