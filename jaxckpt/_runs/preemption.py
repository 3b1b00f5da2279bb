"""Whether the job has been preempted: SIGTERM in one process, JAX's preemption service among several."""

from __future__ import annotations

import ctypes
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

from jaxckpt._job.job import Job, connected_job
from jaxckpt._pipeline.threads import start_thread
from jaxckpt._save.running_saves import lift_limits

_log = logging.getLogger("jaxckpt")

_MAX_ADVANCE = 1000
"""How many numbers JAX is asked about for one step, at most."""


class PreemptionListener:
    """Whether the job has been preempted.

    A single process listens for SIGTERM. In a job of several processes, JAX's preemption service forwards the signal of
    any process, and makes all of them stop at the same step: https://docs.jax.dev, jax.experimental.multihost_utils.
    A process listens there too if the program has replaced JAX's handler of SIGTERM, and notifies the service.

    An earlier handler is called at once. If it raises, as sys.exit does, the exception must not end the program before
    the last step is saved, so it is raised after that.
    """

    def __init__(self, processes: int, grace_seconds: float) -> None:
        """`processes` is their number in the job. The last save may take `grace_seconds` after the notice."""
        self._processes = processes
        self._listener_pid = 0
        self._grace_seconds = grace_seconds
        self._notified_at = 0.0  # on the monotonic clock
        self.is_notified = False
        """Whether this process was notified of a preemption."""

        self._earlier_error: BaseException | None = None
        """What an earlier handler of SIGTERM has raised."""

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
            if _has_replaced_handler_of_jax():
                self._install()
        elif threading.current_thread() is threading.main_thread():
            self._install()
        else:
            _log.warning(
                "the first save of a Checkpointer runs outside the main thread, so it cannot listen for SIGTERM: no"
                " last step is saved if this job is preempted"
            )
        self._listening = True

    def _install(self) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if before != self._on_signal:  # equal if an interrupt ended an earlier call right after `signal.signal`
            self._replaced_handler, self._listener_pid = before, os.getpid()
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._listener_pid:
            self._closed = True  # the signal is for a fork, such as a worker of a pool, and not for the job
        closed, previous = self._closed, self._previous_handler()
        if self._processes == 1:
            self._note_notice()
        elif not closed and (job := connected_job()) is not None:
            start_thread(job.post_preemption_notice, "jaxckpt-preemption")  # JAX then chooses the last step
        self.close()  # a second signal has its previous effect
        if callable(previous):
            try:
                previous(number, frame)
            except BaseException as error:
                if closed:
                    raise
                self._earlier_error = error
            if isinstance(earlier := getattr(previous, "__self__", None), PreemptionListener):
                self._earlier_error = self._earlier_error or earlier._earlier_error
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

    @property
    def must_exit(self) -> bool:
        """Whether an earlier handler of SIGTERM has raised."""
        return self._earlier_error is not None

    def raise_earlier_error(self, outcome: str) -> None:
        """Raise what an earlier handler of SIGTERM has raised, once."""
        error, self._earlier_error = self._earlier_error, None
        if error is not None:
            _log.warning("raising what the program's own handler of SIGTERM has raised, %r, after %s", error, outcome)
            raise error

    def renewed(self) -> PreemptionListener:
        """The listener of a Checkpointer that saves again after `close`. It is a new one, because handlers of SIGTERM
        that were installed later may call this one's. After a preemption, it is this one, which does not listen."""
        is_ended = self._closed and not self.is_notified
        return PreemptionListener(self._processes, self._grace_seconds) if is_ended else self

    def close(self) -> None:
        """Stop listening."""
        is_installed = not self._closed and signal.getsignal(signal.SIGTERM) == self._on_signal
        # Another thread cannot install a handler. This one then stays, and passes the signal on to the previous one.
        if is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous_handler())
        self._closed = True


def _has_replaced_handler_of_jax() -> bool:
    """Whether the program's handler of SIGTERM is in effect, and not that of JAX's preemption service.

    Python does not know of handlers that C++ code has installed over its own, so the system's tables are compared.
    """
    job = connected_job()
    if (
        job is None
        or not job.has_preemption_service
        or threading.current_thread() is not threading.main_thread()
        or not callable(signal.getsignal(signal.SIGTERM))
    ):
        return False
    before = signal.getsignal(signal.SIGURG)
    if before is None:
        return False
    signal.signal(signal.SIGURG, lambda *_: None)
    try:
        return _address_of_handler(signal.SIGTERM) == _address_of_handler(signal.SIGURG)
    finally:
        signal.signal(signal.SIGURG, before)


def _address_of_handler(number: int) -> bytes:
    """The address of the function that the system calls for a signal: the first field of `struct sigaction`."""
    action = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action.raw[: ctypes.sizeof(ctypes.c_void_p)]


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
