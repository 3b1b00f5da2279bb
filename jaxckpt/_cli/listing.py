"""`ls`: the checkpoints in a folder, as a table or as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
from jaxckpt._foreign.orbax.steps import has_steps
from jaxckpt._format.names import is_data_folder
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._runtime.errors import CorruptError, InputError, NotACheckpointError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import show_bytes
from jaxckpt._storage.steps import is_step, pins, step_name, steps_of
from jaxckpt._storage.store import Store
from jaxckpt._storage.store_path import local_path, store_at
from jaxckpt._storage.workers import run_watched


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint in a listing. Its fields, in this order, form its JSON."""

    name: str

    path: str

    status: str = "ok"
    """"ok", "unfinished", "damaged" or "unreadable". Unless it is "ok", `problem` gives the reason, and only the path
    is known."""

    format: str | None = None

    step: int | None = None
    """The training step, from the record of a Checkpointer or from the name."""

    leaves: int | None = None

    bytes: int | None = None

    created: str | None = None

    metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    dropped: Sequence[str] = ()

    pinned: Sequence[str] = ()
    """Names by which a step of a run is pinned."""

    problem: str | None = None


_RARE = ("dropped", "pinned")
"""Columns that are shown only if an entry has a value."""


def ls(path: str, as_json: bool) -> None:
    entries = list_checkpoints(path)
    if as_json:
        print_json({"path": path, "checkpoints": [asdict(entry) for entry in entries]})
        return
    numbers = map(number_column, ("leaves", "size", "age"))
    rare = (Column(title, 10) for title in _RARE)
    columns = [Column("name", 16, middle=True), Column("format"), *numbers, Column("metrics", 10), *rare]
    rows = [_row(entry) for entry in entries]
    shown = [place for place, column in enumerate(columns) if column.title not in _RARE or any(r[place] for r in rows)]
    print_table([columns[place] for place in shown], [[row[place] for place in shown] for row in rows])
    for entry in entries:
        if entry.problem:
            click.echo(printable(f"{entry.name}: {entry.problem}"), err=True)


def _row(entry: Entry) -> list[str]:
    return [
        entry.name,
        entry.format or entry.status,
        "" if entry.leaves is None else f"{entry.leaves:,}",
        "" if entry.bytes is None else show_bytes(entry.bytes),
        "" if entry.format is None else show_age(entry.created),
        show_metrics(entry.metrics),
        ", ".join(entry.dropped),
        ", ".join(entry.pinned),
    ]


def list_checkpoints(path: str) -> list[Entry]:
    """The checkpoint at a path, or the checkpoints in it. Raises NotACheckpointError without any."""
    store = store_at(path, Options())
    checkpoint: Checkpoint | None = None
    not_found: NotACheckpointError | None = None
    try:
        if steps_of(store) is None:  # otherwise it is a run's directory, which opens as its newest step
            checkpoint = open_checkpoint(path)
    except NotACheckpointError as error:
        not_found = error
    except CorruptError:
        return _entries([path])  # the entry reports the problem
    if checkpoint is not None and _is_single_checkpoint(path, checkpoint, store):
        return _entries([path])
    # On an object store, `folders` costs one request per checkpoint, and `names` one per thousand objects.
    names = list(store.folders()) or store.names()
    entries = _entries(store.child(name).url for name in sorted(names, key=natural_key))
    if not entries and not_found is not None:
        raise not_found
    if not any(map(is_step, names)):
        return entries
    pinned = pins(store)
    return [replace(entry, pinned=[pin for pin in pinned if step_name(pinned[pin]) == entry.name]) for entry in entries]


def _is_single_checkpoint(path: str, checkpoint: Checkpoint, store: Store) -> bool:
    """Whether a path that opens as a checkpoint is itself the checkpoint, and not a folder of checkpoints.

    A folder of steps may open as its newest step, and a folder that holds one exported file as that file.
    """
    local = local_path(path)
    if checkpoint.format == "jaxckpt":  # perhaps in a step of Orbax's CheckpointManager
        if local is None:
            return True
        names = store.names()
        return not run_watched(f"listing {local}", Options().timeout_seconds, lambda: has_steps(local, names))
    return True not in store.folders().values() and local == local_path(checkpoint.path)


def _entries(paths: Iterable[str]) -> list[Entry]:
    """The checkpoints at these paths, finished or not."""
    return [entry for entry in map(_entry, paths) if entry is not None]


def _entry(path: str) -> Entry | None:
    name = os.path.basename(path.rstrip("/"))
    entry = Entry(name=name, path=path, step=int(name) if name.isdecimal() else None)
    try:
        if steps_of(store_at(path, Options())) is not None:  # a run's directory, which `ls` lists by itself
            return None
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
        step=entry.step if checkpoint.step is None else checkpoint.step,
        leaves=len(checkpoint),
        bytes=checkpoint.nbytes,
        created=checkpoint.created or None,
        metrics=_metrics(checkpoint),
        dropped=checkpoint.dropped,
    )


def _metrics(checkpoint: Checkpoint) -> dict[str, float | None]:
    """Its metrics. For another library's checkpoint, the numbers under "metrics" in its metadata."""
    metrics: Any = checkpoint.metadata
    if checkpoint.format == "jaxckpt" or not isinstance(metrics, dict):
        return dict(checkpoint.metrics)
    metrics = metrics.get("metrics")  # pyright: ignore[reportUnknownMemberType]
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)} if metrics else {}
