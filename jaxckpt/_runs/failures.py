"""What follows when a step cannot be saved: `Checkpointer(on_failure=…)`.

    a lane, in every process:   attempt ─▶ all meet ─▶ "published" | "again" ─▶ attempt ─▶ … | "continue" | "raise"

The calls in which all meet, and in which a step is tried again, are counted before the first attempt, so that they are
the same in every process. Process 0 decides. Only failures of the storage have a policy: an error of the arguments, or
a process that died, is always raised.

With local folders, there are two policies. A local step that fails is not tried again: the next one is due soon. A
flush is, from the local step.
"""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import cause_of
from jaxckpt._model import typed_json
from jaxckpt._options import Options, optional, require_seconds, require_whole_number
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.progress import record_event
from jaxckpt._pipeline.threads import POLL_SECONDS, Latch, is_shutting_down
from jaxckpt._run_folder.steps import IncidentLog
from jaxckpt._save.staging import HeldObjects
from jaxckpt.errors import InputError, PeerError, show_count

if TYPE_CHECKING:
    from jaxckpt._runs.saving import RunStep
    from jaxckpt._save.running_saves import RunningSave, SaveInfo

RepeatFrom = Literal["local step", "none"]
"""Where another attempt takes the data from, if it is not held: "none" if there is no other attempt."""

_ATTEMPTS = 12
"""How often a step is tried with "retry", if no newer step is due before. The pauses take 162 s."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 60.0


class _AttemptOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of an attempt in one process."""

    can_repeat: bool
    reason: str | None
    """What has failed; None if nothing has."""


class FailureDecision(msgspec.Struct, frozen=True, array_like=True):
    """What process 0 has decided."""

    what: Literal["published", "again", "continue", "raise"]
    n_failed: int
    """Steps in a row that were not saved."""


class Failures:
    """The policy of a Checkpointer, and how many steps in a row were not saved. Every process creates one."""

    def __init__(
        self, on_failure: object, max_failures: object, max_unsaved_seconds: object, incidents: IncidentLog
    ) -> None:
        """Takes the arguments of a Checkpointer. Raises InputError."""
        if on_failure not in ("raise", "retry", "continue"):
            raise InputError(f'on_failure must be "raise", "retry" or "continue", found {on_failure!r}')
        self.on_failure = on_failure
        self._max_failures = require_whole_number(max_failures, "max_failures", minimum=1)
        self._max_seconds = optional(require_seconds, max_unsaved_seconds, "max_unsaved_seconds")
        self.settings = {
            "on_failure": self.on_failure,
            "max_failures": self._max_failures,
            "max_unsaved_seconds": self._max_seconds,
        }
        """The arguments as JSON values, which all processes must give alike."""

        self.incidents = incidents
        self._n_failed = 0
        self._published_at = time.monotonic()
        self._unsaved: BaseException | None = None
        """The error of the last step, if it was not saved and training has continued."""

        self.current: Attempts | None = None
        """The attempts that a lane makes, or made last."""

    def require_fitting(self, options: Options, *, is_local: bool) -> None:
        """Raise InputError if the policy does not fit the other arguments."""
        if self.on_failure == "retry" and options.staging_bytes is not None and not is_local:
            raise InputError(
                'on_failure="retry" holds all data of a process until the step is saved, so Options.staging_bytes must'
                f' be None, found {options.staging_bytes}: on_failure="continue" needs no more memory'
            )

    def attempts(
        self, destination: RunStep, step: int, options: Options, repeat_from: RepeatFrom | None = None
    ) -> Attempts:
        """Begin to save a step, which ends the attempts to save an earlier one. Every process; counts calls.

        Attempts hold the data, unless it can be read again: `repeat_from`."""
        if options.when_busy == "wait":
            self.supersede()
        n_calls = {"raise": 0, "continue": 1, "retry": 1 if repeat_from == "none" else _ATTEMPTS}[self.on_failure]
        calls = [Call.of("Checkpointer.save again", destination.store.url, options) for _ in range(n_calls)]
        return Attempts(self, destination, step, calls, repeat_from)

    def supersede(self) -> None:
        """End the attempts to save the last step, because a newer one is due. One that runs is finished."""
        if self.current is not None:
            self.current.superseded.set()

    def raise_unsaved(self) -> None:
        """Raise the error of the last step, once, if it was not saved and training has continued."""
        error, self._unsaved = self._unsaved, None
        if error is not None:
            raise error

    def forget_unsaved(self) -> None:
        """Forget the error of the last step, because a newer one was saved without this policy."""
        self._unsaved = None

    def handle_deletion_failure(self, error: Exception) -> None:
        """Deal with the failure to delete old steps, before a step is saved. In process 0."""
        if self.on_failure == "raise":
            raise error
        _log.error("old steps could not be deleted: %s", error)
        self.incidents.add(None, "failed deletion", f"{type(error).__name__}: {error}")

    def decide(self, call: Call, attempts: Attempts, error: BaseException | None, number: int) -> FailureDecision:
        """What follows an attempt, the same in every process. Raises an error that has no policy, in all processes."""
        with call.rendezvous("deciding what follows a save") as rendezvous:
            is_repeated = isinstance(error, PeerError) and error.repeats_earlier  # its process does not come here
            if error is not None and (
                is_repeated or cause_of(error) != "storage" or call.watchdog.stall_error() is not None
            ):
                raise error
            own = _AttemptOutcome(attempts.can_repeat, None if error is None else str(error))
            texts = rendezvous.gather(msgspec.json.encode(own).decode())
            outcomes = [typed_json.decode(text, _AttemptOutcome) for text in texts]
            decision = self._decide(call, attempts, outcomes, number) if outcomes else None
            shared = rendezvous.broadcast(msgspec.json.encode(decision).decode())
        decision = typed_json.decode(shared, FailureDecision)
        if decision.what != "again" and not attempts.is_inherited:
            self._unsaved = error if decision.what == "continue" else None
        return decision

    def _decide(
        self, call: Call, attempts: Attempts, outcomes: Sequence[_AttemptOutcome], number: int
    ) -> FailureDecision:
        """In process 0."""
        reason = next((outcome.reason for outcome in outcomes if outcome.reason is not None), None)
        if reason is None:
            self._n_failed, self._published_at = 0, time.monotonic()
            self.incidents.write()
            return FailureDecision("published", 0)
        if attempts.is_inherited:
            return FailureDecision("continue", self._n_failed)
        is_last = number == _ATTEMPTS - 1 or not all(outcome.can_repeat for outcome in outcomes)
        if self.on_failure == "retry" and not is_last and not self._is_overdue and attempts.pause(call, number, reason):
            return FailureDecision("again", self._n_failed)
        self._n_failed += 1
        if self._n_failed >= self._max_failures or self._is_overdue:
            return FailureDecision("raise", self._n_failed)
        return FailureDecision("continue", self._n_failed)

    @property
    def _is_overdue(self) -> bool:
        """Whether no step has been published for too long."""
        return self._max_seconds is not None and time.monotonic() - self._published_at > self._max_seconds

    def log_unsaved(self, step: int, error: BaseException, decision: FailureDecision) -> None:
        """Log that training continues without a step."""
        _log.error(
            "step %d was not saved, and training continues without it: %s (failure %d in a row; failure %d is raised:"
            " max_failures)",
            step,
            error,
            decision.n_failed,
            self._max_failures,
        )

    def why_raised(self, decision: FailureDecision) -> str:
        """Why training does not continue after a failure."""
        if decision.n_failed >= self._max_failures:
            return f"{show_count(decision.n_failed, 'step')} in a row could not be saved (max_failures)"
        return f"no step was saved for {self._max_seconds:g} s (max_unsaved_seconds)"


class Attempts:
    """The attempts to save one step."""

    def __init__(
        self, failures: Failures, destination: RunStep, step: int, calls: Sequence[Call], repeat_from: RepeatFrom | None
    ) -> None:
        self.step = step
        self._repeat_from = repeat_from
        self.superseded = Latch()
        """Set when a newer step is due."""

        self.held = HeldObjects()
        self.local: RunningSave | None = None
        """The save of the local step that is copied."""

        self.is_handled = False
        """Whether the step was not saved, and training continues."""

        self._failures = failures
        self._destination = destination
        self._calls = calls
        self._started = time.monotonic()
        self._has_run = False

    def run(self, first: Call, work: Callable[..., SaveInfo], running: RunningSave) -> SaveInfo:
        """Do the work, again if process 0 decides so. In a lane."""
        self._has_run, self._failures.current = True, self
        try:
            return self._run(first, work, running)
        finally:
            self.held.clear()

    def _run(self, first: Call, work: Callable[..., SaveInfo], running: RunningSave) -> SaveInfo:
        repeated: Call | None = None
        if not self._calls:
            try:
                return work(running)
            except Exception as error:
                self._record(error, first)
                raise
        for number, call in enumerate(self._calls):
            call.watchdog, call.cancellation, call.phases = first.watchdog, first.cancellation, first.phases
            info, failure = None, None
            try:
                info = work(running) if repeated is None else work(running, repeated)
            except BaseException as error:  # an interrupt too, so that no process waits for this one
                traceback.clear_frames(error.__traceback__)
                failure = error
            decision = self._failures.decide(call, self, failure, number)
            if failure is None and info is not None:
                return info
            assert failure is not None, "neither a result nor an error"
            if decision.what != "again":
                self._end(failure, decision, first)
                running.is_raised = self.is_handled
                raise failure
            repeated = call
            first.cancellation.restart()
            self._destination.overwrite = True  # an attempt may have published the step before it failed
        raise AssertionError("the last attempt is not repeated")

    @property
    def must_hold(self) -> bool:
        """Whether the step may be tried again with data that must be held."""
        return len(self._calls) > 1 and self._repeat_from is None

    @property
    def can_repeat(self) -> bool:
        """Whether this process has the data for another attempt."""
        return (
            self.held.is_complete
            if self._repeat_from is None
            else self._repeat_from == "local step" and not self.is_inherited
        )

    @property
    def is_inherited(self) -> bool:
        """Whether a step cannot be copied because its local step was not saved, which has had its policy."""
        return self.local is not None and self.local.done and self.local.error is not None

    def handle_unprepared(self, first: Call, error: Exception) -> bool:
        """Deal with an error of this process before any data was held. Every other process comes to the same
        rendezvous. Returns whether training continues."""
        if self._has_run or cause_of(error) != "storage":
            return False
        if not self._calls:
            first.run(functools.partial(self._record, error, first))
            return False
        call = self._calls[0]
        decision = call.run(functools.partial(self._failures.decide, call, self, error, 0))
        call.run(functools.partial(self._end, error, decision, call))
        return self.is_handled

    def _end(self, error: BaseException, decision: FailureDecision, call: Call) -> None:
        """The step is not saved. In a lane."""
        self.is_handled = decision.what == "continue"
        self._record(error, call)
        if self.is_handled and not self.is_inherited:
            self._failures.log_unsaved(self.step, error, decision)
        if decision.what == "raise":
            error.add_note(f"jaxckpt: {self._failures.why_raised(decision)}")

    def _record(self, error: BaseException, call: Call) -> None:
        """Record that the step was not saved. In a lane."""
        if self.is_inherited:
            return
        record_event("failed_save", time.monotonic() - self._started, lambda: "", logged=False, step=self.step)
        if call.index == 0:
            self._failures.incidents.add(self.step, "failed save", f"{type(error).__name__}: {error}")

    def pause(self, call: Call, number: int, reason: str) -> bool:
        """Wait before the next attempt. Returns whether there is one: no newer step is due. In process 0."""
        call.cancellation.restart()
        pauses = [min(_FIRST_PAUSE_SECONDS * 2**n, _LONGEST_PAUSE_SECONDS) for n in range(number, _ATTEMPTS - 1)]
        _log.warning(
            "step %d could not be saved at attempt %d of %d, and is tried again in %g s, the last time in %.0f s: %s",
            self.step,
            number + 1,
            _ATTEMPTS,
            pauses[0],
            sum(pauses),
            reason,
        )
        until = time.monotonic() + pauses[0]
        while (left := until - time.monotonic()) > 0 and not is_shutting_down():
            call.cancellation.check()
            if self.superseded.wait(min(left, POLL_SECONDS)):
                return False
        return True
