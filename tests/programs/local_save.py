"""Saves two steps in many layouts, twice: both into a directory; then one into a directory and one into local
folders."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

devices = np.array(jax.devices())
line, square = Mesh(devices, ("data",)), Mesh(devices.reshape(-1, 2), ("data", "model"))


def placed(seed: int, shape: tuple[int, ...], dtype: str, mesh: Mesh, spec: P) -> jax.Array:
    raw = np.random.default_rng(seed).integers(0, 1 << 16, shape).astype(dtype)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index: raw[index])


def state(step: int) -> dict[str, Any]:
    fsdp = {f"layer {n}": placed(step + n, (96, 512), "bfloat16", line, P("data")) for n in range(4)}
    small = {f"small {n}": placed(step - n, (64,), "float32", line, P()) for n in range(20)}
    return {
        **fsdp,
        **small,
        "replicated": placed(step, (64, 1000), "float32", line, P()),
        "mixed": placed(step, (240, 480), "float32", square, P("data", "model")),
        "columns": placed(step, (240, 480), "int32", square, P(None, "model")),
        "tied": (tied := placed(step, (128, 64), "float16", square, P("model"))),
        "tied too": tied,
        "key": jax.random.key(step),
        "host": np.random.default_rng(step).integers(0, 256, (40, 40)),
        "number": step,
        "empty": placed(step, (0, 4), "float32", line, P()),
    }


options = jaxckpt.Options(chunk_bytes=16 << 10, object_bytes=64 << 10)
with jaxckpt.Checkpointer(args["saved"], options=options) as steps:
    for step in (30, 40):
        steps.save(step, state(step), metrics={"loss": 1 / step}, process_state={"at": [step, process_id]})
host = f"{args['hosts']}/host {process_id}"
with jaxckpt.Checkpointer(args["run"], every=30, local=jaxckpt.LocalTier(host, every=40), options=options) as steps:
    for step in (30, 40):
        steps.save(step, state(step), metrics={"loss": 1 / step}, process_state={"at": [step, process_id]})

print("all checks passed")
