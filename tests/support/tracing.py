"""Lets a program run strace on itself."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def trace(*filters: str) -> subprocess.Popen[bytes]:
    """Start strace on this process. Returns when it traces every thread; threads that start later are traced too."""
    strace = subprocess.Popen(["strace", "-f", "-qq", "-o", os.devnull, "-p", str(os.getpid()), *filters])
    deadline = time.monotonic() + 60
    while not all(_traced(thread) for thread in Path("/proc/self/task").iterdir()):
        assert strace.poll() is None, "strace ended"
        assert time.monotonic() < deadline, "strace does not attach"
        time.sleep(0.01)
    return strace


def _traced(thread: Path) -> bool:
    try:
        return "TracerPid:\t0\n" not in (thread / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
