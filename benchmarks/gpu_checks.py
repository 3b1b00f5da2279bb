"""The checks of `make gpu`, which run before its measurements: correct results, and little device memory.

Each check writes to a folder, and raises if something is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxckpt
from jaxckpt._devices import device_to_host as host_copies
from jaxckpt._model.dtypes import DTYPES

Tree = dict[str, jax.Array]
Results = dict[str, Any]


class Sizes:
    """Sizes in bytes; small ones for a smoke test."""

    def __init__(self, smoke: bool) -> None:
        self.streamed = 8 << 20 if smoke else 1 << 30
        self.link = 4 << 20 if smoke else 2 << 30
        self.large_leaves = 16
        self.large = 16 << 20 if smoke else 8 << 30
        self.small_leaves = 200 if smoke else 2000
        self.small = 4 << 10 if smoke else 64 << 10
        self.rounds = 1 if smoke else 3
        self.side = 256 if smoke else 8192
        """Rows and columns of the matrices that a training step multiplies."""


def gib_per_second(n_bytes: int, seconds: float) -> float:
    return round(n_bytes / seconds / (1 << 30), 2)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result), measured until all arrays in the result are ready."""
    begun = time.perf_counter()
    found = jax.block_until_ready(call())
    return time.perf_counter() - begun, found


class Peaks:
    """Peak memory while the block runs, above the memory in use before it; sampled every 5 ms."""

    def __enter__(self) -> Peaks:
        gc.collect()
        self._ended = threading.Event()
        self._before = self._most = self._now()
        self._thread = threading.Thread(target=self._watchdog)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watchdog(self) -> None:
        while not self._ended.wait(0.005):
            self._most = tuple(map(max, self._most, self._now()))

    @staticmethod
    def _now() -> tuple[int, ...]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)

    def mib(self) -> dict[str, int]:
        host, device = ((most - before) >> 20 for most, before in zip(self._most, self._before, strict=True))
        return {"peak_host_mib": host, "peak_device_mib": device}


def state(leaves: int, n_bytes: int) -> Tree:
    """Leaves of `n_bytes` each, created on the device."""
    make = jax.jit(lambda key: jax.random.normal(key, (n_bytes // 4096, 1024), jnp.float32))
    return {f"leaf{n}": make(jax.random.key(n)) for n in range(leaves)}


# The checks ----------------------------------------------------------------------------------------------


def any_bits(dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """Random bits. For floats, they include NaNs with payloads, infinities and subnormals."""
    rng = np.random.default_rng(0)
    if dtype.name == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.name.strip("u") in ("int2", "int4"):
        return rng.integers(0, 2, count).astype(dtype)
    raw = rng.integers(0, 16 if "float4" in dtype.name else 256, count * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype)


def require_equal(found: Any, wanted: np.ndarray[Any, Any], what: str) -> None:
    same = found.dtype == wanted.dtype and np.asarray(found).tobytes() == wanted.tobytes()
    if not same:
        raise AssertionError(f"{what}: the bits differ")


def memory_kinds() -> set[str]:
    return {memory.kind for memory in jax.devices()[0].addressable_memories()}


def every_dtype(folder: Path, sizes: Sizes) -> Results:
    """Each dtype that the device supports, saved as one object and as several, restored, and read as NumPy arrays."""
    parts = jaxckpt.Options(object_bytes=1 << 10, chunk_bytes=1 << 10, sync=False)
    ways: dict[str, Callable[..., Any]] = {
        "save": jaxckpt.save,
        "save_async": lambda *given: jaxckpt.save_async(*given).wait(),
        "save in parts": functools.partial(jaxckpt.save, options=parts),
        "save_async in parts": lambda *given: jaxckpt.save_async(*given, options=parts).wait(),
    }
    refused: dict[str, str] = {}
    done: list[str] = []
    for name, dtype in DTYPES.items():
        host = any_bits(dtype, 4096).reshape(8, 512)
        with jax.enable_x64(True):
            try:
                leaf = jax.block_until_ready(jax.device_put(host))
                require_equal(leaf, host, f"{name}, by JAX alone")
            except Exception as error:
                refused[name] = str(error)[:200]
                continue
            for way, save in ways.items():
                save(folder / f"{name}-{way}", {"x": leaf})
                like = {"x": jax.ShapeDtypeStruct(host.shape, dtype, sharding=leaf.sharding)}
                require_equal(jaxckpt.restore(folder / f"{name}-{way}", like)["x"], host, f"{name}, {way}")
                require_equal(jaxckpt.load_numpy(folder / f"{name}-{way}")["x"], host, f"{name}, {way}, as NumPy")
        done.append(name)
    assert {"float32", "bfloat16"} <= set(done), refused
    return {"dtypes": done, "refused_by_the_device": refused}


def donated(folder: Path, sizes: Sizes) -> Results:
    """Arrays that are donated immediately after save_async returns."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2 + 1, tree), donate_argnums=0)
    tree = state(4, sizes.streamed // 4)
    jax.block_until_ready(step(state(4, sizes.streamed // 4)))  # compiled before the save
    wanted = {name: np.array(leaf) for name, leaf in tree.items()}
    pending = jaxckpt.save_async(folder / "c", tree)
    for _ in range(10):
        tree = step(tree)
    jax.block_until_ready(tree)
    pending.wait()
    for name, found in jaxckpt.load_numpy(folder / "c").items():
        require_equal(found, wanted[name], f"donated leaf {name}")
    return {"bytes": sizes.streamed}


def pinned_leaves(folder: Path, sizes: Sizes) -> Results:
    """Leaves in pinned host memory are restored to it."""
    if "pinned_host" not in memory_kinds():
        return {"not run": f"the device has only {sorted(memory_kinds())}"}
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    host = any_bits(np.dtype(np.float32), 1 << 20)
    tree = {"pinned": jax.device_put(host, pinned), "own": jnp.asarray(host)}
    jaxckpt.save_async(folder / "c", tree).wait()
    found = jaxckpt.restore(folder / "c", tree)
    for name, leaf in tree.items():
        require_equal(found[name], host, name)
        assert found[name].sharding.memory_kind == leaf.sharding.memory_kind, name
    return {"bytes": 2 * host.nbytes}


def streamed(folder: Path, sizes: Sizes) -> Results:
    """A leaf larger than `host_bytes`, in a dtype whose NaNs device programs may change, and in one that they keep."""
    options = jaxckpt.Options(host_bytes=sizes.streamed // 16, object_bytes=sizes.streamed // 32, chunk_bytes=64 << 10)
    found: Results = {}
    for name in ("float32", "bfloat16"):
        host = any_bits(DTYPES[name], sizes.streamed // DTYPES[name].itemsize).reshape(-1, 1024)
        tree = {"x": jax.device_put(host)}
        with Peaks() as saving:
            jaxckpt.save(folder / name, tree, options=options)
        with Peaks() as restoring:
            back = jax.block_until_ready(jaxckpt.restore(folder / name, tree, options=options))
        require_equal(back["x"], host, name)
        found[name] = {"bytes": host.nbytes, "save": saving.mib(), "restore": restoring.mib()}
    return found


def many_small(folder: Path, sizes: Sizes) -> Results:
    """Thousands of leaves, including PRNG keys, empty arrays, scalars and NumPy arrays."""
    host = any_bits(np.dtype(np.uint16), sizes.small_leaves * 256).reshape(-1, 256)
    tree: dict[str, Any] = {f"leaf{n}": leaf for n, leaf in enumerate(jax.device_put(list(host.view(jnp.bfloat16))))}
    jaxckpt.save(folder / "c", tree | {"key": jax.random.key(7), "empty": jnp.zeros((0, 3)), "numpy": np.arange(5)})
    back = jaxckpt.restore(folder / "c")
    for number, wanted in enumerate(host):
        require_equal(back[f"leaf{number}"], wanted.view(jnp.bfloat16), f"leaf{number}")
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(jax.random.key(7))).all()
    assert back["empty"].shape == (0, 3)
    assert (back["numpy"] == np.arange(5)).all()
    return {"leaves": len(back)}


def device_memory(folder: Path, sizes: Sizes) -> Results:
    """The additional device memory of `save_async`: none if host memory is not limited, otherwise a constant."""
    host = np.ones((sizes.streamed // 4096, 1024), np.float32)
    tree = jax.block_until_ready({f"leaf{n}": jax.device_put(host) for n in range(2)})
    found: Results = {"bytes": 2 * host.nbytes}
    for name, staging_bytes, most in (
        ("unlimited", None, 0),
        ("limited", 4 * host.nbytes, host_copies.DEVICE_BYTES + jaxckpt.Options().object_bytes),
    ):
        before = jax.devices()[0].memory_stats() or {}
        jaxckpt.save_async(folder / name, tree, options=jaxckpt.Options(staging_bytes=staging_bytes)).wait()
        after = jax.devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" not in after:
            found[name] = "the device does not report its memory"
        elif after["peak_bytes_in_use"] > before["peak_bytes_in_use"]:
            used = after["peak_bytes_in_use"] - before["bytes_in_use"]
            found[name] = {"peak_device_mib": used >> 20}
            assert used <= most + (16 << 20), f"{name}: {used >> 20} MiB"
        else:
            used = before["peak_bytes_in_use"] - before["bytes_in_use"]
            found[name] = {"peak_device_mib": f"at most {used >> 20}"}
    return found


def configured(folder: Path, sizes: Sizes) -> Results:
    """The caller's mesh, NaN checks and transfer guards do not change what is saved and restored."""
    host = np.full((256, 1024), np.nan, np.float32)
    leaf = jax.device_put(host, jax.devices()[-1])
    tree = {"leaf": leaf, "uncommitted": jax.device_put(host), "small": [leaf[n] for n in range(200)]}
    wanted = jax.tree.map(np.asarray, tree)
    parts = jaxckpt.Options(object_bytes=64 << 10, chunk_bytes=64 << 10)
    limited = dataclasses.replace(parts, staging_bytes=1 << 20)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    with jax.set_mesh(mesh), jax.debug_nans(True), jax.debug_infs(True), jax.transfer_guard("disallow"):
        jaxckpt.save(folder / "save", tree, options=parts)
        jaxckpt.save_async(folder / "save_async", tree, options=parts).wait()
        jaxckpt.save_async(folder / "limited", tree, options=limited).wait()
        restored = {name: jaxckpt.restore(folder / name, tree) for name in ("save", "save_async", "limited")}
    for name, back in restored.items():
        for found, right in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True):
            require_equal(found, right, name)
    return {"bytes": 2 * host.nbytes, "devices": mesh.size}


def replicated(folder: Path, sizes: Sizes) -> Results:
    """Replicated leaves are copied to the host from all devices. With one device, this checks only their values."""
    everywhere = NamedSharding(jax.make_mesh((len(jax.devices()),), ("x",)), PartitionSpec())
    host = any_bits(np.dtype(np.uint32), sizes.streamed // 64).reshape(-1, 1024)
    tree = {f"leaf{n}": jax.device_put(host + n, everywhere) for n in range(16)}
    started = host_copies.start_copies
    sent: dict[str, int] = {}

    def counted(arrays: Any) -> Any:
        for array in arrays:
            (device,) = array.devices()
            sent[str(device)] = sent.get(str(device), 0) + array.nbytes
        return started(arrays)

    host_copies.start_copies = counted
    seconds = timed(lambda: jaxckpt.save_async(folder / "c", tree).wait() and None)[0]
    host_copies.start_copies = started
    back = jaxckpt.restore(folder / "c", tree)
    for number in range(16):
        require_equal(back[f"leaf{number}"], host + number, f"leaf{number}")
    return {"bytes": 16 * host.nbytes, "seconds": round(seconds, 3), "bytes_by_device": sent}
