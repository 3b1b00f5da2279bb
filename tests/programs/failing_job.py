"""A job in which the storage of one process after another fails in bursts. Each process prints what it has seen."""

from __future__ import annotations

import json
from typing import Any

import bursts
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

STEPS = 20
mesh = Mesh(np.array(jax.devices()), ("data",))
whole = jax.jit(lambda step: jnp.full((len(jax.devices()), 3000), step), out_shardings=NamedSharding(mesh, P("data")))
options = jaxckpt.Options(sync=False, timeout_seconds=30)
outcomes: list[str] = []
for number, (policy, seed) in enumerate(args["rounds"]):
    plan = bursts.short_bursts(seed * 100 + process_id, STEPS)
    # At most one process fails at a time, otherwise all together fail for longer than three saves.
    plan = [burst for count, burst in enumerate(plan) if count % len(jax.devices()) == process_id]
    folder = f"{args['folder']}/{number}"
    more: dict[str, Any] = {}
    if args["local"]:
        more = {"every": 2, "local": jaxckpt.LocalTier(f"{folder}-local", every=1)}
    with jaxckpt.Checkpointer(folder, on_failure=policy, max_failures=8, options=options, **more) as checkpoints:
        for step in bursts.Training(plan, bursts.refuse_files).steps(STEPS):
            checkpoints.save(step, {"w": whole(step), "step": step})
    latest = checkpoints.latest_step()
    restored = checkpoints.restore()
    values = {float(value) for shard in restored["w"].addressable_shards for value in np.asarray(shard.data).ravel()}
    assert values == {latest}, (values, latest)
    due = range(0, STEPS + 1, more.get("every", 1))
    missing = [step for step in bursts.unaccounted(folder, STEPS) if step in due]
    outcomes.append(f"neither published nor reported: {missing}" if missing else "all accounted for")
    checkpoints.close()
print(json.dumps([outcomes, sum(len(jaxckpt.Run(f"{args['folder']}/{n}").incidents()) for n in range(len(outcomes)))]))
