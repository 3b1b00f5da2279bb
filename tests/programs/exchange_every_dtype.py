"""Sends boxes of arrays of every dtype to every process of a job, and compares their bits with the whole array's."""

from __future__ import annotations

import itertools

import jax
import joined  # noqa: F401
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._devices.interconnect import replicate_box
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._pipeline.watchdog import Watchdog, under

in_lane = under(Watchdog(60))  # where the library makes all exchanges
in_lane.__enter__()

SPECS = [P("a", "b"), P("b"), P(), P(("a", "b")), P(None, "a")]
BOXES = [((1, 7), (3, 9)), ((0, 8), (0, 12)), ((5, 6), (11, 12))]
EACH_SPEC = list(zip(SPECS, itertools.cycle(BOXES)))
WAYS = {"float32": EACH_SPEC, "complex64": EACH_SPEC}
"""A dtype decides how values become unsigned integers, with one more dimension if it is complex. The spec and the box
decide which of these integers are selected. A dtype of each kind is tested with each spec and each box. For other
dtypes, one spec and one box show that the bits are right."""

mesh, other = jax.make_mesh((2, 2), ("a", "b")), jax.make_mesh((4,), ("x",))
rng = np.random.default_rng(0)  # the same in every process
compared = 0
for name, dtype in DTYPES.items():
    jax.config.update("jax_enable_x64", dtype.itemsize >= 8)
    raw = rng.integers(0, 256, (8, 12 * dtype.itemsize), dtype=np.uint8)
    if name == "bool":
        raw &= 1
    small = "int4" in name or "int2" in name
    host = (raw % 2).astype(dtype) if small else (raw % 16).view(dtype) if "float4" in name else raw.view(dtype)
    for spec, box in WAYS.get(name, EACH_SPEC[:1]):
        array = jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), host.__getitem__)
        with jax.set_mesh(other), jax.debug_nans(True), jax.debug_infs(True):  # the caller may have set any of these
            got = replicate_box(array, box)
        wanted = host[tuple(slice(*side) for side in box)]
        for shard in got.addressable_shards:
            assert shard.data.shape == wanted.shape, (name, spec, box)
            assert np.asarray(shard.data).tobytes() == wanted.tobytes(), (name, spec, box)
            compared += 1
jax.config.update("jax_enable_x64", False)
for memory in ("pinned_host", "unpinned_host"):  # programs do not compute with arrays in these memories
    host = np.arange(96, dtype=np.float32).reshape(8, 12)
    sharding = NamedSharding(mesh, P("a", "b"), memory_kind=memory)
    array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    got = replicate_box(array, ((1, 7), (3, 9)))
    assert (np.asarray(got.addressable_data(0)) == host[1:7, 3:9]).all(), memory
scalar = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: np.float32(-0.0))
assert np.signbit(np.asarray(replicate_box(scalar, ()).addressable_data(0)))
print(compared)
