"""Decides how the value of each goal is created from what is read."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxckpt._devices.shardings import PlannedSharding, addressable_boxes, memory_kind
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, volume, whole_box
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._restore.batched_placement import rows_per_block
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._restore.resolve import Goal

WHOLE_BYTES = 256 << 10
"""Smaller leaves are read whole and cut by JAX. Larger leaves are read piece by piece into buffers that JAX takes over,
so that nothing is copied; for leaves of 64 KiB this takes more CPU time."""

CALLBACK_DEVICES = 1024
"""Up to this number of devices of a sharding, one call of `jax.make_array_from_callback` places all pieces of a leaf:
120 µs of CPU time for 8 pieces, for which `jax.device_put` takes 650. The call computes the boxes of all devices of the
job, once for each shape: 1 µs for each device."""


class Way(enum.Enum):
    """How values are created from the rows of host buffers."""

    ON_HOST = enum.auto()
    """Each row is a value."""

    IN_BLOCKS = enum.auto()
    """Several leaves are sent to the devices together, and a program splits them there (blocks.py)."""

    BY_LEAF = enum.auto()
    """One call of JAX for each leaf places all its boxes."""

    TOGETHER = enum.auto()
    """One call of JAX for all leaves that are delivered together. It places each box with each of its shardings."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The boxes of a leaf that this process reads, and how its value is created from them."""

    boxes: tuple[Box, ...]
    """Each box once. Empty if only other processes need the leaf."""

    shardings: tuple[tuple[Any, ...], ...]
    """For each box, the shardings of the arrays that are created from it: the leaf's own if it is whole, otherwise one
    for each device that needs the box."""

    is_whole: bool
    """Whether the box is the whole leaf, and its array is the leaf's value. Otherwise the value joins all boxes."""

    kept: bool
    """Whether the read buffers become the arrays."""

    way: Way

    block_rows: int
    """How many leaves are placed together if the way is IN_BLOCKS."""


class Destinations:
    """The destination of each goal. Equal goals are computed once."""

    def __init__(self, stacks: Sequence[Stack], by_stack: Mapping[int, GoalsByRow], options: Options) -> None:
        self._stacks = stacks
        self._by_stack = by_stack
        self._whole_bytes = min(WHOLE_BYTES, max_read_bytes(options.host_bytes) + 1)
        self._by_key: dict[tuple[Any, ...], Destination] = {}

    def of(self, goal: Goal, stack: int) -> Destination:
        key = (stack, goal.sharding, goal.on_devices, goal.cast)
        if key not in self._by_key:
            self._by_key[key] = self._compute(goal, self._stacks[stack], len(self._by_stack[stack]))
        return self._by_key[key]

    def _compute(self, goal: Goal, stack: Stack, n_leaves: int) -> Destination:
        dtype, sharding, whole = wanted_dtype(stack, goal), goal.sharding, whole_box(stack.shape)
        assert not isinstance(sharding, PlannedSharding), "plans have these, and read nothing"
        n_bytes = volume(whole) * dtype.itemsize
        if sharding is None or (sharding.is_fully_addressable and n_bytes < self._whole_bytes):
            places, is_whole = {whole: [sharding]}, True
        else:
            places, is_whole = local_boxes(sharding, stack.shape), False
        way, block_rows = Way.ON_HOST, 0
        if goal.on_devices:
            boxes = None if is_whole else list(places)
            block_rows = rows_per_block(sharding, stack.shape, dtype, boxes, n_leaves)
            way = _way_to_devices(sharding, is_whole, block_rows)
        kept = can_keep_buffers(goal) and not block_rows
        return Destination(tuple(places), tuple(map(tuple, places.values())), is_whole, kept, way, block_rows)


def _way_to_devices(sharding: Sharding | None, is_whole: bool, block_rows: int) -> Way:
    if block_rows:
        return Way.IN_BLOCKS
    if sharding is None or is_whole or len(sharding.device_set) > CALLBACK_DEVICES:
        return Way.TOGETHER
    return Way.BY_LEAF


def can_keep_buffers(goal: Goal) -> bool:
    """Whether host buffers become a leaf's arrays: on the host, and on CPU devices, which take ownership of them.

    This also holds in the host memory of an accelerator, because no program of the accelerator could join parts there.
    On other devices, buffers are temporary: they count as memory in flight, and a large leaf has no buffer.
    """
    if not goal.on_devices:
        return True
    if isinstance(goal.sharding, PlannedSharding):
        return False
    if goal.sharding is None:
        return all(device.platform == "cpu" for device in jax.device_put(np.empty(0, np.uint8)).devices())
    return next(iter(goal.sharding.device_set)).platform == "cpu" or memory_kind(goal.sharding) is not None


def wanted_dtype(stack: Stack, goal: Goal) -> np.dtype[Any]:
    return DTYPES[stack.dtype] if goal.cast is None else goal.cast


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices need, with a sharding for each device that needs it."""
    places: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        places.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return places


# Goals of a stack -----------------------------------------------------------------------------------------


GoalsByRow = dict[int, tuple[int, Goal]]
"""(leaf number, its goal) of rows of a stack."""


def goal_ranges(goals: GoalsByRow) -> Iterator[tuple[tuple[int, int], Goal]]:
    """Ranges of consecutive rows that have the same goal."""
    begun = end = -1
    goal: Goal | None = None
    for row in sorted(goals):
        new = goals[row][1]
        if row != end or new is not goal:
            if goal is not None:
                yield (begun, end), goal
            begun, goal = row, new
        end = row + 1
    if goal is not None:
        yield (begun, end), goal
