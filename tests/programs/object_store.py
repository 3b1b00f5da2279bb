"""Saves, restores or loads sharded arrays at a URL in a job: {"save", "restore" or "load": url}."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt

SHAPES = {"rows": ((64, 48), P("a")), "both": ((32, 64), P("a", "b")), "whole": ((40,), P())}


def value(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).standard_normal(SHAPES[name][0]).astype(np.float32)


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), ("a", "b"))


def make(mesh: Mesh) -> dict[str, Any]:
    return {
        name: jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda at, name=name: value(name)[at])
        for name, (shape, spec) in SHAPES.items()
    } | {"step": 3}


def check(tree: dict[str, Any]) -> None:
    for name in SHAPES:
        for shard in tree[name].addressable_shards:
            assert np.array_equal(shard.data, value(name)[shard.index]), name
    assert tree["step"] == 3


if "save" in args:
    jaxckpt.save(args["save"], make(mesh_of(2, 4)))
elif "restore" in args:
    check(jaxckpt.restore(args["restore"], mesh=mesh_of(4, 2)))
else:
    tree = jaxckpt.load_numpy(args["load"])
    assert all(np.array_equal(tree[name], value(name)) for name in SHAPES)

print("all checks passed")
