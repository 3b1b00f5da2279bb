"""`ls`: the checkpoints in a folder, as a table or as JSON."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click

from jaxckpt._cli.terminal import (
    Column,
    natural_key,
    number_column,
    print_json,
    print_table,
    printable,
    show_age,
    show_metrics,
)
from jaxckpt._formats.orbax.orbax_steps import has_separate_items, has_step_mark
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._pipeline.workers import submit
from jaxckpt._run_folder.leases import pins
from jaxckpt._run_folder.metrics import AddedMetrics, read_added_metrics
from jaxckpt._run_folder.run_paths import steps_of
from jaxckpt._run_folder.steps import Incident, is_step, read_incidents
from jaxckpt._sources.compose import metrics_of_another_library
from jaxckpt._sources.open_source import foreign_steps_of
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import local_path, store_at
from jaxckpt.errors import CorruptError, InputError, NotACheckpointError, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingEntry:
    """A checkpoint or a run in a listing. Its fields, in this order, form its JSON."""

    name: str

    path: str

    status: str = "ok"
    """"ok", "unfinished", "damaged" or "unreadable". Unless it is "ok", `problem` gives the reason, and only the path
    is known."""

    format: str | None = None

    step: int | None = None
    """The training step, from the record of a Checkpointer or from the name; the newest step of a run."""

    steps: int | None = None
    """The number of steps, for a run, which is described by its newest step; None for a checkpoint."""

    leaves: int | None = None

    bytes: int | None = None

    created: str | None = None

    metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    dropped: Sequence[str] = ()

    pinned: Sequence[str] = ()
    """Names by which a step of a run is pinned; for a run, the names of all pinned steps."""

    incidents: Sequence[str] = ()
    """The kinds of incidents of a step of a run since it was saved, such as "unchanged step"."""

    problem: str | None = None


_RARE = ("steps", "dropped", "pinned", "incidents")
"""Columns that are shown only if an entry has a value."""


def ls(path: str, as_json: bool) -> None:
    entries = list_checkpoints(path)
    if as_json:
        print_json({"path": path, "checkpoints": [asdict(entry) for entry in entries]})
        return
    numbers = map(number_column, ("steps", "leaves", "size", "age"))
    texts = (Column(title, 10) for title in ("metrics", "dropped", "pinned", "incidents"))
    columns = [Column("name", 16, is_name=True), Column("format"), *numbers, *texts]
    rows = [_row(entry) for entry in entries]
    shown = [at for at, column in enumerate(columns) if column.title not in _RARE or any(r[at] for r in rows)]
    print_table([columns[at] for at in shown], [[row[at] for at in shown] for row in rows])
    for step, reason in _failed_saves(path, entries)[-_SHOWN_FAILURES:]:
        click.echo(printable(f"step {step} was not saved: {reason}"), err=True)
    for entry in entries:
        if entry.problem:
            click.echo(printable(f"{entry.name}: {entry.problem}"), err=True)


_SHOWN_FAILURES = 5


def _failed_saves(path: str, entries: Sequence[ListingEntry]) -> list[tuple[int | None, str]]:
    """The steps of the run at a path that were not saved, and do not exist now, each with the reason."""
    steps = {entry.step for entry in entries}
    incidents = _incidents(store_at(path, Options()))
    failed = [(found.step, found.reason) for found in incidents if found.kind == "failed save"]
    return [(step, reason) for step, reason in failed if step not in steps]


def _incidents(run: Store) -> list[Incident]:
    """The incidents of a run, if they can be read."""
    try:
        return read_incidents(run)
    except (CorruptError, StorageError):
        return []


def _row(entry: ListingEntry) -> list[str]:
    return [
        entry.name,
        entry.format or entry.status,
        "" if entry.steps is None else f"{entry.steps:,}",
        "" if entry.leaves is None else f"{entry.leaves:,}",
        "" if entry.bytes is None else show_bytes(entry.bytes),
        "" if entry.format is None else show_age(entry.created),
        show_metrics(entry.metrics),
        ", ".join(entry.dropped),
        ", ".join(entry.pinned),
        ", ".join(entry.incidents),
    ]


def list_checkpoints(path: str) -> list[ListingEntry]:
    """The checkpoint at a path, the steps of a run, or the checkpoints and runs in a folder.

    Raises NotACheckpointError without any.
    """
    if path.startswith(("http://", "https://")):  # where folders cannot be listed
        with contextlib.suppress(CorruptError):  # the entry reports it
            open_checkpoint(path)
        return _entries({path: True}, {})
    store = store_at(path, Options())
    checkpoint: Checkpoint | None = None
    not_found: NotACheckpointError | None = None
    try:
        if not _count_steps(path):  # otherwise it is a run's directory, which opens as its newest step
            checkpoint = open_checkpoint(path)
    except NotACheckpointError as error:
        not_found = error
    except CorruptError:
        if not _holds_checkpoints(path, store):
            return _entries({path: False})  # the entry reports the problem
    if checkpoint is not None and _is_single_checkpoint(path, checkpoint, store):
        return _entries({path: False})
    # On an object store, `folders` costs one request per checkpoint, and `names` one per thousand objects.
    folders = store.folders()
    names = list(folders) or store.names()
    steps = [int(name) for name in names if is_step(name)]
    pinned, added = (pins(store), read_added_metrics(store, steps)) if steps else (None, None)
    are_checkpoints = {store.child(name).url: folders.get(name) is True for name in sorted(names, key=natural_key)}
    entries = _entries(are_checkpoints, pinned, added)
    if not entries and not_found is not None:
        raise not_found
    if pinned is None:
        return entries
    incidents = _incidents(store)
    return [replace(entry, incidents=_kinds_of(entry, incidents)) for entry in entries]


def _kinds_of(entry: ListingEntry, incidents: Sequence[Incident]) -> list[str]:
    """The kinds of incidents of a step since it was saved. Those before concern an earlier save of the step."""
    saved = entry.created or ""  # both times are texts in UTC with milliseconds
    return list(dict.fromkeys(found.kind for found in incidents if found.step == entry.step and found.time >= saved))


def _count_steps(path: str) -> int:
    """The number of steps in a run's directory, of jaxckpt or of another library; 0 for anything else."""
    return len(steps_of(store_at(path, Options())) or foreign_steps_of(path, Options()))


def _is_run(path: str) -> bool:
    """Whether a path is a run's directory; not if it is a broken symbolic link."""
    with contextlib.suppress(InputError):
        return _count_steps(path) > 0
    return False


def _is_single_checkpoint(path: str, checkpoint: Checkpoint, store: Store) -> bool:
    """Whether a path that opens as a checkpoint is itself the checkpoint, and not a folder of checkpoints.

    A folder that holds one exported file may open as that file.
    """
    if checkpoint.format == "jaxckpt" or not store.names():  # without names, it is a file or a named step, "run@30"
        return True
    return local_path(path) == local_path(checkpoint.path) and not _holds_checkpoints(path, store)


def _holds_checkpoints(path: str, store: Store) -> bool:
    """Whether a folder that another format recognizes holds separate checkpoints or runs.

    To Orbax, a folder of its checkpoints looks like a step of an old version, in which each of them is an item.
    """
    names = store.names()
    if MANIFEST in names or has_step_mark(names):
        return False
    inside = (store.child(name).url for name in names)
    are_items_separate = has_separate_items(local_path(path) or path, names)
    return are_items_separate or True in store.folders().values() or any(map(_is_run, inside))


def _entries(
    are_checkpoints: Mapping[str, bool], pinned: Mapping[str, int] | None = None, added: AddedMetrics | None = None
) -> list[ListingEntry]:
    """The checkpoints and runs at these paths, finished or not.

    A path whose value is true holds a checkpoint, and is therefore no run. `pinned` has the pinned steps of their run,
    by name, and `added` the metrics that were added to its steps.
    """

    def read() -> list[ListingEntry | None]:
        # Concurrently, because on network storage each takes several round trips.
        entries = [submit(functools.partial(_entry, pinned, added, *one)) for one in are_checkpoints.items()]
        return [entry.result() for entry in entries]

    found = run_watched("listing checkpoints", Options().timeout_seconds, read)
    return [entry for entry in found if entry is not None]


def _entry(
    pinned: Mapping[str, int] | None, added: AddedMetrics | None, path: str, is_checkpoint: bool
) -> ListingEntry | None:
    name = os.path.basename(path.rstrip("/"))
    entry = ListingEntry(name=name, path=path, step=int(name) if name.isdecimal() else None)
    try:
        entry = replace(entry, steps=None if is_checkpoint else _count_steps(path) or None)
        checkpoint = open_checkpoint(path)
    except NotACheckpointError:
        if not any(map(is_data_folder, store_at(path, Options()).names())):
            return None
        return replace(entry, status="unfinished", problem="a save is in progress or was interrupted")
    except (CorruptError, InputError, StorageError) as error:
        status = "damaged" if isinstance(error, CorruptError) else "unreadable"
        return replace(entry, status=status, problem=str(error))
    return replace(
        entry,
        format=checkpoint.format,
        step=_step(entry, checkpoint),
        leaves=len(checkpoint),
        bytes=checkpoint.nbytes,
        created=checkpoint.created or None,
        metrics=metrics_of(checkpoint, added if entry.steps is None else None),
        dropped=checkpoint.dropped,
        pinned=_names_of(entry, checkpoint, pinned),
    )


def _step(entry: ListingEntry, checkpoint: Checkpoint) -> int | None:
    """The training step of a checkpoint, or of the newest checkpoint of a run."""
    if checkpoint.step is not None:
        return checkpoint.step
    metadata: Any = checkpoint.metadata
    if entry.steps is not None and isinstance(metadata, dict):  # a run of Orbax
        return metadata.get("step")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return entry.step


def _names_of(entry: ListingEntry, checkpoint: Checkpoint, pinned: Mapping[str, int] | None) -> list[str]:
    """The names by which a step is pinned, or for a run those of all its steps."""
    if checkpoint.format != "jaxckpt":
        return []
    above = store_at(checkpoint.path, Options()).parent_and_name()
    if above is None or not is_step(above[1]):
        return []
    steps_by_name = pins(above[0]) if pinned is None or entry.steps is not None else pinned
    return [name for name in steps_by_name if entry.steps is not None or steps_by_name[name] == int(above[1])]


def metrics_of(checkpoint: Checkpoint, added: AddedMetrics | None = None) -> dict[str, float | None]:
    """Its metrics, also those that were added to a step: `added`, or those that are in the run. For another library's
    checkpoint, the numbers under "metrics" in its metadata."""
    metrics: Any = checkpoint.metadata
    if checkpoint.format != "jaxckpt" and isinstance(metrics, dict):
        return metrics_of_another_library(metrics.get("metrics"))  # pyright: ignore[reportUnknownMemberType]
    if added is None and checkpoint.step is not None and checkpoint.format == "jaxckpt":
        above = store_at(checkpoint.path, Options()).parent_and_name()
        added = {} if above is None else read_added_metrics(above[0], [checkpoint.step])
    return {**checkpoint.metrics, **(added or {}).get((checkpoint.step or 0, checkpoint.save_id), {})}
