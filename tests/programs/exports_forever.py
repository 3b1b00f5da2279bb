"""Exports versions of a small Llama to one folder until it is killed. The version is what all weights are scaled by.

args: {"model": a Hugging Face folder, "out": the folder, "shard_bytes": of a file, "first": the first version}
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt
from jaxckpt._formats import direct_writes, safetensors

safetensors.SHARD_BYTES = args["shard_bytes"]
direct_writes.SHARED_RUN_BYTES = args["run_bytes"]
rules = jaxckpt.rules.huggingface_rules(args["model"])
mesh = Mesh(np.array(jax.devices()), ("model",))


def spread(path: str, leaf: Any) -> P:
    dims = [dim for dim, side in enumerate(leaf.shape) if side % 4 == 0]
    return P(*("model" if dims and dim == dims[-1] else None for dim in range(len(leaf.shape))))


weights = jaxckpt.restore(args["model"], mesh=mesh, specs=spread, rename=rules, dtype=jnp.float32)
scale = jax.jit(lambda tree, by: jax.tree.map(lambda leaf: leaf * by, tree))
for version in itertools.count(args["first"]):
    tree = scale(weights, np.float32(version))
    jaxckpt.save(args["out"], tree, format="safetensors", rename=rules.inverse(), overwrite=True)
    print(version, flush=True)
