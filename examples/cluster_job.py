"""The program that a cluster starts once per process: with Slurm (cluster_job.sbatch) or Kubernetes (cluster_job.yaml).

    srun python cluster_job.py /shared/run --preemption-seconds 90

If the processes receive SIGTERM, they save one last step and exit with status 143. Started again, they resume from it.
Without arguments, this file demonstrates that: it starts two processes on this machine with the variables that Slurm
sets, sends SIGTERM to both, and starts them again. If they do not resume, the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading

STEPS = 1000


def connect() -> None:
    """Connect the processes of the job."""
    import jax

    if "KUBERNETES_SERVICE_HOST" in os.environ:  # set in every pod; the variables below are set by cluster_job.yaml
        address, count = os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["PROCESSES"])
        index = int(os.environ["JOB_COMPLETION_INDEX"])
        jax.distributed.initialize(address, count, index, cluster_detection_method="deactivate")
    else:
        jax.distributed.initialize()  # Slurm and Cloud TPU: JAX finds the other processes itself


def train(run: str, preemption_seconds: float) -> None:
    """Your training loop. It starts from the newest saved step, or from the beginning."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxckpt

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    shardings = {"w": NamedSharding(mesh, P("data")), "key": NamedSharding(mesh, P())}
    init = jax.jit(lambda: {"w": jnp.zeros((64, 64)), "key": jax.random.key(0)}, out_shardings=shardings)

    def train_step(state: dict) -> dict:
        key, next_key = jax.random.split(state["key"])
        x = jax.random.normal(key, (32, 64))
        grad = jax.grad(lambda w: jnp.mean((x @ w - jnp.sin(x)) ** 2))(state["w"])
        return {"w": state["w"] - grad, "key": next_key}

    jitted_step = jax.jit(train_step, out_shardings=shardings, donate_argnums=0)
    with jaxckpt.Checkpointer(run, every=200, keep_last=2, preemption_seconds=preemption_seconds) as checkpoints:
        last, state = checkpoints.restore_or_init(init)
        if jax.process_index() == 0:
            print(f"{jax.process_count()} processes start after step {last or 0}", flush=True)
        for step in range((last or 0) + 1, STEPS + 1):
            state = jitted_step(state)
            checkpoints.save(step, state)  # after SIGTERM, it saves this step and raises SystemExit(143)
            if step == 20 and jax.process_index() == 0:
                print("step 20", flush=True)
    if jax.process_index() == 0:
        print(f"done after step {STEPS}", flush=True)


def start_two(run: str) -> list[subprocess.Popen[str]]:
    """Start two processes with one CPU device each, with the variables that Slurm sets for the tasks of a step."""
    slurm = {"SLURM_JOB_ID": str(random.randrange(4096)), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    # XLA_FLAGS of this terminal may ask for more devices.
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = {**inherited, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **slurm}
    command = [sys.executable, __file__, run, "--preemption-seconds", "90"]
    return [
        subprocess.Popen(
            command,
            env={**environment, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]


def kill_all(job: list[subprocess.Popen[str]]) -> None:
    for process in job:
        process.kill()


def demonstrate() -> int:
    # So that `finally` ends the processes if this one is terminated:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="jaxckpt-cluster-") as folder:
        job = start_two(f"{folder}/run")
        too_late = threading.Timer(120, kill_all, [job])
        try:
            too_late.start()
            while "step 20" not in (line := job[0].stdout.readline()):
                assert line, "process 0 ended before step 20, or did not reach it within 120 s"
            too_late.cancel()
            for process in job:
                process.send_signal(signal.SIGTERM)
            statuses = [process.wait(60) for process in job]
            job = start_two(f"{folder}/run")
            printed = job[0].communicate(timeout=120)[0].splitlines()
            statuses += [process.wait(60) for process in job]
        finally:
            too_late.cancel()
            kill_all(job)
    printed = [line for line in printed if "step" in line]
    print(f"exit statuses: {statuses}", *printed, sep="\n")
    return 0 if statuses == [143, 143, 0, 0] and "after step 0" not in printed[0] else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(demonstrate())
    parser = argparse.ArgumentParser(description="Train, or resume.")
    parser.add_argument("run", help="a folder that all processes share, or a URL such as gs://bucket/run")
    parser.add_argument("--preemption-seconds", type=float, default=20, help="time for the last save after SIGTERM")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    connect()
    train(arguments.run, arguments.preemption_seconds)
