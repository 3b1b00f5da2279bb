"""Saves a sharded array to the given path, in four objects."""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

mesh = Mesh(np.array(jax.devices()), ("a",))
array = jax.device_put(np.ones((64, 1024), np.float32), NamedSharding(mesh, P("a")))
jaxckpt.save(sys.argv[1], {"w": array}, options=jaxckpt.Options(object_bytes=64 << 10, chunk_bytes=4096))
