"""Round after round the file system refuses one process's system calls, by strace."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from peer import args, attempt, meet, n_data_folders, operate, process_id, tell, there


def strace(call: str, nth: int) -> subprocess.Popen[bytes]:
    filters = ["-e", f"trace={call}", "-e", f"inject={call}:error=ENOSPC:when={nth}+"]
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", os.devnull, "-p", str(os.getpid()), *filters])
    deadline = time.monotonic() + 30
    while "TracerPid:\t0" in Path("/proc/self/status").read_text():
        assert time.monotonic() < deadline and tracer.poll() is None, "strace does not attach"  # noqa: PT018
        time.sleep(0.02)
    time.sleep(0.3)  # to the other threads too
    return tracer


operate("save", 0, 60)
for number, (call, nth, victim) in enumerate(args["rounds"], 1):
    tracer = strace(call, nth) if process_id == victim else None
    meet(f"ready{number}")
    said, _ = attempt("save", number, 60)
    if tracer is not None:
        tracer.terminate()
        tracer.wait(30)
    meet(f"over{number}")
    now, folders = there(), n_data_folders()
    after, _ = attempt("save", number, 60)
    tell(said=said, there=now, after=after, folders=folders)
