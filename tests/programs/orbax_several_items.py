"""Saves steps of two and of three items through Orbax's CheckpointManager in two processes."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt.orbax

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))


def made(number):
    whole = np.arange(64.0, dtype=np.float32) + number
    return {"w": jax.make_array_from_callback((64,), sharding, lambda index: whole[index]), "number": number}


def run(folder, names, **others):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager(folder, options=options, handler_registry=jaxckpt.orbax.handler_registry()) as manager:
        for step in range(12):
            items = {name: ocp.args.StandardSave(made(10 * step + n)) for n, name in enumerate(names)}
            manager.save(step, args=ocp.args.Composite(**items, **others))
        manager.wait_until_finished()
        found = manager.restore(11)
        for n, name in enumerate(names):
            assert found[name]["number"] == 110 + n, (name, found[name])
            for shard in found[name]["w"].addressable_shards:
                assert (shard.data == np.arange(64.0)[shard.index] + 110 + n).all()
        print(manager.all_steps(), found.get("config"))


run(f"{args}/two", ("params", "opt"))
run(f"{args}/three", ("params", "opt", "ema"), config=ocp.args.JsonSave({"a": 1}))
