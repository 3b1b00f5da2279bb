"""Restores a foreign file in a job, where each process reads its own shards, and converts it for a mesh."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
restored = jaxckpt.restore(args["file"], mesh=mesh, specs=P("data", "model"))
for n in range(3):
    for shard in restored[f"w{n}"].addressable_shards:
        wanted = np.arange(n, n + 16 * 32, dtype=np.float32).reshape(16, 32)[shard.index]
        assert np.array_equal(shard.data, wanted)
jaxckpt.convert(args["file"], args["to"], mesh_shape={"data": 2, "model": 4}, specs=P("data"))
again = jaxckpt.restore(args["to"], mesh=mesh)
assert again["w1"].sharding.spec == P("data")
print(len(restored["w0"].addressable_shards))
