"""Whether the job has been preempted: SIGTERM in one process, JAX's preemption service among several."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxckpt._runtime.job import Job, connected_job
from jaxckpt._save.background import lift_limits

_log = logging.getLogger("jaxckpt")

_MAX_ADVANCE = 1000
"""How many numbers JAX is asked about for one step, at most."""


class PreemptionListener:
    """Whether the job has been preempted.

    A single process listens for SIGTERM. In a job of several processes, JAX's preemption service forwards the signal of
    any process, and makes all of them stop at the same step: https://docs.jax.dev, jax.experimental.multihost_utils.
    """

    def __init__(self, processes: int, grace_seconds: float) -> None:
        """`processes` is their number in the job. The last save may take `grace_seconds` after the notice."""
        self._processes = processes
        self._listener_pid = 0
        self._grace_seconds = grace_seconds
        self._notified_at = 0.0  # on the monotonic clock
        self.is_notified = False
        """Whether this process was notified of a preemption."""

        self._listening = False
        self._closed = False
        self._replaced_handler: Any = None

    def _listen(self) -> None:
        if self._processes > 1:
            _listeners.add(self)
            if not getattr(jax.config, "jax_enable_preemption_service", True):
                _log.warning(
                    "jax_enable_preemption_service is off: a process is not notified when another is preempted"
                )
        elif threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGTERM)
            if before != self._on_signal:  # equal if an interrupt ended an earlier call right after `signal.signal`
                self._replaced_handler, self._listener_pid = before, os.getpid()
                signal.signal(signal.SIGTERM, self._on_signal)
        else:
            _log.warning(
                "the first save of a Checkpointer runs outside the main thread, so it cannot listen for SIGTERM: no"
                " last step is saved if this job is preempted"
            )
        self._listening = True

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._listener_pid:
            self._closed = True  # the signal is for a fork, such as a worker of a pool, and not for the job
        closed, previous = self._closed, self._previous_handler()
        self._note_notice()
        self.close()  # a second signal has its previous effect
        if callable(previous):
            previous(number, frame)
        elif closed and previous == signal.SIG_DFL:  # another handler passed the signal on to this closed one
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _previous_handler(self) -> Any:
        """The previous signal handler, skipping closed handlers of this class; None if it is not Python's."""
        previous = self._replaced_handler
        while isinstance(owner := getattr(previous, "__self__", None), PreemptionListener) and owner._closed:
            previous = owner._replaced_handler
        return signal.SIG_DFL if previous is None else previous

    def is_last_step(self, step: int) -> bool:
        """Whether to stop at this step. The first call starts to listen."""
        if not self._listening:
            self._listen()
        if self._processes > 1 and not self.is_notified and _is_sync_point(step):
            for listener in [*_listeners]:  # JAX reports it only once
                listener._note_notice()
        return self.is_notified

    def _note_notice(self) -> None:
        self.is_notified, self._notified_at = True, time.monotonic()
        lift_limits()

    @property
    def deadline(self) -> float:
        """The deadline of the last save, on the monotonic clock."""
        return self._notified_at + self._grace_seconds

    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def close(self) -> None:
        """Stop listening."""
        is_installed = not self._closed and signal.getsignal(signal.SIGTERM) == self._on_signal
        # Another thread cannot install a handler. This one then stays, and passes the signal on to the previous one.
        if is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler())
        self._closed = True


# Several processes ----------------------------------------------------------------------------------------

_listeners = weakref.WeakSet[PreemptionListener]()
"""Those of this process that JAX's preemption service notifies."""


class _Queries:
    """What this process has asked JAX in its present job."""

    def __init__(self, job: Job | None) -> None:
        self.job = job
        self.last_step: int | None = None
        self.last_number = 0
        """The last number that JAX was asked about for this step."""


_queries = _Queries(None)


def _is_sync_point(step: int) -> bool:
    """Whether JAX makes all processes stop at this step; never if its preemption service is off."""
    try:
        return any(map(multihost_utils.reached_preemption_sync_point, _next_numbers(step)))
    except RuntimeError:
        return False


def _next_numbers(step: int) -> Iterator[int]:
    """The numbers to ask JAX about at this step, after those of the previous step of any listener.

    At a notice, JAX chooses the number after the largest one that any process has asked about last, or 1. It must then
    be asked about exactly this one. So the numbers begin at 1, never decrease and leave none out, even if the loop
    counts in tens or goes back, or if two Checkpointers take turns. They are the same in all processes, because these
    save the same steps.
    """
    global _queries
    job = connected_job()
    if _queries.job is not job:
        _queries = _Queries(job)
    asked = _queries
    advance = 1 if asked.last_step is None else step - asked.last_step
    if not 0 <= advance <= _MAX_ADVANCE:
        advance = 1
    first = asked.last_number + min(1, advance)
    asked.last_step, asked.last_number = step, asked.last_number + advance
    for number in range(first, asked.last_number + 1):
        yield number & 0x7FFFFFFF  # JAX accepts 31 bits
