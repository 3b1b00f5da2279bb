"""Shared reads in which one process of a job fails or has other arguments; each process prints its errors."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt
from jaxckpt.rules import Rule, Rules

mesh = Mesh(np.array(jax.devices()), ("data",))
shared = jaxckpt.Options(read="shared", timeout_seconds=20)
each = jaxckpt.Options(timeout_seconds=20)
noted: dict[str, str] = {}


def restore(
    select: str = "layer *", options: jaxckpt.Options = shared, axis: str | None = None, dtype: str | None = None
) -> Any:
    sharding = NamedSharding(mesh, P(axis))
    target = {f"layer {number}": sharding for number in range(6)}
    return jaxckpt.restore(args["path"], target, select=select, strict=False, dtype=dtype, options=options)


def note(case: str, call: Callable[[], Any]) -> None:
    try:
        call()
        noted[case] = "fine"
    except jaxckpt.JaxckptError as error:
        noted[case] = f"{type(error).__name__}: {error}"


def unreadable(*_: Any) -> int:
    raise OSError(errno.EIO, "this disk is bad")


preadv = os.preadv
if process_id == 1:
    os.preadv = unreadable
note("bad disk", restore)
os.preadv = preadv
note("process 0 reads each", lambda: restore(options=each if process_id == 0 else shared))
note("process 1 reads each", lambda: restore(options=each if process_id == 1 else shared))
note("another target", lambda: restore(axis="data" if process_id == 2 else None))
note("another selection", lambda: restore(select="layer 1" if process_id == 1 else "layer *"))
# host_bytes sets the size of each round. With different sizes, a process would take bytes of the wrong leaf.
little = jaxckpt.Options(read="shared", timeout_seconds=20, host_bytes=1 << 18)
note("another host_bytes", lambda: restore(options=little if process_id == 0 else shared))
note("another dtype", lambda: restore(options=each, dtype="float32" if process_id == 1 else None))
note("another layout", lambda: restore(options=each, axis="data" if process_id == 2 else None))
note("works", restore)


def swap(swapped: bool, options: jaxckpt.Options) -> None:
    """Give two leaves with equal shapes the names of each other."""
    names = {"a": "b", "b": "a"} if swapped else None
    jaxckpt.restore(squares, mesh=mesh, specs=P(), rename=names, options=options)


def transpose(layout: str) -> None:
    rules = Rules([Rule(source=name, target=name, layout=layout) for name in "ab"])
    jaxckpt.restore(squares, mesh=mesh, specs=P(), rename=rules, options=each)


# One array would consist of shards of two leaves, or of a leaf and its transpose.
squares = f"{args['path']} of squares"
jaxckpt.save(squares, {"a": jnp.arange(36.0).reshape(6, 6), "b": jnp.ones((6, 6))})
note("other names", lambda: swap(process_id == 1, each))
note("other names, shared", lambda: swap(process_id == 2, shared))
note("other rules", lambda: transpose("x y -> y x" if process_id == 1 else "x y -> x y"))
note("the same names", lambda: swap(True, each))
note("the same rules", lambda: transpose("x y -> y x"))
print(json.dumps(noted))
