"""Saves or restores while a system call of this process hangs; prints the outcome, and repeats it on another path.

strace delays the first `call` by 30 seconds, far longer than `Options.timeout_seconds`. The delay ends when strace is
killed.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tracing import trace

import jaxckpt

OPTIONS = jaxckpt.Options(object_bytes=1 << 16, chunk_bytes=1 << 14)
IMPATIENT = dataclasses.replace(OPTIONS, timeout_seconds=2)
TREE = {"w": np.arange(1 << 18, dtype=np.uint8)}


def hang(call: str, path: Path | None = None) -> subprocess.Popen[bytes]:
    """Delay the first such system call of each thread by 30 seconds, until the returned process is killed. With a path,
    only calls on this file count."""
    filters = ["-e", f"trace={call}", "-e", f"inject={call}:delay_enter=30000000:when=1"]
    filters += [] if path is None else ["-P", str(path)]
    return trace(*filters)


def attempt(call: Callable[[], Any]) -> None:
    begun = time.monotonic()
    try:
        call()
        print("done", flush=True)
    except (OSError, jaxckpt.JaxckptError) as error:
        print(type(error).__name__, f"{time.monotonic() - begun:.0f} s", error, flush=True)


CALLS: dict[str, Callable[[Path, jaxckpt.Options], Any]] = {
    "save": lambda path, options: jaxckpt.save(path, TREE, options=options),
    "save_async": lambda path, options: jaxckpt.save_async(path, TREE, options=options).wait(),
    "restore": lambda path, options: jaxckpt.restore(path, options=options),
    "load_numpy": lambda path, options: jaxckpt.load_numpy(path, options=options),
    "index": lambda path, options: jaxckpt.open(path, options=options)["w"][:5],
}

if __name__ == "__main__":
    folder, verb, call = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    restores = not verb.startswith("save")
    for name in ("first", "hung", "next") if restores else ("first",):
        jaxckpt.save(folder / name, TREE, options=OPTIONS)
    if restores:
        CALLS[verb](folder / "first", OPTIONS)
    strace = hang(call, folder / "hung" / "manifest.json" if call == "openat" else None)
    attempt(lambda: CALLS[verb](folder / "hung", IMPATIENT))
    strace.kill()
    attempt(lambda: CALLS[verb](folder / "next", OPTIONS))
    print("hung was published:", (folder / "hung" / "manifest.json").exists())
    if not restores:
        time.sleep(5)  # the call has returned, and the thread has released what it held
        CALLS[verb](folder / "hung", OPTIONS)
    print("data folders:", len([*(folder / "hung").glob("data-*")]))
