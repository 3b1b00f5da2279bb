"""The plan of a restore: which boxes of which stacks are read together, and into which buffers. Nothing is read here.

From a leaf to its bytes:

    LeafForm       how a leaf is restored: its dtype, its sharding                              (`resolve`)
    WantedRange    consecutive rows of a stack whose leaves have one form                       (`wants`)
    WantedRows     a want: the boxes that one process needs of each of these rows
    ReadStep       wants whose buffers are filled and delivered together, one buffer for each box of a want
    Read           a part of a step: the unit of memory in flight, as one or more regions
    Region         a box of the stack, and the buffers that it fills; other memory first if it is separate
    target         a region and the array for it, which the store's reader fills chunk by chunk (`ArrayReader`)

Four leaves [8, 6] in rows 0 to 3 of a stack, of which this process needs the columns 0 to 2, are one want with one box
and one buffer [4, 8, 3]. It is one region if its chunks fit the limit of a read, otherwise a region for each row of
chunks or less. When the last read of the step has ended, each leaf's array is created from its row of the buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxckpt._model.grid import Box, cut_at_chunks, cut_down, hull, intersection, touched_cells, volume
from jaxckpt._model.stacks import Stack, indexed_objects_of

STEP_BYTES = 64 << 20
"""Bytes of the buffers that are filled together. They stay in memory until the last array cut from them is freed."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The boxes that this process needs of each of some consecutive rows, each box once for all devices."""

    stack: int
    rows: tuple[int, int]
    boxes: tuple[Box, ...]

    dtype: np.dtype[Any] | None = None
    """The dtype of the leaves, if it differs from the stored dtype."""

    keeps_buffers: bool = True
    """Whether the filled buffers become the arrays. Otherwise they are copied to devices and freed."""

    streamed: bool = False
    """In a step: whether the boxes are too large for host buffers, so that data is sent to the devices part by part."""

    @property
    def n_elements(self) -> int:
        """Elements of the boxes of all rows."""
        return (self.rows[1] - self.rows[0]) * sum(map(volume, self.boxes))

    @property
    def is_transient(self) -> bool:
        """Whether its buffers are freed after their data is on the devices."""
        return not (self.keeps_buffers or self.streamed)

    def buffer_box(self, box: int) -> Box:
        """The part of the stack in the buffer of a box."""
        return (self.rows, *self.boxes[box])


@dataclass(frozen=True, slots=True)
class Region:
    """A box that is read in one request, and the buffers (want, box) that it serves."""

    box: Box
    serves: tuple[tuple[int, int], ...]

    converted: bool
    """Whether it is cast or has no buffer, so that it is first read into separate memory."""

    def is_separate(self, *, shares_chunks: bool) -> bool:
        """Whether it is first read into separate memory, by a reader that has `shares_chunks` or not."""
        return self.converted or (len(self.serves) > 1 and not shares_chunks)


@dataclass(frozen=True, slots=True)
class Read:
    """Regions that are read together: the unit of memory in flight."""

    regions: tuple[Region, ...]

    n_bytes: int
    """Bytes of the needed parts."""

    held_bytes: int
    """Bytes of host memory in addition to the buffers: the stored chunks, and separate regions."""

    @property
    def boxes(self) -> list[Box]:
        return [region.box for region in self.regions]


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Buffers that are filled, delivered and released together."""

    stack: int
    wants: tuple[WantedRows, ...]
    """Each is unlike the one before. Each box of a want has one buffer for all its rows. They do not say which leaves
    are in these rows: the delivery finds these by stack and row."""

    reads: tuple[Read, ...]

    n_bytes: int
    """Bytes of needed array data, in the stored dtype."""

    held_bytes: int
    """Bytes of the buffers that do not become arrays."""


def max_read_bytes(host_bytes: int) -> int:
    """The largest read if this many bytes may be in flight: while one is read, one is decoded and two transferred."""
    return max(1, host_bytes // 4)


def plan_steps(
    stacks: Sequence[Stack], wants: Iterable[WantedRows], host_bytes: int, max_bytes: Mapping[int, int] | None = None
) -> list[ReadStep]:
    """Steps that read every needed box once, and no chunk twice, in reads that fit `host_bytes` of memory.

    With `max_bytes`, no read of a stack, by number, is larger than that, unless it is a single chunk.
    """
    by_stack: dict[int, list[WantedRows]] = {}
    for want in wants:
        if want.n_elements:
            by_stack.setdefault(want.stack, []).append(want)
    max_buffer_bytes = max_read_bytes(host_bytes)
    steps: list[ReadStep] = []
    for number, stack_wants in sorted(by_stack.items()):
        stack = stacks[number]
        stack_wants.sort(key=lambda want: want.rows)
        groups = _grouped(stack, stack_wants, min(STEP_BYTES, max_buffer_bytes))
        max_read = max_buffer_bytes if max_bytes is None else max_bytes[number]
        steps.extend(_step(number, stack, group, max_buffer_bytes, max_read) for group in groups)
    return steps


def _grouped(stack: Stack, wants: Sequence[WantedRows], step_bytes: int) -> Iterator[list[WantedRows]]:
    """Groups of wants. A group has at most `step_bytes`, or is one row of chunks, which is never split."""
    group: list[WantedRows] = []
    group_bytes = 0
    chunk_rows = stack.chunk_sides[0]
    for unit in _units(chunk_rows, wants):
        unit_bytes = sum(want.n_elements for want in unit) * stack.itemsize
        (row, end), chunks_bytes = unit[0].rows, unit_bytes
        if end - row > chunk_rows:  # one want with many rows of chunks
            chunks_bytes = unit_bytes * chunk_rows // (end - row)
        while unit_bytes:
            if group and group_bytes + chunks_bytes > step_bytes:
                yield group
                group, group_bytes = [], 0
            taken_bytes = min(unit_bytes, max(1, (step_bytes - group_bytes) // chunks_bytes) * chunks_bytes)
            if taken_bytes < unit_bytes:
                stop = row + taken_bytes // chunks_bytes * chunk_rows
                group.append(replace(unit[0], rows=(row, stop)))
                row = stop
            else:
                group.extend([replace(unit[0], rows=(row, end)), *unit[1:]])
            group_bytes, unit_bytes = group_bytes + taken_bytes, unit_bytes - taken_bytes
    if group:
        yield group


def _units(chunk_rows: int, wants: Sequence[WantedRows]) -> Iterator[list[WantedRows]]:
    """Each row of chunks that some want touches partly, with all wants in it; otherwise parts of one want that consist
    of whole rows of chunks."""
    chunk_wants: list[WantedRows] = []
    for want in wants:
        row, end = want.rows
        while row < end:
            border = (row // chunk_rows + 1) * chunk_rows
            if chunk_wants and chunk_wants[0].rows[0] // chunk_rows != row // chunk_rows:
                yield chunk_wants
                chunk_wants = []
            if row % chunk_rows or end < border:
                stop = min(border, end)
                chunk_wants.append(replace(want, rows=(row, stop)))
            else:
                stop = end // chunk_rows * chunk_rows
                yield [replace(want, rows=(row, stop))]
            row = stop
    if chunk_wants:
        yield chunk_wants


def _step(number: int, stack: Stack, wants: Sequence[WantedRows], max_buffer_bytes: int, max_bytes: int) -> ReadStep:
    """The step for these wants of a stack. Adjacent wants that are alike become one, and all are cut into regions."""
    joined: list[WantedRows] = []
    for want in wants:
        kind, new = (want.boxes, want.dtype, want.keeps_buffers), want
        last = joined[-1] if joined else None
        if last and last.rows[1] == want.rows[0] and (last.boxes, last.dtype, last.keeps_buffers) == kind:
            new = replace(want, rows=(joined.pop().rows[0], want.rows[1]))
        if not want.keeps_buffers and _bytes(stack, want) > max_buffer_bytes:
            new = replace(new, streamed=True)
        joined.append(new)
    regions: list[Region] = []
    for together in _sharing_chunks(joined, stack.chunk_sides[0]):
        targets = [(number, box) for number in together for box in range(len(joined[number].boxes))]
        boxes = [joined[number].buffer_box(box) for number, box in targets]
        for box, served in cut_at_chunks(boxes, stack.chunk_sides):
            regions.append(_region(joined, box, [targets[i] for i in served]))
    n_bytes = sum(want.n_elements for want in wants) * stack.itemsize
    held_bytes = sum((want.rows[1] - want.rows[0]) * _bytes(stack, want) for want in joined if want.is_transient)
    return ReadStep(number, tuple(joined), tuple(_reads(stack, joined, regions, max_bytes)), n_bytes, held_bytes)


def _itemsize(stack: Stack, rows: WantedRows) -> int:
    return stack.itemsize if rows.dtype is None else rows.dtype.itemsize


def _bytes(stack: Stack, rows: WantedRows) -> int:
    """Bytes of the boxes of one row, in the requested dtype."""
    return sum(map(volume, rows.boxes)) * _itemsize(stack, rows)


def _region(wants: Sequence[WantedRows], box: Box, serves: Sequence[tuple[int, int]]) -> Region:
    converted = any(wants[number].dtype is not None or wants[number].streamed for number, _ in serves)
    return Region(box, tuple(serves), converted)


def _reads(stack: Stack, wants: Sequence[WantedRows], regions: list[Region], max_bytes: int) -> Iterator[Read]:
    """The regions of a step: joined if they are small, otherwise cut at the borders of objects and chunks."""
    if sum(_stored_bytes(stack, region.box) for region in regions) <= max_bytes:
        yield _read(stack, wants, regions)
        return
    # Data in one object is read together as far as it fits, because tensorstore merges it into few requests.
    by_object: dict[tuple[int, ...], list[Region]] = {}
    grids = (stack.object_sides, stack.chunk_sides)
    for region in regions:
        for box in cut_down(region.box, grids, lambda box: _stored_bytes(stack, box) <= max_bytes):
            clipped = _clipped(wants, region, box)
            if clipped is not None:
                index = tuple(start // side for (start, _), side in zip(clipped.box, stack.object_sides, strict=True))
                by_object.setdefault(index, []).append(clipped)
    group: list[Region] = []
    group_bytes = 0
    for _, object_regions in sorted(by_object.items()):
        sizes = [_stored_bytes(stack, region.box) for region in object_regions]
        if group and group_bytes + sum(sizes) > max_bytes:
            yield _read(stack, wants, group)
            group, group_bytes = [], 0
        for region, size in zip(object_regions, sizes, strict=True):
            if group and group_bytes + size > max_bytes:
                yield _read(stack, wants, group)
                group, group_bytes = [], 0
            group.append(region)
            group_bytes += size
    yield _read(stack, wants, group)


def _read(stack: Stack, wants: Sequence[WantedRows], regions: Sequence[Region]) -> Read:
    n_elements = sum(volume(common_box(wants, region, at)) for region in regions for at in region.serves)
    held_bytes = sum(_stored_bytes(stack, region.box) + _staged_bytes(stack, wants, region) for region in regions)
    return Read(tuple(regions), n_elements * stack.itemsize, held_bytes)


def _stored_bytes(stack: Stack, box: Box) -> int:
    """Bytes of the chunks that a box touches."""
    chunks = math.prod(b - a for a, b in touched_cells(box, stack.chunk_sides))
    return chunks * math.prod(stack.chunk_sides) * stack.itemsize


def common_box(wants: Sequence[WantedRows], region: Region, at: tuple[int, int]) -> Box:
    """The part of a buffer that a region serves."""
    common = intersection(region.box, wants[at[0]].buffer_box(at[1]))
    assert common is not None
    return common


def _clipped(wants: Sequence[WantedRows], region: Region, box: Box) -> Region | None:
    """The part of a region in `box`; None if nothing of it is needed."""
    boxes = {at: common for at in region.serves if (common := intersection(box, wants[at[0]].buffer_box(at[1])))}
    return _region(wants, hull(boxes.values()), list(boxes)) if boxes else None


def _staged_bytes(stack: Stack, wants: Sequence[WantedRows], region: Region) -> int:
    """Bytes of a region that is read into separate memory, and of data that is cast on its way to a device."""
    if not region.is_separate(shares_chunks=False):
        return 0
    cast = [
        volume(common_box(wants, region, at)) * _itemsize(stack, wants[at[0]])
        for at in region.serves
        if wants[at[0]].streamed and wants[at[0]].dtype is not None
    ]
    return volume(region.box) * stack.itemsize + sum(cast)


def _sharing_chunks(wants: Sequence[WantedRows], chunk_rows: int) -> Iterator[list[int]]:
    """Wants, by number, in groups such that no two groups touch the same row of chunks."""
    group: list[int] = []
    for number, want in enumerate(wants):
        if group and want.rows[0] // chunk_rows > (wants[group[-1]].rows[1] - 1) // chunk_rows:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class ReadCost:
    """The cost of a read, computed from the plan."""

    needed_bytes: int = 0
    """Bytes of needed array data, each box once."""

    read_bytes: int = 0
    """Bytes of the stored chunks and indexes that hold them (uncompressed)."""

    received_bytes: int = 0
    """Bytes of array data that other processes read and send (`Options.read`)."""

    requests: int = 0
    """Storage requests: one for an object that is read whole, otherwise one for its index and one per chunk."""

    peak_host_bytes: int = 0
    """Peak host memory in addition to the finished arrays: stored chunks in flight, staged data, and on accelerators
    the buffers."""

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(
            self.needed_bytes + other.needed_bytes,
            self.read_bytes + other.read_bytes,
            self.received_bytes + other.received_bytes,
            self.requests + other.requests,
            max(self.peak_host_bytes, other.peak_host_bytes),
        )


def read_cost(stacks: Sequence[Stack], steps: Iterable[ReadStep], host_bytes: int) -> ReadCost:
    """The cost of `steps` if `host_bytes` may be in flight."""
    total = ReadCost()
    least_bytes = all_bytes = 0
    for step in steps:
        stack = stacks[step.stack]
        read_bytes = requests = 0
        for obj, boxes in itertools.chain.from_iterable(_boxes_by_object(stack, read) for read in step.reads):
            is_whole = sum(map(volume, boxes)) == volume(obj)
            chunks = sum(math.prod(b - a for a, b in touched_cells(box, stack.chunk_sides)) for box in boxes)
            read_bytes += chunks * stack.chunk_stored_bytes + stack.index_bytes
            requests += 1 if is_whole else 1 + chunks
        total += ReadCost(step.n_bytes, read_bytes, requests=requests)
        sizes = [read.held_bytes for read in step.reads]
        least_bytes = max(least_bytes, step.held_bytes + max(sizes))  # at least one read is in flight
        all_bytes += step.held_bytes + sum(sizes)
    return replace(total, peak_host_bytes=max(least_bytes, min(host_bytes, all_bytes)))


def _boxes_by_object(stack: Stack, read: Read) -> Iterable[tuple[Box, list[Box]]]:
    """(an object's box, the parts of it that a read needs) for each object. A read gets the index of an object once."""
    boxes_by_object: dict[Box, list[Box]] = {}
    for box in read.boxes:
        for _, common, obj in indexed_objects_of(stack, box):
            boxes_by_object.setdefault(obj, []).append(common)
    return boxes_by_object.items()
