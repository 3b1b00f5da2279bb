"""Staged objects, some of them ahead of the one that is being written, within a limit of the bytes of copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from jaxckpt._save.staging import StagedObject


class StagedAhead:
    """The objects in order. Iterating stages them, and `fill` as many ahead as the limits allow."""

    def __init__(
        self,
        staged: Iterator[StagedObject],
        *,
        max_objects: int | None,
        max_bytes: int | None,
        when_staged: Callable[[], object],
        check: Callable[[], object],
    ) -> None:
        """`when_staged` is called once all are staged; `check` before each, and raises to stop. None: no limit."""
        self._staged: Iterator[StagedObject] | None = staged
        self._max_objects = max_objects
        self._max_bytes = max_bytes
        self._when_staged = when_staged
        self._check = check
        self._ready = deque[StagedObject]()
        self._next: StagedObject | None = None
        """One that does not fit yet."""

        self._held_bytes = 0

    def fill(self) -> None:
        """Stage objects ahead."""
        while self._staged is not None and len(self._ready) != self._max_objects:
            self._check()
            if self._next is None and (staged := next(self._staged, None)) is not None:
                self._next = staged
            if self._next is None:
                self._staged = None
                self._when_staged()
            elif self._fits(self._next):
                self._held_bytes += self._next.copied_bytes
                self._ready.append(self._next)
                self._next = None
            else:
                return

    def _fits(self, staged: StagedObject) -> bool:
        """Whether an object fits, or must wait until others are written."""
        return (
            self._max_bytes is None or not self._held_bytes or self._held_bytes + staged.copied_bytes <= self._max_bytes
        )

    def __iter__(self) -> Iterator[StagedObject | None]:
        """The objects; None if the next one needs the memory of those that are being written."""
        while True:
            self._check()
            self.fill()
            if self._ready:
                yield self._ready.popleft()
            elif self._staged is None:
                return
            else:
                yield None

    def mark_written(self, staged: StagedObject) -> None:
        """Note that an object was written and its copies were freed."""
        self._held_bytes -= staged.copied_bytes
