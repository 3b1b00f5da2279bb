"""Sends streams of bytes from some processes to others, in rounds over the devices' interconnect.

each pair of processes:   parts ─▶ one stream of bytes ─▶ rounds ─▶ the same stream ─▶ parts

A round is a permutation: each process sends to at most one other and receives from at most one. The rounds follow from
the lengths of all streams. Every process takes part in all of them, even if it fails or is interrupted.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from jaxckpt._devices.interconnect import Interconnect, Pairs
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._model.pieces import Bytes, aligned_empty
from jaxckpt._save.staging import StagedObject

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
