"""What a call has moved so far: in this process, and in the others of its job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxckpt._pipeline.units import show_bytes, show_rate

Show = Callable[[int, int], object]
"""Displays (bytes that have moved, bytes that will move)."""


class Moved(NamedTuple):
    """What one process has moved. A heartbeat carries it, as a JSON array."""

    done_bytes: int
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.done_bytes / self.seconds if self.seconds > 0 else 0.0
        return f"{show_bytes(self.done_bytes)} of {show_bytes(self.total_bytes)}, {show_rate(rate)}"


class Work:
    """What a call moves in this process. In process 0, its display adds what the others have reported."""

    def __init__(self, total_bytes: int, show: Show | None) -> None:
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._begun = time.monotonic()
        self._show = show
        self._others = (0, 0)

    @property
    def is_shown(self) -> bool:
        """Whether it is displayed."""
        return self._show is not None

    @property
    def moved(self) -> Moved:
        return Moved(self._done_bytes, self._total_bytes, time.monotonic() - self._begun)

    def add(self, n_bytes: int) -> None:
        """Count bytes, and display them with those of the others. In a lane."""
        self._done_bytes += n_bytes
        if self._show is not None:
            others_done, others_total = self._others
            self._show(self._done_bytes + others_done, self._total_bytes + others_total)

    def note_others(self, others: Iterable[Moved]) -> None:
        """Note what the other processes have reported. Any thread."""
        reported = [(moved.done_bytes, moved.total_bytes) for moved in others]
        done, total = (sum(column) for column in zip(*reported, strict=True)) if reported else (0, 0)
        self._others = max(self._others[0], done), max(self._others[1], total)

    def end(self) -> None:
        """End the display."""
        self._show = None
