"""A bounded queue of staged objects from the caller's thread to the thread that writes them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from jaxckpt._job.call import Call
from jaxckpt._pipeline.threads import POLL_SECONDS, RunningCall
from jaxckpt._save.staging import StagedObject


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the queue, with the error that caused it, if any."""

    error: BaseException | None = None


class StagingQueue:
    """Objects in order, with a limit on the bytes of copies. The caller's thread puts them, and another takes them."""

    def __init__(self, max_bytes: int | None, deadline: float | None, call: Call) -> None:
        """Create it in the function that feeds, or in a caller of it.

        If the creating function returns or is interrupted before the end is put, iterating raises KeyboardInterrupt.

        `deadline` is on the monotonic clock. None means no limit, for `max_bytes` too.
        """
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._call = call
        self._held_bytes = 0
        self._items = queue.SimpleQueue[StagedObject | _End]()
        self._freed = queue.SimpleQueue[int]()
        self._closed = False
        self._feeder = RunningCall(depth=1)

    # The thread that feeds -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Put the end. If an error ends the block, the other thread raises it too."""
        self._items.put(_End(error))
        self._feeder.mark_ended()

    def fits(self, staged: StagedObject) -> bool:
        """Whether an object fits, or must wait until others are written."""
        return (
            self._max_bytes is None or not self._held_bytes or self._held_bytes + staged.copied_bytes <= self._max_bytes
        )

    def put(self, staged: StagedObject) -> bool:
        """Put an object, when it fits. Returns False if the queue is closed, or the deadline has passed."""
        while not self.fits(staged) and not self._closed and not self._call.watchdog.stall_error():
            left = POLL_SECONDS if self._deadline is None else min(POLL_SECONDS, self._deadline - time.monotonic())
            if left <= 0:
                self._items.put(_End(TimeoutError("the data was copied but not written before the deadline")))
                return False
            try:
                self._held_bytes -= self._freed.get(timeout=left)
            except queue.Empty:
                continue
        if self._closed or self._call.watchdog.stall_error():
            return False
        self._items.put(staged)
        self._held_bytes += staged.copied_bytes
        return True

    # The thread that takes -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StagedObject | None]:
        """The objects; None before each wait for the next one, which may be waiting for memory itself."""
        while True:
            self._call.cancellation.check()
            if self._items.empty():
                yield None
            try:
                item = self._items.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._feeder.is_running():
                    continue
                try:  # once more, because the caller may have put an object just before it ended
                    item = self._items.get_nowait()
                except queue.Empty:
                    raise KeyboardInterrupt("the thread that called save was interrupted") from None
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                return

    def mark_written(self, staged: StagedObject) -> None:
        """Note that an object was written and its copies were freed."""
        self._freed.put(staged.copied_bytes)

    def close(self) -> None:
        """Stop taking objects, and discard those in the queue."""
        self._closed = True
        self._freed.put(0)
        while not self._items.empty():
            self._items.get()
