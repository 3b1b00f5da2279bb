"""Detects storage that hangs. An operation fails if no bytes move for `Options.timeout_seconds`.

A system call on a network file system that has lost its server may never return, and nothing can end it. The thread in
that call is therefore abandoned, and the threads that wait for its result raise an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from jaxckpt._pipeline.threads import awake_seconds
from jaxckpt.errors import JaxckptError, StorageError

if TYPE_CHECKING:
    from jaxckpt._pipeline.progress import Work


class _Current(threading.local):
    watchdog: Watchdog | None = None
    is_worker = False


_current = _Current()


def current_watchdog() -> Watchdog | None:
    """The watchdog of the call for which this thread works, as a lane or for one; None in other threads."""
    return _current.watchdog


def require_not_stalled() -> None:
    """Raise an error if nothing waits for the storage operation of this thread any more: it hung or was interrupted."""
    if (watchdog := current_watchdog()) is not None:
        watchdog.require_not_stalled()


def is_in_worker() -> bool:
    """Whether this thread carries out a part of the operation of another thread."""
    return _current.is_worker


@contextlib.contextmanager
def under(watchdog: Watchdog | None, *, as_worker: bool = False) -> Generator[None]:
    """A block that this watchdog watches. With `as_worker`, the block is a part of the operation of another thread."""
    outside = _current.watchdog, _current.is_worker
    _current.watchdog, _current.is_worker = watchdog, as_worker
    try:
        yield
    finally:
        _current.watchdog, _current.is_worker = outside


_hanging = list[tuple["Watchdog", float]]()
"""The operations that have stalled and not resumed, with the time until which others near their folders are not
tried."""


def require_responding(folder: str, what: str) -> None:
    """Raise StorageError if an operation near a folder has stalled and still hangs. Otherwise a call that ignores one
    error, or cleans up after it, would wait again for each further operation."""
    for entry in _hanging.copy():
        watchdog, until = entry
        if not watchdog.is_operating or time.monotonic() > until:
            with contextlib.suppress(ValueError):  # another thread has
                _hanging.remove(entry)
        elif watchdog.folder and os.path.commonpath((watchdog.folder, folder)) in (watchdog.folder, folder):
            raise StorageError(errno.ETIMEDOUT, f"{what} was not tried: the storage of {watchdog.folder} hangs")


class Watchdog:
    """What the threads of a call and those that wait for it tell each other: which storage operation runs, since when
    nothing has moved, whether anybody still wants the result, and whether the program may need the processors."""

    def __init__(self, seconds: float, folder: str = "") -> None:
        """An operation counts as stalled if no byte moves for `seconds`."""
        self.seconds = seconds
        self.folder = folder
        """The folder that the operation uses, if it is known."""

        self.yields_processors = False
        """Whether nothing waits for the call, so that its threads leave the processors to the program."""

        self.work: Work | None = None
        """What the call has moved so far."""

        self.is_exchanging = False
        """Whether a lane of the call is in a program that moves data between processes. If one of them dies, it may
        never end."""

        self._operation: str | None = None
        self._since = 0.0
        self._error: JaxckptError | None = None

    @property
    def is_operating(self) -> bool:
        """Whether an operation runs."""
        return self._operation is not None

    @contextlib.contextmanager
    def operation(self, what: str) -> Generator[None]:
        """Watch the storage operation in the block, for example "writing to /ckpt". Nothing can stall outside a block.

        Raises StorageError at the end of a block that stalled, even if the operation resumed, because the stall may
        already have been reported to other processes.
        """
        self.require_not_stalled()
        outside = self._operation
        self._operation, self._since = what, awake_seconds()
        try:
            with under(self):
                yield
            self.require_not_stalled()
        finally:
            self._operation, self._since = outside, awake_seconds()

    @property
    def is_abandoned(self) -> bool:
        """Whether nothing waits for the operation any more, as far as is known."""
        return self._error is not None

    def abandon(self, error: JaxckptError | None = None) -> None:
        """Note that nothing waits for the operation any more, because of an error, or of an interrupt."""
        if self._error is None:
            self._error = error or StorageError(errno.EINTR, "interrupted")

    def require_not_stalled(self) -> None:
        """Raise the error of the operation if it was reported. A thread that resumes after that stops here."""
        if self._error is not None:
            raise self._error

    def note_progress(self) -> None:
        """Note that some bytes have moved."""
        self._since = awake_seconds()

    def stall_error(self) -> JaxckptError | None:
        """The error of the operation that has stalled or was abandoned, if any."""
        doing, since = self._operation, self._since
        quiet_seconds = awake_seconds() - since  # read in any case: callers that wait keep the clock going with it
        if self._error is None and doing is not None and quiet_seconds >= self.seconds:
            self._error = StorageError(
                errno.ETIMEDOUT,
                f"no bytes have moved for {self.seconds:g} s while {doing}: the storage hangs, or is too slow for"
                " Options.timeout_seconds",
            )
            _hanging.append((self, time.monotonic() + self.seconds))
        return self._error


class PartWatchdog(Watchdog):
    """Watches a part of the work of a call, which may be abandoned while the rest continues."""

    def __init__(self, whole: Watchdog) -> None:
        super().__init__(whole.seconds, whole.folder)
        self._whole = whole

    @property
    def is_abandoned(self) -> bool:
        return super().is_abandoned or self._whole.is_abandoned

    @contextlib.contextmanager
    def operation(self, what: str) -> Generator[None]:
        with self._whole.operation(what), under(self):
            yield

    def require_not_stalled(self) -> None:
        self._whole.require_not_stalled()
        super().require_not_stalled()

    def note_progress(self) -> None:
        self._whole.note_progress()

    def close(self) -> None:
        """Abandon what is left of the part."""
        self.abandon()
