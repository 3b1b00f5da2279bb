"""Creates the leaves' values from the data that was read, on the host or on the devices."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._devices.interconnect import own_mesh, transfer_context, transfer_dtype
from jaxckpt._devices.shardings import PlannedSharding, addressable_boxes
from jaxckpt._model.grid import Box, extent
from jaxckpt._model.pieces import Array, assign
from jaxckpt._model.records import LeafRecord, Manifest
from jaxckpt._model.stacks import Stack
from jaxckpt._model.values import KINDS, decode_value
from jaxckpt._restore.read_loop import Buffers, host_value
from jaxckpt._restore.read_plan import ReadStep, WantedRows
from jaxckpt._restore.resolve import AbstractLeaf
from jaxckpt._restore.wants import WantedRange, Wants, read_key, restored_dtype, row_ranges
from jaxckpt.errors import ManifestError, show_path

CALLBACK_DEVICES = 1024
"""Up to this number of devices of a sharding, one call of `jax.make_array_from_callback` places all pieces of a leaf:
120 µs of CPU time for 8 pieces, for which `jax.device_put` takes 650. The call computes the boxes of all devices of the
job, once for each shape: 1 µs for each device."""


@dataclass(frozen=True, slots=True)
class LeafDestination:
    """The boxes of a leaf that this process reads, and how its value is created from them."""

    boxes: tuple[Box, ...]
    """Each box once. Empty if only other processes need the leaf."""

    shardings: tuple[tuple[Any, ...], ...]
    """For each box, the shardings of the arrays that are created from it: the leaf's own if it is whole, otherwise one
    for each device that needs the box."""

    is_whole: bool
    """Whether the box is the whole leaf, and its array is the leaf's value. Otherwise the value joins all boxes."""

    block_rows: int
    """How many leaves are sent to the devices together, and split there by a program; 0: each is placed by itself.

    On devices with their own memory, each transfer has a fixed cost. On CPU devices, each array that is passed to
    `jax.device_put` has one too: 2,000 leaves of 64 KiB onto 8 devices take it 0.33 s, most of it in Python. As blocks
    they take 0.12 s, and compiling the program takes 0.2 s once.
    """


def destinations(wants: Wants, process: int) -> dict[tuple[Any, ...], LeafDestination]:
    """The destinations of what a process needs, by `read_key`."""
    by_key: dict[tuple[Any, ...], LeafDestination] = {}
    for wanted_range in wants.ranges:
        key = read_key(wanted_range.abstract, wanted_range.stack)
        if key not in by_key:
            by_key[key] = _destination(wanted_range, wants.stacks[wanted_range.stack], process)
    return by_key


def _destination(wanted_range: WantedRange, stack: Stack, process: int) -> LeafDestination:
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
    return LeafDestination(boxes, shardings, is_whole, wanted_range.boxes.block_rows)


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices need, with a sharding for each device that needs it."""
    shardings: dict[Box, list[Any]] = {}
    for device, box in addressable_boxes(sharding, shape):
        shardings.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return shardings


# Placement ------------------------------------------------------------------------------------------------


_GC_THRESHOLD = 100_000
"""Objects created between two runs of Python's garbage collector while arrays are created; Python's default is 700."""


@contextlib.contextmanager
def infrequent_gc() -> Generator[None]:
    """Run Python's garbage collector rarely in the block. It would repeatedly traverse all objects of the process while
    thousands of arrays are created. 20,000 leaves onto 8 devices take 1.3 s of CPU instead of 1.7."""
    thresholds = gc.get_threshold()
    if not 0 < thresholds[0] < _GC_THRESHOLD:  # the collector is off, or another thread is in this block
        yield
        return
    try:
        gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
        yield
    finally:
        if gc.get_threshold()[0] == _GC_THRESHOLD:
            gc.set_threshold(*thresholds)


@dataclass(frozen=True, slots=True)
class _Leaves:
    """Consecutive rows of a stack that are restored alike."""

    numbers: Sequence[int]
    """Leaf numbers, by row."""

    rows: tuple[int, int]
    stack: int
    abstract: AbstractLeaf
    destination: LeafDestination


@dataclass(frozen=True, slots=True)
class _DevicePut:
    """Host arrays that are sent to the devices in one call of JAX, because a call has a fixed cost."""

    hosts: list[Array] = field(default_factory=list[Array])
    shardings: list[Any] = field(default_factory=list[Any])
    leaves: list[_Leaves] = field(default_factory=list[_Leaves])
    """The leaves that are created from the resulting arrays, in order."""


@dataclass(frozen=True, slots=True)
class LeafBuilder:
    """Creates the values of leaves from the read data."""

    _manifest: Manifest
    _wants: Wants
    _destinations: Mapping[tuple[Any, ...], LeafDestination]
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    """The values that have been created, by leaf number."""

    _streamed: dict[tuple[int, int, int], list[Any]] = field(default_factory=dict[tuple[int, int, int], list[Any]])
    """By stack, row and box: an array for each device that needs it, if already read."""

    def deliver(self, step: ReadStep, buffers: Buffers) -> list[Any]:
        """Create the values of the step's rows. Returns the arrays on devices that were created."""
        arrays: list[Any] = []
        transfer = _DevicePut()
        with infrequent_gc():
            for run, filled in zip(step.runs, buffers, strict=True):
                for leaves in self._leaves(run):
                    # Boxes that only other processes need were read for them.
                    own = [run.boxes.index(box) for box in leaves.destination.boxes]
                    if run.streamed:
                        self._finish_streamed(leaves, own)
                    elif own:
                        start, stop = (row - run.rows[0] for row in leaves.rows)
                        arrays.extend(self._create(leaves, [filled[box][start:stop] for box in own], transfer))
            arrays.extend(self._run(transfer))
        return arrays

    def _leaves(self, run: WantedRows) -> Iterator[_Leaves]:
        abstract_leaves = self._wants.by_stack[run.stack]
        for (start, stop), abstract in row_ranges({row: abstract_leaves[row] for row in range(*run.rows)}):
            numbers = [abstract_leaves[row][0] for row in range(start, stop)]
            destination = self._destinations[read_key(abstract, run.stack)]
            yield _Leaves(numbers, (start, stop), run.stack, abstract, destination)

    def _create(self, leaves: _Leaves, buffers: Sequence[Array], transfer: _DevicePut) -> list[Any]:
        """Create the values of leaves from the buffers of their boxes, or add them to the transfer, which will create
        them. Returns the arrays on devices that were created here."""
        destination, sharding = leaves.destination, leaves.abstract.sharding
        if not leaves.abstract.on_devices:
            self._keep_on_host(leaves, _split_rows(buffers[0]))
            return []
        if destination.block_rows:
            devices = None if destination.is_whole else destination.shardings
            arrays_by_row = place_rows(buffers, sharding, devices, destination.block_rows)
            self._join(leaves, arrays_by_row)
            return list(itertools.chain.from_iterable(arrays_by_row))
        if isinstance(sharding, Sharding) and not destination.is_whole and len(sharding.device_set) <= CALLBACK_DEVICES:
            # One call of JAX for each leaf places all its boxes.
            shape = self._wants.stacks[leaves.stack].shape
            views_by_leaf = zip(*map(_split_rows, buffers), strict=True)
            arrays = [_place_boxes(shape, sharding, destination.boxes, views) for views in views_by_leaf]
            self._finish(leaves, arrays)
            return arrays
        # One call of JAX for all leaves that are delivered together places each box with each of its shardings.
        by_box = list(zip(map(_split_rows, buffers), destination.shardings, strict=True))
        for row in range(len(leaves.numbers)):
            for rows, shardings in by_box:
                transfer.hosts.extend([rows[row]] * len(shardings))
                transfer.shardings.extend(shardings)
        transfer.leaves.append(leaves)
        return []

    def _run(self, transfer: _DevicePut) -> list[Any]:
        """Send the arrays of a transfer, and create its leaves. Returns the arrays on devices."""
        arrays = jax.device_put(transfer.hosts, transfer.shardings) if transfer.hosts else []
        remaining = iter(arrays)
        for leaves in transfer.leaves:
            n_arrays = sum(map(len, leaves.destination.shardings))
            self._join(leaves, [list(itertools.islice(remaining, n_arrays)) for _ in leaves.numbers])
        return arrays

    def _keep_on_host(self, leaves: _Leaves, rows: Sequence[Array]) -> None:
        kind = leaves.abstract.kind
        if kind == "numpy":  # nothing to convert, which matters for 20,000 leaves
            self.values.update(zip(leaves.numbers, rows, strict=True))
            return
        for leaf, row in zip(leaves.numbers, rows, strict=True):
            self.values[leaf] = host_value(row, kind, self._manifest.leaves[leaf].path)

    def _finish_streamed(self, leaves: _Leaves, boxes: Sequence[int]) -> None:
        """Create leaves whose boxes were gathered on the devices."""
        dtype = restored_dtype(self._wants.stacks[leaves.stack], leaves.abstract)
        keys = [[(leaves.stack, row, box) for box in boxes] for row in range(*leaves.rows)]
        self._join(
            leaves, [[_as_dtype(array, dtype) for key in row for array in self._streamed.pop(key)] for row in keys]
        )

    def stream(self, step: ReadStep, at: tuple[int, int], region: Box, data: Array) -> dict[Any, Any]:
        """Copy a part of a large box to its devices, into the array that collects the parts there."""
        run, number = at
        box = step.runs[run].boxes[number]
        receiving: dict[Any, Any] = {}
        for offset, row in enumerate(range(*region[0])):
            _, abstract = self._wants.by_stack[step.stack][row]
            destination = self._destinations[read_key(abstract, step.stack)]
            if box not in destination.boxes:
                continue
            devices = destination.shardings[destination.boxes.index(box)]
            piece = _cast(data[offset], abstract)
            key = (step.stack, row, number)
            if region[1:] == box:
                arrays = jax.device_put([piece] * len(devices), list(devices))
            else:
                piece = piece.view(transfer_dtype(piece.dtype))
                starts = tuple(start - origin for (start, _), (origin, _) in zip(region[1:], box, strict=True))
                boxes = self._streamed.get(key) or [None] * len(devices)
                pieces = jax.device_put([piece] * len(devices), list(devices))
                arrays = [
                    _insert_piece(whole, on_device, starts, extent(box), device)
                    for whole, on_device, device in zip(boxes, pieces, devices, strict=True)
                ]
            receiving[key] = self._streamed[key] = arrays
        return receiving

    def create_unread_leaves(self) -> None:
        """Create the leaves for which nothing was read: those without elements, and those of other processes."""
        transfer = _DevicePut()
        for stack, abstract_leaves in self._wants.by_stack.items():
            for row, (leaf, abstract) in abstract_leaves.items():
                if leaf in self.values:
                    continue
                leaves = _Leaves([leaf], (row, row + 1), stack, abstract, self._destinations[read_key(abstract, stack)])
                dtype = restored_dtype(self._wants.stacks[stack], abstract)
                buffers = [np.empty((1, *extent(box)), dtype) for box in leaves.destination.boxes]
                if buffers:
                    self._create(leaves, buffers, transfer)
                else:
                    self._join(leaves, [[]])
        self._run(transfer)

    def _join(self, leaves: _Leaves, arrays_by_leaf: Sequence[list[Any]]) -> None:
        """Create leaves, each from the arrays of this process's devices, or from its single array."""
        if leaves.destination.is_whole:
            self._finish(leaves, [array for (array,) in arrays_by_leaf])
            return
        stack = self._wants.stacks[leaves.stack]
        sharding: Any = leaves.abstract.sharding
        # The dtype is needed if this process has no device of the sharding, and therefore no part.
        dtype = restored_dtype(stack, leaves.abstract)
        joined = [
            jax.make_array_from_single_device_arrays(stack.shape, sharding, arrays, dtype=dtype)
            for arrays in arrays_by_leaf
        ]
        self._finish(leaves, joined)

    def _finish(self, leaves: _Leaves, arrays: Sequence[Any]) -> None:
        """Create leaves from their arrays."""
        if leaves.abstract.kind == "key":
            arrays = [self._as_key(leaf, array) for leaf, array in zip(leaves.numbers, arrays, strict=True)]
        self.values.update(zip(leaves.numbers, arrays, strict=True))

    def _as_key(self, leaf: int, array: Any) -> Any:
        record = self._manifest.leaves[leaf]
        try:
            return jax.random.wrap_key_data(array, impl=record.impl)
        except (TypeError, ValueError) as error:
            raise ManifestError(
                f"leaf {show_path(record.path)} cannot be PRNG keys of implementation {record.impl!r}: {error}"
            ) from error


def _place_boxes(shape: tuple[int, ...], sharding: Any, boxes: Sequence[Box], arrays: Sequence[Array]) -> Any:
    """An array of this process's parts of it, in one call."""
    by_box = dict(zip(boxes, arrays, strict=True))

    def array_at(index: Any) -> Array:
        return by_box[tuple([side.indices(size)[:2] for side, size in zip(index, shape, strict=True)])]

    return jax.make_array_from_callback(shape, sharding, array_at)


def _split_rows(buffer: Array) -> Sequence[Array]:
    """The rows of a buffer as arrays, even if they are scalars."""
    return list(buffer) if buffer.ndim > 1 else [buffer[row, ...] for row in range(len(buffer))]


def _as_dtype(array: Any, dtype: np.dtype[Any]) -> Any:
    if array.dtype == dtype:
        return array
    with transfer_context(own_mesh(array)):
        return _bitcast(array, dtype)


def _insert_piece(whole: Any, piece: Any, starts: tuple[int, ...], shape: tuple[int, ...], device: Any) -> Any:
    """An array on one device with a piece copied into it; if it is None, into zeros of this shape."""
    with transfer_context(own_mesh(piece)):
        whole = jnp.zeros(shape, piece.dtype, device=device) if whole is None else whole
        return _update(whole, piece, starts)


# Both donate their argument and reuse its memory for the result.
_update: Any = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
_bitcast: Any = jax.jit(jax.lax.bitcast_convert_type, static_argnums=1, donate_argnums=0)


def _cast(view: Array, abstract: AbstractLeaf) -> Array:
    if abstract.cast is None or abstract.cast == view.dtype:
        return view
    cast = np.empty(view.shape, abstract.cast)
    assign(cast, view)
    return cast


def value_in_manifest(record: LeafRecord, abstract: AbstractLeaf) -> Any:
    """The value of a leaf in the manifest."""
    value, kind = decode_value(record.kind, record.value or ""), KINDS[abstract.kind]
    if kind.decode is not None:
        return value if record.kind == abstract.kind else kind.type(value)
    array = _cast(np.asarray(value), abstract)
    if not abstract.on_devices:
        return kind.from_array(array)
    sharding: Any = abstract.sharding
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # jax.device_put would exchange the value with the other processes, to compare it.
    arrays = [jax.device_put(array, device) for devices in local_boxes(sharding, ()).values() for device in devices]
    return jax.make_array_from_single_device_arrays((), sharding, arrays, dtype=array.dtype)


# Blocks of many small leaves ------------------------------------------------------------------------------


def place_rows(
    buffers: Sequence[Array], sharding: Any, devices: Sequence[Sequence[Any]] | None, n_rows: int
) -> list[list[Any]]:
    """For each row, the array with this sharding, or, with `devices`, its parts on the devices that need each box.

    `n_rows` are sent together.
    """
    if devices is None:
        return [[row] for row in _place_whole_rows(buffers[0], sharding, n_rows)]
    return _place_row_pieces(buffers, devices, n_rows)


def _place_whole_rows(buffer: Array, sharding: Sharding | None, n_rows: int) -> list[Any]:
    block_sharding = sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(None, *sharding.spec)
        block_sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    blocks = _blocks(buffer, n_rows)
    on_devices = jax.device_put(blocks, [block_sharding] * len(blocks))
    return _split(on_devices, sharding, buffer.dtype, n_rows)[: len(buffer)]


def _place_row_pieces(buffers: Sequence[Array], devices: Sequence[Sequence[Any]], n_rows: int) -> list[list[Any]]:
    """Place the rows as arrays on this process's devices only, because the other processes do not make these calls."""
    blocks_and_device = [
        (_blocks(buffer, n_rows), device)
        for buffer, box_devices in zip(buffers, devices, strict=True)
        for device in box_devices
    ]
    n_pieces, n_blocks = len(blocks_and_device), len(blocks_and_device[0][0])
    mesh = Mesh(np.array([next(iter(device.device_set)) for _, device in blocks_and_device]), ("own",))
    shape = buffers[0].shape[1:]
    split = ["own"] * bool(shape)  # a scalar is the same on all devices
    row_sharding, block_sharding = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (split, [None, *split]))
    block_shape = (n_rows, *((n_pieces * shape[0], *shape[1:]) if shape else ()))
    pieces = jax.device_put(
        [blocks[number] for number in range(n_blocks) for blocks, _ in blocks_and_device],
        [device for _ in range(n_blocks) for _, device in blocks_and_device],
    )
    joined = [
        jax.make_array_from_single_device_arrays(block_shape, block_sharding, pieces[first : first + n_pieces])
        for first in range(0, len(pieces), n_pieces)
    ]
    rows = _split(joined, row_sharding, buffers[0].dtype, n_rows)[: len(buffers[0])]
    # `addressable_data` returns the first shard of a replicated scalar for every device.
    return [[shard.data for shard in row.addressable_shards] for row in rows]


def _blocks(buffer: Array, n_rows: int) -> list[Array]:
    """The rows in batches, the last one padded with zeros, so that all batches share one program."""
    bits = buffer.view(transfer_dtype(buffer.dtype))
    blocks = [bits[start : start + n_rows] for start in range(0, len(bits), n_rows)]
    n_padding = n_rows - len(blocks[-1])
    if n_padding:
        blocks[-1] = np.concatenate([blocks[-1], np.zeros((n_padding, *bits.shape[1:]), bits.dtype)])
    return blocks


def _split(blocks: Sequence[Any], sharding: Sharding | None, dtype: np.dtype[Any], n_rows: int) -> list[Any]:
    """The rows of blocks that are on devices."""
    mesh: Any = None
    if sharding is not None:
        mesh = (
            sharding.mesh
            if isinstance(sharding, NamedSharding)
            else Mesh(np.array(list(sharding.device_set)), ("own",))
        )
    with transfer_context(mesh):
        return [row for block in blocks for row in splitter(sharding, dtype, n_rows)(block)]


@functools.lru_cache(maxsize=256)
def splitter(sharding: Sharding | None, dtype: np.dtype[Any], n_rows: int) -> Any:
    """The jitted function: block → its rows."""

    def split(block: Any) -> list[Any]:
        rows = [lax.index_in_dim(block, row, keepdims=False) for row in range(n_rows)]
        return rows if block.dtype == dtype else [lax.bitcast_convert_type(row, dtype) for row in rows]

    return jax.jit(split, out_shardings=None if sharding is None else [sharding] * n_rows)
