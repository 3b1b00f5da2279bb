"""Which processes of a job are behind, and how far each of them is: in log lines, errors and the display of process 0.

A rendezvous posts what its process has moved with each heartbeat, and passes the heartbeats that it reads to this
module. It makes no decision from them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence

from jaxckpt._pipeline.lanes import log as _log
from jaxckpt._pipeline.progress import Moved
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt.errors import show_lines

_SLOW_SECONDS = 10.0
"""How long a process waits until it logs for which processes; then it logs again each time it has waited twice as
long, from `_VERY_SLOW_SECONDS` on as a warning."""

_VERY_SLOW_SECONDS = 40.0


def heartbeat(number: int, watchdog: Watchdog) -> str:
    """The text of a heartbeat."""
    work = watchdog.work
    return json.dumps({"beat": number, "moved": work and work.moved})


def moved(beat: str | None) -> Moved | None:
    """What a process had moved at its last heartbeat; None if it has not reported that."""
    reported = json.loads(beat).get("moved") if beat else None
    return Moved(*reported) if reported else None


class SlowProcesses:
    """Logs for which processes this one waits, and how far they are."""

    def __init__(self, what: str, count: int) -> None:
        self._what = what
        self._count = count
        self._begun = time.monotonic()
        self._next = _SLOW_SECONDS

    def log(self, beats: Mapping[int, str | None]) -> None:
        """Log these processes, each with its last heartbeat, if it is time."""
        waited = time.monotonic() - self._begun
        if waited < self._next:
            return
        self._next = 2 * waited
        _log.log(
            logging.INFO if waited < _VERY_SLOW_SECONDS else logging.WARNING,
            "waited %.0f s for %s of %d while %s%s",
            waited,
            process_names([*beats]),
            self._count,
            self._what,
            _table(beats),
        )


def last_reported(beats: Mapping[int, str | None]) -> str:
    """For an error: how far the processes were at these heartbeats."""
    table = _table(beats)
    return f" They last reported{table}" if table else ""


def _table(beats: Mapping[int, str | None]) -> str:
    """How far processes are, as lines; empty if none is known."""
    known = {process: has for process, beat in beats.items() if (has := moved(beat))}
    return f":\n{show_lines(f'process {process}: {has}' for process, has in known.items())}" if known else ""


def process_names(processes: Sequence[int]) -> str:
    """Processes for a message: "process 1", "processes 1, 2"."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = ", ".join(map(str, processes[:20])) + (", …" if len(processes) > 20 else "")
    return f"processes {shown}"
