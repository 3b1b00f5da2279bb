"""Sends each process the data that is not in its own folders, for a step in folders of several processes.

The data is sent in the order in which each process needs it:

requests of all ─▶ each batch: processes meet ─▶ streams: senders read, programs send ─▶ receivers keep the data

A batch has about as many bytes as a process may hold until it needs them. A process that cannot read its data reports
that in the next rendezvous. All processes then raise DamagedError, and none uses the data that was sent instead.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import json
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from jaxckpt._devices.interconnect import Interconnect
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.copies import Incoming, Outgoing, Pair, RoundCalls, plan_channels, plan_rounds, round_calls
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, cut_down, volume
from jaxckpt._model.manifest import state_file_name
from jaxckpt._model.pieces import Array, aligned_empty
from jaxckpt._model.records import Manifest, StackRecord
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import operate
from jaxckpt._pipeline.workers import JoinedWork
from jaxckpt._restore.read_plan import max_read_bytes
from jaxckpt.errors import JaxckptError

if TYPE_CHECKING:
    from jaxckpt._local_tier.union_source import UnionCheckpoint


# The files of a local step --------------------------------------------------------------------------------
# reports of all folders ─▶ candidates, newest first ─▶ holders of each file ─▶ requests, by sender and receiver

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
    grids = stack.object_sides, stack.chunk_sides
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


# Reads from other processes -------------------------------------------------------------------------------


class DamagedError(Exception):
    """A process could not read a file of its folders, but others may have a copy. Every process raises this."""


@contextlib.contextmanager
def arriving(
    source: UnionCheckpoint, needed: Sequence[Sequence[FileRequest]], options: Options, rendezvous: Rendezvous
) -> Generator[Iterator[None]]:
    """The arrivals of the data that each read of this process needs from others, in order. Every process."""
    peers = _PeerReads(source, needed, options, rendezvous)
    peers.agree()
    try:
        yield peers.arrivals()
    except JaxckptError:
        if source.damaged:
            peers.raise_failures()
        raise
    peers.finish()


class _PeerReads:
    """The batches of requests of all processes, from the view of one of them."""

    def __init__(
        self, source: UnionCheckpoint, needed: Sequence[Sequence[FileRequest]], options: Options, rendezvous: Rendezvous
    ) -> None:
        self._source = source
        self._options = options
        self._rendezvous = rendezvous
        self._process = rendezvous.call.index
        self._required_batches = [0] * len(needed)
        """For each read, the number of batches that must precede it."""

        self._batches: list[list[FileRequest]] = []
        """The requests of this process."""

        self._batches_by_process: list[list[list[FileRequest]]] = []
        self._n_batches_done = 0
        self._failure: Exception | None = None
        most = max_read_bytes(options.host_bytes)
        batch_bytes = most
        for read, requests in enumerate(needed):
            n_bytes = sum(map(source.files.request_bytes, requests))
            if not n_bytes:
                continue
            if not self._batches or batch_bytes + n_bytes > most:
                self._batches.append([])
                batch_bytes = 0
            self._batches[-1] += requests
            batch_bytes += n_bytes
            self._required_batches[read] = len(self._batches)

    def agree(self) -> None:
        """Exchange the requests of all processes."""
        own = zlib.compress(json.dumps(self._batches).encode(), 1) if self._batches else b""
        with self._rendezvous.call.cancellation.paused():  # once they have agreed, all processes run the program
            texts = self._rendezvous.gather(str(len(own)))
            sizes = json.loads(self._broadcast(f"[{','.join(texts)}]"))
        if any(sizes):
            gathered = _gather_texts(Interconnect(self._process), own, sizes)
            self._batches_by_process = [_decode_requests(text) if text else [] for text in gathered]

    def arrivals(self) -> Iterator[None]:
        for n_batches in self._required_batches:
            while self._n_batches_done < n_batches:
                self._run_next_batch()
            yield
        while True:  # reads of data that this process has
            yield

    def finish(self) -> None:
        """Run the batches that only other processes need. Raises the failures of all."""
        while self._n_batches_done < max(map(len, self._batches_by_process), default=0):
            self._run_next_batch()
        self.raise_failures()

    def _run_next_batch(self) -> None:
        """Send and receive the data of the next batch. Every process."""
        batch = [
            batches[self._n_batches_done] if self._n_batches_done < len(batches) else []
            for batches in self._batches_by_process
        ]
        self._n_batches_done += 1
        source, process = self._source, self._process
        by_pair = requests_by_pair(batch, source.availability)
        channels = plan_channels(sorted(by_pair))
        stream_bytes = {pair: sum(map(source.files.request_bytes, requests)) for pair, requests in by_pair.items()}
        rounds = plan_rounds(channels, stream_bytes, source.max_bytes)

        with self._rendezvous.call.cancellation.paused():  # once they have agreed, all processes run the rounds
            self.raise_failures()
        with round_calls(channels, rounds, process) as calls:
            sending = {pair: (Outgoing(), iter(requests)) for pair, requests in by_pair.items() if pair[0] == process}
            receiving = {
                pair: (Incoming(map(source.files.request_bytes, requests)), iter(requests))
                for pair, requests in by_pair.items()
                if pair[1] == process
            }
            self._run_rounds(calls, channels, sending, receiving)

    def _run_rounds(
        self,
        calls: RoundCalls,
        channels: Sequence[Sequence[Pair]],
        sending: dict[Pair, tuple[Outgoing, Iterator[FileRequest]]],
        receiving: dict[Pair, tuple[Incoming, Iterator[FileRequest]]],
    ) -> None:
        for planned in calls:
            pairs = [pair for pair in channels[planned.channel] if pair[0] in planned.senders]
            sent = None
            for pair in sending.keys() & pairs:
                outgoing, requests = sending[pair]
                for data in self._read(requests, planned.n_bytes - outgoing.waiting_bytes):
                    outgoing.add(data)
                sent = outgoing.take(planned.n_bytes)
            received = calls.run_next(sent)
            for pair in receiving.keys() & pairs:
                incoming, requests = receiving[pair]
                assert received is not None
                for data in incoming.add(received):
                    self._source.received[next(requests)] = data

    def _read(self, requests: Iterator[FileRequest], n_bytes: int) -> list[Array]:
        """Read the next requests, of at least `n_bytes` together, if there are so many."""
        targets: list[tuple[FileRequest, Array]] = []
        while n_bytes > 0 and (request := next(requests, None)) is not None:
            size = self._source.files.request_bytes(request)
            targets.append((request, aligned_empty((size,), np.dtype(np.uint8))))
            n_bytes -= size
        try:  # the others wait in a program, so any error is reported in the next rendezvous
            operate(f"reading from {self._source.url}", lambda: JoinedWork(self._source.serve(targets)).result())
        except Exception as error:
            self._failure = self._failure or error
        return [data for _, data in targets]

    def raise_failures(self) -> None:
        """Raise the error of this process's reads, if any. Raise DamagedError in all processes if a file of any of them
        could not be read."""
        if self._failure is not None and not self._source.damaged:
            raise self._failure
        damaged = "; ".join(f"{path}: {why}" for path, why in self._source.damaged.items())
        of_all = self._broadcast("; ".join(filter(None, self._rendezvous.gather(damaged))))
        if of_all:
            raise DamagedError(of_all)

    def _broadcast(self, text: str) -> str:
        """The text of process 0, after all have gathered."""
        agreed = self._rendezvous.broadcast(text)
        self._rendezvous.start_next()
        return agreed


def _gather_texts(interconnect: Interconnect, text: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The text of each process; every process receives all of them."""
    spans = {process: (0, size) for process, size in enumerate(sizes) if size}
    n_bytes = interconnect.rounded_bytes(max(sizes))
    received = interconnect.gather(spans, n_bytes, len(spans), np.frombuffer(text, np.uint8))
    return [received[process][:size].tobytes() if size else b"" for process, size in enumerate(sizes)]


def _decode_requests(text: bytes) -> list[list[FileRequest]]:
    batches: Any = json.loads(zlib.decompress(text))
    return [[(number, tuple(map(tuple, box))) for number, box in requests] for requests in batches]
