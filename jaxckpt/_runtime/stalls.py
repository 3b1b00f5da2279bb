"""Storage that hangs: an operation during which no byte moves for `Options.timeout_seconds` fails.

A system call on a network file system that has lost its server may never return, and nothing can end it. So the thread
that is in it is left behind, and those that wait for its result raise an error instead.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Generator

from jaxckpt._runtime.errors import StorageError


class Watch:
    """What a call is doing with storage, as the threads that wait for it see it."""

    def __init__(self, seconds: float) -> None:
        """`seconds` without a byte, after which an operation counts as stalled."""
        self._seconds = seconds
        self._doing: str | None = None
        self._since = 0.0
        self._error: StorageError | None = None

    @contextlib.contextmanager
    def doing(self, what: str) -> Generator[None]:
        """In the block storage is used, for example for "writing to /ckpt"; outside of it nothing can stall.

        Raises StorageError at the end of a block that had stalled: others have acted on that.
        """
        outside = self._doing
        self._doing, self._since = what, time.monotonic()
        try:
            yield
            if self._error is not None:
                raise self._error
        finally:
            self._doing, self._since = outside, time.monotonic()

    def moved(self) -> None:
        """Some bytes have moved."""
        self._since = time.monotonic()

    def stalled(self) -> StorageError | None:
        """The error of an operation that has stalled, if one ever has."""
        doing, since = self._doing, self._since
        if self._error is None and doing is not None and time.monotonic() - since >= self._seconds:
            self._error = StorageError(
                errno.ETIMEDOUT,
                f"no byte has moved for {self._seconds:g} s while {doing}: the storage hangs, or is slower than"
                " Options.timeout_seconds allows",
            )
        return self._error
