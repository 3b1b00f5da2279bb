"""Runs examples/training_loop.py with its arguments. Later processes reuse what it compiles."""

from __future__ import annotations

import compiled
import training_loop

compiled.keep()
training_loop.main()
