"""Bytes read per byte wanted, computed from the plan alone, without devices or data.

    python benchmarks/over_read.py

The leaves are like those of large models, saved by one process or by four with two devices each. The readers want one
layer, half the layers, or a mesh that splits one dimension 2, 4 or 8 times finer; a reader is one process with one
device, or four processes that share all devices. A second table has the workloads of peers.py, saved and restored by
four processes. With several processes, the result is the highest ratio of a process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import steady

steady.begin(devices=8, keep_memory=False)

import numpy as np
import report
import workloads
from rich.table import Table

from jaxckpt import Options
from jaxckpt._model.grid import Box, mesh_layout, spec_of, whole_box
from jaxckpt._restore.read_plan import WantedRows, plan_steps, read_cost
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan, plan_save

FINER = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Leaf:
    title: str
    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    """Number of parts along each dimension; eight parts in total."""

    layers: int | None = 0
    """The dimension of the layers; None without layers."""


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
    """Bytes read per byte wanted by a process that wants these boxes."""
    host_bytes = Options().host_bytes
    steps = plan_steps(plan.stacks, [WantedRows(0, (0, 1), tuple(boxes))], host_bytes)
    cost = read_cost(plan.stacks, steps, host_bytes)
    return cost.read_bytes / cost.needed_bytes


def cells(shape: Sequence[int], grid: Sequence[int]) -> list[Box]:
    return [
        tuple((i * n // parts, (i + 1) * n // parts) for i, n, parts in zip(index, shape, grid, strict=True))
        for index in itertools.product(*map(range, grid))
    ]


def readers(leaf: Leaf) -> dict[str, list[list[Box]]]:
    """For each reader by name, the boxes that each of its processes wants: one process, then four."""
    found: dict[str, list[list[Box]]] = {}
    dim = leaf.layers
    if dim is not None:
        for name, count in (("one layer", 1), ("half the layers", leaf.shape[dim] // 2)):
            found[name] = [[(*whole_box(leaf.shape[:dim]), (0, count), *whole_box(leaf.shape[dim + 1 :]))]]
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


def by_four(workload: workloads.Workload) -> dict[str, float]:
    """For each layout with at least four devices, bytes read per byte that a process wants."""
    arrays: list[ArrayLeaf] = []
    for number, (path, sharding) in enumerate(workload.shardings(workload.layouts[0]).items()):
        leaf, mesh = workload.leaves[path], sharding.mesh
        owners = np.arange(mesh.size).reshape(mesh.devices.shape) * 4 // mesh.size
        layout = mesh_layout(owners, list(mesh.axis_names), spec_of(sharding.spec), len(leaf.shape))
        arrays.append(ArrayLeaf(number, np.dtype(leaf.dtype).name, leaf.shape, layout))
    plan = plan_save(arrays, Options(), 0, 4)
    places = {leaf: (stack, row) for stack, rows in enumerate(plan.leaves) for row, leaf in enumerate(rows)}
    found: dict[str, float] = {}
    for layout in workload.layouts:
        shardings = workload.shardings(layout)
        count = next(iter(shardings.values())).num_devices
        if count % 4:
            continue
        wants: list[list[WantedRows]] = [[] for _ in range(4)]
        for number, (path, sharding) in enumerate(shardings.items()):
            stack, row = places[number]
            shape = workload.leaves[path].shape
            boxes = [
                tuple(side.indices(n)[:2] for side, n in zip(index, shape, strict=True))
                for index in sharding.addressable_devices_indices_map(shape).values()
            ]
            for process in range(4):
                own = dict.fromkeys(boxes[process * count // 4 : (process + 1) * count // 4])
                wants[process].append(WantedRows(stack, (row, row + 1), tuple(own)))
        host_bytes = Options().host_bytes
        costs = [read_cost(plan.stacks, plan_steps(plan.stacks, want, host_bytes), host_bytes) for want in wants]
        found[layout] = max(cost.read_bytes / cost.needed_bytes for cost in costs)
    return found


def main() -> None:
    for processes in (1, 4):
        table = Table(title=f"bytes read per byte wanted; saved by {processes} process{'es' * (processes > 1)}")
        table.add_column("reader", no_wrap=True)
        found: dict[str, dict[str, float]] = {}
        for leaf in LEAVES:
            plan = saved(leaf, processes)
            table.add_column(f"{leaf.title}\nchunk {list(plan.stacks[0].chunk_sides[1:])}", justify="right")
            for reader, wanted in readers(leaf).items():
                found.setdefault(reader, {})[leaf.title] = max(over_read(plan, boxes) for boxes in wanted)
        for reader, ratios in found.items():
            table.add_row(reader, *(f"{ratios[leaf.title]:.2f}" if leaf.title in ratios else "" for leaf in LEAVES))
        report.console.print(table)
    table = Table("workload", "restored onto", "read ÷ needed", title="saved and restored by four processes")
    for key in workloads.KEYS:
        workload = workloads.workload(key)
        for layout, ratio in by_four(workload).items():
            table.add_row(f"({key}) {workload.title}", layout, f"{ratio:.2f}")
    report.console.print(table)


if __name__ == "__main__":
    main()
