"""Saves or restores parameters and Adam's state on a mesh of all devices: `save|restore PATH DATA MODEL`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt


def state() -> Any:
    random = np.random.default_rng(0)
    layers = [
        {"w": random.standard_normal((112, 448)).astype("bfloat16"), "b": np.arange(448.0, dtype=np.float32)}
        for _ in range(3)
    ]
    embed = random.standard_normal((448, 112)).astype(np.float32)
    params = jax.tree.map(jnp.asarray, {"embed": embed, "layers": layers})
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": jnp.int32(12)}


def spec(leaf: Any) -> P:
    return P("data", "model") if leaf.ndim == 2 else P("model") if leaf.ndim == 1 else P()


action, path, *sides = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()).reshape([int(side) for side in sides]), ("data", "model"))
if action == "save":
    assert len(jax.devices()) == 64
    jaxckpt.save(path, jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec(leaf))), state()))
else:
    target = jax.eval_shape(state)
    tree = jaxckpt.restore(path, target, mesh=mesh)
    assert jax.tree.structure(tree) == jax.tree.structure(target)
    for got, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(state()), strict=True):
        assert got.sharding == NamedSharding(mesh, spec(got))
        assert len(got.sharding.device_set) == len(jax.devices())
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()

print("all checks passed")
