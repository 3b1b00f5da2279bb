"""Sends data between the processes of a job over the devices' interconnect: boxes of leaves, and bytes in host memory.

JAX moves data between processes only in a program that all of them run. The programs move plain words, so that one
program serves all shapes, dtypes and layouts. Every process must call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt._devices.shardings import memory_kind
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, extent, spec_of
from jaxckpt._model.pieces import Array, Bytes, aligned_empty
from jaxckpt._pipeline.watchdog import current_watchdog
from jaxckpt.errors import PeerFailedError

# Boxes of leaves ------------------------------------------------------------------------------------------
# JAX moves data between processes only in a jitted call that all of them make. Each device contributes the elements of
# the box that it holds, and zeros for the rest. The bits are summed over the mesh, so a device needs memory only for
# the box. Replicating the leaf, or slicing it with XLA's partitioner, would need memory for the whole leaf on every
# device. Exception: TPUs store 8-byte numbers as two arrays, and a program that reads them first splits the device's
# whole piece.

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


@contextlib.contextmanager
def transfer_context(mesh: Mesh | None) -> Generator[None]:
    """A context for JAX calls that move data. It sets the mesh of the data, if any, instead of the caller's mesh. It
    overrides a caller's configuration that checks for NaN or infinity, narrows numbers to 32 bits, forbids transfers,
    or disables jit: without it, a program's `out_shardings` and donated arguments have no effect."""
    on_mesh = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
    with (
        on_mesh,
        jax.enable_x64(True),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
    ):
        yield


@contextlib.contextmanager
def exchange_context(mesh: Mesh) -> Generator[None]:
    """A context for JAX calls that move data between processes. If one dies, XLA raises an error in some of the others,
    and in others it may never return: `Rendezvous` finds out which process it was, and ends the waits."""
    watchdog = current_watchdog()
    assert watchdog is not None, "exchanges are made in lanes"
    with transfer_context(mesh):
        try:
            watchdog.is_exchanging = True
            yield
        except (RuntimeError, ValueError) as error:
            lost = PeerFailedError(
                f"process {jax.process_index()} could not exchange data with other processes: {error}"
            )
            lost.in_exchange = True
            raise lost from error
        finally:
            watchdog.is_exchanging = False


def own_mesh(array: jax.Array) -> Mesh:
    """The mesh for calls with an array on one device: this device, or no device if the array is uncommitted, because on
    a mesh it would become committed."""
    (device,) = array.sharding.device_set
    return _mesh_of(device) if array.committed else Mesh(np.empty((), object), ())


@functools.lru_cache(maxsize=4096)
def _mesh_of(device: Any) -> Mesh:
    return Mesh(np.array([device]), ("own",))


def transfer_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype with which programs move data on a device. On CPU devices, XLA computes with small floats in wider
    types, which is slow and changes NaN payloads, so they are moved as integers."""
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return DTYPES[f"uint{jnp.finfo(dtype).bits}"]
    return dtype


def start_indices(starts: Sequence[int], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """The start of a part of an array, for a jitted call."""
    # Accelerators compute 64-bit indices as pairs of 32 bits, which needs more memory.
    return np.array(starts, np.int64 if max(shape, default=0) >= 1 << 31 else np.int32)


def replicate_box(value: jax.Array, box: Box) -> jax.Array:
    """A box of an array, replicated on its mesh. Every process calls this with equal arguments in the same order.

    `value` must have a NamedSharding over all processes.
    """
    sharding: Any = value.sharding
    with exchange_context(sharding.mesh):
        starts = start_indices([start for start, _ in box], value.shape)
        return jax.block_until_ready(box_replicator(sharding, extent(box))(value, starts))


@functools.lru_cache(maxsize=256)
def box_replicator(sharding: NamedSharding, sides: tuple[int, ...]) -> Any:
    """The jitted function (array, starts) → the box of these sides, replicated."""
    mesh = sharding.mesh
    spec = spec_of(sharding.spec)
    split = {axis for entry in spec for axis in entry}

    def local_piece(x: Any, starts: Any) -> Any:
        supplies = functools.reduce(
            jnp.logical_and, (lax.axis_index(a) == 0 for a in mesh.axis_names if a not in split), True
        )
        offsets: list[tuple[Any, Any]] = []
        for dim, side in enumerate(sides):
            index = 0
            for axis in spec[dim] if dim < len(spec) else ():
                index = index * mesh.shape[axis] + lax.axis_index(axis)
            # An axis index has 32 bits, which a position in a long dimension may exceed.
            offset = starts[dim] - jnp.asarray(index, starts.dtype) * x.shape[dim]
            offsets.append((offset, jnp.clip(offset, 0, max(0, x.shape[dim] - side))))
        # Cut before any computation. Otherwise XLA creates a second array as large as the device's whole piece.
        piece = lax.dynamic_slice(x, [first for _, first in offsets], list(map(min, x.shape, sides)))
        if memory_kind(sharding) is not None:
            piece = jax.device_put(piece, jax.memory.Space.Device)
        bits = _as_bits(piece)
        for dim, (side, (offset, first)) in enumerate(zip(sides, offsets, strict=True)):
            positions = offset - first + jnp.arange(side, dtype=starts.dtype)
            bits = jnp.take(bits, jnp.clip(positions, 0, max(0, piece.shape[dim] - 1)), axis=dim)
            is_local = (positions >= 0) & (positions < piece.shape[dim])
            supplies = supplies & is_local.reshape([side if d == dim else 1 for d in range(len(sides))])
        supplies = jnp.reshape(supplies, (*jnp.shape(supplies), *([1] * (bits.ndim - jnp.ndim(supplies)))))
        return _from_bits(lax.psum(jnp.where(supplies, bits, 0), mesh.axis_names), x.dtype)

    cut = jax.shard_map(
        local_piece, mesh=mesh, in_specs=(sharding.spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.jit(cut)


def _as_bits(x: Any) -> Any:
    """An array as unsigned integers of at least one byte, which every backend adds without loss."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_as_bits(jnp.real(x)), _as_bits(jnp.imag(x))], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(_UNSIGNED[np.dtype(x.dtype).itemsize])
    if x.dtype == jnp.float4_e2m1fn:
        return lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    return lax.bitcast_convert_type(x, _UNSIGNED[np.dtype(x.dtype).itemsize])


def _from_bits(bits: Any, dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real_dtype = np.zeros(0, dtype).real.dtype
        return lax.complex(_from_bits(bits[..., 0], real_dtype), _from_bits(bits[..., 1], real_dtype))
    if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
        return bits.astype(dtype)
    if dtype == jnp.float4_e2m1fn:
        return lax.bitcast_convert_type(bits.astype(jnp.uint4), dtype)
    return lax.bitcast_convert_type(bits, dtype)


# Bytes in host memory -------------------------------------------------------------------------------------

Pairs = tuple[tuple[int, int], ...]
"""(sender, receiver) of a permutation: no process sends or receives twice."""

Span = tuple[int, int]
"""A range (first, end) of bytes."""

MAX_BYTES = 4 << 30
"""Positions in the data of a program are words of 4 bytes that are counted in 32 bits."""

_UNIT_BYTES = 64
"""Numbers of sent bytes are multiples of this for each device."""


class Interconnect:
    """Sends bytes between the processes of a community. Several communities of equal size do so at the same time."""

    def __init__(self, process: int, partition: Sequence[Sequence[int]] | None = None) -> None:
        """`partition` has the processes of each community; by default all processes are one."""
        devices: dict[int, list[Any]] = {}
        for device in jax.devices():
            devices.setdefault(device.process_index, []).append(device)
        partition = [sorted(devices)] if partition is None else partition
        self.process = process
        self.community = next(tuple(community) for community in partition if process in community)
        """The community of this process."""

        most = min(n_sending_devices(devices[process]) for community in partition for process in community)
        self._width = 1 << most.bit_length() - 1
        self._devices = devices[process][: self._width]
        grid = [[devices[process][: self._width] for process in community] for community in partition]
        self._mesh = Mesh(np.array(grid), ("community", "process", "own"))
        self._along = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))

    def rounded_bytes(self, n_bytes: int) -> int:
        """Round up so that numbers of sent bytes repeat and their programs are reused. Adds at most 12 %."""
        words = -(-n_bytes // (4 * self._width))
        unit = max(_UNIT_BYTES // 4, 1 << max(0, words.bit_length() - 4))
        return -(-words // unit) * unit * 4 * self._width

    def permute(self, pairs: Pairs, n_bytes: int, sent: Bytes | None) -> Bytes | None:
        """Send `n_bytes` along each pair, zeros if `sent` is None. Returns what this process receives, if anything."""
        received = self._run(permuter(self._mesh, pairs), np.zeros(n_bytes, np.uint8) if sent is None else sent)
        if all(receiver != self.process for _, receiver in pairs):
            return None
        return np.concatenate(self._to_host(received)).view(np.uint8)

    def gather(self, spans: Mapping[int, Span], n_bytes: int, n_senders: int, own: Bytes) -> dict[int, Bytes]:
        """Send the `spans` of some processes' bytes to all, `n_bytes` from each of at most `n_senders`. `own` has the
        bytes of this process. Returns the bytes of each sender."""
        words = n_bytes // (4 * self._width)
        few = 2 * n_senders < len(self.community)
        slots = list(spans) if few else list(self.community)
        first, _ = spans.get(self.process, (0, 0))
        sent = own[first : first + n_bytes] if self.process in spans else own[:0]
        if len(sent) < n_bytes:
            padded = aligned_empty((n_bytes,), np.dtype(np.uint8))
            padded[: len(sent)], padded[len(sent) :] = sent, 0
            sent = padded
        position = slots.index(self.process) * words if few and self.process in slots else 0
        program = gatherer(self._mesh, n_senders if few else None)
        gathered = self._run(program, sent, np.array([position], np.int32))
        by_device = [array.reshape(-1, words) for array in self._to_host(gathered)]
        rows = ([array[slot] for array in by_device] for slot in range(len(slots)))
        joined = (row[0] if self._width == 1 else np.concatenate(row) for row in rows)
        return {process: row.view(np.uint8) for process, row in zip(slots, joined, strict=True)}

    def _run(self, program: Any, sent: Bytes, *constants: Any) -> Any:
        """Run a program on the bytes that this process sends, and on arrays that are equal on its devices."""
        places = [SingleDeviceSharding(device) for device in self._devices]
        inputs = [
            [*sent.view(np.uint32).reshape(self._width, -1)],
            *([constant] * self._width for constant in constants),
        ]
        with exchange_context(self._mesh):
            return jax.block_until_ready(program(*(self._join(jax.device_put(pieces, places)) for pieces in inputs)))

    def _to_host(self, array: Any) -> list[Array]:
        """The parts of an array on the devices of this process."""
        with transfer_context(self._mesh):
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            return jax.device_get([shards[device] for device in self._devices])  # starts all copies first

    def _join(self, pieces: Sequence[Any]) -> Any:
        """An array over all processes, from the parts on the devices of this one."""
        return jax.make_array_from_single_device_arrays((self._mesh.size * pieces[0].size,), self._along, pieces)


def n_sending_devices(devices: Sequence[Any]) -> int:
    """How many devices of a process send bytes: one on CPUs, where all share one memory and one connection."""
    return 1 if devices[0].platform == "cpu" else len(devices)


@functools.lru_cache(maxsize=256)
def permuter(mesh: Mesh, pairs: Pairs) -> Any:
    """The jitted function: words of each process → words of its sender."""

    def permuted(words: Any) -> Any:
        return lax.ppermute(words, "process", pairs)

    along = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(permuted, mesh=mesh, in_specs=along, out_specs=along, check_vma=False))


@functools.lru_cache(maxsize=256)
def gatherer(mesh: Mesh, n_senders: int | None) -> Any:
    """The jitted function (words of each device, their position) → the concatenated words of a community's processes.

    With `n_senders`, only this many processes send words, each at its position. The others send zeros, and all are
    summed, because gathering zeros from thousands of processes would need memory for them.
    """

    def everywhere(words: Any, start: Any) -> Any:
        if n_senders is None:
            return lax.all_gather(words, "process", tiled=True)
        placed = lax.dynamic_update_slice(jnp.zeros(n_senders * words.size, words.dtype), words, [start[0]])
        return lax.psum(placed, "process")

    along, everyone = PartitionSpec(mesh.axis_names), PartitionSpec(("community", "own"))
    passed = jax.shard_map(everywhere, mesh=mesh, in_specs=(along, along), out_specs=everyone, check_vma=False)
    return jax.jit(passed)


# Calls with collectives -----------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")


class CollectiveCalls(Generic[Item, Result]):
    """One call for each item. The other processes would wait forever in a call that this process does not make.

        with CollectiveCalls(items, call) as calls:
            for item in calls:
                result = calls.run_next(given)  # call(item, given)

    If the block raises, the remaining calls are made. In a lane, where no interrupt can end a call.
    """

    def __init__(self, items: Iterable[Item], call: Callable[[Item, Any], Result]) -> None:
        """`call` gets an item, and what `run_next` is given; None if only the other processes need the call."""
        self._left = deque(items)
        self._call = call

    def __iter__(self) -> Iterator[Item]:
        """The item of each next call, which the caller makes with `run_next`."""
        while self._left:
            yield self._left[0]

    def run_next(self, data: Any = None) -> Result:
        """Make the next call."""
        return self._call(self._left.popleft(), data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # If another process has failed, no call can succeed, and no process waits in one.
        if error is not None and not isinstance(error, PeerFailedError):
            with contextlib.suppress(Exception):  # it must not hide the reason
                while self._left:
                    self.run_next()
