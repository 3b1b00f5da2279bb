"""Restores a checkpoint and prints the peak memory, in bytes, beyond the size of the arrays."""

from __future__ import annotations

import ctypes
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._restore import wants as _wants

# By default, glibc may keep freed blocks of up to 32 MiB. With this setting it returns them, so they do not count.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)

path, case, host_bytes, passing, shapes = json.loads(sys.argv[1])
options = jaxckpt.Options(host_bytes=host_bytes, cast="unsafe")
if passing:
    _wants.can_keep_buffers = lambda abstract: not abstract.on_devices


def mesh(*sizes):
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("x", "y")[: len(sizes)])


def onto(dtype, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    target = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape in shapes.items()}
    return lambda: jaxckpt.restore(path, target, options=options)


read = {
    "as saved": lambda: jaxckpt.restore(path, options=options),
    "3x2": onto(np.float32, mesh(3, 2), P("x", "y")),
    "rows": onto(np.float32, mesh(8), P("x")),
    "one device": onto(np.float32, mesh(1), P()),
    "cast": onto(jnp.bfloat16, mesh(3, 2), P("x", "y")),
    "numpy": lambda: jaxckpt.load_numpy(path, options=options),
}[case]


def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


jax.block_until_ready([jnp.zeros(8, device=device) + 1 for device in jax.devices()])
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets VmHWM
tree = jax.block_until_ready(read())
peak = status("VmHWM")
for name, shape in shapes.items():
    expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    assert (np.asarray(tree[name]) == expected.astype(tree[name].dtype)).all(), name
print(peak - before - sum(leaf.nbytes for leaf in tree.values()))
