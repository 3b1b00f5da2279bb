"""The cost of planning for one process: a save, and a restore onto the same mesh and onto another.

    python benchmarks/planning.py

Each process decides without communication who writes each object of the whole job, and lists its own objects. So one
process is enough to measure the planning of a job of 4,096 processes. The devices are stand-ins: `jax.sharding.Mesh`
needs only their identities. Layouts and boxes come from real NamedShardings over this mesh.

The tree is a transformer's training state with up to 16,000 leaves: parameters in bfloat16, two moments in float32,
matrices split over fsdp × tensor, norms replicated on every device; in four data-parallel replicas. Starting
at 4,096 processes × 4 devices × 16,000 leaves, each of the three numbers is varied alone. Two more points are the same
job without replicas, and a small model with replicas only.

Each point is planned in a fresh interpreter, without any cached data of an earlier plan. The results are the seconds of
CPU time, and the rise of the peak resident memory (VmHWM) in bytes; reuse of memory that was freed before does not
count. The time to describe the tree (its paths, its leaves' shardings) is excluded, because it needs real arrays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import steady

steady.begin(keep_memory=False)

import numpy as np
import report
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

from jaxckpt import Options
from jaxckpt._devices.shardings import addressable_boxes, process_layout
from jaxckpt._model.stacks import Stack
from jaxckpt._restore.read_plan import WantedRows, plan_steps
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan, plan_save

TARGETS = {"cpu_seconds": 2.0, "peak_bytes": 500 << 20}

OPERATIONS = ("save", "restore, same mesh", "restore, another mesh")

PLANNING = 1
"""The index of the process that plans. It is not process 0, because that also writes the host leaves."""


@dataclass(frozen=True)
class Point:
    leaves: int = 16_000
    processes: int = 4_096
    devices_per_process: int = 4
    replicas: int = 4
    """Number of data-parallel replicas; 0: every device holds a replica of everything."""

    width: int = 8_192

    @property
    def devices(self) -> int:
        return self.processes * self.devices_per_process


AXES: dict[str, list[Point]] = {
    "leaves": [Point(leaves=count) for count in (1_000, 2_000, 4_000, 8_000, 16_000)],
    "processes": [Point(processes=count) for count in (16, 64, 256, 1_024, 4_096)],
    "devices_per_process": [Point(devices_per_process=count) for count in (1, 2, 4, 8)],
}
OTHERS = [Point(replicas=1), Point(replicas=0, width=2_048)]


# The job --------------------------------------------------------------------------------------------------


class Client:
    def process_index(self) -> int:
        return PLANNING


class Device:
    """A stand-in with all attributes that a mesh needs from a device."""

    platform = "cpu"
    device_kind = "stand-in"
    client = Client()

    def __init__(self, number: int, process: int) -> None:
        self.id = number
        self.process_index = process


def mesh_of(point: Point, *, tensor: int, replicas: int) -> Mesh:
    devices = np.array([Device(number, number // point.devices_per_process) for number in range(point.devices)])
    if not replicas:
        return Mesh(devices.reshape(-1, 1, 1), ("replica", "fsdp", "tensor"))
    return Mesh(devices.reshape(replicas, -1, tensor), ("replica", "fsdp", "tensor"))


def saved_mesh(point: Point) -> Mesh:
    return mesh_of(point, tensor=8, replicas=point.replicas)


def other_mesh(point: Point) -> Mesh:
    """Without replicas, and split differently. With replicas only, each matrix is split into two pieces instead."""
    if not point.replicas:
        return mesh_of(point, tensor=2, replicas=point.devices // 2)
    return mesh_of(point, tensor=4, replicas=1)


def layer(width: int) -> list[tuple[tuple[int, ...], P]]:
    into, out_of = P("fsdp", "tensor"), P("tensor", "fsdp")
    return [
        *[((width, width), into)] * 3,  # query, key, value
        ((width, width), out_of),
        *[((width, 4 * width), into)] * 2,  # gate, up
        ((4 * width, width), out_of),
        *[((width,), P())] * 2,  # norms
    ]


def leaves_of(point: Point) -> Iterator[tuple[str, tuple[int, ...], P]]:
    """(dtype, shape, spec) of each leaf: parameters, first and second moments."""
    kinds = layer(point.width)
    for number in range(point.leaves):
        kind = number % (3 * len(kinds))
        yield "bfloat16" if kind < len(kinds) else "float32", *kinds[kind % len(kinds)]


# Planning -------------------------------------------------------------------------------------------------


def plan_a_save(point: Point, mesh: Mesh) -> SavePlan:
    found = [
        ArrayLeaf(number, dtype, shape, process_layout(NamedSharding(mesh, spec), shape))
        for number, (dtype, shape, spec) in enumerate(leaves_of(point))
    ]
    return plan_save(found, Options(), PLANNING, point.processes)


def plan_a_restore(point: Point, plan: SavePlan, mesh: Mesh) -> list[Any]:
    """Plan like a restore onto accelerators, where buffers do not become the arrays."""
    place = {leaf: (stack, row) for stack, rows in enumerate(plan.leaves) for row, leaf in enumerate(rows)}
    boxes_of: dict[tuple[int, P], Any] = {}
    wants: list[WantedRows] = []
    for number, (_, shape, spec) in enumerate(leaves_of(point)):
        stack, row = place[number]
        if (stack, spec) not in boxes_of:
            found = addressable_boxes(NamedSharding(mesh, spec), shape)
            boxes_of[stack, spec] = tuple(dict.fromkeys(box for _, box in found))
        wants.append(WantedRows(stack, row, boxes_of[stack, spec], None, False))
    return plan_steps(plan.stacks, wants, Options().host_bytes)


def shapes_alone(stacks: tuple[Stack, ...], members: tuple[tuple[int, ...], ...]) -> SavePlan:
    """Only the part of a plan that a manifest contains."""
    return SavePlan(stacks, members, (), (), (), 0, ())


def measure(point: Point, operation: str) -> dict[str, Any]:
    """In a fresh interpreter: the cost and the size of one plan."""
    mesh = saved_mesh(point)
    call: Callable[[], Any]
    if operation == "save":
        small = Point(leaves=30, processes=16, replicas=point.replicas)  # loads all modules
        plan_a_save(small, saved_mesh(small))
        call = lambda: plan_a_save(point, mesh)  # noqa: E731
    else:
        saved = plan_a_save(point, mesh)
        saved = shapes_alone(saved.stacks, saved.leaves)
        wanted = mesh if "same" in operation else other_mesh(point)
        call = lambda: plan_a_restore(point, saved, wanted)  # noqa: E731
    # Reset the peak to the current use (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    begun, wall = time.process_time(), time.perf_counter()
    plan = call()
    result: dict[str, Any] = {
        "cpu_seconds": time.process_time() - begun,
        "seconds": time.perf_counter() - wall,
        "peak_bytes": peak_bytes() - before,
    }
    if operation == "save":
        loads = plan.process_bytes
        return result | {
            "total_bytes": sum(loads),
            "busiest_to_mean": max(loads) * len(loads) / sum(loads),
            "stacks": len(plan.stacks),
            "objects": plan.n_objects,
            "own_objects": len(plan.objects),
        }
    return result | {"steps": len(plan), "bytes": sum(step.n_bytes for step in plan)}


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def measure_apart(point: Point, operation: str) -> dict[str, Any]:
    case = json.dumps({"operation": operation, "point": asdict(point)})
    done = subprocess.run(
        [sys.executable, __file__, "--one", case], check=True, capture_output=True, text=True, timeout=300
    )
    return json.loads(done.stdout)


# Reporting ------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    table = Table(padding=0, title="Planning in one process: CPU seconds and peak memory")
    headings = ("leaves", "processes", "each", "replicas", *(name.replace(", ", "\n") for name in OPERATIONS))
    for heading in (*headings, "busiest\n÷ mean", "own\nobjects", "of all"):
        table.add_column(heading, justify="right")
    for row in result["points"]:
        point, found = Point(**row["point"]), row["measured"]
        saved = found["save"]
        table.add_row(
            f"{point.leaves:,}",
            f"{point.processes:,}",
            str(point.devices_per_process),
            str(point.replicas or "only"),
            *(f"{found[each]['cpu_seconds']:.2f} s, {found[each]['peak_bytes'] >> 20:2} MiB" for each in OPERATIONS),
            f"{saved['busiest_to_mean']:.3f}",
            f"{saved['own_objects']:,}",
            f"{saved['objects']:,}",
        )
    report.console.print(table)
    worst = [
        row["measured"][each] for row in result["points"] for each in OPERATIONS if Point(**row["point"]) == Point()
    ]
    seconds, peak = max(one["cpu_seconds"] for one in worst), max(one["peak_bytes"] for one in worst)
    report.console.print(
        f"at {Point().processes:,} × {Point().devices_per_process} × {Point().leaves:,}: at most {seconds:.2f} s"
        f" (target {TARGETS['cpu_seconds']:g}), {peak >> 20} MiB (target {TARGETS['peak_bytes'] >> 20})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result; default: results/planning-<date>.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        case = json.loads(arguments.one)
        print(json.dumps(measure(Point(**case["point"]), case["operation"])))
        return
    result: dict[str, Any] = report.surroundings(Path.cwd())
    result |= {"base": asdict(Point()), "targets": TARGETS, "points": []}
    for point in dict.fromkeys([*itertools.chain(*AXES.values()), *OTHERS]):
        report.console.print(f"{point.leaves:,} leaves, {point.processes:,} × {point.devices_per_process} …")
        measured = {operation: measure_apart(point, operation) for operation in OPERATIONS}
        result["points"].append({"point": asdict(point), "measured": measured})
    show(result)
    report.write("planning", result, arguments.json)


if __name__ == "__main__":
    main()
