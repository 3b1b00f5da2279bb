"""Saves steps into local folders, as the arguments say, and prints what this process knows of them as JSON.

`{"path", "local", "options": of the Checkpointer, "tree": a name in TREES, "steps": [...], "plain": a path for a save}`
"""

from __future__ import annotations

import json
import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt
from jaxckpt._save import peers

mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))


def laid(shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> jax.Array:
    values = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index].astype(dtype))


def tree(name: str, step: int) -> dict[str, Any]:
    size = args.get("rows", 64)
    fsdp = {
        "w": laid((size, 96), ("data", "model")),
        "b": [laid((size * 2,), ("data", "model"), dtype=jnp.bfloat16) for _ in range(3)],
    }
    if name == "fsdp":
        return {**fsdp, "step": step}
    if name == "data":
        return {"w": laid((size, 96)), "b": laid((5, 7), dtype=jnp.int8), "step": step}
    mixed = {
        "rows": laid((size, 33), "data"),
        "columns": laid((33, size), None, "model"),  # held by every process in part
        "whole": laid((7, 5)),
        "half": laid((size, 64), "data", "model", dtype=jnp.float16),
        "host": np.arange(1000.0) + step,
        "key": jax.random.key(step),
        "text": "x" * 300,
        "empty": jnp.zeros((0, 4)),
    }
    return {**fsdp, **mixed, "step": step}


passed = 0
run = peers._Permutations.run


def counted(self: Any, channel: Any, one: Any, given: Any) -> Any:
    global passed
    passed += one.n_bytes if process_id in one.givers else 0
    return run(self, channel, one, given)


peers._Permutations.run = counted
options = args.get("options", {})
if "options" in options:
    options["options"] = jaxckpt.Options(**options["options"])
with jaxckpt.Checkpointer(args["path"], local=args["local"], on_preemption="ignore", **options) as steps:
    infos, done = {}, []
    for step in args["steps"]:
        state = {"position": f"{process_id}-{step}"}
        saved = steps.save(
            step,
            tree(args["tree"], step),
            process_state=state,
            metrics={"loss": 1 / (1 + step)},
            on_done=lambda info, step=step: infos.update({step: info}),
        )
        done.append(saved)
        if args.get("wait", True):
            steps.wait()
    held = steps.local_bytes(tree(args["tree"], 0))
    info = {step: {"blocked": found.blocked_seconds, "path": found.path} for step, found in infos.items()}
if "plain" in args:
    jaxckpt.save(args["plain"], tree(args["tree"], args["steps"][-1]), process_state=state)
print(
    json.dumps(
        {
            "infos": info,
            "saved": done,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "passed": passed,
            "own": held.own_bytes,
            "copied": held.copied_bytes,
            "sent": held.sent_bytes,
        }
    )
)
