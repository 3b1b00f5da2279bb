"""The checkpoints in a folder, for `ls`: which there are, their table and their JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click

from jaxckpt._cli.terminal import Column, natural, print_table, printable, show_age, show_metrics
from jaxckpt._foreign.orbax_in import has_steps
from jaxckpt._format.names import is_data
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._runtime.errors import CorruptError, InputError, NotACheckpointError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import show_bytes
from jaxckpt._storage.place import local_path, store_at
from jaxckpt._storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint in a listing; its fields, in this order, are its JSON."""

    name: str

    path: str

    status: str = "ok"
    """"ok", "unfinished", "damaged" or "unreadable"; where it is not "ok", `problem` says why, and what is not in the
    path is unknown."""

    format: str | None = None

    step: int | None = None
    """The training step, as a Checkpointer recorded it or as the name has it."""

    leaves: int | None = None

    bytes: int | None = None

    created: str | None = None

    metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    dropped: Sequence[str] = ()

    problem: str | None = None


def list_checkpoints(path: str) -> list[Entry]:
    """The checkpoint at a path, or those in it. Raises NotACheckpointError where there is none."""
    store = store_at(path, Options())
    checkpoint: Checkpoint | None = None
    nothing: NotACheckpointError | None = None
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpointError as error:
        nothing = error
    except CorruptError:
        return _entries([path])  # with its problem
    if checkpoint is not None and _stands_alone(path, checkpoint, store):
        return _entries([path])
    # On an object store the first costs a request for each checkpoint, the other one for each thousand objects.
    names = list(store.folders()) or store.names()
    found = _entries(store.child(name).url for name in sorted(names, key=natural))
    if not found and nothing is not None:
        raise nothing
    return found


def _stands_alone(path: str, checkpoint: Checkpoint, store: Store) -> bool:
    """Whether it is no folder of other checkpoints.

    A folder of steps may open as the newest of them, and one with some exported file in it as that.
    """
    local = local_path(path)
    if checkpoint.format == "jaxckpt":  # of Orbax's CheckpointManager, perhaps
        return local is None or not has_steps(local, store.names())
    return not any(store.folders().values()) and local == local_path(checkpoint.path)


def _entries(paths: Iterable[str]) -> list[Entry]:
    """Those of them where a checkpoint is, or one was begun."""
    return [entry for entry in map(_entry, paths) if entry is not None]


def _entry(path: str) -> Entry | None:
    name = os.path.basename(path.rstrip("/"))
    entry = Entry(name=name, path=path, step=int(name) if name.isdecimal() else None)
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpointError:
        if not any(map(is_data, store_at(path, Options()).names())):
            return None
        return replace(entry, status="unfinished", problem="a save to it is going on, or never finished")
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
    """Its metrics; of another library's checkpoint the numbers that its metadata has under that name."""
    found: Any = checkpoint.metadata
    if checkpoint.format == "jaxckpt" or not isinstance(found, dict):
        return dict(checkpoint.metrics)
    found = found.get("metrics")  # pyright: ignore[reportUnknownMemberType]
    return {name: value for name, value in found.items() if isinstance(value, int | float)} if found else {}


def listing_record(path: str, entries: Sequence[Entry]) -> dict[str, Any]:
    return {"path": path, "checkpoints": [asdict(entry) for entry in entries]}


def print_listing(entries: Sequence[Entry]) -> None:
    """The table on stdout, and on stderr what is wrong with an entry."""
    columns = [
        Column("name", least=16, middle=True),
        Column("format"),
        Column("leaves", right=True),
        Column("size", right=True),
        Column("age", right=True),
        Column("metrics", least=10),
        Column("dropped", least=10),
    ]
    rows = [
        [
            entry.name,
            entry.format or entry.status,
            "" if entry.leaves is None else f"{entry.leaves:,}",
            "" if entry.bytes is None else show_bytes(entry.bytes),
            "" if entry.format is None else show_age(entry.created),
            show_metrics(entry.metrics),
            ", ".join(entry.dropped),
        ]
        for entry in entries
    ]
    shown = len(columns) if any(entry.dropped for entry in entries) else len(columns) - 1
    print_table(columns[:shown], [row[:shown] for row in rows])
    for entry in entries:
        if entry.problem:
            click.echo(printable(f"{entry.name}: {entry.problem}"), err=True)
