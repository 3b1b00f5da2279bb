"""The store of a path, and whether a path still leads to the folder to which it led first."""

from __future__ import annotations

import errno
import os
import re
import reprlib
import urllib.parse
import weakref

from jaxckpt._options import Options
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.folder import Folder
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, StorageError

Path = str | os.PathLike[str]


def store_at(path: Path, options: Options, *, to_write: bool = False) -> Store:
    """The store at a local path, or at a URL that tensorstore's kvstore takes.

    Raises InputError, also for a broken symbolic link; StorageError if it is `to_write` and can only be read.
    """
    store = unchecked_store_at(path, options, to_write=to_write)
    require_no_dangling_link(store)
    return store


def unchecked_store_at(path: Path, options: Options, *, to_write: bool = False) -> Store:
    """As `store_at`, without looking for a broken link. Uses no storage, so the caller need not wait for a lane."""
    local, text = local_path(path), os.fspath(path)
    if local is None:
        _require_plain_key(text)
        scheme, _, rest = text.partition("://")
        bucket = Bucket.at(f"{scheme}://{rest.rstrip('/')}", options)
        if to_write:
            bucket.require_writable()
        return bucket
    return Folder(local if "://" in text else text.rstrip("/") or "/", local, options.io, options.timeout_seconds)


def require_no_dangling_link(store: Store) -> None:
    """Raise InputError if the path of a store is a broken symbolic link, or below one."""
    if isinstance(store, Folder):
        store.require_no_dangling_link()


def run_at(path: Path, options: Options, *, to_write: bool = False) -> Store:
    """The store of a run's directory, which need not exist yet. Raises InputError, StorageError as `store_at`."""
    run = store_at(path, options, to_write=to_write).absolute()
    if run.is_file():
        raise InputError(f"{run.url} is a file; give the directory of a Checkpointer, which holds steps")
    return run


def local_path(path: Path, what: str = "path, the first argument,") -> str | None:
    """The absolute local path that a path or a file:// URL means; None for a URL of anything else.

    A file:// URL is interpreted as in RFC 8089 and in tensorstore: it has an absolute path, in which %20 is a space,
    and no host except localhost. Raises InputError.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"{what} must be a non-empty str or PathLike, found {reprlib.repr(path)}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
            raise InputError(f"path {text!r} looks like a URL that lost a slash, as in a pathlib.Path: pass a str")
        try:
            return os.path.abspath(os.path.expanduser(text))
        except FileNotFoundError as error:
            raise StorageError(
                errno.ENOENT, f"{text!r} is relative to the working directory, which was deleted or unmounted"
            ) from error
    if "|" in rest:
        raise InputError(
            f"the path, a URL of {scheme}://, has a '|', which leads into a file, such as a ZIP archive. jaxckpt does"
            " not support that: unpack the archive, or write %7C for a '|' in a name"
        )
    if scheme != "file":
        return None
    host, slash, below = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InputError(
            f"path {text!r} is not absolute: the text between file:// and the next slash is a host name. Give"
            f" file:///{rest.lstrip('/')} for an absolute path, or omit file://"
        )
    path = urllib.parse.unquote(below, errors="surrogateescape")  # two names that are not UTF-8 are two paths
    if "\0" in path:
        raise InputError(f"path {text!r} has a null byte, %00, which no file name may contain")
    return os.path.abspath("/" + path)


def _require_plain_key(url: str) -> None:
    """Raise InputError if a URL has a segment that a client or a server may change, so that it means another key."""
    for segment in urllib.parse.unquote(url.partition("?")[0]).split("/")[3:]:
        if segment in (".", "..") or re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", segment):
            raise InputError(
                f"the path, a URL, has the segment {segment!r}: an object store has no '.' or '..', and allows no"
                " control characters in names"
            )


# Whether the path of a run still leads to its folder ------------------------------------------------------


_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY
"""O_PATH needs no permission to read the folder, and opens nothing on the server of a network file system."""

_MISSING = (FileNotFoundError, NotADirectoryError)


def anchor_of(store: Store) -> Anchor | None:
    """The anchor of a folder; None in a bucket, whose path always leads to the same place."""
    return Anchor(store.folder, store.timeout_seconds) if isinstance(store, Folder) else None


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
        self._status = os.fstat(handle)

    def change(self) -> str | None:
        """What has happened to the path if it no longer leads to this folder. Raises StorageError."""
        with translate_os_errors(f"cannot look at {self.path}"):
            try:
                is_same = os.path.samestat(os.stat(_inside(self.path)), self._status)
            except _MISSING:
                return "has disappeared"
        return None if is_same else "has become another folder"


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
