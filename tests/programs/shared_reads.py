"""Restores onto many layouts in a job with read="shared", once with read="each", and compares every bit.

Prints for each layout and way of reading: the number of bytes that this process read, should read by the plan, and
should receive from others by the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from counted_reads import counts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt._devices import interconnect
from jaxckpt._inspect import restore_plan
from jaxckpt._restore import restore, shared_exchange, wants

jax.config.update("jax_enable_x64", True)
if args["accelerators"]:  # simulate a TPU slice: devices with their own memory and links
    wants.can_keep_buffers = lambda abstract: not abstract.on_devices
    interconnect.n_sending_devices = len
    shared_exchange.needs_whole_job = restore.needs_whole_job = restore_plan.needs_whole_job = lambda: True
host = jaxckpt.load_numpy(args["path"])
saved = jaxckpt.open(args["path"])
devices = np.array(jax.devices())
shuffled = np.random.default_rng(args["seed"]).permutation(len(devices))


def layouts() -> Iterator[tuple[str, Mesh, Any]]:
    """(name, mesh, function from a shape to a spec)"""
    rng = np.random.default_rng(args["seed"])  # the same in every process

    def random(mesh: Mesh) -> Any:
        def spec(shape: tuple[int, ...]) -> P:
            left, entries = list(rng.permutation(mesh.axis_names)), []
            for side in shape:
                axes = [str(left.pop()) for _ in range(rng.integers(0, len(left) + 1))]
                fits = side % int(np.prod([mesh.shape[axis] for axis in axes])) == 0
                entries.append(tuple(axes) if fits else None)
            return P(*entries)

        return spec

    line, square = Mesh(devices, ("data",)), Mesh(devices.reshape(4, 2), ("data", "model"))
    cut = Mesh(devices[2:].reshape(3, 2), ("data", "model"))  # process 0 has no devices in it
    mixed = Mesh(devices[shuffled].reshape(2, 4), ("data", "model"))
    odd = Mesh(devices[shuffled][:6].reshape(2, 3), ("data", "model"))
    yield "replicated", line, lambda shape: P()
    yield "fsdp", line, lambda shape: P("data") if shape and shape[0] % 8 == 0 else P()
    yield (
        "hybrid",
        Mesh(devices.reshape(2, 4), ("data", "model")),
        lambda shape: P("model") if shape and shape[0] % 4 == 0 else P(),
    )
    yield "columns", square, lambda shape: P(None, "model") if len(shape) > 1 and shape[1] % 2 == 0 else P()
    for name, mesh in {"square": square, "cut": cut, "mixed": mixed, "odd": odd}.items():
        yield f"random {name}", mesh, random(mesh)


def check(leaf: Any, path: str, expected: Any) -> None:
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes(), path
        return
    assert leaf.dtype == np.asarray(expected).dtype, path
    for shard in leaf.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(np.asarray(expected)[shard.index]).tobytes(), (
            path
        )


def compare(tree: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(host)
    for (path, leaf), expected in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(host), strict=True):
        check(leaf, jax.tree_util.keystr(path), expected)


def restored(name: str, target: Any, **settings: Any) -> None:
    for read in ("shared", "each") if name == "replicated" else ("shared",):
        options = jaxckpt.Options(read=read, host_bytes=args["host_bytes"], timeout_seconds=30, **settings)
        counts.clear()
        tree = jaxckpt.restore(args["path"], target, options=options)
        n_bytes = sum(counts)
        compare(tree)
        plan = saved.plan(target, options=options)
        cost = next((part.cost for part in plan.processes if part.process == process_id), None)
        print(json.dumps([name, read, n_bytes, cost.read_bytes if cost else 0, cost.received_bytes if cost else 0]))


for name, mesh, spec in layouts():
    target = {
        path: NamedSharding(mesh, spec(leaf.shape[:-1] if leaf.kind == "key" else leaf.shape))
        if not path.startswith("host")
        else host[path]
        for path, leaf in saved.leaves.items()
    }
    restored(name, target)
for leaf in ("key", "scalar"):  # one process reads it and passes it to the other three
    one = jaxckpt.restore(args["path"], select=leaf, options=jaxckpt.Options(read="shared"))[leaf]
    check(one, leaf, host[leaf])
