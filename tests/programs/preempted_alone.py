"""Trains, and gets SIGTERM at step 7: `FOLDER exit|continue|chained|stuck|'stuck without room'|'stuck locally'`."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import jaxckpt

how = sys.argv[2]
if "stuck" in how:
    from jaxckpt._store.files import FileWriter

    FileWriter.write = lambda *_: time.sleep(1000)
earlier = []
if how == "chained":
    signal.signal(signal.SIGTERM, lambda *_: earlier.append("notified"))
local = jaxckpt.LocalTier(f"{sys.argv[1]}-local", every=1000, copies=0) if how == "stuck locally" else None
with jaxckpt.Checkpointer(
    sys.argv[1],
    every=1000,
    preemption_seconds=2,
    on_preemption="continue" if how == "continue" else "exit",
    options=jaxckpt.Options(staging_bytes=1 if how == "stuck without room" else None),
    local=local,
) as checkpoints:
    for step in range(1, 100):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            begun = time.monotonic()
        try:
            saved = checkpoints.save(step, {"x": np.full(1000, step), "y": np.full(10, step)})
        except jaxckpt.Preempted as stop:
            print(step, *earlier, stop, flush=True)
            raise
        if checkpoints.preempted:
            print(step, saved, "continues", flush=True)
            assert not checkpoints.save(step + 1, {"x": np.full(1000, step + 1)})
            break
