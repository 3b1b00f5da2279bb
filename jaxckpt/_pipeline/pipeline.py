"""Moves bytes in two stages, within a budget of memory: later items are moved while earlier ones are finished.

items ─▶ begin: bytes start to move, in other threads ─▶ their results, in order ─▶ the caller finishes each item
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

Item = TypeVar("Item")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that other threads do."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def result(self) -> T_co:
        """Wait for its end. Returns its result, or raises its error."""
        ...


class Moving(Pending[T_co], Protocol[T_co]):
    """An item whose bytes are being moved."""

    @property
    def n_bytes(self) -> int:
        """Host memory that it uses until the caller has finished it."""
        ...


class Budget:
    """A limit of the bytes of host memory that are in use at the same time. An item larger than the limit is alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._transfers = deque[tuple[int, Callable[[], object]]]()

    def fits(self, n_bytes: int) -> bool:
        return not self._used_bytes or self._used_bytes + n_bytes <= self._max_bytes

    def take(self, n_bytes: int) -> None:
        self._used_bytes += n_bytes

    def free(self, n_bytes: int) -> None:
        self._used_bytes -= n_bytes

    def take_until_done(self, n_bytes: int, wait: Callable[[], object]) -> None:
        """Take the bytes of a transfer until it is complete, for which `wait` waits."""
        self._used_bytes += n_bytes
        self._transfers.append((n_bytes, wait))

    def make_room(self, n_bytes: int) -> None:
        """Wait for transfers until these bytes fit, as far as possible, and take them."""
        while not self.fits(n_bytes) and self.await_transfer():
            pass
        self._used_bytes += n_bytes

    def drain(self) -> None:
        """Wait for all transfers."""
        while self.await_transfer():
            pass

    def await_transfer(self) -> bool:
        """Wait for the oldest transfer, and free its bytes. Returns whether there was one."""
        if not self._transfers:
            return False
        n_bytes, wait = self._transfers.popleft()
        wait()
        self._used_bytes -= n_bytes
        return True


def pipeline(
    items: Iterable[Item | None],
    n_bytes: Callable[[Item], int],
    begin: Callable[[Item], Moving[T]],
    budget: Budget,
    *,
    join: bool = False,
) -> Generator[tuple[Item, T]]:
    """Begin items while `n_bytes` of each fits the budget, and yield each with its result, in order.

    If what `begin` returns has fewer bytes than `n_bytes`, `begin` has taken the others from the budget itself. The
    bytes of an item are free again when the caller asks for the next result. Where `items` yields None, it has no
    further item yet, and the running ones are finished first: the next item may need the memory that they use.

    If an error ends the pipeline, or `contextlib.closing` does, the running items are abandoned; with `join`, only
    after they have ended.
    """
    running = deque[tuple[Item, Moving[T]]]()
    try:
        for item in itertools.chain(items, [None]):
            size = 0 if item is None else n_bytes(item)
            while True:
                # An item that is done is finished first, so that its transfer runs while older ones are awaited.
                if item is not None and not (running and running[0][1].done()):
                    if budget.fits(size):
                        break
                    if budget.await_transfer():
                        continue
                if not running:
                    break
                first, moving = running.popleft()
                yield first, moving.result()
                budget.free(moving.n_bytes)
            if item is not None:
                begun = begin(item)
                budget.take(begun.n_bytes)
                running.append((item, begun))
        budget.drain()
    finally:
        if join:
            for _, moving in running:
                with contextlib.suppress(Exception):
                    moving.result()
