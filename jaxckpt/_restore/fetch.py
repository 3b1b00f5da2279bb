"""Reads the data for the goals: from storage, from other processes of the job, or from several folders.

goals ─▶ wants ─▶ read steps, of this process and shared ─▶ destinations ─▶ values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxckpt._job.rendezvous import Meeting
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import display_progress
from jaxckpt._restore.destinations import Destinations
from jaxckpt._restore.passing import PeerReads, requests_by_read
from jaxckpt._restore.placement import LeafBuilder, value_in_manifest
from jaxckpt._restore.pooled import PooledCheckpoint
from jaxckpt._restore.read_loop import detect_replacement, read, reads_of, require_metadata
from jaxckpt._restore.read_plan import ReadStep
from jaxckpt._restore.resolve import Goal
from jaxckpt._restore.shared_exchange import gather, needs_whole_job, require_agreement
from jaxckpt._restore.shared_reads import Partition, Round, wants_digest
from jaxckpt._restore.wants import plan_reads, plan_wants, split_tied_goals
from jaxckpt._sources.source import Source


def fetch(
    source: Source,
    goals: Mapping[int, Goal],
    options: Options,
    meeting: Meeting | None = None,
    *,
    tied: bool = False,
    pooled: PooledCheckpoint | None = None,
) -> dict[int, Any]:
    """The value of every goal by leaf number. If `tied`, leaves that share a row and a goal become one value.

    `pooled` is the source, or what the source reads from, if that lies in folders of several processes.

    In a meeting of processes that all call this, each checks some of the small files that describe stacks. They read
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
    process, processes = (meeting.group.index, meeting.group.count) if meeting is not None else (0, 1)
    values: dict[int, Any] = {}
    for some in split_tied_goals(source.manifest, goals):
        steps, shared, leaves = _plan_reads(source, some, options, values, meeting)
        total = sum(step.n_bytes for step in steps)
        total += sum(one.read.n_bytes for each in shared.values() for portions in each for one in portions)
        with detect_replacement(source, options), display_progress("restore", total, options.progress) as advance:
            require_metadata(source, leaves.stacks[process::processes], options)
            if shared and meeting is not None:
                gather(source, stacks, shared, options, leaves, advance, meeting)
            if pooled is not None and meeting is not None:
                with PeerReads(pooled, requests_by_read(source, steps), options, meeting) as arrivals:
                    reads = arrivals.as_data_arrives(reads_of(steps))
                    read(source, stacks, steps, options, leaves, advance, reads)
            else:
                read(source, stacks, steps, options, leaves, advance)
        leaves.create_unread_leaves()
    for number, goal in goals.items():
        if goal.weak:
            values[number] = _weakly_typed(values[number])
    return values | {number: values[one] for number, one in representative.items()}


def _plan_reads(
    source: Source, goals: Mapping[int, Goal], options: Options, values: dict[int, Any], meeting: Meeting | None
) -> tuple[Sequence[ReadStep], Mapping[Partition, list[Round]], LeafBuilder]:
    """The reads for goals whose leaves do not share rows, by this process alone and by several for each other, and the
    builder that stores the results in `values`. Values in the manifest are stored immediately."""
    manifest = source.manifest
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.stack is None:
            values[number] = value_in_manifest(record, goal)
    process, job = (meeting.group.index, range(meeting.group.count)) if meeting is not None else (0, range(1))
    wants = plan_wants(manifest, goals, options, [process], job)
    job_size = None
    if wants.layouts is not None and meeting is not None:
        digest = wants_digest(wants.layouts_for(process))
        require_agreement(meeting, f"{digest} {options.host_bytes}")  # the rounds also depend on this
        meeting.start_next()
        job_size = len(job) if needs_whole_job() else None
    (reads,) = plan_reads(wants, options, [process], job_size)
    builder = LeafBuilder(manifest, wants.stacks, wants.by_stack, Destinations(wants, process), values)
    return reads.steps, reads.rounds, builder


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type and the same buffers. JAX has no public function for this."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)
