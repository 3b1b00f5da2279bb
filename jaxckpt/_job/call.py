"""A call that every process of the job makes, in the same order, with everything that it carries along.

with Call.of("save", path, options) as call:
    draft = call.here(describe)     # in the caller's thread: with the caller's objects
    result = call.run(work)         # in a lane: with storage, devices and other processes
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import jax

from jaxckpt._job.job import Departures, connected_job
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._options import DEFAULT_OPTIONS, Options, options_or_default
from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.control import Cancellation, Phases
from jaxckpt._pipeline.threads import Task
from jaxckpt._pipeline.watchdog import Watchdog, under
from jaxckpt.errors import InputError

T = TypeVar("T")


class _Current(threading.local):
    call: Call | None = None
    """The call that this thread makes a part of."""


_current = _Current()


@dataclass(slots=True)
class Call:
    """A call of a public function, in one process of the job.

    In a job of one process, which never needs JAX's backend, creating a Call does not start it. If the block raises,
    the other processes are notified in the rendezvous in which they wait, so that all processes reach their next call
    together.
    """

    verb: str
    """For example "save" or "restore"."""

    where: str
    """The path or URL that the call uses."""

    watchdog: Watchdog
    """The storage operation of this process. If it stalls, the other processes are notified."""

    given_options: Any
    """The options that the user gave, not validated yet."""

    number: int = 0
    """The number of earlier calls with this verb and path in this process."""

    index: int = 0
    """The number of this process: `device.process_index` of its devices."""

    count: int = 1
    """The number of processes."""

    client: Any = None
    """The client of JAX's coordination service."""

    prefix: str = ""
    """The prefix of its keys in the service."""

    phases: Phases = field(default_factory=Phases)
    """How long each phase takes."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    """Checked repeatedly while this process waits for others."""

    n_rendezvous: int = 0
    notified_error: BaseException | None = None
    """The error that the other processes were notified of, if any."""

    only_reads: bool = False
    """Whether an interrupt may abandon the work, if no other process takes part."""

    repeats_earlier: bool = False
    """Whether the error that ends this call is the error of an earlier background save."""

    runs_service: bool = True
    """Whether JAX's service runs in this process. Only process 0 needs to know."""

    departures: Departures = field(default_factory=Departures)
    """The rendezvous that processes of the job have left."""

    @classmethod
    def of(cls, verb: str, path: object, options: object, *, only_reads: bool = False) -> Self:
        """Count the call, even if its arguments are invalid. Enter it before anything else can raise.

        Raises InputError if it is made from within another call, or if JAX has devices of several processes that are
        not connected.
        """
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else getattr(path, "url", type(path).__name__)
        where = str(text).rstrip("/")
        if (within := _current.call) is not None:
            raise InputError(
                f"{verb} of {where!r} was called from inside {within.verb} of {within.where!r}, by a signal handler or"
                " a callback: set a flag there, and make the call after the other has returned"
            )
        watchdog = Watchdog((options if isinstance(options, Options) else DEFAULT_OPTIONS).timeout_seconds)
        call = cls(verb, where, watchdog, options, only_reads=only_reads)
        if (job := connected_job()) is not None:
            number, call.number = job.count_call((verb, where))
            call.index, call.count, call.client, call.prefix = job.index, job.count, job.client, f"jaxckpt/{number}"
            call.runs_service, call.departures = job.runs_service, job.departures
        return call

    @classmethod
    def alone(cls, verb: str, where: str, options: Options) -> Self:
        """A call that one process makes by itself, whatever the others do. It need not be entered."""
        return cls(verb, where, Watchdog(options.timeout_seconds), options, only_reads=True)

    @property
    def timeout_seconds(self) -> float:
        return self.watchdog.seconds

    @property
    def options(self) -> Options:
        """The options of the call. Raises InputError if the user gave something else."""
        return options_or_default(self.given_options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self.notified_error and self.count > 1:
            with contextlib.suppress(BaseException):  # a second interrupt must not replace the error
                lanes.run(functools.partial(self._notify, error), Watchdog(self.timeout_seconds))

    def _notify(self, error: BaseException) -> None:
        """Notify the processes that wait for this one."""
        with self.rendezvous(f"calling {self.verb}"):
            raise error

    def here(self, work: Callable[[], T]) -> T:
        """Do a part of the call in this thread, because it uses the caller's objects."""
        # A `with` block would leave a stale mark if an interrupt came at its start or end. CPython handles signals only
        # after calls and backward jumps, so not inside this `finally`.
        outer = _current.call
        try:
            _current.call = self
            return work()
        finally:
            _current.call = outer

    def run(self, work: Callable[[], T]) -> T:
        """Do a part of the call in a lane, with the caller's settings of JAX, and wait for it.

        An interrupt cancels the work, which then cleans up and notifies the other processes, before this raises; a
        second one does not wait. A call of one process that only reads has nothing to clean up: it is abandoned, and
        ends at its next storage operation. Raises StorageError if the storage stalls.
        """
        return self.start(work).result()

    def start(self, work: Callable[[], T], *, until: float | None = None) -> Task[T]:
        """As `run`, but also returns when the lane releases the caller, or at the time `until` on the monotonic
        clock."""
        config: Any = jax.config
        part = functools.partial(
            _with_settings, config.jax_enable_x64, config.jax_default_device, functools.partial(self.here, work)
        )
        interrupted = None if self.only_reads and self.count == 1 else self._cancel
        return self.here(functools.partial(lanes.run, part, self.watchdog, interrupted, until=until))

    def in_process_0(self, what: str, work: Callable[[], T]) -> T:
        """What `work` returns in process 0, a JSON value, after all processes have come this far. `what` as for
        `rendezvous`."""

        def meet() -> T:
            with self.rendezvous(what) as rendezvous:
                rendezvous.gather("")
                return json.loads(rendezvous.broadcast(json.dumps(work() if self.index == 0 else None)))

        return self.run(meet)

    def await_all(self, what: str) -> None:
        """Wait until all processes have done a part of the call in the caller's thread. An error of one is raised by
        all. `what` as for `rendezvous`."""

        def meet() -> None:
            with self.rendezvous(what, after_caller=True) as rendezvous:
                rendezvous.barrier()

        self.run(meet)

    def _cancel(self, task: Task[Any], error: BaseException) -> None:
        """Cancel the work in a lane because of an error in the caller's thread, and wait until it has cleaned up."""
        self.cancellation.cancel(error)
        lanes.await_end(task, self.watchdog)
        if self.notified_error is not None:
            self.notified_error = error

    def rendezvous(self, what: str, *, after_caller: bool = False) -> Rendezvous:
        """The next rendezvous, in a lane. `what` names the activity in messages ("saving"). With `after_caller`, the
        processes did a part of the call in the caller's thread before, where they send no heartbeats.

        In a job of one process, its methods return what they are given."""
        if self.count > 1 and self.n_rendezvous:  # process 0 deletes its keys when all have reached the next one
            self.departures.forget(f"{self.prefix}/{self.n_rendezvous}")
        self.n_rendezvous += 1
        key = f"{self.prefix}/{self.n_rendezvous}"
        return Rendezvous(self, what, key, is_first=self.n_rendezvous == 1, after_caller=after_caller)


def run_outside(work: Callable[[], T]) -> T:
    """Do work of the caller in a lane as if in a thread of the caller's own: it may make calls, each with a lane."""
    outer = _current.call
    try:
        _current.call = None
        with under(None):
            return work()
    finally:
        _current.call = outer


def _with_settings(enable_x64: bool, default_device: Any, work: Callable[[], T]) -> T:
    """Do work with the caller's settings of JAX, which belong to a thread."""
    with (
        jax.enable_x64(enable_x64),
        jax.default_device(default_device),
        jax.transfer_guard("allow"),  # the caller has asked for these transfers
    ):
        return work()
