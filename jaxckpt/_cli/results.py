"""`verify`, `diff` and `plan`: the results, as a table or as JSON."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from jaxckpt._cli.arguments import SpecRule
from jaxckpt._cli.inputs import progress_options, rules_of, spec_tree, worker_processes
from jaxckpt._cli.main import UNSUPPORTED
from jaxckpt._cli.terminal import (
    Column,
    number_column,
    pick_attributes,
    print_json,
    print_table,
    printable,
    show_array,
    show_leaf,
)
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._inspect.verify import verify as verify_checkpoint
from jaxckpt._model.paths import mask_numbers
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt.errors import show_count

if TYPE_CHECKING:
    from jaxckpt._inspect.diff import Delta, LeafDelta
    from jaxckpt._inspect.restore_plan import ProcessPlan, RestorePlan


_SHOWN_ROWS = 40
"""The most processes or leaves in a plan. The others are only counted."""


# Verifying ------------------------------------------------------------------------------------------------


def verify(path: str, quick: bool, rate: int | None, workers: int | None, progress: bool, as_json: bool) -> bool:
    options = replace(progress_options(progress), max_bytes_per_second=rate)
    with worker_processes(workers) as executor:
        report = verify_checkpoint(path, quick=quick, executor=executor, options=options)
    if as_json:
        problems = [pick_attributes(problem, "leaf box object reason") for problem in report.problems]
        figures = pick_attributes(report, "path ok leaves objects checked_bytes unfinished_steps")
        unsupported = [pick_attributes(problem, "leaf reason") for problem in report.unsupported]
        print_json({**figures, "quick": quick, "problems": problems, "unsupported": unsupported})
    else:
        click.echo(printable(str(report), keep="\n"))
    if report.ok and report.unsupported:
        raise click.exceptions.Exit(UNSUPPORTED)
    return report.ok


# Comparing ------------------------------------------------------------------------------------------------


def diff(
    a: str,
    b: str,
    select: Sequence[str],
    rules: str | None,
    back_to: str | None,
    leaves_only: bool,
    workers: int | None,
    progress: bool,
    as_json: bool,
) -> bool:
    from jaxckpt._inspect.diff import diff as diff_checkpoints  # imports JAX

    rename = rules_of(a, rules, back_to)
    options = progress_options(progress)
    with worker_processes(workers) as executor:
        delta = diff_checkpoints(a, b, select=select or None, rename=rename, executor=executor, options=options)
    if as_json:
        print_json(_delta_record(delta))
    else:
        _print_delta(delta)
    return not delta.differing if leaves_only else delta.identical


def _delta_record(delta: Delta) -> dict[str, Any]:
    return {
        "a": delta.path_a,
        "b": delta.path_b,
        **pick_attributes(delta, "identical same_structure"),
        "leaves": len(delta.leaves),
        "differing": [
            {**pick_attributes(leaf, "path size differing max_abs max_rel"), "a": leaf.a or None, "b": leaf.b or None}
            for leaf in delta.differing
        ],
        "other_kinds": [pick_attributes(leaf, "path a b") for leaf in delta.other_kinds],
    }


def _print_delta(delta: Delta) -> None:
    from jaxckpt._inspect.diff import summarize  # imports JAX

    click.echo(summarize(delta))
    if not delta.differing:
        return
    numbers = map(number_column, ("elements", "max |a−b|", "relative"))
    columns = [Column("leaf", 16, is_name=True), Column("a", 10), Column("b", 10), *numbers]
    print_table(columns, [_delta_row(leaf) for leaf in delta.differing])


def _delta_row(leaf: LeafDelta) -> list[str]:
    path, same = show_leaf(leaf.path), "same" if leaf.a == leaf.b else leaf.b
    if not leaf.size:
        return [path, leaf.a or "missing", same or "missing", "", "", ""]
    share = f"{leaf.differing:,} of {leaf.size:,}"
    if not leaf.max_abs:  # texts, or bits that mean one number, such as 0.0 and -0.0
        return [path, leaf.a, same, share, "", ""]
    return [path, leaf.a, same, share, f"{leaf.max_abs:.4g}", f"{leaf.max_rel:.3g}"]


# Planning -------------------------------------------------------------------------------------------------


def plan(
    path: str,
    mesh: Mapping[str, int],
    specs: Sequence[SpecRule],
    select: Sequence[str],
    rules: str | None,
    back_to: str | None,
    devices_per_process: int,
    indivisible: Literal["error", "replicate"],
    as_json: bool,
) -> None:
    checkpoint = open_checkpoint(path, rename=rules_of(path, rules, back_to))
    restore = checkpoint.plan(
        mesh=mesh,
        specs=spec_tree(checkpoint, specs, select),
        select=select or None,
        devices_per_process=devices_per_process,
        options=Options(indivisible=indivisible),
    )
    if as_json:
        print_json({"path": path, "mesh": mesh, **_plan_record(restore)})
    else:
        _print_plan(restore)


def _plan_record(plan: RestorePlan) -> dict[str, Any]:
    return {
        **pick_attributes(plan, "needed_bytes read_bytes received_bytes over_read requests peak_host_bytes"),
        "processes": [
            {
                "process": process.process,
                **pick_attributes(process.cost, "needed_bytes read_bytes received_bytes requests peak_host_bytes"),
                "device_bytes": {str(device): size for device, size in process.device_bytes.items()},
            }
            for process in plan.processes
        ],
        "leaves": [
            {
                **pick_attributes(leaf, "path dtype shape"),
                "saved": pick_attributes(leaf.saved, "spec on"),
                "wanted": pick_attributes(leaf.wanted, "spec on"),
            }
            for leaf in plan.leaves
        ],
    }


def _print_plan(plan: RestorePlan) -> None:
    from jaxckpt._inspect.restore_plan import plan_headline  # imports JAX

    click.echo(plan_headline(plan))
    click.echo()
    titles = ["process", "needed", "read", "over-read", "requests", "host memory", "each device"]
    rows = [_process_row(process) for process in plan.processes[:_SHOWN_ROWS]]
    if len(plan.processes) > _SHOWN_ROWS:
        rows.append([f"… {len(plan.processes) - _SHOWN_ROWS:,} more", *[""] * (len(titles) - 1)])
    if len(plan.processes) > 1:
        sizes = [show_bytes(plan.needed_bytes), show_bytes(plan.read_bytes), f"{plan.over_read:.3f} ×"]
        rows.append(["all", *sizes, f"{plan.requests:,}", "", ""])
    print_table(list(map(number_column, titles)), rows)
    click.echo()
    moves = collections.Counter((leaf.saved.on, leaf.wanted.on) for leaf in plan.leaves)
    for (before, after), count in moves.most_common():
        click.echo(printable(f"{before} → {after}: {show_count(count, 'array')}"))
    groups: dict[Any, list[str]] = {}
    for leaf in plan.leaves:
        before, after = (where.spec or where.on for where in (leaf.saved, leaf.wanted))
        goal = "same" if before == after else after
        form = (mask_numbers(leaf.path), show_array(leaf.dtype, leaf.shape), before, goal)
        groups.setdefault(form, []).append(leaf.path)
    if not groups:
        return
    click.echo()
    columns = [Column("leaf", 20, is_name=True), *(Column(title, 12) for title in ("dtype[shape]", "saved", "wanted"))]
    rows = [
        [pattern, f"{len(paths)} × {array}", before, goal]
        if len(paths) > 1
        else [show_leaf(paths[0]), array, before, goal]
        for (pattern, array, before, goal), paths in groups.items()
    ]
    print_table(columns, rows[:_SHOWN_ROWS])
    if len(rows) > _SHOWN_ROWS:
        click.echo(f"… and {len(rows) - _SHOWN_ROWS:,} more; --json has all")


def _process_row(process: ProcessPlan) -> list[str]:
    cost = process.cost
    over_read = cost.read_bytes / cost.needed_bytes if cost.needed_bytes else 1.0
    sizes = sorted(process.device_bytes.values())
    ends = list(dict.fromkeys(show_bytes(size) for size in (sizes[0], sizes[-1]))) if sizes else []
    return [
        str(process.process),
        show_bytes(cost.needed_bytes),
        show_bytes(cost.read_bytes),
        f"{over_read:.3f} ×",
        f"{cost.requests:,}",
        show_bytes(cost.peak_host_bytes),
        " – ".join(ends),
    ]
