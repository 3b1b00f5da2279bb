"""Reading what a plan says, within the memory that it may take: chunks are read into buffers, buffers handed over.

read ─▶ each step: buffers ─▶ each read of it: the store's reader fills them ─▶ the last one has landed ─▶ delivery
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxckpt._format import zarr
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, cut_down, extent, intersection, volume, whole, within
from jaxckpt._format.records import Manifest
from jaxckpt._format.stacks import Stack, indexed_objects_of
from jaxckpt._restore.plan import Read, ReadStep, Region, Run, Want, plan_read, read_bytes
from jaxckpt._restore.source import Native, Source, leaves_at
from jaxckpt._runtime.errors import DataError, NotACheckpointError
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import Report, unseen
from jaxckpt._storage.bucket import Bucket, Held
from jaxckpt._storage.store import Array, ArrayReader, Pending, aligned_empty, storage_errors


@contextlib.contextmanager
def undisturbed(source: Source) -> Generator[None]:
    """Where data is missing or another because the checkpoint is, say that instead of calling it corrupt."""
    try:
        yield
    except DataError as error:
        became = source.fate()
        if became is None:
            raise
        raise NotACheckpointError(f"the checkpoint at {source.url} was {became} while it was being read") from error


# What is read ---------------------------------------------------------------------------------------------


Buffers = list[list[Array]]
"""For each run of a step, the buffer of each box: [rows of the run, *sides of the box]. None of a streamed run."""


class Delivery(Protocol):
    """What becomes of what is read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Take the filled buffers of a step; returns the device arrays that are made of them."""
        ...

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Take a part of a box that has no buffer, (run, box); returns the device arrays that it goes into."""
        ...


def read(
    source: Source,
    stacks: Sequence[Stack],
    steps: Sequence[ReadStep],
    options: Options,
    delivery: Delivery,
    report: Report,
) -> None:
    """Carry out the steps, with at most `options.host_bytes` in flight; each is delivered when it is complete."""
    source.require_metadata(list(dict.fromkeys(step.stack for step in steps)))
    window = _Window(options.host_bytes)
    arrays: dict[int, ArrayReader] = {}
    with contextlib.ExitStack() as ended:
        fetched = None
        if isinstance(source, Native) and isinstance(source.store, Bucket):
            fetched = _Fetched(source.store, source.manifest, stacks, steps, options)
            ended.callback(fetched.close)
        for step in steps:
            stack = stacks[step.stack]
            window.take(step.held_bytes)
            filling = _Filling(step, DTYPES[stack.dtype], window, delivery)
            if step.stack not in arrays and fetched is None:
                arrays[step.stack] = source.array_reader(step.stack)
            for read in step.reads:
                window.take(read.held_bytes)
                leaves = functools.partial(leaves_at, source.manifest, step.stack)
                reading = _Reading(read, filling, report, leaves)
                if fetched is None:
                    reading.begin(arrays[step.stack])
                    window.later(reading.land)
                else:
                    fetched.begin(step.stack, read, reading, window)
        window.drain()


@dataclass(slots=True)
class _Touched:
    """An object that will be read from."""

    index: tuple[int, ...]
    key: str
    length: int
    digest: str
    n_elements: int
    wanted: int = 0
    """Elements that are wanted of it."""

    uses: int = 0
    """Reads that have yet to take something of it."""


class _Fetched:
    """Objects of an object store that are wanted whole: each is fetched in one request, checked, and read in memory."""

    def __init__(
        self, store: Bucket, manifest: Manifest, stacks: Sequence[Stack], steps: Sequence[ReadStep], options: Options
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._stacks = stacks
        self._held = Held(store, manifest.data)
        self._most_bytes = read_bytes(options.host_bytes)
        self._touched: dict[int, dict[tuple[int, ...], _Touched]] = {}
        for step in steps:
            found = self._touched.setdefault(step.stack, {})
            for region in step.regions:
                for index, part, obj in indexed_objects_of(stacks[step.stack], region.box):
                    if index not in found:
                        key = zarr.object_key(stacks[step.stack], index)
                        found[index] = _Touched(index, key, *manifest.stacks[step.stack].stored(index), volume(obj))
                    found[index].wanted += volume(part)
        for step in steps:
            for read in step.reads:
                for one in self._of(step.stack, read):
                    one.uses += 1

    def _of(self, number: int, read: Read) -> list[_Touched]:
        """The objects that a read wants something of, and that are fetched whole."""
        found = self._touched[number]
        indices = {
            index for region in read.regions for index, _, _ in indexed_objects_of(self._stacks[number], region.box)
        }
        ones = [found[index] for index in sorted(indices)]
        return [one for one in ones if one.wanted == one.n_elements and one.length <= self._most_bytes]

    def begin(self, number: int, read: Read, reading: _Reading, window: _Window) -> None:
        """Ask for what a read wants, once there is room for it."""
        wanted = self._of(number, read)
        window.take(sum(one.length for one in wanted))
        for one in wanted:
            self._held.fetch(one.key)
        window.later(functools.partial(self._land, number, wanted, reading, window))

    def _land(self, number: int, wanted: list[_Touched], reading: _Reading, window: _Window) -> None:
        """Wait for the objects of a read, then for the read itself."""
        stack = self._stacks[number]
        for one in wanted:
            problem = self._held.problem(one.key, stack, one.index, one.length, one.digest)
            if problem:
                rows = stack.object[0]
                leaves = leaves_at(self._manifest, number, (one.index[0] * rows, (one.index[0] + 1) * rows))
                where = f"{self._store.url}/{self._manifest.data}/{one.key}"
                raise DataError(f"{where} {problem}; it holds {leaves}")
        reading.begin(self._held.array_reader(stack, [one.key for one in wanted]))
        reading.land()
        for one in wanted:
            one.uses -= 1
            if not one.uses:
                self._held.drop(one.key)
        window.release(sum(one.length for one in wanted), None)

    def close(self) -> None:
        self._held.close()


class _Window:
    """Memory of the host in use beside the arrays, at most so many bytes of it: who takes more lets the oldest go."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._turns: deque[Callable[[], None]] = deque()
        self._free: list[Array] = []

    def take(self, n_bytes: int) -> None:
        while self._turns and self._held_bytes + n_bytes > self._most_bytes:
            self._turns.popleft()()
        self._held_bytes += n_bytes

    def release(self, n_bytes: int, block: Array | None) -> None:
        """Bytes are in use no more; nor is a block, which may be used again."""
        self._held_bytes -= n_bytes
        if block is not None and block.nbytes:
            self._free.append(block)

    def later(self, turn: Callable[[], None]) -> None:
        """Something that will release bytes, to be called in its turn."""
        self._turns.append(turn)

    def next(self, turn: Callable[[], None]) -> None:
        """As `later`, but before all others."""
        self._turns.appendleft(turn)

    def drain(self) -> None:
        while self._turns:
            self._turns.popleft()()

    def arrays(self, wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[Array, list[Array]]:
        """A block of memory, used before if there is one of about the size, and arrays cut from it."""
        sizes = [-(-math.prod(shape) * dtype.itemsize // 64) * 64 for shape, dtype in wanted]
        total = sum(sizes)
        block = next((found for found in self._free if total <= found.nbytes <= 2 * total), None)
        if block is None:
            if total:
                self._free.clear()  # so that what lies idle does not add to what is in use
            block = aligned_empty((total,), np.dtype(np.uint8))
        else:
            self._free = [found for found in self._free if found is not block]
        cut = [
            block[stop - size : stop][: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for (shape, dtype), size, stop in zip(wanted, sizes, itertools.accumulate(sizes), strict=True)
        ]
        return block, cut


class _Filling:
    """The buffers of a step that is being read."""

    def __init__(self, step: ReadStep, dtype: np.dtype[Any], window: _Window, delivery: Delivery) -> None:
        self.step = step
        self.dtype = dtype
        self.window = window
        self._delivery = delivery
        self._to_come = len(step.reads)
        self._block, cut = window.arrays([wanted for run in step.runs if run.passing for wanted in self._shapes(run)])
        rest = iter(cut)
        self._buffers: Buffers = [
            [] if run.streamed else [next(rest) if run.passing else _own(*found) for found in self._shapes(run)]
            for run in step.runs
        ]

    def _shapes(self, run: Run) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
        dtype = self.dtype if run.dtype is None else run.dtype
        return [(extent(run.held(box)), dtype) for box in range(len(run.boxes))]

    def place(self, region: Region) -> Array:
        """The part of the one buffer that a region serves."""
        ((run, box),) = region.serves
        return self._buffers[run][box][within(region.box, self.step.runs[run].held(box))]

    def scatter(self, region: Region, staged: Array) -> dict[Any, Any]:
        """Copy a staged region to what it serves; returns the device arrays that have it once they are ready."""
        sent: dict[Any, Any] = {}
        for at in region.serves:
            run, box = at
            held = self.step.runs[run].held(box)
            common = intersection(region.box, held)
            if common is None:
                continue
            data = staged[within(common, region.box)]
            if self.step.runs[run].streamed:
                sent.update(self._delivery.stream(self.step, at, common, data))
            else:
                target = self._buffers[run][box]
                assign(target[within(common, held)], data)
        return sent

    def landed(self) -> None:
        """One of the step's reads is complete; with the last of them the step is delivered."""
        self._to_come -= 1
        if not self._to_come:
            arrays = self._delivery.deliver(self.step, self._buffers)
            if self.step.held_bytes:
                self.window.next(lambda: _settle(arrays, self.window, self.step.held_bytes, self._block))
            self._buffers = []


class _Reading:
    """A read that is in flight."""

    def __init__(self, read: Read, filling: _Filling, report: Report, leaves: Callable[[tuple[int, int]], str]) -> None:
        self._pending: list[Pending] = []
        self._read = read
        self._filling = filling
        self._report = report
        self._leaves = leaves
        self._block, staged = filling.window.arrays(
            [(extent(region.box), filling.dtype) for region in read.regions if region.staged]
        )
        rest = iter(staged)
        self._targets = [next(rest) if region.staged else filling.place(region) for region in read.regions]

    def begin(self, array: ArrayReader) -> None:
        """Start reading all of it."""
        boxes = [region.box for region in self._read.regions]
        with self._naming((min(box[0][0] for box in boxes), max(box[0][1] for box in boxes))):
            self._pending = array.read(list(zip(boxes, self._targets, strict=True)))

    def land(self) -> None:
        """Wait for it and pass on what is staged."""
        sent: dict[Any, Any] = {}
        for region, target, pending in zip(self._read.regions, self._targets, self._pending, strict=True):
            with self._naming(region.box[0]):
                pending.result()
            if region.staged:
                sent.update(self._filling.scatter(region, target))
        self._report(self._read.n_bytes)
        if sent:
            self._filling.window.next(lambda: self._end(list(sent.values())))
        else:
            self._end([])

    def _naming(self, rows: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
        """Errors inside name the leaves in these rows."""
        return storage_errors(lambda: f"cannot read leaf {self._leaves(rows)}", reading=True)

    def _end(self, arrays: list[Any]) -> None:
        _settle(arrays, self._filling.window, self._read.held_bytes, self._block)
        self._filling.landed()


def _settle(arrays: list[Any], window: _Window, n_bytes: int, block: Array) -> None:
    """Release memory once the arrays that are made of it are on their devices."""
    if arrays:
        jax.block_until_ready(arrays)
    taken_over = any(device.platform == "cpu" for array in jax.tree.leaves(arrays)[:1] for device in array.devices())
    window.release(n_bytes, None if taken_over else block)


def _own(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory that becomes the caller's; objects lie in memory of NumPy's own making."""
    return np.empty(shape, dtype) if dtype.hasobject else aligned_empty(shape, dtype)


def assign(target: Array, source: Array) -> None:
    # What an unsafe cast loses was asked for: NumPy need not warn of it again.
    with np.errstate(all="ignore"):
        target[...] = np.real(source) if source.dtype.kind == "c" and target.dtype.kind != "c" else source


@dataclass(frozen=True, slots=True)
class Stored:
    """An array of a checkpoint; an index of slices reads what it touches."""

    source: Source
    number: int
    options: Options
    report: Report = unseen

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.manifest.leaf_shape(self.source.manifest.leaves[self.number])

    @property
    def dtype(self) -> np.dtype[Any]:
        manifest = self.source.manifest
        return DTYPES[manifest.stacks[manifest.place(manifest.leaves[self.number])[0]].dtype]

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        box = tuple(part.indices(side)[:2] for part, side in zip(index, self.shape, strict=True))
        array = read_box(self.source, self.number, box, self.options)
        self.report(array.nbytes)
        return array

    def slabs(self) -> Iterator[Array]:
        """All of it in C order, in pieces that fit `options.host_bytes`."""
        manifest = self.source.manifest
        stack = manifest.arrays[manifest.place(manifest.leaves[self.number])[0]]
        fits = max(1, read_bytes(self.options.host_bytes) // stack.itemsize)
        # Whole rows of chunks where they fit, so that no chunk is read twice; else cut along the next dimension.
        sides = [max(1, side) for side in stack.shape]
        grids = [
            [1] * dim + [chunk * max(1, fits // (chunk * math.prod(sides[dim + 1 :])))] + sides[dim + 1 :]
            for dim, chunk in enumerate(stack.chunk[1:])
        ]
        for box in cut_down(whole(stack.shape), grids, lambda box: volume(box) <= fits):
            yield self[tuple(slice(*side) for side in box)]


# One box --------------------------------------------------------------------------------------------------


class _OneBox:
    """Delivers to its caller."""

    array: Array

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        self.array = buffers[0][0][0]
        return []

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        raise NotImplementedError  # what the host wants is kept


def read_box(source: Source, number: int, box: Box, options: Options) -> Array:
    """One box of one leaf, as a NumPy array of the stored dtype."""
    manifest = source.manifest
    stack, row = manifest.place(manifest.leaves[number])
    stacks = manifest.arrays
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[stack].dtype])
    # One step however large: the buffer is the result.
    steps = plan_read(stacks, [Want(stack, (row, row + 1), (box,))], options.host_bytes)
    delivery = _OneBox()
    with undisturbed(source):
        read(source, stacks, steps, options, delivery, unseen)
    return delivery.array
