"""What other threads see and control of a call: its cancellation, its phases, its rate."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator

from jaxckpt._pipeline.threads import POLL_SECONDS, is_shutting_down


class Cancellation:
    """The token of a call. The thread that runs the call checks it where stopping is safe."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_ended = False

    def cancel(self, error: BaseException) -> None:
        """Make the next check raise this error."""
        self._error = error

    @property
    def is_cancelled(self) -> bool:
        return self._error is not None

    def check(self) -> None:
        """Raise the reason if the call was cancelled."""
        if self._error is not None and not self._is_ended:
            raise self._error

    def end(self) -> None:
        """From now on, the call cannot be cancelled."""
        self._is_ended = True

    def restart(self) -> None:
        """The call can be cancelled again, because its work is repeated."""
        self._is_ended = False

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """A block in which the call is not cancelled. The next check after it raises."""
        ended, self._is_ended = self._is_ended, True
        try:
            yield
        finally:
            self._is_ended = ended


# Phases ---------------------------------------------------------------------------------------------------


PHASES: tuple[str, ...] = ("plan", "device_to_host", "write", "sync", "barrier", "publish")


class Phases:
    """Seconds of each phase. Time in a nested phase counts only for the nested phase."""

    def __init__(self) -> None:
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._within = threading.local()

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


# The rate: `Options.max_bytes_per_second`, until the save must hurry ---------------------------------------


class RateLimiter:
    """Spreads the writes of one thread over time, from now on. Another thread may end the limit at any moment.

    The time that bytes take passes before they are written, so that the last bytes of a save are limited like the
    first, and a save is published as soon as they are written.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        """Largest rate in bytes per second; None: no limit."""

        self._allowed_at = time.monotonic()  # when the bytes so far may have been written

    def end(self) -> None:
        """End the limit, because the save must hurry."""
        self.bytes_per_second = None

    def wait(self, n_bytes: int, check: Callable[[], None]) -> None:
        """Wait until `n_bytes` more may be written. Returns early if the interpreter is shutting down. Raises what
        `check` raises."""
        rate = self.bytes_per_second
        if rate is None:
            return
        # Time without writes counts for these bytes, but not for later ones.
        self._allowed_at = max(self._allowed_at + n_bytes / rate, time.monotonic())
        while self.bytes_per_second is not None and not is_shutting_down():
            left = self._allowed_at - time.monotonic()
            if left <= 0:
                break
            check()
            time.sleep(min(left, POLL_SECONDS))
