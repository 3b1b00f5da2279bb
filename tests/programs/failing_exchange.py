"""Process 0 cannot write while leaves are exchanged; each process prints the error that it gets."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from joined import args, process_id
from sharded_tree import make, mesh_of

import jaxckpt
from jaxckpt._store.files import FileWriter


def refuse(*_: Any) -> None:
    raise jaxckpt.errors.StorageError(errno.ENOSPC, "no space left on device")


tree, first = make(mesh_of(2, 2)), mesh_of(1, 2, devices=jax.devices()[:2])
if process_id == 0:
    FileWriter.write = refuse  # type: ignore[method-assign]
try:
    jaxckpt.save(f"{args}/c", tree, mesh=first, specs=P(), options=jaxckpt.Options(timeout_seconds=60))
except jaxckpt.JaxckptError as error:
    print("raised", type(error).__name__, error, flush=True)
reported = Path(args, "reported")
if process_id == 1:
    reported.touch()
else:  # this process runs JAX's service: if it ended first, the other process would fail
    deadline = time.monotonic() + 60
    while not reported.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
os._exit(0)
