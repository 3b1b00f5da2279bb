"""A job that saves and restores in a random order until processes are killed from outside; also the job after it.

args: path, folder (for notes), run (for steps), rows, seed, first (version), timeout, and `deaths`: for each victim, by
number, the seconds from the end of the first restore to its SIGKILL. Without deaths, the job makes one call of each
kind. Each process prints a line when it begins and ends a call, and how it ended.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

OPTIONS = {"timeout_seconds": args["timeout"], "object_bytes": 1 << 16}
MESH = Mesh(np.array(jax.devices()), ("data",))
ROWS, COLUMNS, LEAVES = args["rows"], 512, 3
FEW = Mesh(np.array(jax.devices()[:2]), ("data",))


def values(number: int, version: int) -> np.ndarray[Any, Any]:
    """A leaf, with other values at each position and in each version."""
    positions = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
    return positions * (2 * number + 3) + version


def make(version: int) -> dict[str, Any]:
    def one(number: int, spec: P) -> jax.Array:
        whole = values(number, version)
        return jax.make_array_from_callback(whole.shape, NamedSharding(MESH, spec), lambda index: whole[index])

    leaves: dict[str, Any] = {f"w{number}": one(number, P("data")) for number in range(LEAVES)}
    return leaves | {"replicated": one(LEAVES, P()), "version": np.full((), version)}


def version_of(tree: Any) -> int:
    """The version of a tree, all of whose values are those that this version has."""
    version = int(tree["version"])
    for number, name in enumerate([f"w{number}" for number in range(LEAVES)] + ["replicated"]):
        whole = values(number, version)
        for shard in tree[name].addressable_shards:
            assert np.array_equal(shard.data, whole[shard.index]), f"{name} of version {version}"
    return version


def restore(read: str) -> int:
    return version_of(jaxckpt.restore(args["path"], mesh=MESH, options=jaxckpt.Options(read=read, **OPTIONS)))


def overwrite(version: int, **layout: Any) -> None:
    jaxckpt.save(args["path"], make(version), overwrite=True, options=jaxckpt.Options(**OPTIONS), **layout)


def overwrite_in_background(version: int) -> None:
    tree, options = make(version), jaxckpt.Options(**OPTIONS)
    jaxckpt.save_async(args["path"], tree, overwrite=True, options=options).wait(600)


def step(version: int) -> None:
    steps.save(version, make(version))
    steps.wait()


CALLS = {
    "save": overwrite,
    "save_async": overwrite_in_background,
    "save with an exchange": lambda version: overwrite(version, mesh=FEW, specs=P("data")),
    "step": step,
    "restore": lambda _: restore("each"),
    "shared restore": lambda _: restore("shared"),
    "step restored": lambda _: version_of(steps.restore(mesh=MESH)),
}


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)


begun = time.monotonic()
steps = jaxckpt.Checkpointer(args["run"], keep_last=2, options=jaxckpt.Options(**OPTIONS))
if args["first"]:
    say("resumed", path=restore("each"), run=version_of(steps.restore(mesh=MESH)))
version = args["first"]
kinds = list(CALLS)
if args["deaths"]:
    if version == 0:
        overwrite(version)
        step(version)
    kinds = random.Random(args["seed"]).choices(kinds, k=1000)
    if (seconds := args["deaths"].get(str(process_id))) is not None:
        kill = f"sleep {seconds}; date +%s.%N > {args['folder']}/{process_id}; kill -9 {os.getpid()}"
        subprocess.Popen(["sh", "-c", kill])
try:
    for kind in kinds:
        version += 1
        say("begins", kind=kind, version=version)
        CALLS[kind](version)
        say("ends", kind=kind, version=version)
    steps.close()
    say("done")
except Exception as error:
    say("raises", error=f"{type(error).__name__}: {error}", ours=isinstance(error, jaxckpt.JaxckptError))
    sys.stderr.flush()
    if process_id == 0:  # as the docs advise, because JAX's service ends with this process
        time.sleep(args["grace"])
    os._exit(3)
