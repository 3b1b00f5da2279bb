"""The files of a local step, and which process sends what to which. Pure data.

reports of all folders ─▶ candidates, newest first ─▶ holders of each file ─▶ requests, by sender and receiver
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, cut_down, volume
from jaxckpt._model.manifest import state_file_name
from jaxckpt._model.records import Manifest, StackRecord
from jaxckpt._model.stacks import Stack

Availability = np.ndarray[Any, np.dtype[np.uint8]]
"""[process, file / 8]: one bit per file, set if the process can read it."""

MAX_SENDERS = 4
"""The most senders for one process, if more processes have its data, because each of them needs a separate program."""


class Candidate(NamedTuple):
    """A save whose manifest is in some folder."""

    step: int
    save_id: str
    digest: str
    """SHA-256 of the manifest."""


def candidates(reports: Iterable[Iterable[Candidate]]) -> list[Candidate]:
    """The saves that processes have found, newest first. For one step, saves in more folders come first."""
    counts = collections.Counter(itertools.chain.from_iterable(reports))
    return sorted(
        counts,
        key=lambda candidate: (candidate.step, counts[candidate], candidate.save_id, candidate.digest),
        reverse=True,
    )


# Files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Files:
    """The numbered files of a save: the objects of each stack, then the state of each process."""

    keys: Sequence[str]
    """Path of each file, relative to the step's folder."""

    lengths: Sequence[int]

    numbers: Mapping[str, Mapping[str, int]]
    """File numbers by stack name and grid index."""

    starts: Sequence[int]
    """The number of each stack's first object, and of the first process state."""

    stacks: Sequence[StackRecord]

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        keys: list[str] = []
        lengths: list[int] = []
        starts: list[int] = []
        numbers: dict[str, dict[str, int]] = {}
        for record in manifest.stacks:
            starts.append(len(keys))
            numbers[record.name] = {index_key: number for number, index_key in enumerate(record.objects, len(keys))}
            keys += [f"{manifest.data_folder}/{record.name}/c/{index_key}" for index_key in record.objects]
            lengths += [length for length, _ in record.objects.values()]
        starts.append(len(keys))
        keys += [
            f"{manifest.data_folder}/{state_file_name(process)}" for process in range(len(manifest.process_states))
        ]
        lengths += [length for length, _ in manifest.process_states]
        return cls(keys, lengths, numbers, starts, manifest.stacks)

    def stack(self, number: int) -> int | None:
        """The stack of a file; None for a process state."""
        return None if number >= self.starts[-1] else bisect.bisect_right(self.starts, number) - 1

    def request_bytes(self, request: FileRequest) -> int:
        """Number of bytes that a request asks for."""
        stack = self.stack(request[0])
        return volume(request[1]) * (1 if stack is None else DTYPES[self.stacks[stack].dtype].itemsize)


FileRequest = tuple[int, Box]
"""The number of a file, and a box of its stack within it; for a process state, all its bytes."""


def split_request(number: int, stack: Stack, box: Box, max_bytes: int) -> Iterator[FileRequest]:
    """The requests for a box of an object, each of at most `max_bytes` or one chunk."""
    grids = stack.object, stack.chunk
    for piece in cut_down(box, grids, lambda piece: volume(piece) * stack.itemsize <= max_bytes):
        yield number, piece


def missing_files(readable: Availability, count: int) -> list[int]:
    """The files, out of this many, that no process can read."""
    return np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(readable), count=count) == 0).tolist()


def choose_sender(number: int, receiver: int, readable: Availability) -> int:
    """The process that reads a file for `receiver`: one of the next few processes that have it. The number of the file
    decides which."""
    holders = np.flatnonzero(readable[:, number // 8] & (128 >> number % 8))
    first = int(np.searchsorted(holders, receiver))
    return int(holders[(first + number % min(MAX_SENDERS, len(holders))) % len(holders)])


def requests_by_pair(
    asked: Sequence[Iterable[FileRequest]], readable: Availability
) -> dict[tuple[int, int], list[FileRequest]]:
    """What each process sends to each other one, given the requests of each process, in order."""
    by_pair: dict[tuple[int, int], list[FileRequest]] = {}
    for receiver, requests in enumerate(asked):
        for request in requests:
            by_pair.setdefault((choose_sender(request[0], receiver, readable), receiver), []).append(request)
    return by_pair
