"""Process 1 is interrupted while copies of local steps are exchanged; then both processes save and restore again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

from jax.experimental import multihost_utils
from joined import args, process_id
from sharded_tree import check, make, mesh_of

import jaxckpt
from jaxckpt._save.peers import Permutations

run, runs = Permutations.run, 0
tree = make(mesh_of(2, 2))
options = jaxckpt.Options(timeout_seconds=60, host_bytes=1 << 20, object_bytes=64 << 10, chunk_bytes=16 << 10)


def interrupt_second_run(*given: Any) -> Any:
    global runs
    runs += 1
    if runs == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return run(*given)


def attempt(name: str, call: Callable[[], object]) -> None:
    global runs
    runs = 0
    if process_id == 1 and name.startswith("interrupted"):
        Permutations.run = interrupt_second_run  # type: ignore[method-assign]
    try:
        call()
        print(name, "done", runs, flush=True)
    except (KeyboardInterrupt, jaxckpt.JaxckptError) as error:
        print(name, "raised", type(error).__name__, error, flush=True)
    Permutations.run = run  # type: ignore[method-assign]
    multihost_utils.sync_global_devices(name)


def checkpointer() -> jaxckpt.Checkpointer:
    local = f"{args}/local-{process_id}"
    return jaxckpt.Checkpointer(
        f"{args}/run", local=local, copies=1, local_every=1, every=1000, background=False, options=options
    )


def restore() -> None:
    with checkpointer() as checkpoints:
        step, restored = checkpoints.restore_or_init(lambda: tree)
        assert step == 2
        check(restored)


with checkpointer() as checkpoints:
    attempt("interrupted save", lambda: checkpoints.save(1, tree))
    attempt("save", lambda: checkpoints.save(2, tree))
if process_id == 0:
    shutil.rmtree(f"{args}/local-0")
attempt("interrupted restore", restore)
attempt("restore", restore)
