"""Sends bytes in host memory between the processes of a job, over the devices' interconnect.

JAX moves data between processes only in a program that all of them run. The programs move plain words, so that one
program serves all shapes, dtypes and layouts. Every process must call the same methods in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt._devices.exchange import exchange_context, transfer_context
from jaxckpt._model.pieces import Array, Bytes, aligned_empty

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
            by_device = {shard.device: jax.device_get(shard.data) for shard in array.addressable_shards}
        return [by_device[device] for device in self._devices]

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
