"""Parts of states for Orbax's checkpoints: a mesh, arrays on it, a namedtuple."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Moments = collections.namedtuple("Moments", "mu nu")


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("data", "model"))


def on(array: Any, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh(2, 4), spec))
