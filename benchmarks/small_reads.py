"""Reads of single values, rows, layers and leaves from an open checkpoint, in milliseconds: medians, warm, on tmpfs.

tensorstore and zarr-python read the array that jaxckpt has written, after it was opened. safetensors maps its file, and
checks nothing.

    python benchmarks/small_reads.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import steady

if __name__ == "__main__":
    steady.begin(devices=1)

import numpy as np
import tensorstore as ts
import zarr
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxckpt

ROUNDS = 200


def milliseconds(read: Callable[[], Any], rounds: int = ROUNDS) -> float:
    read()
    taken = list[float]()
    for _ in range(rounds):
        begin = time.perf_counter()
        read()
        taken.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(taken)


def main() -> None:
    random = np.random.default_rng(0)
    tree = {f"small_{number}": random.normal(size=64).astype(np.float32) for number in range(18)}
    tree["embed"] = random.normal(size=(9_000, 768)).astype(np.float32)
    tree["layers"] = random.normal(size=(12, 2_048, 294)).astype(np.float32)
    ten = [f"small_{number}" for number in range(10)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, file = Path(folder) / "ckpt", Path(folder) / "model.safetensors"
        jaxckpt.save(path, tree)
        save_file(tree, file)
        ours, theirs = jaxckpt.open(path), safe_open(file, "numpy")
        arrays = {
            name: next(found.parent for found in path.glob("data-*/*/zarr.json") if shape in found.parent.name)
            for name, shape in {"embed": "9000x768", "layers": "12x2048x294"}.items()
        }
        opened = {
            name: ts.open({"driver": "zarr3", "kvstore": f"file://{array}/"}, open=True).result()
            for name, array in arrays.items()
        }
        by_zarr = {name: zarr.open_array(array, mode="r") for name, array in arrays.items()}
        reads: dict[str, tuple[Callable[[], Any] | None, ...]] = {}
        for title, name, index in (
            ("a value", "embed", (5, 7)),
            ("a row, 3 KB", "embed", (5,)),
            ("a layer, 2.4 MB", "layers", (3,)),
            ("a leaf, 28 MB", "embed", ()),
        ):
            key = (0, *index)
            reads[title] = (
                lambda name=name, index=index: ours[name][index or ...],
                lambda name=name, key=key: opened[name][key].read().result(),
                lambda name=name, key=key: by_zarr[name][key],
                lambda name=name, index=index: np.array(theirs.get_slice(name)[index or ...]),
            )
        reads["open, 20 leaves"] = (lambda: jaxckpt.open(path), None, None, lambda: safe_open(file, "numpy"))
        reads["ten small leaves"] = (
            lambda: jaxckpt.load_numpy(path, select=ten),
            None,
            None,
            lambda: [safe_open(file, "numpy").get_tensor(name) for name in ten],
        )
        print(f"{'':18}" + "".join(f"{name:>14}" for name in ("jaxckpt", "tensorstore", "zarr-python", "safetensors")))
        for title, contenders in reads.items():
            rounds = ROUNDS // 4 if "MB" in title else ROUNDS
            cells = ("" if read is None else f"{milliseconds(read, rounds):.3f}" for read in contenders)
            print(f"{title:18}" + "".join(f"{cell:>14}" for cell in cells))


if __name__ == "__main__":
    main()
