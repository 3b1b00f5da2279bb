"""Calls with collectives: every process of the job makes them, in the same order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from jaxckpt._runtime.errors import PeerFailedError
from jaxckpt._runtime.threads import OrderedCalls

Item = TypeVar("Item")
Result = TypeVar("Result")


class CollectiveCalls(Generic[Item, Result]):
    """One call for each item. Use it as a context: if its body raises, the remaining calls are still made, because the
    other processes would wait in them forever. An interrupt ends the wait for a call, but not the call."""

    def __init__(self, items: Iterable[Item], call: Callable[[Item, Any], Result]) -> None:
        """`call` gets an item, and what `run_next` is given; None if only the other processes need the call."""
        self.left = deque(items)
        """The items of the calls that have not been made."""

        self._call = call
        self._calls = OrderedCalls()

    def run_next(self, given: Any = None) -> Result:
        """Make the next call."""
        return self._calls.run(lambda: self._call(self.left.popleft(), given))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # If a peer has failed, no call can succeed, and no process waits in one.
        if error is not None and self.left and not isinstance(error, PeerFailedError):
            with contextlib.suppress(Exception):  # it must not hide the reason
                self._calls.run(self._make_remaining)

    def _make_remaining(self) -> None:
        while self.left:
            self._call(self.left.popleft(), None)
