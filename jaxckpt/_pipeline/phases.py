"""How long each phase of a save takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator

PHASES: tuple[str, ...] = ("plan", "device_to_host", "write", "sync", "barrier", "publish")


class Phases:
    """Seconds of each phase. Time in a nested phase counts only for the nested phase."""

    def __init__(self) -> None:
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._within = threading.local()

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were spent in a phase."""
        self.phase_seconds[phase] += seconds

    def manifest_seconds(self) -> dict[str, float]:
        """Seconds of each phase until now, for the manifest. It lacks "publish", which comes after the manifest."""
        return {phase: round(seconds, 6) for phase, seconds in self.phase_seconds.items() if phase != "publish"}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Generator[None]:
        begun = time.perf_counter()
        outer = getattr(self._within, "seconds", 0.0)
        self._within.seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self.phase_seconds[phase] += seconds - self._within.seconds
            self._within.seconds = outer + seconds
