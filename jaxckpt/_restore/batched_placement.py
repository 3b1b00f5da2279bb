"""Places many small leaves: rows are sent to the devices as blocks of several leaves, and a program splits them there.

On devices with their own memory, each transfer has a fixed cost. On CPU devices, each array that is passed to
`jax.device_put` has one too: 2,000 leaves of 64 KiB onto 8 devices take it 0.33 s, most of it in Python. As blocks they
take 0.12 s, and compiling the program takes 0.2 s once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._devices.interconnect import transfer_context, transfer_dtype
from jaxckpt._devices.shardings import memory_kind
from jaxckpt._model.grid import Box, volume
from jaxckpt._model.pieces import Array

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
