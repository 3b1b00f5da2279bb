"""Restores numbers as arrays on the devices of two processes, and of one process alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

saved = {"best": float("nan"), "step": 7}
jaxckpt.save(args, saved)
for devices in (jax.devices(), jax.devices()[2:]):
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P())
    target = {
        "best": jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
    }
    restored = jaxckpt.restore(args, target, options=jaxckpt.Options(cast="unsafe"))
    own = [device for device in devices if device.process_index == process_id]
    for name, leaf in restored.items():
        assert (leaf.dtype, leaf.sharding) == (target[name].dtype, sharding)
        assert [shard.device for shard in leaf.addressable_shards] == own
        assert all(np.array_equal(shard.data, saved[name], equal_nan=True) for shard in leaf.addressable_shards)

# Only the second process holds the number that the cast would change.
across = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
counts = jax.make_array_from_callback((4,), across, lambda index: np.array([1, 2, 3, -4], np.int32)[index])
jaxckpt.save(f"{args}-counts", {"counts": counts, "step": jnp.int32(7)})
target = {name: jax.ShapeDtypeStruct(shape, jnp.uint32) for name, shape in (("counts", (4,)), ("step", ()))}
target["counts"] = target["counts"].update(sharding=across)
for read in ("each", "shared"):
    options = jaxckpt.Options(read=read)
    step = jaxckpt.restore(f"{args}-counts", target, select="step", strict=False, options=options)["step"]
    assert (step.dtype, int(step)) == (jnp.uint32, 7)
    try:
        jaxckpt.restore(f"{args}-counts", target, options=options)
    except jaxckpt.MismatchError as error:
        print(*error.paths)
print("all checks passed")
