"""Which process reads what if processes read for each other, so that each chunk is read from storage once. Pure data.

wants ─▶ communities of processes that need the same data ─▶ for each, a plan of distributed reads ─▶ rounds ─▶ pieces
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxckpt._devices.interconnect import MAX_BYTES, Span
from jaxckpt._model.grid import Box, Layout, cell_shape, grid_cells, volume
from jaxckpt._model.stacks import Stack
from jaxckpt._restore.read_plan import Read, ReadCost, ReadStep, WantedRows, max_read_bytes, plan_steps, read_cost

READ_ALIGNMENT_BYTES = 64
"""Read data begins at multiples of this, so that JAX uses it on CPU devices without a copy."""

JOINED_BYTES = 1 << 20
"""Smaller leaves that share chunks are read together by all processes that need any of these leaves. Sending a whole
leaf needs memory for it. In larger leaves, a chunk at the border of two boxes is therefore read by each process that
needs a part of it."""

ROUNDS = 4
"""The least number of rounds, unless each process would read less than the smallest round."""

ROUND_BYTES = 4 << 20

ROUND_BYTES_PER_PROCESS = 256 << 10
"""For each process of the job, a round is larger by this. Before each round all processes meet, for which the
coordination service needs about 0.3 ms per process."""

Community = tuple[int, ...]
"""A community: processes that read for each other, ascending."""

Partition = tuple[Community, ...]
"""Communities that have no process in common."""


def share(
    stacks: Sequence[Stack], leaf_wants: Sequence[tuple[WantedRows, Layout]], process: int, job_size: int | None = None
) -> tuple[list[WantedRows], dict[Partition, list[WantedRows]]]:
    """The wants that a process reads for itself, and, for each partition, the shared wants of its community.

    `leaf_wants` has the want of the process for each leaf, perhaps without boxes, and the leaf's layout: the processes
    that need each cell. Every process gets the same partitions in the same order. If `job_size` is the number of
    processes of the job, only partitions that cover all of them are used.
    """
    joined: dict[int, set[int]] = {}  # by stack, the processes that want any leaf of it, if its leaves share chunks
    for want, layout in leaf_wants:
        if stacks[want.stack].chunk_sides[0] > 1 and len(layout.processes) > 1:
            joined.setdefault(want.stack, set()).update(layout.processes)
    own: list[WantedRows] = []
    shared: dict[Partition, list[WantedRows]] = {}
    for want, layout in leaf_wants:
        stack = stacks[want.stack]
        if want.stack in joined and len(layout.processes) > 1:
            partition = (tuple(sorted(joined[want.stack])),)
        else:
            partition = _partition(stack, layout)
        community = community_of(partition, process)
        possible = job_size is None or covers(partition, job_size)
        if possible and 0 not in stack.shape and any(len(community) > 1 for community in partition):
            wants = shared.setdefault(partition, [])
            if len(community) > 1:
                wants.append(replace(want, boxes=_boxes(layout, stack.shape, community)))
                continue
        own.append(want)
    return own, shared


def wants_digest(leaf_wants: Sequence[tuple[WantedRows, Layout]], host_bytes: int) -> str:
    """A digest that is equal in all processes if they plan the same shared reads."""
    hasher = hashlib.sha256(f"{host_bytes}".encode())
    for want, layout in leaf_wants:
        if len(layout.processes) > 1:
            hasher.update(repr((want.stack, want.rows, str(want.dtype), want.keeps_buffers, _digest(layout))).encode())
    return hasher.hexdigest()


@functools.lru_cache(maxsize=256)
def _digest(layout: Layout) -> str:
    return hashlib.sha256(repr((layout.grid, layout.holders)).encode()).hexdigest()


def community_of(partition: Partition, process: int) -> Community:
    """The community of a process; empty if it has none."""
    return next((community for community in partition if process in community), ())


def _partition(stack: Stack, layout: Layout) -> Partition:
    """The communities that need a leaf."""
    if math.prod(stack.shape) * stack.itemsize < JOINED_BYTES:
        sides = zip(cell_shape(layout, stack.shape), stack.chunk_sides[1:], layout.grid, strict=True)
        if any(n_cells > 1 and side % chunk for side, chunk, n_cells in sides):
            return (tuple(sorted(layout.processes)),)
    return _communities(layout)


def covers(partition: Partition, count: int) -> bool:
    """Whether the communities have equal sizes and include all processes of the job, so that one program serves all."""
    return len(set(map(len, partition))) == 1 and sum(map(len, partition)) == count


@functools.lru_cache(maxsize=256)
def _communities(layout: Layout) -> Partition:
    """The processes that need a common cell, directly or through others."""
    community_of: dict[int, list[int]] = {}
    for first, *others in layout.groups:
        joined = community_of.setdefault(first, [first])
        for other in others:
            other_community = community_of.get(other, [other])
            if other_community is not joined:
                joined.extend(other_community)
                community_of.update(dict.fromkeys(other_community, joined))
    distinct = {id(joined): joined for joined in community_of.values()}
    return tuple(sorted(tuple(sorted(joined)) for joined in distinct.values()))


@functools.lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...], community: Community) -> tuple[Box, ...]:
    """The cells that any of its processes needs."""
    inside = set(community)
    cells = grid_cells(shape, cell_shape(layout, shape))
    return tuple(box for (_, box), processes in zip(cells, layout.holders, strict=True) if processes[0] in inside)


# Distributing reads ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Portion:
    """A read by one process for its community."""

    step: ReadStep
    read: Read

    reader: int
    """The process that reads."""

    start: int
    """Offset of its bytes among those that the reader reads in the same round."""

    n_bytes: int

    offsets: tuple[int, ...]
    """Offset of each region among these bytes."""


SharedRead = list[Portion]
"""The reads of a community between two rendezvous of the job."""


def plan_shared_reads(
    stacks: Sequence[Stack], wants: Sequence[WantedRows], community: Community, host_bytes: int, n_processes: int
) -> list[SharedRead]:
    """Evenly distributed reads of everything that a community needs, with no chunk in two of them.

    In a round, each process reads consecutive data, at most about a quarter of `host_bytes`. Several rounds allow
    reading the next round while the current one is sent. `n_processes` is the number of processes that take part.
    """
    most = max_read_bytes(host_bytes)
    least = ROUND_BYTES + n_processes * ROUND_BYTES_PER_PROCESS
    bytes_by_stack = collections.Counter[int]()
    for want in wants:
        bytes_by_stack[want.stack] += want.n_elements * stacks[want.stack].itemsize
    needed_bytes = bytes_by_stack.total()
    # An object that one process reads whole takes one request to an object store, and otherwise one per chunk.
    object_bytes = {
        number: math.prod(stacks[number].object_sides) * stacks[number].itemsize for number in bytes_by_stack
    }
    n_objects = sum(n_bytes / object_bytes[number] for number, n_bytes in bytes_by_stack.items())
    round_bytes = len(community) * min(most, max(least, needed_bytes // (ROUNDS * len(community))))
    finest = max(1, min(round_bytes, needed_bytes) // (4 * len(community)))
    rounds: list[SharedRead] = []
    unassigned: list[tuple[ReadStep, Read, list[int]]] = []
    size = 0
    limits = {
        number: max(finest, n_bytes) if n_objects >= len(community) and n_bytes <= most // 2 else finest
        for number, n_bytes in object_bytes.items()
    }
    for step in plan_steps(stacks, wants, host_bytes, limits):
        for read in step.reads:
            sizes = [volume(region.box) * stacks[step.stack].itemsize for region in read.regions]
            ends = list(itertools.accumulate(-(-size // READ_ALIGNMENT_BYTES) * READ_ALIGNMENT_BYTES for size in sizes))
            if unassigned and size + ends[-1] > round_bytes:
                rounds.append(_assign_readers(unassigned, size, community))
                unassigned, size = [], 0
            unassigned.append((step, read, ends))
            size += ends[-1]
    return [*rounds, _assign_readers(unassigned, size, community)] if unassigned else rounds


def _assign_readers(reads: Sequence[tuple[ReadStep, Read, list[int]]], total: int, community: Community) -> SharedRead:
    """Assign reads, with the ends of their regions, in order to the processes of a community in order."""
    portions: SharedRead = []
    filled = dict.fromkeys(community, 0)
    before = 0
    for step, read, ends in reads:
        middle = 2 * before + ends[-1]
        reader = community[middle * len(community) // (2 * total)]
        portions.append(Portion(step, read, reader, filled[reader], ends[-1], (0, *ends[:-1])))
        filled[reader] += ends[-1]
        before += ends[-1]
    return portions


def take_over(portions: SharedRead, numbers: Iterable[int], readers: Sequence[int]) -> SharedRead:
    """The same reads, but these processes do the ones with these numbers, after their own. The order changes."""
    moved = dict.fromkeys(numbers)
    kept = [portion for number, portion in enumerate(portions) if number not in moved]
    filled = collections.Counter[int]()
    for portion in portions:
        filled[portion.reader] = max(filled[portion.reader], portion.start + portion.n_bytes)
    taken: SharedRead = []
    for number in moved:
        reader = min(readers, key=lambda process: (filled[process], process))
        taken.append(replace(portions[number], reader=reader, start=filled[reader]))
        filled[reader] += portions[number].n_bytes
    return kept + taken


@dataclass(frozen=True, slots=True)
class Shipment:
    """The data that a community sends with one program."""

    portions: SharedRead

    spans: Mapping[int, Span]
    """The part that each process sends of the bytes that it has read in the round."""

    @property
    def span_bytes(self) -> int:
        """Bytes of the longest span."""
        return max(end - first for first, end in self.spans.values())


def split_into_shipments(portions: SharedRead, community: Community, max_bytes: int) -> Iterator[Shipment]:
    """A round in pieces of at most about `max_bytes`, with as many senders as possible."""
    count = len(community)
    max_bytes = min(max_bytes, MAX_BYTES)
    width = max(max_bytes // (2 * count), *(portion.n_bytes for portion in portions))
    at_once = max(1, min(count, max_bytes // (2 * width)))
    positions = {process: number for number, process in enumerate(community)}
    groups: dict[tuple[int, int], SharedRead] = {}
    for portion in portions:
        groups.setdefault((portion.start // width, positions[portion.reader] // at_once), []).append(portion)
    for _, group in sorted(groups.items(), key=lambda entry: entry[0]):
        spans: dict[int, tuple[int, int]] = {}
        for portion in group:
            first, _ = spans.get(portion.reader, (portion.start, 0))
            spans[portion.reader] = first, portion.start + portion.n_bytes
        yield Shipment(group, spans)


def shared_cost(stacks: Sequence[Stack], rounds: Sequence[SharedRead], process: int, host_bytes: int) -> ReadCost:
    """The reads of one process in the rounds, and the bytes that it receives from others, needed or not."""
    own_portions = [portion for portions in rounds for portion in portions if portion.reader == process]
    steps = [ReadStep(portion.step.stack, (), (portion.read,), 0, 0) for portion in own_portions]
    received = sum(portion.n_bytes for portions in rounds for portion in portions if portion.reader != process)
    # Host memory: two rounds of its own reads, one piece of the others' reads, and data on its way to the devices.
    in_rounds = [sum(portion.n_bytes for portion in portions if portion.reader == process) for portions in rounds]
    peak_bytes = max((sum(pair) for pair in itertools.pairwise([0, *in_rounds])), default=0)
    peak_bytes += min(max_read_bytes(host_bytes), received)
    peak_bytes += max((portion.step.held_bytes for portions in rounds for portion in portions), default=0)
    cost = read_cost(stacks, steps, host_bytes)
    return replace(cost, received_bytes=received, peak_host_bytes=max(peak_bytes, cost.peak_host_bytes))
