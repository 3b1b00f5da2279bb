"""Saves ten steps, of which retention keeps one, and ends without closing its Checkpointer.

Arguments: the run's directory and the case. "held by a reader": a reader holds step 0 until the end. "stuck": a
deletion hangs when the job gets SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import jaxckpt
from jaxckpt._store.folder import Folder

run, how = sys.argv[1:]
unpublish = Folder.unpublish


def slowly(*arguments: object, **named: object) -> None:
    time.sleep(1000 if how == "stuck" else 0.1)
    unpublish(*arguments, **named)  # pyright: ignore


Folder.unpublish = slowly  # pyright: ignore
checkpoints = jaxckpt.Checkpointer(run, keep_last=1, preemption_seconds=1, options=jaxckpt.Options(sync=False))
for step in range(10):
    if step == 9 and how == "stuck":
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        checkpoints.save(step, {"w": np.full(100, step)})
    except jaxckpt.Preempted:
        checkpoints.close()
    if step == 0 and how == "held by a reader":
        checkpoints.wait()
        reader = jaxckpt.open(f"{run}@0").hold()
        reader.__enter__()
print("end", flush=True)
