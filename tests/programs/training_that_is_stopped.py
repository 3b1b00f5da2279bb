"""Runs examples/training_loop.py, which gets SIGTERM in a step; prints status and losses.

Arguments: folder, steps, the step.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import compiled
import training_loop

compiled.keep()
status, losses = training_loop.run(Path(sys.argv[1]), int(sys.argv[2]), signal.SIGTERM, int(sys.argv[3]))
print(json.dumps([status, list(losses.items())]))
