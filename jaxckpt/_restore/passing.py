"""Sends each process the data that is not in its own folders, for a checkpoint in folders of several processes.

The data is sent in the order in which each process needs it:

requests of all ─▶ each round: processes meet ─▶ each hop: senders read ─▶ a program sends the data ─▶ receivers keep it

A round has about as many bytes as a process may hold until it needs them. A process that cannot read its data reports
that in the next meeting. All processes then raise DamagedError, and none uses the data that was sent instead.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Meeting
from jaxckpt._model.pieces import Bytes
from jaxckpt._options import Options
from jaxckpt._pipeline.workers import JoinedWork, StorageThread
from jaxckpt._restore.pooled import DamagedError, PooledCheckpoint
from jaxckpt._restore.read_loop import aligned_empty, reads_of
from jaxckpt._restore.read_plan import ReadStep, max_read_bytes
from jaxckpt._restore.shared_exchange import Interconnect
from jaxckpt._restore.shared_reads import Transfer
from jaxckpt._restore.surviving import FileRequest, Hop, plan_hops
from jaxckpt._save.peers import Permutations, rounded_bytes
from jaxckpt._sources.source import Source
from jaxckpt.errors import JaxckptError

T = TypeVar("T")


class PeerReads:
    """The data that this process needs, in order. Every process creates one and enters it."""

    def __init__(
        self, source: PooledCheckpoint, needed: Sequence[Sequence[FileRequest]], options: Options, meeting: Meeting
    ) -> None:
        """`needed` has the missing data for each read of this process, in order."""
        self._source = source
        self._options = options
        self._meeting = meeting
        self._process = meeting.group.index
        self._required_rounds = [0] * len(needed)
        """For each read, the number of rounds that must precede it."""

        self._rounds: list[list[FileRequest]] = []
        self._n_rounds_done = 0
        held = max_read_bytes(options.host_bytes)
        for read, asked in enumerate(needed):
            size = sum(map(source.files.request_bytes, asked))
            if size and (not self._rounds or held + size > max_read_bytes(options.host_bytes)):
                self._rounds.append([])
                held = 0
            if size:
                self._rounds[-1] += asked
                held += size
            self._required_rounds[read] = len(self._rounds) if size else 0
        self._permutations: Permutations | None = None
        self._rounds_by_process: list[list[list[FileRequest]]] = []
        self._failure: Exception | None = None
        self.sent_bytes = 0
        """Bytes that this process has sent to others, including padding."""

        self.received_bytes = 0
        """Bytes that it has requested from others."""

    def __enter__(self) -> PeerReads:
        asked = zlib.compress(json.dumps(self._rounds).encode(), 1) if self._rounds else b""
        everyone = tuple(range(self._meeting.group.count))

        def agree() -> list[list[int]]:
            sizes = json.loads(self._gather_merged(json.dumps(len(asked)), lambda texts: f"[{','.join(texts)}]"))
            return [sizes] if any(sizes) else []

        def exchange(sizes: list[int], _: object) -> list[bytes]:
            return _all_gather_bytes(Interconnect((everyone,), self._process), asked, sizes)

        with CollectiveCalls[list[int], list[bytes]]((), exchange) as calls:
            calls.extend(agree)
            for _ in calls:
                self._rounds_by_process = [_decode_requests(text) if text else [] for text in calls.run_next()]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            while self._n_rounds_done < max(map(len, self._rounds_by_process), default=0):
                self._run_next_round()
        if error is None or (self._source.damaged and isinstance(error, JaxckptError)):
            self._raise_failures()

    def as_data_arrives(self, reads: Iterable[T]) -> Iterator[T]:
        """The reads of this process, each after the data that it needs has arrived."""
        for read, rounds in zip(reads, self._required_rounds, strict=True):
            while self._n_rounds_done < rounds:
                self._run_next_round()
            yield read

    def _run_next_round(self) -> None:
        """Run the next round. Every process."""
        if self._permutations is None:
            self._permutations = Permutations(self._process)
        run, source = self._permutations.run, self._source
        now = [
            rounds[self._n_rounds_done] if self._n_rounds_done < len(rounds) else []
            for rounds in self._rounds_by_process
        ]
        self._n_rounds_done += 1

        def agree() -> list[Hop]:
            self._raise_failures()
            return plan_hops(now, source.availability, source.files.request_bytes, source.max_bytes)

        with (
            StorageThread(self._options.timeout_seconds) as aside,
            CollectiveCalls[Hop, Bytes | None]((), lambda hop, own: run(tuple(hop), _sent_bytes(hop), own)) as calls,
        ):
            calls.extend(agree)
            for hop in calls:
                self._receive(hop, calls.run_next(self._read(hop, aside)))

    def _read(self, hop: Hop, aside: StorageThread) -> Bytes | None:
        """The data that this process sends, if any."""
        own: Bytes | None = None
        for (sender, _), parcel in hop.items():
            if sender == self._process:
                own = aligned_empty((_sent_bytes(hop),), np.dtype(np.uint8))
                self.sent_bytes += len(own)
                wanted = [(request, own[start : start + size]) for request, start, size in parcel.requests]
                try:  # the others wait in a program, so any error is reported in the next meeting
                    aside.run(
                        f"reading from {self._source.url}", lambda w=wanted: JoinedWork(self._source.serve(w)).result()
                    )
                except Exception as error:
                    self._failure = self._failure or error
        return own

    def _receive(self, hop: Hop, got: Bytes | None) -> None:
        """Keep the data that was sent to this process, if any."""
        for (_, receiver), parcel in hop.items():
            if receiver == self._process and got is not None:
                for request, start, size in parcel.requests:
                    self.received_bytes += size
                    self._source.received[request] = got[start : start + size]

    def _raise_failures(self) -> None:
        """Raise the error of this process's reads, if any. Raise DamagedError in all processes if a file of any of them
        could not be read."""
        if self._failure is not None and not self._source.damaged:
            raise self._failure
        damaged = "; ".join(f"{path}: {why}" for path, why in self._source.damaged.items())
        found = self._gather_merged(damaged, lambda texts: "; ".join(filter(None, texts)))
        if found:
            raise DamagedError(found)

    def _gather_merged(self, text: str, merge: Callable[[list[str]], str]) -> str:
        """The texts of all processes, merged by process 0."""
        texts = self._meeting.gather(text)
        agreed = self._meeting.broadcast(merge(texts) if texts else "")
        self._meeting.start_next()
        return agreed


def _sent_bytes(hop: Hop) -> int:
    """Bytes that each process sends in a hop."""
    return rounded_bytes(max(parcel.n_bytes for parcel in hop.values()))


def requests_by_read(source: Source, steps: Sequence[ReadStep]) -> list[list[FileRequest]]:
    """The requests for data that a process lacks, for each of its reads. All are empty if the checkpoint is read
    through rules: then every process must see all files."""
    return [
        source.missing_requests(source.manifest.stacks[step.stack], read.boxes)
        if isinstance(source, PooledCheckpoint)
        else []
        for step, read in reads_of(steps)
    ]


def _all_gather_bytes(interconnect: Interconnect, text: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The data from each process; every process receives all of it."""
    own = np.frombuffer(text, np.uint8)
    piece = Transfer([], {process: (0, size) for process, size in enumerate(sizes) if size})
    found = interconnect.gather(piece, (interconnect.sent_bytes(piece), len(piece.spans)), own)
    return [found[process][:size].tobytes() if size else b"" for process, size in enumerate(sizes)]


def _decode_requests(text: bytes) -> list[list[FileRequest]]:
    rounds: Any = json.loads(zlib.decompress(text))
    return [[(number, tuple(map(tuple, box))) for number, box in asked] for asked in rounds]
