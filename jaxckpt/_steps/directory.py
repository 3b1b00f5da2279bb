"""A directory of steps: what is in it, what may be added, and deleting what the rules no longer keep."""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading

from jaxckpt._format import manifest as manifests
from jaxckpt._format.names import MANIFEST
from jaxckpt._format.paths import closest
from jaxckpt._format.records import StepRecord
from jaxckpt._runtime.errors import (
    CheckpointExistsError,
    CorruptError,
    InputError,
    JaxckptError,
    NotACheckpointError,
    StorageError,
)
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.threads import Latch, start_thread
from jaxckpt._steps.retention import Rules, SavedStep
from jaxckpt._storage.leases import Leases
from jaxckpt._storage.manifests import load_manifest
from jaxckpt._storage.place import store_at
from jaxckpt._storage.steps import BEST, ENDED, RUN, is_step, pins, require_step, step_folders, step_name
from jaxckpt._storage.store import Store

_log = logging.getLogger("jaxckpt")


class Directory:
    """The steps in a directory. Every process reads it; process 0 alone changes it."""

    def __init__(self, path: str | os.PathLike[str], rules: Rules, options: Options) -> None:
        self.store: Store = store_at(path, options).anchored()
        self.rules = rules
        self._sync = options.sync
        self._known: dict[int, SavedStep] = {}
        self._measured = False
        self._leases = Leases(self.store)
        self._lock = threading.Lock()  # taken only in threads that an interrupt does not reach
        self._spared = False
        self._watching = False
        self._closed = Latch()
        self._was_ended = False

    @property
    def url(self) -> str:
        return self.store.url

    # Looking ---------------------------------------------------------------------------------------------

    def child(self, step: int) -> Store:
        """The store of a step. Raises InputError."""
        return self.store.child(step_name(require_step(step)))

    def steps(self) -> list[int]:
        """The published steps, oldest first."""
        return step_folders(self.store)[0]

    def newest(self) -> Store | None:
        """The store of the newest step."""
        steps = self.steps()
        return self.child(steps[-1]) if steps else None

    def look(self, step: int) -> SavedStep | None:
        """What a step's manifest says, read once; None if it is missing or damaged."""
        found = self._known.get(step)  # one look-up: the thread that saves forgets steps that it deletes
        if found is None:
            try:
                manifest, _ = load_manifest(self.child(step))
            except NotACheckpointError:
                return None
            except CorruptError as error:
                _log.warning("step %d is left alone: %s", step, error)
                return None
            found = self._known[step] = SavedStep.of(step, manifest)
        return found

    def look_at(self, steps: list[int]) -> list[SavedStep]:
        """What all steps' manifests say."""
        found = [found for step in steps if (found := self.look(step)) is not None]
        self._known = {step.number: step for step in found}
        return found

    # Adding, process 0 -----------------------------------------------------------------------------------

    def admit(self, record: StepRecord, *, overwrite: bool, last_one: bool) -> None:
        """Raise unless a step may be saved: it is the newest, and the rules can compare it with the others.

        The rules would take an older step for outdated. The last step before a job is stopped need not have a metric.
        """
        step, steps = record.number, self.steps()
        if not last_one:
            self._require_metric(record, steps)
        if step in steps and not overwrite:
            raise CheckpointExistsError(f"step {step} is in {self.url}; pass overwrite=True to replace it")
        if steps and step < steps[-1] and step not in steps:
            raise InputError(
                f"step {step} is older than step {steps[-1]}, the newest in {self.url}. To go back to an older"
                " step, delete(step) the newer ones first, or save into another directory"
            )
        self.store.mark(step_name(step))

    def _require_metric(self, record: StepRecord, steps: list[int]) -> None:
        """Raise if `keep_best` names a metric that this job does not record: all but the newest step would be lost."""
        if self.rules.best is None:
            return
        name, given_names = self.rules.best[0], list(record.metrics)
        if name in given_names:
            self._measured = True
            return
        if given_names:
            raise InputError(
                f"keep_best compares steps by the metric {name!r}, and metrics has {', '.join(map(repr, given_names))}"
                f"{closest(name, given_names)}"
            )
        self._measured = self._measured or self.rules.measured(self.look_at(steps))
        if not self._measured:
            raise InputError(
                f"keep_best compares steps by the metric {name!r}, and no step in {self.url} has it: pass"
                f' save(…, metrics={{{name!r}: …}}), with float("nan") where it was not measured'
            )

    # Opening and closing, process 0 ----------------------------------------------------------------------

    def open(self) -> None:
        """Clean up what killed runs left, delete what the rules do not keep, and note that the run has not ended."""
        notes = self.store.child(RUN).names()
        self._was_ended = ENDED in notes
        if self._was_ended:
            self._note(ENDED, None)
        if self.rules.best is not None:
            self._note(BEST, json.dumps(self.rules.best).encode())
        self._sweep()
        self.tidy_up()
        self._leases.clear(notes)

    def close(self, *, ended: bool | None) -> None:
        """Note that the run has ended, for readers that follow it, and delete what they have let go of by now.

        None for `ended` leaves the run as it was found.
        """
        self._closed.set()
        if self._spared:
            self.tidy_up()
        if self._was_ended if ended is None else ended:
            self._note(ENDED, b"{}")

    def _note(self, name: str, content: bytes | None) -> None:
        """Write a note on the run for its readers, or remove it. Without the right to write, nothing changes."""
        try:
            if content is None:
                self.store.child(RUN).remove(name)
            else:
                self.store.made(RUN).put(name, content)
        except StorageError as error:
            _log.warning("readers of %s do not see that %s has changed: %s", self.url, name, error)

    # Deleting, process 0 ---------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Delete a step unless it is the only one, whoever reads it. Raises InputError."""
        with self._lock:
            if [found.number for found in self.look_at(self.steps())] == [step]:
                raise InputError(f"step {step} is the only one in {self.url}, and is not deleted")
            self._delete(step)

    def _sweep(self) -> None:
        """Delete what killed runs left: data never published, steps and subtrees half deleted."""
        marked = self.store.folders()
        for name in self.store.names():
            if not is_step(name):
                continue
            child = self.store.child(name)
            try:
                manifest, _ = load_manifest(child)
            except NotACheckpointError:
                child.clear(evict=False)
            except CorruptError as error:
                _log.warning("%s is left alone: %s", child.url, error)
            else:
                self._known[int(name)] = SavedStep.of(int(name), manifest)
                if name not in marked:  # it was copied here
                    self.store.mark(name)
                child.sweep(manifest.data)
                child.trim(manifest.data, (record.stack() for record in manifest.stacks))

    def tidy_up(self, saved: StepRecord | None = None) -> None:
        """Delete what the rules do not keep, and no reader holds. What fails is tried again after the next save."""
        with self._lock:
            self._tidy_up(saved)
            if self._spared and not self._watching and not self._closed.is_set:
                self._watching = True
                start_thread(self._watch, "jaxckpt-leases")

    def _watch(self) -> None:
        """Look again until readers have let go of every step that the rules do not keep."""
        while not self._closed.wait(self._leases.poll_seconds):
            with self._lock:
                self._tidy_up(None)
                if not self._spared:
                    self._watching = False
                    return

    def _tidy_up(self, saved: StepRecord | None) -> None:
        now = datetime.datetime.now(datetime.UTC)
        try:
            if saved is not None:
                self._known[saved.number] = SavedStep(saved.number, now, saved)
            published, others = step_folders(self.store)
            found = self.look_at(published)
            outdated = self.rules.outdated(found, now)
            dropped = self.rules.dropped([step for step in found if step.number not in outdated])
            doomed = outdated | dropped.keys()
            if doomed:
                doomed -= {*pins(self.store).values()}
            with self._leases.condemned(doomed) as held:
                self._spared = bool(held)
                for number in sorted(doomed - held):
                    if number in outdated:
                        self._delete(number)
                    else:
                        self._drop(number, dropped[number])
            if saved is not None:
                # Steps come in order, one at a time: an older one that is not published yet never will be.
                for number in others:
                    if number < saved.number:
                        self._clear(number)
        except (JaxckptError, OSError) as error:
            _log.warning("old steps in %s could not be tidied up: %s", self.url, error)

    def _delete(self, step: int) -> None:
        self.child(step).unpublish(sync=self._sync)
        self._clear(step)

    def _clear(self, step: int) -> None:
        """Delete what is left of a step that is not published."""
        child = self.child(step)
        child.clear()
        if child.read(MANIFEST) is None:  # else it was published meanwhile
            self.store.unmark(step_name(step))
        self._known.pop(step, None)

    def _drop(self, step: int, paths: list[str]) -> None:
        """Publish a step's manifest again without some subtrees, then delete their data."""
        child = self.child(step)
        manifest, content = load_manifest(child)
        less = manifests.without(manifest, paths)
        if less is None:
            self._known[step] = SavedStep.of(step, manifest, undroppable=paths)
            return
        child.publish(manifest.data, manifests.encode(less), content, sync=self._sync)
        self._known[step] = SavedStep.of(step, less)
        child.trim(less.data, (record.stack() for record in less.stacks))
