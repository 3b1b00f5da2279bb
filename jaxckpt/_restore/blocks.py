"""Places many small leaves: rows are sent to the devices as blocks, 32 leaves per transfer, and are split there.

Used only on devices with their own memory, where each transfer has a cost. On 8 CPU devices, placing 2,000 leaves of
64 KiB takes 0.24 s of CPU as blocks and 0.25 s one by one (replicated: 0.62 and 0.20), and compiling the program takes
1 s more. 20,000 leaves of 1 KiB take 1.5 and 2.7 s, so a program pays only from 16,000 leaves on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.layouts import memory_kind
from jaxckpt._format.pieces import Array
from jaxckpt._save.exchange import moving_bits

BLOCK_ROWS = 32
"""Leaves per transfer. XLA's compiler for TPUs takes 0.3 s of CPU for a program that splits this many."""

BLOCK_PIECES = 128
"""Fewer pieces of equal leaves that are read together are placed one by one, because each shape, dtype and sharding
needs a compiled program. Not measured yet; benchmarks/gpu.py compares the two."""


BLOCK_LEAF_BYTES = 1 << 20
"""Leaves of at least this size are placed one by one."""


def come_as_blocks(sharding: Any, buffers: Sequence[Array]) -> bool:
    """Whether the rows of these buffers, one buffer per requested box, are sent to the devices as blocks."""
    if not (sharding is None or isinstance(sharding, (NamedSharding, SingleDeviceSharding))):
        return False
    places = 1 if sharding is None else len(sharding.addressable_devices)
    return (
        len(buffers[0]) * places >= BLOCK_PIECES
        and has_own_memory(sharding)
        and not (sharding is None and _mesh_is_set())  # the rows would be placed on that mesh
        and (sharding is None or memory_kind(sharding) is None)
        and sum(buffer[0].nbytes for buffer in buffers) < BLOCK_LEAF_BYTES
        and not getattr(getattr(sharding, "spec", None), "reduced", None)
        and buffers[0].dtype.name not in ("int2", "uint2")  # XLA's compiler for CPUs aborts
    )


def _mesh_is_set() -> bool:
    """Whether the caller has set a mesh for uncommitted arrays, as far as JAX shows it."""
    return not hasattr(jax.sharding, "get_mesh") or bool(jax.sharding.get_mesh().shape)


def has_own_memory(sharding: Sharding | None) -> bool:
    """Whether data for these devices has to be transferred."""
    devices = jax.device_put(np.empty(0, np.uint8)).devices() if sharding is None else sharding.device_set
    return next(iter(devices)).platform != "cpu"


def place_rows(buffers: Sequence[Array], sharding: Any, devices: Sequence[Sequence[Any]] | None) -> list[list[Any]]:
    """For each row, the array with this sharding, or, with `devices`, its parts on the devices that need each box."""
    if devices is None:
        return [[row] for row in _whole_rows(buffers[0], sharding)]
    return _parts_of_rows(buffers, devices)


def _whole_rows(buffer: Array, sharding: Sharding | None) -> list[Any]:
    along = sharding
    if isinstance(sharding, NamedSharding):
        along = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec), memory_kind=sharding.memory_kind)
    blocks = _blocks(buffer)
    placed = jax.device_put(blocks, [along] * len(blocks))
    return _split(placed, sharding, buffer.dtype)[: len(buffer)]


def _parts_of_rows(buffers: Sequence[Array], devices: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """As arrays over this process's devices alone: other processes make no such calls."""
    pairs = [(_blocks(buffer), place) for buffer, places in zip(buffers, devices, strict=True) for place in places]
    mesh = Mesh(np.array([next(iter(place.device_set)) for _, place in pairs]), ("own",))
    shape = buffers[0].shape[1:]
    split = ["own"] * bool(shape)  # a scalar is the same on all devices
    own, along = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (split, [None, *split]))
    joined = (BLOCK_ROWS, *((len(pairs) * shape[0], *shape[1:]) if shape else ()))
    n_blocks = len(pairs[0][0])
    placed = jax.device_put(
        [blocks[number] for number in range(n_blocks) for blocks, _ in pairs],
        [place for _ in range(n_blocks) for _, place in pairs],
    )
    whole = [
        jax.make_array_from_single_device_arrays(joined, along, placed[first : first + len(pairs)])
        for first in range(0, len(placed), len(pairs))
    ]
    rows = _split(whole, own, buffers[0].dtype)[: len(buffers[0])]
    return [[row.addressable_data(place) for place in range(len(pairs))] for row in rows]


def carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype with which programs move data on a device, because on CPU they may alter NaNs of small floats."""
    if dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating):
        return DTYPES[f"uint{jnp.finfo(dtype).bits}"]
    return dtype


def _blocks(buffer: Array) -> list[Array]:
    """The rows in batches, the last one padded with zeros, so that all batches share one program."""
    bits = buffer.view(carrier(buffer.dtype))
    blocks = [bits[start : start + BLOCK_ROWS] for start in range(0, len(bits), BLOCK_ROWS)]
    lacking = BLOCK_ROWS - len(blocks[-1])
    if lacking:
        blocks[-1] = np.concatenate([blocks[-1], np.zeros((lacking, *bits.shape[1:]), bits.dtype)])
    return blocks


def _split(blocks: Sequence[Any], sharding: Sharding | None, dtype: np.dtype[Any]) -> list[Any]:
    """The rows of blocks that are on devices."""
    mesh: Any = None
    if sharding is not None:
        mesh = (
            sharding.mesh
            if isinstance(sharding, NamedSharding)
            else Mesh(np.array(list(sharding.device_set)), ("own",))
        )
    with moving_bits(mesh):
        return [row for block in blocks for row in splitter(sharding, dtype)(block)]


@functools.lru_cache(maxsize=256)
def splitter(sharding: Sharding | None, dtype: np.dtype[Any]) -> Any:
    """The jitted block → its rows."""

    def split(block: Any) -> list[Any]:
        rows = [lax.index_in_dim(block, row, keepdims=False) for row in range(BLOCK_ROWS)]
        return rows if block.dtype == dtype else [lax.bitcast_convert_type(row, dtype) for row in rows]

    return jax.jit(split, out_shardings=None if sharding is None else [sharding] * BLOCK_ROWS)
