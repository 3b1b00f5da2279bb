"""Which process holds a copy of which object: a pure function from save plan and failure domains to a frozen plan.

A local save writes each object to its owner's folder, and `copies` more times to folders in other failure domains.
Processes that hold the object's data by its sharding come first, and write it from their own replica. The remaining
copies are sent to the owner's peers over the devices' interconnect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from jaxckpt._devices.interconnect import Pairs
from jaxckpt._local_tier.streams import plan_channels
from jaxckpt._model.grid import cell_shape
from jaxckpt._options import Options
from jaxckpt._save.write_plan import ArrayLeaf, Object, SavePlan, plan_save
from jaxckpt.errors import InputError, show_count


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
