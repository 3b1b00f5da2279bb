"""Conditions of a benchmark: simulated devices, freed memory that stays in the process, and touched memory.

On small virtual machines, memory that a process frees returns to the host, and the next access to it is slow. With
MALLOC_MMAP_MAX_=0 and a large MALLOC_TRIM_THRESHOLD_, glibc keeps memory that was used once, and with
MALLOC_ARENA_MAX=1 for all threads, so that the benchmark measures the libraries and not the hypervisor. A benchmark of
memory itself does not use these settings.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

TOUCHED = 1.25  # the files of one save, plus a margin

_KEPT_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}


def begin(*, devices: int = 8, keep_memory: bool = True) -> None:
    """Restart the process with these settings, unless it has them. Call this before JAX is imported."""
    simulated = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    wanted = simulated | (_KEPT_MEMORY if keep_memory else {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def touch_memory(saved_bytes: int) -> None:
    """Allocate, write and free as much memory as the files of a save take. Call this before the save is timed: the
    first access to memory that the host has reclaimed is slow, and files on tmpfs are memory."""
    with mmap.mmap(-1, max(int(TOUCHED * saved_bytes), 1)) as touched:
        touched.madvise(mmap.MADV_HUGEPAGE)  # like NumPy
        for page in range(0, len(touched), mmap.PAGESIZE):
            touched[page] = 1
