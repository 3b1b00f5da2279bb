"""What folders of several processes hold together of one save, and who passes what on to whom. Pure data.

heard: what each folder has ─▶ candidates, the newest first ─▶ who holds each file ─▶ requests ─▶ hops between processes
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, cut_down, volume
from jaxckpt._format.manifest import state_name
from jaxckpt._format.records import Manifest, StackRecord
from jaxckpt._format.stacks import Stack

Held = np.ndarray[Any, np.dtype[np.uint8]]
"""[process, file / 8]: a bit for each file, whether the process can read it."""

ALIGNED_BYTES = 16
"""What is passed on begins at multiples of this: elements of all dtypes lie aligned then."""

SERVERS = 4
"""Most processes that one process gets its data from where more of them have it: each distance between two processes
takes a program of its own."""


class Candidate(NamedTuple):
    """A save whose manifest lies in some folder."""

    step: int
    save_id: str
    digest: str
    """SHA-256 of the manifest."""


def candidates(heard: Iterable[Iterable[Candidate]]) -> list[Candidate]:
    """The saves that processes have found, the newest first; of one step, those that more folders publish."""
    counts = collections.Counter(itertools.chain.from_iterable(heard))
    return sorted(counts, key=lambda one: (one.step, counts[one], one.save_id, one.digest), reverse=True)


# Files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a save, numbered: the objects of each stack, then what each process alone knew."""

    keys: Sequence[str]
    """Where each lies, below the step's folder."""

    lengths: Sequence[int]

    numbers: Mapping[str, Mapping[str, int]]
    """By the names of stacks, and the places of objects in their grids."""

    starts: Sequence[int]
    """The number of each stack's first object, and that of the first process's own state."""

    stacks: Sequence[StackRecord]

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        keys: list[str] = []
        lengths: list[int] = []
        starts: list[int] = []
        numbers: dict[str, dict[str, int]] = {}
        for record in manifest.stacks:
            starts.append(len(keys))
            numbers[record.name] = {place: number for number, place in enumerate(record.objects, len(keys))}
            keys += [f"{manifest.data}/{record.name}/c/{place}" for place in record.objects]
            lengths += [length for length, _ in record.objects.values()]
        starts.append(len(keys))
        keys += [f"{manifest.data}/{state_name(process)}" for process in range(len(manifest.process_states))]
        lengths += [length for length, _ in manifest.process_states]
        return cls(keys, lengths, numbers, starts, manifest.stacks)

    def stack(self, number: int) -> int | None:
        """The stack that a file is an object of; None of a process's own state."""
        return None if number >= self.starts[-1] else bisect.bisect_right(self.starts, number) - 1

    def request_bytes(self, request: Request) -> int:
        """Bytes of what a request asks for."""
        stack = self.stack(request[0])
        return volume(request[1]) * (1 if stack is None else DTYPES[self.stacks[stack].dtype].itemsize)


Request = tuple[int, Box]
"""The number of a file, and a box of its stack within it; of a process's own state, all its bytes."""


def requests(number: int, stack: Stack, box: Box, most_bytes: int) -> Iterator[Request]:
    """What to ask for to get a box of an object: pieces that are not larger than `most_bytes`, or than a chunk."""
    grids = stack.object, stack.chunk
    for part in cut_down(box, grids, lambda part: volume(part) * stack.itemsize <= most_bytes):
        yield number, part


def missing(held: Held, count: int) -> list[int]:
    """The files, of so many, that no process can read."""
    return np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(held), count=count) == 0).tolist()


# Passing on -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Parcel:
    """What one process passes to another at once."""

    requests: list[tuple[Request, int, int]]
    """What was asked for, where its bytes begin, and how many they are."""

    n_bytes: int = 0

    def add(self, request: Request, n_bytes: int) -> None:
        self.requests.append((request, self.n_bytes, n_bytes))
        self.n_bytes += -(-n_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


Hop = dict[tuple[int, int], Parcel]
"""What passes between processes at once, by giver and getter; no process gives twice, nor gets twice."""


def server(number: int, getter: int, held: Held) -> int:
    """The process that reads a file for another: one of the few that come after it and can, each in its turn."""
    holders = np.flatnonzero(held[:, number // 8] & (128 >> number % 8))
    first = int(np.searchsorted(holders, getter))
    return int(holders[(first + number % min(SERVERS, len(holders))) % len(holders)])


def hops(
    wanted: Sequence[Iterable[Request]], held: Held, n_bytes: Callable[[Request], int], most_bytes: int
) -> list[Hop]:
    """Pass on what each process wants, in parcels of at most `most_bytes`, or of one request."""
    parcels: dict[tuple[int, int], list[Parcel]] = {}
    for getter, asked in enumerate(wanted):
        for request in asked:
            some = parcels.setdefault((server(request[0], getter, held), getter), [])
            size = n_bytes(request)
            if not some or some[-1].n_bytes + size > most_bytes:
                some.append(Parcel([]))
            some[-1].add(request, size)
    by_distance: dict[int, dict[tuple[int, int], list[Parcel]]] = {}
    for (giver, getter), some in parcels.items():
        by_distance.setdefault((getter - giver) % len(wanted), {})[giver, getter] = some
    return [
        {pair: some[turn] for pair, some in sorted(alike.items()) if turn < len(some)}
        for _, alike in sorted(by_distance.items())
        for turn in range(max(map(len, alike.values())))
    ]
