"""A tree of replicated, partly replicated and sharded leaves, host leaves and a PRNG key; and its check."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES: dict[str, tuple[tuple[int, ...], P]] = {
    "replicated": ((512, 256), P()),
    "embed": ((640, 96), P()),
    "rows": ((512, 512), P("data")),
    "columns": ((512, 512), P(None, "model")),
    "both": ((512, 512), P("data", "model")),
    "together": ((1024, 64), P(("data", "model"))),
    **{f"bias{i}": ((384,), P()) for i in range(20)},
    **{f"norm{i}": ((256,), P("model")) for i in range(20)},
}


def value(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(map(ord, name))).standard_normal(shape).astype(np.float32)


def mesh_of(*sizes: int, devices: list[Any] | None = None) -> Mesh:
    return Mesh(np.array(devices or jax.devices()).reshape(sizes), ("data", "model"))


def put(whole: np.ndarray[Any, Any], mesh: Mesh, spec: P) -> jax.Array:
    """A global array. Each process already holds all its values."""
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)


def make(mesh: Mesh) -> dict[str, Any]:
    tree = {name: put(value(name, shape), mesh, spec) for name, (shape, spec) in SHAPES.items()}
    return tree | {"host": value("host", (33,)), "step": 7, "count": jnp.int32(3), "key": jax.random.key(5)}


def check(tree: dict[str, Any]) -> None:
    for name, (shape, _) in SHAPES.items():
        whole = value(name, shape)
        for shard in tree[name].addressable_shards:
            assert np.array_equal(shard.data, whole[shard.index]), name
    assert np.array_equal(tree["host"], value("host", (33,)))
    assert tree["step"] == 7
    assert tree["count"] == 3
    assert np.array_equal(jax.random.key_data(tree["key"]), jax.random.key_data(jax.random.key(5)))
