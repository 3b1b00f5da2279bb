"""What this process may take of its host: cores and memory.

Several processes of a job may run on one host. Each takes its share, as far as it can be known without asking the other
processes: the settings are needed before a job is connected, and by programs that never connect. No process could use
more than its share for long anyway: all of them save, and restore, about the same number of bytes at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_COUNTS = (
    "SLURM_STEP_TASKS_PER_NODE",  # of srun, as "8", or "8(x2),4" if the hosts differ
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # MPICH and Intel MPI
    "PMI_LOCAL_SIZE",  # Cray
    "LOCAL_WORLD_SIZE",  # torchrun, Ray
)
"""Variables of launchers that start several processes on a host. JAX, too, finds its processes only by Slurm's and
MPI's variables, or by one process per host."""


def local_processes(environment: Mapping[str, str]) -> int:
    """The processes of this job on this host, or on the host that has most of them; 1 if no launcher says so."""
    for name in _COUNTS:
        numbers = [int(text) for text in re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environment.get(name, "")))]
        if any(numbers):
            return max(numbers)
    return 1


def own_cores(processes: int) -> int:
    """The cores for this process: those to which it is bound, or its share of all."""
    n_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity") and (bound := len(os.sched_getaffinity(0))) < n_cores:
        return bound
    return max(1, n_cores // processes)


def memory_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own_cgroups: Path = Path("/proc/self/cgroup")) -> int:
    """Memory of this host, or of the container, batch job or service in which the process runs if that has a limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files(cgroups, own_cgroups):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which is no limit
            limits.append(int(file.read_text()))
    return min(limits)


def return_free_memory() -> None:
    """Return the memory that malloc keeps for later to the system, if the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB in the arenas of the threads that took them, whichever thread needs memory
    next. Copies of 64 MiB of shards of 4 MiB left 240 MiB there, which grew for 100 saves. It took 6 to 14 ms for
    0.2 to 0.5 GiB and once 430 ms for 1.3 GiB (2 cores); threads that need memory from the same arena wait meanwhile.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _limit_files(cgroups: Path, own_cgroups: Path) -> Iterator[Path]:
    """The files with the memory limits of the process's cgroup and of those above it, in versions 2 and 1."""
    paths = {"": "/", "memory": "/"}
    with contextlib.suppress(OSError, ValueError):
        for line in own_cgroups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= {name: path for name in controllers.split(",") if name in paths}
    for root, name, path in (
        (cgroups, "memory.max", paths[""]),
        (cgroups / "memory", "memory.limit_in_bytes", paths["memory"]),
    ):
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents):
            yield root / folder / name
