"""Reads data that several processes need once in the whole job, and sends it over the devices' interconnect.

each round:  read own portions ─▶ all processes meet ─▶ all-gather each piece ─▶ scatter into buffers ─▶ deliver

The processes exchange plain bytes, so one program serves all shapes, dtypes and layouts, and host leaves. A process
that fails raises in the rendezvous, before the others run a program in which they would wait forever.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import extent
from jaxckpt._model.pieces import Array, Bytes, aligned_empty
from jaxckpt._options import Options
from jaxckpt._pipeline.pipeline import Budget
from jaxckpt._pipeline.progress import Report
from jaxckpt._restore.read_loop import Delivery, MemoryPool, PendingRead, StepBuffers
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._restore.shared_reads import (
    Partition,
    Portion,
    SharedRead,
    Shipment,
    community_of,
    covers,
    split_into_shipments,
)
from jaxckpt._sources.source import Source
from jaxckpt._store.arrays import ArrayReader
from jaxckpt.errors import PeersDisagreeError


def require_agreement(rendezvous: Rendezvous, digest: str) -> None:
    """Raise PeersDisagreeError unless all processes have the same digest of their request. Every process."""
    if len(set(rendezvous.gather(digest))) > 1:
        raise PeersDisagreeError(
            "the processes want different leaves, or in different dtypes or layouts: every process must call restore"
            " with the same arguments and options"
        )
    rendezvous.broadcast("")


def needs_whole_job() -> bool:
    """Whether a program with collectives must run on all devices of the job, as on some kinds of TPU."""
    return jax.devices()[0].platform == "tpu"


def read_shared(
    source: Source,
    planned: Mapping[Partition, Sequence[SharedRead]],
    options: Options,
    delivery: Delivery,
    report: Report,
    rendezvous: Rendezvous,
) -> None:
    """Run the rounds of this process's community in each partition. Every process calls this, even if it has none."""
    process = rendezvous.call.index
    for partition, rounds in planned.items():
        community: _Community | None = None
        if rounds:
            together = partition if covers(partition, rendezvous.call.count) else (community_of(partition, process),)
            community = _Community(source, rounds, Interconnect(process, together), options)
        pending_rounds = iter(community.start_rounds() if community else ())
        current = next(pending_rounds, None)
        while True:
            if current is not None:
                current.wait()
            ahead = next(pending_rounds, None)  # read while the current round is sent
            if community is not None:
                is_left = community.exchange(current, rendezvous, delivery, report)
            else:
                is_left = _agree_on_programs(rendezvous, None) is not None
            if not is_left:
                break
            current = ahead
        if community is not None:
            community.budget.drain()


_Program = tuple[int, int]
"""How many bytes each process sends, and how many processes send any. Communities that send at the same time run the
same programs."""


def _agree_on_programs(rendezvous: Rendezvous, offered: list[_Program] | None) -> list[_Program] | None:
    """Programs that are large enough for the offers of all processes; None if no process has a round left."""
    offers = [offer for text in rendezvous.gather(json.dumps(offered)) if (offer := json.loads(text)) is not None]
    merged = [tuple(map(max, *alike, (0, 0))) for alike in itertools.zip_longest(*offers, fillvalue=(0, 0))]
    agreed = json.loads(rendezvous.broadcast(json.dumps(merged if offers else None)))
    rendezvous.start_next()
    return agreed


class _PendingSharedRead:
    """A round that is being read."""

    def __init__(self, shipments: list[Shipment], own: Array, reads: Sequence[PendingRead]) -> None:
        self.shipments = shipments
        self.own = own
        self._reads = reads

    def wait(self) -> None:
        for pending in self._reads:
            pending.wait()


class _Community:
    """Processes that read for each other, from the view of one of them."""

    def __init__(
        self,
        source: Source,
        rounds: Sequence[SharedRead],
        interconnect: Interconnect,
        options: Options,
    ) -> None:
        self._source = source
        self._rounds = rounds
        self._process = interconnect.process
        self._max_bytes = max_read_bytes(options.host_bytes)
        self._interconnect = interconnect
        self.budget = Budget(options.host_bytes)
        self._memory = MemoryPool()
        self._step_buffers: dict[int, StepBuffers] = {}

    def start_rounds(self) -> Iterator[_PendingSharedRead]:
        """Each round, after its reads have been started."""
        own_portions = [portion for portions in self._rounds for portion in portions if portion.reader == self._process]
        by_stack: dict[int, list[Portion]] = {}
        for portion in own_portions:
            by_stack.setdefault(portion.step.stack, []).append(portion)
        readers = {
            stack: self._source.array_reader(stack, (portion.read.boxes for portion in portions))
            for stack, portions in by_stack.items()
        }
        for portions in self._rounds:
            yield self._start_round(portions, readers)

    def _start_round(self, portions: SharedRead, readers: Mapping[int, ArrayReader]) -> _PendingSharedRead:
        """Start the reads of this process in a round."""
        own_portions = [portion for portion in portions if portion.reader == self._process]
        own = aligned_empty((sum(portion.n_bytes for portion in own_portions),), np.dtype(np.uint8))
        reads: list[PendingRead] = []
        for portion in own_portions:
            stack = portion.step.stack
            regions = self._regions(portion, own[portion.start :])
            targets = list(zip(portion.read.boxes, regions, strict=True))
            reads.append(PendingRead.begin(self._source, stack, readers[stack], targets))
        return _PendingSharedRead(
            list(split_into_shipments(portions, self._interconnect.community, self._max_bytes)), own, reads
        )

    def _regions(self, portion: Portion, data: Array) -> list[Array]:
        """The regions of a portion in its bytes."""
        dtype = DTYPES[self._source.manifest.stacks[portion.step.stack].dtype]
        shapes = [extent(region.box) for region in portion.read.regions]
        return [
            data[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            for offset, shape in zip(portion.offsets, shapes, strict=True)
        ]

    def exchange(
        self, pending_round: _PendingSharedRead | None, rendezvous: Rendezvous, delivery: Delivery, report: Report
    ) -> bool:
        """Exchange the data of a round, if this process has one left, and deliver it.

        Returns False if no process has a round left.
        """
        shipments, own, offered = list[Shipment](), np.empty(0, np.uint8), None
        if pending_round is not None:
            shipments, own = pending_round.shipments, pending_round.own
            offered = [
                (self._interconnect.rounded_bytes(shipment.span_bytes), len(shipment.spans)) for shipment in shipments
            ]

        def agree() -> list[tuple[Shipment, _Program]] | None:
            programs = _agree_on_programs(rendezvous, offered)
            if programs is None:
                return None
            nothing = [Shipment([], {})] * (len(programs) - len(shipments))  # other communities have more
            return list(zip([*shipments, *nothing], programs, strict=True))

        def gather(shipment_and_program: tuple[Shipment, _Program], _: object) -> dict[int, Bytes]:
            shipment, (n_bytes, n_senders) = shipment_and_program
            return self._interconnect.gather(shipment.spans, n_bytes, n_senders, own)

        with CollectiveCalls[tuple[Shipment, _Program], dict[int, Bytes]]((), gather) as calls:
            agreed = calls.extend(agree, rendezvous.call.cancellation)
            for shipment, _ in calls:
                self._deliver(shipment, calls.run_next(), delivery, report)
        return agreed is not None

    def _deliver(self, shipment: Shipment, received: Mapping[int, Array], delivery: Delivery, report: Report) -> None:
        for portion in shipment.portions:
            step = portion.step
            sent: dict[Any, Any] = {}
            if id(step) not in self._step_buffers:
                self.budget.make_room(step.held_bytes)
                dtype = DTYPES[self._source.manifest.stacks[step.stack].dtype]
                self._step_buffers[id(step)] = StepBuffers(step, dtype, self.budget, self._memory, delivery)
            filling = self._step_buffers[id(step)]
            data = received[portion.reader][portion.start - shipment.spans[portion.reader][0] :]
            for region, staged in zip(portion.read.regions, self._regions(portion, data), strict=True):
                sent.update(filling.scatter(region, staged))
            report(portion.read.n_bytes)
            # They may alias the received data, and the delivery may donate them.
            jax.block_until_ready(list(sent.values()))
            if filling.finish_read():
                del self._step_buffers[id(step)]
