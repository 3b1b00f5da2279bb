"""Jobs that save into the local tier, lose a host and resume: `FOLDER CRASHES`, a JSON list.

Each crash is {"victim", "phase", "counts"}. A job of four processes with two devices each is killed when process
`victim` reaches a phase of a save, and the victim's folder is deleted. Then, for each number in `counts`, a job of that
many processes resumes from a copy of the remaining data. Each of these jobs prints one line: the step that was
promised, and the step that was restored.

Each process is a fork, so that Python and JAX are imported only once.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import free_port

import jaxckpt
import jaxckpt._local_tier.tier

warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forks

PROCESSES, DIES_AT, EVERY = 4, 4, 2
SPECS = {
    "fsdp": P(("replica", "shard")),  # no replicas: half of this state's bytes need a copy
    "hybrid": P("shard"),  # replicas on other hosts
    "columns": P(None, ("shard", "replica")),
    "replicated": P(),
}
SHAPES = {"fsdp": (48, 1000), "hybrid": (24, 1000), "columns": (10, 24, 30), "replicated": (77,)}

PHASES: dict[str, tuple[str, int]] = {
    "sweeping": ("_local_tier.tier.LocalSteps.delete_other_steps", 1),
    "before the exchange": ("_local_tier.process_folders.open_own_transaction", 1),
    "writing": ("_store.files.FileWriter.write", 1),
    "before the barrier": ("_local_tier.process_folders.ProcessFolders.publish", 1),
    "publishing": ("_store.folder.Folder.publish", 1),
    "between the barriers": ("_job.rendezvous.Rendezvous.barrier", 1),
    "flushing": ("_local_tier.flush.Flush._copy", 1),
}
"""For each phase: (function, number of its call in the save of step DIES_AT) at which the victim is killed."""


def value(name: str, step: int) -> np.ndarray:
    size = int(np.prod(SHAPES[name]))
    bits = np.arange(size, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(step * 40503 + len(name))
    return bits.reshape(SHAPES[name])


def state(mesh: Mesh, step: int) -> dict[str, Any]:
    leaves = {
        name: jax.make_array_from_callback(
            SHAPES[name], NamedSharding(mesh, spec), lambda index, name=name: value(name, step)[index]
        )
        for name, spec in SPECS.items()
    }
    return leaves | {"step": step, "numpy": np.full(5, step)}


def exact(tree: dict[str, Any], step: int) -> bool:
    return (
        tree["step"] == step
        and bool((np.asarray(tree["numpy"]) == step).all())
        and all(
            np.array_equal(shard.data, value(name, step)[shard.index])
            for name in SPECS
            for shard in tree[name].addressable_shards
        )
    )


def strike_at(phase: str) -> None:
    """Kill this process when it reaches a phase."""
    place, calls = PHASES[phase]
    owner, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(f"jaxckpt.{owner}")
    original, counted = getattr(owner, name), []

    def struck(*arguments: Any, **named: Any) -> Any:
        counted.append(1)
        if len(counted) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, struck)


def work(folder: Path, hosts: Sequence[int], index: int, port: int, until: int, phase: str | None) -> dict[str, Any]:
    """One process: resume, check, save steps up to `until`, and return what was restored."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", len(hosts), index, initialization_timeout=60)
    mesh = Mesh(np.reshape(jax.devices(), (2, -1)), ("replica", "shard"))
    with jaxckpt.Checkpointer(
        folder / "storage",
        every=EVERY,
        local=jaxckpt.LocalTier(folder / f"host-{hosts[index]}", every=1),
        options=jaxckpt.Options(timeout_seconds=30),
    ) as checkpoints:
        last, tree = checkpoints.restore_or_init(lambda: state(mesh, 0))
        said = {"restored": last, "exact": exact(tree, last or 0)}
        if last is not None:
            said["metrics"] = checkpoints.metrics(last) == {"loss": float(last)}
            seeds = checkpoints.process_state("seed", resplit=lambda states, count: [states] * count)
            said["states"] = seeds in (last * 10 + index, [last * 10 + i for i in range(PROCESSES)])
        for step in range((last or 0) + 1, until + 1):
            if phase is not None and step == DIES_AT:
                strike_at(phase)
            checkpoints.save(step, state(mesh, step), metrics={"loss": step}, process_state={"seed": step * 10 + index})
            checkpoints.wait()
            Path(folder, f"saved-{step}").touch()
    return said


def live(folder: Path, hosts: Sequence[int], until: int, victim: int = -1, phase: str | None = None) -> list[Any]:
    """Run a job. If one process dies, kill the others. Returns each process's result, or None."""
    port, children = free_port(), list[int]()
    for index in range(len(hosts)):
        child = os.fork()
        if child == 0:
            try:
                log = os.open(folder / f"log-{hosts[index]}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                said = work(folder, hosts, index, port, until, phase if hosts[index] == victim else None)
                Path(folder, f"said-{index}").write_text(json.dumps(said))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(9)
        children.append(child)
    deadline, left, failed = time.monotonic() + 90, set(children), False
    while left:
        for child in tuple(left):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                left.discard(child)
                failed |= status != 0
        if left and (failed or time.monotonic() > deadline):
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    said = [Path(folder, f"said-{index}") for index in range(len(hosts))]
    return [json.loads(path.read_text()) if path.exists() else None for path in said]


def crash(folder: Path, victim: int, phase: str, counts: Sequence[int]) -> None:
    folder.mkdir(parents=True)
    said = live(folder, range(PROCESSES), DIES_AT + 1, victim, phase)
    struck = None in said
    promised = max((int(path.name[6:]) for path in folder.glob("saved-*")), default=None)
    for path in folder.glob("said-*"):
        path.unlink()
    shutil.rmtree(folder / f"host-{victim}", ignore_errors=True)
    for count in counts:
        copy = folder.parent / f"{folder.name}-{count}"
        shutil.copytree(folder, copy)
        # The storage is identified by its path, so the copy replaces the original for this job.
        kept = folder.rename(folder.parent / "kept")
        copy.rename(folder)
        hosts = [host for host in range(PROCESSES) if host != victim or count == PROCESSES][:count]
        found = live(folder, hosts, DIES_AT + 3)
        log = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*"))) if None in found else ""
        shutil.rmtree(folder)
        kept.rename(folder)
        print(
            json.dumps(
                {
                    "victim": victim,
                    "phase": phase,
                    "count": count,
                    "struck": struck,
                    "promised": promised,
                    "found": found,
                    "log": log,
                }
            ),
            flush=True,
        )
    shutil.rmtree(folder)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    for number, one in enumerate(json.loads(sys.argv[2])):
        crash(Path(sys.argv[1], f"crash-{number}"), one["victim"], one["phase"], one["counts"])
