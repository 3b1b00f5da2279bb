"""Joins a job of two processes, `FOLDER ADDRESS old|new`: "old" saves before it joins, "new" does not."""

from __future__ import annotations

import sys

import jax
import numpy as np

import jaxckpt

folder, address, role = sys.argv[1:]
if role == "old":
    for n in range(3):
        jaxckpt.save(f"{folder}/alone", {"x": n}, overwrite=True)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, int(role == "old"), initialization_timeout=60)
for n in range(2):
    jaxckpt.save(f"{folder}/both", {"x": np.arange(n)}, overwrite=True, options=jaxckpt.Options(timeout_seconds=60))

print("all checks passed")
