"""A job that loses a host resumes from the memory of the others: the local tier of jaxckpt.Checkpointer.

Four processes of two simulated devices each train on one mesh. Each stands for a host, with its own folder. The
demonstration kills the job and deletes the folder of one process, resumes with the three others, and later with four
again. Each loss must equal that of an uninterrupted run of one process. If any bit differs, the exit status is 1.

    python examples/elastic.py
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

BATCH = 24  # examples per step, over all devices; divisible by 8 and 6
STEPS, EVERY, LOCAL_EVERY = 40, 20, 5
FIXED = 2.0**20  # scale of the fixed-point numbers that are summed


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    """The loss of one example."""
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - jnp.sin(x)) ** 2)


def train(folder: Path, host: int) -> None:
    """The program of every process, for any number of processes."""
    mesh = Mesh(jax.devices(), ("data",))
    shardings = {"in": NamedSharding(mesh, P(None, "data")), "out": NamedSharding(mesh, P("data"))}

    def init() -> dict:
        first = np.random.default_rng(0).standard_normal((12, 96), np.float32) / 4
        return {"in": jnp.asarray(first), "out": jnp.zeros((96, 12))}

    def mean(values: jax.Array) -> jax.Array:
        """The mean over all examples. Sums of integers have the same bits on every mesh; sums of floats do not."""
        fixed = jnp.round(values * FIXED).astype(jnp.int32).sum(0)
        return jax.lax.psum(fixed, "data") / (BATCH * FIXED)

    def gradient(params: dict, batch: jax.Array) -> tuple[jax.Array, dict]:
        # Compute one example at a time, so that the result does not depend on the number of examples per device.
        results = jax.lax.map(lambda x: jax.value_and_grad(loss_of)(params, x), batch)
        return jax.tree.map(mean, results)

    batch_gradient = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)

    def train_step(params: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
        loss, gradients = batch_gradient(params, batch)
        return jax.tree.map(lambda value, grad: value - grad / 2, params, gradients), loss

    jitted = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())))
    tier = jaxckpt.LocalTier(folder / f"host-{host}", every=LOCAL_EVERY) if jax.process_count() > 1 else None
    with jaxckpt.Checkpointer(folder / "storage", every=EVERY, local=tier) as checkpoints:
        last, params = checkpoints.restore_or_init(jax.jit(init, out_shardings=shardings))
        for step in range((last or 0) + 1, STEPS + 1):
            batch = np.random.default_rng(step).standard_normal((BATCH, 12), np.float32)
            params, loss = jitted(params, batch)
            checkpoints.save(step, params)
            print("loss", step, float(loss).hex(), flush=True)


def run(folder: Path, hosts: Sequence[int], until: int = STEPS, lost: int | None = None) -> dict[int, str]:
    """Stands for your cluster's scheduler: start one process per host, and kill all of them after step `until`.

    Then delete the folder of the lost host, if any. Returns the loss of each step as text.
    """
    address = f"localhost:{random.randrange(20_000, 32_000)}"
    devices = 8 if len(hosts) == 1 else 2
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    job = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(host), address, str(len(hosts)), str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if until < STEPS else None,  # JAX logs many errors about the killed processes
            text=True,
        )
        for index, host in enumerate(hosts)
    ]
    losses: dict[int, str] = {}
    try:
        for line in job[0].stdout:
            match line.split():
                case ["loss", step, loss]:
                    losses[int(step)] = loss
                    if int(step) == until < STEPS:
                        break
                case _:
                    pass  # printed by gloo
        else:
            assert [process.wait(300) for process in job] == [0] * len(job)
    finally:
        for process in job:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    if lost is not None:
        shutil.rmtree(folder / f"host-{lost}")
    ending = f", then host {lost} is lost" if lost is not None else ""
    print(f"processes: {len(hosts)}, steps {min(losses)} to {max(losses)}{ending}", flush=True)
    return losses


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="jaxckpt-elastic-") as folder:
        expected = run(Path(folder, "uninterrupted"), [0])
        elastic = Path(folder, "elastic")
        runs = [
            run(elastic, [0, 1, 2, 3], until=18, lost=2),
            run(elastic, [0, 1, 3], until=33),
            run(elastic, [0, 1, 2, 3]),
        ]
    starts = [min(losses) for losses in runs]
    equal = all(losses.items() <= expected.items() for losses in runs)
    print(f"{'all' if equal else 'FAILED: not all'} losses equal those of the uninterrupted run, bit for bit")
    # The kill can interrupt the save of the last local step. The one before it is complete: a save waits for it. On a
    # busy machine, no local step is saved while step 20 is still being copied to the storage.
    in_time = starts[0] == 1 and starts[1] in (11, 16) and starts[2] in (21, 26, 31)
    if not in_time:
        print(f"FAILED: the jobs started at steps {starts}, not at 1, 11 or 16, and 21, 26 or 31")
    return 0 if equal and in_time and max(runs[-1]) == STEPS else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    folder, host, address, count, index = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    train(Path(folder), int(host))
