"""A run: a directory of steps, for programs that read it; and how it is forked."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Generator, Mapping
from typing import Any, NoReturn, Unpack, overload

from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._keywords import explain_names
from jaxckpt._model import zarr
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import state_file_name
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.records import MAX_INTEGER
from jaxckpt._model.select import Select
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, optional, options_or_default, require_bool, require_seconds, require_whole_number
from jaxckpt._pipeline.lanes import run_to_the_end
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._restore.differences import Strict
from jaxckpt._restore.match import RestoreRequest
from jaxckpt._restore.restore import DescribedTree, RestoreArguments, T, run_restore
from jaxckpt._rules.rename import Renaming
from jaxckpt._run_folder.leases import TERM_SECONDS, pin_step, pins, unpin_name
from jaxckpt._run_folder.metrics import add_metrics, metrics_of, read_added_metrics, recorded_metrics
from jaxckpt._run_folder.run_paths import (
    best_rule,
    manifest_of,
    metrics_by_step,
    missing_step_error,
    no_steps_error,
    possible_steps,
    require_directory,
    resolve_name,
)
from jaxckpt._run_folder.steps import (
    Incident,
    Mode,
    best_of,
    read_incidents,
    read_run_metadata,
    require_no_checkpoint,
    require_step,
    step_folders,
    step_name,
)
from jaxckpt._runs.follow import Step, close_at_exit, follow_steps
from jaxckpt._sources.compose import metrics_of_another_library
from jaxckpt._sources.format_registry import missing_formats_hint
from jaxckpt._sources.open_source import NamedStep, foreign_run_metadata, foreign_steps_of, source_at, step_of
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store import Store, await_writes
from jaxckpt._store.store_path import Path, run_at, store_at
from jaxckpt._store.transaction import open_transaction
from jaxckpt.errors import CheckpointExistsError, DataError, InputError, NotACheckpointError, StorageError, show_count

# Forks ----------------------------------------------------------------------------------------------------


def fork_step(path: Path, new_run: Path, options: Options) -> int:
    """Start a new run from the step at a path. Returns its number. Raises as `Run.fork`."""
    source, run, number = step_of(source_at(path, options), "give a run, or one of its steps")
    new = store_at(new_run, options).absolute()
    steps = [] if new.is_file() else step_folders(new)[0]
    if steps or new.is_file() or MANIFEST in new.names() or new.published_data():
        state = (
            f"has {show_count(len(steps), 'step')}" if steps else "is a file" if new.is_file() else "is a checkpoint"
        )
        raise CheckpointExistsError(f"{new.url} {state}: give a folder that is new or empty")
    if source.manifest.step is not None and (dropped := source.manifest.step.dropped):
        _log.warning(
            "the fork of %s is without %s, which keep_last_of has deleted there; restore_or_init(init, strict=False)"
            " takes it from init",
            source.store.url,
            ", ".join(map(repr, dropped)),
        )
    run_to_the_end(
        functools.partial(_fork, source, new.child(step_name(number)), options.sync), options.timeout_seconds
    )
    save_id = source.manifest.save_id
    if added := read_added_metrics(run, [number]).get((number, save_id)):
        add_metrics(new, number, save_id, added, sync=options.sync)
    return number


def _fork(source: NativeCheckpoint, target: Store, sync: bool) -> None:
    """Link the objects of a checkpoint, write its small files again, and publish it."""
    manifest, content = load_manifest(source.store)
    data = manifest.data_folder
    with contextlib.closing(open_transaction(target, manifest.save_id, None, manifest.decoded_stacks)) as transaction:
        for record, stack in zip(manifest.stacks, manifest.decoded_stacks, strict=True):
            for index, _ in stack.objects():
                key = f"{data}/{zarr.object_key(stack, index)}"
                length, _ = record.length_and_digest(index)
                try:
                    target.link(source.store, key, key, length, sync=False)  # as durable as in the source
                except StorageError:
                    _raise_link_error(source, target, key, length)
            if sync:
                target.sync_folders(data, (zarr.object_key(stack, index) for index, _ in stack.objects()))
        for process, (length, _) in enumerate(manifest.process_states):
            key = f"{data}/{state_file_name(process)}"
            state = source.store.read(key)
            if state is None or len(state) != length:
                _raise_link_error(source, target, key, length)
            target.put(key, state, sync=sync)
        if sync:
            target.sync_data(data, manifest.decoded_stacks)
        transaction.commit(content, sync=sync)


def _raise_link_error(source: NativeCheckpoint, target: Store, key: str, length: int) -> NoReturn:
    """Raise the error that prevented a link to an object."""
    change = source.change_since_open()
    if change is not None:
        raise NotACheckpointError(f"the checkpoint at {change} while it was being forked")
    if problems := source.store.check_lengths({key: length}):
        raise DataError(f"{source.url}/{key} {problems[key]}")
    raise InputError(
        f"{source.url}/{key} cannot be linked to {target.url}: both must be on one file system that has hard links, and"
        f" the file must be yours. convert({source.url!r}, {target.url!r}) makes a copy instead"
    )


StepName = int | str
"""A step: its number, "latest", "best", or the name of a pin."""


# Runs -----------------------------------------------------------------------------------------------------


@explain_names
class Run:
    """A run's directory of steps, to read it from an evaluator, a server or a notebook. It deletes nothing.

    Any single process may use it while a `Checkpointer` trains. A method's `step` is a number, "latest", "best", or the
    name of a pin.

    Args:
        directory: The directory of a `Checkpointer`: a local path or a URL. It need not exist yet. `steps`,
            `latest_step`, `metrics`, `best_step("loss", "min")`, `open` and `restore` also work with a run of
            Orbax's `CheckpointManager`.
        options: See `Options`.

    Raises:
        InputError: `directory` is a file.

    Examples:
        >>> import shutil, jaxckpt
        >>> shutil.rmtree("/tmp/jaxckpt-doc/run", ignore_errors=True)
        >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/run") as checkpointer:
        ...     saved = [checkpointer.save(step, {"w": step}) for step in (10, 20)]
        >>> run = jaxckpt.Run("/tmp/jaxckpt-doc/run")
        >>> run.steps()
        [10, 20]
        >>> run.restore(10)
        {'w': 10}
    """

    def __init__(self, directory: str | os.PathLike[str], *, options: Options | None = None) -> None:
        self._options = options_or_default(options)
        self._store: Store = run_at(directory, self._options)

    def __repr__(self) -> str:
        return f"<Run {self.directory!r}>"

    @property
    def directory(self) -> str:
        """The path or URL of the run."""
        return self._store.url

    # Steps -----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The numbers of the published steps, oldest first. One listing of the directory.

        This and the other methods first wait for a save of this process that is writing a step of the run.

        Empty if the directory does not exist: a program that follows a run may start before the training does. `open`,
        `restore` and `path` raise NotACheckpointError instead.

        Raises:
            InputError: The directory is itself a checkpoint.
            StorageError: The directory cannot be listed, or jaxckpt cannot tell whether a step is published.
        """
        await_writes(self._store)
        published, _ = step_folders(self._store)
        if not published:
            require_no_checkpoint(self._store)
            return [step.number for step in foreign_steps_of(self._store.url, self._options)]
        return published

    def latest_step(self) -> int | None:
        """The newest published step, or None if there are no steps."""
        return max(self.steps(), default=None)

    def best_step(self, metric: str | None = None, mode: Mode | None = None) -> int | None:
        """The best step by a metric; of equal values, the newest. None if the run has no step with a value, as before
        its first step.

        Args:
            metric: The name of the metric. None: the first of `Checkpointer(keep_best=…)`.
            mode: "min" or "max". None: that of the first rule of `keep_best`, if the metric is that of the rule.

        Raises:
            InputError: No metric is given and the run does not record one, or no mode is given for this metric; or the
                steps have metrics, but none of this name.
            NotACheckpointError: No metric or no mode is given, and the directory does not exist, or is empty.
        """
        if mode not in ("min", "max", None):
            raise InputError(f'mode must be "min" or "max", found {mode!r}')
        by_step = self._metrics_by_step()
        recorded_metric = None
        if metric is None or mode is None:
            if not by_step:
                require_directory(self._store)
            recorded_metric, recorded_mode = best_rule(self._store)
            if metric not in (None, recorded_metric):
                raise InputError(
                    f'best_step({metric!r}) needs mode="min" or mode="max", because keep_best compares steps by'
                    f" {recorded_metric!r}{closest_hint(str(metric), (recorded_metric,))}"
                )
            metric, mode = recorded_metric, mode or recorded_mode
        names = sorted({name for _, metrics in by_step for name in metrics})
        if names and metric not in (*names, recorded_metric):
            raise InputError(
                f"no step in {self.directory} has a metric {metric!r}; the steps have"
                f" {', '.join(map(repr, names))}{closest_hint(str(metric), names)}"
            )
        return next(iter(best_of(by_step, metric, mode)), None)

    def _metrics_by_step(self) -> list[tuple[int, Mapping[str, float | None]]]:
        """The metrics of each step, oldest first, also of a run of Orbax."""
        steps = self.steps()
        if by_step := metrics_by_step(self._store, steps):
            return by_step
        foreign = foreign_steps_of(self._store.url, self._options, ignored=[*map(step_name, steps)])
        return [(step.number, self._foreign_metrics(step.path)) for step in foreign]

    def _foreign_metrics(self, path: str) -> dict[str, float | None]:
        """The metrics of a step of Orbax: those that are numbers."""
        metadata = open_checkpoint(path, options=self._options).metadata or {}
        return metrics_of_another_library(metadata.get("metrics"))

    def path(self, step: StepName) -> str:
        """The path or URL of a step, for every function that takes a checkpoint."""
        number = self._number(step)
        name = step_name(number)
        path = self._store.child(name).url
        # This step first, so that the others are looked at only if it does not exist.
        is_native = possible_steps(self._store, name.__eq__) or possible_steps(self._store)
        return path if is_native else self._foreign_paths().get(number, path)

    def _foreign_paths(self) -> dict[int, str]:
        """The path of each step of a run of Orbax, oldest first."""
        return {step.number: step.path for step in foreign_steps_of(self._store.url, self._options)}

    def _number(self, step: StepName) -> int:
        """The number of a step. Raises InputError, NotACheckpointError."""
        if not isinstance(step, str):
            await_writes(self._store)
            return require_step(step)
        steps = self.steps()
        if not steps:
            raise no_steps_error(self._store, missing_formats_hint())
        return resolve_name(self._store, step, steps)

    def metadata(self) -> dict[str, Any]:
        """The metadata of the run, from its first `Checkpointer(metadata=…)`; empty if there is none.

        For a run of Orbax, that of `CheckpointManager(metadata=…)`. For the metadata of a step, see
        `open(step).metadata`.

        Raises:
            DataError: The file is damaged.
            StorageError: The file cannot be read.

        Examples:
            >>> import shutil, jaxckpt
            >>> shutil.rmtree("/tmp/jaxckpt-doc/described", ignore_errors=True)
            >>> config = {"model": "gpt-small", "layers": 12}
            >>> jaxckpt.Checkpointer("/tmp/jaxckpt-doc/described", metadata=config).close()
            >>> jaxckpt.Run("/tmp/jaxckpt-doc/described").metadata()
            {'model': 'gpt-small', 'layers': 12}
        """
        metadata = read_run_metadata(self._store)
        if metadata is None and not possible_steps(self._store):
            return foreign_run_metadata(self._store.url, self._options)
        return metadata or {}

    # Metrics ---------------------------------------------------------------------------------------------

    def metrics(self, step: StepName) -> dict[str, float | None]:
        """The metrics given to `Checkpointer.save`, and those that were added; None for NaN.

        For a step of Orbax, those of its metrics that are numbers. Raises NotACheckpointError.
        """
        number = self._number(step)
        manifest = manifest_of(self._store.child(step_name(number)))
        if manifest is not None:
            return metrics_of(self._store, number, manifest.save_id, manifest.step)
        paths = self._foreign_paths()
        if number not in paths:
            raise missing_step_error(self._store, number, self.steps())
        return self._foreign_metrics(paths[number])

    def add_metrics(self, step: StepName, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a step, or replace those that it has. `keep_best` and "best" respect them.

        A `Checkpointer` reads them after its next save. They belong to this save of the step: if the step is saved
        again, they are ignored.

        Raises:
            InputError: A metric is not a number, or the run is of Orbax.
            NotACheckpointError: The step does not exist.
            StorageError: The run's directory cannot be written to.
        """
        number, values = self._number(step), recorded_metrics(metrics)
        manifest = manifest_of(self._store.child(step_name(number)))
        if manifest is None:
            steps = self.steps()
            if number in steps:
                raise InputError(
                    f"{self.directory} is a run of another library, to whose steps no metrics can be added"
                )
            raise missing_step_error(self._store, number, steps)
        add_metrics(self._store, number, manifest.save_id, values, sync=self._options.sync)

    # Incidents -------------------------------------------------------------------------------------------

    def incidents(self) -> list[Incident]:
        """What went wrong in the run, oldest first: steps that were not saved or not readable. One small read.

        The newest 1,000 are kept. What could not be written, because the storage had failed, is written with the next
        step.

        Raises:
            DataError: The file is damaged.
            StorageError: The file cannot be read.
        """
        return read_incidents(self._store)

    # Pins ------------------------------------------------------------------------------------------------

    def pins(self) -> dict[str, int]:
        """The step of each pin, by the name of the pin."""
        return pins(self._store)

    def pin(self, step: StepName, name: str, *, move: bool = False) -> int:
        """Name a step. No rule of a Checkpointer deletes a named step until `unpin`. Nothing is copied.

        The step can then be opened as `run@name`. A step may have several names.

        Args:
            step: The step.
            name: Letters, digits, "_", "-" and ".", starting with a letter; not "latest" or "best".
            move: If a different step has this name, take it from that step, once this step is protected.

        Returns:
            The number of the step.

        Raises:
            InputError: `name` is invalid, or a different step has it and `move` is false; or `step` is None, which
                `best_step` returns if no step has a value.
            NotACheckpointError: The step does not exist, or is being deleted.
            StorageError: The run's directory cannot be written to.

        Examples:
            >>> import jaxckpt
            >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/pinned", keep_last=1) as checkpointer:
            ...     saved = checkpointer.save(40, {"w": 1}, overwrite=True)
            >>> run = jaxckpt.Run("/tmp/jaxckpt-doc/pinned")
            >>> run.pin("latest", "paper")
            40
            >>> jaxckpt.open("/tmp/jaxckpt-doc/pinned@paper").step
            40
            >>> run.unpin("paper")
        """
        source = source_at(self._location(step), self._options)
        _, run, number = step_of(source, "a Checkpointer deletes only those")
        pin_step(run, number, name, self._options, move=require_bool(move, "move"))
        return number

    def unpin(self, name: str) -> None:
        """Remove a name from its step. If the step has no other name, the rules of a Checkpointer may then delete it.

        Raises:
            NotACheckpointError: No step has that name.
            StorageError: The run's directory cannot be written to.
        """
        unpin_name(self._store, name)

    # Reading ---------------------------------------------------------------------------------------------

    def open(self, step: StepName | None = None, *, rename: Renaming | None = None) -> Checkpoint:
        """Open a step to inspect it, by default the newest, as `jaxckpt.open` does."""
        return open_checkpoint(self._location("latest" if step is None else step), rename=rename, options=self._options)

    @overload
    def restore(
        self, step: StepName | None = None, target: DescribedTree = None, **arguments: Unpack[RestoreArguments]
    ) -> Tree: ...
    @overload
    def restore(self, step: StepName | None, target: T, **arguments: Unpack[RestoreArguments]) -> T: ...
    @overload
    def restore(self, step: StepName | None = None, *, target: T, **arguments: Unpack[RestoreArguments]) -> T: ...
    def restore(
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
    ) -> Tree:
        """Restore a step, by default the newest. In a job of several processes, every process calls this.

        The other arguments and the errors are those of `jaxckpt.restore`.
        """
        request = RestoreRequest(target, mesh, specs, select, rename, strict, dtype=dtype, tied=tied)
        return run_restore(self._location("latest" if step is None else step), request, self._options)

    def _location(self, step: StepName) -> str | NamedStep:
        """The location of a step, also of a run of Orbax."""
        if isinstance(step, str) and step == "latest":
            return self._store.url
        return NamedStep(self._store, step if isinstance(step, str) else str(require_step(step)))

    def follow(
        self,
        *,
        after: int | None = None,
        newest: bool = False,
        timeout_seconds: float | None = None,
        poll_seconds: float = 1.0,
        term_seconds: float = TERM_SECONDS,
    ) -> Generator[Step]:
        """Iterate over the steps as they are published, oldest first, for example to evaluate during training.

        A lease holds each step until the loop asks for the next one, so that no `keep_` rule deletes it in the
        meantime. Steps that were deleted before the loop reached them are skipped. Without permission to write to the
        directory, steps are read without leases, with one warning. If a step is then deleted while it is being read,
        the read raises an error; it never returns wrong data.

        If the training goes back to an older step, so does the loop: once the last step that it yielded was deleted or
        saved again, it yields the steps after the last one that it has yielded and that is unchanged.

        The loop ends after the last step, once `Checkpointer.close` has recorded the end of the run. One process calls
        this; in a job of several processes, one follows and sends `step.path` to the others.

        Args:
            after: Start with the first step above this number. None: start with the oldest step.
            newest: Yield only the step that is the newest when the loop asks for one, and skip those before it. If the
                last step that was yielded is deleted or saved again, yield the newest again, even if it is older.
            timeout_seconds: End without an error if no new step is published for this many seconds; None: no limit.
                Time spent in the loop body does not count.
            poll_seconds: Seconds between checks of the directory. Each check is one listing and two small reads.
            term_seconds: How long, at most, a lease protects a step after this process has died; see `Checkpoint.hold`.

        Yields:
            A `Step`: `number`, `path`, `metrics`, `held`, `restore(...)`, `open()`.

        Raises:
            InputError: An argument is invalid, or the directory is a run of Orbax.
            ManifestError: The manifest of a step is damaged.
            StorageError: The directory cannot be read.

        Examples:
            >>> import jaxckpt
            >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/followed", every=10) as checkpointer:
            ...     saved = [checkpointer.save(step, {"w": step}, overwrite=True) for step in (10, 20)]
            >>> run = jaxckpt.Run("/tmp/jaxckpt-doc/followed")
            >>> [(step.number, step.restore()["w"]) for step in run.follow()]
            [(10, 10), (20, 20)]
        """
        after = -1 if after is None else require_whole_number(after, "after", minimum=0, maximum=MAX_INTEGER)
        return self._follow(after, after, timeout_seconds, poll_seconds, term_seconds, newest=newest)

    def _follow(
        self,
        after: int,
        restart_after: int,
        timeout_seconds: float | None,
        poll_seconds: float,
        term_seconds: float = TERM_SECONDS,
        *,
        newest: bool = False,
    ) -> Generator[Step]:
        """As `follow`. Once everything that it yielded is gone, it continues after the number `restart_after`."""
        steps = follow_steps(
            self._store,
            self._options,
            after=after,
            restart_after=restart_after,
            timeout_seconds=optional(require_seconds, timeout_seconds, "timeout_seconds"),
            poll_seconds=require_seconds(poll_seconds, "poll_seconds"),
            term_seconds=require_seconds(term_seconds, "term_seconds"),
            newest=require_bool(newest, "newest"),
        )
        return close_at_exit(steps)

    def fork(self, new_directory: str | os.PathLike[str], *, step: StepName = "latest") -> int:
        """Start a new run from a step without copying data: the files are hard-linked.

        Each run may delete its step at any time; the other keeps the data. One process calls this, and it takes
        milliseconds. The step's metrics, metadata and process states are included; pins and the run's metadata are not.

        Args:
            new_directory: The directory of the new run: on the same file system, without any steps.
            step: The step; by default the newest.

        Returns:
            The number of the step.

        Raises:
            CheckpointExistsError: `new_directory` has steps, or is itself a checkpoint or a file.
            InputError: One of the paths is on an object store or on a different file system, the file system refused a
                link, or this is not a run. `jaxckpt.convert` makes a copy instead. Or `step` is None.
            NotACheckpointError: The step does not exist, or was deleted in the meantime.
            DataError: A file of the step is missing or has the wrong length.

        Examples:
            >>> import shutil, jaxckpt
            >>> for name in ("forked", "fork"):
            ...     shutil.rmtree(f"/tmp/jaxckpt-doc/{name}", ignore_errors=True)
            >>> with jaxckpt.Checkpointer("/tmp/jaxckpt-doc/forked") as checkpointer:
            ...     saved = checkpointer.save(40, {"w": 1.0})
            >>> jaxckpt.Run("/tmp/jaxckpt-doc/forked").fork("/tmp/jaxckpt-doc/fork", step=40)
            40
            >>> jaxckpt.Run("/tmp/jaxckpt-doc/fork").restore()
            {'w': 1.0}
        """
        return fork_step(self._location(step), new_directory, self._options)
