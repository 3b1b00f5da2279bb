"""What the sections of `make gpu` share: sizes, folders, states on the device, training steps, clocks and memory."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

GIB = 1 << 30

Figure = tuple[str, Any]
"""A name and a value for figures.json. A section yields each one as soon as it is known, so that a crash loses none; a
later value replaces an earlier one of the same name."""

Tree = dict[str, jax.Array]


class Sizes:
    """Sizes in bytes; small ones for a dry run."""

    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.streamed = 8 << 20 if is_dry else 1 << 30
        self.link = 4 << 20 if is_dry else 2 << 30
        self.large_leaves = 4 if is_dry else 16
        self.large = 4 << 20 if is_dry else 4 << 30
        self.small_leaves = 200 if is_dry else 2000
        self.small = 4 << 10 if is_dry else 64 << 10
        self.side = 256 if is_dry else 8192
        """Rows and columns of the matrices that a training step multiplies."""


@dataclass(frozen=True, slots=True)
class Lab:
    """What a section gets."""

    memory: Path
    """An empty folder in memory, such as on /dev/shm."""

    disk: Path
    """An empty folder on the disk."""

    out: Path
    """The folder for results."""

    sizes: Sizes

    ends: float
    """When the section is stopped, in seconds of `time.monotonic`. A section with many turns leaves out the last."""

    argument: str
    """The section's argument, such as the name of a dtype."""

    def left(self) -> float:
        """The seconds until the section is stopped."""
        return self.ends - time.monotonic()

    def large(self, folder: Path) -> tuple[int, int]:
        """(leaves, bytes of each) of a large tree, of which two fit into the folder's file system."""
        leaves, each = self.sizes.large_leaves, self.sizes.large // self.sizes.large_leaves
        while leaves > 1 and 2.5 * leaves * each > shutil.disk_usage(folder).free:
            leaves //= 2
        return leaves, each


def gib_per_second(n_bytes: int, seconds: float) -> float:
    return round(n_bytes / max(seconds, 1e-9) / GIB, 2)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result), measured until all arrays in the result are ready."""
    begun = time.perf_counter()
    found = jax.block_until_ready(call())
    return round(time.perf_counter() - begun, 5), found


def best_warm(laps: list[float]) -> float:
    """The best lap after the first, which warms up; the first if it is the only one."""
    return min(laps[1:] or laps)


class Laps(dict[str, list[float]]):
    """All laps of each measured time, the first one first."""

    def add(self, **times: float) -> None:
        for name, value in times.items():
            self.setdefault(name, []).append(round(value, 5))


# The device ----------------------------------------------------------------------------------------------


def memory_kinds() -> set[str]:
    return {memory.kind for memory in jax.devices()[0].addressable_memories()}


def own_memory() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def pinned_memory() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def device_stat(name: str) -> int:
    """A figure of the device's allocator; 0 if the device does not report it."""
    return (jax.devices()[0].memory_stats() or {}).get(name, 0)


def state(leaves: int, n_bytes: int, dtype: str = "float32") -> Tree:
    """Random leaves of `n_bytes` each, created on the device by one program."""
    shape = n_bytes // 1024 // jnp.dtype(dtype).itemsize, 1024
    make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype))
    return jax.block_until_ready({f"leaf{n}": make(n) for n in range(leaves)})


def structs(tree: Tree) -> dict[str, jax.ShapeDtypeStruct]:
    """A target that holds no arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


class Training:
    """Training steps of about 13 ms each on an H100: matrix products, one after another."""

    def __init__(self, sizes: Sizes) -> None:
        self._step = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ x), x))
        self._x = jax.random.normal(jax.random.key(1), (sizes.side, sizes.side), jnp.bfloat16) * 0.01
        self.alone_ms = statistics.median([self.step_ms() for _ in range(8)][2:])

    def step_ms(self) -> float:
        return round(1000 * timed(lambda: self._step(self._x))[0], 2)

    def steps_until(self, wait: Callable[[], object]) -> tuple[float, list[float]]:
        """(seconds until `wait` returns, the milliseconds of each training step until then).

        All steps until the end of a save are counted: the first few alone would flatter a save that takes long.
        """
        begun = time.perf_counter()
        ended: list[float | BaseException] = []

        def wait_for_it() -> None:
            try:
                wait()
                ended.append(time.perf_counter() - begun)
            except BaseException as error:  # raised below
                ended.append(error)

        waiter = threading.Thread(target=wait_for_it, daemon=True)
        waiter.start()
        steps = [self.step_ms()]
        while waiter.is_alive():
            steps.append(self.step_ms())
        waiter.join()
        if isinstance(ended[0], BaseException):
            raise ended[0]
        return ended[0], steps


# The host's memory ---------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def meminfo() -> dict[str, int]:
    """The figures of /proc/meminfo, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def machine_bytes() -> int:
    """The memory in use on the machine, without the page cache and the files of /dev/shm. It includes pinned memory,
    which may count as shared memory."""
    now = meminfo()
    return now["MemTotal"] - now["MemAvailable"] - shutil.disk_usage("/dev/shm").used


class Peaks:
    """Peak memory while the block runs, above the memory in use before it; sampled every 5 ms."""

    def __enter__(self) -> Peaks:
        gc.collect()
        self._ended = threading.Event()
        self._before = self._most = self._now()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self._most = tuple(map(max, self._most, self._now()))

    @staticmethod
    def _now() -> tuple[int, ...]:
        return resident_bytes(), machine_bytes(), device_stat("bytes_in_use")

    def mib(self) -> dict[str, int]:
        """`host` is the process's resident memory; `machine` counts pinned memory as well."""
        names = "peak_host_mib", "peak_machine_mib", "peak_device_mib"
        return {name: (most - before) >> 20 for name, most, before in zip(names, self._most, self._before, strict=True)}
