"""Files of other libraries' checkpoints by their paths: on a file system or, inside `using_files`, in a bucket.

The readers of formats call these functions, so that they do not know where bytes lie. The path of a file in a bucket is
its URL, without percent-encoding. A bucket has no folders: those that the names of its keys imply count as such.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import stat
import urllib.parse
from collections.abc import Collection, Generator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from jaxckpt._keywords import explain_keywords
from jaxckpt._pipeline.workers import note_progress
from jaxckpt._store.files import file_system_kinds, read_into
from jaxckpt._store.storage_errors import UNLISTABLE, retry_stale, translate_os_errors
from jaxckpt.errors import DataError, StorageError

if TYPE_CHECKING:
    from jaxckpt._store.bucket import Bucket
    from jaxckpt._store.store import Store

_HEAD_BYTES = 1 << 16
"""The first read of a file in a bucket fetches this much, which often is all that its format reads of it at first."""

_SAFE = "/!$&'()*+,;=:@-._~[]"


class OpenFile(abc.ABC):
    """A file to read."""

    path: str

    gap_bytes: ClassVar[int] = 4 << 20
    """At most so many bytes that are not needed take no longer to read than another request."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Its size in bytes. In a bucket, this may take dozens of requests: see `has_size`."""

    @abc.abstractmethod
    def has_size(self, size: int) -> bool:
        """Whether this is its size. One request."""

    @abc.abstractmethod
    def read(self, count: int, offset: int) -> bytes:
        """Bytes from an offset on; fewer than `count` only at its end."""

    @abc.abstractmethod
    def read_into(self, offset: int, buffers: Sequence[Any]) -> None:
        """Fill buffers with its bytes from an offset on. Raises DataError if it is too short."""


# On a file system -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LocalFile(OpenFile):
    path: str
    handle: int

    gap_bytes: ClassVar[int] = 512 << 10

    @property
    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def has_size(self, size: int) -> bool:
        return self.size == size

    def read(self, count: int, offset: int) -> bytes:
        data = os.pread(self.handle, count, offset)
        # A single call of pread may return fewer bytes anywhere.
        while len(data) < count and (more := os.pread(self.handle, count - len(data), offset + len(data))):
            data += more
        note_progress()
        return data

    def read_into(self, offset: int, buffers: Sequence[Any]) -> None:
        read_into(self.path, self.handle, offset, buffers)


@explain_keywords
@contextlib.contextmanager
def opened(path: str) -> Generator[OpenFile]:
    """A file to read. Raises DataError if it is missing or not a plain file, StorageError if it cannot be read."""
    if (files := _files_of(path)) is not None:
        yield _BucketFile(files, path)
        return
    with translate_os_errors(f"cannot read {path}"):
        try:
            # Opening a pipe without O_NONBLOCK would wait for a writer.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing") from error
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path} is not a regular file")
            if (seen := _seen_files()) is not None:
                seen.require_unchanged(path, _identity(status))
            yield _LocalFile(path, handle)
        finally:
            os.close(handle)


def read_head(path: str, count: int) -> bytes:
    """The first bytes of a file; none if the path is not a file."""
    if is_visible_file(path):
        with contextlib.suppress(DataError), opened(path) as file:  # deleted in the meantime
            return file.read(count, 0)
    return b""


def read_small(path: str, limit: int) -> bytes:
    """The content of a file. Raises DataError if it has more than `limit` bytes."""
    if (files := _files_of(path)) is not None:
        content = files.read_whole(path)
        size = len(content)
    else:
        with opened(path) as file:
            size = file.size
            content = file.read(size, 0) if size <= limit else b""
    if size > limit:
        raise DataError(f"{path} is {size} bytes long; at most {limit} are read")
    return content


def exists(path: str) -> bool:
    """Whether a path exists, perhaps as a broken link. Raises StorageError if that cannot be found out."""
    if (files := _files_of(path)) is not None:
        return files.kind(path) is not None
    return _mode(path, follow_symlinks=False) != 0


def is_file(path: str) -> bool:
    """Whether a path is a file. Raises StorageError if that cannot be found out."""
    if (files := _files_of(path)) is not None:
        return files.kind(path) == "file"
    return stat.S_ISREG(_mode(path))


def is_visible_file(path: str) -> bool:
    """Whether a path is a file; not if that cannot be found out: any folder may be next to a checkpoint."""
    try:
        return is_file(path)
    except StorageError:
        return False


def is_folder(path: str) -> bool:
    """Whether a path is a folder. Raises StorageError if that cannot be found out."""
    if (files := _files_of(path)) is not None:
        return files.kind(path) == "folder"
    return stat.S_ISDIR(_mode(path))


def _mode(path: str, *, follow_symlinks: bool = True) -> int:
    """The mode of a path; 0 if it does not exist, or links to itself. Raises StorageError."""
    with translate_os_errors(f"cannot look at {path}"):
        try:
            return retry_stale(os.stat if follow_symlinks else os.lstat, path).st_mode
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
    return 0


def is_link(path: str) -> bool:
    """Whether a path is a symbolic link."""
    return _files_of(path) is None and os.path.islink(path)


def list_names(folder: str) -> list[str]:
    """The names in a folder, sorted. Raises StorageError."""
    if (files := _files_of(folder)) is not None:
        return files.names(folder)
    with translate_os_errors(f"cannot list {folder}"):
        return sorted(os.listdir(folder))


def names_in(folder: str) -> list[str]:
    """The names in a folder; empty if it is a file or does not exist. Later reads then report missing files.

    Raises StorageError if it cannot be listed: what it holds must not count as missing.
    """
    if (files := _files_of(folder)) is not None:
        return files.names(folder)
    with translate_os_errors(f"cannot list {folder}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []


def names_or_empty(folder: str) -> list[str]:
    """The names in a folder; empty if it cannot be listed. Only for recognizing a format: any folder may be next to a
    checkpoint."""
    try:
        return list_names(folder)
    except OSError:
        return []


def names_at(path: str) -> list[str] | None:
    """The names in a folder; none for a file, and None if the path does not exist or cannot be read."""
    try:
        if (files := _files_of(path)) is not None:
            return None if files.kind(path) is None else files.names(path)
        return os.listdir(path)
    except NotADirectoryError:
        return []
    except OSError as error:  # missing or unreadable, as for a jaxckpt checkpoint
        if isinstance(error, StorageError) and error.errno not in UNLISTABLE:
            raise
        return None


def store_of(path: str) -> Store | None:
    """The store of a folder in a bucket; None for a local path."""
    files = _files_of(path)
    return None if files is None else files.folder(path).with_url(url_of(path))


def kvstore_of(path: str) -> tuple[dict[str, Any], Any] | None:
    """tensorstore's spec of a folder in a bucket, and the context of its requests; None for a local path."""
    files = _files_of(path)
    return None if files is None else files.folder(path).tensorstore()


@dataclass(frozen=True, slots=True)
class Mark:
    """A file that each save rewrites, as it was when its checkpoint was opened: tensorstore reads the others, and does
    not say if they were replaced."""

    path: str
    generation: object
    files: BucketFiles | None = field(repr=False, compare=False)


def marked(path: str) -> Mark:
    """The mark that a file is now. Raises DataError if it is missing, StorageError if it is not the file that was read
    before."""
    files = _files_of(path)
    generation = _generations(files, [path])[0]
    if generation is None:
        raise DataError(f"{path} is missing")
    if (seen := _seen_files()) is not None:
        seen.require_unchanged(path, generation)
    return Mark(path, generation, files)


def require_unchanged(marks: Iterable[Mark]) -> None:
    """Raise StorageError if one of a checkpoint's marks has been replaced, DataError if it is missing. Looks at all
    that lie in one bucket concurrently."""
    by_files: dict[BucketFiles | None, list[Mark]] = {}
    for mark in marks:
        by_files.setdefault(mark.files, []).append(mark)
    for files, group in by_files.items():
        for mark, generation in zip(group, _generations(files, [mark.path for mark in group]), strict=True):
            if _is_same(mark.generation, generation):
                continue
            raise DataError(f"{mark.path} is missing") if generation is None else _replaced(mark.path)


@contextlib.contextmanager
def unless_replaced(marks: Iterable[Mark]) -> Generator[None]:
    """Around a read: if what it found missing or damaged has been replaced meanwhile, raises that error instead."""
    try:
        yield
    except DataError:
        require_unchanged(marks)
        raise


def _generations(files: BucketFiles | None, paths: Sequence[str]) -> list[object]:
    if files is not None:
        generations = files.root.generations(map(files.key, paths))
        return [generations[files.key(path)] for path in paths]
    with translate_os_errors("cannot look at the files of a checkpoint"):
        return [_identity_at(path) for path in paths]


def _identity_at(path: str) -> tuple[int, ...] | None:
    """The identity of a local file; None if there is none. Unlike os.path.exists, raises other errors."""
    try:
        return _identity(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What differs after a file was replaced or written again."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_same(before: object, now: object) -> bool:
    """Whether two generations are of the same file. FUSE gives a file another inode number after the kernel has
    forgotten it."""
    if before == now:
        return True
    if not isinstance(before, tuple) or not isinstance(now, tuple) or before[2:] != now[2:]:
        return False
    device, *_ = cast("tuple[int, ...]", now)
    return any(kind.startswith("fuse") for kind in file_system_kinds(device))


def _replaced(path: str) -> StorageError:
    return StorageError(errno.ESTALE, f"{path} was replaced after it was opened: open it again")


@dataclass(frozen=True, slots=True, eq=False)
class SeenFiles:
    """The files that an open checkpoint has read."""

    _generations: dict[str, object] = field(default_factory=dict[str, object], repr=False)

    def require_unchanged(self, path: str, generation: object) -> None:
        """Raise StorageError if a file is not the one that was read before."""
        if not _is_same(self._generations.setdefault(path, generation), generation):
            raise _replaced(path)

    def look_at(self, paths: Sequence[str]) -> list[Mark]:
        """The marks of local files, of which some may not exist. Raises StorageError if one is not as before."""
        marks = [
            Mark(path, generation, None) for path, generation in zip(paths, _generations(None, paths), strict=True)
        ]
        for mark in marks:
            self.require_unchanged(mark.path, mark.generation)
        return marks


# In a bucket ----------------------------------------------------------------------------------------------

_Tree = dict[str, Any]
"""The names in a folder: each with a tree for a folder, and None for a file."""


@dataclass(slots=True, eq=False)
class BucketFiles:
    """The files of a bucket, as far as an open checkpoint needs them. Listings and heads of files are kept."""

    root: Bucket
    url: str
    """The start of each path, without a slash at its end."""

    index_names: Collection[str] = ()
    """The names that are looked for in a folder that cannot be listed, as over HTTP."""

    _listings: dict[str, _Tree] = field(default_factory=dict[str, "_Tree"], repr=False)
    """By path of a folder."""

    _unlisted: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"], repr=False)
    """Those of `index_names` in folders that cannot be listed."""

    _kinds: dict[str, str | None] = field(default_factory=dict[str, "str | None"], repr=False)
    heads: dict[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    """The first bytes of files by path; all of them if they are fewer than `_HEAD_BYTES`."""

    sizes: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    """The sizes of files by path, if they were asked for."""

    seen: SeenFiles = field(default_factory=SeenFiles, repr=False)
    """The files that were read, also on file systems."""

    @classmethod
    def at(cls, bucket: Bucket, index_names: Collection[str] = ()) -> tuple[BucketFiles, str]:
        """The files of the bucket of a store, and the path of its URL among them."""
        scheme, _, rest = bucket.url.partition("://")
        url = f"{scheme}:/" if scheme == "memory" else f"{scheme}://{rest.partition('/')[0]}"
        key = bucket.path.strip("/")
        root = replace(bucket, url=url, path=bucket.path[: len(bucket.path) - len(bucket.path.lstrip("/"))])
        return cls(root, url, index_names), f"{url}/{key}" if key else url

    def key(self, path: str) -> str:
        return path.removeprefix(self.url).strip("/")

    def folder(self, path: str) -> Bucket:
        """The store of a folder."""
        key = self.key(path)
        return self.root.child(key) if key else self.root

    def read_whole(self, path: str) -> bytes:
        return self._unchanged(path, *self.root.read_whole(self.key(path)))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        return self._unchanged(path, *self.root.read_range(self.key(path), start, stop))

    def _unchanged(self, path: str, content: bytes | None, generation: bytes) -> bytes:
        """What was read of a file. Raises DataError if it is missing, StorageError if it is not the file that was read
        before."""
        if content is None:
            raise DataError(f"{path} is missing")
        if generation:
            self.seen.require_unchanged(path, generation)
        note_progress()
        return content

    def kind(self, path: str) -> str | None:
        """ "file", "folder", or None if nothing has this path."""
        for folder, tree in self._listings.items():
            if path.startswith(f"{folder}/"):
                node = _node(tree, path[len(folder) + 1 :])
                return "folder" if isinstance(node, dict) else "file" if node is None else None
        if path not in self._kinds:
            is_file = self.key(path) != "" and bool(self.root.existing([self.key(path)]))
            self._kinds[path] = "file" if is_file else "folder" if self._names(path) else None
        return self._kinds[path]

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; of a folder that cannot be listed, those of `index_names`, and
        those of files that were read. Raises StorageError."""
        for above, tree in self._listings.items():
            if f"{folder}/".startswith(f"{above}/"):
                node = _node(tree, folder[len(above) + 1 :])
                return sorted(cast("_Tree", node)) if isinstance(node, dict) else []
        if self._kinds.get(folder) == "file":
            return []
        return sorted(self._names(folder))

    def _names(self, folder: str) -> Collection[str]:
        """As `names`. A listing has everything below the folder, by one request per thousand keys."""
        if folder in self._unlisted:
            read = (path.removeprefix(f"{folder}/") for path in self.heads if path.startswith(f"{folder}/"))
            return {*self._unlisted[folder], *(name for name in read if "/" not in name)}
        if folder not in self._listings:
            try:
                keys = self.folder(folder).keys_below()
            except StorageError as error:
                if error.errno not in UNLISTABLE or not folder.startswith("http"):
                    raise
                self._unlisted[folder] = self.folder(folder).existing(self.index_names)
                return self._unlisted[folder]
            self._listings[folder] = tree = {}
            for names in (key.split("/") for key in keys):
                node = tree
                for name in names[:-1]:
                    below = node.get(name)
                    node[name] = below = {} if below is None else below
                    node = below
                if names[-1]:  # otherwise the key of the folder itself
                    node.setdefault(names[-1], None)
        return self._listings[folder]


def _node(tree: _Tree, path: str) -> object:
    """What a path below a tree refers to: a tree, None for a file, and False for nothing."""
    node: Any = tree
    for name in filter(None, path.split("/")):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return node


class _BucketFile(OpenFile):
    def __init__(self, files: BucketFiles, path: str) -> None:
        self.path = path
        self._files = files
        self._key = files.key(path)

    @property
    def size(self) -> int:
        head = self._head()
        if len(head) < _HEAD_BYTES:
            return len(head)
        if self.path not in self._files.sizes:
            self._files.sizes[self.path] = self._files.root.size(self._key)
        return self._files.sizes[self.path]

    def has_size(self, size: int) -> bool:
        if size < _HEAD_BYTES:
            return len(self._head()) == size
        return not self._files.root.check_lengths({self._key: size})

    def read(self, count: int, offset: int) -> bytes:
        head = self._head()
        if offset + count <= len(head) or len(head) < _HEAD_BYTES:
            return head[offset : offset + count]
        return self._files.read_range(self.path, offset, offset + count)

    def read_into(self, offset: int, buffers: Sequence[Any]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        count = sum(view.nbytes for view in views)
        data = memoryview(self._files.read_range(self.path, offset, offset + count))
        if len(data) < count:
            raise DataError(f"{self.path} was truncated while it was being read")
        for view in views:
            view[:] = data[: view.nbytes]
            data = data[view.nbytes :]

    def _head(self) -> bytes:
        if self.path not in self._files.heads:
            self._files.heads[self.path] = self._files.read_range(self.path, 0, _HEAD_BYTES)
        return self._files.heads[self.path]


OpenedFiles = BucketFiles | SeenFiles
"""The files of a checkpoint, as far as it has read them."""

_current: ContextVar[OpenedFiles | None] = ContextVar("jaxckpt_opened_files", default=None)


@contextlib.contextmanager
def using_files(files: OpenedFiles) -> Generator[None]:
    """In the block, paths that begin with a bucket's URL refer to it, and no file may be replaced between two reads."""
    token = _current.set(files)
    try:
        yield
    finally:
        _current.reset(token)


def _seen_files() -> SeenFiles | None:
    files = _current.get()
    return files.seen if isinstance(files, BucketFiles) else files


def _files_of(path: str) -> BucketFiles | None:
    files = _current.get()
    if isinstance(files, BucketFiles) and (path == files.url or path.startswith(f"{files.url}/")):
        return files
    return None


def url_of(path: str) -> str:
    """The URL of a path in a bucket, percent-encoded; local paths are returned as they are."""
    scheme, separator, rest = path.partition("://")
    host, slash, key = rest.partition("/")
    return f"{scheme}://{host}{slash}{urllib.parse.quote(key, safe=_SAFE)}" if separator else path
