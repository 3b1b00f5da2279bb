"""Reads what a plan lists, within a memory limit: fills buffers with chunks, and delivers the buffers.

read ─▶ each step: buffers ─▶ each read of it: the store's reader fills them ─▶ the last read is complete ─▶ delivery
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, cut_down, extent, intersection, slices_within, volume, whole_box
from jaxckpt._format.pieces import Array, assign
from jaxckpt._format.stacks import Stack
from jaxckpt._format.values import KINDS
from jaxckpt._restore.plan import Read, ReadStep, Region, Run, WantedRows, max_read_bytes, plan_read
from jaxckpt._runtime.errors import DataError, NotACheckpointError, Problem
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import Report, report_nothing
from jaxckpt._sources.source import Source, leaves_at
from jaxckpt._storage.errors import translate_tensorstore_errors
from jaxckpt._storage.objects import ArrayReader, Pending
from jaxckpt._storage.workers import StorageThread, note_progress


@contextlib.contextmanager
def detect_replacement(source: Source, options: Options) -> Generator[None]:
    """If data is missing or different because the checkpoint was deleted or replaced, report that, not corruption."""
    try:
        yield
    except DataError as error:
        with StorageThread(options.timeout_seconds) as aside:
            became = aside.run(f"opening {source.url}", source.change_since_open)
        if became is None:
            raise
        raise NotACheckpointError(f"the checkpoint at {source.url} was {became} while it was being read") from error


def require_metadata(source: Source, stacks: Sequence[int], options: Options) -> None:
    """Raise DataError unless the small files that describe these stacks are as they were saved."""
    with StorageThread(options.timeout_seconds) as aside:
        aside.run(f"reading the metadata of {source.url}", lambda: source.require_metadata(stacks))


# What is read ---------------------------------------------------------------------------------------------


Buffers = list[list[Array]]
"""For each run of a step, the buffer of each box: [rows of the run, *sides of the box]. Empty for a streamed run."""


class Delivery(Protocol):
    """Receives the data that is read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Take the filled buffers of a step. Returns the device arrays created from them."""
        ...

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Take a part of a box without a buffer, (run, box). Returns the device arrays that receive it."""
        ...


def read(
    source: Source,
    stacks: Sequence[Stack],
    steps: Sequence[ReadStep],
    options: Options,
    delivery: Delivery,
    report: Report,
    before_read: Callable[[], None] = lambda: None,
) -> None:
    """Run the steps, with at most `options.host_bytes` in flight. Each step is delivered when it is complete.

    `before_read` is called before each read.

    Raises StorageError, also if the storage hangs.
    """
    planned: dict[int, list[ReadStep]] = {}
    for step in steps:
        planned.setdefault(step.stack, []).append(step)
    window = MemoryWindow(options.host_bytes)
    arrays: dict[int, ArrayReader] = {}
    with StorageThread(options.timeout_seconds) as aside:
        for step in steps:
            stack = step.stack
            window.acquire(step.held_bytes)
            filling = StepBuffers(step, DTYPES[stacks[stack].dtype], window, delivery)
            if stack not in arrays:
                plan = (read.boxes for planned_step in planned[stack] for read in planned_step.reads)
                arrays[stack] = source.array_reader(stack, plan)
            for read in step.reads:
                before_read()
                held_bytes = arrays[stack].buffered_bytes(read.boxes)
                window.acquire(read.held_bytes + held_bytes)
                pending = PendingRead(source, stack, aside)
                reading = _InFlightRead(read, held_bytes, filling, report, pending, arrays[stack].shares_chunks)
                pending.begin(arrays[stack], reading.wanted)
                window.defer(reading.finish)
        window.drain()


class PendingRead:
    """Boxes of a stack that are being read, from the call of `begin` until `wait` returns."""

    def __init__(self, source: Source, stack: int, aside: StorageThread) -> None:
        self._source = source
        self._stack = stack
        self._aside = aside
        self._doing = f"reading from {source.url}"
        self._pending: list[tuple[Box, Pending]] = []

    def begin(self, array: ArrayReader, wanted: Sequence[tuple[Box, Array]]) -> None:
        """Start to read each box into an array. Raises DataError, StorageError."""
        boxes = [box for box, _ in wanted]
        with self._naming((min(box[0][0] for box in boxes), max(box[0][1] for box in boxes))):
            pending = self._aside.run(self._doing, lambda: array.read(wanted))
        self._pending = list(zip(boxes, pending, strict=True))

    def wait(self) -> None:
        """Wait until all are read. Raises DataError, StorageError."""
        failed = self._aside.run(self._doing, self._first_failure)
        if failed is not None:
            with self._naming(failed[0][0]):
                raise failed[1]

    def _first_failure(self) -> tuple[Box, Exception] | None:
        for box, pending in self._pending:
            try:
                pending.result()
            except Exception as error:
                return box, error
            note_progress()
        return None

    def _naming(self, rows: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
        """A context in which errors name the leaves in these rows."""
        return translate_tensorstore_errors(
            lambda: f"cannot read {leaves_at(self._source.manifest, self._stack, rows)}", reading=True
        )


class MemoryWindow:
    """Host memory in use in addition to the arrays, with a limit. If `acquire` would exceed the limit, it first waits
    for the oldest reads and transfers."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._deferred: deque[Callable[[], None]] = deque()
        self._free: list[Array] = []

    def acquire(self, n_bytes: int) -> None:
        while self._deferred and self._held_bytes + n_bytes > self._max_bytes:
            self._deferred.popleft()()
        self._held_bytes += n_bytes

    def release(self, n_bytes: int, block: Array | None) -> None:
        """Release bytes, and a block, which may be reused."""
        self._held_bytes -= n_bytes
        if block is not None and block.nbytes:
            self._free.append(block)

    def defer(self, turn: Callable[[], None]) -> None:
        """Register a function that will release bytes, to be called in order."""
        self._deferred.append(turn)

    def defer_first(self, turn: Callable[[], None]) -> None:
        """Like `defer`, but before all others."""
        self._deferred.appendleft(turn)

    def drain(self) -> None:
        while self._deferred:
            self._deferred.popleft()()

    def allocate(self, wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[Array, list[Array]]:
        """A block of memory, reused if one of about the size is free, and arrays cut from it."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in wanted]
        total = sum(sizes)
        block = next((found for found in self._free if total <= found.nbytes <= 2 * total), None)
        if block is None:
            if total:
                self._free.clear()  # so that idle blocks do not add to memory in use
            block = aligned_empty((total,), np.dtype(np.uint8))
        else:
            self._free = [found for found in self._free if found is not block]
        cut = [
            block[stop - size : stop][: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for (shape, dtype), size, stop in zip(wanted, sizes, itertools.accumulate(sizes), strict=True)
        ]
        return block, cut


class StepBuffers:
    """The buffers of a step that is being read."""

    def __init__(self, step: ReadStep, dtype: np.dtype[Any], window: MemoryWindow, delivery: Delivery) -> None:
        self.step = step
        self.dtype = dtype
        self.window = window
        self._delivery = delivery
        self._n_reads_left = len(step.reads)
        self._block, cut = window.allocate(
            [wanted for run in step.runs if run.is_transient for wanted in self._shapes(run)]
        )
        rest = iter(cut)
        self._buffers: Buffers = [
            []
            if run.streamed
            else [next(rest) if run.is_transient else _allocate_array(*found) for found in self._shapes(run)]
            for run in step.runs
        ]

    def _shapes(self, run: Run) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        dtype = self.dtype if run.dtype is None else run.dtype
        return [(extent(run.buffer_box(box)), dtype) for box in range(len(run.boxes))]

    def views(self, region: Region) -> Iterator[tuple[Box, Array]]:
        """The part of each buffer that a region serves."""
        for run, box in region.serves:
            held = self.step.runs[run].buffer_box(box)
            if (common := intersection(region.box, held)) is not None:
                yield common, self._buffers[run][box][slices_within(common, held)]

    def scatter(self, region: Region, staged: Array) -> dict[Any, Any]:
        """Copy a staged region to its buffers. Returns the device arrays that will hold it."""
        sent: dict[Any, Any] = {}
        for at in region.serves:
            run, box = at
            held = self.step.runs[run].buffer_box(box)
            common = intersection(region.box, held)
            if common is None:
                continue
            data = staged[slices_within(common, region.box)]
            if self.step.runs[run].streamed:
                sent.update(self._delivery.stream(self.step, at, common, data))
            else:
                target = self._buffers[run][box]
                assign(target[slices_within(common, held)], data)
        return sent

    def finish_read(self) -> bool:
        """Note that a read of the step is complete. After the last read, deliver the step. Returns whether it did."""
        self._n_reads_left -= 1
        if not self._n_reads_left:
            arrays = self._delivery.deliver(self.step, self._buffers)
            if self.step.held_bytes:
                self.window.defer_first(
                    lambda: _release_when_ready(arrays, self.window, self.step.held_bytes, self._block)
                )
            self._buffers = []
        return not self._n_reads_left


class _InFlightRead:
    """A read that is in flight."""

    def __init__(
        self,
        read: Read,
        held_bytes: int,
        filling: StepBuffers,
        report: Report,
        pending: PendingRead,
        shares_chunks: bool,
    ) -> None:
        self._read = read
        self._held_bytes = held_bytes
        self._filling = filling
        self._report = report
        self._pending = pending
        staged, direct = list[Region](), list[Region]()
        for region in read.regions:
            is_aside = region.converted or (region.staged and not shares_chunks)
            (staged if is_aside else direct).append(region)
        self._block, arrays = filling.window.allocate([(extent(region.box), filling.dtype) for region in staged])
        self._staged = list(zip(staged, arrays, strict=True))
        self.wanted = [(region.box, target) for region, target in self._staged]
        self.wanted += itertools.chain.from_iterable(map(filling.views, direct))

    def finish(self) -> None:
        """Wait for the read, and copy staged data to its destination."""
        self._pending.wait()
        sent: dict[Any, Any] = {}
        for region, target in self._staged:
            sent.update(self._filling.scatter(region, target))
        self._filling.window.release(self._held_bytes, None)
        self._report(self._read.n_bytes)
        if sent:
            self._filling.window.defer_first(lambda: self._end(list(sent.values())))
        else:
            self._end([])

    def _end(self, arrays: list[Any]) -> None:
        _release_when_ready(arrays, self._filling.window, self._read.held_bytes, self._block)
        self._filling.finish_read()


def _release_when_ready(arrays: list[Any], window: MemoryWindow, n_bytes: int, block: Array) -> None:
    """Release memory after the arrays created from it are on their devices."""
    for array in arrays:
        array.block_until_ready()
    taken_over = any(device.platform == "cpu" for array in arrays[:1] for device in array.devices())
    window.release(n_bytes, None if taken_over else block)


def _allocate_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory that is handed to the caller. Object arrays use memory that NumPy allocates."""
    return np.empty(shape, dtype) if dtype.hasobject else aligned_empty(shape, dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialized memory with 64-byte alignment, which JAX on CPU uses without a copy."""
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(n_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + n_bytes].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a checkpoint. Indexing with slices reads only what the index touches."""

    source: Source
    number: int
    options: Options
    report: Report = report_nothing

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.manifest.leaf_shape(self.source.manifest.leaves[self.number])

    @property
    def dtype(self) -> np.dtype[Any]:
        manifest = self.source.manifest
        return DTYPES[manifest.stacks[manifest.stack_and_row(manifest.leaves[self.number])[0]].dtype]

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        box = tuple(part.indices(side)[:2] for part, side in zip(index, self.shape, strict=True))
        array = read_box(self.source, self.number, box, self.options)
        self.report(array.nbytes)
        return array

    def slabs(self) -> Iterator[Array]:
        """The whole array in C order, in pieces that fit `options.host_bytes`."""
        manifest = self.source.manifest
        stack = manifest.decoded_stacks[manifest.stack_and_row(manifest.leaves[self.number])[0]]
        fits = max(1, max_read_bytes(self.options.host_bytes) // stack.itemsize)
        # Whole rows of chunks if they fit, so that no chunk is read twice. Otherwise cut along the next dimension.
        sides = [max(1, side) for side in stack.shape]
        grids = [
            [1] * dim + [chunk * max(1, fits // (chunk * math.prod(sides[dim + 1 :])))] + sides[dim + 1 :]
            for dim, chunk in enumerate(stack.chunk[1:])
        ]
        for box in cut_down(whole_box(stack.shape), grids, lambda box: volume(box) <= fits):
            yield self[tuple(slice(*side) for side in box)]


# One box --------------------------------------------------------------------------------------------------


class _OneBox:
    """A delivery that keeps the buffers for its caller."""

    array: Array

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        self.array = buffers[0][0][0]
        return []

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        raise NotImplementedError  # host reads always have buffers


def read_box(source: Source, number: int, box: Box, options: Options) -> Array:
    """Read one box of one leaf as a NumPy array of the stored dtype."""
    manifest = source.manifest
    stack, row = manifest.stack_and_row(manifest.leaves[number])
    stacks = manifest.decoded_stacks
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[stack].dtype])
    # Always a single step, because the buffer is the result.
    steps = plan_read(stacks, [WantedRows(stack, (row, row + 1), (box,))], options.host_bytes)
    delivery = _OneBox()
    with detect_replacement(source, options):
        require_metadata(source, [stack], options)
        read(source, stacks, steps, options, delivery, report_nothing)
    return delivery.array


def host_value(array: Array, kind: str, path: str) -> Any:
    """The value of a host leaf from the read array. Raises DataError."""
    try:
        return KINDS[kind].from_array(array)
    except UnicodeDecodeError as error:
        raise DataError.of(
            "a leaf is not what was saved",
            [Problem(path, f"is a str, but what is stored is not UTF-8: {error.reason}")],
        ) from error
