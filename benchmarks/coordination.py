"""Simulates the rendezvous of a job's processes with the library's own code and a coordination service in memory.

Counts the requests to JAX's coordination service for any number of processes. All except process 0 send the same ones.

    python benchmarks/coordination.py     # measures the real service: 8 processes send requests without a pause
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax._src import distributed

from jaxckpt._job import rendezvous as rendezvous_module
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._pipeline.watchdog import Watchdog, under

SERVICE_PER_SECOND = 7_000
"""Requests per second that JAX's coordination service answers with one core: a request takes 145 µs of process 0's CPU
time. Sharing two busy cores with 8 requesting processes, it answered 3,500."""

SERVICE_SECONDS = 330e-6
"""Latency of a request, for a single process that sends one request at a time."""

UNMET_BYTES = 14_000
"""Memory that the service holds for a request that timed out, until its key is posted (jaxlib 0.6.2, 0.10.2)."""

NETWORK_BYTES = 25e9 / 8
"""Network bandwidth of each process, in bytes per second. The service runs in process 0."""


KINDS = {
    "key_value_set": "set",
    "blocking_key_value_get": "get",
    "key_value_dir_get": "list",
    "key_value_delete": "delete",
}
"""The methods of the coordination service's client that the library calls, and the kind of request that each sends."""

CALLS = {
    "save": ("agree", "look", "publish"),
    "restore": ("open", "end"),
    "restore, shared": ("open", "round", "end"),
}
"""The rendezvous of each call, in order."""


class Service:
    """JAX's coordination service in memory, with counts of requests. It serves one process after another."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.requests = collections.Counter[str]()
        self.bytes = 0
        self.largest = 0
        self._sorted: list[str] | None = None
        self._posted = threading.Condition()

    def _count(self, kind: str, size: int) -> None:
        self.requests[kind] += 1
        self.bytes += size
        self.largest = max(self.largest, size)

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._count("set", len(value))
        with self._posted:
            self.kept[key] = value
            self._sorted = None
            self._posted.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._posted:
            if not self._posted.wait_for(lambda: key in self.kept, timeout_in_ms / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            self._count("get", len(self.kept[key]))
            return self.kept[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        found = [(name, self.kept[name]) for name in self._below(key)]
        self._count("list", sum(len(name) + len(value) for name, value in found))
        return found

    def key_value_delete(self, key: str) -> None:
        self._count("delete", 0)
        for name in self._below(key):
            del self.kept[name]
        self._sorted = None

    def _below(self, key: str) -> list[str]:
        """The keys with a prefix, found as in a sorted map, so that a request does not search 16,384 keys."""
        self._sorted = self._sorted or sorted(self.kept)
        return self._sorted[bisect.bisect_left(self._sorted, key) : bisect.bisect_left(self._sorted, key + "\x7f")]


@dataclass(frozen=True)
class RendezvousCost:
    """The cost of a rendezvous if no process is late."""

    processes: int
    by_first: collections.Counter[str]
    """Number of requests of process 0 by kind. They are sent one after the other."""

    by_other: collections.Counter[str]
    """Number of requests of each other process, by kind."""

    bytes: int
    """Bytes of all messages."""

    largest: int
    """Bytes of the largest message."""

    given_bytes: int
    """Bytes of the text that process 1 sends to `gather`."""

    @property
    def first(self) -> int:
        return self.by_first.total()

    @property
    def requests(self) -> int:
        """Requests of all processes."""
        return self.first + self.by_other.total() * (self.processes - 1)

    @property
    def seconds(self) -> float:
        """The estimated duration: process 0's own requests or the service's total work, plus the transfers."""
        served = self.requests / SERVICE_PER_SECOND
        return max(served, self.first * SERVICE_SECONDS) + self.bytes / NETWORK_BYTES


@contextlib.contextmanager
def meeting(call: Call) -> Generator[Rendezvous]:
    """The next rendezvous of a call, as in a lane."""
    with under(call.watchdog), call.rendezvous("simulated") as rendezvous:
        yield rendezvous


def call_of(index: int, count: int, service: Any, *, first: bool) -> Call:
    """A call in one process: before its first rendezvous, or before a later one."""
    call = Call("save", "s3://checkpoints/1234abcd", Watchdog(300.0), None, 0, index, count, service, "jaxckpt/0")
    call.n_rendezvous = 0 if first else 1
    if first:  # the processes have left an earlier call, whose keys process 0 then deletes
        call.departures.add("jaxckpt/9/9")
    return call


def meet(count: int, given: Callable[[int], str], shared: str, *, first: bool = False) -> RendezvousCost:
    """Simulate a rendezvous: each process sends its own text, and process 0 sends `shared` to all."""
    service = Service()

    def process(index: int) -> Call:
        return call_of(index, count, service, first=first)

    by_other, given_bytes = collections.Counter[str](), 0
    for index in range(1, count):
        with meeting(process(index)) as rendezvous:
            rendezvous.gather(given(index))
        if index == 1:
            by_other, given_bytes = service.requests.copy(), service.bytes
    before = service.requests.copy()
    with meeting(process(0)) as rendezvous:
        assert rendezvous.gather(given(0)) == [given(index) for index in range(count)]
        rendezvous.broadcast(shared)
    by_first, before = service.requests - before, service.requests.copy()
    moved = service.bytes
    with meeting(process(1)) as rendezvous:
        rendezvous.broadcast(shared)
    by_other += service.requests - before
    all_bytes = service.bytes + (service.bytes - moved) * (count - 2)
    return RendezvousCost(count, by_first, by_other, all_bytes, service.largest, given_bytes)


class Clock(Service):
    """The service as a process that waits for process 0 sees it: `posted` gives the time at which each key appears."""

    def __init__(self, posted: Mapping[str, tuple[float, str]]) -> None:
        super().__init__()
        self.posted = posted
        self.now = 0.0
        self.unmet: dict[str, int] = {}
        """Number of timed-out requests that the service still holds, by key."""

        self.most_unmet = 0

    def awake_seconds(self) -> float:
        return self.now

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self.requests["get"] += 1
        at, text = next((found for end, found in self.posted.items() if key.endswith(end)), (math.inf, ""))
        if at > self.now + timeout_in_ms / 1000:
            self.now += timeout_in_ms / 1000
            self.unmet[key] = self.unmet.get(key, 0) + 1
            left = (count for name, count in self.unmet.items() if self.posted[_end(name)][0] > self.now)
            self.most_unmet = max(self.most_unmet, sum(left))
            raise RuntimeError("DEADLINE_EXCEEDED")
        self.now = max(self.now, at)
        return text


def _end(key: str) -> str:
    return "/" + "/".join(key.rsplit("/", 2)[1:])


def wait(count: int, seconds: float) -> tuple[float, float]:
    """The cost of waiting for process 0, such as for the slowest write of a save: requests of all processes per second,
    and the most bytes that pending requests keep in the service."""
    interval = min(max(5.0, count / 2000), 15.0)
    beats = int(seconds / interval)
    posted = {f"/out/{beat}": (beat * interval, '{"beat": 1}') for beat in range(1, beats + 1)}
    posted[f"/out/{beats + 1}"] = posted["/out/0"] = seconds, '{"ok": ""}'
    posted["/beat/0"] = interval, "1"
    clock = Clock(posted)
    usual, rendezvous_module.awake_seconds = rendezvous_module.awake_seconds, clock.awake_seconds
    try:
        with meeting(call_of(1, count, clock, first=False)) as rendezvous:
            rendezvous.broadcast("")
    finally:
        rendezvous_module.awake_seconds = usual
    return count * clock.requests["get"] / seconds, count * clock.most_unmet * UNMET_BYTES


# The service itself ---------------------------------------------------------------------------------------

ASKING, TIMES = 8, 2_000


def ask(process: int, address: str) -> None:
    """One of the processes that send requests."""
    distributed.global_state.initialize(address, ASKING, process, initialization_timeout=60)
    client: Any = distributed.global_state.client

    def measured(what: str, work: Callable[[int], object]) -> None:
        client.wait_at_barrier(f"{what} begins", 60_000)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        for number in range(TIMES):
            work(number)
        client.wait_at_barrier(f"{what} ends", 120_000)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
        if process == 0:
            each = cpu / (ASKING * TIMES) * 1e6
            print(f"{what}: {ASKING * TIMES / seconds:,.0f} per second, {each:.0f} µs of process 0's CPU time each")

    def unmet(_: int) -> None:
        if process:
            with contextlib.suppress(Exception):
                client.blocking_key_value_get("never posted", 1)

    measured("sets", lambda number: client.key_value_set(f"{process}/{number}", "x" * 80))
    measured("gets", lambda number: client.blocking_key_value_get(f"{process}/{number}", 10_000))
    before = resident_bytes()
    measured("gets of missing keys", unmet)
    if process == 0:
        print(f"{(resident_bytes() - before) / (ASKING - 1) / TIMES:,.0f} bytes of process 0's memory for each")
        begun = time.perf_counter()
        for number in range(TIMES):
            client.blocking_key_value_get(f"0/{number}", 10_000)
        print(f"one process alone: {(time.perf_counter() - begun) / TIMES * 1e6:.0f} µs per get")
    client.wait_at_barrier("all", 120_000)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    if sys.argv[1:]:
        ask(int(sys.argv[1]), sys.argv[2])
        return
    address = f"127.0.0.1:{random.SystemRandom().randrange(20_000, 32_000)}"
    children = [subprocess.Popen([sys.executable, __file__, str(process), address]) for process in range(ASKING)]
    for child in children:
        child.wait(timeout=300)


if __name__ == "__main__":
    main()
