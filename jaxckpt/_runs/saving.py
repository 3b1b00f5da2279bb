"""Saves the due steps of a run (first in local folders, if configured), and the last step of a preempted job."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxckpt._formats.export import StepExport
from jaxckpt._job.call import Call
from jaxckpt._local_tier.flush import Flush
from jaxckpt._local_tier.process_folders import ProcessFolders
from jaxckpt._local_tier.tier import LocalSteps
from jaxckpt._model.records import StepRecord
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options, optional, require_seconds, require_whole_number
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._run_folder.metrics import recorded_metrics
from jaxckpt._runs.deletion import Deletion
from jaxckpt._runs.directory import Directory
from jaxckpt._runs.failures import Failures
from jaxckpt._runs.preemption import PreemptionListener
from jaxckpt._runs.retention import evaluate_predicate, require_predicate
from jaxckpt._save.describe import missing_subtrees
from jaxckpt._save.request import PlanCache, PreparedSave, SaveRequest, require_on_done
from jaxckpt._save.reuse import ReuseCache
from jaxckpt._save.running_saves import RunningSave, lift_limits
from jaxckpt._save.save import start
from jaxckpt._save.shared_path import PublishResult, SharedPath
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import InputError, JaxckptError, Preempted, StorageError, TreeError

# Which steps are saved -----------------------------------------------------------------------------------

_CLOCK_CHECKS = 60
"""How often several processes check process 0's clock during `every_seconds`, if their steps are short enough."""


class SaveSchedule:
    """Which steps are saved.

    In a job of several processes, the clock and the metrics of process 0 decide. For a predicate, the processes meet at
    every step. For the clock they meet less often: at each rendezvous, process 0 announces the number of steps until
    the next one, estimated from the duration of past steps. All processes count the same steps, so none misses a
    rendezvous.
    """

    def __init__(self, every: object, every_seconds: object, save_if: object, processes: int) -> None:
        """Takes the arguments of a Checkpointer, and the number of processes. Raises InputError."""
        if every is None and every_seconds is None and save_if is None:
            every = 1
        self._every = optional(require_whole_number, every, "every", minimum=1)
        self._seconds = optional(require_seconds, every_seconds, "every_seconds")
        self._save_if = require_predicate(save_if, "save_if")
        is_given = "a function" if self._save_if else None
        self.settings = {"every": self._every, "every_seconds": self._seconds, "save_if": is_given}
        """The arguments as JSON values, which all processes must give alike."""

        self._is_single_process = processes == 1
        self._clock: Callable[[], float] = time.monotonic
        self._saved_at = self._met_at = self._clock()
        self._steps_since_rendezvous = 0
        self._steps_to_rendezvous = 1
        self._decided: tuple[int, bool] | None = None
        """A step and the decision about it, until the step is saved or skipped."""

    def record_save(self) -> None:
        """Note that a save has begun, and restart the count of seconds."""
        self._saved_at = self._clock()
        self._decided = None

    def repeat(self, step: int) -> None:
        """Note that a due step was not saved, and is due if it comes next."""
        self._decided = step, True

    def is_due(
        self, step: int, metrics: Mapping[str, Any] | None, begin_call: Callable[[], Call], *, remember: bool = False
    ) -> bool:
        """Whether to save a step. Every process calls this at every step.

        With `remember`, the next call for the same step returns the same decision, without communication.
        """
        decided, self._decided = self._decided, None
        due = decided[1] if decided and decided[0] == step else self._decide(step, metrics, begin_call)
        if remember:
            self._decided = step, due
        return due

    def _decide(self, step: int, metrics: Mapping[str, Any] | None, begin_call: Callable[[], Call]) -> bool:
        if self._every is not None and step % self._every == 0:
            return True
        if self._seconds is None and self._save_if is None:
            return False
        if self._is_single_process:
            return self._is_due_locally(step, metrics)
        self._steps_since_rendezvous += 1
        if self._steps_since_rendezvous < self._steps_to_rendezvous:
            return False
        with begin_call() as call:
            own = (False, 0)
            if call.index == 0:
                own = call.here(lambda: (self._is_due_locally(step, metrics), self._plan_next_rendezvous()))
            due, self._steps_to_rendezvous = call.in_process_0("deciding whether to save", lambda: own)
            self._steps_since_rendezvous = 0
        return due

    def _is_due_locally(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        if self._seconds is not None and self._clock() - self._saved_at >= self._seconds:
            return True
        return self._save_if is not None and evaluate_predicate(
            self._save_if, "save_if", StepRecord(step, recorded_metrics(metrics))
        )

    def _plan_next_rendezvous(self) -> int:
        """The number of steps until the processes meet again.

        At most twice the last number, because the first steps may be fast (queued on the devices) or slow (compiled).
        """
        if self._seconds is None or self._save_if is not None:
            return 1
        now = self._clock()
        seconds_per_step = max((now - self._met_at) / self._steps_to_rendezvous, 1e-9)
        self._met_at = now
        left = self._saved_at + self._seconds - now
        ahead = min(left if left > 0 else self._seconds, self._seconds / _CLOCK_CHECKS)
        return max(1, min(2 * self._steps_to_rendezvous, int(ahead / seconds_per_step)))


# The last save --------------------------------------------------------------------------------------------


class LastSave:
    """The last save of a Checkpointer."""

    def __init__(self) -> None:
        self.pending: RunningSave | None = None
        """The save, if it has not been waited for."""

        self.step: int | None = None
        """Its step; None if the save failed, or the step was deleted."""

        self._predecessor: RunningSave | None = None

    def set_pending(self, pending: RunningSave, step: int, predecessor: RunningSave | None = None) -> None:
        """Note that a save has begun.

        An error that it inherited from `predecessor`, the save that it waited for, is not raised again by `wait`.
        """
        self.pending, self.step, self._predecessor = pending, step, predecessor

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save, for at most `seconds`. If it has not ended by then, abandon it.

        Returns whether it has ended or is published. Raises its error. After an interrupt, or an error of the wait
        itself, the next call waits for the same save.
        """
        pending, step = self.pending, self.step
        if pending is None:
            return True
        try:
            pending.wait(seconds)
        except BaseException as error:
            timed_out = seconds is not None and isinstance(error, TimeoutError)
            if error is not pending.error and not timed_out:
                raise
            if not pending.done:
                self.pending, self.step = None, step if pending.is_published else None
                pending.abandon()
                return pending.is_published
        self.pending, self.step = None, step if pending.is_published else None  # its `on_done` may have failed
        inherited = self._predecessor is not None and pending.error is self._predecessor.error
        if pending.error is not None and not inherited and not pending.is_raised:
            note = f"jaxckpt: this error ended {pending.name}"
            if note not in getattr(pending.error, "__notes__", ()):
                pending.error.add_note(note)
            raise pending.error
        return True

    def hurry(self, seconds: float) -> None:
        """End the limit of the save's rate, and wait for at most `seconds` until it is published. If it is not by then,
        abandon it. Raises its error.

        The error of an `on_done` that is still running is raised by the next save, or reported at exit.
        """
        if self.pending is None:
            return
        self.pending.hurry(seconds)
        if self.pending.is_published and not self.pending.done:
            self.pending = None
        else:
            self.wait(0)

    def forget(self, step: int) -> None:
        """Note that a step was deleted."""
        if self.step == step:
            self.step = None


# The destination ------------------------------------------------------------------------------------------


class RunStep(SharedPath):
    """A step of a run. Its publication makes older steps subject to the rules of retention."""

    def __init__(
        self,
        directory: Directory,
        deletion: Deletion,
        failures: Failures,
        step: int,
        export: StepExport | None,
        *,
        overwrite: bool,
        follows_local_step: bool,
    ) -> None:
        """With `follows_local_step`, the step is first saved locally, and a flush copies it."""
        super().__init__(directory.child(step), overwrite=overwrite)
        self._export = export
        self._directory = directory
        self._deletion = deletion
        self._failures = failures
        self._step = step
        self._unchecked: SaveRequest | None = None
        self._follows_local_step = follows_local_step

    def check(self, request: SaveRequest) -> None:
        """Raise unless the step may be saved, and protect it from deletion until it is saved. If storage fails before a
        local step, which needs none, its flush checks again."""
        if not request.is_last_step and (failure := self._deletion.take_failure()) is not None:
            self._failures.handle_deletion_failure(failure)
        try:
            self._require_savable(request)
        except StorageError:
            if not self._follows_local_step:
                raise
            self._unchecked = replace(request, tree=None, draft=None)  # neither of which it should keep alive

    def _require_savable(self, request: SaveRequest) -> None:
        assert request.step is not None, "a Checkpointer saves steps"
        self._deletion.protect(request.step.number)
        try:
            self._directory.require_savable(request.step, overwrite=self.overwrite, is_last_step=request.is_last_step)
        except BaseException:
            self._deletion.end_protection()
            raise

    def claim(self, stacks: Iterable[Stack], save_id: str) -> Transaction:
        if self._unchecked is not None:
            self._require_savable(self._unchecked)
        self._directory.require_same_folder()
        if self._step in self._directory.refused:
            self.overwrite = True
            message = "step %d of %s, which could not be read, is deleted after it has been saved again"
            _log.warning(message, self._step, self._directory.url)
        return super().claim(stacks, save_id)

    def commit(
        self, call: Call, transaction: Transaction, stacks: Iterable[Stack], manifest: bytes, *, sync: bool
    ) -> None:
        super().commit(call, transaction, stacks, manifest, sync=sync)
        if (earlier := self._directory.same_data(self._step, manifest)) is not None:
            reason = f"it holds the same data as step {earlier}: training is stuck, or the loop saves a stale state"
            _log.warning("step %d of %s: %s", self._step, self._directory.url, reason)
            self._failures.incidents.add(self._step, "unchanged step", reason)

    def record_published(self, step: StepRecord | None, save_id: str, created: str) -> None:
        assert step is not None, "a Checkpointer saves steps"
        self._deletion.handle_published(step, save_id, created)

    def note_saved(self) -> None:
        self._directory.refused.discard(self._step)

    def finish(self, prepared: PreparedSave, published: PublishResult) -> None:
        super().finish(prepared, published)
        if self._export is None:
            return
        if prepared.request.is_last_step:
            _log.warning("the job was preempted, so step %d is not exported", prepared.request.step_number)
            return
        self._export.write(prepared.call, self.store.url, prepared.options)


# Saving ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """Whether a step is saved; the same in all processes."""

    is_last_step: bool
    """Whether the job was preempted and stops at this step."""

    to_storage: bool
    """Whether it is saved in the directory of the run, and not only in local folders."""

    due: bool


class _Wait:
    """The time that a save waits for an earlier one."""

    def __init__(self, earlier: RunningSave | None) -> None:
        self.earlier = None if earlier is None or earlier.done else earlier
        self._since = 0.0 if self.earlier is None else self.earlier.progress.seconds

    @property
    def seconds(self) -> float:
        """0 unless the earlier save has ended."""
        return self.earlier.progress.seconds - self._since if self.earlier is not None and self.earlier.done else 0.0


@dataclass(slots=True)
class Saver:
    """Saves the steps of a run. Every process creates one."""

    directory: Directory
    deletion: Deletion
    schedule: SaveSchedule
    preemption: PreemptionListener
    local: LocalSteps | None
    options: Options
    background: bool
    fail_fast: bool
    on_preemption: Literal["exit", "continue", "ignore"]
    reuse_cache: ReuseCache
    failures: Failures
    local_failures: Failures
    """What follows if a step cannot be saved in the local folders."""

    last_save: LastSave = field(default_factory=LastSave)
    """The last save: of a local step, if there are local folders."""

    last_flush: LastSave = field(default_factory=LastSave)
    """The last flush of a local step."""

    unflushed_step: int | None = None
    """The last step that was due, if it is only in the local folders, because `Options.when_busy` is "skip"."""

    plan_cache: PlanCache = field(default_factory=PlanCache)
    warned_wait_seconds: float = 5.0
    """How long a step must wait for an earlier save until that is logged."""

    preempted: bool = False
    are_rules_checked: bool = False
    """Whether a tree has been compared with `keep_last_of`."""

    def save(
        self, step: int, metrics: Mapping[str, Any] | None, destination: RunStep, request: SaveRequest, *, force: bool
    ) -> bool:
        """Save a step if it is due. `request` has the caller's arguments. Returns whether it is being saved."""
        decision = self._decide("Checkpointer.save", step, metrics, force=force)
        if not decision.due:
            self._check_rules(request)
            return False
        self.are_rules_checked = True
        is_last_step = decision.is_last_step
        saved = False
        if is_last_step:
            self.preempted = True
            lift_limits()  # also of saves that only the end of the program waits for
            saved = self._finish_earlier_saves(step, overwrite=destination.overwrite)
        if not saved:
            awaited = not (self.background or is_last_step)
            is_skipped = False  # all processes skip a step, or none does; an error may be of one process only
            try:
                saved = self._begin(step, metrics, destination, request, decision, awaited=awaited)
                is_skipped = not saved
            finally:
                if self.local is not None and not is_skipped:
                    self.local.record_tried(step)
            if awaited:
                self.wait()
                self.deletion.wait()
        if is_last_step:
            self._finish_preempted(step, saved)
        return saved

    def should_save(self, step: int, metrics: Mapping[str, Any] | None, *, overwrite: bool) -> bool:
        """Whether `save` would save a step. The next `save` of the step follows the decision. Every process."""
        verb = "Checkpointer.should_save"
        decision = self._decide(verb, step, metrics, remember=True)
        if decision.is_last_step or not decision.due:
            return decision.due
        with self.directory.checking(verb, step):
            recorded_metrics(metrics)
        if overwrite:
            return True
        with self.directory.begin_call(verb, step) as call:
            return call.in_process_0("looking for a step", functools.partial(self._is_new, step))

    def _is_new(self, step: int) -> bool:
        return step != self.last_save.step and step not in self.directory.steps([step])

    def _decide(
        self, verb: str, step: int, metrics: Mapping[str, Any] | None, *, force: bool = False, remember: bool = False
    ) -> SaveDecision:
        """Decide whether to save a step. With `remember`, the next decision about the same step is the same."""
        is_last_step = self.on_preemption != "ignore" and not self.preempted and self.preemption.is_last_step(step)
        begin_call = functools.partial(self.directory.begin_call, verb)
        to_storage = force or is_last_step or self.schedule.is_due(step, metrics, begin_call, remember=remember)
        due = to_storage or (self.local is not None and self.local.is_due(step))
        if not due and self.fail_fast:
            # Only for a step that is not due: for a due step all processes must make the same calls, even if only some
            # of them know of a failure yet.
            for last in (self.last_save, self.last_flush):
                if last.pending is not None and last.pending.done:
                    last.wait()
        return SaveDecision(is_last_step, to_storage, due)

    def _check_rules(self, request: SaveRequest) -> None:
        """Raise TreeError if `keep_last_of` does not fit the first tree, although no step is due yet."""
        if self.are_rules_checked:
            return
        self.are_rules_checked = True
        try:
            missing = missing_subtrees(request.tree, [*self.directory.policy.keep_last_of])
        except TreeError:
            return  # raised when a step is due
        for message in missing.values():
            with self.directory.begin_call("Checkpointer.save"):
                raise TreeError(message)

    def _fitting_subtrees(self, request: SaveRequest) -> tuple[str, ...]:
        """The paths of `keep_last_of`. For the last step of a preempted job, which must be saved, those that the tree
        has."""
        subtrees = tuple(self.directory.policy.keep_last_of)
        missing = missing_subtrees(request.tree, subtrees) if request.is_last_step else {}
        for message in missing.values():
            _log.warning("the job was preempted, so its last step is saved without this rule: %s", message)
        return tuple(subtree for subtree in subtrees if subtree not in missing)

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        destination: RunStep,
        request: SaveRequest,
        decision: SaveDecision,
        *,
        awaited: bool,
    ) -> bool:
        """Start to save a step. Returns whether it is being saved."""
        flush = attempts = flush_attempts = None
        is_last_step, to_storage = decision.is_last_step, decision.to_storage
        # Every process counts the calls of the attempts and of the flush before anything can fail, even if the step is
        # not stored, so that processes that disagree on the step still make the same number of calls.
        if is_last_step:  # which has no time for other attempts
            self.failures.supersede()
        elif self.local is None:
            attempts = self.failures.attempts(destination, step, self.options)
        else:
            attempts = self.local_failures.attempts(destination, step, self.options, "none")
            if to_storage:
                flush_attempts = self.failures.attempts(destination, step, self.options, "local step")
        if self.local is not None:
            call = Call.of("flush", destination.store.url, self.options)
            if to_storage:
                rate = None if is_last_step else self.local.rate or self.options.max_bytes_per_second
                flush = Flush(step, self.local.child(step), destination, call, self.options, rate, request.on_done)
                if flush_attempts is not None:
                    flush.attempts = functools.partial(flush_attempts.run, flush.call)
        call = self.directory.begin_call("Checkpointer.save", step)
        request = replace(request, deadline=self.preemption.deadline if is_last_step else None)
        if attempts is not None:
            run = functools.partial(attempts.run, call)
            request = replace(request, attempts=run, held=attempts.held if attempts.must_hold else None)
        try:
            with call:
                planned = self._plan(metrics, request, call, flush, step, awaited=awaited)
                pending = None
                if planned is not None:
                    request, flush, wait = planned
                    pending = start(request, call, background=not awaited)
                    if call.index == 0 and not (is_last_step or pending.skipped):
                        self._warn_of_wait(step, wait)
        except Exception as error:
            if call.repeats_earlier:
                if to_storage:
                    self.schedule.repeat(step)
                error.add_note(f"jaxckpt: step {step} is not saved because of this: call save({step}, …) again")
                raise
            if attempts is None or not (attempts.is_handled or attempts.handle_unprepared(call, error)):
                raise
            if awaited:
                return False
            pending = _failed_save(destination, call, step, error)  # as in the processes that have begun to save it
        if pending is None or pending.skipped:
            if call.index == 0:
                _log.info("step %d is skipped, because an earlier step is still being saved", step)
            return False
        if flush is not None or self.local is None:
            self.schedule.record_save()
        self.last_save.set_pending(pending, step)
        self.preemption.saved_step = step
        if flush is not None and self.local is not None:
            self.local.flush = flush
            if flush_attempts is not None:
                flush_attempts.local = pending
            self.last_flush.set_pending(flush.begin(pending), step, pending)
        return True

    def _plan(
        self,
        metrics: Mapping[str, Any] | None,
        request: SaveRequest,
        call: Call,
        flush: Flush | None,
        step: int,
        *,
        awaited: bool,
    ) -> tuple[SaveRequest, Flush | None, _Wait] | None:
        """What is saved; what will flush it, if it is not saved only in the local folders; and the earlier save that it
        waits for. None if it is skipped."""
        require_on_done(request.on_done)
        request = replace(
            request,
            step=StepRecord(step, _recorded_metrics(metrics, request.is_last_step)),
            subtrees=self._fitting_subtrees(request),
            plan_cache=self.plan_cache,
            reuse_cache=self.reuse_cache if self.local is None else None,
        )
        if self.local is None:
            return request, None, _Wait(self.last_save.pending)
        may_skip = self.options.when_busy == "skip" and not (awaited or request.is_last_step)
        if flush is not None and may_skip and self.local.is_flushing(call):
            if not self.local.is_due(step):
                return None
            if call.index == 0:
                _log.info("step %d is saved only locally, because an earlier step is still being flushed", step)
            flush, self.unflushed_step = None, step
        if flush is None and self.local.is_blocked_by_flush(step, call):
            return None
        wait = _Wait((self.last_save if flush is None else self.last_flush).pending)
        if flush is not None:
            self.unflushed_step = None
            request = replace(request, on_done=None)  # the flush calls it
        if flush is not None or (self.last_flush.pending is not None and self.last_flush.pending.done):
            try:
                self.last_flush.wait()
            except Exception:
                call.repeats_earlier = True
                raise
        options = replace(self.options, max_bytes_per_second=None)
        return replace(request, destination=ProcessFolders(self.local, step, flush), options=options), flush, wait

    def warn_of_unflushed_step(self) -> None:
        """At the end, log that the last step that was due is lost with the hosts."""
        if self.unflushed_step is not None:
            _log.warning("step %d is only in the local folders: when_busy is 'skip'", self.unflushed_step)

    def _warn_of_wait(self, step: int, wait: _Wait) -> None:
        """Log that a step has waited for an earlier save, if it is long, and twice as long as the last time."""
        if wait.earlier is None or wait.seconds < self.warned_wait_seconds:
            return
        self.warned_wait_seconds = 2 * wait.seconds
        _log.warning(
            'step %d waited %.0f s for the save of step %s: raise every=, or pass Options(when_busy="skip")',
            step,
            wait.seconds,
            wait.earlier.step,
        )

    # The last step of a preempted job --------------------------------------------------------------------

    def _finish_earlier_saves(self, step: int, *, overwrite: bool) -> bool:
        """Wait for earlier saves before a preemption deadline. Returns whether they have saved this step, so that it
        need not be saved again. Saves of other steps get half of the time, because this one needs the other half."""
        self.failures.supersede()
        flush = None if self.local is None else self.local.flush
        if flush is not None and (overwrite or flush.step != step):
            flush.call.cancellation.cancel(JaxckptError("a newer step is flushed instead, since the job was preempted"))
        for last in (self.last_save, self.last_flush):
            try:
                last.hurry(self.preemption.seconds_left() / (1 if last.step == step and not overwrite else 2))
            except Exception as error:
                _log.warning("an earlier save was not completed: %s", error)
        return not overwrite and step == (self.last_save if self.local is None else self.last_flush).step

    def _finish_preempted(self, step: int, saved: bool) -> None:
        is_saved = saved and self.last_save.wait(self.preemption.seconds_left())
        # If it is not abandoned here, `close` waits for it forever.
        in_time = self.last_flush.wait(self.preemption.seconds_left()) and is_saved
        outcome = f"step {step} is saved" if in_time else f"step {step} was not saved within the deadline"
        if is_saved and not in_time:
            outcome = f"step {step} is saved in the local folders, but was not flushed within the deadline"
        _log.log(logging.WARNING if in_time else logging.ERROR, "the job was preempted: %s", outcome)
        if in_time:
            self.failures.forget_unsaved()
            self.local_failures.forget_unsaved()
        self.preemption.mark_reported()
        self.preemption.raise_earlier_error(outcome)
        if self.on_preemption == "exit":
            raise Preempted(f"the job was preempted: {outcome} in {self.directory.url}")

    # Waiting ---------------------------------------------------------------------------------------------

    @property
    def pending(self) -> RunningSave | None:
        """The last background save, unless it has been waited for."""
        return self.last_flush.pending or self.last_save.pending

    @property
    def saved_step(self) -> int | None:
        """The step of the last save, also in local folders only; None if it has failed."""
        return max((last.step for last in (self.last_save, self.last_flush) if last.step is not None), default=None)

    def wait(self) -> None:
        """Wait until the last save is published. Raises its error, and StorageError if the directory has been replaced
        by another, in which the step would not be found."""
        try:
            self.last_save.wait()
        except Exception:  # an interrupt does not wait for the flush
            self.last_flush.wait()
            raise
        self.last_flush.wait()
        self.directory.require_same_folder()

    def raise_unsaved(self) -> None:
        """Raise the error of the last step, once, if it was not saved and training has continued."""
        self.local_failures.raise_unsaved()
        self.failures.raise_unsaved()


def _failed_save(destination: RunStep, call: Call, step: int, error: Exception) -> RunningSave:
    """A save that has failed in this process before it began, and whose error has been dealt with."""
    failed = RunningSave(destination.store, 0, time.perf_counter(), call.watchdog, step)
    failed.is_raised = True
    failed.end(error.with_traceback(None))  # its frames would hold arrays
    return failed


def _recorded_metrics(metrics: Mapping[str, Any] | None, is_last_step: bool) -> dict[str, float | None]:
    """The metrics of a step. The last step of a preempted job is saved without them if they are invalid."""
    try:
        return recorded_metrics(metrics)
    except InputError as error:
        if not is_last_step:
            raise
        _log.warning("the job was preempted, so its last step is saved without metrics: %s", error)
        return {}
