"""The rate at which a save writes: `Options.max_bytes_per_second`, until the save must hurry."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxckpt._pipeline.threads import POLL_SECONDS, is_shutting_down


class RateLimiter:
    """Spreads the writes of one thread over time. Another thread may end the limit at any moment."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        """Largest rate in bytes per second; None: no limit."""

        self._free_at = 0.0  # on the monotonic clock

    def wait(self, n_bytes: int, check: Callable[[], None]) -> None:
        """Wait until `n_bytes` more may be written. Returns early if the interpreter is shutting down. Raises what
        `check` raises."""
        while (rate := self.bytes_per_second) is not None and not is_shutting_down():
            left = self._free_at - time.monotonic()
            if left <= 0:
                break
            check()
            time.sleep(min(left, POLL_SECONDS))
        if rate is not None:
            self._free_at = max(self._free_at, time.monotonic()) + n_bytes / rate
