"""Runs examples/training_loop.py, killed some time after the first step that this process saves.

Arguments: folder, steps, seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import compiled
import training_loop

compiled.keep()
folder, steps, delay = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def die() -> None:
    before = set(folder.glob("*/manifest.json"))
    while not set(folder.glob("*/manifest.json")) - before:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=die, daemon=True).start()
training_loop.train(folder, steps)
