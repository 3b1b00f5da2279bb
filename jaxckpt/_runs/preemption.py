"""Whether the job has been preempted: SIGTERM in one process, JAX's preemption service among several."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxckpt._job.job import Job, connected_job
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import start_thread
from jaxckpt._save.running_saves import lift_limits

_MAX_ADVANCE = 1000
"""How many numbers JAX is asked about for one step, at most."""

_REPEAT_SECONDS = 1.0
"""A SIGTERM so soon after the first is the same notice: a scheduler may signal Python and its launcher, which passes
the signal on to Python."""


class _Handler:
    """One installation of a listener as the handler of SIGTERM. If the program replaces it, there is another one."""

    def __init__(self, listener: PreemptionListener, previous: Any) -> None:
        self.listener = listener
        self._previous = previous
        self._is_running = False

    def __call__(self, number: int, frame: Any) -> None:
        if self._is_running:  # two handlers that call each other
            return
        self._is_running = True
        try:
            self.listener.handle(number, frame, self.previous())
        finally:
            self._is_running = False

    def previous(self) -> Any:
        """The previous handler, skipping those of closed listeners; SIG_DFL if it is not Python's."""
        previous = self._previous
        while isinstance(previous, _Handler) and previous.listener.is_closed:
            previous = previous._previous
        return signal.SIG_DFL if previous is None or isinstance(previous, _Repeats) else previous

    def is_above(self, listener: PreemptionListener) -> bool:
        """Whether this handler notifies a listener, itself or by those that it replaced."""
        handler: Any = self
        while isinstance(handler, _Handler):
            if handler.listener is listener:
                return True
            handler = handler._previous
        return False


class _Repeats:
    """The handler of SIGTERM after the first, until the listener's end, if there was none before the listener's. It
    ignores the same notice."""

    def __init__(self, listener: PreemptionListener) -> None:
        self.listener = listener
        self._end = time.monotonic() + _REPEAT_SECONDS

    def __call__(self, number: int, frame: Any) -> None:
        if time.monotonic() >= self._end and signal.getsignal(number) is self:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class PreemptionListener:
    """Whether the job has been preempted.

    A single process listens for SIGTERM. In a job of several processes, JAX's preemption service forwards the signal of
    any process, and makes all of them stop at the same step: https://docs.jax.dev, jax.experimental.multihost_utils.
    A process listens there too if the program has replaced JAX's handler of SIGTERM, and notifies the service.

    An earlier handler is called at once. If it raises, as sys.exit does, the exception must not end the program before
    the last step is saved, so it is raised after that. If a library sets its handler after the first save, the next
    save finds that, and from then on that handler is called as an earlier one.
    """

    def __init__(self, processes: int, grace_seconds: float) -> None:
        """`processes` is their number in the job. The last save may take `grace_seconds` after the notice."""
        self._processes = processes
        self._listener_pid = 0
        self._grace_seconds = grace_seconds
        self._notified_at = 0.0  # on the monotonic clock
        self.is_notified = False
        """Whether this process was notified of a preemption."""

        self.is_closed = False
        self.called_step: int | None = None
        """The step of the last call of `save`."""

        self.saved_step: int | None = None
        """The last step that is saved, or being saved."""

        self._earlier_error: BaseException | None = None
        """What an earlier handler of SIGTERM has raised."""

        self._listening = False
        self._is_handling = False
        self._has_warned = False

    def _listen(self) -> None:
        """Begin to listen, or find out whether the program has replaced the handler since. At each save."""
        if self._processes > 1:
            if not self._listening:
                _listeners.add(self)
                if not getattr(jax.config, "jax_enable_preemption_service", True):
                    _log.warning(
                        "jax_enable_preemption_service is off: a process is not notified when another is preempted"
                    )
            if not self._is_installed() and _has_replaced_handler_of_jax():
                self._install()
        elif self._is_installed():
            if _is_handler_of_python() is False:
                self._warn("a library has replaced the handler of SIGTERM by one that is not Python's")
        elif threading.current_thread() is threading.main_thread():
            self._install()
        else:
            self._warn(
                "a library has replaced the handler of SIGTERM"
                if self._listener_pid
                else "the first save of a Checkpointer runs outside the main thread, so it cannot listen for SIGTERM"
            )
        self._listening = True
        _unreported.add(self)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            _log.warning("%s: no last step is saved if this job is preempted", reason)
        self._has_warned = True

    def _is_installed(self) -> bool:
        """Whether Python calls a handler of this listener, unless other code has replaced Python's."""
        handler = signal.getsignal(signal.SIGTERM)
        return isinstance(handler, _Handler) and handler.is_above(self)

    def _install(self) -> None:
        if self._listener_pid:
            _log.info("a library has set its handler of SIGTERM after the first save; it is called after jaxckpt's")
        handler = _Handler(self, signal.getsignal(signal.SIGTERM))
        self._listener_pid = os.getpid()
        signal.signal(signal.SIGTERM, handler)

    def handle(self, number: int, frame: Any, previous: Any) -> None:
        """Handle SIGTERM, then call the previous handler."""
        if os.getpid() != self._listener_pid:
            self.is_closed = True  # the signal is for a fork, such as a worker of a pool, and not for the job
        is_outer = not self._is_handling  # a library's handler may call one of this listener that it has replaced
        closed = self.is_closed and is_outer
        self._is_handling = True
        try:
            if self._processes == 1:
                self._note_notice()
            elif not closed and is_outer and (job := connected_job()) is not None:
                start_thread(job.post_preemption_notice, "jaxckpt-preemption")  # JAX then chooses the last step
            self.close()  # a second signal has its previous effect
            if not closed and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _Repeats(self))
            if callable(previous):
                try:
                    previous(number, frame)
                except BaseException as error:
                    if closed:
                        raise
                    self._earlier_error = error
                if isinstance(previous, _Handler):
                    self._earlier_error = self._earlier_error or previous.listener._earlier_error
            elif closed and previous == signal.SIG_DFL:  # another handler passed the signal on to this closed one
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
        finally:
            if is_outer:
                self._is_handling = False

    def is_last_step(self, step: int) -> bool:
        """Whether to stop at this step. The first call starts to listen."""
        self.called_step = step
        if not self._listening or not (self.is_closed or self.is_notified):
            self._listen()
        if self._processes > 1 and not self.is_notified and _is_sync_point(step):
            for listener in [*_listeners]:  # JAX reports it only once
                listener._note_notice()
        return self.is_notified

    def _note_notice(self) -> None:
        if not self.is_notified:
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
        is_ended = self.is_closed and not self.is_notified
        return PreemptionListener(self._processes, self._grace_seconds) if is_ended else self

    def close(self) -> None:
        """Stop listening."""
        handler = signal.getsignal(signal.SIGTERM)
        # Another thread cannot install a handler. This one then stays, and passes the signal on to the previous one.
        if threading.current_thread() is threading.main_thread():
            if not self.is_closed and isinstance(handler, _Handler) and handler.listener is self:
                signal.signal(signal.SIGTERM, handler.previous())
            elif isinstance(handler, _Repeats) and handler.listener is self:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_closed = True

    def report_end(self, reason: str, *, seconds: float = 0.05) -> str | None:
        """Log an error, and return it, if the job was preempted and this is its end, but the step of the last call of
        `save` is not saved. `reason` says how it ends. A job of several processes waits some seconds for the notice."""
        if self not in _unreported:
            return None
        _unreported.discard(self)
        unsaved = self.called_step is not None and (self.saved_step is None or self.saved_step < self.called_step)
        if not unsaved or self._listener_pid not in (0, os.getpid()) or not self._was_preempted(seconds):
            return None
        saved = "" if self.saved_step is None else f"; the last save was of step {self.saved_step}"
        lost = (
            f"the job was preempted, and {reason} without its last step: save was last called for step"
            f" {self.called_step}, which is not saved{saved}"
        )
        _log.error("%s", lost)
        return lost

    def mark_reported(self) -> None:
        """Note that what has become of the last step is reported."""
        _unreported.discard(self)

    def _was_preempted(self, seconds: float) -> bool:
        """Whether this process was notified, or another one, after which the processes have not reached a step."""
        job = None if self.is_notified or self._processes == 1 else connected_job()
        return self.is_notified or (job is not None and job.has_preemption_notice(seconds))


def _has_replaced_handler_of_jax() -> bool:
    """Whether the program's handler of SIGTERM is in effect, and not that of JAX's preemption service. True if that is
    unknown: a listener that replaces the service's handler notifies the service itself.

    Python does not know of handlers that C++ code has installed over its own, so the system's tables are compared.
    """
    job = connected_job()
    return (
        job is not None
        and job.has_preemption_service
        and threading.current_thread() is threading.main_thread()
        and callable(signal.getsignal(signal.SIGTERM))
        and _is_handler_of_python() is not False
    )


def _is_handler_of_python() -> bool | None:
    """Whether the system calls Python for SIGTERM, and not a handler of C++ code; None if that is unknown, because
    Python does not handle Ctrl-C either, as in a program that a shell has started in the background."""
    if not callable(signal.getsignal(signal.SIGINT)):
        return None
    return _address_of_handler(signal.SIGTERM) == _address_of_handler(signal.SIGINT)


def _address_of_handler(number: int) -> int | None:
    """The address of the function that the system calls for a signal."""
    get = ctypes.pythonapi.PyOS_getsig
    get.restype = ctypes.c_void_p
    return get(number)


_unreported = set[PreemptionListener]()
"""The listeners whose end has not been reported. At the exit of the program, some may not be closed."""


def _report_at_exit() -> None:
    for listener in [*_unreported]:
        listener.report_end("the program ends")


atexit.register(_report_at_exit)


# Several processes ----------------------------------------------------------------------------------------

_listeners = weakref.WeakSet[PreemptionListener]()
"""Those of this process that JAX's preemption service notifies."""


@dataclass(slots=True)
class _Queries:
    """What this process has asked JAX in its present job."""

    job: Job | None
    last_step: int | None = None
    last_number: int = 0
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
