"""examples/training_loop.py, with its arguments. What it compiles is kept for the next such process."""

from __future__ import annotations

import compiled
import training_loop

compiled.keep()
training_loop.main()
