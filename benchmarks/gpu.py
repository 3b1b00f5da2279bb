"""Checks and measurements that need a GPU: first that every path is right, then how fast it is. Run by `make gpu`.

    python benchmarks/gpu.py [--smoke] [--out FOLDER]        JAXCKPT_GPU_SMOKE=1 is --smoke, GPU_OUT is --out

Correctness comes first, then the link's own rates, then jaxckpt and Orbax in turn, on /dev/shm and on the disk. Each
figure is printed as soon as it is known, and results.json is rewritten after each section, so that a time limit loses
no completed measurements. No section begins after BUDGET_SECONDS. `--smoke` runs the same code with small arrays on any
device, such as JAX's CPU devices: it shows that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# By default, JAX preallocates most of the GPU's memory, which would hide its peaks.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.experimental import v1

import jaxckpt
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._restore import blocks
from jaxckpt._restore.reading import aligned_empty
from jaxckpt._save import host_copies, staging

BUDGET_SECONDS = 440.0
"""No section begins after this time. `make gpu` ends after 480 s; the difference is for the section that runs last."""

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
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = tuple(map(max, self._most, self._now()))

    @staticmethod
    def _now() -> tuple[int, ...]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)

    def mib(self) -> dict[str, int]:
        host, device = ((most - before) >> 20 for most, before in zip(self._most, self._before, strict=True))
        return {"peak_host_mib": host, "peak_device_mib": device}


# Correctness ---------------------------------------------------------------------------------------------


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
        raise AssertionError(f"{what}: other bits came back")


def memory_kinds() -> set[str]:
    return {memory.kind for memory in jax.devices()[0].addressable_memories()}


def every_dtype(folder: Path, sizes: Sizes) -> Results:
    """Each dtype that the device supports, saved whole and in parts, restored to the device, and read as NumPy."""
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
        return {"not run": f"the device has {sorted(memory_kinds())} only"}
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
    """A leaf larger than `host_bytes`: of a dtype whose NaNs programs may alter, and of one without that problem."""
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
    """The caller's mesh, checks for NaN and guards against transfers do not change what is saved and restored."""
    host = np.full((256, 1024), np.nan, np.float32)
    leaf = jax.device_put(host, jax.devices()[-1])
    tree = {"leaf": leaf, "uncommitted": jax.device_put(host), "small": [leaf[n] for n in range(200)]}
    wanted = jax.tree.map(np.asarray, tree)
    parts = jaxckpt.Options(object_bytes=64 << 10)
    limited = jaxckpt.Options(object_bytes=64 << 10, staging_bytes=1 << 20)
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
    """Leaves that all devices hold leave through all of them; with one device, this shows only that they are right."""
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
    for number, leaf in enumerate(back.values()):
        require_equal(leaf, host + number, f"leaf{number}")
    return {"bytes": 16 * host.nbytes, "seconds": round(seconds, 3), "bytes_by_device": sent}


# Figures -------------------------------------------------------------------------------------------------


def state(leaves: int, n_bytes: int) -> Tree:
    """Leaves of `n_bytes` each, made on the device."""
    make = jax.jit(lambda key: jax.random.normal(key, (n_bytes // 4096, 1024), jnp.float32))
    return {f"leaf{n}": make(jax.random.key(n)) for n in range(leaves)}


def link(folder: Path, sizes: Sizes) -> Results:
    """The link's own rates with JAX alone: the upper limit for a save or a restore."""
    host = aligned_empty((sizes.link // 4,), np.dtype(np.float32))
    host[...] = 1
    device = jax.block_until_ready(jax.device_put(host))
    ways: dict[str, Callable[[], Any]] = {"to_device": lambda: jax.device_put(host)}
    if "pinned_host" in memory_kinds():
        pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        own = SingleDeviceSharding(jax.devices()[0])
        there = jax.block_until_ready(jax.device_put(host, pinned))
        ways |= {
            "to_device_from_pinned": lambda: jax.device_put(there, own),
            "to_pinned": lambda: jax.device_put(device, pinned),
        }
    found = {}
    for name, way in ways.items():
        seconds = [timed(way)[0] for _ in range(4)][1:]
        found[f"{name}_gib_s"] = gib_per_second(sizes.link, min(seconds))
    seconds = []
    for _ in range(4):  # new arrays, because JAX caches the host copy of an array
        fresh = jax.block_until_ready(device + 0)
        begun = time.perf_counter()
        np.asarray(fresh)
        seconds.append(time.perf_counter() - begun)
    found["to_numpy_gib_s"] = gib_per_second(sizes.link, min(seconds[1:]))
    return found


class OrbaxV0:
    def __init__(self) -> None:
        self.checkpointer: Any = ocp.PyTreeCheckpointer()
        self.background: Any = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def save(self, path: Path, tree: Tree) -> None:
        self.checkpointer.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        self.background.save(path, args=ocp.args.PyTreeSave(tree))
        return self.background.wait_until_finished

    def restore(self, path: Path, wanted: Tree) -> Tree:
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        return self.checkpointer.restore(path, item=wanted, restore_args=arguments)


class OrbaxV1:
    def save(self, path: Path, tree: Tree) -> None:
        v1.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        return v1.save_async(path, tree).result

    def restore(self, path: Path, wanted: Tree) -> Tree:
        return v1.load(path, wanted)


class Jaxckpt:
    def save(self, path: Path, tree: Tree) -> None:
        jaxckpt.save(path, tree)

    def save_async(self, path: Path, tree: Tree) -> Callable[[], object]:
        return jaxckpt.save_async(path, tree).wait

    def restore(self, path: Path, wanted: Tree) -> Tree:
        return jaxckpt.restore(path, wanted)


CONTENDERS = {"jaxckpt": Jaxckpt, "orbax v0": OrbaxV0, "orbax v1": OrbaxV1}


class Training:
    """Matrix-product steps of some tens of milliseconds each, queued one after another."""

    def __init__(self, side: int) -> None:
        self._step = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: jnp.tanh(y @ x), x))
        self._x = jnp.full((side, side), 0.001, jnp.bfloat16)
        self.alone_ms = [self.step_ms() for _ in range(6)][1:]

    def step_ms(self) -> float:
        return round(1000 * timed(lambda: self._step(self._x))[0], 2)


def beside_orbax(large: bool, folder: Path, sizes: Sizes) -> Results:
    """Run each operation with each library in turn. If there are several rounds, the first one is a warm-up."""
    leaves, n_bytes = (sizes.large_leaves, sizes.large) if large else (sizes.small_leaves, 0)
    n_bytes = n_bytes or leaves * sizes.small
    tree = jax.block_until_ready(state(leaves, n_bytes // leaves))
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
    training = Training(sizes.side)
    contenders = {name: kind() for name, kind in CONTENDERS.items()}
    laps: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    peaks: dict[str, dict[str, dict[str, int]]] = {name: {} for name in contenders}

    for turn in range(sizes.rounds):
        for name, one in contenders.items():
            if turn and left() < 20:
                break
            path = folder / name.replace(" ", "-")

            def note(what: str, value: float, name: str = name) -> None:
                laps[name].setdefault(what, []).append(value)
                print(f"      {name}, {what}: {value:.3f}", flush=True)

            with Peaks() as saving:
                note("save_s", timed(functools.partial(one.save, path, tree))[0])
            with Peaks() as restoring:
                seconds, back = timed(functools.partial(one.restore, path, wanted))
            note("restore_s", seconds)
            if not turn:
                for leaf in tree:
                    assert bool((back[leaf] == tree[leaf]).all()), f"{name}: {leaf} came back otherwise"
            del back
            peaks[name] = {"save": saving.mib(), "restore": restoring.mib()}
            shutil.rmtree(path)
            begun = time.perf_counter()
            wait = one.save_async(path, tree)
            note("save_async_returns_s", time.perf_counter() - begun)
            steps = [training.step_ms() for _ in range(10)]
            wait()
            note("save_async_ends_s", time.perf_counter() - begun)
            note("step_while_saving_ms", statistics.median(steps))
            note("slowest_step_while_saving_ms", max(steps))
            shutil.rmtree(path)
    summary = {
        name: {what: round(statistics.median(found[1:] or found), 4) for what, found in kinds.items()} | peaks[name]
        for name, kinds in laps.items()
    }
    return {"bytes": n_bytes, "leaves": leaves, "step_alone_ms": statistics.median(training.alone_ms), **summary}


def blocks_or_one_by_one(folder: Path, sizes: Sizes) -> Results:
    """Small leaves with and without stacking for transfers, in turn: shows the right SEND_PIECES and BLOCK_PIECES."""
    usual = staging.SEND_PIECES, blocks.BLOCK_PIECES
    found: Results = {}
    for leaves in (sizes.small_leaves // 4, sizes.small_leaves):
        laps: dict[str, list[float]] = {}
        for turn in range(2 * sizes.rounds):
            # No other section uses this shape, so the first turn compiles, as in a training job.
            tree = {name: leaf[:-1] for name, leaf in state(leaves, max(8192, sizes.small)).items()}
            jax.block_until_ready(tree)
            kind = "one_by_one" if turn % 2 else "blocks"
            staging.SEND_PIECES = blocks.BLOCK_PIECES = 1 << 30 if turn % 2 else 64
            begun = time.perf_counter()
            pending = jaxckpt.save_async(folder / "c", tree, overwrite=True)
            laps.setdefault(f"{kind}_save_async_returns_s", []).append(round(time.perf_counter() - begun, 4))
            pending.wait()
            seconds = timed(lambda: jaxckpt.restore(folder / "c"))[0]
            laps.setdefault(f"{kind}_restore_s", []).append(round(seconds, 4))
        found[f"{leaves} leaves, first and later turns"] = laps
    staging.SEND_PIECES, blocks.BLOCK_PIECES = usual
    return found


def one_trace(out: Path, folder: Path, sizes: Sizes) -> Results:
    """A trace of one save_async with steps behind it: shows whether copies and steps overlap."""
    tree = jax.block_until_ready(state(sizes.large_leaves, sizes.large // sizes.large_leaves // 4))
    training = Training(sizes.side)
    with jax.profiler.trace(folder / "trace"):
        pending = jaxckpt.save_async(folder / "c", tree)
        steps = [training.step_ms() for _ in range(10)]
        pending.wait()
    (made,) = (folder / "trace").rglob("*.trace.json.gz")
    shutil.copy(made, out / "save_async.trace.json.gz")
    return {"step_ms": statistics.median(steps), "file": "save_async.trace.json.gz"}


# All sections --------------------------------------------------------------------------------------------

_begun = time.monotonic()


def left() -> float:
    return BUDGET_SECONDS - (time.monotonic() - _begun)


@contextlib.contextmanager
def scratch(where: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="jaxckpt-gpu-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true", default=os.environ.get("JAXCKPT_GPU_SMOKE") == "1")
    parser.add_argument("--out", type=Path, default=os.environ.get("GPU_OUT") or ".gpu")
    asked = parser.parse_args()
    if jax.default_backend() == "cpu" and not asked.smoke:
        print("JAX finds no accelerator here; --smoke runs the same checks on CPU devices", file=sys.stderr)
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(asked.smoke)
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    # (name, whether an error in it fails the run, the folder it writes to, the function)
    sections: list[tuple[str, bool, Path, Callable[[Path, Sizes], Results]]] = [
        ("every dtype", True, disk, every_dtype),
        # Early, because a device reports only the highest peak of the process.
        ("device memory of save_async", True, memory, device_memory),
        ("donated after save_async", True, disk, donated),
        ("the caller's configuration", True, disk, configured),
        ("replicated leaves", True, memory, replicated),
        ("pinned_host leaves", True, disk, pinned_leaves),
        ("a leaf above host_bytes", True, disk, streamed),
        ("many small leaves", True, disk, many_small),
        ("the link alone", False, disk, link),
        ("many small leaves, /dev/shm", False, memory, functools.partial(beside_orbax, False)),
        ("large leaves, /dev/shm", False, memory, functools.partial(beside_orbax, True)),
        ("blocks or one by one", False, memory, blocks_or_one_by_one),
        ("trace of save_async", False, memory, functools.partial(one_trace, asked.out)),
    ]
    if not asked.smoke:
        sections += [
            ("large leaves, disk", False, disk, functools.partial(beside_orbax, True)),
            ("many small leaves, disk", False, disk, functools.partial(beside_orbax, False)),
        ]
    results: Results = {
        "device": str(jax.devices()[0].device_kind),
        "memory_kinds": sorted(memory_kinds()),
        "versions": {"jax": jax.__version__, "jaxckpt": jaxckpt.__version__, "orbax": ocp.__version__},
        "smoke": asked.smoke,
    }
    print(json.dumps(results), flush=True)
    wrong = failed = 0
    with (asked.out / "log.txt").open("w") as log:
        for name, must_pass, where, section in sections:
            if left() < 30:
                results[name] = {"not run": "no time was left"}
                continue
            begun = time.monotonic()
            try:
                with scratch(where) as folder:
                    results[name] = section(folder, sizes)
            except Exception as error:  # continue with the other sections
                results[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
                log.write(f"{name}\n{traceback.format_exc()}\n")
                wrong += must_pass
                failed += 1
            line = f"{name} ({time.monotonic() - begun:.1f} s): {json.dumps(results[name])}"
            print(line, flush=True)
            log.write(line + "\n")
            log.flush()
            (asked.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{wrong} checks of correctness and {failed - wrong} measurements failed; results in {asked.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
