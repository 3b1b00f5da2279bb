"""Deletes steps according to the retention policy, in a lane, and completes deletions of killed runs."""

from __future__ import annotations

import datetime
import errno
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec

from jaxckpt._model import manifest as manifests
from jaxckpt._model.file_names import MANIFEST, is_data_folder, is_sealed
from jaxckpt._model.records import StepRecord
from jaxckpt._options import Options
from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import Latch, Task, is_shutting_down
from jaxckpt._run_folder.leases import Leases, marked_steps, pinned_steps, require_unpinned
from jaxckpt._run_folder.metrics import clear_step, remove_metrics_of_deleted_steps
from jaxckpt._run_folder.steps import RUN, TRASH, is_link, is_step, read_note, step_name
from jaxckpt._runs.directory import Directory
from jaxckpt._runs.retention import Decision, RetentionPolicy, SavedStep, creation_time
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt.errors import CorruptError, InputError, NotACheckpointError, StorageError, show_count

# Steps that existed before --------------------------------------------------------------------------------
#     _run/rules.json      {"rules": "…", "existing": [10, 20]}      the rules of the last Checkpointer that deleted
#                      steps
#
# A Checkpointer with other rules than the last one names the steps that they do not keep in a warning when it restores
# a step, and deletes them only after it has saved one. With the same rules, nothing is said: a resumed run continues.

RULES = "rules.json"


class _AppliedRules(msgspec.Struct, frozen=True):
    rules: str
    existing: list[int]


class ExistingSteps:
    """The steps that were there before. Process 0, in a lane."""

    def __init__(self, run: Store, policy: RetentionPolicy, *, keep: bool) -> None:
        """With `keep`, no rule deletes them."""
        self._run = run
        self._rules = f"{replace(policy, keep_if=None)!r}, {policy.keep_if is not None}, {keep}"
        self._keep = keep
        self._steps = frozenset[int]()
        self._is_known = self._is_deletable = False

    def find(self, steps: Collection[int]) -> None:
        """Note which steps exist when the Checkpointer is created."""
        self._steps = frozenset(steps)

    def spared(self, unwanted: Mapping[int, Decision], *, has_saved: bool) -> frozenset[int]:
        """Of the steps that no rule keeps, those that must not be deleted yet, or never. `has_saved` is whether this
        Checkpointer has published a step."""
        if not self._is_known:
            self._is_known = True
            if (recorded := self._read()) is not None:
                self._is_deletable, self._steps = not self._keep, frozenset(recorded)
                return self._steps if self._keep else frozenset()
            if self._keep:
                self.record()
            else:
                self._give_notice({step: unwanted[step] for step in sorted(unwanted) if step in self._steps})
        if has_saved and not (self._keep or self._is_deletable):
            self._is_deletable = True
            self.record()
        return frozenset() if self._is_deletable else self._steps

    def _give_notice(self, unwanted: Mapping[int, Decision]) -> None:
        by_loss: dict[tuple[str, ...], list[int]] = {}
        for step, decision in unwanted.items():
            by_loss.setdefault(decision.dropped_subtrees if decision.kept else (), []).append(step)
        for subtrees, steps in by_loss.items():
            shown = ", ".join(map(str, steps[:10])) + (", …" if len(steps) > 10 else "")
            _log.warning(
                "the keep_ rules of %s are new, and do not keep %s%s that existed before: %s. They are deleted after"
                " the first save; Checkpointer(keep_existing=True) keeps them, and so does a pin",
                self._run.url,
                f"{', '.join(subtrees)} of " if subtrees else "",
                show_count(len(steps), "step"),
                shown,
            )

    def record(self) -> None:
        """Note the rules in the run, so that the next Checkpointer with the same rules gives no notice."""
        record = _AppliedRules(self._rules, sorted(self._steps) if self._keep else [])
        try:
            self._run.create_child(RUN).replace(RULES, msgspec.json.encode(record))
        except StorageError:  # the next Checkpointer gives notice again
            return

    def _read(self) -> list[int] | None:
        """The steps that the last Checkpointer kept because they existed before it; None if its rules were others."""
        try:
            record = read_note(self._run, RULES, _AppliedRules)
        except (CorruptError, StorageError):
            return None
        return record.existing if record is not None and record.rules == self._rules else None


# Deletion -------------------------------------------------------------------------------------------------


class Deletion:
    """Deletes the steps of a directory that its rules no longer keep. Process 0 alone.

    After each save a lane makes one pass over the steps. While readers hold steps that no rule keeps, another one makes
    further passes, in case they have released them. The methods are called in lanes, which no interrupt reaches.
    """

    def __init__(self, directory: Directory, options: Options, *, trash: bool, keep_existing: bool) -> None:
        if trash and not directory.store.can_rename:
            raise InputError(
                f"trash=True needs a file system, where one rename moves a step; {directory.url} is on an object store."
                " Omit it, and turn on object versioning in the bucket to keep deleted objects"
            )
        self._directory = directory
        self._store = directory.store
        self._sync = options.sync
        self._trash = trash
        self._leases = Leases(self._store)
        self._existing = ExistingSteps(self._store, directory.policy, keep=keep_existing)
        self._has_leased_steps = False
        """Whether readers hold steps that no rule keeps."""

        self._deletion_lock = threading.Lock()  # one deletion at a time
        self._last_pass: Task[None] | None = None
        self._is_requested = False
        """Whether a pass has not begun yet."""

        self._polls = False
        self._closed = Latch()
        self._must_stop = False
        self._failure: Exception | None = None
        self._newest_saved = -1
        self._are_rules_applied = self._has_saved = False
        self._restored_step: int | None = None
        # A step is either deleted or saved: each side first announces its intention, then checks the other.
        self._deleting_step: int | None = None
        self._saving_step: int | None = None
        _all.add(self)

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child: the lanes and their current deletion belong to the parent."""
        self._deletion_lock = threading.Lock()
        self._last_pass, self._is_requested, self._polls, self._failure = None, False, False, None
        self._deleting_step = self._saving_step = None

    # Called by saves -------------------------------------------------------------------------------------

    def protect(self, step: int) -> None:
        """Protect a step that is about to be saved. If it is being deleted, wait for the end of the deletion."""
        self._saving_step = step
        while self._deleting_step == step:
            time.sleep(0.005)

    def end_protection(self) -> None:
        """End the protection of a step that is not saved."""
        self._saving_step = None

    def handle_published(self, saved: StepRecord, save_id: str, created: str) -> None:
        """Start to delete the steps that the rules do not keep, after a step was published. `created` is the time in
        its manifest, so that the rules decide about it as after a restart."""
        self._directory.remember(SavedStep(saved.number, creation_time(created), saved, save_id))
        self._saving_step = None
        self._has_saved = self._are_rules_applied = True
        self._newest_saved = max(self._newest_saved, saved.number)
        self._request_pass()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for at most `timeout_seconds` until all steps that no rule keeps and no reader holds are deleted."""
        if self._last_pass is not None:
            self._last_pass.wait(timeout_seconds)

    def take_failure(self) -> Exception | None:
        """The error of the last pass, once. The next save tries again."""
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.add_note(f"jaxckpt: this ended the deletion of steps in {self._store.url} that no rule keeps")
        return failure

    def raise_failure(self) -> None:
        """Raise the error of the last pass, once."""
        if (failure := self.take_failure()) is not None:
            raise failure

    # Called by the Checkpointer --------------------------------------------------------------------------

    def open(self, notes: list[str], names_in_steps: Mapping[str, list[str]]) -> None:
        """Complete the deletions of killed runs. The rules apply only after the first restore or save."""
        self._existing.find([int(name) for name, names in names_in_steps.items() if MANIFEST in names])
        with self._deletion_lock:
            self._sweep(names_in_steps, marked_steps(notes))
            remove_metrics_of_deleted_steps(self._store, notes)

    def begin_training(self) -> None:
        """Remove the marks of a deletion that was killed. A `Checkpointer` that only reads leaves them, because they
        may belong to a running deletion of the training job. A closed `Checkpointer` may begin again."""
        self._closed, self._must_stop = Latch(), False
        try:
            with self._deletion_lock:
                self._directory.require_same_folder()
                self._leases.remove_stale_marks()
        except StorageError as error:
            _log.warning("the mark of a deletion that was killed stays, so its step cannot be held: %s", error)

    def handle_restored(self, step: int) -> None:
        """Start to delete the steps that the rules do not keep, after the first restore: not the restored step, of
        which training continues."""
        self._restored_step = step
        if not self._are_rules_applied and self._directory.policy != RetentionPolicy():
            self._request_pass()
        self._are_rules_applied = True

    def close(self, seconds: float | None) -> None:
        """Stop after the remaining deletions, including steps that readers have released.

        With a number of seconds, it stops after the current step, or is abandoned after that time.
        """
        self._closed.set()
        self._must_stop = seconds is not None
        if self._has_leased_steps:
            self._request_pass()
        self.wait(seconds)

    def delete(self, step: int) -> None:
        """Delete a step unless it is pinned or the only one, even if a reader holds it. Raises InputError."""
        with self._deletion_lock:
            steps = self._directory.steps([step])
            others = (other for other in reversed(steps) if other != step)
            if self._directory.save_id(step) is not None and not any(map(self._directory.save_id, others)):
                raise InputError(f"step {step} is the only one in {self._store.url}, and is not deleted")
            require_unpinned(self._store, step)
            self._delete(step)

    # Passes ----------------------------------------------------------------------------------------------

    def _request_pass(self) -> None:
        """Request a pass, unless one is already waiting for its turn."""
        if not self._is_requested:
            self._is_requested = True
            # Each of its storage operations has a time limit of its own: a pass may take long.
            try:
                self._last_pass = lanes.begin(self._run_pass)
            except RuntimeError:  # the system cannot start a thread
                self._run_pass()

    def _poll(self) -> None:
        """Make passes while readers hold unwanted steps."""
        while self._has_leased_steps and not self._closed.wait(self._leases.poll_seconds):
            self._request_pass()
            self.wait()
        self._polls = False

    def finish(self) -> None:
        """At exit, finish the passes of an unclosed Checkpointer."""
        is_running = self._polls or not (self._last_pass is None or self._last_pass.done())
        if self._must_stop:
            return
        if is_running:
            self.close(None)
        if self._failure is not None:
            _log.error("old steps in %s could not be deleted: %s", self._store.url, self._failure)

    def _run_pass(self) -> None:
        try:
            with self._deletion_lock:
                self._is_requested = False
                self._delete_unwanted()
            self._failure = None
        except Exception as error:
            if self._has_saved:
                self._failure = error
            else:  # this Checkpointer perhaps only reads, and has no permission to delete
                _log.warning("old steps in %s could not be deleted: %s", self._store.url, error)
        if self._has_leased_steps and not (self._polls or self._closed.is_set or is_shutting_down()):
            self._polls = True
            try:
                lanes.begin(self._poll)
            except RuntimeError:  # likewise: the next save makes a pass
                self._polls = False

    # Deleting --------------------------------------------------------------------------------------------

    def _delete_unwanted(self) -> None:
        """Delete the steps that no rule keeps, that are not pinned, and that no reader holds."""
        newest_saved, self._newest_saved = self._newest_saved, -1
        unwanted, unpublished = self._decide()
        self._has_leased_steps = False
        if self._directory.policy != RetentionPolicy():
            spared = self._existing.spared(unwanted, has_saved=self._has_saved)
            if not self._has_saved and self._restored_step is not None:
                spared |= {self._restored_step}
            unwanted = {step: decision for step, decision in unwanted.items() if step not in spared}
        if unwanted:
            pinned = pinned_steps(self._store)
            unwanted = {step: decision for step, decision in unwanted.items() if step not in pinned}
            with self._leases.mark_for_deletion(unwanted) as leased:
                self._has_leased_steps = bool(leased)
                # Checked again, because a process that pins a step holds it in the meantime.
                spared = (leased | pinned_steps(self._store)) & unwanted.keys() if unwanted else leased
                self._leases.unmark(spared)
                for step, decision in unwanted.items():
                    if step not in spared and not self._must_stop:
                        self._apply_decision(decision)
        # An unpublished step older than the newest saved step will never be published, unless it is being saved now.
        for step in unpublished:
            if step < newest_saved:
                self._deleting_step = step
                try:
                    if step != self._saving_step:
                        if any(map(is_data_folder, self._directory.child(step).names())):
                            _log.info("deleting step %d of %s, which was not published", step, self._store.url)
                        self._delete_remains(step)
                finally:
                    self._deleting_step = None

    def _decide(self) -> tuple[dict[int, Decision], list[int]]:
        """The decisions about the steps to delete or to trim, by step; and the steps whose folder has no checkpoint."""
        policy = self._directory.policy
        while True:
            published, unpublished = self._directory.folders()
            if policy == RetentionPolicy():
                return {}, unpublished
            steps, now = self._directory.saved_steps(published), datetime.datetime.now(datetime.UTC)
            decisions = policy.decide(steps, now)
            unwanted = {
                decision.step.number: decision
                for decision in decisions
                if not decision.kept or decision.dropped_subtrees
            }
            # Otherwise another process has deleted a step in whose favor an older one would be deleted.
            if self._directory.all_exist(policy.deciding_steps(decisions)):
                return unwanted, unpublished

    def _apply_decision(self, decision: Decision) -> None:
        """Delete a step or some of its subtrees, unless the step has been saved again."""
        step = self._deleting_step = decision.step.number
        try:
            if step == self._saving_step or not self._directory.is_current(decision.step) or self._is_damaged(step):
                return
            if decision.kept:
                self._drop(decision.step, decision.dropped_subtrees)
            else:
                self._delete(step)
                _log.info("deleted step %d of %s: %s", step, self._store.url, decision.why)
        finally:
            self._deleting_step = None

    def _is_damaged(self, step: int) -> bool:
        """Whether the manifest of a step was lost or damaged since it was read. No rule deletes such a step."""
        child = self._directory.child(step)
        try:
            if (content := child.read(MANIFEST)) is None or not is_sealed(content):
                load_manifest(child)
        except NotACheckpointError:  # its deletion was interrupted
            return False
        except CorruptError as error:
            _log.warning("keeping step %d: %s", step, error)
            self._directory.forget(step)
            return True
        return False

    def _delete(self, step: int) -> None:
        """Delete a step: the link if it is one; otherwise move it to the trash, or delete its manifest and its data."""
        self._directory.require_same_folder()
        child = self._directory.child(step)
        if is_link(child):
            self._store.remove(step_name(step))
            self._directory.forget(step)
            return
        if self._trash:
            at = datetime.datetime.now(datetime.UTC)
            self._store.rename(step_name(step), f"{TRASH}/{step_name(step)}-{at:%Y%m%dT%H%M%S.%fZ}")
            self._directory.forget(step)
            return
        self._directory.forget(step)
        child.unpublish(sync=self._sync)
        self._delete_remains(step)

    def _delete_remains(self, step: int) -> None:
        """Delete the remains of an unpublished step."""
        self._directory.require_same_folder()
        if not is_link(self._directory.child(step)):
            clear_step(self._store, step)
        self._directory.forget(step)

    def _drop(self, step: SavedStep, paths: tuple[str, ...]) -> None:
        """Republish a step's manifest without those subtrees that can be dropped, then delete their data."""
        self._directory.require_same_folder()
        child = self._directory.child(step.number)
        manifest, content = load_manifest(child)
        dropped = () if is_link(child) else manifests.droppable(manifest, paths)
        undroppable = (*step.undroppable, *(path for path in paths if path not in dropped))
        if not dropped:
            self._directory.remember(SavedStep.of(step.number, manifest, undroppable))
            return
        _log.info("dropping %s of step %d of %s", ", ".join(dropped), step.number, self._store.url)
        less = manifests.drop_subtrees(manifest, dropped)
        child.republish(manifest.data_folder, manifests.encode(less), content, sync=self._sync)
        self._directory.remember(SavedStep.of(step.number, less, undroppable))
        child.trim(less.data_folder, (record.stack() for record in less.stacks))

    def _sweep(self, names_in_steps: Mapping[str, list[str]], half_deleted: Collection[str]) -> None:
        """Delete the remains of killed runs: unpublished data, and half-deleted steps and subtrees.

        `names_in_steps` are the names in the folder of each step. `half_deleted` are the steps that a killed run was
        deleting, or was dropping subtrees of.
        """
        marked = self._store.folders(is_step, known=names_in_steps)
        newest = max(names_in_steps, key=int, default="")
        for name, names in names_in_steps.items():
            if MANIFEST in names and name not in marked:  # a user copied it here
                self._store.mark(name)
            # A save that was killed after its publication has left its note in the newest step, or the data that it
            # replaced. Subtrees that could not be deleted are found only by their manifest.
            is_whole = MANIFEST in names and sum(map(is_data_folder, names)) == 1 and name not in half_deleted
            child = self._store.child(name)
            if (is_whole and name != newest and not self._directory.policy.keep_last_of) or is_link(child):
                continue
            try:
                manifest, _ = load_manifest(child)
            except NotACheckpointError:
                child.clear(evict=False)
                continue
            except (CorruptError, StorageError) as error:
                _log.warning("%s cannot be read, and no rule deletes it: %s", child.url, error)
                continue
            self._directory.remember(SavedStep.of(int(name), manifest))
            try:
                child.sweep(manifest.data_folder)
                child.trim(manifest.data_folder, (record.stack() for record in manifest.stacks))
            except StorageError as error:
                if error.errno != errno.EACCES:
                    raise
                _log.warning("remains of killed saves may be left in %s: %s", child.url, error)


_all = weakref.WeakSet[Deletion]()


def _finish_all() -> None:
    for deletion in [*_all]:
        deletion.finish()


lanes.finish_at_exit(_finish_all)


def _reset_deleters() -> None:
    for deletion in _all:
        deletion.reset_after_fork()


os.register_at_fork(after_in_child=_reset_deleters)
