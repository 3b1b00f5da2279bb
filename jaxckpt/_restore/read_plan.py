"""The plan of a restore: which boxes of which stacks are read together, and into which buffers. Pure data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxckpt._model.grid import (
    Box,
    cut_at_chunks,
    cut_down,
    hull,
    intersection,
    touched_cells,
    volume,
)
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
    """A box that is read in one request, and the buffers (run, box) that it serves."""

    box: Box
    serves: tuple[tuple[int, int], ...]

    converted: bool
    """Whether it is cast or has no buffer, so that it is first read into separate memory."""

    @property
    def staged(self) -> bool:
        """Whether it is first read into separate memory, unless the reader has `shares_chunks`."""
        return self.converted or len(self.serves) > 1


@dataclass(frozen=True, slots=True)
class Read:
    """Regions that are read together: the unit of memory in flight."""

    regions: tuple[Region, ...]

    n_bytes: int
    """Bytes of the needed parts."""

    held_bytes: int
    """Bytes of host memory in addition to the buffers: the stored chunks, and staged data."""

    @property
    def boxes(self) -> list[Box]:
        return [region.box for region in self.regions]


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Buffers that are filled, delivered and released together."""

    stack: int
    runs: tuple[WantedRows, ...]
    """Each has other wants than the one before. Each box of a run has one buffer for all its rows."""

    reads: tuple[Read, ...]

    n_bytes: int
    """Bytes of needed array data, in the stored dtype."""

    held_bytes: int
    """Bytes of the buffers that do not become arrays."""


def max_read_bytes(host_bytes: int) -> int:
    """The largest read if this many bytes may be in flight: while one is read, one is decoded and two transferred."""
    return max(1, host_bytes // 4)


def plan_read(
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
    """The step for these wants of a stack. Adjacent equal wants become one run, and runs are cut into regions."""
    runs: list[WantedRows] = []
    for want in wants:
        form = want.boxes, want.dtype, want.keeps_buffers
        run = want
        if runs and (last := runs[-1]).rows[1] == want.rows[0] and (last.boxes, last.dtype, last.keeps_buffers) == form:
            run = replace(want, rows=(runs.pop().rows[0], want.rows[1]))
        if not want.keeps_buffers and _bytes(stack, want) > max_buffer_bytes:
            run = replace(run, streamed=True)
        runs.append(run)
    regions: list[Region] = []
    for together in _sharing_chunks(runs, stack.chunk_sides[0]):
        targets = [(run, box) for run in together for box in range(len(runs[run].boxes))]
        boxes = [runs[run].buffer_box(box) for run, box in targets]
        for box, served in cut_at_chunks(boxes, stack.chunk_sides):
            regions.append(_region(runs, box, [targets[i] for i in served]))
    n_bytes = sum(want.n_elements for want in wants) * stack.itemsize
    held_bytes = sum((run.rows[1] - run.rows[0]) * _bytes(stack, run) for run in runs if run.is_transient)
    return ReadStep(number, tuple(runs), tuple(_reads(stack, runs, regions, max_bytes)), n_bytes, held_bytes)


def _itemsize(stack: Stack, rows: WantedRows) -> int:
    return stack.itemsize if rows.dtype is None else rows.dtype.itemsize


def _bytes(stack: Stack, rows: WantedRows) -> int:
    """Bytes of the boxes of one row, in the requested dtype."""
    return sum(map(volume, rows.boxes)) * _itemsize(stack, rows)


def _region(runs: Sequence[WantedRows], box: Box, serves: Sequence[tuple[int, int]]) -> Region:
    converted = any(runs[run].dtype is not None or runs[run].streamed for run, _ in serves)
    return Region(box, tuple(serves), converted)


def _reads(stack: Stack, runs: Sequence[WantedRows], regions: list[Region], max_bytes: int) -> Iterator[Read]:
    """The regions of a step: joined if they are small, otherwise cut at the borders of objects and chunks."""
    if sum(_stored_bytes(stack, region.box) for region in regions) <= max_bytes:
        yield _read(stack, runs, regions)
        return
    # Data in one object is read together as far as it fits, because tensorstore merges it into few requests.
    by_object: dict[tuple[int, ...], list[Region]] = {}
    grids = (stack.object_sides, stack.chunk_sides)
    for region in regions:
        for box in cut_down(region.box, grids, lambda box: _stored_bytes(stack, box) <= max_bytes):
            clipped = _clipped(runs, region, box)
            if clipped is not None:
                index = tuple(start // side for (start, _), side in zip(clipped.box, stack.object_sides, strict=True))
                by_object.setdefault(index, []).append(clipped)
    group: list[Region] = []
    group_bytes = 0
    for _, object_regions in sorted(by_object.items()):
        sizes = [_stored_bytes(stack, region.box) for region in object_regions]
        if group and group_bytes + sum(sizes) > max_bytes:
            yield _read(stack, runs, group)
            group, group_bytes = [], 0
        for region, size in zip(object_regions, sizes, strict=True):
            if group and group_bytes + size > max_bytes:
                yield _read(stack, runs, group)
                group, group_bytes = [], 0
            group.append(region)
            group_bytes += size
    yield _read(stack, runs, group)


def _read(stack: Stack, runs: Sequence[WantedRows], regions: Sequence[Region]) -> Read:
    n_elements = sum(volume(common_box(runs, region, at)) for region in regions for at in region.serves)
    held_bytes = sum(_stored_bytes(stack, region.box) + _staged_bytes(stack, runs, region) for region in regions)
    return Read(tuple(regions), n_elements * stack.itemsize, held_bytes)


def _stored_bytes(stack: Stack, box: Box) -> int:
    """Bytes of the chunks that a box touches."""
    chunks = math.prod(b - a for a, b in touched_cells(box, stack.chunk_sides))
    return chunks * math.prod(stack.chunk_sides) * stack.itemsize


def common_box(runs: Sequence[WantedRows], region: Region, at: tuple[int, int]) -> Box:
    """The part of a buffer that a region serves."""
    common = intersection(region.box, runs[at[0]].buffer_box(at[1]))
    assert common is not None
    return common


def _clipped(runs: Sequence[WantedRows], region: Region, box: Box) -> Region | None:
    """The part of a region in `box`; None if nothing of it is needed."""
    boxes = {at: common for at in region.serves if (common := intersection(box, runs[at[0]].buffer_box(at[1])))}
    return _region(runs, hull(boxes.values()), list(boxes)) if boxes else None


def _staged_bytes(stack: Stack, runs: Sequence[WantedRows], region: Region) -> int:
    """Bytes of a region that is read into separate memory, and of data that is cast on its way to a device."""
    if not region.staged:
        return 0
    cast = [
        volume(common_box(runs, region, at)) * _itemsize(stack, runs[at[0]])
        for at in region.serves
        if runs[at[0]].streamed and runs[at[0]].dtype is not None
    ]
    return volume(region.box) * stack.itemsize + sum(cast)


def _sharing_chunks(runs: Sequence[WantedRows], chunk_rows: int) -> Iterator[list[int]]:
    """Runs, by number, in groups such that no two groups touch the same row of chunks."""
    group: list[int] = []
    for number, run in enumerate(runs):
        if group and run.rows[0] // chunk_rows > (runs[group[-1]].rows[1] - 1) // chunk_rows:
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
