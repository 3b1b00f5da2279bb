"""What this process is writing, by the path that it belongs to, so that reads of that path wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from jaxckpt._store.store import Store


class RunningWrite(Protocol):
    """A running save."""

    owner: str
    """The absolute path or URL of a run's directory, or of a checkpoint."""

    def settle(self) -> None:
        """Wait until it is published or has failed. Its error stays its owner's."""
        ...


_finders: list[Callable[[], Iterable[RunningWrite]]] = []


def report_writes(find: Callable[[], Iterable[RunningWrite]]) -> None:
    """Register a function that returns the running writes."""
    _finders.append(find)


def await_writes(store: Store) -> None:
    """Wait until what this process is writing to a path, to a run that contains it, or below it is published or has
    failed."""
    url = store.absolute().url
    for find in _finders:
        for write in find():
            is_inside = url == write.owner or url.startswith((f"{write.owner}/", f"{write.owner}@"))
            if is_inside or write.owner.startswith(f"{url}/"):
                write.settle()
