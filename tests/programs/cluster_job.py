"""Saves and restores the simulated job's tree in a real job; each process prints its requests to the service.

A client counts the requests to JAX's coordination service. The caller counts the requests to the store.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from joined import args, process_id

import jaxckpt
from jaxckpt._devices.shardings import partition_spec
from jaxckpt._job.call import Call
from jaxckpt._store import hedging

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cluster
import coordination


class CountingClient:
    """Wraps JAX's client, and counts the calls of each of its functions."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.requests = collections.Counter[str]()
        self.given: list[int] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.client, name)
        kind = coordination.KINDS.get(name)
        if kind is None:
            return function

        def counted(key: str, *rest: Any, **named: Any) -> Any:
            if "beat" not in key and not (rest and str(rest[0]).startswith('{"beat"')):  # their number varies
                self.requests[kind] += 1
            if kind == "set" and "/in/" in key:
                self.given.append(len(rest[0]))
            return function(key, *rest, **named)

        return counted

    def taken(self) -> dict[str, Any]:
        """The counts since the last call."""
        found = {"requests": dict(self.requests), "given": self.given}
        self.requests, self.given = collections.Counter(), []
        return found


hedging.Server.may_repeat = lambda server, is_very_late: False  # on a busy machine, some reads would be sent again
job = cluster.small_job(jax.process_count())
axes = dict(job.mesh)
mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
client: Any = CountingClient(distributed.global_state.client)
distributed.global_state.client = client


def value(path: str, shape: tuple[int, ...], dtype: str) -> Any:
    return np.random.default_rng(len(path)).integers(0, 100, shape).astype(dtype)


arrays: dict[str, Any] = {}
for path, (dtype, shape, spec) in cluster.leaves_of(job).items():
    whole = value(path, shape, jax.numpy.dtype(dtype))
    sharding = NamedSharding(mesh, partition_spec(spec))
    arrays[path] = jax.make_array_from_callback(shape, sharding, lambda at, whole=whole: whole[at])


def meet() -> None:
    with call.rendezvous("starting") as rendezvous:
        rendezvous.barrier()  # as after any call, the next one deletes its keys


with Call.of("before", args, None) as call:
    call.run(meet)
client.taken()
info = jaxckpt.save(args, cluster.nested(arrays))
saved = client.taken()
again = jaxckpt.restore(args)
restored = client.taken()
shared = jaxckpt.restore(args, options=job.options)
restored_shared = client.taken()
for tree in (again, shared):
    for ours, theirs in zip(jax.tree.leaves(cluster.nested(arrays)), jax.tree.leaves(tree), strict=True):
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
            assert np.array_equal(a.data, b.data)
calls = {"save": saved, "restore": restored, "restore, shared": restored_shared}
print(json.dumps({**calls, "bytes": info.process_bytes[process_id]}))
