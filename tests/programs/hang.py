"""Saves while a system call of this process hangs; says how the save ended, and saves again elsewhere.

strace holds up the first `call` by six seconds, three times `Options.timeout_seconds`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import jaxckpt

OPTIONS = jaxckpt.Options(timeout_seconds=2, object_bytes=1 << 16, chunk_bytes=1 << 14)
TREE = {"w": np.arange(1 << 18, dtype=np.uint8)}


def hang(call: str) -> subprocess.Popen[bytes]:
    """Until the process that is returned is killed, the first such system call of each thread takes six seconds."""
    filters = ["-e", f"trace={call}", "-e", f"inject={call}:delay_enter=6000000:when=1"]
    strace = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", *filters, "-p", str(os.getpid())])
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.01)
    return strace


def attempt(save: Callable[[], Any]) -> None:
    begun = time.monotonic()
    try:
        save()
        print("saved", flush=True)
    except (OSError, jaxckpt.JaxckptError) as error:
        print(type(error).__name__, f"{time.monotonic() - begun:.0f} s", error, flush=True)


if __name__ == "__main__":
    folder, verb, call = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    jaxckpt.save(folder / "first", TREE, options=OPTIONS)
    strace = hang(call)
    if verb == "save":
        attempt(lambda: jaxckpt.save(folder / "hung", TREE, options=OPTIONS))
    else:
        attempt(lambda: jaxckpt.save_async(folder / "hung", TREE, options=OPTIONS).wait())
    strace.kill()
    attempt(lambda: jaxckpt.save(folder / "next", TREE, options=OPTIONS))
    print("hung was published:", (folder / "hung" / "manifest.json").exists())
