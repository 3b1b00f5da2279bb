"""A directory of checkpoints, such as the steps of a run: lists its folders, and which of them hold a checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Protocol, Self

from jaxckpt.errors import StorageError

UNLISTABLE = (errno.ENOTSUP, errno.EACCES)
"""Errors of stores that can be read but not listed, for example over HTTP or without permission."""


class ChildFolders(Protocol):
    """The folders directly below one path."""

    def absolute(self) -> Self:
        """The same directory with an absolute path, which a later change of the working directory does not affect."""
        ...

    def is_file(self) -> bool:
        """Whether the path is a plain file instead of a directory."""
        ...

    def names(self) -> list[str]:
        """Names directly in it; empty if it does not exist."""
        ...

    def is_empty_folder(self, name: str) -> bool:
        """Whether a name directly below is a folder in which there are no files, at any depth."""
        ...

    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> Mapping[str, bool | StorageError]:
        """Maps the name of each subfolder that `wanted` accepts to whether the subfolder holds a checkpoint, or to the
        error that prevents finding out."""
        ...

    def child(self, name: str) -> Self:
        """The folder of this name directly below, which need not exist."""
        ...

    def with_url(self, url: str) -> Self:
        """The same folder, by another path in messages."""
        ...

    def create_child(self, name: str) -> Self:
        """A folder directly below. Creates it if it does not exist."""
        ...

    def parent_and_name(self) -> tuple[Self, str] | None:
        """The parent directory, and the name of this one in it; None at the root."""

    def mark(self, name: str) -> None:
        """Note that a folder directly below may hold a checkpoint, on stores where only listing all keys shows it."""

    def unmark(self, name: str) -> None:
        """Remove the note of `mark`."""

    def delete(self, name: str) -> None:
        """Delete a folder directly below with everything in it."""
