"""Saves and loads steps of several pytrees through Orbax v1 in two processes, which name them in different orders."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
import jaxckpt.orbax

jaxckpt.orbax.register_v1()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
names = ("model_params", "optimizer_state", "ema")


def made(number):
    whole = np.arange(64.0, dtype=np.float32) + number
    return {"w": jax.make_array_from_callback((64,), sharding, lambda index: whole[index]), "number": number}


def in_own_order(items):
    return dict(sorted(items.items(), reverse=process_id == 1))


def items_of(step):
    return in_own_order({name: made(10 * step + n) for n, name in enumerate(names)})


def require_loaded(loaded, step):
    for n, name in enumerate(names):
        assert loaded[name]["number"] == 10 * step + n, (name, loaded[name])
        for shard in loaded[name]["w"].addressable_shards:
            assert (shard.data == np.arange(64.0)[shard.index] + 10 * step + n).all()


with ocp.training.Checkpointer(f"{args}/run") as run:
    for step in range(5):
        assert run.save_checkpointables(step, {**items_of(step), "config": {"step": step}})
        require_loaded(run.load_checkpointables(step, items_of(0)), step)
    assert [found.step for found in run.checkpoints] == [*range(5)]
    assert run.load_checkpointables(4)["config"] == {"step": 4}

for step in range(3):
    response = ocp.save_checkpointables_async(f"{args}/{step}", items_of(step))
    response.result()
    require_loaded(ocp.load_checkpointables(f"{args}/{step}", items_of(0)), step)

# In process 0, the first pytree cannot be saved. Both processes still make the same calls.
bad = items_of(5)
if process_id == 0:
    bad["ema"]["w"].delete()
try:
    ocp.save_checkpointables(f"{args}/bad", bad)
except jaxckpt.JaxckptError as error:
    print(type(error).__name__)
ocp.save_checkpointables(f"{args}/after", items_of(6))
require_loaded(ocp.load_checkpointables(f"{args}/after", items_of(0)), 6)
print("all loaded")
