"""Ray Train: two workers train on one mesh, one of them is killed, and Ray's new workers resume from the newest step.

`train` is the loop to copy. Ray starts the workers and calls `jax.distributed.initialize` in each of them. If a worker
dies, Ray ends the others and starts all of them again, and `restore_or_init` finds the step to resume from.

The demonstration compares the final state with that of an uninterrupted run of one process. If any bit differs, or if
the second group of workers did not resume, the exit status is 1. It needs Ray: pip install -e '.[ray]'
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile

try:
    import ray.train
except ImportError as error:
    print(f"skipped, because Ray is not installed: {error}")
    sys.exit()

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

STEPS, EVERY, KILLED_AFTER = 12, 3, 8


def train(config: dict) -> None:
    """The program of each worker. Ray has called `jax.distributed.initialize` before it."""
    # Imported here, because the program that starts Ray must leave the TPUs to the workers.
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxckpt

    mesh = Mesh(np.array(jax.devices()), ("model",))
    shardings = {"w": NamedSharding(mesh, P(None, "model")), "key": NamedSharding(mesh, P())}

    def init() -> dict:
        return {"w": jnp.zeros((16, 16)), "key": jax.random.key(0)}

    def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - jnp.sin(x)) ** 2)

    def train_step(state: dict) -> tuple[dict, jax.Array]:
        key, next_key = jax.random.split(state["key"])
        loss, grad = jax.value_and_grad(loss_of)(state["w"], jax.random.normal(key, (32, 16)))
        return {"w": state["w"] - grad, "key": next_key}, loss

    jitted_step = jax.jit(train_step, out_shardings=(shardings, NamedSharding(mesh, P())), donate_argnums=0)
    with jaxckpt.Checkpointer(config["run"], every=EVERY, keep_last=2) as checkpoints:
        last, state = checkpoints.restore_or_init(jax.jit(init, out_shardings=shardings))
        for step in range((last or 0) + 1, STEPS + 1):
            state, loss = jitted_step(state)
            metrics = {"loss": float(loss), "processes": jax.process_count(), "start": last or 0}
            if checkpoints.save(step, state, metrics=metrics) and config["by_ray"]:
                ray.train.report({"step": step, **metrics})  # without checkpoint=, for which Ray would copy the files
            if config["by_ray"] and last is None and step == KILLED_AFTER and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)  # stands for a host that is lost


def main() -> int:
    import jax
    import numpy as np

    import jaxckpt

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    with tempfile.TemporaryDirectory(prefix="jaxckpt-ray-") as folder, contextlib.ExitStack() as stack:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        trainer = JaxTrainer(
            train,
            train_loop_config={"run": f"{folder}/by-ray", "by_ray": True},
            scaling_config=ScalingConfig(num_workers=2),  # on GPUs: use_gpu=True
            jax_config=JaxConfig(use_gpu=True),  # only for JAX_PLATFORMS=cpu: makes Ray call jax.distributed.initialize
            run_config=RunConfig(
                storage_path=f"{folder}/ray",  # for Ray's own files
                failure_config=FailureConfig(max_failures=1),  # start the workers again once
                worker_runtime_env={
                    "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
                },
            ),
        )
        trainer.fit()
        train({"run": f"{folder}/uninterrupted", "by_ray": False})
        metrics = jaxckpt.Run(f"{folder}/by-ray").metrics(STEPS)
        resumed, expected = (jaxckpt.load_numpy(f"{folder}/{run}") for run in ("by-ray", "uninterrupted"))
    start, processes = int(metrics["start"]), int(metrics["processes"])
    print(f"worker 1 was killed after step {KILLED_AFTER}; {processes} new workers resumed from step {start}")
    equal = all(np.array_equal(resumed[name], expected[name]) for name in expected)
    print(f"{'all' if equal else 'FAILED: not all'} arrays equal those of an uninterrupted run of one process")
    # The kill can interrupt the save of the newest step.
    in_time = processes == 2 and start in (KILLED_AFTER // EVERY * EVERY, KILLED_AFTER // EVERY * EVERY - EVERY)
    return 0 if equal and in_time else 1


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # a demonstration reports nothing over the network
    sys.exit(main())
