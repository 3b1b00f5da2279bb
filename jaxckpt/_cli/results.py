"""What `verify`, `diff` and `plan` found: each as JSON, and as a table or text."""

from __future__ import annotations

import collections
from typing import Any

import click

from jaxckpt._cli.terminal import Column, print_table, printable, show_array
from jaxckpt._inspect.diff import Delta, LeafDelta
from jaxckpt._inspect.restore_plan import ProcessPlan, RestorePlan
from jaxckpt._inspect.verify import VerifyReport
from jaxckpt._runtime.errors import counted
from jaxckpt._runtime.progress import show_bytes

_SHOWN_ROWS = 40
"""Of processes or leaves in a plan: the rest is counted."""


# Verifying ------------------------------------------------------------------------------------------------


def verification_record(report: VerifyReport, quick: bool) -> dict[str, Any]:
    return {
        "path": report.path,
        "ok": report.ok,
        "quick": quick,
        "leaves": report.leaves,
        "objects": report.objects,
        "checked_bytes": report.checked_bytes,
        "problems": [
            {"leaf": found.leaf, "box": found.box, "object": found.object, "reason": found.reason}
            for found in report.problems
        ],
    }


def print_verification(report: VerifyReport) -> None:
    click.echo(printable(str(report), keep="\n"))


# Comparing ------------------------------------------------------------------------------------------------


def delta_record(delta: Delta) -> dict[str, Any]:
    return {
        "a": delta.path_a,
        "b": delta.path_b,
        "identical": delta.identical,
        "same_structure": delta.same_structure,
        "leaves": len(delta.leaves),
        "differing": [
            {
                "path": leaf.path,
                "a": leaf.a or None,
                "b": leaf.b or None,
                "size": leaf.size,
                "differing": leaf.differing,
                "max_abs": leaf.max_abs,
                "max_rel": leaf.max_rel,
            }
            for leaf in delta.differing
        ],
    }


def print_delta(delta: Delta) -> None:
    if delta.identical:
        click.echo(f"identical: {counted(len(delta.leaves), 'leaf')}, bit by bit")
        return
    structure = "" if delta.same_structure else "; the containers differ too"
    click.echo(f"{len(delta.differing):,} of {counted(len(delta.leaves), 'leaf')} differ{structure}")
    columns = [
        Column("leaf", least=16, middle=True),
        Column("a", least=10),
        Column("b", least=10),
        Column("elements", right=True),
        Column("max |a−b|", right=True),
        Column("relative", right=True),
    ]
    print_table(columns, [_delta_row(leaf) for leaf in delta.differing])


def _delta_row(leaf: LeafDelta) -> list[str]:
    same = "same" if leaf.a == leaf.b else leaf.b
    if not leaf.size:
        return [leaf.path, leaf.a or "not there", same or "not there", "", "", ""]
    share = f"{leaf.differing:,} of {leaf.size:,}"
    if not leaf.max_abs:  # texts, or bits that mean one number, such as 0.0 and -0.0
        return [leaf.path, leaf.a, same, share, "", ""]
    return [leaf.path, leaf.a, same, share, f"{leaf.max_abs:.4g}", f"{leaf.max_rel:.3g}"]


# Planning -------------------------------------------------------------------------------------------------


def plan_record(plan: RestorePlan) -> dict[str, Any]:
    return {
        "needed_bytes": plan.needed_bytes,
        "read_bytes": plan.read_bytes,
        "over_read": plan.over_read,
        "requests": plan.requests,
        "peak_host_bytes": plan.peak_host_bytes,
        "processes": [
            {
                "process": part.process,
                "needed_bytes": part.cost.needed_bytes,
                "read_bytes": part.cost.read_bytes,
                "requests": part.cost.requests,
                "peak_host_bytes": part.cost.peak_host_bytes,
                "device_bytes": {str(device): size for device, size in part.device_bytes.items()},
            }
            for part in plan.processes
        ],
        "leaves": [
            {
                "path": leaf.path,
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "saved": {"spec": leaf.saved.spec, "on": leaf.saved.on},
                "wanted": {"spec": leaf.wanted.spec, "on": leaf.wanted.on},
            }
            for leaf in plan.leaves
        ],
    }


def print_plan(plan: RestorePlan) -> None:
    devices = sum(len(part.device_bytes) for part in plan.processes)
    click.echo(
        f"{counted(len(plan.leaves), 'array')} onto {counted(devices, 'device')} of"
        f" {counted(len(plan.processes), 'process')}"
    )
    click.echo()
    titles = ["process", "needed", "read", "over-read", "requests", "host memory", "each device"]
    rows = [_process_row(part) for part in plan.processes[:_SHOWN_ROWS]]
    if len(plan.processes) > _SHOWN_ROWS:
        rows.append([f"… {len(plan.processes) - _SHOWN_ROWS:,} more", *[""] * (len(titles) - 1)])
    if len(plan.processes) > 1:
        sizes = [show_bytes(plan.needed_bytes), show_bytes(plan.read_bytes), f"{plan.over_read:.3f} ×"]
        rows.append(["all", *sizes, f"{plan.requests:,}", "", ""])
    print_table([Column(title, right=True) for title in titles], rows)
    click.echo()
    moves = collections.Counter((leaf.saved.on, leaf.wanted.on) for leaf in plan.leaves)
    for (before, after), count in moves.most_common():
        click.echo(printable(f"{before} → {after}: {counted(count, 'array')}"))
    groups: dict[Any, list[str]] = {}
    for leaf in plan.leaves:
        before, after = (where.spec or where.on for where in (leaf.saved, leaf.wanted))
        wanted = "same" if before == after else after
        form = (_numberless(leaf.path), show_array(leaf.dtype, leaf.shape), before, wanted)
        groups.setdefault(form, []).append(leaf.path)
    if not groups:
        return
    click.echo()
    columns = [
        Column("leaf", least=20, middle=True),
        Column("dtype[shape]", least=12),
        Column("saved", least=12),
        Column("wanted", least=12),
    ]
    rows = [
        [pattern, f"{len(paths)} × {what}", before, wanted] if len(paths) > 1 else [paths[0], what, before, wanted]
        for (pattern, what, before, wanted), paths in groups.items()
    ]
    print_table(columns, rows[:_SHOWN_ROWS])
    if len(rows) > _SHOWN_ROWS:
        click.echo(f"… and {len(rows) - _SHOWN_ROWS:,} more; --json has all")


def _numberless(path: str) -> str:
    """A path as the glob of all that differ from it in numbers alone, as layers do."""
    return "/".join("*" if part.isdecimal() else part for part in path.split("/"))


def _process_row(part: ProcessPlan) -> list[str]:
    cost = part.cost
    over_read = cost.read_bytes / cost.needed_bytes if cost.needed_bytes else 1.0
    sizes = sorted(part.device_bytes.values())
    ends = list(dict.fromkeys(show_bytes(size) for size in (sizes[0], sizes[-1]))) if sizes else []
    return [
        str(part.process),
        show_bytes(cost.needed_bytes),
        show_bytes(cost.read_bytes),
        f"{over_read:.3f} ×",
        f"{cost.requests:,}",
        show_bytes(cost.peak_host_bytes),
        " – ".join(ends),
    ]
