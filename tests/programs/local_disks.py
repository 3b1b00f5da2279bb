"""Each process has a folder of its own, as on local disks, and process 0's has other steps than the others' have.

args: the folder, and what each process has there: a list of steps. Prints the outcome of each call as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from joined import args, process_id

import jaxckpt

folder, steps_of = Path(args["folder"]), args["steps"]
disk = folder / f"disk-{process_id}"
options = jaxckpt.Options(timeout_seconds=30)
outcomes: dict[str, str] = {}


def attempt(name: str, work: Callable[[], Any]) -> None:
    try:
        outcomes[name] = f"fine: {work()}"
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"


mesh = jax.make_mesh((jax.device_count(),), ("d",))
sharding = jax.NamedSharding(mesh, jax.P("d"))
x = jax.make_array_from_callback((12,), sharding, lambda at: np.arange(12.0)[at])
with jaxckpt.Checkpointer(folder / "shared", options=options) as shared:
    for step in (1, 2):
        shared.save(step, {"x": x}, process_state={"at": step})
    shared.wait()
for step in steps_of[process_id]:
    names = f"{step:08d}", shutil.ignore_patterns("writer.json")  # process 0 may be deleting the note
    shutil.copytree(folder / "shared" / names[0], disk / "run" / names[0], ignore=names[1])
disk.mkdir(exist_ok=True)
os.chdir(disk)
here = "/proc/self/cwd/run"  # the same path in each process


def init() -> Any:
    return {"x": jax.jit(lambda: jnp.zeros(12), out_shardings=sharding)()}


with jaxckpt.Checkpointer(here, options=options) as run:
    attempt("restore_or_init", lambda: run.restore_or_init(init)[0])
    attempt("restore", lambda: bool(run.restore(mesh=mesh)))
    attempt("restore of a step", lambda: bool(run.restore(2, mesh=mesh)))
    attempt("restore of latest", lambda: bool(run.restore("latest", mesh=mesh)))
    attempt("process_state", lambda: run.process_state("at"))
    attempt("process_state of a step", lambda: run.process_state("at", 2))
attempt("jaxckpt.restore", lambda: bool(jaxckpt.restore(here, mesh=mesh, options=options)))
attempt("the step of jaxckpt.restore", lambda: bool(jaxckpt.restore(f"{here}/00000002", mesh=mesh, options=options)))
attempt("a shared restore", lambda: bool(jaxckpt.restore(folder / "shared", mesh=mesh, options=options)))
print(json.dumps(outcomes))
