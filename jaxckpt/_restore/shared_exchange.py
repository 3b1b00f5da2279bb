"""Reads data that several processes need once in the whole job, and sends it over the devices' interconnect.

each round:  read own portions ─▶ all processes meet ─▶ all-gather each piece ─▶ scatter into buffers ─▶ deliver

The processes exchange plain bytes, so one program serves all shapes, dtypes and layouts, and host leaves. A process
that fails raises in the rendezvous, before the others run a program in which they would wait forever.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from jaxckpt._store.store import ArrayReader
from jaxckpt.errors import PeersDisagreeError


def require_agreement(rendezvous: Rendezvous, digest: str) -> None:
    """Raise PeersDisagreeError unless all processes have the same digest of their request. Every process."""
    _gather_alike(rendezvous, digest, "")
    rendezvous.broadcast("")


def _gather_alike(rendezvous: Rendezvous, digest: str, text: str) -> list[str]:
    """In process 0, the texts of all processes. Raises PeersDisagreeError unless their digests are equal."""
    parts = [gathered.partition(" ") for gathered in rendezvous.gather(f"{digest} {text}")]
    if len({other for other, _, _ in parts}) > 1:
        raise PeersDisagreeError(
            "the processes want different leaves, or in different dtypes or layouts: every process must call restore"
            " with the same arguments and options"
        )
    return [own for _, _, own in parts]


def needs_whole_job() -> bool:
    """Whether a program with collectives must run on all devices of the job, as on some kinds of TPU."""
    return jax.devices()[0].platform == "tpu"


def read_shared(
    source: Source,
    planned: Mapping[Partition, Sequence[SharedRead]],
    digest: str,
    options: Options,
    delivery: Delivery,
    report: Report,
    rendezvous: Rendezvous,
) -> None:
    """Run the rounds of this process's communities, of one in each partition, side by side. Every process calls this,
    even if it has none. Raises PeersDisagreeError unless `digest`, of what is planned, is equal in all."""
    budget = Budget(options.host_bytes)
    communities: list[_Community | None] = []
    for partition, rounds in planned.items():
        community = None
        if rounds:
            process = rendezvous.call.index
            together = partition if covers(partition, rendezvous.call.count) else (community_of(partition, process),)
            max_bytes = max_read_bytes(options.host_bytes // len(planned))
            community = _Community(source, rounds, Interconnect(process, together), max_bytes, budget)
        communities.append(community)
    started = [community.start_rounds() if community else iter(()) for community in communities]
    current = [next(rounds, None) for rounds in started]
    is_left = True
    while is_left:
        for pending in filter(None, current):
            pending.wait()
        ahead = [next(rounds, None) for rounds in started]  # read while the current rounds are sent
        offers = [pending.offers if pending else [] for pending in current]
        with rendezvous.call.cancellation.paused():  # once they have agreed, all processes run the programs
            programs, is_left = _agree_on_programs(rendezvous, digest, offers, any(ahead))
        sent = [
            _Sending(community, pending, shipment or Shipment([], {}), program)  # other communities have more
            for community, pending, agreed in zip(communities, current, programs, strict=True)
            if community is not None
            for shipment, program in itertools.zip_longest(pending.shipments if pending else (), agreed)
        ]
        with CollectiveCalls(sent, _Sending.gather) as calls:
            for sending in calls:
                sending.community.deliver(sending.shipment, calls.run_next(), delivery, report)
        current = ahead
    budget.drain()


_Program = tuple[int, int]
"""How many bytes each process sends, and how many processes send any. Communities that send at the same time run the
same programs."""


def _agree_on_programs(
    rendezvous: Rendezvous, digest: str, offers: list[list[_Program]], is_left: bool
) -> tuple[list[list[_Program]], bool]:
    """For each partition, programs that are large enough for the offers of all processes; and whether any process has
    a round left after this one."""
    texts = _gather_alike(rendezvous, digest, json.dumps([offers, is_left]))
    gathered: list[Any] = [json.loads(text) for text in texts]
    merged = [
        [tuple(map(max, *programs, (0, 0))) for programs in itertools.zip_longest(*of_partition, fillvalue=(0, 0))]
        for of_partition in zip(*(offered for offered, _ in gathered), strict=True)
    ]
    agreed = json.loads(rendezvous.broadcast(json.dumps([merged, any(left for _, left in gathered)])))
    rendezvous.start_next()
    return agreed


class _PendingSharedRead:
    """A round that is being read."""

    def __init__(self, shipments: list[Shipment], offers: list[_Program], own: Array, reads: Sequence[PendingRead]):
        self.shipments = shipments
        self.offers = offers
        self.own = own
        self._reads = reads

    def wait(self) -> None:
        for pending in self._reads:
            pending.wait()


@dataclass(frozen=True, slots=True)
class _Sending:
    """A program that sends the data of a shipment."""

    community: _Community
    pending: _PendingSharedRead | None
    shipment: Shipment
    program: _Program

    def gather(self, _: object) -> dict[int, Bytes]:
        own = self.pending.own if self.pending else np.empty(0, np.uint8)
        return self.community.interconnect.gather(self.shipment.spans, *self.program, own)


class _Community:
    """Processes that read for each other, from the view of one of them."""

    def __init__(
        self,
        source: Source,
        rounds: Sequence[SharedRead],
        interconnect: Interconnect,
        max_bytes: int,
        budget: Budget,
    ) -> None:
        self._source = source
        self._rounds = rounds
        self._process = interconnect.process
        self._max_bytes = max_bytes
        self.interconnect = interconnect
        self._budget = budget
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
        shipments = list(split_into_shipments(portions, self.interconnect.community, self._max_bytes))
        offers = [(self.interconnect.rounded_bytes(one.span_bytes), len(one.spans)) for one in shipments]
        return _PendingSharedRead(shipments, offers, own, reads)

    def _regions(self, portion: Portion, data: Array) -> list[Array]:
        """The regions of a portion in its bytes."""
        dtype = DTYPES[self._source.manifest.stacks[portion.step.stack].dtype]
        shapes = [extent(region.box) for region in portion.read.regions]
        return [
            data[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            for offset, shape in zip(portion.offsets, shapes, strict=True)
        ]

    def deliver(self, shipment: Shipment, received: Mapping[int, Array], delivery: Delivery, report: Report) -> None:
        for portion in shipment.portions:
            step = portion.step
            sent: dict[Any, Any] = {}
            if id(step) not in self._step_buffers:
                self._budget.make_room(step.held_bytes)
                dtype = DTYPES[self._source.manifest.stacks[step.stack].dtype]
                self._step_buffers[id(step)] = StepBuffers(step, dtype, self._budget, self._memory, delivery)
            filling = self._step_buffers[id(step)]
            data = received[portion.reader][portion.start - shipment.spans[portion.reader][0] :]
            for region, staged in zip(portion.read.regions, self._regions(portion, data), strict=True):
                sent.update(filling.scatter(region, staged))
            report(portion.read.n_bytes)
            # They may alias the received data, and the delivery may donate them.
            jax.block_until_ready(list(sent.values()))
            if filling.finish_read():
                del self._step_buffers[id(step)]
