"""What the machine can do without jaxckpt: the limits for every other figure."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from lab import GIB, Figure, Lab, best_warm, gib_per_second, meminfo, own_memory, pinned_memory, state, timed

from jaxckpt._model.pieces import aligned_empty

THREADS = min(16, os.cpu_count() or 1)

PACKAGES = (
    "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin nvidia-nccl-cu12 nvidia-nccl-cu13 orbax-checkpoint tensorstore flax"
    " numpy ml-dtypes msgspec crc32c xxhash torch safetensors hypothesis pytest"
).split()


def facts(lab: Lab) -> Iterator[Figure]:
    """Versions, memory, and what plain reads and writes of files reach, which no save or restore exceeds."""
    device = jax.devices()[0]
    yield "device", f"{device.device_kind} ({device.platform})"
    yield "memory kinds", sorted(memory.kind for memory in device.addressable_memories())
    versions: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    yield "versions", versions
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        yield (
            "nvidia-smi",
            subprocess.run(command, timeout=15, check=True, capture_output=True, text=True).stdout.strip(),
        )
    yield "cores", os.cpu_count()
    yield "cpu", next((x[13:] for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "unknown")
    yield "memory_gib", {name: round(meminfo()[name] / GIB, 1) for name in ("MemTotal", "MemAvailable")}
    with contextlib.suppress(OSError):
        yield "huge pages", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    n_bytes = 2 * lab.sizes.link
    begun = time.perf_counter()
    data = np.empty(n_bytes, np.uint8)
    data[::4096] = 1
    yield "touch_new_memory_gib_s", gib_per_second(n_bytes, time.perf_counter() - begun)
    begun = time.perf_counter()
    data[: n_bytes // 2] = data[n_bytes // 2 :]
    yield "memcpy_one_thread_gib_s", gib_per_second(n_bytes // 2, time.perf_counter() - begun)
    for kind, folder in (("memory", lab.memory), ("disk", lab.disk)):
        yield f"{kind}: free_gib", round(shutil.disk_usage(folder).free / GIB, 1)
        yield from _plain_files(kind, folder, data)


def _plain_files(kind: str, folder: Path, data: np.ndarray[Any, Any]) -> Iterator[Figure]:
    """Files that are written and read by threads, first and then again."""
    room = min(len(data) if kind == "memory" else len(data) // 4, shutil.disk_usage(folder).free // 3)
    each = room // THREADS

    def write(n: int) -> None:
        with open(folder / str(n), "wb" if not (folder / str(n)).exists() else "r+b", buffering=0) as file:
            for at in range(n * each, (n + 1) * each, 32 << 20):
                file.write(data[at : min(at + (32 << 20), (n + 1) * each)])
            os.fsync(file.fileno())

    def read(n: int) -> None:
        with open(folder / str(n), "rb", buffering=0) as file:
            file.readinto(data[n * each : (n + 1) * each])

    with ThreadPoolExecutor(THREADS) as pool:
        for turn in ("first", "again") if kind == "memory" else ("first",):
            for what, call in (("write", write), ("read", read)):
                begun = time.perf_counter()
                list(pool.map(call, range(THREADS)))
                yield f"{kind}: {what}, {turn}_gib_s", gib_per_second(each * THREADS, time.perf_counter() - begun)


# The link between host and device ------------------------------------------------------------------------


def link(lab: Lab) -> Iterator[Figure]:
    """Transfer rates with JAX alone, in one array and in 16."""
    own, pinned = own_memory(), pinned_memory()
    n_bytes = lab.sizes.link
    host = aligned_empty((16, n_bytes // 64), np.dtype(np.float32))
    host[...] = np.arange(n_bytes // 64, dtype=np.float32)
    unaligned = np.full(n_bytes + 3, 7, np.uint8)[3:]
    rows = list(host)
    whole, parts = jax.block_until_ready((jax.device_put(host, own), jax.device_put(rows, [own] * 16)))
    there, parts_there = jax.block_until_ready(
        (jax.device_put(whole, pinned), jax.device_put(parts, [pinned] * 16)),
    )
    ways: dict[str, Callable[[], Any]] = {
        "to_pinned": lambda: jax.device_put(whole, pinned),
        "to_pinned_16": lambda: jax.device_put(parts, [pinned] * 16),
        "to_device_from_pinned": lambda: jax.device_put(there, own),
        "to_device_from_pinned_16": lambda: jax.device_put(parts_there, [own] * 16),
        "to_device": lambda: jax.device_put(host, own),
        "to_device_16": lambda: jax.device_put(rows, [own] * 16),
        "to_device_unaligned": lambda: jax.device_put(unaligned, own),
    }
    yield "bytes", n_bytes
    for name, way in ways.items():
        yield name, _rate(n_bytes, [timed(way)[0] for _ in range(4)])

    new = jax.jit(lambda x: x + 1)  # JAX keeps the host's copy of an array that has one
    for name, sources in (("to_numpy", [whole]), ("copy_to_host_async_16", parts)):
        laps: list[float] = []
        for _ in range(3):
            arrays = jax.block_until_ready([new(source) for source in sources])
            laps.append(timed(functools.partial(_to_numpy, arrays))[0])
        yield name, _rate(n_bytes, laps)

    # A save reads pinned arrays with NumPy. If that is no view, each byte is copied once more.
    seconds, view = timed(lambda: np.asarray(there))
    yield "pinned_as_numpy_s", seconds
    yield "pinned_as_numpy_is_a_view", view.ctypes.data == there.unsafe_buffer_pointer()
    copy = np.empty_like(host)
    for name, source in (("pinned", view), ("numpy", host)):
        yield (
            f"memcpy_from_{name}",
            _rate(n_bytes, [timed(lambda source=source: np.copyto(copy, source))[0] for _ in "12"]),
        )
    assert np.array_equal(view, host)


def _rate(n_bytes: int, laps: list[float]) -> dict[str, Any]:
    return {"s": laps, "gib_s": gib_per_second(n_bytes, best_warm(laps))}


def _to_numpy(arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        array.copy_to_host_async()
    for array in arrays:
        np.asarray(array)


def small_leaves_alone(lab: Lab) -> Iterator[Figure]:
    """Thousands of small leaves with JAX alone: one by one, stacked to be sent to the host, and sent as blocks."""
    own, pinned = own_memory(), pinned_memory()
    count, n_bytes = lab.sizes.small_leaves, lab.sizes.small
    rows = list(np.random.default_rng(0).random((count, n_bytes // 4), np.float32))
    leaves = jax.block_until_ready(jax.device_put(rows, [own] * count))
    ways: dict[str, Callable[[], Any]] = {
        "to_device, one call": lambda: jax.device_put(rows, [own] * count),
        "to_device, as one array": lambda: jax.device_put(np.stack(rows), own),
        "to_pinned, one call": lambda: jax.device_put(leaves, [pinned] * count),
    }
    stack, split = jax.jit(lambda some: jnp.stack(some)), jax.jit(lambda block: list(block))
    for per in (32,) if lab.sizes.is_dry else (32, 128):
        starts = range(0, count - count % per, per)
        groups = [leaves[at : at + per] for at in starts]
        blocks = [np.stack(rows[at : at + per]) for at in starts]
        ways[f"stacked by {per}, to_pinned"] = lambda groups=groups: jax.device_put(
            [stack(group) for group in groups], [pinned] * len(groups)
        )
        ways[f"blocks of {per}, to_device"] = lambda blocks=blocks: [
            split(block) for block in jax.device_put(blocks, [own] * len(blocks))
        ]
    yield "leaves", count
    yield "bytes", count * n_bytes
    for name, way in ways.items():
        laps = [timed(way)[0] for _ in range(4)]
        yield name, {"s": laps, "us_per_leaf": round(1e6 * best_warm(laps) / count, 2)}


# A save and a restore without jaxckpt --------------------------------------------------------------------


def floor_of_a_save(lab: Lab) -> Iterator[Figure]:
    """Device → pinned memory → files in memory by plain threads, and back through pinned memory or NumPy's."""
    count, n_bytes = lab.large(lab.memory)
    leaves = list(state(count, n_bytes).values())
    yield "bytes", count * n_bytes
    with ThreadPoolExecutor(THREADS) as pool:
        files = _Files(lab.memory, n_bytes, pool)
        laps = [timed(functools.partial(_plain_save, leaves, files))[0] for _ in range(4)]
        yield "save", _rate(count * n_bytes, laps)
        numpy, blank = ([np.zeros(leaves[0].shape, np.float32) for _ in range(4)] for _ in range(2))
        pinned = jax.block_until_ready(jax.device_put(blank, [pinned_memory()] * 4))
        kinds: dict[str, tuple[list[Any], list[np.ndarray[Any, Any]]]] = {
            "pinned": (pinned, [_memory_of(buffer) for buffer in pinned]),
            "numpy": (numpy, [buffer.view(np.uint8).reshape(-1) for buffer in numpy]),
        }
        for kind, (buffers, memory) in kinds.items():
            laps, back = list[float](), list[jax.Array]()
            for _ in range(3):
                back.clear()  # before the next lap needs the memory
                seconds, back = timed(functools.partial(_plain_restore, count, files, buffers, memory))
                laps.append(seconds)
            yield f"restore from {kind}", _rate(count * n_bytes, laps)
            assert all((found == wanted).all() for found, wanted in zip(back, leaves, strict=True)), kind


class _Files:
    """Files that are written and read by all threads, in eighths."""

    def __init__(self, folder: Path, n_bytes: int, pool: ThreadPoolExecutor) -> None:
        self._folder, self._n_bytes, self._pool = folder, n_bytes, pool
        self._cut = n_bytes // 8

    def write(self, number: int, data: np.ndarray[Any, Any]) -> tuple[int, list[Future[int]]]:
        file = os.open(self._folder / str(number), os.O_WRONLY | os.O_CREAT)
        starts = range(0, self._n_bytes, self._cut)
        return file, [self._pool.submit(os.pwrite, file, data[at : at + self._cut], at) for at in starts]

    def read(self, number: int, memory: np.ndarray[Any, Any]) -> None:
        file = os.open(self._folder / str(number), os.O_RDONLY)
        starts = range(0, self._n_bytes, self._cut)
        for job in [self._pool.submit(os.preadv, file, [memory[at : at + self._cut]], at) for at in starts]:
            job.result()
        os.close(file)


def _plain_save(leaves: list[jax.Array], files: _Files) -> None:
    sent = jax.device_put(leaves, [pinned_memory()] * len(leaves))
    open_files = [files.write(n, np.asarray(array).view(np.uint8).reshape(-1)) for n, array in enumerate(sent)]
    for file, jobs in open_files:
        for job in jobs:
            job.result()
        os.close(file)


def _plain_restore(
    count: int, files: _Files, buffers: list[Any], memory: list[np.ndarray[Any, Any]]
) -> list[jax.Array]:
    """Buffers are used in turn: one is filled while others are sent."""
    arrays: list[jax.Array] = []
    may_alias = False if jax.default_backend() == "cpu" else None  # CPU devices would keep the buffers
    for number in range(count):
        slot = number % len(buffers)
        if number >= len(buffers):
            jax.block_until_ready(arrays[number - len(buffers)])
        files.read(number, memory[slot])
        arrays.append(jax.device_put(buffers[slot], own_memory(), may_alias=may_alias))
    return jax.block_until_ready(arrays)


def _memory_of(array: jax.Array) -> np.ndarray[Any, Any]:
    """An array's own memory, to write into. JAX has no interface for this."""
    address = array.addressable_data(0).unsafe_buffer_pointer()
    return np.frombuffer((ctypes.c_ubyte * array.nbytes).from_address(address), np.uint8)


# A digest on the device ----------------------------------------------------------------------------------


def digest(lab: Lab) -> Iterator[Figure]:
    """How fast the device computes digests of leaves, in lanes of 32 bits; 0 lanes are a plain sum."""
    n_bytes = lab.sizes.link
    for dtype in ("float32", "bfloat16"):
        leaf = state(1, n_bytes, dtype)["leaf0"]
        yield f"{dtype}, read and written", _device_rate(lambda x: x * 2, leaf, 2 * n_bytes)
        for lanes in (0, 1, 2, 4):
            yield f"{dtype}, {lanes} lanes", _device_rate(functools.partial(_digest, lanes=lanes), leaf, n_bytes)
    small = list(state(lab.sizes.small_leaves, lab.sizes.small).values())
    one = jax.jit(functools.partial(_digest, lanes=4))
    some = jax.jit(lambda leaves: jnp.stack([_digest(leaf, lanes=4) for leaf in leaves]))
    groups = [small[at : at + 50] for at in range(0, len(small), 50)]
    yield "small leaves, a call each", {"s": [timed(lambda: [one(leaf) for leaf in small])[0] for _ in range(4)]}
    yield "small leaves, 50 a call", {"s": [timed(lambda: [some(group) for group in groups])[0] for _ in range(4)]}


def _device_rate(function: Callable[[jax.Array], jax.Array], leaf: jax.Array, moved: int) -> dict[str, Any]:
    """How fast a function of a leaf moves bytes of device memory."""
    compile_s, compiled = timed(lambda: jax.jit(function).lower(leaf).compile())
    best = best_warm([timed(lambda: compiled(leaf))[0] for _ in range(6)])
    return {
        "gb_s": round(moved / best / 1e9),
        "ms_per_8_gib": round(best * 8 * GIB / leaf.nbytes * 1e3, 2),
        "compile_s": compile_s,
        "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    }


def _digest(leaf: jax.Array, lanes: int) -> jax.Array:
    pairs = leaf.reshape(-1, 2) if leaf.dtype.itemsize == 2 else leaf
    bits = lax.bitcast_convert_type(pairs, jnp.uint32).reshape(-1)
    if not lanes:
        return bits.sum(dtype=jnp.uint32)
    mixed = bits ^ (lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    mixed ^= mixed >> 16
    sums = [mixed.sum(dtype=jnp.uint32)]
    for lane, factor in zip(range(1, lanes), (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F), strict=False):
        more = (mixed + jnp.uint32(0x9E3779B9 * lane & 0xFFFFFFFF)) * jnp.uint32(factor)
        sums.append((more ^ (more >> 15)).sum(dtype=jnp.uint32))
    return jnp.stack(sums)
