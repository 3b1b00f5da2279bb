"""Seconds from the loss of a host to the restored state: local tier, storage alone, Orbax's emergency manager.

    python benchmarks/lost_host.py [--mib 256] [--rate 50] [--turns 3]

Four processes of two devices each save a state of `--mib` MiB: step 1 to the storage, step 2 to the local tier if
there is one. The state is replicated over two halves of the devices, as Orbax's emergency manager requires. All
processes are killed, the folder of one is deleted, and four processes start again. All processes together read at most
`--rate` million bytes per second from the storage.

For each method, prints the restored step, the seconds from the kill until the last process has its state, and the
seconds of the restore itself. The rest is the start of Python, JAX and the job.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROCESSES = 4
WAYS = {
    "jaxckpt, local tier": ("local", 2),
    "jaxckpt, storage alone": ("storage", 2),
    "Orbax's emergency manager, first replica loses a host": ("orbax", 0),
    "Orbax's emergency manager, second replica loses a host": ("orbax", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rate", type=float, default=50, help="storage reads, in million bytes per second")
    parser.add_argument("--turns", type=int, default=3, help="number of rounds; the methods take turns")
    parser.add_argument("--dir", default="/dev/shm", help="parent of the folders")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        work(arguments)
        return
    print("| method | restored step | seconds from the kill to the restored state | seconds of the restore itself |")
    print("| --- | --- | --- | --- |")
    measured: dict[str, list[tuple[str, float, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.turns):
        for way, (kind, victim) in WAYS.items():
            with tempfile.TemporaryDirectory(prefix="jaxckpt-lost-", dir=arguments.dir) as folder:
                measured[way].append(lose(arguments, Path(folder), kind, victim))
    for way, turns in measured.items():
        steps = ", ".join(sorted({step for step, _, _ in turns}))
        total, restoring = (statistics.median(turn[i] for turn in turns) for i in (1, 2))
        print(f"| {way} | {steps} | {total:.1f} | {restoring:.1f} |")


def lose(arguments: argparse.Namespace, folder: Path, kind: str, victim: int) -> tuple[str, float, float]:
    """Save, kill, delete, restart. Returns the step, and the seconds from the kill and of the restore itself."""
    (folder / "turn").write_bytes(struct.pack("d", 0.0))
    for name in ("storage", *(f"host-{host}" for host in range(PROCESSES))):
        (folder / name).mkdir()
    with job(arguments, folder, kind, "save") as processes:
        for process in processes:
            assert process.stdout
            ready = next((line for line in process.stdout if line.startswith("{")), None)
            if ready is None:
                return "failed: see stderr", float("nan"), float("nan")
    killed = time.monotonic()  # all processes have the same clock
    shutil.rmtree(folder / f"host-{victim}")
    (folder / f"host-{victim}").mkdir()
    with job(arguments, folder, kind, "restore") as processes:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    noted = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    if len(noted) < PROCESSES:
        return "failed: see stderr", float("nan"), float("nan")
    assert all(one["exact"] for one in noted), "a process restored wrong values"
    return str(noted[0]["step"]), max(one["at"] for one in noted) - killed, max(one["seconds"] for one in noted)


@contextlib.contextmanager
def job(arguments: argparse.Namespace, folder: Path, kind: str, what: str) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, *sys.argv, "--job", str(folder), address, kind, what]
    processes = [
        subprocess.Popen([*command, str(index)], env=environment, stdout=subprocess.PIPE, text=True)
        for index in range(PROCESSES)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def capped(folder: Path, rate: float) -> Callable[..., int]:
    """A replacement for os.preadv that limits the rate of reads from the storage."""
    preadv, turn, storage = os.preadv, os.open(folder / "turn", os.O_RDWR), str(folder / "storage")

    def read(file: int, *arguments: Any) -> int:
        count = preadv(file, *arguments)
        if os.readlink(f"/proc/self/fd/{file}").startswith(storage):
            fcntl.flock(turn, fcntl.LOCK_EX)
            begins = max(time.monotonic(), *struct.unpack("d", os.pread(turn, 8, 0)))
            ends = begins + count / (rate * 1e6)
            os.pwrite(turn, struct.pack("d", ends), 0)
            fcntl.flock(turn, fcntl.LOCK_UN)
            time.sleep(max(0.0, ends - time.monotonic()))
        return count

    return read


def work(arguments: argparse.Namespace) -> None:
    """One process of the job."""
    folder, address, kind, what, index = Path(arguments.job[0]), *arguments.job[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=int(index))
    mesh = Mesh(np.reshape(jax.devices(), (2, -1)), ("replica", "model"))
    sharding = NamedSharding(mesh, P("model"))
    rows = arguments.mib << 5  # number of 4 KiB rows in each of 8 leaves

    def state(step: int) -> dict[str, jax.Array]:
        def value(place: Any) -> np.ndarray:
            first, last, _ = place[0].indices(rows)
            return np.broadcast_to(np.arange(first, last, dtype=np.float32)[:, None] + step, (last - first, 1024))

        return {f"w{i}": jax.make_array_from_callback((rows, 1024), sharding, value) for i in range(8)}

    os.preadv = capped(folder, arguments.rate)
    save, restore = (with_orbax if kind == "orbax" else with_jaxckpt)(folder, int(index), mesh, state(0), kind)
    if what == "save":
        for step in (1, 2):
            save(step, state(step))
        print(json.dumps({"saved": 2}), flush=True)
        time.sleep(600)
    begun = time.monotonic()
    step, tree = restore()
    jax.block_until_ready(tree)
    at = time.monotonic()
    expected = state(step)
    exact = all(
        np.array_equal(a.data, b.data)
        for name in expected
        for a, b in zip(tree[name].addressable_shards, expected[name].addressable_shards, strict=True)
    )
    print(json.dumps({"step": step, "at": at, "seconds": at - begun, "exact": exact}), flush=True)
    jax.distributed.shutdown()
    os._exit(0)


def with_jaxckpt(folder: Path, index: int, mesh: Mesh, like: Any, kind: str) -> tuple[Any, Any]:
    import jaxckpt

    tier = jaxckpt.LocalTier(folder / f"host-{index}", every=2) if kind == "local" else None
    checkpoints = jaxckpt.Checkpointer(folder / "storage", every=1000, local=tier)

    def save(step: int, tree: Any) -> None:
        checkpoints.save(step, tree, force=step == 1)
        checkpoints.wait()

    def restore() -> tuple[int, Any]:
        return checkpoints.restore_or_init(lambda: like)

    return save, restore


def with_orbax(folder: Path, index: int, mesh: Mesh, like: Any, kind: str) -> tuple[Any, Any]:
    import orbax.checkpoint as ocp
    from absl import flags
    from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)
    flags.FLAGS.mark_as_parsed()
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=2, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(should_save_fn=lambda step, last: step == 1),
    )
    manager = emergency.CheckpointManager(
        folder / f"host-{index}", folder / "storage", global_mesh=mesh, abstract_state=abstract, options=options
    )

    def save(step: int, tree: Any) -> None:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()

    def restore() -> tuple[int, Any]:
        step = manager.latest_step()
        return step, manager.restore(step).state

    return save, restore


if __name__ == "__main__":
    main()
