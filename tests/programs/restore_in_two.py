"""Restores a tree in a job; each process prints the number of bytes that it read, planned and needed."""

from __future__ import annotations

import json

from counted_reads import counts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import check, mesh_of

import jaxckpt

mesh = mesh_of(2, 2)
tree = jaxckpt.restore(args, mesh=mesh)
read = sum(counts)
check(tree)
assert tree["both"].sharding == NamedSharding(mesh, P("data", "model"))
plan = jaxckpt.open(args).plan(mesh=mesh).processes[process_id].cost
print(json.dumps({"read": read, "planned": plan.read_bytes, "needed": plan.needed_bytes}))
