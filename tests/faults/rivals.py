"""Savers that are no peers of each other: processes that stay, and save when they are told to."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from processes import environment

import jaxckpt

_BEGIN = """
import json, os, signal, sys, time
import numpy as np

def tree(version):
    leaves = [np.full(999, version), np.full(999, -version)]
    return {"version": np.full((), version), "a": np.full((64, 64), version), "b": leaves}

def serve(prepare, save, passed):
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ready = prepare(asked)
        print(json.dumps("prepared"), flush=True)
        while time.time() < asked.get("start", 0):
            pass
        try:
            save(asked, ready)
            said = "saved"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        passed(asked)
        print(json.dumps(said), flush=True)
"""

# The moments of a save at which it can be told to stop, each the call of a function.
MOMENTS = {
    "planning": ("_save.prepare", "_planned"),
    "looking at the path": ("_save.claim", "_previous"),
    "making its folder": ("_storage.folder.Folder", "begin"),
    "making arrays": ("_storage.folder.Folder", "create_array"),
    "writing": ("_storage.files.FileWriter", "write"),
    "syncing its folders": ("_storage.folder.Folder", "sync_folders"),
    "syncing": ("_storage.folder.Folder", "sync_data"),
    "publishing": ("_storage.folder.Folder", "publish"),
    "tidying up": ("_save.claim.Claim", "release"),
}

JAXCKPT = (
    _BEGIN
    + f"MOMENTS = {MOMENTS!r}"
    + """
import operator
import jaxckpt
from jaxckpt._save import claim as _claim
from jaxckpt._storage import files as _files
from jaxckpt._storage import folder as _folder
from jaxckpt._save import save as _save

def stop_at(owner, name):
    original = getattr(owner, name)
    def stop(*args, **named):
        setattr(owner, name, original)
        os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **named)
    setattr(owner, name, stop)
    return lambda: setattr(owner, name, original)

def prepare(asked):
    if "stop_at" not in asked:
        return lambda: None
    path, name = MOMENTS[asked["stop_at"]]
    return stop_at(operator.attrgetter(path)(jaxckpt), name)

def save(asked, restore):
    try:
        options = jaxckpt.Options(sync=asked["sync"], chunk_bytes=4096, object_bytes=16384)
        jaxckpt.save(asked["path"], tree(asked["version"]), overwrite=asked["overwrite"], options=options)
    finally:
        restore()

serve(prepare, save, lambda asked: None)
"""
)

ORBAX_MANAGER = (
    _BEGIN
    + """
import orbax.checkpoint as ocp

def save(asked, manager):
    manager.save(1, args=ocp.args.StandardSave(tree(asked["version"])))
    manager.wait_until_finished()

serve(lambda asked: ocp.CheckpointManager(asked["path"]), save, lambda asked: None)
"""
)

ORBAX_CHECKPOINTER = (
    _BEGIN
    + """
import orbax.checkpoint as ocp

def save(asked, checkpointer):
    checkpointer.save(asked["path"], tree(asked["version"]), force=asked["overwrite"])
    checkpointer.wait_until_finished()

serve(lambda asked: ocp.StandardCheckpointer(), save, lambda asked: None)
"""
)


def version(number: int) -> dict[str, Any]:
    """The tree that is saved as this version."""
    leaves = [np.full(999, number), np.full(999, -number)]
    return {"version": np.full((), number), "a": np.full((64, 64), number), "b": leaves}


def versions_in(tree: dict[str, Any]) -> list[int]:
    """The versions whose values are in a tree: one, unless it is a mix."""
    found = {int(tree["version"]), *map(int, np.unique(tree["a"])), *map(int, np.unique(tree["b"][0]))}
    return sorted(found | {-int(value) for value in np.unique(tree["b"][1])})


def versions_at(path: Path) -> list[int]:
    """As `versions_in`, of the checkpoint at a path; none where there is none."""
    try:
        return versions_in(jaxckpt.load_numpy(path))
    except jaxckpt.NotACheckpointError:
        return []


def data_folders(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith("data-")]


class Saver:
    """A process that saves when it is told to, until the end of the `with` block."""

    def __init__(self, program: str = JAXCKPT) -> None:
        self._lines = queue.SimpleQueue[str]()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env=environment(1),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, **asked: Any) -> None:
        """Have it save: path=, version=, overwrite=, sync=; at the time start=; stop_at= a moment."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = 120) -> str:
        """The next thing it says: "ready" once, then for each save "prepared" and how it ended."""
        line = self._lines.get(timeout=timeout)
        assert line, f"the saver ended with {self._process.wait(30)}"
        return json.loads(line)

    def stop(self) -> None:
        """Suspend it, and return once it is."""
        self._process.send_signal(signal.SIGSTOP)
        self.stopped()

    def stopped(self) -> None:
        """Wait until it is suspended."""
        deadline = time.monotonic() + 60
        while os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is None:
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.002)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)
