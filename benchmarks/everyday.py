"""What a user waits for every day, in milliseconds: jaxckpt compared with Orbax, both with their defaults.

Ten small leaves; 1 GiB that is saved and deleted while eight other processes compute; a run of 5,000 kept steps;
a restore of 20,000 leaves that is refused, because one leaf has another shape; the start of a run in a bucket (moto's
S3 server, to which Orbax cannot write). The contenders take turns; reported are medians over the rounds. The number of
requests for the bucket does not depend on the machine.

    python benchmarks/everyday.py
"""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import steady

if __name__ == "__main__":
    steady.begin()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

import contenders
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import report
import servers
import stores
import workloads
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.errors import MismatchError

STEPS = 5_000
LEAVES = 20_000
Calls = dict[str, Callable[[], Any]]
"""By contender."""


def sharded(count: int, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    values = np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)
    return {f"w{number}": jax.device_put(value, NamedSharding(mesh, P("data"))) for number, value in enumerate(values)}


def small_trees(folder: Path) -> Iterator[tuple[str, Calls]]:
    """Ten leaves of 256 bytes."""
    tree, ours, theirs = sharded(10, (8, 8)), folder / "ours", folder / "theirs"
    checkpointer = ocp.PyTreeCheckpointer()
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)

    def save(path: Path, write: Callable[[], object]) -> None:
        shutil.rmtree(path, ignore_errors=True)
        write()

    yield (
        "ten small leaves, save",
        {
            "jaxckpt": lambda: save(ours, lambda: jaxckpt.save(ours, tree)),
            "Orbax": lambda: save(theirs, lambda: checkpointer.save(theirs, tree)),
        },
    )
    yield (
        "ten small leaves, restore",
        {
            "jaxckpt": lambda: jax.block_until_ready(jaxckpt.restore(ours, target)),
            "Orbax": lambda: checkpointer.restore(theirs, item=target, restore_args=arguments),
        },
    )


def on_a_busy_machine(folder: Path) -> Iterator[tuple[str, Calls]]:
    """16 leaves of 64 MiB, saved and deleted while eight processes compute."""
    workload = workloads.workload("a")
    tree = workload.place()
    kinds = [kind for kind in contenders.CONTENDERS if kind.name in ("jaxckpt", "Orbax raw", "Orbax OCDBT")]
    taking_part = {kind.name: kind(folder, workload) for kind in kinds}

    def save(one: contenders.Contender) -> None:
        one.save(tree)
        one.remove()

    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        yield (
            "1 GiB, eight processes compute",
            {name: functools.partial(save, one) for name, one in taking_part.items()},
        )
    finally:
        for process in spinning:
            process.kill()


def long_runs(folder: Path) -> Iterator[tuple[str, Calls]]:
    """A run that has kept its 5,000 steps."""
    tree, ours, theirs = sharded(2, (8, 8)), folder / "run", folder / "manager"
    with jaxckpt.Checkpointer(ours, background=False, options=jaxckpt.Options(sync=False)) as run:
        for step in range(STEPS):
            run.save(step, tree)
    with ocp.CheckpointManager(theirs) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree))
    for step in range(1, STEPS):  # it would take minutes to save them
        shutil.copytree(theirs / "0", theirs / str(step))
    next_step = itertools.count(STEPS)
    manager = ocp.CheckpointManager(theirs)
    checkpoints = jaxckpt.Checkpointer(ours, background=False)

    def save_with_orbax() -> None:
        manager.save(next(next_step), args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()

    assert len(jaxckpt.Run(ours).steps()) == len(manager.all_steps()) == STEPS
    yield (
        "5,000 steps, open the run",
        {
            "jaxckpt": lambda: jaxckpt.Checkpointer(ours).close(),
            "Orbax": lambda: ocp.CheckpointManager(theirs).close(),
        },
    )
    yield (
        "5,000 steps, save one more",
        {"jaxckpt": lambda: checkpoints.save(next(next_step), tree), "Orbax": save_with_orbax},
    )
    yield (
        "5,000 steps, list them",
        {"jaxckpt": lambda: jaxckpt.Run(ours).steps(), "Orbax": lambda: manager.all_steps(read=True)},
    )
    command = [sys.executable, "-m", "jaxckpt", "ls", str(ours)]
    yield (
        "5,000 steps, `jaxckpt ls`",
        {"jaxckpt": lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)},
    )
    checkpoints.close()
    manager.close()


def refused(folder: Path) -> Iterator[tuple[str, Calls]]:
    """20,000 leaves, of which one has another shape in the target."""
    path = folder / "many"
    values = np.random.default_rng(0).normal(size=(LEAVES, 32)).astype(np.float32)
    jaxckpt.save(path, {f"w{number}": value for number, value in enumerate(values)})
    target = {f"w{number}": jax.ShapeDtypeStruct((32,), np.float32) for number in range(LEAVES)}
    target[f"w{LEAVES // 2}"] = jax.ShapeDtypeStruct((33,), np.float32)

    def restore() -> None:
        with pytest.raises(MismatchError):
            jaxckpt.restore(path, target)

    yield "20,000 leaves, an error", {"jaxckpt": restore}


def in_buckets(requests: dict[str, int]) -> Iterator[tuple[str, Calls]]:
    """A run of 100 steps in a bucket. Counts what the bucket is asked for, by kind."""
    with stores.moto() as server, pytest.MonkeyPatch.context() as patch, servers.bucket(server, patch) as bucket:
        tree = sharded(2, (8, 8))
        with jaxckpt.Checkpointer(bucket.url, background=False) as run:
            for step in range(100):
                run.save(step, tree)

        def resume() -> None:
            bucket.proxy.clear()
            with jaxckpt.Checkpointer(bucket.url) as run:
                run.restore_or_init(lambda: tree)
            requests.clear()
            requests.update(bucket.proxy.counted())

        yield "a bucket, 100 steps, resume", {"jaxckpt": resume}


def main() -> None:
    arguments = report.parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=9)
    given = arguments.parse_args()
    logging.disable(logging.WARNING)
    parent = given.dir or Path("/dev/shm")
    rows: dict[str, dict[str, list[float]]] = {}
    requests: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        parts = small_trees(folder), on_a_busy_machine(folder), refused(folder), long_runs(folder), in_buckets(requests)
        for title, calls in itertools.chain(*parts):
            times: dict[str, list[float]] = {contender: [] for contender in calls}
            for number in range(given.rounds + 1):
                for contender, call in [*calls.items()][:: (-1) ** number]:
                    begin = time.perf_counter()
                    call()
                    if number:  # the first compiles and warms up
                        times[contender].append(1e3 * (time.perf_counter() - begin))
            rows[title] = times
            cells = (f"{contender} {statistics.median(found):.1f} ms" for contender, found in times.items())
            print(f"{title:32}" + "   ".join(cells), flush=True)
    print(f"requests for the bucket: {requests}")
    result = {**report.surroundings(parent), "milliseconds": rows, "requests": requests}
    report.write("everyday", result, given.json)


if __name__ == "__main__":
    main()
