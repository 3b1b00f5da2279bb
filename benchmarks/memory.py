"""Host memory of a save and a restore in addition to the tree: jaxckpt compared with Orbax, in one run.

    python benchmarks/memory.py [--gib 2] [--dir DIR]

Saves and restores a float32 tree of 2 GiB (four leaves of 1/8 and one of 1/2 of it) on a 2×4 mesh of simulated CPU
devices. Each measurement is a separate child process. VmHWM is the peak resident memory of a process, including pages
of mapped files. It is reset just before the call, and the result is

    for a save       VmHWM after it - VmRSS before it; the tree stays in memory
    for a restore    VmHWM after it - VmRSS before it - bytes of the arrays returned

A replica on a CPU device shares its memory with the others, so a replicated leaf counts once. Before the call, the
child compiles a small program on each device, so that JAX itself is not measured, and glibc returns freed memory
(malloc_trim). Each child checks what it restored.
Orbax runs with default settings, with both of its checkpointers.

The folder should be on a disk: mapped pages of tmpfs count as memory of the process, although they belong to the file.
`Options.host_bytes` has its default of 256 MiB, or the value of --host-mib.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steady

steady.begin(keep_memory=False)

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import jaxckpt

Tree = Any
MIB = 1 << 20

OURS, PYTREE, STANDARD = "jaxckpt", "Orbax PyTreeCheckpointer", "Orbax StandardCheckpointer"
CASES = {
    # the libraries that support each case; Orbax returns only JAX arrays, with given shardings
    "as saved, 2×4": (OURS, PYTREE, STANDARD),
    "onto 3×2": (OURS, PYTREE, STANDARD),
    "rows → columns": (OURS, PYTREE, STANDARD),
    "one device": (OURS, PYTREE, STANDARD),
    "replicated on 2": (OURS, PYTREE, STANDARD),
    "cast to bfloat16, 3×2": (OURS, PYTREE, STANDARD),
    "load_numpy": (OURS,),
}


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), ("x", "y")[: len(sizes)])


def shapes_of(gib: float) -> dict[str, tuple[int, int]]:
    """Shapes with sides that are multiples of 24, so that meshes of 2×4, 3×2 and 8 divide them."""
    columns = 8208
    rows = round(gib * (1 << 30) / 8 / (4 * columns) / 24) * 24
    return {**{f"leaf{number}": (rows, columns) for number in range(4)}, "large": (4 * rows, columns)}


def expected(shape: tuple[int, int], rows: slice) -> np.ndarray[Any, Any]:
    start, stop, _ = rows.indices(shape[0])
    # Make integers first: the values of a float32 range depend on its start.
    return np.arange(start * shape[1], stop * shape[1]).astype(np.float32).reshape(stop - start, shape[1])


def make_tree(gib: float, sharding: NamedSharding) -> Tree:
    def piece(shape: tuple[int, int], index: Any) -> np.ndarray[Any, Any]:
        return np.ascontiguousarray(expected(shape, index[0])[:, index[1]])

    tree = {
        name: jax.make_array_from_callback(shape, sharding, lambda index, shape=shape: piece(shape, index))
        for name, shape in shapes_of(gib).items()
    }
    return jax.block_until_ready(tree)


def require_equal(tree: Tree, gib: float) -> None:
    """Compare each shard in bands of rows, so that the check needs little memory."""
    for name, shape in shapes_of(gib).items():
        leaf = tree[name]
        shards = [(leaf, (slice(None), slice(None)))]
        if isinstance(leaf, jax.Array):
            shards = [(np.asarray(shard.data), shard.index) for shard in leaf.addressable_shards]
        for data, (rows, columns) in shards:
            first = rows.start or 0
            for start in range(0, len(data), 512):
                band = slice(first + start, first + min(start + 512, len(data)))
                wanted = expected(shape, band)[:, columns].astype(leaf.dtype)
                if not np.array_equal(data[start : start + 512], wanted):
                    raise SystemExit(f"{name} was restored with other values")


# In a child process ---------------------------------------------------------------------------------------


def status(name: str) -> int:
    """A value of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"no {name} in /proc/self/status")


def measured(call: Callable[[], Tree]) -> tuple[Tree, int, float]:
    """(result of a call, rise of the process's memory during the call in bytes, seconds)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the call could reuse freed memory, which would not count
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    begun = time.perf_counter()
    result = call()
    jax.block_until_ready(result)
    seconds = time.perf_counter() - begun
    return result, status("VmHWM") - before, seconds


def unique_bytes(tree: Tree) -> int:
    """Bytes of memory of a tree's leaves; replicas that share memory count once."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            total += sum({s.data.unsafe_buffer_pointer(): s.data.nbytes for s in leaf.addressable_shards}.values())
        else:
            total += leaf.nbytes
    return total


def saver(who: str, path: Path, tree: Tree, options: jaxckpt.Options) -> Callable[[], None]:
    if who == OURS:
        return lambda: (jaxckpt.save(path, tree, options=options), None)[1]
    import orbax.checkpoint as ocp

    if who == PYTREE:
        checkpointer: Any = ocp.PyTreeCheckpointer()
        return lambda: checkpointer.save(path, tree)
    standard = ocp.StandardCheckpointer()
    return lambda: (standard.save(path, tree), standard.wait_until_finished())[1]


def restorer(who: str, case: str, path: Path, gib: float, options: jaxckpt.Options) -> Callable[[], Tree]:
    if case == "load_numpy":
        return lambda: jaxckpt.load_numpy(path, options=options)
    sharding, dtype = {
        "as saved, 2×4": (NamedSharding(mesh_of(2, 4), P("x", "y")), np.float32),
        "onto 3×2": (NamedSharding(mesh_of(3, 2), P("x", "y")), np.float32),
        "rows → columns": (NamedSharding(mesh_of(8), P(None, "x")), np.float32),
        "one device": (NamedSharding(mesh_of(1), P()), np.float32),
        "replicated on 2": (NamedSharding(mesh_of(2), P()), np.float32),
        "cast to bfloat16, 3×2": (NamedSharding(mesh_of(3, 2), P("x", "y")), jnp.bfloat16),
    }[case]
    wanted = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape in shapes_of(gib).items()}
    if who == OURS:
        return lambda: jaxckpt.restore(path, wanted, options=options)
    import orbax.checkpoint as ocp

    if who == PYTREE:
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        checkpointer: Any = ocp.PyTreeCheckpointer()
        return lambda: checkpointer.restore(path, item=wanted, restore_args=arguments)
    standard: Any = ocp.StandardCheckpointer()
    return lambda: standard.restore(path, wanted)


def child(verb: str, who: str, case: str, path: Path, gib: float, host_bytes: int) -> dict[str, float]:
    logging.getLogger("absl").setLevel(logging.ERROR)
    options = jaxckpt.Options(host_bytes=host_bytes, cast="unsafe")
    jax.block_until_ready([jnp.zeros(8, device=device) + 1 for device in jax.devices()])
    if verb == "save":
        by_rows = case == "rows → columns"
        sharding = NamedSharding(mesh_of(8), P("x")) if by_rows else NamedSharding(mesh_of(2, 4), P("x", "y"))
        tree = make_tree(gib, sharding)
        _, risen, seconds = measured(saver(who, path, tree, options))
        return {"bytes": risen, "tree": unique_bytes(tree), "seconds": seconds}
    tree, risen, seconds = measured(restorer(who, case, path, gib, options))
    held = unique_bytes(tree)
    require_equal(tree, gib)
    return {"bytes": risen - held, "tree": held, "seconds": seconds}


# The run --------------------------------------------------------------------------------------------------


def run_child(verb: str, who: str, case: str, path: Path, arguments: argparse.Namespace) -> dict[str, float] | None:
    os.sync()
    given = json.dumps([verb, who, case, str(path), arguments.gib, arguments.host_mib * MIB])
    done = subprocess.run([sys.executable, __file__, "--child", given], stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def measure(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(verb: str, who: str, case: str, path: Path) -> None:
        found = run_child(verb, who, case, path, arguments)
        rows.append({"verb": verb, "who": who, "case": case, **(found or {"failed": True})})
        figure = f"{found['bytes'] / MIB:.0f} MiB" if found else "failed"
        report.console.print(f"{verb} {case}, {who}: {figure}")

    for who in (OURS, PYTREE, STANDARD):
        squares, by_rows = folder / "squares", folder / "rows"
        note("save", who, "as saved, 2×4", squares)
        note("save", who, "rows → columns", by_rows)
        for case, contestants in CASES.items():
            if who in contestants:
                note("restore", who, case, by_rows if case == "rows → columns" else squares)
        shutil.rmtree(squares)
        shutil.rmtree(by_rows)
    return rows


def show(result: dict[str, Any]) -> None:
    table = Table(
        title=f"Host memory over a tree of {result['gib']:g} GiB, host_bytes = {result['host_mib']} MiB, 8 devices"
    )
    table.add_column("")
    for who in (OURS, PYTREE, STANDARD):
        table.add_column(who, justify="right")
    found = {(row["verb"], row["case"], row["who"]): row for row in result["rows"]}

    def cell(verb: str, case: str, who: str) -> str:
        row = found.get((verb, case, who))
        if row is None:
            return ""
        return "failed" if "failed" in row else f"{row['bytes'] / MIB:,.0f} MiB, {row['seconds']:.1f} s"

    for label, verb, case in (
        ("save, 2×4", "save", "as saved, 2×4"),
        ("save, rows", "save", "rows → columns"),
        *((f"restore {case}", "restore", case) for case in CASES),
    ):
        table.add_row(label, *(cell(verb, case, who) for who in (OURS, PYTREE, STANDARD)))
    report.console.print(table)


def main() -> None:
    parser = report.parser(__doc__ or "")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the tree")
    parser.add_argument("--host-mib", type=int, default=jaxckpt.Options().host_bytes // MIB, help="Options.host_bytes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        verb, who, case, path, gib, host_bytes = json.loads(arguments.child)
        print(json.dumps(child(verb, who, case, Path(path), gib, host_bytes)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="memory.") as name:
        folder = Path(name).resolve()
        surroundings = report.surroundings(folder)
        rows = measure(folder, arguments)
    result = {"gib": arguments.gib, "host_mib": arguments.host_mib, **surroundings, "rows": rows}
    show(result)
    report.write("memory", result, arguments.json)


if __name__ == "__main__":
    main()
