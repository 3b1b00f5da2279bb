"""Closes two Checkpointers, then gets SIGTERM: `FOLDER 'first first'|'last first'|'another on top'`."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import jaxckpt

runs = [jaxckpt.Checkpointer(f"{sys.argv[1]}/{name}") for name in ("model", "ema")]
for run in runs:
    run.save(0, {"w": np.arange(3)})
if sys.argv[2] == "another on top":
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: before(*arguments))
for run in runs if sys.argv[2] != "last first" else reversed(runs):
    run.close()
print("closed", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print("still here")
