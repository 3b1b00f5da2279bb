"""A directory of training steps: which to save, which to keep, and what to do when the job is told to stop."""

from __future__ import annotations

import datetime
import functools
import logging
import math
import os
import re
import reprlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, cast

import jax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from jaxckpt._format import manifest as manifests
from jaxckpt._format.layouts import Specs
from jaxckpt._format.names import MANIFEST
from jaxckpt._format.records import LARGEST, Manifest, StepRecord
from jaxckpt._format.tree import Select, Tree, closest, is_utf8
from jaxckpt._restore.restore import carry_out
from jaxckpt._restore.target import Renaming, Request, Uncommitted, split_rename
from jaxckpt._runtime.errors import (
    CheckpointExistsError,
    CorruptError,
    InputError,
    JaxckptError,
    NotACheckpointError,
    Preempted,
)
from jaxckpt._runtime.options import Options, flag, given, seconds, whole_number
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._runtime.threads import uninterrupted
from jaxckpt._save.background import PendingSave
from jaxckpt._save.describe import Recent
from jaxckpt._save.prepare import SaveRequest
from jaxckpt._save.save import start
from jaxckpt._storage.folder import Folder
from jaxckpt._storage.manifests import load_manifest, load_states
from jaxckpt._storage.place import store_at
from jaxckpt._storage.store import Store

_log = logging.getLogger("jaxckpt")

Resplit = Callable[[list[Any], int], Sequence[Any]]


class Checkpointer:
    """Saves steps into a directory, keeps those that its rules say, and finds them again.

    Every process makes one, with the same arguments, and calls the same methods in the same order; `save` at every
    step. Each step is an ordinary checkpoint at `<directory>/<step in 8 digits>`. What a killed run left half written
    or half deleted is swept when a Checkpointer is made; on an object store, where it could be what another job is
    writing, once a newer step is published.

    A step is kept if any of the keep_ rules says so, or if it is the newest; without rules all are. A rule deletes a
    step only after a newer one is published. Deleting takes the manifest away first: a reader finds a step whole, or
    finds that it is not there.

    Args:
        directory: A local path or a URL, as for `save`.
        every: Save the steps that it divides; `save` returns False for others.
        keep_last: How many of the newest steps to keep.
        keep_every: Keep steps that it divides.
        keep_best: (name of a metric, "min" or "max"): keep the step with the best value of it, the newest of equals.
            A save whose `metrics` lack that name is an error, and so is a save without `metrics` while no step has it:
            pass float("nan") for a step that was not measured.
        keep_for: Keep steps that are younger than this.
        components: For paths of subtrees (globs too), in how many of the newest steps they are kept: with
            {"opt_state": 1}, older steps that are kept lose "opt_state" and stay loadable for all else. A path that
            matches nothing in the tree is an error when a step is saved.
        background: Save with `save_async`, otherwise with `save`.
        fail_fast: After a save in the background has failed, raise its error from the next `save`, whatever its step;
            otherwise from the next that has something to save.
        on_preemption: What `save` does once the job has been told to stop, by SIGTERM or by JAX's preemption service,
            and the step is saved, whether it was due or not: "exit" raises `Preempted`, a SystemExit; "continue"
            returns, and `preempted` is true.
        preemption_seconds: How long that last save may take, counted from when this process heard of it.
        options: See `Options`.

    Examples:
        >>> import shutil, jax.numpy as jnp, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/steps", ignore_errors=True)
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/steps", every=10, keep_last=2) as steps:
        ...     last, state = steps.restore_or_init(lambda: {"w": jnp.zeros(4)})
        ...     for step in range(0 if last is None else last + 1, 35):
        ...         state = {"w": state["w"] + 1}
        ...         saved = steps.save(step, state)
        >>> steps.steps()
        [20, 30]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 1,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        keep_for: datetime.timedelta | None = None,
        components: Mapping[str, int] | None = None,
        background: bool = True,
        fail_fast: bool = False,
        on_preemption: Literal["exit", "continue"] = "exit",
        preemption_seconds: float = 30.0,
        options: Options | None = None,
    ) -> None:
        with Group.current(options, Call.of("Checkpointer", directory)) as group:
            if on_preemption not in ("exit", "continue"):
                raise InputError(f'on_preemption must be "exit" or "continue", found {on_preemption!r}')
            self._rules = Rules.of(keep_last, keep_every, keep_best, keep_for, components)
            self._options = given(options)
            store = store_at(directory, self._options)
            # It stays where it is, wherever the program changes its working directory to.
            self._store = Folder(store.folder, store.folder) if isinstance(store, Folder) else store
            self._every = whole_number(every, "every", least=1)
            self._background = flag(background, "background")
            self._fail_fast = flag(fail_fast, "fail_fast")
            self._on_preemption = on_preemption
            self._preemption_seconds = seconds(preemption_seconds, "preemption_seconds")
            self._recent = Recent()
            self._known: dict[int, _Step] = {}
            self._pending: PendingSave | None = None
            self._newest: int | None = None
            self._restored: int | None = None
            self._preempted = False
            self._measured = False
            self._first = group.index == 0
            uninterrupted(functools.partial(self._open, group))
            self._notice = _Notice(group.count)

    def _open(self, group: Group) -> None:
        with group.meeting("opening the directory of steps") as meeting:
            if self._first:
                self._sweep()
                self._tidy_up()
            meeting.barrier()

    def _numbered(self, step: object, verb: str) -> int:
        """A step's number. Raises InputError, after which the next call of all processes finds them in step."""
        try:
            return _number(step)
        except InputError as error:
            hint = "; best_step() and steps() return such numbers, and the target is the next argument"
            with self._calling(verb):
                raise InputError(f"{error}{hint if verb == 'Checkpointer.restore' else ''}") from None

    def _calling(self, verb: str, step: int | None = None) -> Group:
        """A call that every process makes."""
        path = self._store.url if step is None else self.path(step)
        return Group.current(self._options, Call.of(verb, path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            if failure is error:
                return
            # It must not hide the one that is on its way.
            error.add_note(f"jaxckpt: besides, the last save failed: {type(failure).__name__}: {failure}")

    def __repr__(self) -> str:
        return f"<Checkpointer {self._store.url!r}: {self._rules}>"

    # Saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        metrics: Mapping[str, Any] | None = None,
        process_state: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> bool:
        """Save a step if it is due. Every process, at every step: it is also where a preemption is heard of.

        Args:
            step: Its number, from 0 to 2**62.
            tree: As for `jaxckpt.save`. It may be donated as soon as this returns.
            metrics: Numbers by name, to choose the best step by, and for `metrics(step)`; process 0's are recorded. One
                that is not finite is recorded as None.
            process_state: As for `jaxckpt.save`: what this process alone knows.
            metadata: Any JSON value.
            force: Save although `every` does not divide the step.
            overwrite: Replace this step if it is there.

        Returns:
            Whether it is being saved: False for a step that is not due, or is skipped by `Options.when_busy`.

        Raises:
            Preempted: The job was told to stop, and this step is saved; see `on_preemption`.
            Exception: As `jaxckpt.save_async`; and what ended an earlier save in the background.
        """
        step = self._numbered(step, "Checkpointer.save")
        try:
            force, overwrite = flag(force, "force"), flag(overwrite, "overwrite")
        except InputError:
            with self._calling("Checkpointer.save"):
                raise
        last_one = not self._preempted and self._notice.reached(step)
        if not (force or last_one or step % self._every == 0):
            # A step that is due makes the same calls in every process, whichever has heard of a failure by now.
            if self._fail_fast and self._pending is not None and self._pending.done:
                self.wait()
            return False
        saved = False
        if last_one:
            self._preempted = True
            try:
                self._wait_within(self._seconds_left())
                saved = step == self._newest
            except Exception as error:
                _log.warning("the save before the last one failed: %s", error)
        if not saved:
            with self._calling("Checkpointer.save", step) as group:
                record = StepRecord(step, _metrics(metrics))
                request = SaveRequest(
                    self.path(step),
                    tree,
                    metadata=metadata,
                    overwrite=overwrite,
                    process_state=process_state,
                    step=record,
                    components=tuple(self._rules.components),
                    recent=self._recent,
                    check=functools.partial(self._admit, record, overwrite=overwrite, last_one=last_one),
                    then=functools.partial(self._tidy_up, record),
                    deadline=self._deadline() if last_one else None,
                )
                pending = start(request, self._options, group, background=self._background or last_one)
            saved = not pending.skipped
            if saved:
                self._pending, self._newest = pending, step
            if not (self._background or last_one):
                self.wait()
        if last_one:
            self._leave(step, saved)
        return saved

    def _admit(self, record: StepRecord, *, overwrite: bool, last_one: bool) -> None:
        """Raise unless a step comes after all that are there: the rules would take what is older for outdated. And
        unless they can compare it, but for the last one before a job is stopped."""
        step, steps = record.number, self.steps()
        if not last_one:
            self._require_metric(record, steps)
        if step in steps and not overwrite:
            raise CheckpointExistsError(f"step {step} is in {self._store.url}; pass overwrite=True to replace it")
        if steps and step < steps[-1] and step not in steps:
            raise InputError(
                f"step {step} is older than step {steps[-1]}, the newest in {self._store.url}. To go back to an older"
                " step, delete(step) the newer ones first, or save into another directory"
            )
        self._store.mark(_name(step))

    def _require_metric(self, record: StepRecord, steps: list[int]) -> None:
        """Raise if `keep_best` names a metric that this job does not record: all but the newest step would be lost."""
        if self._rules.best is None:
            return
        name, given_names = self._rules.best[0], list(record.metrics)
        if name in given_names:
            self._measured = True
            return
        if given_names:
            raise InputError(
                f"keep_best compares steps by the metric {name!r}, and metrics has {', '.join(map(repr, given_names))}"
                f"{closest(name, given_names)}"
            )
        self._measured = self._measured or self._rules.measured(self._look_at(steps))
        if not self._measured:
            raise InputError(
                f"keep_best compares steps by the metric {name!r}, and no step in {self._store.url} has it: pass"
                f' save(…, metrics={{{name!r}: …}}), with float("nan") where it was not measured'
            )

    def delete(self, step: int) -> None:
        """Delete a step. Every process; a step that is not there is no error, but the only one is not deleted.

        Raises:
            InputError: No other step would be left.
        """
        with self._calling("Checkpointer.delete", step) as group:
            uninterrupted(functools.partial(self._delete_together, step, group))
        self._newest = None

    def _delete_together(self, step: int, group: Group) -> None:
        with group.meeting("deleting a step") as meeting:
            self.wait()
            meeting.gather("")
            if self._first:
                if [found.number for found in self._look_at(self.steps())] == [step]:
                    raise InputError(f"step {step} is the only one in {self._store.url}, and is not deleted")
                self._delete(step)
            meeting.share("")

    def _delete(self, step: int) -> None:
        self._child(step).unpublish(sync=self._options.sync)
        self._clear(step)

    def _clear(self, step: int) -> None:
        """Delete what is left of a step that is not there."""
        child = self._child(step)
        child.clear()
        if child.read(MANIFEST) is None:  # else it was published meanwhile
            self._store.unmark(_name(step))
        self._known.pop(step, None)

    def _leave(self, step: int, saved: bool) -> None:
        in_time = self._wait_within(self._seconds_left())
        told = f"step {step} is saved" if saved and in_time else f"step {step} was not saved within the deadline"
        _log.warning("the job was told to stop: %s", told)
        if self._on_preemption == "exit":
            raise Preempted(f"the job was told to stop: {told} in {self._store.url}")

    def _deadline(self) -> float:
        return self._notice.heard + self._preemption_seconds

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline() - time.monotonic())

    def _wait_within(self, seconds: float | None) -> bool:
        """Wait for the save under way, but not beyond a deadline: then nobody waits for it any more."""
        pending, self._pending = self._pending, None
        newest, self._newest = self._newest, None  # unless it ended well
        if pending is not None:
            try:
                pending.wait(seconds)
            except TimeoutError:
                if not pending.done:
                    pending.abandon()
                    return False
                pending.wait()  # it ended just now, or with a TimeoutError of its own
        self._newest = newest
        return True

    @property
    def preempted(self) -> bool:
        """Whether the job was told to stop, and the last step has been saved."""
        return self._preempted

    @property
    def pending(self) -> PendingSave | None:
        """The last save in the background, if nobody has waited for it."""
        return self._pending

    def wait(self) -> None:
        """Wait until the last save is published. Raises what it raised."""
        self._wait_within(None)

    def close(self) -> None:
        """Wait for the last save, and let go of the signal handler. Raises what the save raised."""
        self._notice.close()
        self.wait()

    # Restoring -------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        target: Tree = None,
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: bool = True,
    ) -> Tree:
        """Restore a step, the newest if `step` is None. Every process; the arguments are those of `jaxckpt.restore`.

        It waits for the save under way, which may be that of this step.

        Raises:
            NotACheckpointError: No such step, or no step at all.
            Exception: As `jaxckpt.restore`; and what ended a save in the background. A damaged step is an error, never
                passed over for an older one.
        """
        return self._restore(self._chosen(step), Request(target, mesh, specs, select, *split_rename(rename), strict))

    def _restore(self, chosen: int, asked: Request) -> Tree:
        try:
            tree = carry_out(self.path(chosen), asked, self._options)
        except JaxckptError as error:
            for note in self._about(chosen, error):
                error.add_note(note)
            raise
        self._restored = chosen
        return tree

    def _about(self, step: int, error: JaxckptError) -> Iterator[str]:
        others = [found for found in self.steps() if found != step]
        if isinstance(error, (CorruptError, NotACheckpointError)) and others:
            yield f"other steps in {self._store.url}: {others}; restore(step=…) takes one of them"
        found = self._look(step)
        if found is not None and found.record.dropped and not isinstance(error, CorruptError):
            yield f"step {step} is kept without {', '.join(found.record.dropped)}; select= takes what it has"

    def restore_or_init(
        self,
        init: Callable[[], Tree],
        *,
        mesh: Mesh | None = None,
        specs: Specs = None,
        select: Select | None = None,
        rename: Renaming | None = None,
        strict: bool = True,
    ) -> tuple[int | None, Tree]:
        """The newest step, or a fresh start if there is none. Every process.

        With strict=False, a run continues with a new optimizer, or with an average of the weights that the checkpoint
        does not have: `init` makes the leaves that the checkpoint lacks.

        Args:
            init: Makes the initial tree; what is restored has its structure, dtypes and shardings. A function jitted
                with out_shardings shows them without being run, and is run only for the leaves that do not come from
                the checkpoint: XLA leaves out the rest. Any other is called, and what it made is let go of before
                anything is read, except for these leaves.
            mesh: As for `jaxckpt.restore`; needed only where `init` leaves arrays uncommitted that were saved from
                several devices.
            specs: As for `jaxckpt.restore`.
            select: As for `jaxckpt.restore`; other leaves are what `init` makes.
            rename: As for `jaxckpt.restore`.
            strict: As for `jaxckpt.restore`. With False, leaves that the checkpoint lacks are what `init` makes.

        Returns:
            (step, tree): the number of the step that was restored and its tree, or None and what `init` made.
        """
        step = self._agreed_step()
        if step is None:
            return None, init()
        target, initial = _target_of(init)
        return step, self._restore(
            step, Request(target, mesh, specs, select, *split_rename(rename), strict, initial=initial)
        )

    def process_state(self, name: str, step: int | None = None, *, resplit: Resplit | None = None) -> Any:
        """What this process, or one in its place, gave as `process_state[name]`. Every process.

        Args:
            name: One of the names given to `save`.
            step: The step; None is the one that was restored last, else the newest.
            resplit: Called where another number of processes saved: with the list of what each of them gave, and
                with the number of processes now; returns a sequence with one item for each of these.

        Returns:
            JSON value or bytes, as it was given.

        Raises:
            InputError: Another number of processes saved, and there is no `resplit`; nothing was saved by that name.
            DataError: It is not as it was saved.
        """
        chosen = self._chosen(self._restored if step is None else step)
        with (
            self._calling("Checkpointer.process_state", chosen) as group,
            group.meeting("restoring each process's own state") as meeting,
        ):
            store = self._child(chosen)
            states = load_states(store, load_manifest(store)[0])
            if not states or any(name not in state for state in states):
                found = sorted(states[0]) if states else "none"
                raise InputError(f"{store.url} has no process_state {name!r}; it has {found}")
            items = [state[name] for state in states]
            if len(items) != group.count:
                if resplit is None:
                    raise InputError(
                        f"{len(items)} processes saved {name!r} in {store.url}, and here are {group.count}: pass"
                        " resplit=, a function that makes one state for each process here out of those saved"
                    )
                items = list(resplit(items, group.count))
                if len(items) != group.count:
                    raise InputError(f"resplit made {len(items)} states of {name!r} for {group.count} processes")
            meeting.barrier()
        return items[group.index]

    def _chosen(self, step: int | None) -> int:
        """A step, or the newest for None, when it is on the disk. Every process."""
        if step is not None:
            step = self._numbered(step, "Checkpointer.restore")
            self.wait()
        chosen = self._agreed_step() if step is None else step
        if chosen is None:
            raise NotACheckpointError(f"no step is in {self._store.url}")
        return chosen

    def _agreed_step(self) -> int | None:
        """The newest step as process 0 finds it, after the save under way: others may list at another moment."""
        with (
            self._calling("Checkpointer.restore") as group,
            group.meeting("looking for the newest step") as meeting,
        ):
            self.wait()
            newest = self.latest_step() if self._first else None
            meeting.gather("")
            found = meeting.share("" if newest is None else str(newest))
        return int(found) if found else None

    # Looking ---------------------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """Where a step is: a checkpoint that `jaxckpt.restore`, `open` and all others take."""
        return self._child(step).url

    def steps(self) -> list[int]:
        """The steps that are there, oldest first: one listing, and nothing but published manifests is believed."""
        return self._folders()[0]

    def _folders(self) -> tuple[list[int], list[int]]:
        """Steps whose folder holds a checkpoint, and those whose folder holds none, by one listing."""
        found = sorted((int(name), published) for name, published in self._store.folders().items() if _is_step(name))
        return [step for step, published in found if published], [step for step, published in found if not published]

    def latest_step(self) -> int | None:
        """The newest step that is there."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The best step that is there by `keep_best`; None where none has the metric."""
        if self._rules.best is None:
            raise InputError("best_step() needs Checkpointer(keep_best=(metric, mode))")
        return self._rules.best_of(self._look_at(self.steps()))

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics that were given when a step was saved; None for those that were not finite."""
        found = self._look(_number(step))
        if found is None:
            raise NotACheckpointError(f"no step {step} is in {self._store.url}")
        return dict(found.record.metrics)

    def _child(self, step: int) -> Store:
        return self._store.child(_name(_number(step)))

    def _look(self, step: int) -> _Step | None:
        """What a step's manifest says, read once; None where there is none, or a damaged one."""
        found = self._known.get(step)  # but once: the thread that saves forgets what it deletes
        if found is None:
            try:
                manifest, _ = load_manifest(self._child(step))
            except NotACheckpointError:
                return None
            except CorruptError as error:
                _log.warning("step %d is left alone: %s", step, error)
                return None
            found = self._known[step] = _Step.of(step, manifest)
        return found

    def _look_at(self, steps: list[int]) -> list[_Step]:
        """What all steps' manifests say."""
        found = [found for step in steps if (found := self._look(step)) is not None]
        self._known = {step.number: step for step in found}
        return found

    # Keeping order, process 0 alone ----------------------------------------------------------------------

    def _sweep(self) -> None:
        """Delete what killed runs left: data never published, steps and subtrees half deleted."""
        marked = self._store.folders()
        for name in self._store.names():
            if not _is_step(name):
                continue
            child = self._store.child(name)
            try:
                manifest, _ = load_manifest(child)
            except NotACheckpointError:
                if self._store.sees_writers:
                    child.clear()
            except CorruptError as error:
                _log.warning("%s is left alone: %s", child.url, error)
            else:
                self._known[int(name)] = _Step.of(int(name), manifest)
                if name not in marked:  # it was copied here
                    self._store.mark(name)
                child.sweep(manifest.data)
                child.trim(manifest.data, (record.stack() for record in manifest.stacks))

    def _tidy_up(self, saved: StepRecord | None = None) -> None:
        """Let the rules decide what stays. Whatever fails is tried again after the next save."""
        now = datetime.datetime.now(datetime.UTC)
        try:
            if saved is not None:
                self._known[saved.number] = _Step(saved.number, now, saved)
            published, others = self._folders()
            found = self._look_at(published)
            kept = self._rules.kept(found, now)
            for step in found:
                if step.number not in kept:
                    self._delete(step.number)
            for number, paths in self._rules.dropped([step for step in found if step.number in kept]).items():
                self._drop(number, paths)
            if saved is not None:
                # Steps come in order, one at a time: who began an older one and has not published it never will.
                for number in others:
                    if number < saved.number:
                        self._clear(number)
        except (JaxckptError, OSError) as error:
            _log.warning("old steps in %s could not be tidied up: %s", self._store.url, error)

    def _drop(self, step: int, paths: list[str]) -> None:
        """Publish a step's manifest anew without some subtrees, then delete their data."""
        child = self._child(step)
        manifest, content = load_manifest(child)
        less = manifests.without(manifest, paths)
        if less is None:
            self._known[step] = _Step.of(step, manifest, undroppable=paths)
            return
        child.publish(manifest.data, manifests.encode(less), content, sync=self._options.sync)
        self._known[step] = _Step.of(step, less)
        child.trim(less.data, (record.stack() for record in less.stacks))


def _name(step: int) -> str:
    return f"{step:08d}"


def _is_step(name: str) -> bool:
    # One with more digits could be beyond the largest number; it would be the newest for ever.
    return re.fullmatch(r"\d{8}|[1-9]\d{8,18}", name, re.ASCII) is not None and int(name) <= LARGEST


def _number(step: object) -> int:
    """The number of a step. Raises InputError."""
    return whole_number(step, "step", least=0, most=LARGEST)


def _metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Metrics as they are recorded. Raises InputError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"metrics must be a mapping of names to numbers, found {reprlib.repr(metrics)}")
    return {_metric_name(name): _metric(name, value) for name, value in metrics.items()}


def _metric_name(name: object) -> str:
    if not isinstance(name, str) or not is_utf8(name):
        raise InputError(f"the names in metrics must be str (UTF-8), found {ascii(name)[:80]}")
    return str.__str__(name)


def _metric(name: str, value: Any) -> float | None:
    """A metric as it is recorded; None where it is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # an array of other processes is the last
        raise InputError(f"metric {name!r} must be a number, found {reprlib.repr(value)}: {error}") from error
    return number if math.isfinite(number) else None


def _target_of(init: Callable[[], Tree]) -> tuple[Tree, Callable[[Sequence[int]], Sequence[Any]]]:
    """What `init` makes, without its data; and a function that makes some of its leaves, by number, called once."""
    if isinstance(init, jax.stages.Wrapped):  # jitted: its results are arrays, all of them
        shapes = jax.eval_shape(init)
        if all(leaf.sharding is not None for leaf in jax.tree.leaves(shapes)):
            return shapes, functools.partial(_some_of, init, jax.tree.leaves(shapes))
    leaves, treedef = jax.tree.flatten(init())
    target = jax.tree.unflatten(treedef, map(_abstract, leaves))

    def initial(numbers: Sequence[int]) -> Sequence[Any]:
        found = [leaves[number] for number in numbers]
        leaves.clear()
        return found

    return target, initial


def _some_of(init: Callable[[], Tree], shapes: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Those leaves of what a jitted function makes, where it would put them; XLA leaves out what makes the others."""
    if not numbers:
        return []
    # A sharding on an AbstractMesh is part of the type; what is made has it anyway.
    shardings = [
        None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
        for sharding in (shapes[number].sharding for number in numbers)
    ]

    def some() -> list[Any]:
        leaves = jax.tree.leaves(init())
        return [leaves[number] for number in numbers]

    return jax.jit(some, out_shardings=shardings)()


def _abstract(leaf: Any) -> Any:
    """A leaf as a target without its data."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)  # PRNG keys have none
    if not leaf.committed:
        return Uncommitted(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)


# Rules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """A published step, as its manifest tells."""

    number: int
    created: datetime.datetime
    record: StepRecord
    undroppable: tuple[str, ...] = ()
    """Subtrees that cannot be dropped, because they are not there or not stored apart."""

    @classmethod
    def of(cls, number: int, manifest: Manifest, undroppable: Sequence[str] = ()) -> Self:
        created = datetime.datetime.fromisoformat(manifest.created)
        return cls(number, created, manifest.step or StepRecord(number), tuple(undroppable))


@dataclass(frozen=True, slots=True)
class Rules:
    """Which steps, and which subtrees of them, are kept."""

    last: int | None = None
    every: int | None = None
    best: tuple[str, Literal["min", "max"]] | None = None
    younger: datetime.timedelta | None = None
    components: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, last: object, every: object, best: object, younger: object, components: object) -> Self:
        """The rules that a caller asks for. Raises InputError."""
        if last is not None:
            last = whole_number(last, "keep_last", least=1)
        if every is not None:
            every = whole_number(every, "keep_every", least=1)
        match best:
            case None | (str(), "min" | "max"):
                pass
            case _:
                raise InputError(f'keep_best must be (metric, "min") or (metric, "max"), found {best!r}')
        if younger is not None and not (isinstance(younger, datetime.timedelta) and younger >= datetime.timedelta(0)):
            raise InputError(f"keep_for must be a datetime.timedelta, and not below zero, found {younger!r}")
        counts: dict[str, int] = {}
        if components is not None and not isinstance(components, Mapping):
            raise InputError(f'components must be a mapping such as {{"opt_state": 1}}, found {components!r}')
        for path, count in cast("Mapping[object, object]", components or {}).items():
            if not isinstance(path, str):
                raise InputError(f"components must have paths of subtrees for keys, found {path!r}")
            counts[path] = whole_number(count, f"components[{path!r}]", least=1)
        return cls(last, every, None if best is None else (best[0], best[1]), younger, counts)

    def kept(self, steps: Sequence[_Step], now: datetime.datetime) -> set[int]:
        """Numbers of the steps to keep, of all that are there, oldest first."""
        if (self.last, self.every, self.best, self.younger) == (None,) * 4 or not self.measured(steps):
            return {step.number for step in steps}
        kept = {step.number for step in steps[-(self.last or 1) :]}
        if self.every is not None:
            kept |= {step.number for step in steps if step.number % self.every == 0}
        if self.best is not None and (best := self.best_of(steps)) is not None:
            kept.add(best)
        if self.younger is not None:
            kept |= {step.number for step in steps if now - step.created < self.younger}
        return kept

    def measured(self, steps: Sequence[_Step]) -> bool:
        """Whether a step has the metric that steps are compared by; until one has, none is deleted."""
        return self.best is None or any(self.best[0] in step.record.metrics for step in steps)

    def best_of(self, steps: Sequence[_Step]) -> int | None:
        """The step with the best metric, the newest of equals."""
        assert self.best is not None
        metric, mode = self.best
        sign = -1.0 if mode == "min" else 1.0
        ranked = [
            (sign * value, step.number) for step in steps if (value := step.record.metrics.get(metric)) is not None
        ]
        return max(ranked)[1] if ranked else None

    def dropped(self, steps: Sequence[_Step]) -> dict[int, list[str]]:
        """For each of the kept steps, oldest first, the subtrees that it has still and should not."""
        found: dict[int, list[str]] = {}
        for path, count in self.components.items():
            for step in steps[:-count]:
                if path not in step.record.dropped and path not in step.undroppable:
                    found.setdefault(step.number, []).append(path)
        return found


# Preemption -----------------------------------------------------------------------------------------------


class _Notice:
    """Whether the job has been told to stop.

    One process listens for SIGTERM. Among several, JAX's preemption service passes on what any of them hears, and has
    all of them stop at the same step: https://docs.jax.dev, jax.experimental.multihost_utils.
    """

    def __init__(self, processes: int) -> None:
        self.heard = 0.0
        """When, on the monotonic clock."""

        self._processes = processes
        self._told = False
        self._listening = False
        self._closed = False
        self._previous: Any = None

    def _listen(self) -> None:
        self._listening = True
        if self._processes > 1 and not getattr(jax.config, "jax_enable_preemption_service", True):
            _log.warning("jax_enable_preemption_service is off: no process hears that another is told to stop")
        if self._processes == 1:
            if threading.current_thread() is threading.main_thread():
                self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            else:
                _log.warning(
                    "the first save of a Checkpointer is not in the main thread, and so cannot listen for SIGTERM: no"
                    " last step is saved when this job is told to stop"
                )

    def _on_signal(self, number: int, frame: Any) -> None:
        closed, previous = self._closed, self._before()
        self._told, self.heard = True, time.monotonic()
        self.close()  # a second signal does what it did before
        if callable(previous):
            previous(number, frame)
        elif closed and previous == signal.SIG_DFL:  # another's handler passed it on to this one, which is no more
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _before(self) -> Any:
        """What handled the signal before, passing over those like this that are closed."""
        previous = self._previous
        while isinstance(owner := getattr(previous, "__self__", None), _Notice) and owner._closed:
            previous = owner._previous
        return previous

    def reached(self, step: int) -> bool:
        """Whether this is the step to stop at. The first call begins to listen."""
        if not self._listening:
            self._listen()
        if self._processes > 1 and not self._told and _sync_point(step):
            self._told, self.heard = True, time.monotonic()
        return self._told

    def close(self) -> None:
        if self._previous is not None and not self._closed and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before())
        self._closed = True


def _sync_point(step: int) -> bool:
    """Whether JAX has all processes stop at this step; never where its preemption service is off."""
    try:
        return multihost_utils.reached_preemption_sync_point(step & 0x7FFFFFFF)  # it takes 31 bits
    except RuntimeError:
        return False
