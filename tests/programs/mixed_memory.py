"""Saves arrays of which half are in pinned host memory, or restores them: args = [path, whether to restore].

A restore prints its peak memory as a multiple of the arrays of this process.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt

path, restores = args
MESH = Mesh(np.array(jax.devices()), ("x",))
SHAPE = (len(jax.devices()), 4 << 20)
KINDS = {f"w{number}": "pinned_host" if number % 2 else None for number in range(8)}


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def ones(index: object) -> np.ndarray:
    return np.ones((1, SHAPE[1]), np.float32)


if not restores:
    shardings = {name: NamedSharding(MESH, P("x"), memory_kind=kind) for name, kind in KINDS.items()}
    tree = {name: jax.make_array_from_callback(SHAPE, sharding, ones) for name, sharding in shardings.items()}
    jaxckpt.save(path, tree, options=jaxckpt.Options(sync=False))
else:
    jax.block_until_ready([jax.device_put(np.zeros(8), device) for device in jax.local_devices()])
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM
    tree = jax.block_until_ready(jaxckpt.restore(path, options=jaxckpt.Options(host_bytes=32 << 20)))
    peak = status("VmHWM") - before
    default = jax.devices()[0].default_memory().kind
    assert {name: leaf.sharding.memory_kind for name, leaf in tree.items()} == {
        name: kind or default for name, kind in KINDS.items()
    }
    shards = [shard.data for leaf in tree.values() for shard in leaf.addressable_shards]
    assert all((np.asarray(shard) == 1).all() for shard in shards)
    print(peak / sum(shard.nbytes for shard in shards))
