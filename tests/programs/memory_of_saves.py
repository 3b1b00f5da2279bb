"""Saves from simulated accelerators and prints how much more resident memory, in bytes, the process then has."""

from __future__ import annotations

import sys

import jax
import numpy as np

import jaxckpt
from jaxckpt._save import staging

staging.is_in_host_memory = lambda value: False
tree = {f"w{n}": jax.device_put(np.full(1 << 20, n, np.float32), jax.devices()[n % 2]) for n in range(16)}


def save(n_elements: int) -> int:
    part = jax.tree.map(lambda leaf: leaf[:n_elements], tree)
    jaxckpt.save_async(sys.argv[1], part, overwrite=True, options=jaxckpt.Options(sync=False, reuse=None)).wait()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


before = save(8)  # everything is loaded
print(max(save(1 << 20) for _ in range(12)) - before)
