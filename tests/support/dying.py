"""For programs in the processes of a job: one is killed, and the others a moment later, as JAX would abort them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

_SECONDS = 0.3
"""That the others have: time for what they do when they hear of it, or do not."""


def register(folder: Path) -> None:
    """Every process, before any of them may be killed."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()


def die(folder: Path) -> None:
    """Kill this process, then all others that have registered."""
    others = " ".join(path.name for path in folder.iterdir() if path.name != str(os.getpid()))
    subprocess.Popen(["sh", "-c", f"sleep {_SECONDS}; kill -9 {others}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
