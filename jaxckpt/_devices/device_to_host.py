"""Copies from devices with their own memory to the host.

    a shard in one object                     is copied as it is
    a shard in several objects of a process   is copied as it is, once, if host memory is not limited
    any other part of a shard, or a cast      is cut on its device first, at most `DEVICE_BYTES` at a time

Copies that have started are safe from everything that the caller does to the arrays next: until a copy has ended, the
runtime counts it as a use of the array's memory. A program that gets the array donated waits on the device for all
uses, and `delete()` frees the memory after the last one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxckpt._devices.interconnect import own_mesh, start_indices, transfer_context, transfer_dtype
from jaxckpt._devices.shardings import pinned_memory
from jaxckpt._options import StagingMemory
from jaxckpt._pipeline.pipeline import Budget

DEVICE_BYTES = 256 << 20
"""Memory of each device for pieces that were cut, cast, stacked or exchanged, until their copies have ended. If more is
needed, the caller waits for the oldest copies. A link moves this much in about 10 ms."""

Index = tuple[slice, ...]

ShardNumbers = tuple[int, ...]
"""The shards of an array that hold the same box, by their index in `addressable_data`."""

ShardKey = tuple[int, int, int]
"""Stack, row, and first replica of a shard."""


class HostShard:
    """A shard that is copied to the host once, for several objects. Its memory is freed after the last one."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def numpy(self) -> Any:
        """The shard in host memory, when its copy has ended."""
        # Without the jax.Array, because NumPy may need another copy, and both would stay in memory.
        self._array = np.asarray(self._array)
        return self._array


class HostCopies:
    """The copies of one save."""

    def __init__(self, memory: StagingMemory, whole_shards: Mapping[ShardKey, int] | None = None) -> None:
        """`whole_shards` are copied once. Each is given with its number of elements, all of which will be taken."""
        self._memory: StagingMemory = memory
        self._left = dict(whole_shards or {})
        self._shards: dict[ShardKey, HostShard] = {}
        self._sent_bytes = Counter[Any]()
        self._cut: set[int] = set()
        self._budgets: dict[Any, Budget] = {}
        """The memory of each device."""

    def take(
        self,
        value: jax.Array,
        replicas: ShardNumbers,
        index: tuple[slice, ...],
        dtype: np.dtype[Any],
        key: ShardKey | None = None,
    ) -> tuple[Any, Index | EllipsisType]:
        """An array, and the part of it that is a piece of a leaf. The copy of a jax.Array is not started yet."""
        n_elements = math.prod(cut.stop - cut.start for cut in index)
        if key is not None and key in self._left:
            shard = self._shards.get(key)
            if shard is None:
                array = self._choose(value, replicas, self._left[key] * dtype.itemsize)
                shard = self._shards[key] = HostShard(start_copies([array], self._memory)[0])
            self._left[key] -= n_elements
            if not self._left[key]:
                del self._left[key], self._shards[key]
            return shard, index
        array = self._choose(value, replicas, n_elements * dtype.itemsize)
        if value.dtype == dtype:
            if all(cut == slice(0, n) for cut, n in zip(index, array.shape, strict=True)):
                return array, ...
            if dtype.name in ("int2", "uint2"):  # XLA's compiler for CPUs aborts
                return np.array(np.asarray(start_copies([array], self._memory)[0])[index]), ...
        piece = cut_piece(array, index, dtype)
        self._cut.add(id(piece))
        return piece, ...

    def _choose(self, value: jax.Array, replicas: ShardNumbers, n_bytes: int) -> jax.Array:
        """The replica on the device that has sent the least, because each device has its own link to the host."""
        if len(replicas) == 1:
            return value.addressable_data(replicas[0])
        shards = value.addressable_shards  # `addressable_data` returns the first shard of a replicated array
        chosen = min((shards[number] for number in replicas), key=lambda shard: self._sent_bytes[shard.device])
        self._sent_bytes[chosen.device] += n_bytes
        return chosen.data

    def start(self, arrays: Sequence[jax.Array], *, temporary: bool) -> list[Any]:
        """Start the copies of an object's pieces. `temporary` arrays hold device memory only until they are copied."""
        copies = start_copies(arrays, self._memory)
        for array, copy in zip(arrays, copies, strict=True):
            if isinstance(copy, jax.Array) and (temporary or id(array) in self._cut):
                (device,) = array.sharding.device_set
                budget = self._budgets.setdefault(device, Budget(DEVICE_BYTES))
                budget.take_until_done(copy.nbytes, functools.partial(_await_copy, weakref.ref(copy)))
                budget.make_room(0)
        self._cut.clear()
        return copies


def _await_copy(copy: weakref.ref[jax.Array]) -> None:
    """Wait for a copy to the host, which holds device memory until it is complete."""
    jax.block_until_ready(copy())  # if it no longer exists, it has been written


def start_copies(arrays: Sequence[jax.Array], memory: StagingMemory) -> list[Any]:
    """Start copies of arrays on single devices to the host. Those to pageable memory are complete on return."""
    targets = [pinned_memory(array.sharding, memory) for array in arrays]
    if all(target is not None for target in targets):
        return jax.device_put(list(arrays), targets)
    # JAX keeps such a copy with its array, so it is made of another array with the same device memory: otherwise, the
    # caller's arrays would hold it for as long as they exist.
    aliases = [jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array]) for array in arrays]
    for alias in aliases:
        alias.copy_to_host_async()
    # The copy is lost when the caller donates or deletes the array, so it is taken at once.
    return [np.asarray(alias) for alias in aliases]


def cut_piece(array: jax.Array, index: tuple[slice, ...], dtype: np.dtype[Any]) -> jax.Array:
    """A part of an array on one device, cut and cast there. All parts of a shape share one program per device."""
    starts = start_indices([cut.start for cut in index], array.shape)
    with transfer_context(own_mesh(array)):
        return cutter(tuple(cut.stop - cut.start for cut in index), dtype)(array, starts)


@functools.lru_cache(maxsize=256)
def cutter(sides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """The jitted function (array, starts) → the part of these sides in this dtype. Small floats that are not cast
    become integers with the same bits."""

    def cut(array: Any, starts: Any) -> Any:
        is_cast, bits = array.dtype != dtype, transfer_dtype(dtype)
        if not is_cast and bits != dtype:
            array = lax.bitcast_convert_type(array, bits)
        piece = lax.dynamic_slice(array, [starts[dim] for dim in range(len(sides))], sides)
        return piece.astype(dtype) if is_cast else piece

    return jax.jit(cut)
