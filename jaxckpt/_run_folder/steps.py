"""Steps in a run's directory: names of their folders, which are published, and which step a path refers to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxckpt._model import typed_json
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import MAX_NESTING, nesting
from jaxckpt._model.records import MAX_INTEGER
from jaxckpt._options import require_whole_number
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, InputError, StorageError

RUN = "_run"
"""The folder in a run's directory for notes on the run: leases, pins, metadata, whether the run has ended, and which
metric decides "best"."""

BEST = "best.json"
ENDED = "ended.json"
METADATA = "metadata.json"
PIN = "pin-"

TRASH = "_trash"
"""The folder in a run's directory that `Checkpointer(trash=True)` moves steps into."""

Mode = Literal["min", "max"]


def require_step(step: object) -> int:
    """The number of a step as a plain int. Raises InputError for anything else."""
    if step is None:
        raise InputError(
            "step must be a whole number, found None: best_step() and latest_step() return None if no such step exists"
        )
    return require_whole_number(step, "step", minimum=0, maximum=MAX_INTEGER)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"{step:08d}"


def is_step(name: str) -> bool:
    """Whether a step's folder can have this name."""
    # A number with more digits could exceed the largest step and would then always be the newest.
    return re.fullmatch(r"\d{8}|[1-9]\d{8,18}", name, re.ASCII) is not None and int(name) <= MAX_INTEGER


def require_no_checkpoint(directory: Store) -> None:
    """Raise InputError if a directory of steps is itself a checkpoint."""
    if directory.read(MANIFEST) is not None or directory.published_data():
        raise InputError(f"{directory.url} is a checkpoint; give the directory of a Checkpointer, which holds steps")


def is_link(step: Store) -> bool:
    """Whether a step's folder is a symbolic link. Its files may belong to another run, so they are never changed."""
    return step.link_target() is not None


def step_folders(
    directory: Store, *, above: int = -1, known: Mapping[str, int] | None = None
) -> tuple[list[int], list[int]]:
    """The steps whose folder holds a checkpoint, and those whose folder holds none, oldest first, by one listing.

    Only steps above the number `above` are checked. The `known` ones, numbers by name, hold one if they are listed.
    Raises StorageError if a step cannot be checked, because a step that cannot be read must not count as missing.
    """
    known = known or {}
    folders = directory.folders(lambda name: name in known or (is_step(name) and int(name) > above), known)
    steps: dict[bool, list[int]] = {True: [known[name] for name in folders if name in known], False: []}
    for name, published in folders.items():
        if name not in known:
            steps[_require_known(published)].append(int(name))
    return sorted(steps[True]), sorted(steps[False])


def is_published(directory: Store, step: int) -> bool:
    """Whether a step's folder holds a checkpoint. Raises StorageError."""
    name = step_name(step)
    return _require_known(directory.folders(lambda folder: folder == name).get(name, False))


def _require_known(published: bool | StorageError) -> bool:
    if isinstance(published, StorageError):
        raise published
    return published


def best_of(
    metrics: Iterable[tuple[int, Mapping[str, float | None]]], metric: str, mode: Mode, count: int = 1
) -> list[int]:
    """The `count` steps with the best values of a metric, best first. Among equal values, the newest step wins."""
    sign = -1.0 if mode == "min" else 1.0
    ranked = [(sign * value, step) for step, values in metrics if (value := values.get(metric)) is not None]
    return [step for _, step in sorted(ranked, reverse=True)[:count]]


def pins(run: Store) -> dict[str, int]:
    """The pinned steps of a run, by name. If two steps have a name, because a program was killed while it moved the
    name, or two programs moved it at the same time, the newer step counts."""
    return {name: step for step, name in sorted(all_pins(run))}


def all_pins(run: Store) -> list[tuple[int, str]]:
    """The steps of all pins, each with the pin's name."""
    fields = (name.removeprefix(PIN).partition("-") for name in run.child(RUN).names() if name.startswith(PIN))
    return [(int(step), name) for step, _, name in fields if is_step(step)]


def require_unpinned(run: Store, step: int) -> None:
    """Raise InputError if a step has a name, which protects it from deletion."""
    names = sorted(name for pinned, name in all_pins(run) if pinned == step)
    if names:
        raise InputError(f"step {step} of {run.url} is pinned as {names[0]!r}, and is not deleted: unpin it first")


def pinned_steps(run: Store) -> set[int]:
    """The steps that have a pin, none of which is deleted."""
    return {step for step, _ in all_pins(run)}


# Metadata of the whole run, written once ------------------------------------------------------------------


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Metadata as the content of the file."""
    return json.dumps(metadata, ensure_ascii=False).encode()


def read_metadata(run: Store) -> dict[str, Any] | None:
    """The metadata of a run; None if it has none. Raises DataError, StorageError."""
    note = run.read(f"{RUN}/{METADATA}")
    if note is None:
        return None
    try:
        if nesting(note) > MAX_NESTING:
            raise ValueError(f"nested deeper than {MAX_NESTING}")
        return typed_json.decode(note, dict[str, Any])
    except ValueError as error:
        raise DataError(f"{run.url}/{RUN}/{METADATA}, the metadata of the run, is damaged: {error}") from error
