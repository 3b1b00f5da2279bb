"""Process 1 does not call save at step 1; each process prints the steps at which it gets an error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import mesh_of, put

import jaxckpt

mesh = mesh_of(2, 2)


def save(step: int) -> None:
    tree = {
        "w": put(np.full((64, 64), step, np.float32), mesh, P("data")),
        "count": put(np.array(step, np.int32), mesh, P()),
        "step": step,
    }
    options = jaxckpt.Options(timeout_seconds=2)
    try:
        jaxckpt.save(f"{args}/c", tree, metadata={"step": step}, overwrite=True, options=options)
    except jaxckpt.errors.PeerError as error:
        print(step, type(error).__name__, flush=True)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name}: not seen"
        time.sleep(0.05)


first, last = Path(args, "step-1"), Path(args, "the-end")
if process_id == 0:
    save(1)
    first.touch()
    save(2)
    save(3)
    wait_for(last)  # this process runs JAX's service: if it ended first, the other process would fail
else:
    wait_for(first)
    time.sleep(1)  # until process 0 is in step 2
    save(2)
    save(3)
    last.touch()
os._exit(0)
