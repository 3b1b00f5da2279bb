"""Correctness checks and speed measurements on a GPU, run by `make gpu`.

    python benchmarks/gpu.py [--smoke] [--out FOLDER]        JAXCKPT_GPU_SMOKE=1 is --smoke, GPU_OUT is --out

The correctness checks run first, then the transfer rates of the link between host and device are measured, then jaxckpt
and Orbax in turn, on /dev/shm and on the disk. Each figure is printed immediately, and results.json is rewritten after
each section, so that a time limit loses no completed measurements. No section begins after BUDGET_SECONDS. `--smoke`
runs the same code with small arrays on any device, such as JAX's CPU devices. It checks only that the script works; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# By default, JAX preallocates most of the GPU's memory, which would hide its peaks.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import gpu_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from gpu_checks import Peaks, Results, Sizes, Tree, gib_per_second, memory_kinds, state, timed
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.experimental import v1

import jaxckpt
from jaxckpt._model.pieces import aligned_empty
from jaxckpt._restore import batched_placement as blocks
from jaxckpt._save import staging

BUDGET_SECONDS = 440.0
"""No section begins after this time. `make gpu` ends after 480 s, which leaves time for the last section."""


def link(folder: Path, sizes: Sizes) -> Results:
    """Transfer rates of the link, measured with JAX alone: the upper limit for a save or a restore."""
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


def compare_with_orbax(large: bool, folder: Path, sizes: Sizes) -> Results:
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
                    assert bool((back[leaf] == tree[leaf]).all()), f"{name}: {leaf} was restored with other values"
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
    """Small leaves with and without stacking for transfers, in turn. Shows the best SEND_PIECES and BLOCK_PIECES."""
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
    """A trace of one save_async and the training steps after it. Shows whether copies and steps overlap."""
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
    arguments = parser.parse_args()
    if jax.default_backend() == "cpu" and not arguments.smoke:
        print("JAX found no accelerator; --smoke runs the same checks on CPU devices", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(arguments.smoke)
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    # (name, whether an error fails the run, folder to write to, function)
    sections: list[tuple[str, bool, Path, Callable[[Path, Sizes], Results]]] = [
        ("every dtype", True, disk, checks.every_dtype),
        # Early, because a device reports only the highest peak of the process.
        ("device memory of save_async", True, memory, checks.device_memory),
        ("donated after save_async", True, disk, checks.donated),
        ("the caller's configuration", True, disk, checks.configured),
        ("replicated leaves", True, memory, checks.replicated),
        ("pinned_host leaves", True, disk, checks.pinned_leaves),
        ("a leaf above host_bytes", True, disk, checks.streamed),
        ("many small leaves", True, disk, checks.many_small),
        ("link between host and device", False, disk, link),
        ("many small leaves, /dev/shm", False, memory, functools.partial(compare_with_orbax, False)),
        ("large leaves, /dev/shm", False, memory, functools.partial(compare_with_orbax, True)),
        ("blocks or one by one", False, memory, blocks_or_one_by_one),
        ("trace of save_async", False, memory, functools.partial(one_trace, arguments.out)),
    ]
    if not arguments.smoke:
        sections += [
            ("large leaves, disk", False, disk, functools.partial(compare_with_orbax, True)),
            ("many small leaves, disk", False, disk, functools.partial(compare_with_orbax, False)),
        ]
    results: Results = {
        "device": str(jax.devices()[0].device_kind),
        "memory_kinds": sorted(memory_kinds()),
        "versions": {"jax": jax.__version__, "jaxckpt": jaxckpt.__version__, "orbax": ocp.__version__},
        "smoke": arguments.smoke,
    }
    print(json.dumps(results), flush=True)
    wrong = failed = 0
    with (arguments.out / "log.txt").open("w") as log:
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
            (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"{wrong} correctness checks and {failed - wrong} measurements failed; results in {arguments.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
