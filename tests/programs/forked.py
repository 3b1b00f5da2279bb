"""Forks while jaxckpt has work in progress. Each fork must end in time and change nothing of its parent's.

Prints one line of JSON: the outcome of each fork, and what was left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder

CHILD_SECONDS = 20
folder = Path(sys.argv[1])
write, unpublish = FileWriter.write, Folder.unpublish
go_on = threading.Event()
found: dict[str, Any] = {}


def fork(name: str, child: Callable[[], object], meanwhile: Callable[[int], object] = lambda pid: None) -> None:
    """Run `child` in a fork, and record how it ends. An exception ends the fork with status 1."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except Exception as error:
            os.write(theirs, str(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    meanwhile(pid)
    deadline = time.monotonic() + CHILD_SECONDS
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with open(ours, "rb") as output:
        found[name] = os.waitstatus_to_exitcode(status[1]), output.read().decode()


def exit_in_the_block(checkpoints: jaxckpt.Checkpointer) -> None:
    try:
        with checkpoints:
            sys.exit(5)
    except SystemExit as leaving:
        os._exit(int(leaving.code or 0))


def exit_while_holding(block: Any) -> None:
    block.__exit__(None, None, None)


def gated(call: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*arguments: Any, **named: Any) -> Any:
        assert go_on.wait(60)
        return call(*arguments, **named)

    return wait


def stop(pid: int) -> None:
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)


with jaxckpt.Checkpointer(folder / "run", keep_last=1) as checkpoints:
    checkpoints.save(1, {"x": np.arange(3)})
    checkpoints.wait()
    fork("terminated", lambda: time.sleep(60), stop)

    fork("close after the save", checkpoints.close)
    found["ended"] = (folder / "run" / "_run" / "ended.json").exists()

    held = jaxckpt.open(folder / "run").hold()
    held.__enter__()
    fork("held", lambda: exit_while_holding(held))
    found["leases"] = len(list((folder / "run" / "_run").glob("lease-*")))
    held.__exit__(None, None, None)

    FileWriter.write = gated(write)  # type: ignore[method-assign]
    checkpoints.save(2, {"x": np.arange(4)})
    pending = checkpoints.pending
    assert pending is not None
    fork("wait", pending.wait)
    fork("close", checkpoints.close)
    fork("exit", lambda: exit_in_the_block(checkpoints))

    FileWriter.write, Folder.unpublish = write, gated(unpublish)  # type: ignore[method-assign]
    go_on.set()
    pending.wait()
    go_on.clear()
    checkpoints.save(3, {"x": np.arange(5)})
    assert checkpoints.pending is not None
    checkpoints.pending.wait()
    time.sleep(0.1)  # wait until the deleting thread has started
    fork("deleting", checkpoints.wait)
    go_on.set()
found["steps"] = checkpoints.steps()
print(json.dumps(found))
