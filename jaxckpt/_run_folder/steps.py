"""A run's directory: the names of its steps' folders, which of them are published, and the notes on the run.

file in _run                   meaning                              written by                     read by
metadata.json                  what the user says of the run        the first Checkpointer         Run.metadata
best.json                      metric and mode of `keep_best`       Checkpointer                   "run@best"
ended.json                     the run has ended                    Checkpointer.close             Run.follow
incidents.json                 what went wrong                      Checkpointer                   Run.incidents
rules.json                     the rules that have deleted steps    Checkpointer                   the next one
local-<id>                     the id of a run with local steps     Checkpointer                   the next one
metric-<step>-<digest>.json    a metric, added after the save       Run.add_metrics                Run.metrics
pin-<step>-<name>              the step has a name                  Run.pin                        Run.pins
lease-<step>-<id>              a reader holds the step              Checkpoint.hold, Run.follow    Checkpointer
deleting-<step>                the step is being deleted            Checkpointer                   who holds it
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from jaxckpt._model import typed_json
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.manifest import MAX_NESTING, nesting
from jaxckpt._model.records import MAX_INTEGER
from jaxckpt._options import require_whole_number
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, InputError, JaxckptError, StorageError

RUN = "_run"
"""The folder in a run's directory for notes on the run."""

BEST = "best.json"
ENDED = "ended.json"
METADATA = "metadata.json"

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


# Notes on the run -----------------------------------------------------------------------------------------


_Note = TypeVar("_Note")


def read_note(run: Store, name: str, kind: type[_Note], what: str = "", hint: str = "") -> _Note | None:
    """A note on a run; None if it is missing. Raises DataError, StorageError."""
    content = run.read(f"{RUN}/{name}")
    return None if content is None else decode_note(run, name, content, kind, what, hint)


def decode_note(run: Store, name: str, content: bytes, kind: type[_Note], what: str = "", hint: str = "") -> _Note:
    """A note on a run from the content of its file. `what` and `hint` are for the DataError that this raises."""
    try:
        return typed_json.decode(content, kind)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{run.url}/{RUN}/{name}{what} is damaged: {error}{hint}") from error


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """The metadata of a run as the content of its file."""
    return json.dumps(metadata, ensure_ascii=False).encode()


def read_run_metadata(run: Store) -> dict[str, Any] | None:
    """The metadata of a run; None if it has none. Raises DataError, StorageError."""
    content, what = run.read(f"{RUN}/{METADATA}"), ", the metadata of the run,"
    if content is None:
        return None
    if nesting(content) > MAX_NESTING:
        raise DataError(f"{run.url}/{RUN}/{METADATA}{what} is damaged: nested deeper than {MAX_NESTING}")
    return decode_note(run, METADATA, content, dict[str, Any], what)


# Incidents ------------------------------------------------------------------------------------------------
# _run/incidents.json      [{"step": 20, "kind": "failed save", "reason": "…", "time": "2026-11-26T20:15:00.000+00:00"}]

INCIDENTS = "incidents.json"

_MOST_INCIDENTS = 1000
"""How many incidents are kept: the newest."""

IncidentKind = Literal["failed save", "failed deletion", "unreadable step", "unchanged step"]


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong in a run."""

    step: int | None
    """The step; None if it concerns no single step."""

    kind: IncidentKind
    """"failed save", "failed deletion", "unreadable step" (refused by a restore), or "unchanged step"."""

    reason: str
    """The message of the error, or what was found."""

    time: str
    """When it was noted, in ISO format with milliseconds, in UTC."""


def read_incidents(run: Store) -> list[Incident]:
    """The incidents of a run, oldest first. Raises DataError, StorageError."""
    return read_note(run, INCIDENTS, list[Incident]) or []


class IncidentLog:
    """Adds incidents to a run. Process 0. While the storage cannot be written to, they are kept in memory."""

    def __init__(self, run: Store, require_same_folder: Callable[[], None]) -> None:
        """`require_same_folder` raises StorageError if the run's folder was replaced by another one."""
        self._run = run
        self._require_same_folder = require_same_folder
        self._unwritten: list[Incident] = []

    def add(self, step: int | None, kind: IncidentKind, reason: str) -> None:
        """Note an incident. In a lane."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._unwritten.append(Incident(step, kind, reason, now))
        self.write()

    def write(self) -> None:
        """Try to write the incidents that are not written yet. In a lane."""
        if not self._unwritten:
            return
        written = len(self._unwritten)
        try:
            self._require_same_folder()
            try:
                earlier = read_incidents(self._run)
            except DataError:
                earlier = []
            # A write whose answer was lost may have succeeded.
            new = [incident for incident in self._unwritten[:written] if incident not in earlier]
            incidents = [*earlier, *new][-_MOST_INCIDENTS:]
            self._run.create_child(RUN).replace(INCIDENTS, msgspec.json.encode(incidents))
        except JaxckptError:  # the next call tries again
            return
        del self._unwritten[:written]
