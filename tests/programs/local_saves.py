"""Saves steps into local folders, as each argument specifies, and prints what this process knows of them as JSON.

args: [{"path", "local", "options": of the Checkpointer, "tree": its name, "steps": [...], "plain": a path for a save}]
Prints one line for each argument, in order. If one fails, its line contains the error, and the next one runs.
"""

from __future__ import annotations

import json
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect

mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))


def laid(shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> jax.Array:
    values = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.make_array_from_callback(shape, sharding, lambda index: values[index].astype(dtype))


def tree(name: str, step: int, size: int) -> dict[str, Any]:
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
        "columns": laid((33, size), None, "model"),  # each process holds a part
        "whole": laid((7, 5)),
        "half": laid((size, 64), "data", "model", dtype=jnp.float16),
        "host": np.arange(1000.0) + step,
        "key": jax.random.key(step),
        "text": "x" * 300,
        "empty": jnp.zeros((0, 4)),
    }
    return {**fsdp, **mixed, "step": step}


passed = 0
run = Interconnect.permute


def counted(self: Any, pairs: Any, n_bytes: int, given: Any) -> Any:
    global passed
    passed += n_bytes if process_id in dict(pairs) else 0
    return run(self, pairs, n_bytes, given)


Interconnect.permute = counted


def run_one(given: dict[str, Any]) -> dict[str, Any]:
    global passed
    passed = 0

    def state(step: int) -> dict[str, Any]:
        return tree(given["tree"], step, given.get("rows", 64))

    options = given.get("options", {})
    if "options" in options:
        options["options"] = jaxckpt.Options(**options["options"])
    local = jaxckpt.LocalTier(given["local"], **options.pop("local", {}))
    with jaxckpt.Checkpointer(given["path"], local=local, on_preemption="ignore", **options) as steps:
        done = []
        for step in given["steps"]:
            own = {"position": f"{process_id}-{step}"}
            done.append(steps.save(step, state(step), process_state=own, metrics={"loss": 1 / (1 + step)}))
            if given.get("wait", True):
                steps.wait()
        held = steps.local_bytes(state(0))
    if "plain" in given:
        jaxckpt.save(given["plain"], state(given["steps"][-1]), process_state=own)
    return {
        "saved": done,
        "passed": passed,
        "own": held.own_bytes,
        "copied": held.copied_bytes,
        "sent": held.sent_bytes,
    }


for given in args:
    try:
        print(json.dumps(run_one(given)), flush=True)
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), flush=True)
