"""Process 1 is interrupted or fails while copies of local steps are exchanged; then both processes save and restore."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from jax.experimental import multihost_utils
from joined import args, process_id
from sharded_tree import check, make, mesh_of

import jaxckpt
from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier import process_folders

tree = make(mesh_of(2, 2))
options = jaxckpt.Options(timeout_seconds=60, host_bytes=1 << 20, object_bytes=64 << 10, chunk_bytes=16 << 10)


def interrupted_at(call: Callable[..., Any], number: int, *, during: str = "") -> Callable[..., Any]:
    """The call, which interrupts this process when it begins for the nth time (in a rendezvous of this name)."""
    calls = 0

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += not during or given[0].what == during
        if calls == number:
            calls += 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # the main thread cancels the call
        return call(*given)

    return counted


def failing_copy() -> Callable[..., Any]:
    """`Interconnect._to_host` without memory for the second copy of data that was received."""
    to_host, calls = Interconnect._to_host, 0

    def copy(interconnect: Interconnect, array: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no memory")
        return to_host(interconnect, array)

    return copy


def attempt(name: str, call: Callable[[], object], patch: Any = None) -> None:
    """Make a call, which process 1 makes with a patch."""
    with contextlib.nullcontext() if patch is None or process_id == 0 else patch:
        try:
            call()
            print(name, "done", flush=True)
        except (KeyboardInterrupt, RuntimeError, jaxckpt.JaxckptError) as error:
            print(name, "raised", type(error).__name__, error, flush=True)
    multihost_utils.sync_global_devices(name)


def checkpointer() -> jaxckpt.Checkpointer:
    local = jaxckpt.LocalTier(f"{args}/local-{process_id}", every=1)
    return jaxckpt.Checkpointer(f"{args}/run", local=local, every=1000, background=False, options=options)


def restore() -> None:
    with checkpointer() as checkpoints:
        step, restored = checkpoints.restore_or_init(lambda: tree)
        assert step == 2
        check(restored)


def patched_run() -> Any:
    return mock.patch.object(Interconnect, "permute", interrupted_at(Interconnect.permute, 2))


with checkpointer() as checkpoints:
    attempt("interrupted save", lambda: checkpoints.save(1, tree), patched_run())
    prepared = interrupted_at(process_folders._IncomingCopies.__init__, 1)
    patch = mock.patch.object(process_folders._IncomingCopies, "__init__", prepared)
    attempt("interrupted preparations", lambda: checkpoints.save(1, tree), patch)
    attempt(
        "failed save", lambda: checkpoints.save(1, tree), mock.patch.object(Interconnect, "_to_host", failing_copy())
    )
    attempt("save", lambda: checkpoints.save(2, tree))
if process_id == 0:
    shutil.rmtree(f"{args}/local-0")
attempt("interrupted restore", restore, patched_run())
agreement = interrupted_at(Rendezvous.broadcast, 2, during="restoring")
attempt("interrupted agreement", restore, mock.patch.object(Rendezvous, "broadcast", agreement))
attempt("restore", restore)
