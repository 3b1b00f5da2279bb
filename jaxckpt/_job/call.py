"""A call that every process of the job makes, in the same order, with everything that it carries along.

with Call.of("save", path, options) as call, call.rendezvous("saving") as rendezvous:
    texts = rendezvous.gather(mine)             # every process sends a text; process 0 gets all of them
    if call.index == 0:
        decision = decide(texts)
    decision = rendezvous.broadcast(decision)   # every process gets the decision of process 0
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any, Self

from jaxckpt._job.job import Departures, connected_job
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._options import Options, options_or_default
from jaxckpt._pipeline.cancellation import Cancellation
from jaxckpt._pipeline.phases import Phases
from jaxckpt._pipeline.threads import RunningCall
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt.errors import InputError

_running_calls: list[tuple[RunningCall, Call]] = []
"""The calls that are running, in any thread."""


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

    number: int
    """The number of earlier calls with this verb and path in this process."""

    index: int
    """The number of this process: `device.process_index` of its devices."""

    count: int
    """The number of processes."""

    client: Any
    """The client of JAX's coordination service."""

    prefix: str
    """The prefix of its keys in the service."""

    timeout_seconds: float
    watchdog: Watchdog
    """The storage operation of this process. If it stalls, the other processes are notified."""

    given_options: Any
    """The options that the user gave, not validated yet."""

    phases: Phases = field(default_factory=Phases)
    """How long each phase takes."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    """Checked repeatedly while this process waits for others."""

    n_rendezvous: int = 0
    notified_error: BaseException | None = None
    """The error that the other processes were notified of, if any."""

    is_handed_over: bool = False
    """Whether another thread continues the call after the block, and notifies the others."""

    repeats_earlier: bool = False
    """Whether the error that ends this call is the error of an earlier background save."""

    runs_service: bool = True
    """Whether JAX's service runs in this process. Only process 0 needs to know."""

    departures: Departures = field(default_factory=Departures)
    """The rendezvous that processes of the job have left."""

    @classmethod
    def of(cls, verb: str, path: object, options: object) -> Self:
        """Count the call, even if its arguments are invalid. Enter it before anything else can raise.

        Raises InputError if it is made from within another call, or if JAX has devices of several processes that are
        not connected.
        """
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else getattr(path, "url", type(path).__name__)
        where = str(text).rstrip("/")
        within = next((other for caller, other in _running_calls.copy() if caller.is_in_this_thread()), None)
        if within is not None:
            raise InputError(
                f"{verb} of {where!r} was called from inside {within.verb} of {within.where!r}, by a signal handler or"
                " a callback: set a flag there, and make the call after the other has returned"
            )
        timeout_seconds = (options if isinstance(options, Options) else Options()).timeout_seconds
        watchdog = Watchdog(timeout_seconds)
        job = connected_job()
        if job is None:
            return cls(verb, where, 0, 0, 1, None, "", timeout_seconds, watchdog, options)
        number, n_alike = job.count_call((verb, where))
        return cls(
            verb,
            where,
            n_alike,
            job.index,
            job.count,
            job.client,
            f"jaxckpt/{number}",
            timeout_seconds,
            watchdog,
            options,
            runs_service=job.runs_service,
            departures=job.departures,
        )

    @classmethod
    def alone(cls, verb: str, where: str, options: Options) -> Self:
        """A call that one process makes by itself, whatever the others do. It need not be entered."""
        seconds = options.timeout_seconds
        return cls(verb, where, 0, 0, 1, None, "", seconds, Watchdog(seconds), options)

    @property
    def options(self) -> Options:
        """The options of the call. Raises InputError if the user gave something else."""
        return options_or_default(self.given_options)

    def __enter__(self) -> Self:
        _running_calls.append((RunningCall(depth=1), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Also removes calls that could not leave because of an interrupt.
        for entry in _running_calls.copy():
            if entry[0].is_in_this_thread() or not entry[0].is_running():
                with contextlib.suppress(ValueError):  # another thread has
                    _running_calls.remove(entry)
        if error is not None and error is not self.notified_error and not self.is_handed_over and self.count > 1:
            # A RuntimeError: no thread can be started to notify the others, as while Python 3.12.1 shuts down.
            with contextlib.suppress(type(error), RuntimeError), self.rendezvous(f"calling {self.verb}"):
                raise error

    @property
    def rendezvous_key(self) -> str:
        """The prefix of the keys of the last rendezvous."""
        return f"{self.prefix}/{self.n_rendezvous}"

    def rendezvous(self, what: str) -> Rendezvous:
        """The next rendezvous. `what` names the activity in messages ("saving")."""
        if self.n_rendezvous:
            self.departures.forget(self.rendezvous_key)  # process 0 deletes it when all have reached the next one
        self.n_rendezvous += 1
        return Rendezvous(self, what, self.rendezvous_key, is_first=self.n_rendezvous == 1)
