"""Restores with read="shared" in a job of which some processes get no answers from storage, and compares every bit.

Does so twice, because the second restore needs the store too. Prints "restored".
"""

from __future__ import annotations

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._devices import interconnect
from jaxckpt._inspect import restore_plan
from jaxckpt._restore import restore, shared_exchange, wants

if args["accelerators"]:  # simulate a TPU slice: devices with their own memory and links
    wants.can_keep_buffers = lambda abstract: not abstract.on_devices
    interconnect.n_sending_devices = len
    shared_exchange.needs_whole_job = restore.needs_whole_job = restore_plan.needs_whole_job = lambda: True
shared_exchange._UNCOMPARED_SECONDS = 1.0
devices = np.array(jax.devices())
square = Mesh(devices.reshape(2, -1), ("data", "model"))
specs = [P(), P("model"), P("data")]
options = jaxckpt.Options(
    read="shared",
    host_bytes=1 << 20,
    timeout_seconds=args["timeout_seconds"],
    storage={"endpoint": args["endpoints"][process_id]},
)
shapes = {name: leaf.shape for name, leaf in jaxckpt.open(args["path"], options=options).leaves.items()}
target = {name: NamedSharding(square, specs[number % 3]) for number, name in enumerate(shapes)}
for _ in range(2):
    tree = jaxckpt.restore(args["path"], target, options=options)
    for name, shape in shapes.items():
        expected = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + int(name[1:])
        for shard in tree[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
print(json.dumps("restored"))
