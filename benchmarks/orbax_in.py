"""Restores an Orbax checkpoint with jaxckpt and with Orbax, in turn; medians of 3 rounds after a warm-up round.

2,000 leaves of 64 KiB over 8 simulated CPU devices, on the mesh 2×4 and then 4×2, as Orbax writes them by default
(OCDBT, Zarr v2, zstd), and all on one device. Takes two to three minutes.

    python benchmarks/orbax_in.py [folder]
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

LEAVES, SHAPE, ROUNDS = 2000, (128, 128), 3

Tree = dict[str, Any]


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))


def by_orbax(path: Path, target: Tree | None) -> Tree:
    with ocp.PyTreeCheckpointer() if target is None else ocp.StandardCheckpointer() as checkpointer:
        if target is not None:
            return checkpointer.restore(path, target)
        as_numpy = {f"{n:04d}": ocp.RestoreArgs(restore_type=np.ndarray) for n in range(LEAVES)}
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def by_jaxckpt(path: Path, target: Tree | None) -> Tree:
    return jaxckpt.load_numpy(path) if target is None else jaxckpt.restore(path, target)


def seconds(read: Callable[[Path, Tree | None], Tree], path: Path, target: Tree | None, wanted: Tree) -> float:
    begun = time.perf_counter()
    found = jax.block_until_ready(read(path, target))
    taken = time.perf_counter() - begun
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    return taken


def main(folder: Path) -> None:
    random = np.random.default_rng(0)
    wanted = {f"{n:04d}": random.standard_normal(SHAPE, np.float32) for n in range(LEAVES)}
    for name, saved_on in (
        ("8 devices", NamedSharding(mesh(2, 4), P("data", "model"))),
        ("1 device", jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    ):
        path = folder / name
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, {key: jax.device_put(value, saved_on) for key, value in wanted.items()})
        other = NamedSharding(mesh(4, 2), P("data", "model"))
        onto = {key: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=other) for key in wanted}
        for what, target in (("onto 4×2", onto), ("as NumPy", None)):
            taken: dict[Callable[..., Tree], list[float]] = {by_orbax: [], by_jaxckpt: []}
            for turn in range(ROUNDS + 1):
                for read in list(taken)[:: 1 if turn % 2 else -1]:
                    taken[read].append(seconds(read, path, target, wanted))
            theirs, ours = (statistics.median(times[1:]) for times in taken.values())
            print(f"saved on {name}, {what}: Orbax {theirs:.2f} s, jaxckpt {ours:.2f} s, ratio {theirs / ours:.1f}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
