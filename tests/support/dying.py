"""Kills one process of a job, and the others a moment later, like JAX's abort."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

_SECONDS = 0.3
"""Seconds that the other processes have to react to the death, or not."""


def register(folder: Path) -> None:
    """Register this process. Every process calls this before any of them may be killed."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()


def die(folder: Path) -> None:
    """Kill this process, then all others that have registered."""
    others = " ".join(path.name for path in folder.iterdir() if path.name != str(os.getpid()))
    subprocess.Popen(["sh", "-c", f"sleep {_SECONDS}; kill -9 {others}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
