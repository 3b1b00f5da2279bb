"""Reads the data of the abstract leaves, from storage or from other processes of the job.

abstract leaves ─▶ wants ─▶ read steps, of this process and shared ─▶ destinations ─▶ values
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report, display_progress
from jaxckpt._restore.placement import LeafBuilder, destinations, value_in_manifest
from jaxckpt._restore.read_loop import detect_replacement, read, reads_of
from jaxckpt._restore.resolve import AbstractLeaf
from jaxckpt._restore.shared_exchange import needs_whole_job, read_shared
from jaxckpt._restore.shared_reads import wants_digest
from jaxckpt._restore.wants import plan_reads, plan_wants, split_ties
from jaxckpt._sources.source import Source


def fetch(
    source: Source,
    abstract_leaves: Mapping[int, AbstractLeaf],
    options: Options,
    rendezvous: Rendezvous,
    *,
    tied: bool = False,
    shown: contextlib.ExitStack | None = None,
) -> dict[int, Any]:
    """The value of every leaf by its number. If `tied`, leaves that share a row and a form become one value.

    Every process of the rendezvous calls this, in a lane. Each checks some of the small files that describe stacks.
    They read for each other if `options.read` says so. `shown` keeps the progress of the last reads on display.
    """
    representative: dict[int, int] = {}
    if tied:
        first = dict[tuple[int, AbstractLeaf], int]()
        ties = source.manifest.ties
        representative = {
            number: first.setdefault((ties.get(number, number), abstract), number)
            for number, abstract in abstract_leaves.items()
        }
        abstract_leaves = {number: abstract_leaves[number] for number in representative.values()}
    process, processes = rendezvous.call.index, rendezvous.call.count
    records = source.manifest.leaves
    values = {
        number: value_in_manifest(records[number], abstract)
        for number, abstract in abstract_leaves.items()
        if records[number].stack is None
    }
    for group in split_ties(source.manifest, abstract_leaves):
        wants = plan_wants(source, group, options, [process], range(processes))
        job_size = processes if wants.layouts is not None and needs_whole_job() else None
        (reads,) = plan_reads(wants, options, [process], job_size)
        leaves = LeafBuilder(source.manifest, wants, destinations(wants, process))
        with detect_replacement(source, group), contextlib.ExitStack() as until_read:
            if shown is not None:
                shown.close()
            display = (shown or until_read).enter_context(display_progress("restore", reads.n_bytes, options.progress))

            def report(n_bytes: int, display: Report = display) -> None:
                rendezvous.call.cancellation.check()
                display(n_bytes)

            source.require_metadata(sorted(wants.by_stack)[process::processes])
            if reads.rounds:
                digest = wants_digest(wants.layouts_for(process), options.host_bytes)
                read_shared(source, reads.rounds, digest, options, leaves, report, rendezvous)
            boxes = ((step.stack, planned.boxes) for step, planned in reads_of(reads.steps))
            with source.arrivals(boxes, options, rendezvous) as arrivals:
                read(source, reads.steps, options, leaves, report, arrivals)
        leaves.create_unread_leaves()
        values |= leaves.values
    for number, abstract in abstract_leaves.items():
        if abstract.weak:
            values[number] = _weakly_typed(values[number])
        if abstract.is_reference:
            values[number] = jax.new_ref(values[number])
    return values | {number: values[first_number] for number, first_number in representative.items()}


def _weakly_typed(array: Any) -> Any:
    """The same array with a weak type and the same buffers. JAX has no public function for this."""
    aval = array.aval.update(weak_type=True)
    return type(array)(aval, array.sharding, array._arrays, committed=array.committed, _skip_checks=True)
