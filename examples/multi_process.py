"""jax.distributed: two processes save together, each its own shards, and then one process resumes alone."""

import os
import random
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

TIMEOUT_SECONDS = 60


def train_step(state: dict) -> dict:
    x = jax.random.normal(jax.random.fold_in(state["key"], state["step"]), (24, 12))
    grad = jax.grad(lambda w: jnp.mean((x @ w - jnp.sin(x)) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * grad, "key": state["key"], "step": state["step"] + 1}


def train(folder: str, steps: int) -> dict:
    """Start or resume training on all devices of the job. Every process runs this, for any number of processes."""
    mesh = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "model"))
    specs = {"w": P("data", "model"), "key": P(), "step": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    init = jax.jit(lambda: {"w": jnp.zeros((12, 12)), "key": jax.random.key(0), "step": 0}, out_shardings=shardings)
    jitted_step = jax.jit(train_step, out_shardings=shardings, donate_argnums=0)
    with jaxckpt.Checkpointer(folder, options=jaxckpt.Options(timeout_seconds=TIMEOUT_SECONDS)) as checkpoints:
        last, state = checkpoints.restore_or_init(init)
        for step in range((last or 0) + 1, steps + 1):
            state = jitted_step(state)
            checkpoints.save(step, state)
    if jax.process_index() == 0:
        print(f"steps {(last or 0) + 1} to {steps}, processes: {jax.process_count()}", file=sys.stderr)
    return state


def run_two_processes(folder: str, steps: int) -> None:
    address = f"localhost:{random.randrange(20_000, 32_000)}"  # below the kernel's ephemeral ports
    four_devices = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    commands = [[sys.executable, __file__, folder, str(steps), address, str(process)] for process in range(2)]
    jobs = [subprocess.Popen(command, env=four_devices, stdout=subprocess.DEVNULL) for command in commands]
    try:
        assert [job.wait(TIMEOUT_SECONDS) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()


if len(sys.argv) > 1:  # one of the two child processes
    jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=TIMEOUT_SECONDS)
    train(sys.argv[1], int(sys.argv[2]))
else:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    with tempfile.TemporaryDirectory() as folder:
        run_two_processes(f"{folder}/resumed", 3)
        resumed = train(f"{folder}/resumed", 6)
        expected = train(f"{folder}/expected", 6)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, resumed))
    print("all arrays equal those of a run of six steps in one process")
