"""Saves an array to the given path with a progress display."""

from __future__ import annotations

import sys

import numpy as np

import jaxckpt

jaxckpt.save(sys.argv[1], {"a": np.arange(100_000.0)}, options=jaxckpt.Options(progress=True))
