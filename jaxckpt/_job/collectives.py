"""Calls with collectives: every process of the job makes them, in the same order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

from jaxckpt.errors import PeerFailedError

Item = TypeVar("Item")
Result = TypeVar("Result")


class CollectiveCalls(Generic[Item, Result]):
    """One call for each item. The other processes would wait forever in a call that this process does not make.

        with CollectiveCalls(items, call) as calls:
            for item in calls:
                result = calls.run_next(given)  # call(item, given)

    If the block raises, the remaining calls are made. In a lane, where no interrupt can end a call.
    """

    def __init__(self, items: Iterable[Item], call: Callable[[Item, Any], Result]) -> None:
        """`call` gets an item, and what `run_next` is given; None if only the other processes need the call."""
        self._left = deque(items)
        self._call = call

    def __iter__(self) -> Iterator[Item]:
        """The item of each next call, which the caller makes with `run_next`."""
        while self._left:
            yield self._left[0]

    def run_next(self, data: Any = None) -> Result:
        """Make the next call."""
        return self._call(self._left.popleft(), data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # If a peer has failed, no call can succeed, and no process waits in one.
        if error is not None and not isinstance(error, PeerFailedError):
            with contextlib.suppress(Exception):  # it must not hide the reason
                while self._left:
                    self.run_next()
