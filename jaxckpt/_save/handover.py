"""Staged objects on their way from the caller's thread to the one that writes them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxckpt._runtime.stalls import Watch
from jaxckpt._runtime.threads import POLL_SECONDS, Caller
from jaxckpt._save.staging import Staged


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing comes any more, because of an error if there is one."""

    error: BaseException | None = None


class Handover:
    """Objects in order, at most so many bytes of copies at once. One thread feeds, another one takes."""

    def __init__(self, most_bytes: int | None, deadline: float | None, watch: Watch) -> None:
        """Called by the function that feeds, or that calls it: once that has returned, nothing comes any more."""
        self._most_bytes = most_bytes
        self._deadline = deadline
        self._watch = watch
        self._held_bytes = 0
        self._given = queue.SimpleQueue[Staged | _End]()
        self._freed = queue.SimpleQueue[int]()
        self._closed = False
        self._cancelled: BaseException | None = None
        self._feeder = Caller(depth=1)

    # The thread that feeds -------------------------------------------------------------------------------

    def feed(self, staged: Iterable[Staged], begin: Callable[[], None]) -> None:
        """Put all in. `begin` starts the other thread, as late as can be: it would slow this one.

        An error before that ends all. After it, the other thread is notified and raises it too.
        """
        begun = False
        end = _End()
        try:
            for one in staged:
                if not begun and not self._fits(one):
                    begin()
                    begun = True
                if not self._make_room(one):
                    break  # nobody takes anything any more, or it is too late
                self._given.put(one)
                self._held_bytes += one.copied_bytes
            else:
                self._given.put(end)
                if not begun:
                    begin()
        except BaseException as error:
            self._given.put(_End(error))
            raise
        finally:
            self._feeder.leave()

    def _fits(self, one: Staged) -> bool:
        return (
            self._most_bytes is None or not self._held_bytes or self._held_bytes + one.copied_bytes <= self._most_bytes
        )

    def _make_room(self, one: Staged) -> bool:
        """Wait until it fits; returns whether it does."""
        while not self._fits(one) and not self._closed and not self._watch.stalled():
            left = POLL_SECONDS if self._deadline is None else min(POLL_SECONDS, self._deadline - time.monotonic())
            if left <= 0:
                self._given.put(_End(TimeoutError("the data was copied but not written before the deadline")))
                return False
            try:
                self._held_bytes -= self._freed.get(timeout=left)
            except queue.Empty:
                continue
        return not self._closed and not self._watch.stalled()

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def cancel(self, error: BaseException) -> None:
        """Have the other thread raise this, as soon as it looks."""
        self._cancelled = error

    # The thread that takes -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Staged]:
        while True:
            self.check()
            try:
                one = self._given.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._feeder.present():
                    continue
                try:  # once more: what it gave, it gave before it left
                    one = self._given.get_nowait()
                except queue.Empty:
                    raise KeyboardInterrupt("the thread that called save was interrupted") from None
            if not isinstance(one, _End):
                yield one
            elif one.error is not None:
                raise one.error
            else:
                return

    def check(self) -> None:
        """Raise what the save was cancelled for, if it was."""
        if self._cancelled is not None:
            raise self._cancelled

    def starves(self) -> bool:
        """Whether the other thread has nothing ready, perhaps for want of room."""
        return self._given.empty()

    def landed(self, one: Staged) -> None:
        """An object is written, and its copies are gone."""
        self._freed.put(one.copied_bytes)

    def close(self) -> None:
        """Nothing is taken any more."""
        self._closed = True
        self._freed.put(0)
        while not self._given.empty():
            self._given.get()
