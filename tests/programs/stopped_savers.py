"""Saves successive versions until it gets SIGTERM; prints each one after its save.

Arguments: how, path, the first version.
"""

from __future__ import annotations

import os
import signal
import sys

import victims

import jaxckpt

how, path, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
if how == "a handler that exits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
jaxckpt.save("memory://warm", {"x": 1})
print("ready", flush=True)
if how == "Checkpointer":
    with jaxckpt.Checkpointer(path, keep_last=2, options=victims.OPTIONS) as checkpoints:
        for step in range(first, first + 1_000_000):
            try:
                checkpoints.save(step, victims.version(step))
            except jaxckpt.Preempted as stop:
                print("saved" if f"step {step} is saved" in str(stop) else "lost", step, flush=True)
                raise
            print("listens", flush=True)
else:
    for number in range(first, first + 1_000_000):
        pending = jaxckpt.save_async(path, victims.version(number), overwrite=True, options=victims.OPTIONS)
        pending.wait()
        os.write(1, f"saved {number}\n".encode())
