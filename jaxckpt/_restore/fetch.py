"""Reads the data for the goals, from storage or from other processes of the job.

goals ─▶ destinations ─▶ read steps ─▶ reads, by this process and shared ─▶ values
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from jaxckpt._devices.shardings import PlannedSharding, process_layout
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model.grid import Layout
from jaxckpt._model.records import Manifest
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import display_progress
from jaxckpt._restore.destinations import Destinations, GoalsByRow, goal_ranges
from jaxckpt._restore.placement import LeafBuilder, value_in_manifest
from jaxckpt._restore.read_loop import detect_replacement, read, reads_of, require_metadata
from jaxckpt._restore.read_plan import ReadStep, WantedRows, plan_read
from jaxckpt._restore.resolve import Goal
from jaxckpt._restore.shared_exchange import gather, needs_whole_job, require_agreement
from jaxckpt._restore.shared_reads import Partition, Round, members_of, plan_rounds, share, wants_digest
from jaxckpt._sources.source import Source


def fetch(
    source: Source,
    goals: Mapping[int, Goal],
    options: Options,
    rendezvous: Rendezvous | None = None,
    *,
    tied: bool = False,
) -> dict[int, Any]:
    """The value of every goal by leaf number. If `tied`, leaves that share a row and a goal become one value.

    In a rendezvous of processes that all call this, each checks some of the small files that describe stacks. They read
    for each other if `options.read` is "shared".
    """
    representative: dict[int, int] = {}
    if tied:
        first = dict[tuple[int, Goal], int]()
        ties = source.manifest.ties
        representative = {
            number: first.setdefault((ties.get(number, number), goal), number) for number, goal in goals.items()
        }
        goals = {number: goals[number] for number in representative.values()}
    stacks = source.manifest.decoded_stacks
    process, processes = (rendezvous.call.index, rendezvous.call.count) if rendezvous is not None else (0, 1)
    values: dict[int, Any] = {}
    for some in split_tied_goals(source.manifest, goals):
        steps, shared, leaves = _plan_reads(source, some, options, values, rendezvous)
        total = sum(step.n_bytes for step in steps)
        total += sum(one.read.n_bytes for each in shared.values() for portions in each for one in portions)
        with detect_replacement(source, options), display_progress("restore", total, options.progress) as advance:
            require_metadata(source, leaves.stacks[process::processes], options)
            if shared and rendezvous is not None:
                gather(source, stacks, shared, options, leaves, advance, rendezvous)
            boxes = ((step.stack, planned.boxes) for step, planned in reads_of(steps))
            with source.arrivals(boxes, options, rendezvous) as arrivals:
                read(source, stacks, steps, options, leaves, advance, arrivals)
        leaves.create_unread_leaves()
    for number, goal in goals.items():
        if goal.weak:
            values[number] = _weakly_typed(values[number])
    return values | {number: values[one] for number, one in representative.items()}


def split_tied_goals(manifest: Manifest, goals: Mapping[int, Goal]) -> list[Mapping[int, Goal]]:
    """The goals in rounds, so that no two leaves of a round share a row. Separate arrays are read separately."""
    ties = manifest.ties
    if not ties:
        return [goals]
    by_round: list[dict[int, Goal]] = []
    turns = collections.Counter[int]()
    for number, goal in goals.items():
        first = ties.get(number, number)
        if turns[first] == len(by_round):
            by_round.append({})
        by_round[turns[first]][number] = goal
        turns[first] += 1
    return [*by_round]


def _plan_reads(
    source: Source, goals: Mapping[int, Goal], options: Options, values: dict[int, Any], rendezvous: Rendezvous | None
) -> tuple[list[ReadStep], dict[Partition, list[Round]], LeafBuilder]:
    """The reads for goals whose leaves do not share rows, by this process alone and by several for each other, and the
    builder that stores the results in `values`. Values in the manifest are stored immediately."""
    manifest = source.manifest
    stacks = manifest.decoded_stacks
    by_stack: dict[int, GoalsByRow] = {}
    destinations = Destinations(stacks, by_stack, options)
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.stack is None or record.row is None:
            values[number] = value_in_manifest(record, goal)
        else:
            by_stack.setdefault(record.stack, {})[record.row] = number, goal
    wanted: list[tuple[WantedRows, Goal]] = []
    for stack, rows_of in by_stack.items():
        for rows, goal in goal_ranges(rows_of):
            destination = destinations.of(goal, stack)
            wanted.append((WantedRows(stack, rows, destination.boxes, goal.cast, destination.kept), goal))
    wants = [want for want, _ in wanted]
    shared: dict[Partition, list[Round]] = {}
    if options.read == "shared" and rendezvous is not None and rendezvous.call.count > 1:
        call = rendezvous.call
        laid_out = [(want, goal_layout(goal, stacks[want.stack].shape, range(call.count))) for want, goal in wanted]
        require_agreement(
            rendezvous, f"{wants_digest(laid_out)} {options.host_bytes}"
        )  # the rounds also depend on this
        rendezvous.start_next()
        wants, common = share(stacks, laid_out, call.index, call.count if needs_whole_job() else None)
        for partition, some in common.items():
            members = members_of(partition, call.index)
            shared[partition] = plan_rounds(stacks, some, members, options.host_bytes) if some else []
    steps = plan_read(stacks, wants, options.host_bytes)
    return steps, shared, LeafBuilder(manifest, stacks, by_stack, destinations, values)


def goal_layout(goal: Goal, shape: tuple[int, ...], processes: Iterable[int]) -> Layout:
    """The cells of a leaf, and the processes that need each: all of them if it has no sharding."""
    if goal.sharding is None:
        return Layout((1,) * len(shape), (tuple(processes),))
    if isinstance(goal.sharding, PlannedSharding):
        return goal.sharding.layout(shape)
    return process_layout(goal.sharding, shape)


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type and the same buffers. JAX has no public function for this."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)
