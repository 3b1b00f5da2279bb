"""Incidents of a run: what went wrong while nobody looked, in one small file of the run, oldest first.

_run/incidents.json      [{"step": 20, "kind": "failed save", "reason": "…", "time": "2026-11-26T20:15:00.000+00:00"}]
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from jaxckpt._run_folder.steps import RUN, read_note
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, JaxckptError

INCIDENTS = "incidents.json"

_MOST = 1000
"""How many incidents are kept: the newest."""

Kind = Literal["failed save", "failed deletion", "unreadable step", "unchanged step"]


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that went wrong in a run."""

    step: int | None
    """The step; None if it concerns no single step."""

    kind: Kind
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

    def add(self, step: int | None, kind: Kind, reason: str) -> None:
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
            incidents = [*earlier, *new][-_MOST:]
            self._run.create_child(RUN).replace(INCIDENTS, msgspec.json.encode(incidents))
        except JaxckptError:  # the next call tries again
            return
        del self._unwritten[:written]
