"""Restores with read="auto" in a job, from a bucket and from a folder; prints what was planned to be received.

The limit below which nothing is shared is lowered, so that the checkpoint can be small.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args

import jaxckpt
from jaxckpt._restore import wants

wants.SHARED_READ_BYTES = 1
mesh = Mesh(np.array(jax.devices()), ("data",))
options = jaxckpt.Options(read="auto", timeout_seconds=60)
value = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)  # what the test has saved
empty = np.empty((0, 4), np.float32)
replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
targets: dict[str, Any] = {
    "replicated": {"w": replicated, "empty": replicated},
    "split": {"w": split, "empty": split},
    "numpy": {"w": value, "empty": empty},
}


def restored(path: str, target: Any) -> int:
    tree = jaxckpt.restore(path, target, options=options)
    for name, saved in (("w", value), ("empty", empty)):
        assert tree[name].shape == saved.shape
        shards = tree[name].addressable_shards if target is not targets["numpy"] else ()
        assert all(np.array_equal(shard.data, saved[shard.index]) for shard in shards)
        assert shards or np.array_equal(tree[name], saved)
    return jaxckpt.open(path).plan(target, options=options).received_bytes


bucket = {name: restored(args["bucket"], target) for name, target in targets.items()}
folder = {name: restored(args["folder"], target) for name, target in targets.items()}
print(json.dumps({"bucket": bucket, "folder": folder}))
