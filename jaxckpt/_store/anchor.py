"""Whether a path still leads to the folder to which it led first, for example after a file system was unmounted."""

from __future__ import annotations

import errno
import os
import weakref

from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt.errors import StorageError

_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
"""O_PATH needs no permission to read the folder, and opens nothing on the server of a network file system."""

_MISSING = (FileNotFoundError, NotADirectoryError)


class Anchor:
    """Remembers to which folder a path leads; while that does not exist, the nearest existing folder above it.

    The folder stays open. Otherwise FUSE file systems such as sshfs give it another inode number after the kernel has
    forgotten it, and an automounter unmounts it while it is not in use.
    """

    def __init__(self, path: str, timeout_seconds: float) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._folder: _OpenFolder | None = None

    def require_same_folder(self) -> None:
        """Raise StorageError if the path leads to another folder than before. The first call remembers the folder."""
        run_watched(f"looking at {self._path}", self._timeout_seconds, self._require_same_folder)

    def _require_same_folder(self) -> None:
        folder = self._folder
        if folder is not None and (change := folder.change()):
            raise StorageError(
                errno.ENODEV,
                f"{self._path} is no longer the place of this run: {folder.path} {change} since this Checkpointer first"
                " used it. A file system was unmounted or mounted again, a folder was renamed or deleted, or a symbolic"
                " link was changed. Undo that; or, if the steps of this run are now there, create a new Checkpointer",
            )
        if folder is None or folder.path != self._path:
            self._folder = _open_nearest(self._path)

    def release(self) -> None:
        """Forget the folder, so that its file system can be unmounted. The next check remembers it again."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()


class _OpenFolder:
    """An open folder. It is closed with this object at the latest."""

    def __init__(self, path: str) -> None:
        handle = os.open(_inside(path), _FLAGS)
        self.path = path
        self.close = weakref.finalize(self, os.close, handle)
        self._numbers = _numbers(os.fstat(handle))

    def change(self) -> str | None:
        """What has happened to the path if it no longer leads to this folder. Raises StorageError."""
        with translate_os_errors(f"cannot look at {self.path}"):
            try:
                now = _numbers(os.stat(_inside(self.path)))
            except _MISSING:
                return "has disappeared"
        return None if now == self._numbers else "has become another folder"


def _open_nearest(path: str) -> _OpenFolder:
    """The folder at a path, or the nearest existing folder above it. Raises StorageError."""
    with translate_os_errors(f"cannot open {path}"):
        while True:
            try:
                return _OpenFolder(path)
            except _MISSING:
                path = os.path.dirname(path)


def _inside(path: str) -> str:
    """A path that makes an automounter mount the folder. The folder's own path would not."""
    return os.path.join(path, ".")


def _numbers(status: os.stat_result) -> tuple[int, int]:
    """Device and inode."""
    return status.st_dev, status.st_ino
