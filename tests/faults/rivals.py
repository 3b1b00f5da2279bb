"""Independent savers: long-lived processes that save on request, and are not peers in one job."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from processes import PROGRAMS, environment, start

import jaxckpt

# The moments of a save at which a saver can stop itself. Each is a function call.
MOMENTS = {
    "planning": ("_save.save", "_plan"),
    "looking at the path": ("_save.shared_path", "_previous_manifest"),
    "making its folder": ("_store.folder.Folder", "begin_save"),
    "making arrays": ("_store.transaction", "_create_arrays"),
    "writing": ("_store.files.FileWriter", "write"),
    "syncing its folders": ("_store.folder.Folder", "sync_folders"),
    "syncing": ("_store.folder.Folder", "sync_data"),
    "publishing": ("_store.folder.Folder", "publish"),
    "tidying up": ("_store.transaction.Transaction", "close"),
}

JAXCKPT = "rival_jaxckpt"
ORBAX_MANAGER = "rival_orbax_manager"
ORBAX_CHECKPOINTER = "rival_orbax_checkpointer"
"""The programs of the rivals, in tests/programs."""


def version(number: int) -> dict[str, Any]:
    """The tree that is saved for this version number."""
    leaves = [np.full(999, number), np.full(999, -number)]
    return {"version": np.full((), number), "a": np.full((64, 64), number), "b": leaves}


def versions_in(tree: dict[str, Any]) -> list[int]:
    """The versions whose values occur in a tree: more than one if the tree is a mix."""
    found = {int(tree["version"]), *map(int, np.unique(tree["a"])), *map(int, np.unique(tree["b"][0]))}
    return sorted(found | {-int(value) for value in np.unique(tree["b"][1])})


def versions_at(path: Path) -> list[int]:
    """The same for the checkpoint at a path; empty if none exists."""
    try:
        return versions_in(jaxckpt.load_numpy(path))
    except jaxckpt.errors.NotACheckpointError:
        return []


def data_folders(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith("data-")]


class Saver:
    """A process that saves on request until the end of the `with` block."""

    def __init__(self, program: str = JAXCKPT) -> None:
        self._link, theirs = socket.socketpair()
        self._lines = self._link.makefile("r")
        with theirs, open(os.devnull, "wb") as nowhere:
            link = theirs.fileno()
            self._process = start([str(PROGRAMS / f"{program}.py")], environment(1), link, nowhere, stdin=link)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        self._lines.close()
        self._link.close()

    def request(self, **asked: Any) -> None:
        """Request a save: path=, version=, overwrite=, sync=, start= (a time), stop_at= (a moment)."""
        self._link.sendall(json.dumps(asked).encode() + b"\n")

    def next_message(self, timeout: float = 120) -> str:
        """The next message: "ready" once, then for each save "prepared" and its outcome."""
        self._link.settimeout(timeout)
        line = self._lines.readline()
        assert line, f"the saver ended with {self._process.wait(30)}"
        return json.loads(line)

    def stop(self) -> None:
        """Suspend the process, and wait until it is suspended."""
        self._process.send_signal(signal.SIGSTOP)
        self.stopped()

    def stopped(self) -> None:
        """Wait until the process is suspended."""
        deadline = time.monotonic() + 60
        while "T (stopped)" not in Path(f"/proc/{self.pid}/status").read_text():
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.002)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)
