"""This process's place in the job to which JAX connected it.

Processes are numbered as by `jax.process_index()` and `device.process_index`. On TPUs, the `process_id` with which
`jax.distributed.initialize` connected a process may be another number, because libtpu numbers the processes itself.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import itertools
from collections.abc import Hashable
from typing import Any

import jax

# JAX has no public API for the coordination service, nor for whether a backend was started. Orbax and Flax use the
# first of these too.
from jax._src import distributed, xla_bridge

from jaxckpt.errors import InputError


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
        self._calls = itertools.count()
        self._counts = collections.Counter[Hashable]()

    def post_preemption_notice(self) -> None:
        """Notify JAX's preemption service in all processes, as it does itself after SIGTERM.

        For a process in which Python's handler of SIGTERM has replaced the service's. Does nothing if another process
        was faster, or if the service is off.
        """
        with contextlib.suppress(RuntimeError):
            now = datetime.datetime.now(datetime.UTC).isoformat()
            self.client.key_value_set("RECEIVED_PREEMPTION_NOTICE", now)

    def count_call(self, kind: Hashable) -> tuple[int, int]:
        """Count a call. Returns the number of earlier calls, and of earlier calls of this kind."""
        self._counts[kind] += 1
        return next(self._calls), self._counts[kind] - 1


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
