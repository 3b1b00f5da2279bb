"""Reads what a plan lists, within a memory limit: fills buffers with chunks, and delivers the buffers.

each step: buffers ─▶ each read of it: the store's reader fills them ─▶ the last read is complete ─▶ delivery to devices
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, cut_to_size, extent, slices_within, volume, whole_box
from jaxckpt._model.pieces import Array, aligned_empty, assign
from jaxckpt._model.records import SavedLeaf
from jaxckpt._model.stacks import Stack
from jaxckpt._model.values import KINDS
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import operate, run_alone
from jaxckpt._pipeline.pipeline import Budget, Pending, pipeline
from jaxckpt._pipeline.progress import Report, report_nothing
from jaxckpt._pipeline.workers import note_progress, work_alone
from jaxckpt._restore.read_plan import Read, ReadStep, Region, WantedRows, common_box, max_read_bytes, plan_steps
from jaxckpt._sources.source import NativeCheckpoint, Source, paths_at, show_leaves
from jaxckpt._store.storage_errors import translate_leaf_errors
from jaxckpt._store.store import ArrayReader
from jaxckpt.errors import DataError, NotACheckpointError, Problem


@contextlib.contextmanager
def detect_replacement(source: Source, numbers: Collection[int]) -> Generator[None]:
    """Around a read of the leaves with these numbers: reports that the checkpoint was deleted or replaced, in place of
    its data, or as the reason why data is missing or different. In a lane."""
    try:
        yield
        source.require_unchanged(numbers)
    except DataError as error:
        change = operate(f"opening {source.url}", source.change_since_open)
        if change is None:
            raise
        raise NotACheckpointError(f"the checkpoint at {change} while it was being read") from error


SMALL_BYTES = 1 << 20
"""A call that reads no more, in one read, reads in its own thread."""


# What is read ---------------------------------------------------------------------------------------------


Buffers = list[list[Array]]
"""For each want of a step, the buffer of each box: [rows of the want, *sides of the box]. Empty for a streamed want."""


class Delivery(Protocol):
    """Receives the data that is read: in a restore a `LeafBuilder`, which creates the arrays on the devices."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Take the filled buffers of a step. Returns the device arrays created from them."""
        ...

    def stream(self, step: ReadStep, at: tuple[int, int], region: Box, data: Array) -> dict[Any, Any]:
        """Take a part of a box without a buffer, (want, box). Returns the device arrays that receive it."""
        ...


PlannedRead = tuple[ReadStep, Read]
"""A read, and the step to which it belongs."""


def reads_of(steps: Iterable[ReadStep]) -> Iterator[PlannedRead]:
    """The reads of these steps, in order."""
    return ((step, read) for step in steps for read in step.reads)


def run_steps(
    source: Source,
    steps: Sequence[ReadStep],
    options: Options,
    delivery: Delivery,
    report: Report,
    arrivals: Iterable[object] | None = None,
) -> None:
    """Run the steps, with at most `options.host_bytes` in flight. Each step is delivered when it is complete.

    If other processes send some of the data, `arrivals` yields when each read, in order, can begin.

    In a lane. Raises StorageError.
    """
    budget = Budget(options.host_bytes)
    reader = _Reader(source, steps, delivery, budget)
    reads = list(reads_of(steps))
    ready = reads if arrivals is None else (planned for planned, _ in zip(reads, arrivals, strict=False))
    is_small = len(reads) == 1 and reads[0][1].n_bytes <= SMALL_BYTES
    with work_alone() if is_small else contextlib.nullcontext():
        for (_, read), arriving in pipeline(ready, reader.n_bytes, reader.begin, budget):
            arriving.place()
            report(read.n_bytes)


class _Reader:
    """Begins the reads of steps."""

    def __init__(self, source: Source, steps: Sequence[ReadStep], delivery: Delivery, budget: Budget) -> None:
        self._source = source
        self._delivery = delivery
        self._budget = budget
        self._memory = MemoryPool()
        self._boxes: dict[int, list[list[Box]]] = {}
        for step in steps:
            self._boxes.setdefault(step.stack, []).extend(read.boxes for read in step.reads)
        self._readers: dict[int, ArrayReader] = {}
        self._filling: StepBuffers | None = None

    def _reader(self, stack: int) -> ArrayReader:
        if stack not in self._readers:
            self._readers[stack] = self._source.array_reader(stack, self._boxes[stack])
        return self._readers[stack]

    def n_bytes(self, planned: PlannedRead) -> int:
        """Host memory that must be free before a read begins: for the first read of a step, also for its buffers."""
        step, read = planned
        return self._moving_bytes(step, read) + step.held_bytes * (read is step.reads[0])

    def _moving_bytes(self, step: ReadStep, read: Read) -> int:
        return read.held_bytes + self._reader(step.stack).buffered_bytes(read.boxes)

    def begin(self, planned: PlannedRead) -> _ArrivingRead:
        step, read = planned
        reader, n_bytes = self._reader(step.stack), self._moving_bytes(step, read)
        if self._filling is None or self._filling.step is not step:
            dtype = DTYPES[self._source.manifest.stacks[step.stack].dtype]
            self._budget.take(step.held_bytes)
            self._filling = StepBuffers(step, dtype, self._budget, self._memory, self._delivery)
        filling = self._filling
        separate, direct = list[Region](), list[Region]()
        for region in read.regions:
            (separate if region.is_separate(shares_chunks=reader.shares_chunks) else direct).append(region)
        block, buffers = self._memory.allocate([(extent(region.box), filling.dtype) for region in separate])
        targets = [(region.box, buffer) for region, buffer in zip(separate, buffers, strict=True)]
        targets += itertools.chain.from_iterable(map(filling.views, direct))
        pending = PendingRead.begin(self._source, step.stack, reader, targets)
        return _ArrivingRead(n_bytes, filling, block, list(zip(separate, buffers, strict=True)), pending)


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Boxes of a stack that are being read."""

    source: Source
    stack: int
    pending_boxes: Sequence[tuple[Box, Pending[None]]]

    @classmethod
    def begin(cls, source: Source, stack: int, reader: ArrayReader, targets: Sequence[tuple[Box, Array]]) -> Self:
        """Start to read each box into an array. Raises DataError, StorageError."""
        boxes = [box for box, _ in targets]
        with _naming(source, stack, (min(box[0][0] for box in boxes), max(box[0][1] for box in boxes))):
            pending = operate(f"reading from {source.url}", lambda: reader.read(targets))
        return cls(source, stack, list(zip(boxes, pending, strict=True)))

    def done(self) -> bool:
        return all(pending.done() for _, pending in self.pending_boxes)

    def wait(self) -> None:
        """Wait until all are read. Raises DataError, StorageError."""
        failed = operate(f"reading from {self.source.url}", self._first_failure)
        if failed is not None:
            box, error = failed
            del failed
            with _naming(self.source, self.stack, box[0]):
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame, and the frames hold the buffers

    def _first_failure(self) -> tuple[Box, Exception] | None:
        for box, pending in self.pending_boxes:
            try:
                pending.result()
            except Exception as error:
                return box, error
            note_progress()
        return None


@contextlib.contextmanager
def _naming(source: Source, stack: int, rows: tuple[int, int]) -> Generator[None]:
    """A context in which errors name the leaves in these rows of a stack."""
    try:
        yield
    except Exception as error:  # the leaves are found only now, because there may be thousands
        if isinstance(source, NativeCheckpoint) and (damaged := getattr(error, "rows", None)):
            rows = max(damaged[0], rows[0]), min(damaged[1], rows[1])
        paths = paths_at(source.manifest, stack, rows)
        with translate_leaf_errors(f"cannot read {show_leaves(paths)}", paths):
            raise


class MemoryPool:
    """Blocks of memory that are used again, because touching new memory takes longer than reading into it."""

    def __init__(self) -> None:
        self._free: list[Array] = []

    def allocate(self, forms: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[Array, list[Array]]:
        """A block of memory, reused if one of about the size is free, and arrays of these shapes and dtypes in it."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in forms]
        total = sum(sizes)
        block = next((free for free in self._free if total <= free.nbytes <= 2 * total), None)
        if block is None:
            if total:
                self._free.clear()  # so that idle blocks do not add to memory in use
            block = aligned_empty((total,), np.dtype(np.uint8))
        else:
            self._free = [free for free in self._free if free is not block]
        arrays = [
            block[stop - size : stop][: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for (shape, dtype), size, stop in zip(forms, sizes, itertools.accumulate(sizes), strict=True)
        ]
        return block, arrays

    def take_back_from(self, arrays: Sequence[Any], block: Array) -> None:
        """Wait until a block has been transferred to these arrays. It is then free, unless a CPU device has taken it
        over, or part of it."""
        for array in arrays:
            array.block_until_ready()
        if block.nbytes and not any(device.platform == "cpu" for array in arrays[:1] for device in array.devices()):
            self._free.append(block)


class StepBuffers:
    """The buffers of a step that is being read."""

    def __init__(
        self, step: ReadStep, dtype: np.dtype[Any], budget: Budget, memory: MemoryPool, delivery: Delivery
    ) -> None:
        self.step = step
        self.dtype = dtype
        self.memory = memory
        self._budget = budget
        self._delivery = delivery
        self._n_reads_left = len(step.reads)
        self._block, arrays = memory.allocate(
            [form for want in step.wants if want.is_transient for form in self._forms(want)]
        )
        transient = iter(arrays)
        self._buffers: Buffers = [
            []
            if want.streamed
            else [next(transient) if want.is_transient else aligned_empty(*form) for form in self._forms(want)]
            for want in step.wants
        ]

    def _forms(self, want: WantedRows) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        dtype = self.dtype if want.dtype is None else want.dtype
        return [(extent(want.buffer_box(box)), dtype) for box in range(len(want.boxes))]

    def views(self, region: Region) -> Iterator[tuple[Box, Array]]:
        """The part of each buffer that a region serves."""
        for at in region.serves:
            common = common_box(self.step.wants, region, at)
            yield common, self._view(at, common)

    def _view(self, at: tuple[int, int], box: Box) -> Array:
        """A box of the stack in a buffer."""
        want, box_number = at
        return self._buffers[want][box_number][slices_within(box, self.step.wants[want].buffer_box(box_number))]

    def scatter(self, region: Region, source: Array) -> dict[Any, Any]:
        """Copy a separate region to its buffers. Returns the device arrays that will hold it."""
        sent: dict[Any, Any] = {}
        for at in region.serves:
            common = common_box(self.step.wants, region, at)
            data = source[slices_within(common, region.box)]
            if self.step.wants[at[0]].streamed:
                sent.update(self._delivery.stream(self.step, at, common, data))
            else:
                assign(self._view(at, common), data)
        return sent

    def deliver_if_complete(self) -> bool:
        """Note that a read of the step has ended. After the last one, deliver the step. Returns whether it did."""
        self._n_reads_left -= 1
        if not self._n_reads_left:
            arrays = self._delivery.deliver(self.step, self._buffers)
            if self.step.held_bytes:
                self._budget.free(self.step.held_bytes)
                in_use = functools.partial(self.memory.take_back_from, arrays, self._block)
                self._budget.take_until_done(self.step.held_bytes, in_use)
            self._buffers = []
        return not self._n_reads_left


@dataclass(frozen=True, slots=True)
class _ArrivingRead:
    """A read that is in flight: memory for separate regions, and the buffers that it fills."""

    n_bytes: int
    filling: StepBuffers
    block: Array
    """The memory of the separate regions."""

    separate: Sequence[tuple[Region, Array]]
    pending: PendingRead

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> _ArrivingRead:
        self.pending.wait()
        return self

    def place(self) -> None:
        """Copy separate regions to their buffers, and deliver the step if this was its last read."""
        sent: dict[Any, Any] = {}
        for region, target in self.separate:
            sent.update(self.filling.scatter(region, target))
        # Complete now, because the next read may donate the arrays that collect the parts of a streamed box.
        arrays = [array for device_arrays in sent.values() for array in device_arrays]
        self.filling.memory.take_back_from(arrays, self.block)
        self.filling.deliver_if_complete()


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a checkpoint. Indexing with slices reads only what the index touches."""

    source: Source
    number: int
    options: Options
    report: Report = report_nothing

    @property
    def _stack(self) -> Stack:
        manifest = self.source.manifest
        return SavedLeaf(manifest, manifest.leaves[self.number]).stack

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stack.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self._stack.dtype]

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        box = tuple(entry.indices(side)[:2] for entry, side in zip(index, self.shape, strict=True))
        array = read_box(self.source, self.number, box, self.options)
        self.report(array.nbytes)
        return array

    def slabs(self) -> Iterator[Array]:
        """The whole array in C order, in pieces that fit `options.host_bytes`."""
        stack = self._stack
        fits = max(1, max_read_bytes(self.options.host_bytes) // stack.itemsize)
        # Whole rows of chunks if they fit, so that no chunk is read twice. Otherwise cut along the next dimension.
        sides = [max(1, side) for side in stack.shape]
        grids = [
            [1] * dim + [chunk * max(1, fits // (chunk * math.prod(sides[dim + 1 :])))] + sides[dim + 1 :]
            for dim, chunk in enumerate(stack.chunk_sides[1:])
        ]
        for box in cut_to_size(whole_box(stack.shape), grids, fits):
            yield self[tuple(slice(*side) for side in box)]


# One box --------------------------------------------------------------------------------------------------


class _OneBox:
    """A delivery that keeps the buffers for its caller."""

    array: Array

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        self.array = buffers[0][0][0]
        return []

    def stream(self, step: ReadStep, at: tuple[int, int], region: Box, data: Array) -> dict[Any, Any]:
        raise NotImplementedError  # host reads always have buffers


def read_box(source: Source, number: int, box: Box, options: Options) -> Array:
    """Read one box of one leaf as a NumPy array of the stored dtype."""
    manifest = source.manifest
    stack, row = manifest.stack_and_row(manifest.leaves[number])
    stacks = manifest.decoded_stacks
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[stack].dtype])
    # Always a single step, because the buffer is the result.
    steps = plan_steps(stacks, [WantedRows(stack, (row, row + 1), (box,))], options.host_bytes)
    delivery = _OneBox()

    def read_step() -> Array:
        with detect_replacement(source, [number]):
            source.require_metadata([stack])
            run_steps(source, steps, options, delivery, report_nothing)
        return delivery.array

    return run_alone(read_step, options.timeout_seconds)


def host_value(array: Array, kind: str, path: str) -> Any:
    """The value of a host leaf from the read array. Raises DataError."""
    try:
        return KINDS[kind].from_array(array)
    except UnicodeDecodeError as error:
        raise DataError.of(
            "a leaf is not what was saved",
            [Problem(path, f"is a str, but what is stored is not UTF-8: {error.reason}")],
        ) from error
