"""How fast a save writes: at `Options.max_bytes_per_second`, and out of the way of training, until it must hurry."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxckpt._pipeline.threads import POLL_SECONDS, is_shutting_down


class RateLimiter:
    """Spreads the writes of one thread over time, from now on. Another thread may end the limit at any moment.

    The time that bytes take passes before they are written, so that the last bytes of a save are limited like the
    first, and a save is published as soon as they are written.
    """

    def __init__(self, bytes_per_second: float | None, *, yields: bool = False) -> None:
        self.bytes_per_second = bytes_per_second
        """Largest rate in bytes per second; None: no limit."""

        self.yields = yields
        """Whether the save leaves cores to the training loop, because no caller waits for it."""

        self._allowed_at = time.monotonic()  # when the bytes so far may have been written

    def end(self) -> None:
        """End all limits, because the save must hurry."""
        self.bytes_per_second, self.yields = None, False

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
