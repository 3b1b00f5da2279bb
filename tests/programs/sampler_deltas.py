"""A job publishes sharded weights for samplers of other libraries, three versions in each encoding.

args: {"model": a Hugging Face folder, "out": a folder, "encodings": [...]}
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
rules = jaxckpt.rules.huggingface_rules(args["model"], scan=True)


def spread(path: str, leaf: Any) -> P:
    dims = [dim for dim, side in enumerate(leaf.shape) if side % 4 == 0]
    return P(*("model" if dims and dim == dims[0] else None for dim in range(len(leaf.shape))))


params = jaxckpt.restore(args["model"], mesh=mesh, specs=spread, rename=rules)
states = [jax.tree.map(lambda leaf, step=step: leaf * (1 + 1e-3 * step), params) for step in range(3)]
for step, state in enumerate(states):
    bits = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    jaxckpt.save(f"{args['out']}/expected-{step}", bits)
for encoding in args["encodings"]:
    out = f"{args['out']}/{encoding}"
    with jaxckpt.weights.Publisher(out, format=encoding, rules=rules.inverse()) as publisher:
        for step, state in enumerate(states):
            publisher.publish(step, state)
