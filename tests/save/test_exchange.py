"""Boxes that no process holds whole, brought to all: every dtype, bit for bit."""

from __future__ import annotations

from processes import RunProcesses

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxckpt._save.exchange import box_everywhere
from jaxckpt._format.tree import DTYPES

mesh, other = jax.make_mesh((2, 2), ("a", "b")), jax.make_mesh((4,), ("x",))
rng = np.random.default_rng(0)  # the same in every process
for name, dtype in DTYPES.items():
    jax.config.update("jax_enable_x64", dtype.itemsize >= 8)
    raw = rng.integers(0, 256, (8, 12 * dtype.itemsize), dtype=np.uint8)
    if name == "bool":
        raw &= 1
    small = "int4" in name or "int2" in name
    host = (raw % 2).astype(dtype) if small else (raw % 16).view(dtype) if "float4" in name else raw.view(dtype)
    for spec in (P("a", "b"), P("b"), P(), P(("a", "b")), P(None, "a")):
        array = jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])
        boxes = ((1, 7), (3, 9)), ((0, 8), (0, 12)), ((5, 6), (11, 12))
        for box in boxes if spec == P("a", "b") else boxes[:1]:
            with jax.set_mesh(other), jax.debug_nans(True), jax.debug_infs(True):  # whatever the caller has set
                got = box_everywhere(array, box)
            wanted = host[tuple(slice(*side) for side in box)]
            for shard in got.addressable_shards:
                assert shard.data.shape == wanted.shape, (name, spec, box)
                assert np.asarray(shard.data).tobytes() == wanted.tobytes(), (name, spec, box)
jax.config.update("jax_enable_x64", False)
for memory in ("pinned_host", "unpinned_host"):  # programs do not compute with what is there
    host = np.arange(96, dtype=np.float32).reshape(8, 12)
    sharding = NamedSharding(mesh, P("a", "b"), memory_kind=memory)
    array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    got = box_everywhere(array, ((1, 7), (3, 9)))
    assert (np.asarray(got.addressable_data(0)) == host[1:7, 3:9]).all(), memory
scalar = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda index: np.float32(-0.0))
assert np.signbit(np.asarray(box_everywhere(scalar, ()).addressable_data(0)))
print("the same bits")
"""


def test_every_dtype_keeps_its_bits(run_processes: RunProcesses) -> None:
    done = run_processes(PROGRAM, processes=2, devices_per_process=2, timeout=200)
    assert all("the same bits" in one.stdout for one in done)
