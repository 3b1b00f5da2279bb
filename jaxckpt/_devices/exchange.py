"""Sends data that no process holds completely to all processes, one box of a leaf at a time.

JAX moves data between processes only in a jitted call that all of them make. Each device contributes the elements of
the box that it holds, and zeros for the rest. The bits are summed over the mesh, so a device needs memory only for the
box. Replicating the leaf, or slicing it with XLA's partitioner, would need memory for the whole leaf on every device.
Exception: TPUs store 8-byte numbers as two arrays, and a program that reads them first splits the device's whole piece.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxckpt._devices.shardings import memory_kind
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, extent, spec_of
from jaxckpt._pipeline.watchdog import current_watchdog
from jaxckpt.errors import PeerFailedError

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
            offset = starts[dim] - index * x.shape[dim]
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
