"""Ends a call from another thread: at its next check, until it is too late."""

from __future__ import annotations

import contextlib
from collections.abc import Generator


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

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """A block in which the call is not cancelled. The next check after it raises."""
        ended, self._is_ended = self._is_ended, True
        try:
            yield
        finally:
            self._is_ended = ended
