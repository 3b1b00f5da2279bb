"""The settings of saves and restores, and what they may take of the host by default."""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from jaxckpt._keywords import explain_keywords, explain_names, hint_for_options
from jaxckpt.errors import InputError

if TYPE_CHECKING:
    from jaxckpt._pipeline.progress import Progress


# Cores and memory -----------------------------------------------------------------------------------------
# Several processes of a job may run on one host. Each takes its share, as far as it can be known without asking the
# other processes: the settings are needed before a job is connected, and by programs that never connect. No process
# could use more than its share for long anyway: all of them save, and restore, about the same number of bytes at the
# same time.

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
        counts = [int(text) for text in re.findall(r"\d+", re.sub(r"\(x\d+\)", "", environment.get(name, "")))]
        if any(counts):
            return max(counts)
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


# Options --------------------------------------------------------------------------------------------------


T = TypeVar("T")

COMPRESSIONS = (None, "zstd", "blosc")
"""The values of `Options.compression`; None stores chunks uncompressed."""

CAST_POLICIES = ("safe", "unsafe")
"""The values of `Options.cast` for a leaf."""

_BOOLS = ("bool", "bool_")
"""The names of the types of Python's and NumPy's bools. NumPy is not imported, so that the command line starts soon."""

CastPolicies = (
    Literal["safe", "unsafe"] | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | Callable[[str, Any], str | None]
)
"""One of `CAST_POLICIES`, a pytree prefix of them, or a function of (path, leaf)."""

StagingMemory = Literal["auto", "pinned", "pageable"]
"""The values of `Options.staging_memory`."""

_PROCESSES = local_processes(os.environ)

THREADS = min(32, max(2, own_cores(_PROCESSES)))
"""Threads that move bytes. More threads than cores compete with each other: 4 on 2 cores made a restore 5 to 8 %
slower."""

HOST_BYTES = max(256 << 20, min(THREADS * (128 << 20), memory_bytes() // 32 // _PROCESSES))
"""The default of `Options.host_bytes`. Each thread that moves bytes needs about two objects in flight. On 16 cores and
an H100, 4 GiB were restored in 1.7 s with 256 MiB, in 0.45 s with 2 GiB, and in 0.36 s with 4 GiB."""

_MAX_BLOSC_CHUNK_BYTES = 1 << 30  # per chunk: blosc's limit is 2 GiB, and a chunk may be larger than `chunk_bytes`


@explain_names
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of saves and restores. The defaults suit most training jobs.

    Attributes:
        object_bytes: Approximate largest size of a stored object (a file); 64 MiB by default. Larger pieces are split.
            Small leaves are packed together, up to this size or 16 MiB, whichever is smaller.
        chunk_bytes: Approximate largest size of a chunk, the unit that is read and checksummed; by default 512 KiB, and
            for pieces of a leaf over 16 MiB 1/32 of them, up to 2 MiB.
        compression: Codec of the chunks. None by default, because trained weights hardly compress. "blosc" groups the
            bits of a chunk's elements by their position before zstd: for bfloat16 and float32, fewer bytes than "zstd"
            in no more time (docs/performance.md).
        io: The engine that reads and writes arrays. "auto": jaxckpt's own engine for uncompressed chunks on a file
            system, which needs half the CPU time, otherwise tensorstore. "tensorstore": always tensorstore. Each reads
            the other's files, equally strictly.
        read: How a restore reads data that several processes need. "each": each process reads it. "shared": one reads
            it and sends it over the devices' interconnect; all processes then need the same `host_bytes`. "auto":
            "shared" from an object store, if that saves each process 64 MiB on average (docs/many-processes.md).
        host_bytes: Approximate host memory in bytes of a save or restore in addition to the arrays, but at least four
            times `chunk_bytes`. Default: 128 MiB per core, up to 4 GiB and 1/32 of the host's memory, at least 256 MiB.
            The processes on a host share both: see `process_share`.
        staging_bytes: Host memory in bytes that `save_async` may use for copies of NumPy arrays and of arrays on
            accelerators. If this is not enough, `save_async` returns only once the rest fits. None: as much as this
            process writes.
        staging_memory: Host memory for the copies from accelerators. "pinned": copies need not be awaited, and are fast
            (H100: 50 GiB/s, otherwise 2), but TPU runtimes never return it. "pageable": `save_async` returns after the
            copies. "auto": "pinned" if it exists, except on TPUs (docs/accelerators.md).
        max_bytes_per_second: Limit on the rate at which each process writes in `save_async` and reads in `verify`, for
            example to leave bandwidth for data loading. `save` and restores have no limit. None: no limit. `when_busy`
            decides what happens if the next save comes before a slow one has ended.
        when_busy: What `save_async` does while an earlier save is still writing: "wait" for it, or "skip" this save.
            With `LocalTier`, a step that is also due locally is then saved only in the local folders.
        sync: Whether a save is durable on disk (fsync of files and folders) before it returns.
        reuse: Which unchanged objects a save links (hard links) on a file system. "auto": those of a Checkpointer whose
            arrays or bytes equal its last save. "content": all of equal bytes, in `save` too. "identity": those of the
            same jax.Array objects on accelerators. None: no objects (docs/reuse.md).
        non_finite: What a save does if floats in its arrays are NaN or infinite. "ignore": nothing. "warn": it logs the
            path of each such leaf. "error": it raises a TreeError that names them, and publishes nothing. Checking
            takes about 0.5 s of CPU time per GB.
        cast: Which casts to a different dtype are allowed. "safe": those that lose no value, and with `dtype=` also
            precision and range of floats. "unsafe": all NumPy casts. By leaf: a pytree prefix such as
            `{"opt": {"count": "unsafe"}}`, or a function of (path, leaf) (docs/resharding.md).
        indivisible: What happens if the mesh axes do not divide a dimension. "error": SpecError. "replicate": the
            dimension is not split over devices.
        timeout_seconds: How long a process waits for another to start its call before it raises `PeerTimeoutError`, and
            for storage that moves no data before it raises `StorageError`. A process that works sends heartbeats, and
            does not time out. 50 names a dead process before JAX ends the job (docs/many-processes.md).
        storage: Settings of an object store (docs/object-stores.md): members of tensorstore's kvstore spec, such as
            `{"endpoint": "https://…"}`, and `"retry_seconds"`, for about how long each request is retried, 60 by
            default. Not shown in the repr, because it may contain secrets.
        progress: True draws a bar on a terminal, and otherwise logs a line every 10 s (INFO; stderr if that is off). A
            function is called with a `Progress` as bytes move: in the caller's thread while the call waits, otherwise
            in the background thread. None shows nothing.

    Raises:
        InputError: A value is invalid.

    Examples:
        >>> import jaxckpt
        >>> jaxckpt.Options(compression="zstd").object_bytes
        67108864
    """

    object_bytes: int = 64 << 20
    chunk_bytes: int | None = None
    compression: Literal["zstd", "blosc"] | None = None
    io: Literal["auto", "tensorstore"] = "auto"
    read: Literal["each", "shared", "auto"] = "each"
    host_bytes: int = HOST_BYTES
    staging_bytes: int | None = None
    staging_memory: StagingMemory = "auto"
    max_bytes_per_second: float | None = None
    when_busy: Literal["wait", "skip"] = "wait"
    sync: bool = True
    reuse: Literal["auto", "identity", "content"] | None = "auto"
    non_finite: Literal["ignore", "warn", "error"] = "ignore"
    cast: CastPolicies = "safe"
    indivisible: Literal["error", "replicate"] = "error"
    timeout_seconds: float = 300.0
    storage: Mapping[str, Any] | None = field(default=None, repr=False)
    progress: bool | Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        for name in ("object_bytes", "chunk_bytes", "host_bytes", "staging_bytes"):
            value = getattr(self, name)
            if value is not None or name in ("object_bytes", "host_bytes"):
                object.__setattr__(self, name, require_whole_number(value, f"Options.{name}", minimum=1))
        require_rate(self.max_bytes_per_second, "Options.max_bytes_per_second")
        object.__setattr__(self, "timeout_seconds", require_seconds(self.timeout_seconds, "Options.timeout_seconds"))
        for name, allowed in (
            ("staging_memory", ("auto", "pinned", "pageable")),
            ("when_busy", ("wait", "skip")),
            ("compression", COMPRESSIONS),
            ("io", ("auto", "tensorstore")),
            ("reuse", (None, "auto", "identity", "content")),
            ("read", ("each", "shared", "auto")),
            ("sync", (True, False)),
            ("non_finite", ("ignore", "warn", "error")),
            ("indivisible", ("error", "replicate")),
        ):
            value = getattr(self, name)
            if type(value) not in map(type, allowed) or value not in allowed:
                raise InputError(f"Options.{name} must be one of {allowed}, found {value!r}")
        is_by_leaf = callable(self.cast) or isinstance(self.cast, (Mapping, tuple, list))
        if not (is_by_leaf or (isinstance(self.cast, str) and self.cast in CAST_POLICIES)):
            raise InputError(
                f"Options.cast must be one of {CAST_POLICIES}, a pytree prefix of these, or a function of (path, leaf),"
                f" found {self.cast!r}"
            )
        if self.storage is not None and not isinstance(self.storage, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"Options.storage must be a mapping, found a {type(self.storage).__name__}")
        retry_seconds((self.storage or {}).get("retry_seconds"))
        if not (self.progress is None or isinstance(self.progress, bool) or callable(self.progress)):
            raise InputError(f"Options.progress must be True, False, None or a function, found {self.progress!r}")
        if self.compression == "blosc" and (self.chunk_bytes or 0) > _MAX_BLOSC_CHUNK_BYTES:
            raise InputError(
                f"Options.chunk_bytes ({self.chunk_bytes}) must not be above {_MAX_BLOSC_CHUNK_BYTES} with"
                ' compression="blosc", which cannot encode larger chunks'
            )
        if self.chunk_bytes is not None and self.chunk_bytes > self.object_bytes:
            raise InputError(
                f"Options.chunk_bytes ({self.chunk_bytes}) must not be above object_bytes ({self.object_bytes})"
            )

    @staticmethod
    @explain_keywords
    def process_share(bytes_per_host: int) -> int:
        """The share of this process in memory for all processes of the job on one host.

        Slurm, Open MPI, MPICH, Intel MPI, Cray's MPI, torchrun and Ray set the number of processes in the environment,
        before jaxckpt is imported. Without such a launcher, one process per host is assumed: the share is all of it.

        If hosts have different numbers of processes, Slurm's largest number counts, so that all shares are equal, as
        `read="shared"` requires of `host_bytes`. The other launchers set the number of each host: the shares differ.

        Args:
            bytes_per_host: Memory in bytes for all processes of the job on one host.

        Returns:
            The bytes for this process, at least 1, for `host_bytes` or `staging_bytes`.

        Raises:
            InputError: `bytes_per_host` is not a whole number above zero.

        Examples:
            >>> import jaxckpt
            >>> options = jaxckpt.Options(staging_bytes=jaxckpt.Options.process_share(64 << 30))
        """
        return max(1, require_whole_number(bytes_per_host, "bytes_per_host", minimum=1) // _PROCESSES)


def options_or_default(options: Options | None) -> Options:
    """The options of a call: the caller's, or the defaults for None. Raises InputError for anything else."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"options must be a jaxckpt.Options, such as Options(sync=False), found {type(options)}"
            f"{hint_for_options(options)}"
        )
    return options


def require_whole_number(value: object, what: str, *, minimum: int, maximum: int | None = None) -> int:
    """An integer of any type, including NumPy's, as an int. Raises InputError for a bool and for any other value."""
    try:
        number = None if type(value).__name__ in _BOOLS else operator.index(cast("Any", value))
    except TypeError:
        number = None
    if number is None or number < minimum or (maximum is not None and number > maximum):
        expected = "above zero" if minimum == 1 else f"not below {minimum}"
        at_most = "" if maximum is None else f" and not above {maximum}"
        raise InputError(f"{what} must be a whole number {expected}{at_most}, found {reprlib.repr(value)}")
    return number


def optional(require: Callable[..., T], value: object, what: str, **limits: int) -> T | None:
    """None, or the value that `require` returns for an argument. Raises InputError."""
    return None if value is None else require(value, what, **limits)


def require_bool(value: object, what: str, where: str = "") -> bool:
    """A bool, including NumPy's, as a Python bool. Raises InputError for any other value, such as "no"."""
    if type(value).__name__ not in _BOOLS:
        raise InputError(f"{what} must be True or False, found {reprlib.repr(value)}{where}")
    return bool(value)


def require_rate(value: float | None, what: str) -> None:
    """Raise InputError unless this is a number of bytes per second above zero, or None for no limit."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"{what} must be a number above zero or None, found {reprlib.repr(value)}")


def require_seconds(value: object, what: str) -> float:
    """A positive number of seconds as a float, at most the longest time that a thread can wait. Raises InputError."""
    number = min(cast("float", value), threading.TIMEOUT_MAX) if isinstance(value, numbers.Real) else 0.0
    if isinstance(value, bool) or not number > 0:
        raise InputError(f"{what} must be a number above zero, found {reprlib.repr(value)}")
    return float(number)


def retry_seconds(value: object) -> float:
    """How long each request to an object store is retried: a member of `Options.storage`. Raises InputError."""
    return 60.0 if value is None else require_seconds(value, "Options.storage['retry_seconds']")


DEFAULT_OPTIONS = Options()
