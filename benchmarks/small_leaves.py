"""Many small leaves: jaxckpt against Orbax, in one run.

    python benchmarks/small_leaves.py [--rounds 5] [--leaves 2000] [--dir DIR]

2,000 float32 leaves of 64 KiB, each split over 8 simulated CPU devices (a 2×4 mesh, P("a", "b")), are saved and
restored. Contestants run one after the other in every round, in alternating order, and the ratio of a round is
taken within it; the table shows medians. Before each measurement dirty pages are flushed, untimed, so that nobody
pays for another's writes. Files are read from the page cache by all. A first, untimed round warms everything up
and checks that every restored leaf equals what was saved.

Durability: both libraries fsync by default. By strace, Orbax 0.12.8 fsyncs its data files and their folders, but not
its own JSON files nor the folder in which its last rename shows; jaxckpt fsyncs every file and every folder above.
The ratios are of default against default, jaxckpt doing slightly more. jaxckpt with `Options(sync=False)` stands
beside them, and `--dir /dev/shm` takes fsync out of the comparison for both.

Orbax compresses by default; `use_compression=False` is measured too, so that the ratio is not about a codec.

The floor is the same number of bytes as one plain file: written without and with fsync, and read into fresh memory.

All run with freed memory kept in the process; see steady.py.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steady

steady.begin()

import jax
import numpy as np
import orbax.checkpoint as ocp
import report
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import jaxckpt

Tree = Any

SIDE = 128  # float32[128, 128] is 64 KiB

OURS, OURS_UNSYNCED = "jaxckpt, default", "jaxckpt, sync=False"
OCDBT, RAW, FILES = "Orbax, default (OCDBT)", "Orbax, use_compression=False", "Orbax, use_ocdbt=False"
PEERS = (OCDBT, RAW, FILES)
FLOOR, FLOOR_SYNC = "one plain file", "one plain file + fsync"


def make_tree(leaves: int) -> Tree:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("a", "b"))
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(leaves)]
    placed = jax.device_put(hosts, [sharding] * leaves)
    return jax.block_until_ready({f"leaf_{number:05d}": leaf for number, leaf in enumerate(placed)})


def abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def savers(folder: Path, tree: Tree, host: np.ndarray[Any, Any]) -> dict[str, tuple[Path, Callable[[], object]]]:
    """For each contestant: where it writes, and the call that is timed."""

    def orbax(path: Path, checkpointer: Any) -> tuple[Path, Callable[[], object]]:
        return path, lambda: checkpointer.save(path, tree)

    def ours(path: Path, *, sync: bool) -> tuple[Path, Callable[[], object]]:
        return path, lambda: jaxckpt.save(path, tree, options=jaxckpt.Options(sync=sync))

    def floor(path: Path, *, sync: bool) -> tuple[Path, Callable[[], object]]:
        def write() -> None:
            with path.open("wb", buffering=0) as file:
                rest = memoryview(host).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
                if sync:
                    os.fsync(file.fileno())

        return path, write

    return {
        OCDBT: orbax(folder / "orbax_ocdbt", ocp.PyTreeCheckpointer()),
        OURS: ours(folder / "ours", sync=True),
        RAW: orbax(folder / "orbax_raw", ocp.PyTreeCheckpointer(use_compression=False)),
        OURS_UNSYNCED: ours(folder / "ours_unsynced", sync=False),
        FILES: orbax(folder / "orbax_files", ocp.PyTreeCheckpointer(use_ocdbt=False)),
        FLOOR: floor(folder / "floor", sync=False),
        FLOOR_SYNC: floor(folder / "floor_sync", sync=True),
    }


def restorers(folder: Path, wanted: Tree, n_bytes: int) -> dict[str, Callable[[], Tree]]:
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)

    def orbax(path: Path, checkpointer: Any) -> Callable[[], Tree]:
        return lambda: jax.block_until_ready(checkpointer.restore(path, item=wanted, restore_args=restore_args))

    def read_plain() -> None:
        with (folder / "floor").open("rb", buffering=0) as file:
            rest = memoryview(np.empty(n_bytes, np.uint8))
            while rest:
                rest = rest[file.readinto(rest) :]

    return {
        OCDBT: orbax(folder / "orbax_ocdbt", ocp.PyTreeCheckpointer()),
        OURS: lambda: jax.block_until_ready(jaxckpt.restore(folder / "ours", wanted)),
        RAW: orbax(folder / "orbax_raw", ocp.PyTreeCheckpointer(use_compression=False)),
        FILES: orbax(folder / "orbax_files", ocp.PyTreeCheckpointer(use_ocdbt=False)),
        FLOOR: read_plain,
    }


def seconds(call: Callable[[], object]) -> float:
    os.sync()
    begun = time.perf_counter()
    result = call()
    taken = time.perf_counter() - begun
    del result
    return taken


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def count_files(path: Path) -> int:
    return sum(1 for found in path.rglob("*") if found.is_file()) if path.is_dir() else 1


def require_equal(name: str, restored: Tree, tree: Tree) -> None:
    for key, leaf in tree.items():
        same = restored[key].sharding == leaf.sharding and np.array_equal(restored[key], leaf)
        if not same:
            raise SystemExit(f"{name} restored another {key} than was saved")


def measure(folder: Path, leaves: int, rounds: int) -> dict[str, Any]:
    tree = make_tree(leaves)
    host = np.concatenate([np.asarray(leaf).ravel() for leaf in tree.values()])
    np.ones(8 * host.size, np.float32).sum()  # touch the memory that the contestants will reuse
    save = savers(folder, tree, host)
    restore = restorers(folder, abstract(tree), host.nbytes)
    files: dict[str, int] = {}
    report.console.print("warming up, and checking what is restored …")
    for name, (path, call) in save.items():
        call()
        files[name] = count_files(path)
    for name, call in restore.items():
        restored = call()
        if restored is not None:
            require_equal(name, restored, tree)
    times: dict[str, dict[str, list[float]]] = {
        "save": {name: [] for name in save},
        "restore": {name: [] for name in restore},
    }
    for number in range(rounds):
        report.console.print(f"round {number + 1} of {rounds} …")
        order = list(save) if number % 2 == 0 else list(reversed(save))
        for name in order:
            path, call = save[name]
            remove(path)
            times["save"][name].append(seconds(call))
        for name in order:
            if name in restore:
                times["restore"][name].append(seconds(restore[name]))
    return {"bytes": host.nbytes, "files": files, "seconds": times}


def ratios(times: dict[str, list[float]], peer: str, ours: str) -> float | None:
    """Median over the rounds of the peer's time by ours; None where either did not run."""
    if peer not in times or ours not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[peer], times[ours], strict=True))


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['leaves']} leaves of 64 KiB over 8 devices, medians of {result['rounds']} rounds")
    table.add_column("contestant")
    for heading in ("save", "× jaxckpt", "restore", "× jaxckpt", "files"):
        table.add_column(heading, justify="right")

    def cell(times: dict[str, list[float]], name: str) -> str:
        return f"{statistics.median(times[name]):.3f} s" if name in times else ""

    def ratio(verb: str, name: str) -> str:
        found = result["ratios"][verb].get(name)
        return f"{found:.1f}" if found else ""

    for name, files in result["files"].items():
        table.add_row(
            name,
            cell(result["seconds"]["save"], name),
            ratio("save", name),
            cell(result["seconds"]["restore"], name),
            ratio("restore", name),
            str(files),
        )
    report.console.print(table)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leaves", type=int, default=2000)
    arguments = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="small_leaves.") as name:
        folder = Path(name).resolve()
        surroundings = report.surroundings(folder)
        measured = measure(folder, arguments.leaves, arguments.rounds)
    times = measured["seconds"]
    result = {
        "leaves": arguments.leaves,
        "rounds": arguments.rounds,
        **surroundings,
        **measured,
        "ratios": {
            "save": {peer: ratios(times["save"], peer, OURS) for peer in PEERS},
            "save, jaxckpt with sync=False": {peer: ratios(times["save"], peer, OURS_UNSYNCED) for peer in PEERS},
            "restore": {peer: ratios(times["restore"], peer, OURS) for peer in PEERS},
        },
    }
    show(result)
    report.write("small_leaves", result, arguments.json)


if __name__ == "__main__":
    main()
