"""A directory of steps: lists them, decides what may be added, and writes notes on the run for readers."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import Any

import msgspec

from jaxckpt._job.call import Call
from jaxckpt._model import typed_json
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.records import Manifest, StepRecord
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.workers import submit
from jaxckpt._run_folder.leases import pinned_steps
from jaxckpt._run_folder.metrics import read_added_metrics
from jaxckpt._run_folder.run_paths import manifest_of, run_and_name, steps_of
from jaxckpt._run_folder.steps import (
    BEST,
    ENDED,
    METADATA,
    RUN,
    encode_metadata,
    is_link,
    is_published,
    is_step,
    read_run_metadata,
    require_no_checkpoint,
    require_step,
    step_folders,
    step_name,
)
from jaxckpt._runs.retention import KeepBest, RetentionPolicy, SavedStep
from jaxckpt._sources.open_source import foreign_steps_of
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import anchor_of, run_at
from jaxckpt.errors import (
    CheckpointExistsError,
    CorruptError,
    DataError,
    InputError,
    JaxckptError,
    NotACheckpointError,
    StorageError,
    show_count,
)


class Directory:
    """The steps in a directory. Every process reads it; only process 0 changes it."""

    def __init__(self, path: str | os.PathLike[str], policy: RetentionPolicy, options: Options) -> None:
        self.store: Store = run_at(path, options, to_write=True)
        self._anchor = anchor_of(self.store)
        self._options = options
        self.policy = policy
        self._known: dict[str, int] = {}
        """The steps that process 0 has found or saved, and not deleted, by name. Any thread may change it, by atomic
        operations."""

        self._cached_steps: dict[int, SavedStep] = {}  # likewise
        self.refused = set[int]()
        """The steps that a restore could not read and has passed over, in every process. They do not count until they
        are saved again, and no rule deletes them."""

        self._last_data: tuple[int, str] | None = None
        """The last published step with new data, and the digest of the data."""

        self._rules_with_metric = set[KeepBest]()
        self._owner_pid = 0
        """The id of the process that opened it, if that is process 0."""

    @property
    def url(self) -> str:
        return self.store.url

    # Inspecting ------------------------------------------------------------------------------------------

    def child(self, step: int) -> Store:
        """The store of a step. Raises InputError."""
        return self.store.child(step_name(require_step(step)))

    def begin_call(self, verb: str, step: int | None = None) -> Call:
        """Begin a call that every process makes, about a step or the whole directory."""
        return Call.of(verb, self.url if step is None else self.child(step).url, self._options)

    @contextlib.contextmanager
    def checking(self, verb: str, step: int | None = None) -> Generator[None]:
        """Raise an InputError of the block in a call, so that the calls of all processes stay synchronized."""
        try:
            yield
        except InputError:
            with self.begin_call(verb, step):
                raise

    def require_same_folder(self) -> None:
        """Raise StorageError if the directory was unmounted, moved or replaced since this Checkpointer first used it.
        Its steps would then seem to be lost, and new ones would be saved elsewhere."""
        if self._anchor is not None:
            self._anchor.require_same_folder()

    def release(self) -> None:
        """Let the file system of the directory be unmounted."""
        if self._anchor is not None:
            self._anchor.release()

    def folders(self, looked_at: Iterable[int] = ()) -> tuple[list[int], list[int]]:
        """The published steps, and the steps whose folder holds no checkpoint, oldest first. Raises StorageError.

        Process 0 looks only at the steps that it does not know, at the newest, and at those of `looked_at`. While
        another process deletes any other step, that step still counts as published, until its folder is deleted.
        """
        self.require_same_folder()
        is_owner = self._owner_pid == os.getpid()
        to_look_at = {*looked_at}
        while True:
            known = {name: step for name, step in self._known.copy().items() if is_owner and step not in to_look_at}
            newest = max(known.values(), default=0)
            known.pop(step_name(newest), None)
            known |= {step_name(step): step for step in self.refused}
            published, unpublished = step_folders(self.store, known=known)
            published = [step for step in published if step not in self.refused]
            if is_owner:
                for step in {*self._known.copy().values()}.difference(published):
                    self._known.pop(step_name(step), None)
                for step in {*published}.difference(known.values()):
                    self._known[step_name(step)] = step
            if not published or step_name(published[-1]) not in known:
                return published, unpublished
            to_look_at.add(newest)  # another process has deleted it, so the newest is one that was not looked at

    def steps(self, looked_at: Iterable[int] = ()) -> list[int]:
        """The published steps, oldest first. For `looked_at`, see `folders`."""
        return self.folders(looked_at)[0]

    def all_exist(self, steps: Collection[int]) -> bool:
        """Whether these steps are still published."""
        return not steps or {*steps}.issubset(self.steps(steps))

    def newest_number(self) -> int | None:
        """The newest published step on a file system, which other processes may not share; None if there is none."""
        if self._anchor is None:
            return None
        steps = {*map(int, filter(is_step, self.store.names()))} - self.refused
        return next((step for step in sorted(steps, reverse=True) if is_published(self.store, step)), None)

    def newest(self) -> Store | None:
        """The store of the newest step."""
        steps = self.steps()
        return self.child(steps[-1]) if steps else None

    def hint(self, step: int, error: JaxckptError) -> str:
        """What else can be restored, for a note after a target did not fit; or nothing. Raises StorageError."""
        # The target or `select` may ask for a subtree that was dropped.
        saved = self.saved_step(step) if isinstance(error, InputError) else None
        if saved is None or not saved.record.dropped:
            return ""
        return (
            f"step {step} was kept without {', '.join(saved.record.dropped)}; select= restores the rest, and"
            " restore_or_init(init, strict=False) takes these leaves from init"
        )

    def saved_step(self, step: int) -> SavedStep | None:
        """The properties of a step from its manifest; None if it is missing or damaged. Process 0 reads it once,
        because it is notified when the step is saved again."""
        saved = self._cached_steps.get(step)
        if saved is None:
            manifest = self._manifest(step)
            if manifest is None:
                return None
            saved = SavedStep.of(step, manifest)
            if self._owner_pid:
                # A save that has been published in the meantime has set the current value.
                saved = self._cached_steps.setdefault(step, saved)
        return saved

    def save_id(self, step: int) -> str | None:
        """The id of the save that wrote a step; None if the step's manifest is missing or damaged."""
        manifest = self._manifest(step)
        return None if manifest is None else manifest.save_id

    def _manifest(self, step: int) -> Manifest | None:
        try:
            return manifest_of(self.child(step))
        except (CorruptError, StorageError) as error:
            if isinstance(error, StorageError) and error.errno != errno.EACCES:
                raise  # it may pass
            _log.warning("step %d does not count for the rules: %s", step, error)
            return None

    def require_undamaged(self, steps: Iterable[int]) -> None:
        """Raise CorruptError if the manifest of one of these steps is damaged or lost."""
        for step in steps:
            with contextlib.suppress(NotACheckpointError):  # deleted in the meantime
                load_manifest(self.child(step))

    def saved_steps(self, steps: list[int]) -> list[SavedStep]:
        """The properties of all steps from their manifests, and the metrics that were added to them."""
        by_number = {step: self._cached_steps.get(step) for step in steps}
        if unread := [step for step, saved in by_number.items() if saved is None]:
            by_number |= run_watched(
                f"reading {self.url}", self._options.timeout_seconds, functools.partial(self._read_steps, unread)
            )
        saved = [saved for saved in by_number.values() if saved is not None]
        for deleted in self._cached_steps.keys() - {*steps}:
            self.forget(deleted)
        if not (self.policy.keep_best or self.policy.keep_if):
            return saved  # no rule uses metrics
        added = read_added_metrics(self.store, steps)
        return [step.with_metrics(added.get((step.number, step.save_id), {})) for step in saved]

    def _read_steps(self, steps: list[int]) -> dict[int, SavedStep | None]:
        """Read the manifests concurrently, because on network storage each takes a round trip."""
        reads = {step: submit(functools.partial(self.saved_step, step)) for step in steps}
        return {step: read.result() for step, read in reads.items()}

    def same_data(self, step: int, manifest: bytes) -> int | None:
        """The earlier step with the same data as one that has just been published; None if there is none."""
        digest = _data_digest(manifest)
        if self._last_data is not None and digest and self._last_data[1] == digest and self._last_data[0] != step:
            return self._last_data[0]
        self._last_data = step, digest
        return None

    def remember(self, step: SavedStep) -> None:
        """Note the new properties of a step."""
        self.refused.discard(step.number)
        self._cached_steps[step.number] = step
        self._known[step_name(step.number)] = step.number

    def forget(self, step: int) -> None:
        """Note that a step was deleted, or is being deleted."""
        self._cached_steps.pop(step, None)
        self._known.pop(step_name(step), None)

    def is_current(self, step: SavedStep) -> bool:
        """Whether a step has not been saved again since it was read."""
        cached = self._cached_steps.get(step.number)
        return cached is not None and cached.save_id == step.save_id

    # Adding steps (process 0) ----------------------------------------------------------------------------

    def require_savable(self, record: StepRecord, *, overwrite: bool, is_last_step: bool) -> None:
        """Raise unless a step may be saved: it is new or may be overwritten, it is no link, `keep_best` can compare it
        with other steps, and the rules would keep it.

        The last step of a preempted job need not have a metric. Raises CheckpointExistsError, InputError.
        """
        step, steps = record.number, self.steps([record.number])
        if not is_last_step:
            for best in self.policy.keep_best:
                self._require_metric(best, record, steps)
        if step in steps and not overwrite:
            raise CheckpointExistsError(f"step {step} already exists in {self.url}; pass overwrite=True to replace it")
        if is_link(child := self.child(step)):
            raise InputError(
                f"{child.url} is a symbolic link, and saving there would change the folder that it leads to: first"
                f" delete the link, with delete({step})"
            )
        if steps and step < steps[-1]:
            self._require_kept(record, steps)
        self.store.mark(step_name(step))

    def _require_metric(self, best: KeepBest, record: StepRecord, steps: list[int]) -> None:
        """Raise InputError if `keep_best` names a metric that this job does not record: it would keep only the newest
        step."""
        name, given_names = best.metric, list(record.metrics)
        if name in given_names:
            self._rules_with_metric.add(best)
        elif given_names:
            raise InputError(
                f"metrics has no {name!r}, by which keep_best compares steps; it has"
                f" {', '.join(map(repr, given_names))}"
            )
        elif best not in self._rules_with_metric:
            if not best.has_metric(self.saved_steps(steps)):
                raise InputError(
                    f"keep_best compares steps by the metric {name!r}, but no step in {self.url} has it: pass"
                    f' save(…, metrics={{{name!r}: …}}), with float("nan") where it was not measured'
                )
            self._rules_with_metric.add(best)

    def _require_kept(self, record: StepRecord, steps: list[int]) -> None:
        """Raise InputError if the rules would delete a step immediately, because newer steps exist."""
        now = datetime.datetime.now(datetime.UTC)
        candidate = SavedStep(record.number, now, record)
        other_steps = (step for step in self.saved_steps(steps) if step.number != record.number)
        with_it = sorted([*other_steps, candidate], key=lambda step: step.number)
        (decision,) = [decision for decision in self.policy.decide(with_it, now) if decision.step is candidate]
        older = f"step {record.number} is older than step {steps[-1]}, the newest in {self.url}"
        if not decision.kept and record.number not in pinned_steps(self.store):
            # The last step of a run cannot be deleted.
            remedy = "save into another directory"
            if steps[0] < record.number:
                remedy = f"first delete the newer steps with delete(step), or {remedy}"
            raise InputError(
                f"{older}, and would be deleted immediately: {decision.why}. To go back to an older step, {remedy}"
            )
        if record.number not in steps:
            _log.warning(
                "%s: the next start resumes from the newest step, and `follow` does not yield older steps", older
            )

    # Notes on the run (process 0) ------------------------------------------------------------------------

    def open(self, metadata: dict[str, Any] | None) -> tuple[list[str], Mapping[str, list[str]]]:
        """Note the meaning of "best", and the metadata of a new run. Returns the names of existing notes, and the names
        in the folder of each step.

        Raises InputError if the directory is itself a checkpoint, which a restore of its path would return, or has
        steps of another library, which would seem to be lost.
        """
        require_no_checkpoint(self.store)
        self._require_no_name_of_a_step()
        names_in_steps = self.store.names_below(is_step)
        self._known = {name: int(name) for name, names in names_in_steps.items() if MANIFEST in names}
        self._require_no_foreign_steps(sorted(self._known.values()))
        self._owner_pid = os.getpid()
        notes = self.store.child(RUN).names()
        if self.policy.keep_best:
            best = self.policy.keep_best[0]
            self._write_note(BEST, json.dumps((best.metric, best.mode)).encode())
        if metadata is not None and not (METADATA in notes and self._has_metadata(metadata)):
            self._write_note(METADATA, encode_metadata(metadata))
        return notes, names_in_steps

    def _has_metadata(self, metadata: dict[str, Any]) -> bool:
        """Whether the run has metadata, which stays. Logs how this metadata differs from it."""
        try:
            recorded = read_run_metadata(self.store)
        except DataError as error:
            _log.warning("%s. It is written again", error)
            return False
        if recorded is None:
            return False
        missing = object()
        names = [
            name for name in {**recorded, **metadata} if recorded.get(name, missing) != metadata.get(name, missing)
        ]
        if names:
            _log.warning(
                "%s keeps the metadata that its first Checkpointer has written, but metadata= differs in %s",
                self.url,
                ", ".join(map(repr, names)),
            )
        return True

    def _require_no_name_of_a_step(self) -> None:
        """Raise InputError for a path such as "run@40" of another run, which nothing could resume."""
        named = run_and_name(self.store)
        if (
            named is not None
            and not self.store.names()
            and (steps_of(named[0]) or foreign_steps_of(named[0].url, self._options))
        ):
            raise InputError(
                f"{self.url} names a step of the run {named[0].url}: give that run, or a new directory for a new run"
            )

    def _require_no_foreign_steps(self, steps: list[int]) -> None:
        if steps and self._anchor is None:
            return  # in a bucket, this would list every key of the run again, and was checked when the run was new
        foreign = foreign_steps_of(self.url, self._options, ignored=[*map(step_name, steps)])
        if not foreign or foreign[-1].number <= max(steps, default=-1):
            return
        shown = ", ".join(os.path.basename(step.path) for step in foreign[-5:])
        raise InputError(
            f"{self.url} has {show_count(len(foreign), 'step')} of Orbax, and the newest are {shown}. A Checkpointer"
            " cannot continue that run in its own directory: give a new directory, and restore the initial state from"
            ' this one. docs/coming-from-orbax.md shows how, in its section "Replace Orbax"'
        )

    def remove_end(self) -> None:
        """Note that the run has not ended, or has been resumed."""
        self._write_note(ENDED, None)

    def note_end(self) -> None:
        """Note that the run has ended, for readers that follow it."""
        if os.getpid() == self._owner_pid:  # not for a fork
            self._write_note(ENDED, b"{}")

    def _write_note(self, name: str, content: bytes | None) -> None:
        """Write a note on the run for its readers, or remove it. Does nothing without permission to write."""
        try:
            self.require_same_folder()
            if content is None:
                if (run := self.store.child(RUN)).read(name) is not None:
                    run.remove(name)
            else:
                self.store.create_child(RUN).replace(name, content)
        except (StorageError, CorruptError) as error:
            _log.warning("readers of %s do not see that %s has changed: %s", self.url, name, error)


class _StackObjects(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    objects: dict[str, tuple[int, str]]


class _ManifestObjects(msgspec.Struct, frozen=True):
    """The members of a manifest that are compared. msgspec skips the others, which takes no time."""

    stacks: list[_StackObjects]


def _data_digest(manifest: bytes) -> str:
    """A digest of a step's data, from the digests of its objects in a manifest that this process has just encoded.

    Only floats count, if the step has any: a step counter grows even if the parameters no longer change. Empty if there
    is no data.
    """
    stacks = typed_json.decode(manifest, _ManifestObjects).stacks
    floats = [stack for stack in stacks if "float" in stack.dtype or "complex" in stack.dtype]
    compared = [(stack.name, stack.dtype, sorted(stack.objects.items())) for stack in floats or stacks if stack.objects]
    return hashlib.sha256(repr(compared).encode()).hexdigest() if compared else ""
