"""Paths of a run that name a step: "run" is its newest step, "run@40", "run@best" and "run@name" one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._model.manifest import decode
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.records import Manifest
from jaxckpt._run_folder.leases import pins
from jaxckpt._run_folder.metrics import read_added_metrics
from jaxckpt._run_folder.steps import BEST, Mode, best_of, is_step, read_note, require_no_checkpoint, step_name
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.storage_errors import UNLISTABLE
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError, StorageError


def resolve_step(store: Store) -> Store | None:
    """The step that a path refers to if it is not a checkpoint itself: the newest of a run, or the step of `run@name`.

    None if the path is neither a run's directory nor a name in one. Raises InputError, NotACheckpointError,
    StorageError.
    """
    if steps := possible_steps(store):
        return store.child(step_name(steps[-1]))
    named = run_and_name(store)
    return None if named is None else named_step(*named)


def named_step(run: Store, name: str) -> Store | None:
    """The step of a run with a number or a name; None if jaxckpt has not saved any steps there.

    Raises InputError, NotACheckpointError, StorageError.
    """
    steps = possible_steps(run)
    return run.child(step_name(resolve_name(run, name, steps))) if steps else None


def possible_steps(directory: Store, predicate: Callable[[str], bool] = is_step) -> list[int]:
    """The steps of a directory, oldest first, including any that cannot be checked: opening one raises the error.

    Only folders whose names fulfill the predicate count. Empty if the directory can be read but not listed. Raises
    StorageError.
    """
    try:
        folders = directory.folders(predicate)
    except StorageError as error:
        if error.errno not in UNLISTABLE:
            raise
        return []
    return sorted(int(name) for name, published in folders.items() if published is not False)


def run_and_name(store: Store) -> tuple[Store, str] | None:
    """The run and the name in a path such as "run@best"; None for any other path."""
    above = store.parent_and_name()
    base, separator, name = above[1].rpartition("@") if above else ("", "", "")
    if above is None or not base or not separator:
        return None
    return above[0].child(base).with_url(store.url.removesuffix(f"@{name}")), name


def steps_of(store: Store) -> list[Store] | None:
    """All steps of the run at a path, oldest first, including any that cannot be checked; None if the path is not a
    run's directory. Raises StorageError."""
    return [store.child(step_name(step)) for step in possible_steps(store)] or None


def unfinished_steps(run: Store) -> tuple[int, ...]:
    """The steps of a run that are being saved or whose save was interrupted, oldest first. Raises StorageError."""
    unpublished = sorted(int(name) for name, published in run.folders(is_step).items() if published is False)
    return tuple(step for step in unpublished if any(map(is_data_folder, run.child(step_name(step)).names())))


def resolve_name(run: Store, name: str, published: Sequence[int]) -> int:
    """The step with a name, of the published steps of a run, oldest first. Raises InputError, NotACheckpointError."""
    if name.isdecimal() and name.isascii():
        if (step := int(name)) not in published:
            raise missing_step_error(run, step, published)
        return step
    if name == "latest":
        return published[-1]
    if name == "best":
        return _best(run, published)
    steps_by_name = pins(run)
    if (pinned := steps_by_name.get(name)) is not None:
        if pinned in published:
            return pinned
        raise NotACheckpointError(f"{run.url} has no step {pinned}, which was pinned as {name!r}: it was deleted")
    names = ("latest", "best", *steps_by_name)
    is_last_n = name.startswith("last") and name[4:].isdecimal()
    hint = "; @lastN, the newest N steps, is only for average" if is_last_n else closest_hint(name, names)
    raise InputError(
        f"{run.url} has no step named {name!r}: give a number, as in {run.url}@{published[-1]}, or one of"
        f" {', '.join(names)}{hint}"
    )


def require_directory(run: Store) -> None:
    """Raise NotACheckpointError for a run's directory that was probably misspelled."""
    if not run.names():
        raise NotACheckpointError(f"{run.url} is not a run: the directory does not exist, or is empty")


def no_steps_error(run: Store, hint: str) -> NotACheckpointError:
    """The error for a run without published steps. Raises InputError if the directory is itself a checkpoint."""
    require_no_checkpoint(run)
    require_directory(run)
    return NotACheckpointError(f"{run.url} has no steps{hint}")


def missing_step_error(run: Store, step: int, published: Sequence[int]) -> NotACheckpointError:
    """The error for a number that is not one of the published steps of a run, oldest first."""
    shown = ", ".join(map(str, published[-5:]))
    newest = f"; the newest steps are {shown}" if len(published) > 1 else f"; its only step is {shown}" if shown else ""
    return NotACheckpointError(f"{run.url} has no step {step}{newest}")


def _best(run: Store, published: Sequence[int]) -> int:
    """The step with the best value of the metric that the run's note names.

    Raises InputError, NotACheckpointError, DataError.
    """
    metric, mode = best_rule(run)
    best = next(iter(best_of(metrics_by_step(run, published), metric, mode)), None)
    if best is None:
        raise NotACheckpointError(f"no step in {run.url} has a value of the metric {metric!r}")
    return best


def best_rule(run: Store) -> tuple[str, Mode]:
    """The metric that decides which step is the best, and whether its lowest or highest value is best.

    Raises InputError if the run does not record it, and DataError.
    """
    rule = read_note(run, BEST, tuple[str, Mode], hint=". Give a step number")
    if rule is None:
        raise InputError(
            f"{run.url} does not record which step is the best: no Checkpointer with keep_best=(metric, mode) has"
            ' opened it. Give a step number, such as that of Run.best_step("loss", "min")'
        )
    return rule


def metrics_by_step(run: Store, published: Sequence[int]) -> list[tuple[int, Mapping[str, float | None]]]:
    """The published steps that a Checkpointer saved, each with its metrics. Raises CorruptError, StorageError."""
    children = [run.child(step_name(step)) for step in published]
    contents = run.read_all(f"{step_name(step)}/{MANIFEST}" for step in published)
    added = read_added_metrics(run, published)
    manifests = [
        manifest_of(child) if content is None else decode(content, child.url)
        for child, content in zip(children, contents, strict=True)
    ]
    return [
        (step, {**manifest.step.metrics, **added.get((step, manifest.save_id), {})})
        for step, manifest in zip(published, manifests, strict=True)
        if manifest is not None and manifest.step is not None
    ]


def manifest_of(step: Store) -> Manifest | None:
    """The manifest of a step; None if the step was deleted. Raises CorruptError."""
    try:
        return load_manifest(step)[0]
    except NotACheckpointError:
        return None
