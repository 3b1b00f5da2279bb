"""Restores open checkpoints in two processes: the same one, and a different step of a run in each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
place = jax.jit(lambda value: value, out_shardings=NamedSharding(mesh, P("data")))
with jaxckpt.Checkpointer(args, every=1) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, {"w": place(jnp.arange(8.0) + step)})
    checkpoints.wait()

same = jaxckpt.open(f"{args}@1", rename={"w": "v"}).restore(mesh=mesh)
for shard in same["v"].addressable_shards:
    np.testing.assert_array_equal(shard.data, (np.arange(8.0) + 1)[shard.index])
try:
    jaxckpt.open(f"{args}@{1 + process_id}").restore(mesh=mesh)
except jaxckpt.errors.PeerError as error:
    message = f"{type(error).__name__}: {error}"
else:
    raise SystemExit("nothing was raised")
assert "the processes made different jaxckpt calls" in message, message
print("all checks passed")
