"""Saves or restores while a system call of this process hangs; says how that ended, and does the same elsewhere.

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


def hang(call: str, path: Path | None = None) -> subprocess.Popen[bytes]:
    """Until the process that is returned is killed, the first such system call of each thread takes six seconds; with
    a path, the first that is about this file."""
    filters = ["-e", f"trace={call}", "-e", f"inject={call}:delay_enter=6000000:when=1"]
    filters += [] if path is None else ["-P", str(path)]
    strace = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", *filters, "-p", str(os.getpid())])
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        time.sleep(0.01)
    return strace


def attempt(call: Callable[[], Any]) -> None:
    begun = time.monotonic()
    try:
        call()
        print("done", flush=True)
    except (OSError, jaxckpt.JaxckptError) as error:
        print(type(error).__name__, f"{time.monotonic() - begun:.0f} s", error, flush=True)


CALLS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: jaxckpt.save(path, TREE, options=OPTIONS),
    "save_async": lambda path: jaxckpt.save_async(path, TREE, options=OPTIONS).wait(),
    "restore": lambda path: jaxckpt.restore(path, options=OPTIONS),
    "load_numpy": lambda path: jaxckpt.load_numpy(path, options=OPTIONS),
    "index": lambda path: jaxckpt.open(path, options=OPTIONS)["w"][:5],
}

if __name__ == "__main__":
    folder, verb, call = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    restores = not verb.startswith("save")
    for name in ("first", "hung", "next") if restores else ("first",):
        jaxckpt.save(folder / name, TREE, options=OPTIONS)
    if restores:
        CALLS[verb](folder / "first")
    strace = hang(call, folder / "hung" / "manifest.json" if call == "openat" else None)
    attempt(lambda: CALLS[verb](folder / "hung"))
    strace.kill()
    attempt(lambda: CALLS[verb](folder / "next"))
    print("hung was published:", (folder / "hung" / "manifest.json").exists())
