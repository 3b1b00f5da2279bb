"""Reads from an object store that no slow request holds up.

A read that takes longer than 95 % of the recent reads of its size is sent once more. The first answer counts, and the
other request is canceled. Each connection, and each of a store's many servers, may be slow for a while, or never answer
("hedged requests" in Dean and Barroso, The Tail at Scale, 2013). At most 3 % of the reads are sent again, and a few at
the start, so that a store that is slow as a whole gets hardly more requests. Writes are never sent again from here.

tensorstore reads parts of objects itself. Those requests are not among these: they are retried after 30 s without data.
"""

from __future__ import annotations

import errno
import functools
import math
import queue
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import tensorstore as ts

from jaxckpt._pipeline.progress import log
from jaxckpt._pipeline.threads import POLL_SECONDS
from jaxckpt._pipeline.watchdog import current_watchdog
from jaxckpt.errors import StorageError

_Future = ts.Future[ts.KvStore.ReadResult]

_PERCENTILE, _MARGIN = 0.95, 2.0
"""A read is late after the margin times the percentile. Without a margin, 5 % of the reads of a healthy store would be
late, and none could be sent again once a connection really hangs."""

_FLOOR_SECONDS = 0.25
"""No read is late before this time. Sending it again earlier would not make a restore noticeably shorter."""

_FIRST_SECONDS, _FIRST_BYTES_PER_SECOND = 1.0, 20e6
"""A read is late after this time, and the time for its bytes, until there are enough recent reads of its size."""

_ENOUGH_READS, _RECENT_READS = 8, 256

_REPEATS_PER_READ, _FIRST_REPEATS, _MOST_REPEATS = 0.03, 2.0, 8.0
"""How many reads may be sent again: for each read, at the start, and at most at once when a store becomes slow."""

_VERY_LATE, _MORE_REPEATS = 10, 4.0
"""A read that takes this many times as long as a late one may also use some repeats of later reads. On a busy machine,
reads that only seem late may have used all others, and a connection without an answer takes 30 s."""

_SIMILAR = 2
"""Reads are compared with those whose sizes in bytes have about as many bits, that is, differ by at most 4 times."""


class Server:
    """The reads from one store. Any lane, and any thread of tensorstore, may use this. It needs no lock, because each
    step that must not be interrupted is one call of C code."""

    def __init__(self, most_running: int) -> None:
        """`most_running`: how many reads run at a time. If tensorstore did the waiting, it would count as time without
        an answer."""
        self.generation = 0
        """Changes when reads were abandoned: tensorstore counts their requests for up to 30 s, even canceled ones."""

        self.most_running = most_running
        self._free_places = [None] * most_running
        self._waiting = deque[weakref.ref[HedgedRead]]()
        self._repeats = _FIRST_REPEATS
        self._taken = set[weakref.ref[_Place]]()
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT_READS))

    def add(self, read: HedgedRead) -> None:
        """Send a read as soon as it may run, unless it is dropped before."""
        self._repeats = min(_MOST_REPEATS, self._repeats + _REPEATS_PER_READ)
        self._waiting.append(weakref.ref(read))
        self.send_next()

    def send_next(self) -> None:
        """Send the reads that wait, as long as more may run."""
        while self._waiting:
            try:
                self._free_places.pop()
            except IndexError:
                places = [place for ref in self._taken.copy() if (place := ref()) is not None]
                if not sum(place.leave_if_abandoned() for place in places):
                    return
                continue
            try:
                read = self._waiting.popleft()()
            except IndexError:  # another thread was faster
                read = None
            if read is None or read.is_abandoned:
                self.free_place()
            else:
                place = _Place(self, read)
                self._taken.add(weakref.ref(place, self._taken.discard))
                read.send(place)

    def free_place(self) -> None:
        self._free_places.append(None)

    def note(self, n_bytes: int, seconds: float) -> None:
        """Note how long a read took."""
        self._recent[n_bytes.bit_length() // _SIMILAR].append(seconds)

    def patience_seconds(self, n_bytes: int) -> float:
        """After how long a read is late."""
        recent = sorted(self._recent[n_bytes.bit_length() // _SIMILAR].copy())
        if len(recent) < _ENOUGH_READS:
            return max([_FIRST_SECONDS + n_bytes / _FIRST_BYTES_PER_SECOND, *recent])
        return max(_FLOOR_SECONDS, _MARGIN * recent[int(_PERCENTILE * len(recent))])

    def may_repeat(self, is_very_late: bool) -> bool:
        """Whether one more read may be sent again. If so, counts it."""
        may = self._repeats >= (1 - _MORE_REPEATS if is_very_late else 1)
        self._repeats -= may
        return may


class _Place:
    """The place of one of the reads that run at a time. Left when its read has ended, is sent again, is dropped, or
    belongs to an abandoned call, whose threads and errors may hold it for long."""

    def __init__(self, server: Server, read: HedgedRead) -> None:
        self._servers = [server]
        self._read = weakref.ref(read)

    def leave(self) -> bool:
        """Returns whether it was not left before."""
        try:
            server = self._servers.pop()
        except IndexError:
            return False
        server.free_place()
        server.send_next()
        return True

    def leave_if_abandoned(self) -> bool:
        read = self._read()
        if read is None or not read.is_abandoned:
            return False
        read.drop()
        return self.leave()

    __del__ = leave


@dataclass(frozen=True, slots=True)
class HedgedKeys:
    """The keys of a store, for reading."""

    open: Callable[[], ts.KvStore]
    """Opens the keys."""

    open_spare: Callable[[], ts.KvStore]
    """Opens the same keys with a limit of its own on the requests at a time. In the other limit, requests without an
    answer count, even canceled ones."""

    server: Server

    def read(self, key: str, byte_range: slice | None = None, n_bytes: int = 0) -> HedgedRead:
        """Begin to read a key, or a range of its bytes. `n_bytes` is about how many, if it is known."""
        if byte_range is not None and byte_range.stop is not None:
            n_bytes = byte_range.stop - (byte_range.start or 0)
        read = HedgedRead(self, key, byte_range, n_bytes)
        self.server.add(read)
        return read


class HedgedRead:
    """A read, which is sent again if it is late while `result` waits for it. One thread waits."""

    def __init__(self, keys: HedgedKeys, key: str, byte_range: slice | None, n_bytes: int) -> None:
        self._keys = keys
        self._key = key
        self._byte_range = byte_range
        self._n_bytes = n_bytes
        self._watchdog = current_watchdog()
        self._sent_at = math.inf
        self._place: _Place | None = None
        self._running: list[_Future] = []
        self._ended = queue.SimpleQueue[tuple[float, _Future]]()
        self._answer: _Future | None = None
        self._is_repeated = False

    @property
    def is_abandoned(self) -> bool:
        """Whether nothing waits any more for the call that reads."""
        return self._watchdog is not None and self._watchdog.is_abandoned

    def send(self, place: _Place) -> None:
        """Send the read for the first time."""
        self._place = place
        self._sent_at = time.monotonic()
        self._request(self._keys.open, place)

    def _request(self, open_keys: Callable[[], ts.KvStore], place: _Place) -> None:
        try:
            request = open_keys().read(self._key, byte_range=self._byte_range)
        except Exception as error:  # this may be a thread of tensorstore
            promise, request = ts.Promise[ts.KvStore.ReadResult].new()
            promise.set_exception(error)
        self._running.append(request)
        request.add_done_callback(functools.partial(_note_end, self._ended.put, place))

    def done(self) -> bool:
        """Whether an answer has come."""
        return self._answer is not None or not self._ended.empty()

    def result(self, timeout: float | None = None) -> ts.KvStore.ReadResult:
        """Wait for the first answer. Raises the error of the last request if none has an answer, and TimeoutError."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._answer is None:
            if self.is_abandoned:
                self.drop()
                raise StorageError(errno.EINTR, "nothing waits for this any more")
            if self._place is None and not self._is_repeated:
                self._keys.server.send_next()  # other reads may have been abandoned
            now, server = time.monotonic(), self._keys.server
            patience = server.patience_seconds(self._n_bytes)
            late_at = self._sent_at + patience
            is_late = late_at <= now and not self._is_repeated
            if is_late and self._ended.empty() and server.may_repeat(now > self._sent_at + _VERY_LATE * patience):
                self._repeat()
            wait = min(deadline - now, POLL_SECONDS, late_at - now if late_at > now else math.inf)
            try:
                ended_at, request = self._ended.get(timeout=max(0.0, wait))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                continue
            self._running.remove(request)
            if request.exception() is None:
                server.note(self._n_bytes, ended_at - self._sent_at)
                self.cancel()
                self._answer = request
            elif not (self._running or self.is_abandoned):
                self._answer = request
        return self._answer.result()

    def _repeat(self) -> None:
        """Send the read again. The first request is written off, so it leaves its place to another read."""
        self._is_repeated = True
        seconds = time.monotonic() - self._sent_at
        log.debug("%s: no answer after %.2f s, reading it again", self._key, seconds)
        place, self._place = self._place, None
        assert place is not None
        self._request(self._keys.open_spare, place)
        place.leave()

    def cancel(self) -> None:
        """Cancel the requests that have not ended."""
        for request in self._running:
            request.cancel()

    def drop(self) -> None:
        """Cancel a read that nothing waits for."""
        if self._running and self._answer is None:
            self._keys.server.generation += 1
        self.cancel()

    __del__ = drop


def _note_end(put: Callable[[tuple[float, _Future]], None], place: _Place, request: _Future) -> None:
    """In a thread of tensorstore. Does not refer to the read, so that a read which nothing waits for can be dropped."""
    put((time.monotonic(), request))
    place.leave()
