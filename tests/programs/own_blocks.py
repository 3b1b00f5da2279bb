"""Saves and restores many small leaves on devices of several processes as blocks; run by run_processes."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._devices import device_to_host
from jaxckpt._restore import placement, wants
from jaxckpt._save import staging

# CPU devices simulate devices with their own memory.
staging.is_in_host_memory = lambda value: False
wants.has_own_memory = lambda sharding: True
wants.BLOCK_PIECES = 128
wants.can_keep_buffers = lambda abstract: abstract.kind not in ("jax", "key")

calls: list[str] = []
stacked, place_rows = staging._stage_stacked, placement.place_rows
staging._stage_stacked = lambda *given: calls.append("stacked") or stacked(*given)
placement.place_rows = lambda *given: calls.append("split") or place_rows(*given)

path = args[0]  # noqa: F821
# A process holds columns here, and each box of rows covers both processes.
mesh = jax.make_mesh((2, 2), ("a", "b"))
hosts = [np.random.default_rng(number).integers(0, 1 << 16, (8, 4), np.uint16) for number in range(300)]
for number, spec in enumerate((P("a", "b"), P(), P(None, ("b", "a")))):
    sharding = NamedSharding(mesh, spec)
    tree = [
        jax.make_array_from_callback(
            host.shape, sharding, lambda index, host=host: host[index].view(jax.numpy.bfloat16)
        )
        for host in hosts
    ]
    tree.append(jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda index: np.float32(number)))  # noqa: B023
    calls.clear()
    jaxckpt.save_async(f"{path}{number}", tree).wait()
    found = jaxckpt.restore(f"{path}{number}", tree)
    for host, leaf in zip(hosts, found, strict=False):
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == host[shard.index].tobytes(), spec
    # If both processes hold a leaf, each writes objects with too few leaves for stacking.
    assert "split" in calls, spec
    assert "stacked" in calls or number % 2, spec
# Scalars: each device of a process holds all of each.
everywhere = NamedSharding(mesh, P())
scalars = [jax.make_array_from_callback((), everywhere, lambda index, n=n: np.float32(n)) for n in range(100)]
jaxckpt.save(f"{path}-scalars", scalars)
calls.clear()
found = jaxckpt.restore(f"{path}-scalars", scalars)
assert calls == ["split"], calls
for number, leaf in enumerate(found):
    assert leaf.sharding == everywhere
    assert [float(shard.data) for shard in leaf.addressable_shards] == [number] * 2
# Large leaves: each process copies shards that it alone writes, and parts of those that both write.
cut_piece = device_to_host.cut_piece
device_to_host.cut_piece = lambda *given: calls.append("cut") or cut_piece(*given)
options = jaxckpt.Options(object_bytes=8 << 10, chunk_bytes=1 << 10)
host = np.arange(1 << 16, dtype=np.float32).reshape(256, 256)
for spec in (P("a", "b"), P()):
    leaf = jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])
    calls.clear()
    pending = jaxckpt.save_async(f"{path}-large", {"x": leaf}, overwrite=True, options=options)
    leaf.delete()
    pending.wait()
    assert bool(calls) == (spec == P()), spec
    assert jaxckpt.load_numpy(f"{path}-large")["x"].tobytes() == host.tobytes(), spec
print("the same bits")
