"""Conversion of whole runs: which steps are left to convert, each step with its metrics, and the notes on the run.

Each step is published by itself, so a conversion that was interrupted is resumed: steps that are complete in the
destination are skipped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec

from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.records import Manifest, StepRecord
from jaxckpt._options import Options
from jaxckpt._run_folder.leases import all_pins, hold, pin_file_name, pins
from jaxckpt._run_folder.metrics import metrics_of
from jaxckpt._run_folder.run_paths import possible_steps
from jaxckpt._run_folder.steps import (
    BEST,
    METADATA,
    RUN,
    encode_metadata,
    is_published,
    read_run_metadata,
    require_no_checkpoint,
    step_folders,
    step_name,
)
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.format_registry import written_formats
from jaxckpt._sources.open_source import Location, NamedStep, foreign_run_metadata, foreign_steps_of, source_at
from jaxckpt._sources.source import NativeCheckpoint, Source
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import local_path, run_at, store_at
from jaxckpt.errors import CheckpointExistsError, InputError, NotACheckpointError, StorageError, show_count, show_path

View = Callable[[NativeCheckpoint | ForeignCheckpoint], Source]
"""What is converted of a source: `select` and `rename`."""


def run_of(source: Location, options: Options) -> tuple[Store, list[int]] | None:
    """The store of a run's directory, also of another library, and its steps, oldest first; None for anything else.

    A path such as "run@40" names a checkpoint, not a run.
    """
    if isinstance(source, ForeignCheckpoint | NamedStep):
        return None
    store = store_at(source, options)
    if store.is_file() or store.read(MANIFEST) is not None:
        return None
    steps = possible_steps(store) or [step.number for step in foreign_steps_of(source, options)]
    return (store, steps) if steps else None


def steps_to_convert(
    source: Location, destination: str | os.PathLike[str], format: str, view: View, options: Options, *, overwrite: bool
) -> list[int] | None:
    """The steps of a run that its conversion has still to write, oldest first; None if the source is not a run.

    Raises InputError if a destination of this format cannot be a run, CheckpointExistsError if it has other steps.
    """
    found = run_of(source, options)
    if found is None:
        return None
    run, steps = found
    ours = format == "jaxckpt"
    if not ours and written_formats()[format].write_step is None:
        raise InputError(
            f"{run.url} is a run with {show_count(len(steps), 'step')}, but a checkpoint of format {format!r} is one"
            f" step: convert one of them, such as {run.url}@{steps[-1]} or {run.url}@latest"
        )
    target = run_at(destination, options, to_write=True)
    if _place(target) == _place(run):
        raise InputError(f"the destination {target.url} is the run itself: give a new directory")
    if ours:
        require_no_checkpoint(target)
    complete, others = _steps_in(target, destination, options, ours=ours)
    if others or (complete and complete.isdisjoint(steps)):
        shown = ", ".join(map(str, sorted(others or complete)[-3:]))
        raise CheckpointExistsError(
            f"{target.url} is the directory of another run, with the steps {shown}: give a new directory, or that of an"
            f" interrupted conversion of {run.url}"
        )
    left = [step for step in steps if overwrite or step not in complete]
    for step in {*steps}.difference(left):
        noted, _ = with_notes(source_at(NamedStep(run, str(step)), options), run, step)
        problem = _difference(view(noted).manifest, target, step, options)
        if problem is not None:
            raise CheckpointExistsError(
                f"step {step} exists in {target.url}, but it is not that of {run.url}: {problem}. Give a new directory,"
                " or convert all steps again with overwrite=True"
            )
    if ours:
        for step in left:
            target.mark(step_name(step))
    return left


def _steps_in(
    target: Store, destination: str | os.PathLike[str], options: Options, *, ours: bool
) -> tuple[set[int], Collection[int]]:
    """The complete steps of the destination's format in its directory, and those of another format."""
    own = step_folders(target)[0]
    foreign = [step.number for step in foreign_steps_of(destination, options, ignored=[*map(step_name, own)])]
    return ({*own}, foreign) if ours else ({*foreign}, own)


def _difference(manifest: Manifest, target: Store, step: int, options: Options) -> str | None:
    """How a step in the destination differs from a step of the run, as far as their descriptions show."""
    there = source_at(NamedStep(target, str(step)), options).manifest
    old, new = _shapes(there), _shapes(manifest)
    if unmatched := sorted(old.keys() ^ new.keys()):
        return f"only one of them has the leaf {show_path(unmatched[0])}"
    if changed := [path for path, shape in new.items() if old[path] != shape]:
        path = changed[0]
        return f"{show_path(path)} has the shape {list(old[path])} there, expected {list(new[path])}"
    metrics = [{} if record is None else dict(record.metrics) for record in (there.step, manifest.step)]
    return None if metrics[0] == metrics[1] else f"it has the metrics {metrics[0]}, expected {metrics[1]}"


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its path. Values in the manifest count as scalars."""
    return {leaf.path: () if leaf.stack is None else manifest.leaf_shape(leaf) for leaf in manifest.leaves}


def with_notes(
    source: NativeCheckpoint | ForeignCheckpoint, run: Store, step: int
) -> tuple[NativeCheckpoint | ForeignCheckpoint, set[str]]:
    """A step of a run with its number, its metrics and the user's metadata; and what no conversion of it keeps."""
    manifest = source.manifest
    others = {"process_state"} if manifest.process_states else set[str]()
    step_metrics = {} if manifest.step is None else manifest.step.metrics
    if _is_own(source, run, step):
        record = manifest.step or StepRecord(step)
        metrics = metrics_of(run, step, manifest.save_id, record)
        return replace(source, manifest=msgspec.structs.replace(manifest, step=record.with_metrics(metrics))), others
    metadata = manifest.metadata
    if isinstance(metadata, dict):
        of_orbax = cast("Mapping[str, Any]", metadata)
        metadata, metrics = of_orbax.get("custom_metadata"), of_orbax.get("metrics")
        if isinstance(metrics, Mapping):
            others |= {f"metric {name!r}, not a number" for name in metrics if name not in step_metrics}
        elif metrics is not None:
            others.add("metrics, not a dict")
    return replace(source, manifest=msgspec.structs.replace(manifest, metadata=metadata)), others


def _is_own(source: Source, run: Store, step: int) -> bool:
    """Whether a Checkpointer has saved a step of a run, not Orbax, also with jaxckpt's handler."""
    return isinstance(source, NativeCheckpoint) and source.store.url == run.child(step_name(step)).url


def _place(store: Store) -> str:
    local = local_path(store.url)
    return store.url if local is None else os.path.realpath(local)


def hold_step(run: Store, step: int, options: Options, until_converted: contextlib.ExitStack) -> bool:
    """Protect a step of a Checkpointer's run from deletion while it is converted, if a lease can be written there.
    Returns whether the step still exists."""
    if not is_published(run, step):
        others = () if possible_steps(run) else foreign_steps_of(run.url, options)
        return any(other.number == step for other in others)
    try:
        until_converted.enter_context(hold(run, step))
    except NotACheckpointError:
        return False
    except StorageError:  # no permission
        pass
    return True


def copy_notes(run: Store, target: Store, options: Options) -> None:
    """Copy the metadata of a run, the meaning of "best", and the pins of the steps that were copied."""
    notes = {name: content for name in (METADATA, BEST) if (content := run.read(f"{RUN}/{name}")) is not None}
    if METADATA not in notes and (metadata := foreign_run_metadata(run.url, options)):
        notes[METADATA] = encode_metadata(metadata)
    steps = step_folders(target)[0]
    notes |= {pin_file_name(step, name): b"" for step, name in all_pins(run) if step in steps}
    if notes:
        folder = target.create_child(RUN)
        for name, content in notes.items():
            folder.replace(name, content)


def export_notes(run: Store, directory: str, format: str, options: Options) -> list[str]:
    """Write the metadata of a run into one of another library. Returns what the other format has no place for."""
    left_out = [f"pin {name!r}" for name in pins(run)]
    if run.read(f"{RUN}/{BEST}") is not None:
        left_out.append("keep_best")
    if metadata := read_run_metadata(run) or foreign_run_metadata(run.url, options):
        write = written_formats()[format].write_run_metadata
        if write is None:
            left_out.append("metadata of the run")
        else:
            write(directory, metadata)
    return left_out
