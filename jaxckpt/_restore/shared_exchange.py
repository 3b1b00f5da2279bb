"""Reads data that several processes need once in the whole job, and sends it over the devices' interconnect.

each round:  read own portions ─▶ all processes meet ─▶ all-gather each piece ─▶ scatter into buffers ─▶ deliver
                     ▲                    │
                     └── take over those of processes that are late

The processes exchange plain bytes, so one program serves all shapes, dtypes and layouts, and host leaves. A process
that fails raises in the rendezvous, before the others run a program in which they would wait forever.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxckpt._devices.interconnect import CollectiveCalls, Interconnect
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, extent
from jaxckpt._model.pieces import Array, Bytes, aligned_empty
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import operate
from jaxckpt._pipeline.pipeline import Budget
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.threads import awake_seconds
from jaxckpt._pipeline.watchdog import PartWatchdog, Watchdog, current_watchdog, under
from jaxckpt._pipeline.workers import replace_workers, start
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
    take_over,
)
from jaxckpt._sources.source import Source
from jaxckpt.errors import PeersDisagreeError, StorageError

_LATE = 1.5
"""A process is late if its reads of a round take this many times as long as those of each process that is done with
about as many bytes. Others then read what is left of them."""

_COMPARED, _UNCOMPARED_SECONDS = 0.5, 10.0
"""A process is compared with those that had to read at least this part of its bytes; if there are none, with this
time."""

_PATIENCE_SECONDS = [_LATE**number for number in range(12)]
"""How long the reads of a round may take when the processes meet, which they do again while some are not done. After
more than these, or half of `Options.timeout_seconds`, a process waits for all of its reads before it meets the others.
"""

_STUCK = 0.25
"""A late process that has read less than this part of a round reads nothing in later rounds."""


def require_agreement(rendezvous: Rendezvous, digest: str) -> None:
    """Raise PeersDisagreeError unless all processes have the same digest of their request. Every process."""
    _gather_equal(rendezvous, digest, "")
    rendezvous.broadcast("")


def _gather_equal(rendezvous: Rendezvous, digest: str, text: str) -> list[str]:
    """In process 0, the texts of all processes. Raises PeersDisagreeError unless their digests are equal."""
    parts = [gathered.partition(" ") for gathered in rendezvous.gather(f"{digest} {text}")]
    if len({other for other, _, _ in parts}) > 1:
        raise PeersDisagreeError(
            "the processes want different leaves, or in different dtypes or layouts: every process must call restore"
            " with the same arguments and options. Options.host_bytes must be equal too; set it if the hosts differ in"
            " cores or memory, which decide the default"
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
    budget, process = Budget(options.host_bytes), rendezvous.call.index
    whole = current_watchdog()
    assert whole is not None, "not in a lane"
    with contextlib.closing(PartWatchdog(whole)) as watchdog:  # an error abandons all reads
        communities: list[_Community | None] = []
        for partition, rounds in planned.items():
            community = None
            if rounds:
                together = (
                    partition if covers(partition, rendezvous.call.count) else (community_of(partition, process),)
                )
                max_bytes = max_read_bytes(options.host_bytes // len(planned))
                community = _Community(source, rounds, Interconnect(process, together), max_bytes, budget, watchdog)
            communities.append(community)
        started = [community.start_rounds() if community else iter(()) for community in communities]
        current = [next(rounds, None) for rounds in started]
        patience = [seconds for seconds in _PATIENCE_SECONDS if seconds < options.timeout_seconds / 2]
        decision = _Decision(is_left=True)
        while decision.is_left:
            ahead: list[_Round | None] = []
            attempts = itertools.chain(patience, itertools.repeat(None))
            while not ahead or decision.late:
                rendezvous.call.cancellation.check()
                seconds = next(attempts)
                for own in filter(None, current):
                    own.reads.wait(source.url, seconds)
                ahead = ahead or [next(rounds, None) for rounds in started]  # read while the current rounds are sent
                states = [
                    community.state(own) if community and own else _State()
                    for community, own in zip(communities, current, strict=True)
                ]
                with rendezvous.call.cancellation.paused():  # once they have agreed, all processes run the programs
                    decision = _decide_together(rendezvous, digest, states, any(ahead), decision.stuck)
                for number, (community, own) in enumerate(zip(communities, current, strict=True)):
                    if community is not None:
                        community.take_over(own, decision, number)
            sent = [
                _Sending(community, own, shipment or Shipment([], {}), program)  # other communities have more
                for community, own, programs in zip(communities, current, decision.programs, strict=True)
                if community is not None
                for shipment, program in itertools.zip_longest(own.shipments if own else (), programs)
            ]
            with CollectiveCalls(sent, _Sending.gather) as calls:
                for sending in calls:
                    sending.community.deliver(sending.shipment, calls.run_next(), delivery, report)
            current = ahead
        budget.drain()


_Program = tuple[int, int]
"""How many bytes each process sends, and how many processes send any. Communities that send at the same time run the
same programs."""


class _Decision(NamedTuple):
    """What process 0 has decided for all, at the start of a round or while some are late."""

    is_left: bool
    """Whether any process has a round left after this one."""

    stuck: Sequence[int] = ()
    """The processes that are so late that they read nothing in later rounds."""

    late: Sequence[int] = ()
    """The processes that have not read all of their portions. If there are any, all meet again."""

    moved: Sequence[tuple[int, Sequence[Sequence[int]]]] = ()
    """For some late processes, the numbers of the portions in each partition that others read instead."""

    programs: Sequence[Sequence[_Program]] = ()
    """For each partition, programs that are large enough for the shipments of all processes."""


class _State(NamedTuple):
    """The state of a process's round in one partition."""

    offers: Sequence[_Program] = ()
    """The programs that its shipments need."""

    late: Sequence[int] = ()
    """The numbers of the portions that it has not read."""

    seconds: float = 0.0
    """How long its reads took, or have taken so far; 0 if it reads nothing."""

    n_bytes: int = 0
    """The bytes that it reads."""

    unread_bytes: int = 0


def _decide_together(
    rendezvous: Rendezvous, digest: str, states: Sequence[_State], is_left: bool, stuck: Sequence[int]
) -> _Decision:
    texts = _gather_equal(rendezvous, digest, json.dumps([is_left, states]))
    decision = _decide([json.loads(text) for text in texts], stuck) if texts else None
    agreed = json.loads(rendezvous.broadcast(json.dumps(decision)))
    rendezvous.start_next()
    return _Decision(*agreed)


def _decide(gathered: Sequence[tuple[bool, Sequence[Sequence[Any]]]], stuck: Sequence[int]) -> _Decision:
    """What process 0 decides for all, from what each process has sent. `stuck` has those of earlier meetings."""
    is_left = any(left for left, _ in gathered)
    states = [[_State(*state) for state in of_process] for _, of_process in gathered]
    late = [process for process, own in enumerate(states) if any(state.late for state in own)]
    if not late:
        programs = [
            [tuple(map(max, *offers, (0, 0))) for offers in itertools.zip_longest(*offered, fillvalue=(0, 0))]
            for offered in zip(*([state.offers for state in own] for own in states), strict=True)
        ]
        return _Decision(is_left, stuck, programs=programs)
    seconds = [max(state.seconds for state in own) for own in states]
    n_bytes = [sum(state.n_bytes for state in own) for own in states]
    unread = [sum(state.unread_bytes for state in own) for own in states]
    done = [process for process in range(len(states)) if process not in late]

    def is_too_late(process: int) -> bool:
        compared = [
            seconds[other] for other in done if seconds[other] and n_bytes[other] >= _COMPARED * n_bytes[process]
        ]
        return process in stuck or seconds[process] >= _LATE * max(compared, default=_UNCOMPARED_SECONDS)

    too_late = [process for process in late if done and is_too_late(process)]
    more = [p for p in too_late if p not in stuck and n_bytes[p] - unread[p] < _STUCK * n_bytes[p]]
    return _Decision(is_left, [*stuck, *more], late, [(p, [state.late for state in states[p]]) for p in too_late])


class _OwnReads:
    """The reads of this process in a round. Another thread waits for them, so that this one can meet the others."""

    def __init__(self, reads: Sequence[tuple[Portion, PendingRead]] = (), watchdog: PartWatchdog | None = None) -> None:
        self._reads = reads
        self._watchdog = watchdog
        self._n_read = 0
        self._begun = awake_seconds()
        self._ended = self._begun
        self._task = start(self._await_all, watchdog) if watchdog else None

    def _await_all(self) -> None:
        try:
            for _, pending in self._reads:
                pending.wait()
                self._n_read += 1
                self._ended = awake_seconds()
        except StorageError:  # its traceback would hold the reads
            if self._watchdog is None or not self._watchdog.is_abandoned:
                raise

    def abandon(self) -> None:
        """Let others read what is left. The reads leave the places that they take at the store."""
        if self._watchdog:
            self._watchdog.abandon()

    def wait(self, url: str, seconds: float | None) -> None:
        """Wait for them, at most until this many seconds after they began. Raises DataError, StorageError."""
        if self._task is None:
            return
        left = None if seconds is None else max(0.0, self._begun + seconds - awake_seconds())
        if operate(f"reading from {url}", functools.partial(self._task.wait, left)):
            self._task.result()
            self._task = None

    @property
    def n_bytes(self) -> int:
        return sum(portion.n_bytes for portion, _ in self._reads)

    @property
    def unread(self) -> Sequence[Portion]:
        return [portion for portion, _ in self._reads[self._n_read :]]

    @property
    def seconds(self) -> float:
        """How long they took, or have taken so far; 0 if there are none."""
        return max(0.0, (self._ended if self._n_read == len(self._reads) else awake_seconds()) - self._begun)


@dataclass(slots=True)
class _Round:
    """A round of a community."""

    portions: SharedRead
    shipments: Sequence[Shipment]

    own: Array
    """The bytes that this process reads."""

    reads: _OwnReads

    handed_in: set[int] = field(default_factory=set[int])
    """The processes that others read for. They take nothing over."""


@dataclass(frozen=True, slots=True)
class _Sending:
    """A program that sends the data of a shipment."""

    community: _Community
    own: _Round | None
    shipment: Shipment
    program: _Program

    def gather(self, _: object) -> dict[int, Bytes]:
        own = self.own.own if self.own else np.empty(0, np.uint8)
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
        watchdog: Watchdog,
    ) -> None:
        self._source = source
        self._rounds = rounds
        self._process = interconnect.process
        self._max_bytes = max_bytes
        self.interconnect = interconnect
        self._budget = budget
        self._watchdog = watchdog
        self._memory = MemoryPool()
        self._step_buffers: dict[int, StepBuffers] = {}
        self._stuck: Sequence[int] = ()

    def start_rounds(self) -> Iterator[_Round]:
        """Each round, after its reads have been started."""
        for portions in self._rounds:
            others = [process for process in self.interconnect.community if process not in self._stuck]
            if self._stuck and others:
                portions = take_over(portions, (n for n, p in enumerate(portions) if p.reader in self._stuck), others)
            own = self._own(portions)
            into = aligned_empty((sum(portion.n_bytes for portion in own),), np.dtype(np.uint8))
            yield _Round(portions, self._shipments(portions), into, self._start_reads(own, into))

    def take_over(self, round_: _Round | None, decision: _Decision, partition: int) -> None:
        """Let the processes that are done read what late ones have not read."""
        self._stuck = decision.stuck
        members = self.interconnect.community
        late = {p: numbers[partition] for p, numbers in decision.moved if p in members and numbers[partition]}
        if round_ is None or not late:
            return
        done = [process for process in members if process not in decision.late and process not in round_.handed_in]
        if not done:
            return
        round_.handed_in.update(late)
        numbers = [*itertools.chain.from_iterable(late.values())]
        able = [process for process in done if process not in decision.stuck]
        round_.portions = take_over(round_.portions, numbers, able or done)
        round_.shipments = self._shipments(round_.portions)
        if self._process in late:
            round_.reads.abandon()
            round_.reads = _OwnReads()
            replace_workers()  # the abandoned reads may never end
        if taken := self._own(round_.portions[-len(numbers) :]):
            before = round_.own
            round_.own = aligned_empty((taken[-1].start + taken[-1].n_bytes,), np.dtype(np.uint8))
            round_.own[: len(before)] = before
            round_.reads = self._start_reads(taken, round_.own)

    def state(self, round_: _Round) -> _State:
        offers = [(self.interconnect.rounded_bytes(one.span_bytes), len(one.spans)) for one in round_.shipments]
        unread = round_.reads.unread
        numbers = {id(portion): number for number, portion in enumerate(round_.portions)}
        late, unread_bytes = [numbers[id(one)] for one in unread], sum(one.n_bytes for one in unread)
        return _State(offers, late, round_.reads.seconds, round_.reads.n_bytes, unread_bytes)

    def _shipments(self, portions: SharedRead) -> list[Shipment]:
        return [*split_into_shipments(portions, self.interconnect.community, self._max_bytes)]

    def _own(self, portions: SharedRead) -> SharedRead:
        return [portion for portion in portions if portion.reader == self._process]

    def _start_reads(self, portions: SharedRead, into: Array) -> _OwnReads:
        """Start to read these portions of this process into its bytes of the round."""
        if not portions:
            return _OwnReads()
        watchdog = PartWatchdog(self._watchdog)
        boxes: dict[int, list[list[Box]]] = {}
        for portion in portions:
            boxes.setdefault(portion.step.stack, []).append(portion.read.boxes)
        # For this round alone: readers keep what they have begun to read.
        readers = {stack: self._source.array_reader(stack, boxes_of_stack) for stack, boxes_of_stack in boxes.items()}
        reads: list[tuple[Portion, PendingRead]] = []
        for portion in portions:
            stack = portion.step.stack
            targets = list(zip(portion.read.boxes, self._regions(portion, into[portion.start :]), strict=True))
            with under(watchdog):
                reads.append((portion, PendingRead.begin(self._source, stack, readers[stack], targets)))
        return _OwnReads(reads, watchdog)

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
            for region, array in zip(portion.read.regions, self._regions(portion, data), strict=True):
                sent.update(filling.scatter(region, array))
            report(portion.read.n_bytes)
            # They may alias the received data, and the delivery may donate them.
            jax.block_until_ready(list(sent.values()))
            if filling.deliver_if_complete():
                del self._step_buffers[id(step)]
