"""A directory of checkpoints, such as a run's steps: what is in it, and which of its folders hold a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self


class Folders(Protocol):
    """The folders directly below one path."""

    def anchored(self) -> Self:
        """The same directory, whatever the program changes its working directory to."""
        ...

    def is_file(self) -> bool:
        """Whether a plain file stands in its place."""
        ...

    def names(self) -> list[str]:
        """Names directly in it; empty if it does not exist."""
        ...

    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bool]:
        """For each folder directly below whose name is wanted, whether it holds a checkpoint."""
        ...

    def child(self, name: str) -> Self:
        """A folder directly below."""
        ...

    def known_as(self, url: str) -> Self:
        """The same folder, by another path in messages."""
        ...

    def made(self, name: str) -> Self:
        """A folder directly below, which is created if it does not exist."""
        ...

    def above(self) -> tuple[Self, str] | None:
        """The directory that this one is in, and its name there; None at the top."""

    def mark(self, name: str) -> None:
        """Note that a folder directly below may hold a checkpoint, if listing all keys would be the way to know."""

    def unmark(self, name: str) -> None:
        """Take that back."""

    def delete(self, name: str) -> None:
        """Delete a folder directly below with everything in it."""
