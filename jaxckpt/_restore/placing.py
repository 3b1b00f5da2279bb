"""Reads the data for the goals, and creates the leaves' values from it, on the host or on the devices."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, Layout, extent, volume, whole_box
from jaxckpt._format.layouts import PlannedSharding, addressable_boxes, memory_kind, process_layout
from jaxckpt._format.pieces import Array, assign
from jaxckpt._format.records import LeafRecord, Manifest
from jaxckpt._format.stacks import Stack
from jaxckpt._format.values import KINDS, decode_value
from jaxckpt._restore.blocks import place_rows, rows_per_block, transfer_dtype
from jaxckpt._restore.gathering import gather, needs_whole_job, require_agreement
from jaxckpt._restore.goals import Goal
from jaxckpt._restore.passing import PeerReads, requests_by_read
from jaxckpt._restore.plan import ReadStep, WantedRows, max_read_bytes, plan_read
from jaxckpt._restore.pooled import PooledCheckpoint
from jaxckpt._restore.reading import Buffers, detect_replacement, read, require_metadata
from jaxckpt._restore.sharing import Partition, Round, members_of, plan_rounds, share, wants_digest
from jaxckpt._restore.source import Source
from jaxckpt._runtime.errors import DataError, ManifestError, Problem, show_path
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.processes import Meeting
from jaxckpt._runtime.progress import display_progress
from jaxckpt._save.exchange import own_mesh, transfer_context

WHOLE_BYTES = 256 << 10
"""Smaller leaves are read whole and cut by JAX. Larger leaves are read piece by piece into buffers that JAX takes over,
so that nothing is copied; for leaves of 64 KiB this takes more CPU time."""

CALLBACK_DEVICES = 1024
"""Up to this number of devices of a sharding, one call of `jax.make_array_from_callback` places all pieces of a leaf:
120 µs of CPU time for 8 pieces, of which `jax.device_put` takes 650. The call computes the boxes of all devices of the
job, once for each shape: 1 µs for each device."""


# Reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Destination:
    """The destination of a leaf's boxes: for each box that is read, its devices; none for the host."""

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]

    whole: bool
    """Whether the single box is passed to JAX with the sharding, and JAX cuts it."""

    together: bool
    """Whether one call of JAX places all boxes of a leaf; otherwise, one places each box."""

    kept: bool
    """Whether the read buffers become the arrays."""

    block_rows: int = 0
    """How many leaves are placed together; 0 if they are placed one by one."""


class _Destinations:
    """The destination of each goal. Equal goals are computed once."""

    def __init__(self, stacks: Sequence[Stack], by_stack: Mapping[int, _GoalsByRow], options: Options) -> None:
        self._stacks = stacks
        self._by_stack = by_stack
        self._whole_bytes = min(WHOLE_BYTES, max_read_bytes(options.host_bytes) + 1)
        self._by_key: dict[tuple[Any, ...], _Destination] = {}

    def of(self, goal: Goal, stack: int) -> _Destination:
        key = (stack, goal.sharding, goal.on_devices, goal.cast)
        if key not in self._by_key:
            self._by_key[key] = self._compute(goal, self._stacks[stack], len(self._by_stack[stack]))
        return self._by_key[key]

    def _compute(self, goal: Goal, stack: Stack, n_leaves: int) -> _Destination:
        dtype, sharding = _wanted_dtype(stack, goal), goal.sharding
        n_bytes = volume(whole_box(stack.shape)) * dtype.itemsize
        places, is_whole = dict[Box, Sequence[Any]](), True
        if sharding is None:
            places[whole_box(stack.shape)] = (None,)
        elif sharding.is_fully_addressable and n_bytes < self._whole_bytes:  # pyright: ignore
            places[whole_box(stack.shape)] = ()
        else:
            places, is_whole = local_boxes(sharding, stack.shape), False  # pyright: ignore[reportArgumentType]
        block_rows, is_together = 0, False
        if goal.on_devices and not isinstance(sharding, PlannedSharding):
            boxes = None if is_whole else list(places)
            block_rows = rows_per_block(sharding, stack.shape, dtype, boxes, n_leaves)
            is_together = sharding is not None and len(sharding.device_set) <= CALLBACK_DEVICES
        devices = tuple(map(tuple, places.values()))
        is_kept = can_keep_buffers(goal) and not block_rows
        return _Destination(tuple(places), devices, is_whole, is_together, is_kept, block_rows)


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


def fetch(
    source: Source,
    goals: Mapping[int, Goal],
    options: Options,
    meeting: Meeting | None = None,
    *,
    tied: bool = False,
    pooled: PooledCheckpoint | None = None,
) -> dict[int, Any]:
    """The value of every goal by leaf number. If `tied`, leaves that share a row and a goal become one value.

    `pooled` is the source, or what the source reads from, if that lies in folders of several processes.

    In a meeting of processes that all call this, each checks some of the small files that describe stacks. They read
    for each other if `options.read` is "shared".
    """
    representative: dict[int, int] = {}
    if tied:
        first = dict[tuple[int, Goal], int]()
        ties = source.manifest.ties
        representative = {
            number: first.setdefault((ties.get(number, number), goal), number) for number, goal in goals.items()
        }
        goals = {number: goals[number] for number in representative.values()}
    stacks = source.manifest.decoded_stacks
    process, processes = (meeting.group.index, meeting.group.count) if meeting is not None else (0, 1)
    values: dict[int, Any] = {}
    for some in split_tied_goals(source.manifest, goals):
        steps, shared, leaves = _plan_reads(source, some, options, values, meeting)
        total = sum(step.n_bytes for step in steps)
        total += sum(one.read.n_bytes for each in shared.values() for portions in each for one in portions)
        with detect_replacement(source, options), display_progress("restore", total, options.progress) as advance:
            require_metadata(source, leaves.stacks[process::processes], options)
            if shared and meeting is not None:
                gather(source, stacks, shared, options, leaves, advance, meeting)
            if pooled is not None and meeting is not None:
                with PeerReads(pooled, requests_by_read(source, steps), options, meeting) as arrivals:
                    read(source, stacks, steps, options, leaves, advance, arrivals.wait_for_next_read)
            else:
                read(source, stacks, steps, options, leaves, advance)
        leaves.create_empty_leaves()
    for number, goal in goals.items():
        if goal.weak:
            values[number] = _weakly_typed(values[number])
    return values | {number: values[one] for number, one in representative.items()}


def split_tied_goals(manifest: Manifest, goals: Mapping[int, Goal]) -> list[Mapping[int, Goal]]:
    """The goals in rounds, so that no two leaves of a round share a row. Separate arrays are read separately."""
    ties = manifest.ties
    if not ties:
        return [goals]
    by_round: list[dict[int, Goal]] = []
    turns = collections.Counter[int]()
    for number, goal in goals.items():
        first = ties.get(number, number)
        if turns[first] == len(by_round):
            by_round.append({})
        by_round[turns[first]][number] = goal
        turns[first] += 1
    return [*by_round]


def _plan_reads(
    source: Source, goals: Mapping[int, Goal], options: Options, values: dict[int, Any], meeting: Meeting | None
) -> tuple[list[ReadStep], dict[Partition, list[Round]], _LeafBuilder]:
    """The reads for goals whose leaves do not share rows, by this process alone and by several for each other, and the
    builder that stores the results in `values`. Values in the manifest are stored immediately."""
    manifest = source.manifest
    stacks = manifest.decoded_stacks
    by_stack: dict[int, _GoalsByRow] = {}
    destinations = _Destinations(stacks, by_stack, options)
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.stack is None or record.row is None:
            values[number] = _from_text(record, goal)
        else:
            by_stack.setdefault(record.stack, {})[record.row] = number, goal
    wanted: list[tuple[WantedRows, Goal]] = []
    for stack, rows_of in by_stack.items():
        for rows, goal in _ranges(rows_of):
            destination = destinations.of(goal, stack)
            wanted.append((WantedRows(stack, rows, destination.boxes, goal.cast, destination.kept), goal))
    wants = [want for want, _ in wanted]
    shared: dict[Partition, list[Round]] = {}
    if options.read == "shared" and meeting is not None and meeting.group.count > 1:
        group = meeting.group
        laid_out = [(want, goal_layout(goal, stacks[want.stack].shape, range(group.count))) for want, goal in wanted]
        require_agreement(meeting, f"{wants_digest(laid_out)} {options.host_bytes}")  # the rounds also depend on this
        meeting.start_next()
        wants, common = share(stacks, laid_out, group.index, group.count if needs_whole_job() else None)
        for partition, some in common.items():
            members = members_of(partition, group.index)
            shared[partition] = plan_rounds(stacks, some, members, options.host_bytes) if some else []
    steps = plan_read(stacks, wants, options.host_bytes)
    return steps, shared, _LeafBuilder(manifest, stacks, by_stack, destinations, values)


def goal_layout(goal: Goal, shape: tuple[int, ...], processes: Iterable[int]) -> Layout:
    """The cells of a leaf, and the processes that need each: all of them if it has no sharding."""
    if goal.sharding is None:
        return Layout((1,) * len(shape), (tuple(processes),))
    if isinstance(goal.sharding, PlannedSharding):
        return goal.sharding.layout(shape)
    return process_layout(goal.sharding, shape)


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type and the same buffers. JAX has no public function for this."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)


_GoalsByRow = dict[int, tuple[int, Goal]]
"""(leaf number, its goal) of rows of a stack."""


def _ranges(goals: _GoalsByRow) -> Iterator[tuple[tuple[int, int], Goal]]:
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


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices need, with the devices that need it."""
    places: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        places.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return places


# Handing over ---------------------------------------------------------------------------------------------


_GC_THRESHOLD = 100_000
"""Objects created between two runs of Python's garbage collector while arrays are created; Python's default is 700."""


@contextlib.contextmanager
def infrequent_gc() -> Generator[None]:
    """Run Python's garbage collector rarely in the block. It would repeatedly traverse all objects of the process while
    thousands of arrays are created. 20,000 leaves onto 8 devices take 1.3 s of CPU instead of 1.7."""
    usual = gc.get_threshold()
    if not 0 < usual[0] < _GC_THRESHOLD:  # the collector is off, or another thread is in this block
        yield
        return
    try:
        gc.set_threshold(_GC_THRESHOLD, *usual[1:])
        yield
    finally:
        if gc.get_threshold()[0] == _GC_THRESHOLD:
            gc.set_threshold(*usual)


@dataclass(frozen=True, slots=True)
class _LeafBuilder:
    """Creates the values of leaves from the read data."""

    _manifest: Manifest
    _stacks: Sequence[Stack]
    _by_stack: Mapping[int, _GoalsByRow]
    _destinations: _Destinations
    _values: dict[int, Any]
    _parts: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict[tuple[int, int, int], list[Any]])
    """By stack, row and box: an array for each device that needs it, if already read."""

    @property
    def stacks(self) -> list[int]:
        """The stacks of these leaves, equal in every process."""
        return sorted(self._by_stack)

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Turn rows into host arrays, or send them to the devices in one batched call."""
        with infrequent_gc():
            return self._deliver(step, buffers)

    def _deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """`deliver`, while Python's garbage collector runs rarely."""
        hosts: list[Array] = []
        targets: list[Any] = []
        pieces: list[tuple[list[int], Goal, int]] = []
        others: list[Any] = []
        for run, filled in zip(step.runs, buffers, strict=True):
            for (start, stop), goal in _ranges({row: self._by_stack[step.stack][row] for row in range(*run.rows)}):
                leaves = [self._by_stack[step.stack][row][0] for row in range(start, stop)]
                destination = self._destinations.of(goal, step.stack)
                # Boxes that only other processes need were read for them.
                own = [run.boxes.index(box) for box in destination.boxes]
                if not own:
                    continue
                if run.streamed:
                    for row, leaf in enumerate(leaves, start):
                        self._finish_streamed(leaf, goal, step.stack, row, own)
                    continue
                parts = [filled[box][start - run.rows[0] : stop - run.rows[0]] for box in own]
                rows = list(map(_split_rows, parts))
                if goal.kind == "numpy":
                    self._values.update(zip(leaves, rows[0], strict=True))
                elif not goal.on_devices:
                    for leaf, view in zip(leaves, rows[0], strict=True):
                        self._values[leaf] = host_value(view, goal.kind, self._manifest.leaves[leaf].path)
                elif destination.block_rows:
                    devices = None if destination.whole else destination.devices
                    placed = place_rows(parts, goal.sharding, devices, destination.block_rows)
                    for leaf, arrays in zip(leaves, placed, strict=True):
                        self._finish(leaf, goal, self._join(goal, step.stack, arrays))
                        others.extend(arrays)
                elif destination.whole:
                    hosts.extend(rows[0])
                    targets.extend([goal.sharding] * len(leaves))
                    pieces.append((leaves, goal, 1))
                elif destination.together:
                    shape = self._stacks[step.stack].shape
                    for leaf, *views in zip(leaves, *rows, strict=True):
                        array = _place_boxes(shape, goal.sharding, destination.boxes, views)
                        self._finish(leaf, goal, array)
                        others.append(array)
                else:
                    wanted = [device for devices in destination.devices for device in devices]
                    for views in zip(*rows, strict=True):
                        for view, devices in zip(views, destination.devices, strict=True):
                            hosts.extend([view] * len(devices))
                        targets.extend(wanted)
                    pieces.append((leaves, goal, len(wanted)))
        placed = jax.device_put(hosts, targets) if hosts else []
        rest = iter(placed)
        for leaves, goal, count in pieces:
            if goal.kind == "jax" and self._destinations.of(goal, step.stack).whole:
                self._values.update(zip(leaves, itertools.islice(rest, len(leaves)), strict=True))
            else:
                for leaf in leaves:
                    self._finish(leaf, goal, self._join(goal, step.stack, list(itertools.islice(rest, count))))
        return [*placed, *others]

    def _finish_streamed(self, leaf: int, goal: Goal, stack: int, row: int, boxes: Sequence[int]) -> None:
        """Create a leaf whose boxes were gathered on the devices."""
        parts = [part for box in boxes for part in self._parts.pop((stack, row, box))]
        dtype = _wanted_dtype(self._stacks[stack], goal)
        self._finish(leaf, goal, self._join(goal, stack, [_as_dtype(part, dtype) for part in parts]))

    def stream(self, step: ReadStep, at: tuple[int, int], part: Box, data: Array) -> dict[Any, Any]:
        """Copy a part of a large box to its devices, into the array that collects the parts there."""
        run, number = at
        box = step.runs[run].boxes[number]
        touched: dict[Any, Any] = {}
        for offset, row in enumerate(range(*part[0])):
            _, goal = self._by_stack[step.stack][row]
            destination = self._destinations.of(goal, step.stack)
            if box not in destination.boxes:
                continue
            devices = destination.devices[destination.boxes.index(box)]
            piece = _cast(data[offset], goal)
            key = (step.stack, row, number)
            if part[1:] == box:
                placed = jax.device_put([piece] * len(devices), list(devices))
            else:
                piece = piece.view(transfer_dtype(piece.dtype))
                starts = tuple(start - origin for (start, _), (origin, _) in zip(part[1:], box, strict=True))
                wholes = self._parts.get(key) or [None] * len(devices)
                placed = jax.device_put([piece] * len(devices), list(devices))
                each = zip(wholes, placed, devices, strict=True)
                placed = [_insert_part(whole, part, starts, extent(box), device) for whole, part, device in each]
            touched[key] = self._parts[key] = placed
        return touched

    def create_empty_leaves(self) -> None:
        """Create leaves without elements, for which nothing was read."""
        wanted = [(number, *row) for number, rows in self._by_stack.items() for row in rows.values()]
        for number, leaf, goal in wanted:
            if leaf in self._values:
                continue
            stack = self._stacks[number]
            dtype = _wanted_dtype(stack, goal)
            destination = self._destinations.of(goal, number)
            if not goal.on_devices:
                self._values[leaf] = host_value(
                    np.empty(stack.shape, dtype), goal.kind, self._manifest.leaves[leaf].path
                )
            elif destination.whole:
                self._finish(leaf, goal, jax.device_put(np.empty(stack.shape, dtype), goal.sharding))  # pyright: ignore
            else:
                placed = zip(destination.boxes, destination.devices, strict=True)
                parts = [jax.device_put(np.empty(extent(box), dtype), d) for box, devices in placed for d in devices]
                self._finish(leaf, goal, self._join(goal, number, parts))

    def _join(self, goal: Goal, number: int, parts: list[Any]) -> Any:
        """One array from the arrays of this process's devices, or its single array."""
        if self._destinations.of(goal, number).whole:
            return parts[0]
        stack = self._stacks[number]
        sharding: Any = goal.sharding
        # The dtype is needed if this process has no device of the sharding, and therefore no part.
        return jax.make_array_from_single_device_arrays(stack.shape, sharding, parts, dtype=_wanted_dtype(stack, goal))

    def _finish(self, leaf: int, goal: Goal, array: Any) -> None:
        """Create a leaf from its array."""
        if goal.kind == "key":
            record = self._manifest.leaves[leaf]
            try:
                array = jax.random.wrap_key_data(array, impl=record.impl)
            except (TypeError, ValueError) as error:
                raise ManifestError(
                    f"leaf {show_path(record.path)} cannot be PRNG keys of implementation {record.impl!r}: {error}"
                ) from error
        self._values[leaf] = array


def _place_boxes(shape: tuple[int, ...], sharding: Any, boxes: Sequence[Box], parts: Sequence[Array]) -> Any:
    """An array of this process's parts of it, in one call."""
    by_box = dict(zip(boxes, parts, strict=True))

    def part_at(index: Any) -> Array:
        return by_box[tuple([side.indices(size)[:2] for side, size in zip(index, shape, strict=True)])]

    return jax.make_array_from_callback(shape, sharding, part_at)


def _split_rows(buffer: Array) -> Sequence[Array]:
    """The rows of a buffer as arrays, even if they are scalars."""
    return list(buffer) if buffer.ndim > 1 else [buffer[row, ...] for row in range(len(buffer))]


def _as_dtype(array: Any, dtype: np.dtype[Any]) -> Any:
    if array.dtype == dtype:
        return array
    with transfer_context(own_mesh(array)):
        return _bitcast(array, dtype)


def _insert_part(whole: Any, part: Any, starts: tuple[int, ...], shape: tuple[int, ...], device: Any) -> Any:
    """An array on one device with a part copied into it. If it is None, the part is copied into zeros of this shape."""
    with transfer_context(own_mesh(part)):
        whole = jnp.zeros(shape, part.dtype, device=device) if whole is None else whole
        return _update(whole, part, starts)


# Both donate their argument and reuse its memory for the result.
_update: Any = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
_bitcast: Any = jax.jit(jax.lax.bitcast_convert_type, static_argnums=1, donate_argnums=0)


def _wanted_dtype(stack: Stack, goal: Goal) -> np.dtype[Any]:
    return DTYPES[stack.dtype] if goal.cast is None else goal.cast


def _cast(view: Array, goal: Goal) -> Array:
    if goal.cast is None or goal.cast == view.dtype:
        return view
    cast = np.empty(view.shape, goal.cast)
    assign(cast, view)
    return cast


def host_value(array: Array, kind: str, path: str) -> Any:
    """The value of a host leaf from the read array. Raises DataError."""
    try:
        return KINDS[kind].from_array(array)
    except UnicodeDecodeError as error:
        raise DataError.of(
            "a leaf is not what was saved",
            [Problem(path, f"is a str, but what is stored is not UTF-8: {error.reason}")],
        ) from error


def _from_text(record: LeafRecord, goal: Goal) -> Any:
    """The value of a leaf in the manifest."""
    value, wanted = decode_value(record.kind, record.value or ""), KINDS[goal.kind]
    if wanted.decode is not None:
        return value if record.kind == goal.kind else wanted.type(value)
    array = _cast(np.asarray(value), goal)
    return jax.device_put(array, goal.sharding) if goal.on_devices else wanted.from_array(array)  # pyright: ignore
