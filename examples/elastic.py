"""A job that loses a host resumes from the memory of the others: the local tier of jaxckpt.Checkpointer.

Four processes of two simulated devices each train on one mesh. Each stands for a host, with a folder of its own. The
demonstration kills one process and deletes its folder, resumes with the three others, and later with four again. Each
loss must equal that of a run of one process that nobody disturbed: where one differs in any bit, the exit status is 1.

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

BATCH = 24  # examples in a step, over all devices: 8 of them or 6
STEPS, EVERY, LOCAL_EVERY = 40, 20, 5
FIXED = 2.0**20


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    """Of one example."""
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - jnp.sin(x)) ** 2)


def train(folder: Path, host: int) -> None:
    """What every process runs, however many there are."""
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
        # One example at a time, so that no device's share of the batch changes how an example is computed.
        found = jax.lax.map(lambda x: jax.value_and_grad(loss_of)(params, x), batch)
        return jax.tree.map(mean, found)

    everywhere = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)

    def train_step(params: dict, batch: jax.Array) -> tuple[dict, jax.Array]:
        loss, gradients = everywhere(params, batch)
        return jax.tree.map(lambda value, by: value - by / 2, params, gradients), loss

    jitted = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())))
    tier = {"local": folder / f"host-{host}", "local_every": LOCAL_EVERY} if jax.process_count() > 1 else {}
    with jaxckpt.Checkpointer(folder / "storage", every=EVERY, **tier) as checkpoints:
        last, params = checkpoints.restore_or_init(jax.jit(init, out_shardings=shardings))
        print("resumed", last or 0, flush=True)
        for step in range((last or 0) + 1, STEPS + 1):
            batch = np.random.default_rng(step).standard_normal((BATCH, 12), np.float32)
            params, loss = jitted(params, batch)
            checkpoints.save(step, params)
            print("loss", step, float(loss).hex(), flush=True)


def run(folder: Path, hosts: Sequence[int], until: int = STEPS, dies: int | None = None) -> dict[int, str]:
    """The supervisor, which in real life is your scheduler: one process a host, all stopped once one has died."""
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
            stderr=subprocess.DEVNULL if until < STEPS else None,  # JAX reports a dead peer at length
            text=True,
        )
        for index, host in enumerate(hosts)
    ]
    losses: dict[int, str] = {}
    begin = None
    try:
        for line in job[0].stdout:
            match line.split():
                case ["resumed", step]:
                    begin = int(step)
                case ["loss", step, loss]:
                    losses[int(step)] = loss
                    if int(step) == until < STEPS:
                        break
                case _:
                    pass  # gloo's
        else:
            assert [process.wait(300) for process in job] == [0] * len(job)
    finally:
        for process in job:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    if dies is not None:
        shutil.rmtree(folder / f"host-{dies}")
    ending = f", then host {dies} is lost" if dies is not None else ""
    print(f"{len(hosts)} processes: step {begin} to step {max(losses)}{ending}", flush=True)
    return losses


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="jaxckpt-elastic-") as folder:
        expected = run(Path(folder, "undisturbed"), [0])
        elastic = Path(folder, "elastic")
        parts = [
            run(elastic, [0, 1, 2, 3], until=18, dies=2),
            run(elastic, [0, 1, 3], until=33),
            run(elastic, [0, 1, 2, 3]),
        ]
    begins = [min(losses) for losses in parts]
    equal = all(losses.items() <= expected.items() for losses in parts)
    print(f"{'all' if equal else 'BROKEN: not all'} losses equal those of the undisturbed run, bit for bit")
    return 0 if equal and begins == [1, 16, 31] and max(parts[-1]) == STEPS else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    folder, host, address, count, index = sys.argv[1:]
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    train(Path(folder), int(host))
