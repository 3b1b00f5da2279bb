"""Decides how the value of each leaf is created from what is read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding, SingleDeviceSharding

from jaxckpt._devices.shardings import PlannedSharding, addressable_boxes
from jaxckpt._model.grid import Box
from jaxckpt._model.stacks import Stack
from jaxckpt._restore.batched_placement import rows_per_block
from jaxckpt._restore.resolve import AbstractLeaf
from jaxckpt._restore.wants import WantedRange, Wants, restored_dtype

CALLBACK_DEVICES = 1024
"""Up to this number of devices of a sharding, one call of `jax.make_array_from_callback` places all pieces of a leaf:
120 µs of CPU time for 8 pieces, for which `jax.device_put` takes 650. The call computes the boxes of all devices of the
job, once for each shape: 1 µs for each device."""


class PlacementMode(enum.Enum):
    """How values are created from the rows of host buffers."""

    ON_HOST = enum.auto()
    """Each row is a value."""

    IN_BLOCKS = enum.auto()
    """Several leaves are sent to the devices together, and a program splits them there (batched_placement.py)."""

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

    mode: PlacementMode

    block_rows: int
    """How many leaves are placed together if the way is IN_BLOCKS."""


class Destinations:
    """The destinations of what a process needs. Equal abstract leaves are computed once."""

    def __init__(self, wants: Wants, process: int) -> None:
        self._by_key: dict[tuple[Any, ...], Destination] = {}
        for wanted_range in wants.ranges:
            key = _key(wanted_range.abstract, wanted_range.stack)
            if key not in self._by_key:
                n_leaves = len(wants.by_stack[wanted_range.stack])
                self._by_key[key] = _destination(wanted_range, wants.stacks[wanted_range.stack], n_leaves, process)

    def of(self, abstract: AbstractLeaf, stack: int) -> Destination:
        return self._by_key[_key(abstract, stack)]


def _key(abstract: AbstractLeaf, stack: int) -> tuple[Any, ...]:
    return stack, abstract.sharding, abstract.on_devices, abstract.cast


def _destination(wanted_range: WantedRange, stack: Stack, n_leaves: int, process: int) -> Destination:
    abstract = wanted_range.abstract
    sharding = abstract.sharding
    assert not isinstance(sharding, PlannedSharding), "plans have these, and read nothing"
    boxes = wanted_range.boxes.by_process.get(process, ())
    is_whole = wanted_range.boxes.are_whole and len(boxes) > 0
    if sharding is None or is_whole:
        shardings = ((sharding,),) * len(boxes)
    else:
        shardings_by_box = local_boxes(sharding, stack.shape)
        shardings = tuple(tuple(shardings_by_box[box]) for box in boxes)
    if not abstract.on_devices:
        return Destination(boxes, shardings, is_whole, PlacementMode.ON_HOST, 0)
    dtype = restored_dtype(stack, abstract)
    block_rows = rows_per_block(sharding, stack.shape, dtype, None if is_whole else boxes, n_leaves)
    return Destination(boxes, shardings, is_whole, _mode_on_devices(sharding, is_whole, block_rows), block_rows)


def _mode_on_devices(sharding: Sharding | None, is_whole: bool, block_rows: int) -> PlacementMode:
    if block_rows:
        return PlacementMode.IN_BLOCKS
    if sharding is None or is_whole or len(sharding.device_set) > CALLBACK_DEVICES:
        return PlacementMode.TOGETHER
    return PlacementMode.BY_LEAF


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices need, with a sharding for each device that needs it."""
    shardings: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        shardings.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return shardings
