"""What readers read for each byte that they want, by the plan alone: no devices, no data.

    python benchmarks/over_read.py

Leaves as large models have them, saved by one process or by four of two devices each; readers of one layer, of half the
layers, and of a mesh that splits one dimension 2, 4 or 8 times finer: by a process of one device, and by four processes
that have all devices between them. Of several the one that reads most for what it wants is shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import steady

steady.begin(keep_memory=False)

import numpy as np
import report
from rich.table import Table

from jaxckpt import Options
from jaxckpt._format.grid import Box, mesh_layout, whole
from jaxckpt._restore.plan import Want, plan_read, read_cost
from jaxckpt._save.plan import ArrayLeaf, SavePlan, plan_save

FINER = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Leaf:
    title: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    """Parts along each dimension, eight in all."""

    layers: int | None = 0
    """The dimension of the layers."""


LEAVES = (
    Leaf("(a) f32 2×4 [4096, 4096]", (4096, 4096), "float32", (2, 4), None),
    Leaf("(e) bf16 4×2 [12, 768, 3072]", (12, 768, 3072), "bfloat16", (1, 4, 2)),
    Leaf("(e) f32 4×2 [12, 768, 3072]", (12, 768, 3072), "float32", (1, 4, 2)),
    Leaf("(f) f32 8 [12, 768, 3072]", (12, 768, 3072), "float32", (1, 8, 1)),
    Leaf("bf16 4×2 [80, 4096, 14336]", (80, 4096, 14336), "bfloat16", (1, 4, 2)),
    Leaf("f32 4×2 [80, 4096, 14336]", (80, 4096, 14336), "float32", (1, 4, 2)),
    Leaf("bf16 8 [80, 4096, 14336]", (80, 4096, 14336), "bfloat16", (1, 8, 1)),
    Leaf("bf16 4×2 [4096, 80, 14336]", (4096, 80, 14336), "bfloat16", (4, 1, 2), 1),
)


def saved(leaf: Leaf, processes: int) -> SavePlan:
    axes = [f"axis{dim}" for dim in range(len(leaf.grid))]
    owners = np.arange(8).reshape(leaf.grid) * processes // 8
    layout = mesh_layout(owners, axes, tuple((axis,) for axis in axes), len(leaf.shape))
    return plan_save([ArrayLeaf(0, leaf.dtype, leaf.shape, layout)], Options(), 0, processes)


def over_read(plan: SavePlan, boxes: Sequence[Box]) -> float:
    """Bytes read for each byte wanted by a process that wants these boxes."""
    host_bytes = Options().host_bytes
    steps = plan_read(plan.stacks, [Want(0, (0, 1), tuple(boxes))], host_bytes)
    cost = read_cost(plan.stacks, steps, host_bytes)
    return cost.read_bytes / cost.needed_bytes


def cells(shape: Sequence[int], grid: Sequence[int]) -> list[Box]:
    return [
        tuple((i * n // parts, (i + 1) * n // parts) for i, n, parts in zip(index, shape, grid, strict=True))
        for index in itertools.product(*map(range, grid))
    ]


def readers(leaf: Leaf) -> dict[str, list[list[Box]]]:
    """For each reader by name, what each of its processes wants: one process, then four."""
    found: dict[str, list[list[Box]]] = {}
    dim = leaf.layers
    if dim is not None:
        for name, count in (("one layer", 1), ("half the layers", leaf.shape[dim] // 2)):
            found[name] = [[(*whole(leaf.shape[:dim]), (0, count), *whole(leaf.shape[dim + 1 :]))]]
    for dim, parts in enumerate(leaf.grid):
        if dim != leaf.layers:
            for finer in FINER:
                grid = (*leaf.grid[:dim], parts * finer, *leaf.grid[dim + 1 :])
                boxes = cells(leaf.shape, grid)
                share = math.ceil(len(boxes) / 4)
                name = f"{'columns' if dim == len(leaf.grid) - 1 else 'rows'}, {finer}× finer"
                found[name] = [[box] for box in boxes[:: max(1, len(boxes) // 4)]]
                found[f"{name}, 4 processes"] = [boxes[first : first + share] for first in range(0, len(boxes), share)]
    return found


def main() -> None:
    for processes in (1, 4):
        table = Table(title=f"bytes read for each byte wanted; saved by {processes} process{'es' * (processes > 1)}")
        table.add_column("reader", no_wrap=True)
        found: dict[str, dict[str, float]] = {}
        for leaf in LEAVES:
            plan = saved(leaf, processes)
            table.add_column(f"{leaf.title}\nchunk {list(plan.stacks[0].chunk[1:])}", justify="right")
            for reader, wanted in readers(leaf).items():
                found.setdefault(reader, {})[leaf.title] = max(over_read(plan, boxes) for boxes in wanted)
        for reader, ratios in found.items():
            table.add_row(reader, *(f"{ratios[leaf.title]:.2f}" if leaf.title in ratios else "" for leaf in LEAVES))
        report.console.print(table)


if __name__ == "__main__":
    main()
