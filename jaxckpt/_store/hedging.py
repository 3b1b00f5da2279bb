"""Reads from an object store that no slow request holds up.

A read that takes longer than 95 % of the recent reads of its size is sent once more. The first answer counts, and the
other request is canceled. Each connection, and each of a store's many servers, may be slow for a while, or never answer
("hedged requests" in Dean and Barroso, The Tail at Scale, 2013). At most 2 reads and 3 % of all are sent again, so that
a store that is slow as a whole gets hardly more requests. Writes are never sent again from here.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import tensorstore as ts

from jaxckpt._pipeline.lane_log import log
from jaxckpt._pipeline.threads import POLL_SECONDS

_Future = ts.Future[ts.KvStore.ReadResult]

_PERCENTILE = 0.95

_FLOOR_SECONDS = 0.25
"""No read is sent again before this time. Sending it earlier would not make a restore noticeably shorter."""

_FIRST_SECONDS = 2.0
"""The time after which a read is sent again until there are enough recent reads to compare it with."""

_ENOUGH_READS, _RECENT_READS = 8, 256

_FREE_REPEATS, _MOST_REPEATED = 2, 0.03

_SIMILAR = 2
"""Reads are compared with those whose sizes in bytes have about as many bits, that is, differ by at most 4 times."""


class Server:
    """How long the reads from one store take."""

    def __init__(self) -> None:
        self.n_reads = self.n_repeated = 0
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT_READS))

    def note(self, n_bytes: int, seconds: float) -> None:
        """Note how long a read took."""
        self._recent[n_bytes.bit_length() // _SIMILAR].append(seconds)

    def patience_seconds(self, n_bytes: int) -> float:
        """After how long a read is sent again."""
        recent = sorted(self._recent[n_bytes.bit_length() // _SIMILAR].copy())
        if len(recent) < _ENOUGH_READS:
            return max([_FIRST_SECONDS, *recent])
        return max(_FLOOR_SECONDS, recent[int(_PERCENTILE * len(recent))])

    def may_repeat(self) -> bool:
        return self.n_repeated < _FREE_REPEATS + _MOST_REPEATED * self.n_reads


@dataclass(frozen=True, slots=True)
class HedgedKeys:
    """The keys of a store, for reading."""

    keys: ts.KvStore

    open_spare: Callable[[], ts.KvStore]
    """Opens the same keys with a limit of its own on the requests at a time. In the other limit, requests without an
    answer count (32 on S3), even canceled ones."""

    server: Server

    def read(self, key: str, byte_range: slice | None = None, n_bytes: int = 0) -> HedgedRead:
        """Begin to read a key, or a range of its bytes. `n_bytes` is about how many, if it is known."""
        if byte_range is not None and byte_range.stop is not None:
            n_bytes = byte_range.stop - (byte_range.start or 0)
        return HedgedRead(self, key, byte_range, n_bytes)


class HedgedRead:
    """A read, which is sent again if it is late while `result` waits for it. One thread waits."""

    def __init__(self, keys: HedgedKeys, key: str, byte_range: slice | None, n_bytes: int) -> None:
        self._keys = keys
        self._key = key
        self._byte_range = byte_range
        self._n_bytes = n_bytes
        self._begun = time.monotonic()
        self._running: list[_Future] = []
        self._ended = queue.SimpleQueue[tuple[float, _Future]]()
        self._answer: _Future | None = None
        self._is_repeated = False
        keys.server.n_reads += 1
        self._send(keys.keys)

    def _send(self, keys: ts.KvStore) -> None:
        request = keys.read(self._key, byte_range=self._byte_range)
        self._running.append(request)
        put = self._ended.put
        request.add_done_callback(lambda ended: put((time.monotonic(), ended)))

    def done(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return self._answer is not None or self._ended.qsize() >= len(self._running)

    def result(self, timeout: float | None = None) -> ts.KvStore.ReadResult:
        """Wait for the first answer. Raises the error of the last request if none has an answer, and TimeoutError."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._answer is None:
            repeat_at = self._begun + self._keys.server.patience_seconds(self._n_bytes)
            now = time.monotonic()
            if now >= repeat_at and not self._is_repeated and self._keys.server.may_repeat():
                self._repeat()
            next_check = now + POLL_SECONDS if self._is_repeated or now >= repeat_at else repeat_at
            try:
                ended_at, request = self._ended.get(timeout=max(0.0, min(next_check, deadline) - now))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                continue
            self._running.remove(request)
            if request.exception() is None:
                self._keys.server.note(self._n_bytes, ended_at - self._begun)
                self.cancel()
                self._answer = request
            elif not self._running:
                self._answer = request
        return self._answer.result()

    def _repeat(self) -> None:
        """Send the read again."""
        self._is_repeated = True
        self._keys.server.n_repeated += 1
        log.log(
            logging.DEBUG, "%s: no answer after %.2f s, reading it again", self._key, time.monotonic() - self._begun
        )
        self._send(self._keys.open_spare())

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for request in self._running:
            request.cancel()
