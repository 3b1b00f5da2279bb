"""Saves through Orbax's CheckpointManager in two processes, and restores onto another mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt.orbax


def make(over, spec, step):
    sharding = NamedSharding(over, spec)
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8) + step
    return {"w": jax.make_array_from_callback((8, 8), sharding, lambda index: whole[index]), "step": step}


grid = np.array(jax.devices())
mesh = Mesh(grid.reshape(2, 2), ("data", "model"))
options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
manager = ocp.CheckpointManager(args, options=options, handler_registry=jaxckpt.orbax.handler_registry())
for step in range(4):
    manager.save(step, args=ocp.args.StandardSave(make(mesh, P("data", "model"), step)))
manager.wait_until_finished()
assert manager.latest_step() == 3, manager.all_steps()
other = NamedSharding(Mesh(grid.reshape(4, 1), ("data", "model")), P(None, "data"))
target = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=other), "step": 0}
restored = manager.restore(2, args=ocp.args.StandardRestore(target))
for shard in restored["w"].addressable_shards:
    wanted = (np.arange(64.0, dtype=np.float32).reshape(8, 8) + 2)[shard.index]
    assert np.asarray(shard.data).tobytes() == wanted.tobytes()
print(restored["step"], restored["w"].sharding == other, len(manager.all_steps()))
manager.close()
