"""A run's Checkpointer: saves the steps that are due, and the last step when the job is preempted; restores them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import reprlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, Unpack, cast, overload

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._formats.export import StepExport
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous, cause_of, process_names
from jaxckpt._keywords import explain_names
from jaxckpt._local_tier.peer_reads import DamagedError
from jaxckpt._local_tier.recovery import LocatedStep
from jaxckpt._local_tier.tier import LocalBytes, LocalSteps, LocalTier
from jaxckpt._model.manifest import require_json
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, options_or_default, require_bool, require_seconds
from jaxckpt._pipeline.lanes import run_alone, run_to_the_end
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._restore.differences import Strict
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import DescribedTree, RestoreArguments, T, run_restore
from jaxckpt._rules.rename import Renaming
from jaxckpt._rules.rule_set import Rules
from jaxckpt._run_folder.metrics import metrics_of
from jaxckpt._run_folder.steps import IncidentLog, Mode, require_step
from jaxckpt._runs.deletion import Deletion
from jaxckpt._runs.directory import Directory
from jaxckpt._runs.failures import Failures
from jaxckpt._runs.preemption import PreemptionListener
from jaxckpt._runs.resumption import (
    Fallback,
    Resplit,
    StepFinder,
    other_steps,
    restore_process_state,
    target_of,
)
from jaxckpt._runs.retention import BestRule, Predicate, RetentionPolicy
from jaxckpt._runs.run import Run, StepName
from jaxckpt._runs.saving import RunStep, Saver, SaveSchedule
from jaxckpt._save.describe import describe
from jaxckpt._save.request import SaveRequest
from jaxckpt._save.reuse import ReuseCache
from jaxckpt._save.running_saves import PendingSave, SaveInfo
from jaxckpt._store.store import await_writes
from jaxckpt.errors import InputError, JaxckptError, PeersDisagreeError, Preempted


@explain_names
class Checkpointer(Run):
    """A `Run` that writes: it saves steps into a directory, restores them, and deletes old steps by rules.

    Every process creates a Checkpointer with the same arguments and calls the same methods in the same order, with
    `save` at every step. Each step is an ordinary checkpoint at `<directory>/<step in 8 digits>`. A new Checkpointer
    deletes half-written and half-deleted steps of a killed run. On an object store, these could belong to a job that is
    still running, so they are deleted once a newer step is published.

    A step is saved if `every`, `every_seconds` or `save_if` asks for it. A step is kept if any keep_ rule asks for it,
    or if it is the newest; without rules, all steps are kept. Pinned steps (`Run.pin`) and steps that a reader holds
    (`Checkpoint.hold`, `follow`) are always kept.

    The rules apply as soon as this Checkpointer has saved or restored a step, and then after each save. If they differ
    from those of the last Checkpointer of the directory, a warning names the existing steps that they do not keep, and
    a restore does not delete these yet, but the first save. A background thread deletes older steps that no rule keeps;
    `save` does not wait for it. If a deletion fails, for example for lack of permission, whichever comes first raises
    the error: `wait`, `close`, or the next `save` of a due step, which then does not save its step. The manifest is
    deleted first, so a reader finds the whole step or none.

    Args:
        directory: A local path or a URL, as for `save`.
        every: Save the steps that are multiples of this number; `save` returns False for others. None: every step,
            unless `every_seconds` or `save_if` is given.
        every_seconds: Save a step when this many seconds have passed since the last save or the start, by process 0's
            clock. In a job of several processes, the save may be late by up to 1/60 of that time.
        save_if: Save a step if this function of (step, metrics) returns True. Process 0 decides; in a job of several
            processes, all wait for its decision at each step.
        keep_last: How many of the newest steps to keep.
        keep_last_seconds: Keep steps that were saved less than this many seconds ago.
        keep_every: For each multiple of this number, keep the first step at or after it: the multiple itself if it was
            saved. For the multiple 0, only step 0 is kept.
        keep_every_seconds: Of the steps saved in each interval of this many seconds, keep the first: with 3600, the
            first step of each hour. Intervals are counted in UTC, and steps have times in whole seconds.
        keep_best: (name of a metric, "min" or "max"): keep the step with the best value; of equal values, the newest.
            (name, mode, 3) keeps the best three; a list of rules keeps the steps of each. A save whose `metrics` lack
            that name is an error, and so is a save without `metrics` until a step has it: pass float("nan") for a step
            that was not measured.
        keep_if: Keep steps for which this function of (step, metrics) returns True. A metric that is NaN is None, as in
            `save_if`. It is called after each save, for each step, in a background thread of process 0.
        keep_last_of: For each subtree, by path or glob: how many of the newest steps keep it. With {"opt_state": 1},
            only the newest step keeps "opt_state"; the rest of the older steps can still be restored. A path that
            matches nothing in the tree is an error at the first call of `save`. The last step of a preempted job is
            saved nevertheless.
        keep_existing: No rule deletes steps that existed when a Checkpointer with these rules first opened the
            directory.
        trash: Move steps to `<directory>/_trash` instead of deleting them. Only on file systems.
        background: Save with `save_async`. If False, save with `save`, which then also waits for deletions, as does the
            first restore.
        on_failure: What follows if the storage fails while a step is saved: no space, no permission, an I/O error, or
            an error of the server after its retries. "raise": the next `save` of a due step raises the
            error and does not save its step; calling it again does. "continue": training continues without the step.
            "retry": the step is tried again, after 0.1 s and then twice the time before, up to 60 s, for about
            three minutes, or until the next step is due, which is saved in its place. This process's share of the data
            stays in host memory until then. Process 0 decides for all. With `background=False`, `save` waits for all
            attempts, and returns False if the step is not saved. Each failure is logged (ERROR), recorded in the run
            (`incidents`), and reported to jax.monitoring ("/jaxckpt/failed_save"). If the last step was not saved,
            `wait` and `close` raise its error. Any other error is always raised. With `local`, local steps and steps in
            the directory are counted apart; "retry" copies a step to the directory again, and local steps wait.
        max_failures: With "retry" and "continue": how many steps in a row must fail until the next `save` raises.
        max_unsaved_seconds: Likewise, how many seconds may pass without a published step before a failure is raised.
            None: no limit.
        fail_fast: After a background save has failed, raise its error from the next `save`, even if no step is due.
            By default the next `save` that is due raises it.
        on_preemption: What `save` does when the job is preempted, by SIGTERM or by JAX's preemption service. It saves
            the step, due or not; then "exit" raises `Preempted`, a SystemExit, and "continue" returns with `preempted`
            true. "ignore" does not listen: use it for a second Checkpointer of a job, with different step numbers.
        preemption_seconds: How long the save of the last step may take once this process has been notified of a
            preemption. 20 by default, because Kubernetes and Slurm end a process 30 s after SIGTERM by default.
        local: A `LocalTier`: steps are first saved into a folder on each host, with copies on other hosts.
        metadata: Any JSON object that describes the run, such as its configuration: `metadata()` returns it. The first
            Checkpointer of the directory that is given one writes it. Later ones keep that, and log a warning if
            theirs differs. In a job of several processes, every process must give the same.
        options: See `Options`.

    Raises:
        InputError: An argument is invalid, or the directory is itself a checkpoint.
        StorageError: The directory cannot be created, read or listed.
        PeersDisagreeError: The processes gave different arguments.

    Examples:
        >>> import shutil, jax.numpy as jnp, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/steps", ignore_errors=True)
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/steps", every=10, keep_last=2) as steps:
        ...     last, state = steps.restore_or_init(lambda: {"w": jnp.zeros(4)})
        ...     for step in range((last or 0) + 1, 35):
        ...         state = {"w": state["w"] + 1}
        ...         saved = steps.save(step, state)
        >>> steps.steps()
        [20, 30]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        save_if: Predicate | None = None,
        keep_last: int | None = None,
        keep_last_seconds: float | None = None,
        keep_every: int | None = None,
        keep_every_seconds: float | None = None,
        keep_best: BestRule | Sequence[BestRule] | None = None,
        keep_if: Predicate | None = None,
        keep_last_of: Mapping[str, int] | None = None,
        keep_existing: bool = False,
        trash: bool = False,
        background: bool = True,
        fail_fast: bool = False,
        on_failure: Literal["raise", "retry", "continue"] = "raise",
        max_failures: int = 3,
        max_unsaved_seconds: float | None = None,
        on_preemption: Literal["exit", "continue", "ignore"] = "exit",
        preemption_seconds: float = 20.0,
        local: LocalTier | None = None,
        metadata: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        with Call.of("Checkpointer", directory, options) as call:
            if on_preemption not in ("exit", "continue", "ignore"):
                raise InputError(f'on_preemption must be "exit", "continue" or "ignore", found {on_preemption!r}')
            self._options = options_or_default(options)
            rules = RetentionPolicy.of(
                keep_last=keep_last,
                keep_last_seconds=keep_last_seconds,
                keep_every=keep_every,
                keep_every_seconds=keep_every_seconds,
                keep_best=keep_best,
                keep_if=keep_if,
                keep_last_of=keep_last_of,
            )
            self._due = SaveSchedule(every, every_seconds, save_if, call.count)
            self._directory = Directory(directory, rules, self._options)
            self._store = self._directory.store
            self._deletion = Deletion(
                self._directory,
                self._options,
                trash=require_bool(trash, "trash"),
                keep_existing=require_bool(keep_existing, "keep_existing"),
            )
            preemption = PreemptionListener(call.count, require_seconds(preemption_seconds, "preemption_seconds"))
            self._local = None if local is None else LocalSteps(_require_local_tier(local), self._options)
            incidents = IncidentLog(self._store, self._directory.require_same_folder)
            failures = Failures(on_failure, max_failures, max_unsaved_seconds, incidents)
            failures.require_fitting(self._options, is_local=self._local is not None)
            local_failures = Failures(on_failure, max_failures, max_unsaved_seconds, incidents)
            self._step_finder = StepFinder(self._directory, self._local, self._options)
            self._saver = Saver(
                self._directory,
                self._deletion,
                self._due,
                preemption,
                self._local,
                self._options,
                require_bool(background, "background"),
                require_bool(fail_fast, "fail_fast"),
                on_preemption,
                ReuseCache(self._directory.newest),
                failures,
                local_failures,
            )
            self._restored_step: int | None = None
            self._is_training = self._records_end = False
            self._exited_cleanly = True
            self._is_process_0 = call.index == 0
            call.run(functools.partial(self._open, call, _require_metadata(metadata)))

    def _open(self, call: Call, metadata: dict[str, Any] | None) -> None:
        with call.rendezvous("opening the directory of steps") as rendezvous:
            local = self._local.settings(call.count) if self._local else {"local": None}
            calls = {"on_preemption": self._saver.on_preemption, "fail_fast": self._saver.fail_fast}
            calls |= {**self._due.settings, **self._saver.failures.settings, "metadata": _summary(metadata)}
            hosts = _require_same_settings(rendezvous, {**local, **calls})
            if self._is_process_0:
                self._deletion.open(*self._directory.open(metadata))
            agreement = rendezvous.broadcast(
                self._local.agreement(hosts, self._directory.store) if self._local and hosts else ""
            )
        if self._local is not None:
            with call.rendezvous("opening the local folders") as rendezvous:
                self._local.open(agreement, self._directory.store, rendezvous)

    def _require_step(self, step: object, verb: str) -> int:
        """The number of a step. Raises InputError in a way that keeps the calls of all processes synchronized."""
        try:
            return require_step(step)
        except InputError as error:
            hint = "; best_step() and steps() return such numbers, and the target is the next argument"
            with self._directory.begin_call(verb):
                raise InputError(f"{error}{hint if verb == 'Checkpointer.restore' else ''}") from None

    def _begin_training(self) -> None:
        """Note that this Checkpointer trains, and does not only read. It may have been closed before."""
        if self._is_training:
            return
        self._saver.preemption = self._saver.preemption.renewed()
        self._exited_cleanly = True
        if self._is_process_0:
            self._run_to_the_end(self._prepare_directory)
        self._is_training = self._records_end = True

    def _prepare_directory(self) -> None:
        self._directory.remove_end()
        self._deletion.begin_training()

    def _run_to_the_end(self, work: Callable[[], None]) -> None:
        """Do work of process 0 in a lane. An interrupt ends the wait for it, but not the work."""
        run_to_the_end(work, self._options.timeout_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._exited_cleanly = False
        try:
            self._close(error)
        except Exception as failure:
            if failure is error:
                return
            if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
                raise
            # It must not hide the error that ends the block. Python shows no notes of a SystemExit.
            message = f"closing the Checkpointer failed too: {type(failure).__name__}: {failure}"
            error.add_note(f"jaxckpt: {message}")
            if not isinstance(error, Exception):
                _log.error("%s", message)

    def __repr__(self) -> str:
        return f"<Checkpointer {self._directory.url!r}: {self._directory.policy}>"

    # Saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        dtype: Dtypes = None,
        metrics: Mapping[str, Any] | None = None,
        process_state: Mapping[str, Any] | None = None,
        metadata: Any = None,
        export: StepExport | None = None,
        on_done: Callable[[SaveInfo], object] | None = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> bool:
        """Save a step if it is due. Every process calls this at every step; it also detects preemption.

        Args:
            step: The number of the step, from 0 to 2**62.
            tree: As for `jaxckpt.save`. It is safe to donate its arrays as soon as this returns.
            mesh: As for `jaxckpt.save`. Not with `local`: each process then writes what its own devices hold.
            specs: As for `jaxckpt.save`: with `mesh`.
            dtype: As for `jaxckpt.save`.
            metrics: Numbers by name, for `keep_best` and `metrics(step)`. Those of process 0 are recorded. They may be
                left out for a step that was not evaluated; the last step of a preempted job never needs them.
            process_state: As for `jaxckpt.save`: state that differs between processes.
            metadata: Any JSON value.
            export: A `jaxckpt.formats.Export`: also write the step as a Hugging Face folder, by all processes. Not with
                `local`, nor for the last step of a preempted job.
            on_done: As for `jaxckpt.save_async`: called with the result. Not called if this returns False.
            force: Save even if the step is not due.
            overwrite: Replace this step if it exists.

        Returns:
            Whether the step is being saved, if only in local folders: False if it is not due, or is skipped by
            `Options.when_busy`; with `background=False`, also if it could not be saved and `on_failure` lets
            training continue.

        Raises:
            Preempted: The job was preempted. The message says whether this step was saved in time.
            BaseException: The exception that the program's own SIGTERM handler raised when the job was preempted.
            Exception: As `jaxckpt.save_async`; also the error of an earlier background save or deletion.
            CheckpointExistsError: The step exists, and `overwrite` is false.
            InputError: The step is older than the newest, and the rules would delete it immediately; or its folder is a
                symbolic link; or `mesh` or `specs` is given to a Checkpointer with `local`.
        """
        self._begin_training()
        step = self._require_step(step, "Checkpointer.save")
        with self._directory.checking("Checkpointer.save"):
            force, overwrite = require_bool(force, "force"), require_bool(overwrite, "overwrite")
            if self._local is not None and not (mesh is None and specs is None):
                raise InputError(
                    "save(mesh=…, specs=…) needs a Checkpointer without local=: local steps keep the layout of the"
                    " arrays, because each process writes what its own devices hold"
                )
            if export is not None and (self._local is not None or not isinstance(export, StepExport)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(
                    "export= takes a jaxckpt.formats.Export, in a Checkpointer without local=; found"
                    f" {reprlib.repr(export)}"
                )
        destination = RunStep(
            self._directory,
            self._deletion,
            self._saver.failures,
            step,
            export,
            overwrite=overwrite,
            follows_local_step=self._local is not None,
        )
        request = SaveRequest(
            destination, self._options, tree, mesh, specs, dtype, metadata, process_state, on_done=on_done
        )
        return self._saver.save(step, metrics, destination, request, force=force)

    def should_save(self, step: int, *, metrics: Mapping[str, Any] | None = None, overwrite: bool = False) -> bool:
        """Whether `save` would save this step now. Every process calls this at every step, and gets the same answer.

        For a loop that must prepare what it saves: it may call `save` only if this returns True. The rules are those of
        `save`, and so is the communication; for a due step process 0 also lists the directory. The next `save` of this
        step follows the decision, even if some time has passed. It may still skip the step by `Options.when_busy`.

        Args:
            step: The number of the step, from 0 to 2**62.
            metrics: Numbers by name, for `save_if`. Those of process 0 count. None: no metrics. They are checked if the
                step is due.
            overwrite: Whether `save` is called with overwrite=True.

        Returns:
            True if the step is due, in the directory or in local folders, and does not exist yet. Also True if the job
            was preempted and stops at this step: `save` must then be called. False in all other cases.

        Raises:
            InputError: An argument is invalid, or `save_if` does not return True or False.
            Exception: With `fail_fast`, the error of an earlier background save; also what `save_if` raises.

        Examples:
            >>> import shutil, jaxckpt
            >>> shutil.rmtree("/tmp/jaxckpt-doc/due", ignore_errors=True)
            >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/due", every=10) as checkpointer:
            ...     for step in range(1, 35):
            ...         if checkpointer.should_save(step):
            ...             saved = checkpointer.save(step, {"average": step / 2})
            >>> checkpointer.steps()
            [10, 20, 30]
        """
        self._begin_training()
        step = self._require_step(step, "Checkpointer.should_save")
        with self._directory.checking("Checkpointer.should_save"):
            overwrite = require_bool(overwrite, "overwrite")
        return self._saver.should_save(step, metrics, overwrite=overwrite)

    def local_bytes(self, tree: Tree) -> LocalBytes:
        """The bytes that a local step of a tree takes in this process. Nothing is saved or communicated.

        Raises:
            InputError: The Checkpointer has no `local=`.
            TreeError: As for `jaxckpt.save`.
        """
        if self._local is None:
            raise InputError("local_bytes(tree) needs Checkpointer(local=…)")
        draft = describe(tree, None, None, self._options, tuple(self._directory.policy.keep_last_of))
        return self._local.plan(draft, self._options)

    def delete(self, step: int) -> None:
        """Delete a step, in the directory and in local folders, if it exists. Every process calls this.

        Raises:
            InputError: The step is pinned, or the directory has no other step.
        """
        step = self._require_step(step, "Checkpointer.delete")
        with self._directory.begin_call("Checkpointer.delete", step) as call:
            call.here(self._saver.wait)
            call.here(functools.partial(await_writes, self._directory.store))  # also of another object
            call.run(functools.partial(self._delete_collectively, step, call))
        self._saver.last_save.forget(step)
        self._saver.last_flush.forget(step)

    def _delete_collectively(self, step: int, call: Call) -> None:
        with call.rendezvous("deleting a step") as rendezvous:
            rendezvous.gather("")
            if self._is_process_0:
                self._deletion.delete(step)
            rendezvous.broadcast("")
            if self._local is not None:
                self._local.delete(step, rendezvous)

    @property
    def preempted(self) -> bool:
        """Whether the job was preempted and `save` or `close` has handled it. If that save failed or missed the
        deadline, the last step is not saved."""
        return self._saver.preempted

    @property
    def pending(self) -> PendingSave | None:
        """The last background save, unless it has been waited for."""
        running = self._saver.pending
        return None if running is None else PendingSave(running)

    def wait(self) -> None:
        """Wait until the last save is published and old steps are deleted. Raises the error of either.

        Process 0 deletes, so the other processes of a job do not wait for deletions and may still list deleted steps.
        """
        self._saver.wait()
        self._saver.raise_unsaved()
        self._deletion.wait()
        self._deletion.raise_failure()

    def close(self) -> None:
        """Wait for the last save and for deletions, raise their errors, and record the end of the run.

        `follow` ends at that record, and the next Checkpointer that trains removes it. A preempted Checkpointer does
        not write it, nor does a `with` block that ends with an error. A Checkpointer that called neither `save` nor
        `restore_or_init` leaves it as it is. This also restores the previous SIGTERM handler.

        A closed Checkpointer can be used again, for example by a second `fit` with the same callback. Its next `save`
        or `restore_or_init` removes the record, and `save` listens for SIGTERM again. Then close it again.

        Raises Preempted if `on_preemption` is "exit" and this process was notified of a preemption after the last call
        of `save`: in a job of one process, by SIGTERM. If the program's own SIGTERM handler has raised, raises that
        exception instead.
        """
        was_preempted = self._saver.preempted
        lost = self._close(None)
        self._saver.preemption.raise_earlier_error("the last save")
        if self._saver.preempted and not was_preempted:
            after = f"the job was preempted after the last save in {self._directory.url}, which is complete"
            raise Preempted(lost or after)

    def _close(self, error: BaseException | None) -> str | None:
        """Close it, at the end of the job or because of an error. Returns what is lost if the job was preempted and
        ends without its last step."""
        try:
            try:
                self._saver.wait()
                self._saver.raise_unsaved()
                if self._is_process_0:
                    self._saver.warn_of_unflushed_step()
            finally:
                preemption = self._saver.preemption
                preemption.saved_step = self._saver.saved_step
                preemption.close()  # until here, SIGTERM does not end the last save
                if preemption.must_exit or (preemption.is_notified and self._saver.on_preemption == "exit"):
                    self._saver.preempted = True
        except Exception as failure:
            self._exited_cleanly = False
            self._report_end(error or failure)
            self._close_in_process_0()
            raise
        else:
            lost = self._report_end(error)
            self._close_in_process_0()
            return lost
        finally:
            self._is_training = False
            self._directory.release()

    def _report_end(self, error: BaseException | None) -> str | None:
        if error is None:
            return self._saver.preemption.report_end("the Checkpointer is closed")
        # The signal may have caused the error, a moment ago.
        return self._saver.preemption.report_end(f"ends with {type(error).__name__}", seconds=2.0)

    def _close_in_process_0(self) -> None:
        if self._is_process_0:
            self._run_to_the_end(self._close_directory)

    def _close_directory(self) -> None:
        self._saver.failures.incidents.write()
        if self._records_end and self._exited_cleanly and not self._saver.preempted:
            self._directory.note_end()
        self._records_end = False
        self._deletion.close(self._saver.preemption.seconds_left() if self._saver.preempted else None)
        self._deletion.raise_failure()

    # Restoring -------------------------------------------------------------------------------------------

    @overload
    def restore(
        self,
        step: StepName | None = None,
        target: DescribedTree = None,
        *,
        on_unreadable: Literal["raise", "previous"] = "raise",
        **arguments: Unpack[RestoreArguments],
    ) -> Tree: ...
    @overload
    def restore(
        self,
        step: StepName | None,
        target: T,
        *,
        on_unreadable: Literal["raise", "previous"] = "raise",
        **arguments: Unpack[RestoreArguments],
    ) -> T: ...
    @overload
    def restore(
        self,
        step: StepName | None = None,
        *,
        target: T,
        on_unreadable: Literal["raise", "previous"] = "raise",
        **arguments: Unpack[RestoreArguments],
    ) -> T: ...
    def restore(  # pyright: ignore[reportIncompatibleMethodOverride] - it has all arguments of Run.restore
        self,
        step: StepName | None = None,
        target: Tree = None,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: Strict = True,
        dtype: Dtypes = None,
        tied: bool = False,
        on_unreadable: Literal["raise", "previous"] = "raise",
    ) -> Tree:
        """Restore a step, by default the newest. Every process calls this.

        The other arguments are those of `jaxckpt.restore`, except `path` and `options`, which the Checkpointer sets,
        and `on_unreadable`, which is that of `restore_or_init`.

        It first waits for a running save, which may be of this step. With `local`, a step is read from the local
        folders if together they hold all of it; if a file there is damaged, a copy in another folder or in storage is
        read instead.

        Raises:
            NotACheckpointError: The step does not exist, or the run has no steps.
            Exception: As `jaxckpt.restore`; also the error of a background save.
        """
        request = RestoreRequest(target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied)
        number = self._named_step(step)
        return self._restore_readable(number, on_unreadable, lambda _: request, request.rules is None)[1]

    def _restore_readable(
        self,
        step: int | None,
        on_unreadable: object,
        request_for: Callable[[LocatedStep], RestoreRequest],
        allow_peers: bool,
        init: Callable[[], Tree] | None = None,
    ) -> tuple[int | None, Tree]:
        """Restore a step, by default the newest, or an older one if `on_unreadable` says so."""
        with self._directory.checking("Checkpointer.restore"):
            if on_unreadable not in ("raise", "previous"):
                raise InputError(f'on_unreadable must be "raise" or "previous", found {on_unreadable!r}')
        fallback = Fallback(self._directory, self._saver.failures.incidents) if on_unreadable == "previous" else None
        while True:
            chosen = request = restored = error = None
            try:
                chosen = self._find_step(step, allow_peers=allow_peers)
                request = request_for(chosen)
                restored = self._restore(step, chosen, request, init)
                if fallback is None:
                    return restored
            except BaseException as failure:
                if fallback is None:
                    self._add_hint(failure, step if chosen is None else chosen.step)
                    raise
                error = failure
            with self._directory.begin_call("Checkpointer.restore") as call:
                tried = step if chosen is None else chosen.step
                is_of_caller = chosen is not None and request is None
                choose = functools.partial(fallback.next_step, call, tried, error, is_of_caller=is_of_caller)
                following = call.run(choose)
            if restored is not None:
                return restored
            step = following

    def _add_hint(self, error: BaseException, step: int | None) -> None:
        """Add to an error that means that a step cannot be read which others there are."""
        if cause_of(error) and not any("other steps" in note for note in getattr(error, "__notes__", ())):
            with contextlib.suppress(JaxckptError):  # which must not replace this error
                others = run_alone(functools.partial(other_steps, self._directory, step), self._options.timeout_seconds)
                if others:
                    error.add_note(
                        f"other steps in {self._directory.url}: {others}; restore(step=…) takes one of them, and"
                        ' on_unreadable="previous" the newest that can be read'
                    )

    def _named_step(self, step: StepName | None) -> int | None:
        """The number of a step that is given by name; None for the newest."""
        if not isinstance(step, str) or step == "latest":
            return None if isinstance(step, str) else step
        with self._directory.begin_call("Checkpointer.restore") as call:
            call.here(self._await_saves)
            return call.in_process_0("looking for a step", functools.partial(self._number, step))

    def _restore(
        self, step: int | None, chosen: LocatedStep, request: RestoreRequest, init: Callable[[], Tree] | None = None
    ) -> tuple[int | None, Tree]:
        if chosen.step is None and init is not None:
            self._step_finder.record_restored(chosen)
            return None, init()
        number = self._step_finder.require_found(chosen)
        try:
            source = chosen.local_source
            options = self._options if source is None else source.options_to_read(self._options)
            arrivals = source and functools.partial(source.arrivals, through_rules=request.rules is not None)
            url = self._directory.child(number).url
            tree = run_restore(url, request, options, source=source, arrivals=arrivals)
        except DamagedError as error:
            assert chosen.local_source is not None
            self._step_finder.mark_damaged(chosen.local_source, error)
            return self._restore(step, self._find_step(step, allow_peers=request.rules is None), request, init)
        except JaxckptError as error:
            with contextlib.suppress(JaxckptError):  # which must not replace this error
                if note := self._directory.hint(number, error):
                    error.add_note(note)
            raise
        self._restored_step = number
        self._step_finder.record_restored(chosen)
        if self._is_process_0:
            self._run_to_the_end(functools.partial(self._deletion.handle_restored, number))
            if not self._saver.background:
                self._deletion.wait()
        return number, tree

    def restore_or_init(
        self,
        init: Callable[[], T],
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: Strict = True,
        dtype: Dtypes = None,
        tied: bool = False,
        on_unreadable: Literal["raise", "previous"] = "raise",
    ) -> tuple[int | None, T]:
        """Restore the newest step, or start with the result of `init` if there are no steps. Every process calls this.

        With strict={"opt_state": False}, `init` makes the leaves of this subtree that the checkpoint lacks: a run can
        continue with a new optimizer, or with an average of the weights that was not saved.

        Args:
            init: Makes the initial tree. The restored tree has the same structure, dtypes and shardings. A function
                jitted with out_shardings is not run to find these; it is run only for leaves that do not come from the
                checkpoint, and XLA removes the rest. Any other function is called, and its result is freed before the
                checkpoint is read, except for these leaves.
            mesh: As for `jaxckpt.restore`; needed only for uncommitted arrays that were saved from several devices.
            specs: As for `jaxckpt.restore`.
            rename: As for `jaxckpt.restore`.
            select: As for `jaxckpt.restore`; `init` makes the other leaves.
            strict: As for `jaxckpt.restore`. Where it is False, `init` makes the leaves that the checkpoint lacks.
            dtype: As for `jaxckpt.restore`. It applies to restored leaves, also instead of the dtypes of `init`. Leaves
                that `init` makes keep their dtypes.
            tied: As for `jaxckpt.restore`.
            on_unreadable: What follows if the step is damaged, or its storage refuses to read it. "raise": the error,
                with a note that lists the other steps. "previous": the next older step is restored, the same in every
                process. Each step that is passed over is logged (ERROR) and recorded in the run (`incidents`); training
                may then save it again. If no step can be read, this raises the error of the newest; `init` is only
                called to start if the run has no steps.

        Returns:
            (step, tree): the number and the tree of the restored step, or None and the result of `init`.

        Raises:
            InputError: `init` is not a function.
            Exception: As `jaxckpt.restore`.
        """
        if not callable(init):  # pyright: ignore[reportUnnecessaryComparison]
            with self._directory.begin_call("Checkpointer.restore"):
                raise InputError(
                    "init must be a function that makes the initial tree, found an object of type"
                    f" {type(init).__name__}"
                )
        self._begin_training()
        state: list[Any] = []

        def request_for(chosen: LocatedStep) -> RestoreRequest:
            try:
                if chosen.step is not None and not state:
                    state.extend(target_of(init))
            except BaseException:
                with self._directory.begin_call("restore", chosen.step):  # in which the other processes are notified
                    raise
            target, initial = state or (None, None)
            return RestoreRequest(target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied, initial=initial)

        allow_peers = not isinstance(rename, Rules)
        return self._restore_readable(None, on_unreadable, request_for, allow_peers, init)

    def process_state(self, name: str, step: int | None = None, *, resplit: Resplit | None = None) -> Any:
        """The value that this process saved as `process_state[name]`. Every process calls this.

        Args:
            name: One of the names given to `save`.
            step: The step. None: the step that was restored last, otherwise the newest.
            resplit: A function for a job with a different number of processes than the one that saved. It receives the
                list of saved values and the current number of processes, and returns one value for each process.

        Returns:
            The JSON value or bytes that were saved.

        Raises:
            NotACheckpointError: The step does not exist, or the run has no steps.
            InputError: A different number of processes saved and `resplit` is not given, or no state has that name.
            DataError: The stored state is not what was saved.
        """
        step = self._restored_step if step is None else step
        while True:
            chosen = self._find_step(step)
            source = chosen.local_source or self._directory.child(self._step_finder.require_found(chosen))
            with self._directory.begin_call("Checkpointer.process_state", chosen.step) as call:
                try:
                    return restore_process_state(call, source, name, resplit)
                except DamagedError as error:
                    assert chosen.local_source is not None
                    self._step_finder.mark_damaged(chosen.local_source, error)

    def _find_step(self, step: int | None, *, allow_peers: bool = True) -> LocatedStep:
        """Find a step, by default the newest, after the running save has ended. Every process calls this.

        For `allow_peers`, see `StepFinder.find`.
        """
        if step is not None:
            step = self._require_step(step, "Checkpointer.restore")
        with self._directory.begin_call("Checkpointer.restore") as call:
            call.here(self._await_saves)
            return call.run(functools.partial(self._step_finder.find, call, step, allow_peers=allow_peers))

    def _await_saves(self) -> None:
        """Wait for the running save of this Checkpointer, whose error this raises, and of any other one."""
        self._saver.last_save.wait()
        await_writes(self._directory.store)

    # Inspecting ------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The published steps, oldest first. One listing of the directory; only steps with a manifest count. Like the
        other methods, it first waits for a running save."""
        await_writes(self._directory.store)
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """The newest step, which `restore` would restore, or None. With `local`, every process calls this."""
        return max(self.steps(), default=None) if self._local is None else self._find_step(None).step

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The best step by a metric, by default that of the first rule of `keep_best`; None if no step has the metric.
        Raises InputError if `keep_best` has no such rule, unless metric and mode are both given; or if the steps have
        metrics, but none of this name."""
        bests = self._directory.policy.keep_best
        best = next((best for best in bests if metric in (None, best.metric) and mode in (None, best.mode)), None)
        if best is None and metric is not None and mode is not None:
            return super().best_step(metric, mode)
        if best is None:
            if metric is None:
                rule = "has no rule" if mode is None else f"has no rule with {mode!r}"
                raise InputError(f"keep_best {rule}: pass a metric and a mode, as in best_step('loss', 'min')")
            hint = closest_hint(str(metric), [best.metric for best in bests]) or "."
            raise InputError(
                f"keep_best has no rule for {metric!r}{hint} For any other metric, pass a mode, as in"
                f" best_step({metric!r}, 'min')"
            )
        while True:
            steps = self.steps()
            saved = self._directory.saved_steps(steps)  # of each step read once, not at each call
            self._directory.require_undamaged({*steps} - {step.number for step in saved})
            step = next(iter(best.steps(saved)), None)
            if step is None or self._directory.all_exist([step]):
                return step

    def metrics(self, step: StepName) -> dict[str, float | None]:
        """The metrics given to `save` for a step, and those that were added; None for NaN.
        Raises NotACheckpointError."""
        number = self._number(step)
        self._directory.require_same_folder()
        saved = self._directory.saved_step(number)
        if saved is not None:
            return metrics_of(self._store, number, saved.save_id, saved.record)
        return self._step_finder.metrics(number)


def _require_local_tier(local: object) -> LocalTier:
    """Raises InputError for anything else, such as the path of a folder."""
    if isinstance(local, LocalTier):
        return local
    value = f"jaxckpt.LocalTier({local!r})" if isinstance(local, str) else "jaxckpt.LocalTier(folder)"
    raise InputError(f"local must be a LocalTier: pass local={value}; found {reprlib.repr(local)}")


def _require_metadata(metadata: object) -> dict[str, Any] | None:
    """The metadata of a run as plain JSON. Raises InputError."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InputError(f"metadata must be a mapping of names to JSON values, found {reprlib.repr(metadata)}")
    return None if metadata is None else require_json(dict(cast("Mapping[Any, Any]", metadata)), "metadata")


def _summary(metadata: dict[str, Any] | None) -> str | None:
    """What processes compare of their metadata. It is short, because process 0 receives it from all."""
    text = None if metadata is None else json.dumps(metadata, sort_keys=True)
    return text if text is None or len(text) < 200 else f"<SHA-256 {hashlib.sha256(text.encode()).hexdigest()}>"


def _require_same_settings(rendezvous: Rendezvous, settings: Mapping[str, Any]) -> Sequence[str]:
    """Compare the settings, JSON values by name. Returns the name of each process's host in process 0, and nothing in
    the others. Every process calls this; process 0 raises PeersDisagreeError."""
    sent = list(map(json.loads, rendezvous.gather(json.dumps([settings, socket.gethostname()]))))
    for name, first in settings.items():
        differing = {process: values[name] for process, (values, _) in enumerate(sent) if values[name] != first}
        if differing:
            raise PeersDisagreeError(
                f"{process_names([*differing])} created the Checkpointer with {name}={next(iter(differing.values()))},"
                f" process 0 with {name}={first}: every process must give the same arguments"
            )
    return [host for _, host in sent]
