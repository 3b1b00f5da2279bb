"""Reads a tree as NumPy arrays, without starting a JAX backend."""

from __future__ import annotations

import sys

import numpy as np
from jax._src import xla_bridge
from sharded_tree import SHAPES, value

import jaxckpt

tree = jaxckpt.load_numpy(sys.argv[1])
assert not xla_bridge._backends, "load_numpy must not start a backend"
for name, (shape, _) in SHAPES.items():
    assert np.array_equal(tree[name], value(name, shape)), name

print("all checks passed")
