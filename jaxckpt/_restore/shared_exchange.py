"""Reads data that several processes need once in the whole job, and sends it over the devices' interconnect.

each round:  read own portions ─▶ all processes meet ─▶ all-gather each piece ─▶ scatter into buffers ─▶ deliver

The processes exchange plain bytes, so one program serves all shapes, dtypes and layouts, and host leaves. A process
that fails raises in the meeting, before the others run a program in which they would wait forever.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxckpt._devices.exchange import n_sending_devices, transfer_context
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Meeting
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import extent
from jaxckpt._model.pieces import Array
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._pipeline.pipeline import Budget
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.workers import StorageThread
from jaxckpt._restore.read_loop import Delivery, MemoryPool, PendingRead, StepBuffers, aligned_empty
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt._restore.shared_reads import (
    READ_ALIGNMENT_BYTES,
    Partition,
    Portion,
    Round,
    Transfer,
    covers,
    members_of,
    split_into_transfers,
)
from jaxckpt._sources.source import Source
from jaxckpt._store.arrays import ArrayReader
from jaxckpt.errors import PeerFailedError, PeersDisagreeError


def require_agreement(meeting: Meeting, digest: str) -> None:
    """Raise PeersDisagreeError unless all processes have the same digest of their request. Every process."""
    if len(set(meeting.gather(digest))) > 1:
        raise PeersDisagreeError(
            "the processes want different leaves, or in different dtypes or layouts: every process must call restore"
            " with the same arguments and options"
        )
    meeting.broadcast("")


def needs_whole_job() -> bool:
    """Whether a program with collectives must run on all devices of the job, as on some kinds of TPU."""
    return jax.devices()[0].platform == "tpu"


def gather(
    source: Source,
    stacks: Sequence[Stack],
    planned: Mapping[Partition, Sequence[Round]],
    options: Options,
    delivery: Delivery,
    report: Report,
    meeting: Meeting,
) -> None:
    """Run the rounds of this process's community in each partition. Every process calls this, even if it has none."""
    process = meeting.group.index
    with StorageThread(options.timeout_seconds) as aside:
        for partition, rounds in planned.items():
            community: _Community | None = None
            if rounds:
                together = partition if covers(partition, meeting.group.count) else (members_of(partition, process),)
                community = _Community(source, stacks, rounds, Interconnect(together, process), options, aside)
            pending_rounds = iter(community.start_rounds() if community else ())
            current = next(pending_rounds, None)
            while True:
                if current is not None:
                    current.wait()
                ahead = next(pending_rounds, None)  # read while the current round is sent
                if community is not None:
                    is_left = community.exchange(current, meeting, delivery, report)
                else:
                    is_left = _agree_on_programs(meeting, None) is not None
                if not is_left:
                    break
                current = ahead
            if community is not None:
                community.budget.drain()


_Program = tuple[int, int]
"""How many bytes each process sends, and how many processes send any. Communities that send at the same time run the
same programs."""


def _agree_on_programs(meeting: Meeting, offered: list[_Program] | None) -> list[_Program] | None:
    """Programs that are large enough for the offers of all processes; None if no process has a round left."""
    found = [one for text in meeting.gather(json.dumps(offered)) if (one := json.loads(text)) is not None]
    merged = [tuple(map(max, *alike, (0, 0))) for alike in itertools.zip_longest(*found, fillvalue=(0, 0))]
    agreed = json.loads(meeting.broadcast(json.dumps(merged if found else None)))
    meeting.start_next()
    return agreed


class _PendingRound:
    """A round that is being read."""

    def __init__(self, transfers: list[Transfer], own: Array, reads: Sequence[PendingRead]) -> None:
        self.transfers = transfers
        self.own = own
        self._reads = reads

    def wait(self) -> None:
        for one in self._reads:
            one.wait()


class _Community:
    """Processes that read for each other, from the view of one of them."""

    def __init__(
        self,
        source: Source,
        stacks: Sequence[Stack],
        rounds: Sequence[Round],
        interconnect: Interconnect,
        options: Options,
        aside: StorageThread,
    ) -> None:
        self._source = source
        self._stacks = stacks
        self._rounds = rounds
        self._process = interconnect.process
        self._max_bytes = max_read_bytes(options.host_bytes)
        self._aside = aside
        self._interconnect = interconnect
        self.budget = Budget(options.host_bytes)
        self._memory = MemoryPool()
        self._step_buffers: dict[int, StepBuffers] = {}

    def start_rounds(self) -> Iterator[_PendingRound]:
        """Each round, after its reads have been started."""
        mine = [portion for portions in self._rounds for portion in portions if portion.reader == self._process]
        by_stack: dict[int, list[Portion]] = {}
        for portion in mine:
            by_stack.setdefault(portion.step.stack, []).append(portion)
        readers = {
            stack: self._source.array_reader(stack, (portion.read.boxes for portion in portions))
            for stack, portions in by_stack.items()
        }
        for portions in self._rounds:
            yield self._start_round(portions, readers)

    def _start_round(self, portions: Round, readers: Mapping[int, ArrayReader]) -> _PendingRound:
        """Start the reads of this process in a round."""
        mine = [portion for portion in portions if portion.reader == self._process]
        own = aligned_empty((sum(portion.n_bytes for portion in mine),), np.dtype(np.uint8))
        reads: list[PendingRead] = []
        for portion in mine:
            stack = portion.step.stack
            coming = PendingRead(self._source, stack, self._aside)
            regions = self._regions(portion, own[portion.start :])
            coming.begin(readers[stack], list(zip(portion.read.boxes, regions, strict=True)))
            reads.append(coming)
        return _PendingRound(
            list(split_into_transfers(portions, self._interconnect.members, self._max_bytes)), own, reads
        )

    def _regions(self, portion: Portion, data: Array) -> list[Array]:
        """The regions of a portion in its bytes."""
        dtype = DTYPES[self._stacks[portion.step.stack].dtype]
        shapes = [extent(region.box) for region in portion.read.regions]
        return [
            data[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            for offset, shape in zip(portion.offsets, shapes, strict=True)
        ]

    def exchange(
        self, pending_round: _PendingRound | None, meeting: Meeting, delivery: Delivery, report: Report
    ) -> bool:
        """Exchange the data of a round, if this process has one left, and deliver it.

        Returns False if no process has a round left.
        """
        found, own, offered = list[Transfer](), np.empty(0, np.uint8), None
        if pending_round is not None:
            found, own = pending_round.transfers, pending_round.own
            offered = [(self._interconnect.sent_bytes(piece), len(piece.spans)) for piece in found]

        def agree() -> list[tuple[Transfer, _Program]] | None:
            programs = _agree_on_programs(meeting, offered)
            if programs is None:
                return None
            nothing = [Transfer([], {})] * (len(programs) - len(found))  # other communities have more
            return list(zip([*found, *nothing], programs, strict=True))

        def gather(one: tuple[Transfer, _Program], _: object) -> dict[int, Array]:
            return self._interconnect.gather(*one, own)

        with CollectiveCalls[tuple[Transfer, _Program], dict[int, Array]]((), gather) as calls:
            agreed = calls.extend(agree)
            for piece, _ in calls:
                self._deliver(piece, calls.run_next(), delivery, report)
        return agreed is not None

    def _deliver(self, piece: Transfer, got: Mapping[int, Array], delivery: Delivery, report: Report) -> None:
        for portion in piece.portions:
            step = portion.step
            sent: dict[Any, Any] = {}
            if id(step) not in self._step_buffers:
                self.budget.make_room(step.held_bytes)
                dtype = DTYPES[self._stacks[step.stack].dtype]
                self._step_buffers[id(step)] = StepBuffers(step, dtype, self.budget, self._memory, delivery)
            filling = self._step_buffers[id(step)]
            data = got[portion.reader][portion.start - piece.spans[portion.reader][0] :]
            for region, staged in zip(portion.read.regions, self._regions(portion, data), strict=True):
                sent.update(filling.scatter(region, staged))
            report(portion.read.n_bytes)
            # They may alias the received data, and the delivery may donate them.
            jax.block_until_ready(list(sent.values()))
            if filling.finish_read():
                del self._step_buffers[id(step)]


# Between processes ----------------------------------------------------------------------------------------


class Interconnect:
    """Sends bytes from some processes of a community to all of them, in several communities of equal size at once."""

    def __init__(self, partition: Partition, process: int) -> None:
        devices: dict[int, list[Any]] = {}
        for device in jax.devices():
            devices.setdefault(device.process_index, []).append(device)
        self._width = min(n_sending_devices(devices[member]) for members in partition for member in members)
        self._devices = devices[process][: self._width]
        self.members = members_of(partition, process)
        self.process = process
        grid = [[devices[member][: self._width] for member in members] for members in partition]
        self._mesh = Mesh(np.array(grid), ("community", "process", "own"))

    def sent_bytes(self, piece: Transfer) -> int:
        """Bytes that each process sends, rounded up by at most 12 %, so that few programs serve all pieces."""
        words = -(-max(end - first for first, end in piece.spans.values()) // (4 * self._width))
        unit = max(READ_ALIGNMENT_BYTES // 4, 1 << max(0, words.bit_length() - 4))
        return -(-words // unit) * unit * 4 * self._width

    def gather(self, piece: Transfer, program: tuple[int, int], own: Array) -> dict[int, Array]:
        """The bytes of each process, given this process's `own`. Every process of the partition calls this."""
        given, n_senders = program
        words = given // (4 * self._width)
        few = 2 * n_senders < len(self.members)
        slots = list(piece.spans) if few else list(self.members)
        first, _ = piece.spans.get(self.process, (0, 0))
        mine = own[first : first + given] if self.process in piece.spans else own[:0]
        if len(mine) < given:
            mine, part = aligned_empty((given,), np.dtype(np.uint8)), mine
            mine[: len(part)], mine[len(part) :] = part, 0
        position = slots.index(self.process) * words if few and self.process in slots else 0
        start = np.array([position], np.int32)
        places = [SingleDeviceSharding(device) for device in self._devices]
        along = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        with transfer_context(self._mesh):
            try:
                parts = jax.device_put([*mine.view(np.uint32).reshape(self._width, -1)], places)
                starts = jax.device_put([start] * self._width, places)
                arguments = [
                    jax.make_array_from_single_device_arrays((self._mesh.size * one[0].size,), along, one)
                    for one in (parts, starts)
                ]
                gathered = jax.block_until_ready(gatherer(self._mesh, n_senders if few else None)(*arguments))
            except (RuntimeError, ValueError) as error:  # raised by XLA, for example if a peer died
                raise PeerFailedError(
                    f"processes {self.members} could not send the data that they read: {error}"
                ) from error
            by_device = {shard.device: jax.device_get(shard.data) for shard in gathered.addressable_shards}
        found = [by_device[device].reshape(-1, words) for device in self._devices]
        rows = ([one[slot] for one in found] for slot in range(len(slots)))
        joined = (row[0] if self._width == 1 else np.concatenate(row) for row in rows)
        return {process: row.view(np.uint8) for process, row in zip(slots, joined, strict=True)}


@functools.lru_cache(maxsize=256)
def gatherer(mesh: Mesh, n_senders: int | None) -> Any:
    """The jitted function (words of each device, their position) → the concatenated words of a community's processes.

    With `n_senders`, only this many processes send words, each at its position. The others send zeros, and all are
    summed, because gathering zeros from thousands of processes would need memory for them.
    """

    def everywhere(words: Any, start: Any) -> Any:
        if n_senders is None:
            return lax.all_gather(words, "process", tiled=True)
        placed = lax.dynamic_update_slice(jnp.zeros(n_senders * words.size, words.dtype), words, [start[0]])
        return lax.psum(placed, "process")

    along, everyone = PartitionSpec(mesh.axis_names), PartitionSpec(("community", "own"))
    passed = jax.shard_map(everywhere, mesh=mesh, in_specs=(along, along), out_specs=everyone, check_vma=False)
    return jax.jit(passed)
