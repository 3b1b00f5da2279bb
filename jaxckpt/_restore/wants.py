"""What each process reads of the requested leaves. A restore carries it out, and a dry run adds up what it costs.

leaves ─▶ ranges of rows that are read alike, with the boxes for each process ─▶ reads of a process, alone and shared
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jaxckpt._devices.shardings import (
    Placement,
    PlannedSharding,
    addressable_boxes,
    memory_kind,
    placement,
    process_layout,
)
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, cell_shape, volume, whole_box
from jaxckpt._model.records import Manifest
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._restore.read_plan import ReadCost, ReadStep, WantedRows, max_read_bytes, plan_steps, read_cost
from jaxckpt._restore.resolve import LeafForm
from jaxckpt._restore.shared_reads import (
    Community,
    Partition,
    SharedRead,
    community_of,
    plan_shared_reads,
    share,
    shared_cost,
)
from jaxckpt._sources.source import Source

WHOLE_BYTES = 256 << 10
"""Smaller leaves are read whole and cut by JAX. Larger leaves are read piece by piece into buffers that JAX takes over,
so that nothing is copied; for leaves of 64 KiB this takes more CPU time."""

SHARED_READ_BYTES = 64 << 20
"""With `Options(read="auto")`, processes share their reads from an object store if that saves each of them this many
bytes on average. For less, meeting and compiling the exchange takes longer than reading."""

BLOCK_ROWS = 32
"""Leaves per transfer. XLA's compiler for TPUs takes 0.3 s of CPU for a program that splits this many."""

BLOCK_PIECES = 1024
"""Fewer pieces of equal leaves are placed one by one, because each shape, dtype and sharding needs a compiled program.
On an H100 that takes 0.06 s, and blocks save 30 µs per leaf of 64 KiB, so that two restores of this many recover it."""

CPU_BLOCK_ROWS = 8
"""Leaves per transfer on CPU devices. Compiling the program for 8, 16 or 32 rows on 8 devices takes 0.20, 0.36 or
0.63 s. Placing a leaf then takes 70 µs including its transfer, compared with 165 µs for a leaf that is placed alone."""

CPU_BLOCK_LEAVES = 2000
"""On CPU devices, fewer equal leaves are placed one by one. With this many, two restores in a process save as much time
as compiling the program takes; with twice as many, one restore does."""

BLOCK_LEAF_BYTES = 1 << 20
"""Leaves of at least this size are placed one by one."""

FormsByRow = Mapping[int, tuple[int, LeafForm]]
"""(leaf number, its form) of rows of a stack."""


@dataclass(frozen=True, slots=True)
class LeafBoxes:
    """How leaves that are restored alike are read."""

    by_process: Mapping[int, tuple[Box, ...]]
    """The boxes of a leaf that each process reads, each box once. Processes that need nothing of the leaf are absent,
    and so are processes for which the boxes are not asked."""

    are_whole: bool
    """Whether each of these processes reads the whole leaf, and creates its array from that."""

    keeps_buffers: bool
    """Whether the read buffers become the arrays."""

    block_rows: int
    """How many leaves are sent to the devices together; 0 if they are placed one by one, or on the host."""


@dataclass(frozen=True, slots=True)
class WantedRange:
    """Consecutive rows of a stack whose leaves are restored alike."""

    stack: int
    rows: tuple[int, int]
    form: LeafForm
    leaf_boxes: LeafBoxes

    def rows_for(self, process: int) -> WantedRows:
        """What a process needs of these rows."""
        boxes = self.leaf_boxes.by_process.get(process, ())
        return WantedRows(self.stack, self.rows, boxes, self.form.cast, self.leaf_boxes.keeps_buffers)


@dataclass(frozen=True, slots=True)
class Wants:
    """What some processes of a job need of leaves that do not share rows."""

    stacks: Sequence[Stack]

    by_stack: Mapping[int, FormsByRow]
    """The leaves that are stored in each stack."""

    ranges: Sequence[WantedRange]

    layouts: Sequence[Layout] | None
    """For each range, the cells of its leaves, and the processes that need each. None if no process reads for
    others."""

    def layouts_for(self, process: int) -> list[tuple[WantedRows, Layout]]:
        """What a process needs of each range, and which processes need what of it."""
        assert self.layouts is not None
        rows = [wanted_range.rows_for(process) for wanted_range in self.ranges]
        return list(zip(rows, self.layouts, strict=True))


def plan_wants(
    source: Source, forms: Mapping[int, LeafForm], options: Options, processes: Sequence[int], job: Sequence[int]
) -> Wants:
    """What these processes of a job need of leaves that do not share rows.

    `processes` is this process alone, or all of the job.
    """
    manifest = source.manifest
    stacks = manifest.decoded_stacks
    by_stack: dict[int, dict[int, tuple[int, LeafForm]]] = {}
    for number, form in forms.items():
        record = manifest.leaves[number]
        if record.stack is not None and record.row is not None:
            by_stack.setdefault(record.stack, {})[record.row] = number, form
    known_boxes: dict[tuple[Any, ...], LeafBoxes] = {}
    ranges: list[WantedRange] = []
    for stack, leaves in by_stack.items():
        for rows, form in row_ranges(leaves):
            key = read_key(form, stack)
            if key not in known_boxes:
                known_boxes[key] = _leaf_boxes(form, stacks[stack], len(leaves), options, processes)
            ranges.append(WantedRange(stack, rows, form, known_boxes[key]))
    layouts = None
    is_object_store = "://" in source.url and not source.url.startswith("file:")
    if len(job) > 1 and (options.read == "shared" or (options.read == "auto" and is_object_store)):
        layouts = [needed_layout(wanted_range.form, stacks[wanted_range.stack].shape, job) for wanted_range in ranges]
        if options.read == "auto" and _repeated_bytes(stacks, ranges, layouts) < SHARED_READ_BYTES * len(job):
            layouts = None
    return Wants(stacks, by_stack, ranges, layouts)


def _repeated_bytes(stacks: Sequence[Stack], ranges: Sequence[WantedRange], layouts: Sequence[Layout]) -> int:
    """The bytes that processes need and others need too, each byte once less than there are such processes."""
    n_bytes = 0
    for wanted_range, layout in zip(ranges, layouts, strict=True):
        begun, end = wanted_range.rows
        stack = stacks[wanted_range.stack]
        cell_bytes = math.prod(cell_shape(layout, stack.shape)) * stack.itemsize
        n_bytes += (end - begun) * cell_bytes * (sum(map(len, layout.holders)) - len(layout.holders))
    return n_bytes


def split_ties(manifest: Manifest, forms: Mapping[int, LeafForm]) -> list[Mapping[int, LeafForm]]:
    """The leaves in rounds, so that no two of a round share a row. Separate arrays are read separately."""
    ties = manifest.ties
    if not ties:
        return [forms]
    by_round: list[dict[int, LeafForm]] = []
    turns = collections.Counter[int]()
    for number, form in forms.items():
        first = ties.get(number, number)
        if turns[first] == len(by_round):
            by_round.append({})
        by_round[turns[first]][number] = form
        turns[first] += 1
    return [*by_round]


def row_ranges(forms: FormsByRow) -> Iterator[tuple[tuple[int, int], LeafForm]]:
    """Ranges of consecutive rows that are restored alike."""
    begun = end = -1
    form: LeafForm | None = None
    for row in sorted(forms):
        new = forms[row][1]
        if row != end or new is not form:
            if form is not None:
                yield (begun, end), form
            begun, form = row, new
        end = row + 1
    if form is not None:
        yield (begun, end), form


def needed_layout(form: LeafForm, shape: tuple[int, ...], job: Iterable[int]) -> Layout:
    """The cells of a leaf, and the processes that need each: all of the job if the leaf has no sharding."""
    if form.sharding is None:
        return Layout((1,) * len(shape), (tuple(job),))
    if isinstance(form.sharding, PlannedSharding):
        return form.sharding.layout(shape)
    return process_layout(form.sharding, shape)


def read_key(form: LeafForm, stack: int) -> tuple[Any, ...]:
    """Equal for leaves that are restored alike."""
    return stack, form.sharding, form.on_devices, form.cast


def restored_dtype(stack: Stack, form: LeafForm) -> np.dtype[Any]:
    return DTYPES[stack.dtype] if form.cast is None else form.cast


# Boxes ----------------------------------------------------------------------------------------------------


def _leaf_boxes(form: LeafForm, stack: Stack, n_leaves: int, options: Options, processes: Sequence[int]) -> LeafBoxes:
    """How each of a stack's `n_leaves` that are restored like this is read."""
    sharding, whole, dtype = form.sharding, (whole_box(stack.shape),), restored_dtype(stack, form)
    if sharding is None:
        by_process, are_whole = dict.fromkeys(processes, whole), True
    else:
        by_process, is_in_one_process = _boxes_by_process(sharding, stack.shape, processes)
        n_bytes = volume(whole[0]) * dtype.itemsize
        are_whole = is_in_one_process and n_bytes < min(WHOLE_BYTES, max_read_bytes(options.host_bytes) + 1)
        if are_whole:
            by_process = dict.fromkeys(by_process, whole)
    block_rows = 0
    if form.on_devices:  # only the boxes of this process are placed
        own = None if are_whole else by_process.get(processes[0], ())
        block_rows = rows_per_block(sharding, stack.shape, dtype, own, n_leaves)
    return LeafBoxes(by_process, are_whole, can_keep_buffers(form) and not block_rows, block_rows)


def _boxes_by_process(
    sharding: Sharding | PlannedSharding, shape: tuple[int, ...], processes: Sequence[int]
) -> tuple[dict[int, tuple[Box, ...]], bool]:
    """The distinct boxes that each process needs, and whether a single process needs all of them."""
    if len(processes) == 1 and isinstance(sharding, Sharding):
        # This process, whose boxes are computed faster than those of all devices of the job.
        boxes = dict.fromkeys(box for _, box in addressable_boxes(sharding, shape))
        return {processes[0]: tuple(boxes)} if boxes else {}, sharding.is_fully_addressable
    by_process: dict[int, dict[Box, None]] = {}
    for _, process, box in placement_of(sharding, shape):
        by_process.setdefault(process, {})[box] = None
    return {process: tuple(boxes) for process, boxes in by_process.items()}, len(by_process) == 1


def placement_of(sharding: Sharding | PlannedSharding, shape: tuple[int, ...]) -> Placement:
    """Every device with its process and box."""
    return sharding.placement(shape) if isinstance(sharding, PlannedSharding) else placement(sharding, shape)


def can_keep_buffers(form: LeafForm) -> bool:
    """Whether host buffers become a leaf's arrays: on the host, and on CPU devices, which take ownership of them.

    This also holds in the host memory of an accelerator, because no program of the accelerator could join parts there.
    On other devices, buffers are temporary: they count as memory in flight, and a large leaf has no buffer.
    """
    if not form.on_devices:
        return True
    if isinstance(form.sharding, PlannedSharding):
        return False
    return not has_own_memory(form.sharding) or (form.sharding is not None and memory_kind(form.sharding) is not None)


def rows_per_block(
    sharding: Any, shape: tuple[int, ...], dtype: np.dtype[Any], boxes: Sequence[Box] | None, n_leaves: int
) -> int:
    """How many of these equal leaves are sent to the devices together; 0 if they are placed one by one.

    `boxes` are those that are read for this process's devices; None if leaves are read whole.
    """
    if not (sharding is None or isinstance(sharding, (NamedSharding, SingleDeviceSharding))):
        return 0
    n_devices = 1 if sharding is None else len(sharding.addressable_devices)
    n_elements = math.prod(shape) if boxes is None else sum(map(volume, boxes))
    if (
        n_leaves * n_devices < BLOCK_PIECES
        or not 0 < n_elements * dtype.itemsize < BLOCK_LEAF_BYTES
        or (sharding is not None and memory_kind(sharding) is not None)
        or getattr(getattr(sharding, "spec", None), "reduced", None)
        or dtype.name in ("int2", "uint2")  # XLA's compiler for CPUs aborts
    ):
        return 0
    if has_own_memory(sharding):
        return BLOCK_ROWS
    # A replicated leaf is placed without a copy for each device.
    has_no_replicas = sharding is None or math.prod(sharding.shard_shape(shape)) * n_devices == n_elements
    return CPU_BLOCK_ROWS if boxes is None and has_no_replicas and n_leaves >= CPU_BLOCK_LEAVES else 0


def has_own_memory(sharding: Sharding | None) -> bool:
    """Whether data for these devices has to be transferred."""
    devices = jax.device_put(np.empty(0, np.uint8)).devices() if sharding is None else sharding.device_set
    return next(iter(devices)).platform != "cpu"


# Reads ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessReads:
    """What one process reads."""

    process: int

    needed_bytes: int
    """Bytes of the boxes that it needs."""

    steps: Sequence[ReadStep]
    """What it reads for itself."""

    rounds: Mapping[Partition, list[SharedRead]]
    """For each partition, what its community reads; empty if it is in none."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its buffers, and of what its communities read."""
        shared = (portion for rounds in self.rounds.values() for portions in rounds for portion in portions)
        return sum(step.n_bytes for step in self.steps) + sum(portion.read.n_bytes for portion in shared)

    def cost(self, stacks: Sequence[Stack], host_bytes: int) -> ReadCost:
        """What its reads cost if `host_bytes` may be in flight."""
        together = itertools.zip_longest(*self.rounds.values(), fillvalue=())  # the partitions run side by side
        shared = [[*itertools.chain.from_iterable(rounds)] for rounds in together]
        cost = read_cost(stacks, self.steps, host_bytes) + shared_cost(stacks, shared, self.process, host_bytes)
        return replace(cost, needed_bytes=self.needed_bytes)


def plan_process_reads(
    wants: Wants, options: Options, processes: Sequence[int], job_size: int | None = None
) -> Iterator[ProcessReads]:
    """What each of these processes reads for its wants.

    If `job_size` is the number of processes of the job, all of them read together or none do.
    """
    stacks, host_bytes = wants.stacks, options.host_bytes
    known_rounds: dict[tuple[Partition, Community], list[SharedRead]] = {}
    for process in processes:
        needed = [wanted_range.rows_for(process) for wanted_range in wants.ranges]
        needed_bytes = sum(rows.n_elements * stacks[rows.stack].itemsize for rows in needed)
        own, shared = needed, dict[Partition, list[WantedRows]]()
        if wants.layouts is not None:
            own, shared = share(stacks, list(zip(needed, wants.layouts, strict=True)), process, job_size)
        rounds: dict[Partition, list[SharedRead]] = {}
        for partition, common in shared.items():
            community = community_of(partition, process)
            key = (partition, community)
            if common and key not in known_rounds:
                n_processes = sum(map(len, partition))
                known_rounds[key] = plan_shared_reads(stacks, common, community, host_bytes // len(shared), n_processes)
            rounds[partition] = known_rounds[key] if common else []
        yield ProcessReads(process, needed_bytes, plan_steps(stacks, own, host_bytes), rounds)
