"""Compare this tree with another commit of jaxckpt: both save and restore the same trees, in turn, several times.

    python benchmarks/pairs.py 767d548 --pairs 5 --json pairs.json

Reported is, for each operation, the median over the pairs of now : then, in CPU time and in wall time. Each process
takes the median of its own rounds. Files are on tmpfs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = ("save", "restore", "load_numpy")
Times = dict[str, dict[str, tuple[float, float]]]
"""By tree and operation: seconds of CPU, seconds."""


def trees() -> dict[str, tuple[Callable[[], dict[str, Any]], int]]:
    """By title: a function that makes the tree on 2×4 devices, and the number of rounds."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))

    def leaves(count: int, shape: tuple[int, ...], dtype: Any, spec: P) -> dict[str, Any]:
        random = np.random.default_rng(0)
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        values = [random.integers(0, 256, n_bytes, np.uint8).view(dtype).reshape(shape) for _ in range(count)]
        return {f"w{i}": jax.device_put(value, NamedSharding(mesh, spec)) for i, value in enumerate(values)}

    return {
        "8 leaves of 16 MiB": (lambda: leaves(8, (2048, 2048), np.float32, P("data", "model")), 8),
        "2,000 leaves of 16 KiB": (lambda: leaves(2000, (64, 64), np.float32, P()), 8),
        "6 scanned leaves of 12 MiB": (
            lambda: leaves(6, (12, 512, 1024), ml_dtypes.bfloat16, P(None, "model", "data")),
            8,
        ),
        "10 small leaves": (lambda: leaves(10, (8, 8), np.float32, P("data")), 200),
    }


def measure(folder: Path) -> Times:
    """The times of the jaxckpt that this process imports."""
    import jax

    import jaxckpt

    results: Times = {}
    for title, (make, rounds) in trees().items():
        tree, path = make(), folder / "checkpoint"
        target = {name: leaf.sharding for name, leaf in tree.items()}
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda tree=tree, path=path: jaxckpt.save(path, tree),
            "restore": lambda path=path, target=target: jax.block_until_ready(jaxckpt.restore(path, target)),
            "load_numpy": lambda path=path: jaxckpt.load_numpy(path),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in OPERATIONS}
        for number in range(rounds + 2):  # the first two compile and warm up
            shutil.rmtree(path, ignore_errors=True)
            for name in OPERATIONS:
                cpu, wall = time.process_time(), time.perf_counter()
                result = calls[name]()
                spent = time.process_time() - cpu, time.perf_counter() - wall
                del result
                if number > 1:
                    times[name].append(spent)
        results[title] = {
            name: (statistics.median(cpu for cpu, _ in found), statistics.median(wall for _, wall in found))
            for name, found in times.items()
        }
    return results


def measured(tree: Path, folder: Path) -> Times:
    """The times of the jaxckpt in this tree, from a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, __file__, "--measure", str(folder)]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=600).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        then = Path(folder) / "then"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", then, arguments.commit], check=True)
        try:
            pairs = list[tuple[Times, Times]]()
            for number in range(arguments.pairs):
                order = (then, ROOT)[:: (-1) ** number]
                times = {tree: measured(tree, Path(folder)) for tree in order}
                pairs.append((times[then], times[ROOT]))
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", then], check=True)
    print(f"\n{'':28}{'':12}{'now, CPU':>12}{'now : then':>12}{'now':>12}{'now : then':>12}")
    for title in pairs[0][0]:
        for name in OPERATIONS:
            row = f"{title:28}{name:12}"
            for kind in (0, 1):
                now = statistics.median(after[title][name][kind] for _, after in pairs)
                ratio = statistics.median(
                    after[title][name][kind] / before[title][name][kind] for before, after in pairs
                )
                row += f"{now * 1000:9.2f} ms{ratio:12.2f}"
            print(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(pairs, indent=1))


if __name__ == "__main__":
    main()
