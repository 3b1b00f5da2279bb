"""Which process holds a copy of which object, and how copies are sent to other processes.

A local save writes each object to its owner's folder, and `copies` more times to folders in other failure domains.
Processes that hold the object's data by its sharding come first, and write it from their own replica. The remaining
copies are sent to the owner's peers over the devices' interconnect.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from jaxckpt._devices.interconnect import CollectiveCalls, Interconnect, Pairs
from jaxckpt._model.grid import cell_shape
from jaxckpt._model.pieces import Bytes, aligned_empty
from jaxckpt._options import Options
from jaxckpt._save.staging import StagedObject
from jaxckpt._save.write_plan import ArrayLeaf, Object, SavePlan, plan_save
from jaxckpt.errors import InputError, show_count

# Streams between processes --------------------------------------------------------------------------------
# each pair of processes:   parts ─▶ one stream of bytes ─▶ rounds ─▶ the same stream ─▶ parts
#
# A round is a permutation: each process sends to at most one other and receives from at most one. The rounds follow
# from the lengths of all streams. Every process takes part in all of them, even if it fails or is interrupted.

Pair = tuple[int, int]
"""(sender, receiver) of a stream."""

ROUND_BYTES = 32 << 20
"""Bytes per round and process. The device needs twice this memory, and the host three times."""


class Round(msgspec.Struct, frozen=True, array_like=True):
    """The next bytes of the streams of a channel."""

    channel: int
    n_bytes: int
    """Bytes that each process sends. The last round of a stream is padded, so that few compiled programs suffice."""

    senders: list[int]
    """The processes that send."""


def plan_channels(pairs: Iterable[Pair]) -> tuple[Pairs, ...]:
    """All pairs in few channels, in which no process sends or receives twice."""
    channels: list[tuple[dict[int, int], set[int]]] = []
    for sender, receiver in pairs:
        channel = next((each for each in channels if sender not in each[0] and receiver not in each[1]), None)
        if channel is None:
            channels.append(channel := ({}, set()))
        channel[0][sender] = receiver
        channel[1].add(receiver)
    return tuple(tuple(sorted(receivers.items())) for receivers, _ in channels)


def plan_rounds(channels: Sequence[Pairs], stream_bytes: Mapping[Pair, int], max_bytes: int) -> list[Round]:
    """The rounds that send the streams of these lengths."""
    max_bytes = rounded_bytes(min(ROUND_BYTES, max_bytes))
    rounds: list[tuple[int, Round]] = []
    for number, pairs in enumerate(channels):
        longest = max((stream_bytes[pair] for pair in pairs), default=0)
        for start in range(0, longest, max_bytes):
            senders = [pair[0] for pair in pairs if stream_bytes[pair] > start]
            n_bytes = min(max_bytes, rounded_bytes(longest - start))
            rounds.append((start, Round(number, n_bytes, senders)))
    rounds.sort(key=lambda placed: placed[0])  # the channels in turn, so that data for several channels is freed early
    return [planned for _, planned in rounds]


def rounded_bytes(n_bytes: int) -> int:
    """Round up so that sizes of rounds repeat and their programs are reused. Adds at most 0.4 % above 1 MiB."""
    unit = max(4 << 10, 1 << max(0, n_bytes.bit_length() - 9))
    return -(-n_bytes // unit) * unit


RoundCalls = CollectiveCalls[Round, Bytes | None]
"""One call for each round. It is given the bytes that this process sends, and returns those that it receives."""


def round_calls(channels: Sequence[Pairs], rounds: Sequence[Round], process: int) -> RoundCalls:
    """The calls of these rounds. All processes make them."""
    interconnect = functools.cache(Interconnect)  # created with the first round, which all processes run together

    def run(planned: Round, sent: Bytes | None) -> Bytes | None:
        pairs = tuple(pair for pair in channels[planned.channel] if pair[0] in planned.senders)
        return interconnect(process).permute(pairs, planned.n_bytes, sent)

    return CollectiveCalls(rounds, run)


class Outgoing:
    """The data that a process sends to another one, as a stream."""

    def __init__(self) -> None:
        self._queue = deque[Bytes | StagedObject]()
        self.waiting_bytes = 0
        """Bytes that have been added and not yet taken."""

    def add(self, data: Bytes | StagedObject) -> None:
        """Add data. A staged object is brought into host memory when it is taken."""
        self._queue.append(data)
        self.waiting_bytes += data.obj.n_bytes if isinstance(data, StagedObject) else len(data)

    def take(self, n_bytes: int) -> Bytes:
        """The next bytes, padded with zeros."""
        taken = np.empty(n_bytes, np.uint8)
        filled = 0
        while filled < n_bytes and self._queue:
            data = self._queue.popleft()
            if isinstance(data, StagedObject):
                data = np.ascontiguousarray(data.data().array()).reshape(-1).view(np.uint8)
            fitting = data[: n_bytes - filled]
            taken[filled : filled + len(fitting)] = fitting
            filled += len(fitting)
            self.waiting_bytes -= len(fitting)
            if len(fitting) < len(data):
                self._queue.appendleft(data[len(fitting) :])
        taken[filled:] = 0
        return taken


class Incoming:
    """The data that a process receives from another one."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = deque(sizes)
        self._current: Bytes | None = None
        self._filled_bytes = 0

    def add(self, received: Bytes) -> Iterator[Bytes]:
        """Add the bytes of a round. Yields the complete items."""
        while self._sizes:
            if self._current is None:
                self._current, self._filled_bytes = aligned_empty((self._sizes[0],), np.dtype(np.uint8)), 0
            fitting = received[: len(self._current) - self._filled_bytes]
            self._current[self._filled_bytes : self._filled_bytes + len(fitting)] = fitting
            self._filled_bytes += len(fitting)
            received = received[len(fitting) :]
            if self._filled_bytes < len(self._current):
                return
            complete, self._current = self._current, None
            self._sizes.popleft()
            yield complete


# Copies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Domains:
    """The failure domain of each process, and the number of other domains with a copy of each object."""

    by_process: tuple[str, ...]
    copies: int

    def require_enough(self) -> None:
        """Raise InputError if there are too few domains for this number of copies."""
        n_domains = len(set(self.by_process))
        if n_domains <= self.copies:
            other = ", or other domains=" if len(self.by_process) > self.copies else ""
            raise InputError(
                f"copies={self.copies} puts each object into {show_count(self.copies + 1, 'failure domain')}, but the"
                f" processes of this job are in only {n_domains}: pass copies={n_domains - 1}{other}"
            )


@dataclass(frozen=True, slots=True)
class CopiedPlan(SavePlan):
    """What a process writes in a local save. `objects` are its own, and its replicas of objects of other processes."""

    replicas: frozenset[Object]
    """Objects of other processes that it writes from its own replica of their data."""

    channels: tuple[Pairs, ...]
    """The channels of the whole job."""

    sent: tuple[tuple[Object, ...], ...]
    """Its own objects that it sends over each channel, in order."""

    received: tuple[tuple[Object, ...], ...]
    """The objects that it receives over each channel, in order."""

    @property
    def is_collective(self) -> bool:
        return bool(self.channels)

    @property
    def own(self) -> list[Object]:
        """The objects that this process writes for the job, not as copies."""
        return [obj for obj in self.objects if obj not in self.replicas]

    @property
    def sent_bytes(self) -> int:
        return sum(obj.n_bytes for obj in itertools.chain(*self.sent))

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that this process holds for others."""
        return sum(obj.n_bytes for obj in itertools.chain(self.replicas, *self.received))

    def written_bytes(self, process: int) -> int:
        return self.process_bytes[process] + self.copied_bytes


def plan_local_save(arrays: Iterable[ArrayLeaf], options: Options, process: int, domains: Domains) -> CopiedPlan:
    """The plan of one process for a local save."""
    arrays = list(arrays)
    return plan_copies(lambda other: plan_save(arrays, options, other, len(domains.by_process)), domains, process)


def plan_copies(plan_of: Callable[[int], SavePlan], domains: Domains, process: int) -> CopiedPlan:
    """The plan of a process with its copies. `plan_of` returns the plan of a process without copies."""
    plan, peers = plan_of(process), _peers(domains)
    channels = plan_channels((p, peers[p][turn]) for turn in range(domains.copies) for p in range(len(peers)))
    channel_of = {pair: channel for channel, pairs in enumerate(channels) for pair in pairs}
    sent: list[list[Object]] = [[] for _ in channels]
    received: list[list[Object]] = [[] for _ in channels]
    replicas: list[Object] = []
    for obj in plan.objects:
        for peer in _copy_holders(domains, process, _holders(plan, obj))[1]:
            sent[channel_of[process, peer]].append(obj)
    sources = {owner for owner in range(len(domains.by_process)) if process in peers[owner]}
    for group in {group for layout in plan.layouts for group in layout.groups if process in group}:
        sources.update(owner for owner in group if process in _copy_holders(domains, owner, group)[0])
    for owner in sorted(sources):
        for obj in plan_of(owner).objects:
            by_replica, by_peer = _copy_holders(domains, owner, _holders(plan, obj))
            if process in by_replica:
                replicas.append(obj)
            elif process in by_peer:
                received[channel_of[owner, process]].append(obj)
    planned: dict[str, Any] = {field.name: getattr(plan, field.name) for field in fields(plan)}
    planned["objects"] = *plan.objects, *replicas
    return CopiedPlan(
        **planned,
        replicas=frozenset(replicas),
        channels=channels,
        sent=tuple(map(tuple, sent)),
        received=tuple(map(tuple, received)),
    )


def _holders(plan: SavePlan, obj: Object) -> tuple[int, ...]:
    """The processes that hold an object's data by its sharding."""
    layout = plan.layouts[obj.stack]
    if len(layout.groups) == 1:
        return layout.groups[0]
    number = 0
    sides = cell_shape(layout, plan.stacks[obj.stack].shape)
    for (start, _), side, count in zip(obj.box[1:], sides, layout.grid, strict=True):
        number = number * count + start // side
    return layout.holders[number]


@lru_cache(maxsize=1 << 16)
def _copy_holders(domains: Domains, owner: int, holders: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The processes that keep copies of an object, all in different domains: (those that hold its data by its sharding,
    peers that receive it)."""
    used = {domains.by_process[owner]}
    ring, positions = _ring(domains, holders)
    following = itertools.chain(ring[positions[owner] + 1 :], ring[: positions[owner]])
    replicas = _first_in_new_domains(following, domains, used, domains.copies)
    peers = _first_in_new_domains(_peers(domains)[owner], domains, used, domains.copies - len(replicas))
    return replicas, peers


def _first_in_new_domains(processes: Iterable[int], domains: Domains, used: set[str], count: int) -> tuple[int, ...]:
    chosen: list[int] = []
    for process in processes:
        if len(chosen) == count:
            break
        if domains.by_process[process] not in used:
            used.add(domains.by_process[process])
            chosen.append(process)
    return tuple(chosen)


@lru_cache(maxsize=1024)
def _ring(domains: Domains, holders: tuple[int, ...]) -> tuple[tuple[int, ...], dict[int, int]]:
    """A ring of processes, domain by domain, and the position of each."""
    ring = tuple(sorted(holders, key=lambda process: (domains.by_process[process], process)))
    return ring, {process: position for position, process in enumerate(ring)}


@lru_cache(maxsize=64)
def _peers(domains: Domains) -> tuple[tuple[int, ...], ...]:
    """For each process, one peer per copy. Its own domain and those of its peers all differ."""
    count = len(domains.by_process)
    ring, positions = _ring(domains, tuple(range(count)))
    sizes = {label: domains.by_process.count(label) for label in set(domains.by_process)}
    shift = max(sizes.values())
    if (domains.copies + 1) * shift <= count:  # a rotation of the ring by this leaves every domain, with equal loads
        turns = range(1, domains.copies + 1)
        return tuple(tuple(ring[(positions[p] + turn * shift) % count] for turn in turns) for p in range(count))
    members = {label: [process for process in ring if domains.by_process[process] == label] for label in sizes}
    taken = dict.fromkeys(sizes, 0)
    chosen: dict[int, tuple[int, ...]] = {}
    for process in sorted(ring, key=lambda process: -sizes[domains.by_process[process]]):
        other_domains = sorted(
            (taken[label] / sizes[label], label) for label in sizes if label != domains.by_process[process]
        )
        peers: list[int] = []
        for _, label in other_domains[: domains.copies]:
            peers.append(members[label][taken[label] % sizes[label]])
            taken[label] += 1
        chosen[process] = tuple(peers)
    return tuple(chosen[process] for process in range(count))
