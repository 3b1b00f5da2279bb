"""A run's Checkpointer: saves the steps that are due, restores them, and stops in time when the job is told to."""

from __future__ import annotations

import datetime
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from jax.sharding import Mesh

from jaxckpt._format.select import Select
from jaxckpt._format.specs import Specs
from jaxckpt._format.tree import Tree
from jaxckpt._restore.pooled import DamagedError
from jaxckpt._restore.restore import carry_out
from jaxckpt._restore.target import Renaming, Request, split_rename
from jaxckpt._runtime.errors import CorruptError, InputError, JaxckptError, NotACheckpointError
from jaxckpt._runtime.options import Options, flag, given, rate, seconds
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._runtime.threads import uninterrupted
from jaxckpt._save.background import PendingSave, SaveInfo
from jaxckpt._save.describe import describe
from jaxckpt._save.prepare import SaveRequest
from jaxckpt._save.reuse import Last
from jaxckpt._steps.deletion import Deletion
from jaxckpt._steps.directory import Directory
from jaxckpt._steps.due import Due
from jaxckpt._steps.initial import target_of
from jaxckpt._steps.local import Local, LocalBytes, agreed
from jaxckpt._steps.newest import Chosen, Newest
from jaxckpt._steps.preemption import Notice
from jaxckpt._steps.process_states import Resplit, own_state
from jaxckpt._steps.retention import BestRule, Predicate, Rules
from jaxckpt._steps.saving import Saver
from jaxckpt._storage.steps import require_step

_log = logging.getLogger("jaxckpt")


class Checkpointer:
    """Saves steps into a directory, keeps those that its rules say, and finds them again.

    Every process makes one, with the same arguments, and calls the same methods in the same order; `save` at every
    step. Each step is an ordinary checkpoint at `<directory>/<step in 8 digits>`. What a killed run left half written
    or half deleted is swept when a Checkpointer is made; on an object store, where it could be what another job is
    writing, once a newer step is published.

    A step is saved if any of `every`, `every_minutes` and `save_if` says so. A step is kept if any of the keep_ rules
    says so, or if it is the newest; without rules all are kept. Pinned steps (`jaxckpt.pin`), and steps that a reader
    holds (`Checkpoint.hold`, `follow`), are kept whatever the rules say.

    Once a step is published, a thread deletes older steps that no rule keeps; no `save` waits for that. What ends the
    deletion, such as missing permission, is raised by the next `save` that is due, by `wait` or by `close`. Deleting
    takes the manifest away first: a reader finds a step whole, or finds that it does not exist.

    Args:
        directory: A local path or a URL, as for `save`.
        every: Save the steps that it divides; `save` returns False for others. None: 1, unless `every_minutes` or
            `save_if` is given.
        every_minutes: Save a step when the last save, or the start, is so many minutes ago. Process 0's clock counts;
            among several processes the save may be late by a sixtieth of that time.
        save_if: Save a step for which this function of (step, metrics) returns True. Process 0's decides, and several
            processes wait for each other at each step to hear of it.
        keep_last: How many of the newest steps to keep.
        keep_every: Keep steps that it divides.
        keep_best: (name of a metric, "min" or "max"): keep the step with the best value of it, the newest of equals.
            (name, mode, 3) keeps the best three, and a list of such rules what each of them keeps. A save whose
            `metrics` lack that name is an error, and so is a save without `metrics` while no step has it: pass
            float("nan") for a step that was not measured.
        keep_for: Keep steps that are younger than this.
        keep_if: Keep steps for which this function of (step, metrics) returns True. It is called after each save, for
            each step, in process 0 and in another thread.
        components: For paths of subtrees (globs too), in how many of the newest steps they are kept: with
            {"opt_state": 1}, older steps that are kept lose "opt_state" and stay loadable for all else. A path that
            matches nothing in the tree is an error when a step is saved.
        trash: Move steps that would be deleted to `<directory>/_trash`, for you to delete. Needs a file system.
        background: Save with `save_async`, otherwise with `save`; then `save` waits for the deletion too.
        fail_fast: After a save in the background has failed, raise its error from the next `save`, whatever its step;
            otherwise from the next that has something to save.
        on_preemption: What `save` does once the job has been told to stop, by SIGTERM or by JAX's preemption service,
            and the step is saved, whether it was due or not: "exit" raises `Preempted`, a SystemExit; "continue"
            returns, and `preempted` is true. "ignore" does not listen: for a second Checkpointer of a job, with other
            step numbers than the first.
        preemption_seconds: How long that last save may take, counted from when this process heard of it.
        local: A folder of this host, in memory (`/dev/shm/run`) or on a local disk: each step that is due is saved
            there first, and outlives the process. Each process writes its own objects, and copies of others', so that
            the folders of any `copies` failure domains may be lost. A process holds two steps at most; `local_bytes`
            states their bytes. Steps that are due by `every` are then flushed to the directory in the background.
        local_every: Save the steps that it divides into the local folders.
        copies: How many other failure domains hold a copy of each object. What none of them holds by its sharding is
            sent to one over the devices' interconnect.
        local_domains: The failure domain of each process, such as its rack: a label for each. By default each host is
            one; if all processes are on one host, each process.
        local_bytes_per_second: Limit of the rate at which each process flushes; by default
            `Options.max_bytes_per_second`.
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
        every: int | None = None,
        every_minutes: float | None = None,
        save_if: Predicate | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: BestRule | Sequence[BestRule] | None = None,
        keep_for: datetime.timedelta | None = None,
        keep_if: Predicate | None = None,
        components: Mapping[str, int] | None = None,
        trash: bool = False,
        background: bool = True,
        fail_fast: bool = False,
        on_preemption: Literal["exit", "continue", "ignore"] = "exit",
        preemption_seconds: float = 30.0,
        local: str | os.PathLike[str] | None = None,
        local_every: int = 10,
        copies: int = 1,
        local_domains: Sequence[str | int] | None = None,
        local_bytes_per_second: float | None = None,
        options: Options | None = None,
    ) -> None:
        with Group.current(options, Call.of("Checkpointer", directory)) as group:
            if on_preemption not in ("exit", "continue", "ignore"):
                raise InputError(f'on_preemption must be "exit", "continue" or "ignore", found {on_preemption!r}')
            self._options = given(options)
            rules = Rules.of(keep_last, keep_every, keep_best, keep_for, keep_if, components)
            self._due = Due(every, every_minutes, save_if, group.count)
            self._directory = Directory(directory, rules, self._options)
            self._deletion = Deletion(self._directory, self._options, trash=flag(trash, "trash"))
            self._notice = Notice(group.count, seconds(preemption_seconds, "preemption_seconds"))
            if local is None and (local_domains is not None or local_bytes_per_second is not None):
                raise InputError("local_domains= and local_bytes_per_second= need local=")
            self._local = None if local is None else Local(local, local_every, copies, local_domains)
            self._newest = Newest(self._directory, self._local, self._options)
            self._saver = Saver(
                self._directory,
                self._deletion,
                self._due,
                self._notice,
                self._local,
                rate(local_bytes_per_second, "local_bytes_per_second"),
                self._options,
                flag(background, "background"),
                flag(fail_fast, "fail_fast"),
                on_preemption,
                Last(self._directory.newest),
            )
            self._last = self._saver.last
            self._restored: int | None = None
            self._trains = False
            self._completed = True
            self._first = group.index == 0
            uninterrupted(functools.partial(self._open, group))

    def _open(self, group: Group) -> None:
        with group.meeting("opening the directory of steps") as meeting:
            if self._first:
                self._deletion.open(self._directory.open())
            offers = meeting.gather(self._local.offer(group) if self._local else "")
            terms = meeting.share(agreed(offers, self._directory.store) if any(offers) else "")
        if self._local is not None:
            with group.meeting("opening the local folders") as meeting:
                self._local.open(terms, self._directory.store, group)
                meeting.barrier()

    def _numbered(self, step: object, verb: str) -> int:
        """A step's number. Raises InputError, after which the next call of all processes finds them in step."""
        try:
            return require_step(step)
        except InputError as error:
            hint = "; best_step() and steps() return such numbers, and the target is the next argument"
            with self._calling(verb):
                raise InputError(f"{error}{hint if verb == 'Checkpointer.restore' else ''}") from None

    def _calling(self, verb: str, step: int | None = None) -> Group:
        """A call that every process makes."""
        path = self._directory.url if step is None else self.path(step)
        return Group.current(self._options, Call.of(verb, path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._completed = False
        try:
            self.close()
        except Exception as failure:
            if failure is error:
                return
            # It must not hide the error that ends the block.
            error.add_note(f"jaxckpt: closing the Checkpointer failed too: {type(failure).__name__}: {failure}")

    def __repr__(self) -> str:
        return f"<Checkpointer {self._directory.url!r}: {self._directory.rules}>"

    # Saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tree: Tree,
        *,
        metrics: Mapping[str, Any] | None = None,
        process_state: Mapping[str, Any] | None = None,
        metadata: Any = None,
        on_done: Callable[[SaveInfo], object] | None = None,
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
            on_done: Called once the step is published, with what was written; as for `jaxckpt.save_async`. If this
                 returns False, it is not called.
            force: Save although the step is not due.
            overwrite: Replace this step if it is there.

        Returns:
            Whether it is being saved: False for a step that is not due, or is skipped by `Options.when_busy`.

        Raises:
            Preempted: The job was told to stop, and this step is saved; see `on_preemption`.
            Exception: As `jaxckpt.save_async`; and what ended an earlier save, or a deletion, in the background.
            InputError: The step is older than the newest, and the rules would delete it at once.
        """
        self._trains = True
        step = self._numbered(step, "Checkpointer.save")
        try:
            force, overwrite = flag(force, "force"), flag(overwrite, "overwrite")
        except InputError:
            with self._calling("Checkpointer.save"):
                raise
        request = SaveRequest(
            self.path(step), tree, metadata=metadata, overwrite=overwrite, process_state=process_state, on_done=on_done
        )
        calling = functools.partial(self._calling, "Checkpointer.save")
        return self._saver.save(step, metrics, request, calling, force=force)

    def local_bytes(self, tree: Tree) -> LocalBytes:
        """What a local step of a tree takes in this process: stated before anything is saved, without communication.

        Raises:
            InputError: The Checkpointer has no `local=`.
            TreeError: As for `jaxckpt.save`.
        """
        if self._local is None:
            raise InputError("local_bytes(tree) needs Checkpointer(local=…)")
        draft = describe(tree, None, None, self._options, tuple(self._directory.rules.components))
        return self._local.plan(draft, self._options)

    def delete(self, step: int) -> None:
        """Delete a step. Every process; a step that does not exist is no error, but the only one is not deleted.

        Raises:
            InputError: No other step would be left.
        """
        with self._calling("Checkpointer.delete", step) as group:
            uninterrupted(functools.partial(self._delete_together, step, group))
        self._last.step = None

    def _delete_together(self, step: int, group: Group) -> None:
        with group.meeting("deleting a step") as meeting:
            self._last.wait()
            meeting.gather("")
            if self._first:
                self._deletion.delete(step)
            meeting.share("")

    @property
    def preempted(self) -> bool:
        """Whether the job was told to stop, and the last step has been saved."""
        return self._saver.preempted

    @property
    def pending(self) -> PendingSave | None:
        """The last save in the background, if nobody has waited for it."""
        return self._saver.pending

    def wait(self) -> None:
        """Wait until the last save is published and what no rule keeps is deleted. Raises what either raised."""
        self._saver.wait()
        self._deletion.wait()
        self._deletion.raise_failure()

    def close(self) -> None:
        """Wait for the last save and for deletions, let go of the signal handler, and note that the run has ended.
        Raises what either raised.

        `follow` ends at that note, and the next Checkpointer of the directory removes it. A Checkpointer that was told
        to stop leaves none, nor does a `with` block that an error ends. One that neither saved nor called
        `restore_or_init` leaves the note as it found it.
        """
        self._notice.close()
        self._saver.wait()
        if self._first:
            uninterrupted(self._close)

    def _close(self) -> None:
        self._directory.close(ended=self._completed and not self._saver.preempted if self._trains else None)
        self._deletion.close(self._notice.seconds_left() if self._saver.preempted else None)
        self._deletion.raise_failure()

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

        It waits for the save under way, which may be that of this step. With `local`, a step is read from the local
        folders if together they hold it whole; a damaged file there is passed over for a copy, or for the storage.

        Raises:
            NotACheckpointError: No such step, or no step at all.
            Exception: As `jaxckpt.restore`; and what ended a save in the background. A damaged step is an error, never
                passed over for an older one.
        """
        asked = Request(target, mesh, specs, select, *split_rename(rename), strict)
        return self._restore(step, self._chosen(step, apart=asked.rules is None), asked)[1]

    def _restore(self, step: int | None, chosen: Chosen, asked: Request) -> tuple[int, Tree]:
        number = self._required(chosen)
        try:
            tree = carry_out(chosen.source or self.path(number), asked, self._options)
        except DamagedError as error:
            assert chosen.source is not None
            self._newest.avoid(chosen.source, error)
            return self._restore(step, self._chosen(step, apart=asked.rules is None), asked)
        except JaxckptError as error:
            for note in self._about(number, error):
                error.add_note(note)
            raise
        self._restored = number
        self._newest.taken(chosen)
        return number, tree

    def _about(self, step: int, error: JaxckptError) -> Iterator[str]:
        others = [found for found in self.steps() if found != step]
        if isinstance(error, (CorruptError, NotACheckpointError)) and others:
            yield f"other steps in {self._directory.url}: {others}; restore(step=…) takes one of them"
        found = self._directory.look(step)
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
            specs, rename: As for `jaxckpt.restore`.
            select: As for `jaxckpt.restore`; other leaves are what `init` makes.
            strict: As for `jaxckpt.restore`. With False, leaves that the checkpoint lacks are what `init` makes.

        Returns:
            (step, tree): the number of the step that was restored and its tree, or None and what `init` made.
        """
        self._trains = True
        new_names, rules = split_rename(rename)
        chosen = self._chosen(None, apart=rules is None)
        if chosen.step is None:
            self._newest.taken(chosen)
            return None, init()
        target, initial = target_of(init)
        return self._restore(
            None, chosen, Request(target, mesh, specs, select, new_names, rules, strict, initial=initial)
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
        step = self._restored if step is None else step
        while True:
            chosen = self._chosen(step)
            source = chosen.source or self._directory.child(self._required(chosen))
            with (
                self._calling("Checkpointer.process_state", chosen.step) as group,
                group.meeting("restoring each process's own state") as meeting,
            ):
                try:
                    state = own_state(source, name, resplit, self._options, meeting)
                except DamagedError as error:
                    assert chosen.source is not None
                    self._newest.avoid(chosen.source, error)
                    meeting.barrier()
                    continue
                meeting.barrier()
            return state

    def _chosen(self, step: int | None, *, apart: bool = True) -> Chosen:
        """A step, or the newest for None, after the save under way. Every process; with `apart` as `Newest.find`."""
        if step is not None:
            step = self._numbered(step, "Checkpointer.restore")
            if self._local is None:
                self._last.wait()
                return Chosen(step)
        with self._calling("Checkpointer.restore") as group:
            return self._newest.find(group, step, self._last.wait, apart=apart)

    def _required(self, chosen: Chosen) -> int:
        if chosen.step is None:
            raise NotACheckpointError(f"no step is in {self._directory.url}")
        return chosen.step

    # Looking ---------------------------------------------------------------------------------------------

    def path(self, step: int) -> str:
        """Where a step is: a checkpoint that `jaxckpt.restore`, `open` and all others take."""
        return self._directory.child(step).url

    def steps(self) -> list[int]:
        """The steps that are there, oldest first: one listing, and nothing but published manifests is believed."""
        return self._directory.steps()

    def latest_step(self) -> int | None:
        """The newest step that is there: the one that `restore` would take. With `local`, every process calls it."""
        return max(self.steps(), default=None) if self._local is None else self._chosen(None).step

    def best_step(self, metric: str | None = None) -> int | None:
        """The best step by `keep_best`, by its first rule or by that of a metric; None if no step has the metric."""
        bests = self._directory.rules.bests
        best = next((best for best in bests if metric in (None, best.metric)), None)
        if best is None:
            raise InputError(f"best_step({metric or ''}) needs Checkpointer(keep_best=({metric or 'metric'!r}, mode))")
        return next(iter(best.steps(self._directory.look_at(self.steps()))), None)

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics that were given when a step was saved; None for those that were not finite."""
        found = self._directory.look(require_step(step))
        if found is not None:
            return dict(found.record.metrics)
        return self._newest.metrics(step)
