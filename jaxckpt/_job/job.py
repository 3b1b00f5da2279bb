"""This process's place in the job to which JAX connected it.

Processes are numbered as by `jax.process_index()` and `device.process_index`. On TPUs, the `process_id` with which
`jax.distributed.initialize` connected a process may be another number, because libtpu numbers the processes itself.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import jax

# JAX has no public API for the coordination service, nor for whether a backend was started. Orbax and Flax use the
# first of these too.
from jax._src import distributed, xla_bridge

from jaxckpt._pipeline.threads import Task, start_thread
from jaxckpt.errors import InputError

_MAX_COUNTS = 1000
"""How many counts are kept: of the calls of one kind, such as the saves to one path, or of processes."""


class Departures:
    """The rendezvous that each process has left. When all have left one, process 0 deletes what was posted there.

    Each process reports its own departures with the next text that it sends to process 0, of any call. Any thread may
    use this.
    """

    def __init__(self) -> None:
        self._unreported: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        """In process 0: how many processes have left a rendezvous, by its key. What a process that skipped a call would
        have left stays here, and is forgotten at some time."""

    def add(self, *keys: str) -> None:
        """Note that this process has left these rendezvous."""
        self._unreported.update(dict.fromkeys(keys))

    def report(self) -> list[str]:
        """The rendezvous that this process has left, and has not reported."""
        keys = list(self._unreported)
        for key in keys:
            self._unreported.pop(key, None)
        return keys

    def forget(self, key: str) -> None:
        """Note that what was posted in a rendezvous is deleted, so that its departures need not be known."""
        self._unreported.pop(key, None)
        self._counts.pop(key, None)

    def left_by_all(self, reports: Iterable[Iterable[str]], processes: int) -> list[str]:
        """The rendezvous that all processes have left, with these reports. Only process 0 calls this."""
        complete: list[str] = []
        for key in itertools.chain.from_iterable(reports):
            self._counts[key] = self._counts.pop(key, 0) + 1
            if self._counts[key] == processes:
                self.forget(key)
                complete.append(key)
        for forgotten in list(self._counts)[:-_MAX_COUNTS]:
            self._counts.pop(forgotten, None)
        return complete


_PREEMPTION_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
"""The key of JAX's preemption service."""

_ANSWER_SECONDS = 2.0


class Job:
    """The job, and the calls that this process has made since it was connected."""

    def __init__(self, state: Any) -> None:
        """Starts JAX's backend, which all processes do together. Raises InputError if its processes are not those of
        the job."""
        self.client = state.client
        """The client of JAX's coordination service."""

        self.index = jax.process_index()
        self.count: int = state.num_processes
        if jax.process_count() != self.count:
            raise InputError(
                f"jax.distributed.initialize connected {self.count} processes, but JAX's default devices belong to"
                f" {jax.process_count()}: call it in exactly the processes that share devices"
            )
        self.runs_service = state.service is not None
        """Whether the service runs in this process."""

        self.has_preemption_service = getattr(state, "preemption_sync_manager", None) is not None
        self.departures = Departures()
        self._calls = itertools.count()
        self._counts: dict[Hashable, int] = {}

    def post_preemption_notice(self) -> None:
        """Notify JAX's preemption service in all processes, as it does itself after SIGTERM.

        For a process in which Python's handler of SIGTERM has replaced the service's. Does nothing if another process
        was faster, or if the service is off.
        """
        with contextlib.suppress(RuntimeError):
            now = datetime.datetime.now(datetime.UTC).isoformat()
            self.client.key_value_set(_PREEMPTION_NOTICE, now)

    def has_preemption_notice(self, seconds: float) -> bool:
        """Whether JAX's preemption service has notified the job, or does within some seconds. It forwards a signal up
        to a second late. False if the service does not answer."""
        task = Task(functools.partial(self.client.blocking_key_value_get, _PREEMPTION_NOTICE, int(1000 * seconds)))
        try:
            start_thread(task.run, "jaxckpt-preemption")
            return bool(task.result(seconds + _ANSWER_SECONDS))
        except Exception:  # there is no notice
            return False

    def count_call(self, kind: Hashable) -> tuple[int, int]:
        """Count a call. Returns the number of earlier calls, and of earlier calls of this kind.

        The counts of kinds that were not called for long are forgotten; they only serve messages.
        """
        n_alike = self._counts.pop(kind, 0)
        self._counts[kind] = n_alike + 1  # the last one now
        for forgotten in list(self._counts)[:-_MAX_COUNTS]:
            self._counts.pop(forgotten, None)
        return next(self._calls), n_alike


_job: Job | None = None


def connected_job() -> Job | None:
    """The job of this process; None if it is the only process.

    A process that is not connected never needs JAX's backend, so this does not start it. Raises InputError if JAX has
    devices of several processes that are not connected.
    """
    global _job
    state: Any = distributed.global_state
    if state.client is None:
        if xla_bridge.backends_are_initialized() and jax.process_count() > 1:  # as on the hosts of a TPU slice
            raise InputError(
                f"JAX has devices of {jax.process_count()} processes, but the processes are not connected: call"
                " jax.distributed.initialize() in each of them, before anything that uses devices"
            )
        return None
    if _job is None or _job.client is not state.client:
        # Calls before jax.distributed.initialize, or in an earlier job of this process, do not count in this job.
        _job = Job(state)
    return _job
