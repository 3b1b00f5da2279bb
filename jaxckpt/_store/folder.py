"""A checkpoint on a file system: claimed with locks, published by a link or a rename.

Control files are written with plain system calls, so that the order of writes, fsync and rename is exact. Arrays are
written by `files`, or by tensorstore if they are compressed or `Options.io` asks for it. Only regular files in real
folders (no symbolic links) below the checkpoint's folder are read.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import functools
import json
import os
import socket
import stat
import sys
import time
import uuid
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from jaxckpt._model.file_names import (
    COPY,
    MANIFEST,
    WRITER,
    data_folder,
    data_folder_of,
    is_data_folder,
    may_reference_data,
)
from jaxckpt._model.grid import Box
from jaxckpt._model.object_index import ReadRange, read_digest
from jaxckpt._model.stacks import Stack
from jaxckpt._pipeline.progress import log_kept, log_swept
from jaxckpt._pipeline.threads import awake_seconds
from jaxckpt._pipeline.watchdog import current_watchdog, require_not_stalled
from jaxckpt._pipeline.workers import JoinedWork, note_progress, submit
from jaxckpt._store.files import (
    FileReader,
    FileWriter,
    close_unwritten,
    current_size,
    link,
    read_into,
    read_to_end,
    remove_folder,
    remove_if_empty,
)
from jaxckpt._store.load_manifest import find_lost, manifest_identity, overtaken_error, parse_note
from jaxckpt._store.storage_errors import UNLISTABLE, retry_stale, translate_os_errors, watched
from jaxckpt._store.store import ArrayReader, ArrayWriter, Store
from jaxckpt._store.tensors import TensorFileReader, TensorFileWriter, TensorReader, open_in_folder
from jaxckpt.errors import CorruptError, DataError, InputError, JaxckptError, StorageError

_LOCK_SECONDS = 300.0
"""How long to wait for the lock. A sweep that holds it may have many files to delete."""

_REFUSED_LINK = (
    errno.EPERM,  # also what SFTP makes of a name that exists
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EIO,  # rclone
    errno.EXDEV,  # AFS, for a link from another folder
    errno.EMLINK,
)
"""Errors of file systems without hard links. They may have other causes too."""


class _Writer(enum.Enum):
    """Whether the writer of a data folder is alive; unknown if its lock may not be visible here."""

    ALIVE, DEAD, UNKNOWN = range(3)


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one checkpoint on a file system."""

    url: str

    folder: str
    """The absolute path of the folder."""

    io: Literal["auto", "tensorstore"] = "auto"
    """See `Options.io`."""

    timeout_seconds: float = 300.0
    """See `Options.timeout_seconds`."""

    # Small files -----------------------------------------------------------------------------------------

    @watched("reading")
    def read(self, key: str, count: int | None = None) -> bytes | None:
        with self._translate_errors("read", key):
            try:
                return retry_stale(self._read, key, count)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _read(self, key: str, count: int | None) -> bytes:
        _revalidate(self._path(key))
        with self._open_file(key) as (handle, status):
            if os.major(status.st_dev) == 0:  # not a disk
                _forget_content(handle)
            return read_to_end(f"{self.url}/{key}", handle) if count is None else os.read(handle, count)

    @watched("reading")
    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        return [self.read(key) for key in keys]

    @contextlib.contextmanager
    def _open_file(self, key: str) -> Generator[tuple[int, os.stat_result]]:
        """(handle, status) of a regular file below this folder. Raises DataError if it is anything else."""
        _, problem = self._inspect_file(key, set())
        if problem:
            raise DataError(f"{self.url}/{key} {problem}")
        try:
            # O_NONBLOCK, so that a pipe that has just replaced the file cannot block this process.
            handle = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                yield handle, os.fstat(handle)
            finally:
                os.close(handle)
        except FileNotFoundError as error:
            # It has just been found, so another process has replaced or deleted it. GlusterFS raises ENOENT also for
            # reads of an open file.
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), error.filename) from error

    def _inspect_file(self, key: str, plain_folders: set[str]) -> tuple[int, str | None]:
        """(size of a file, a problem unless it is a regular file in real folders below this one).

        A link could lead anywhere, and a pipe or a device may never end. `plain_folders` caches the folders that were
        checked.
        """
        above = key.rpartition("/")[0]
        while above and above not in plain_folders:
            mode = os.lstat(self._path(above)).st_mode
            if not stat.S_ISDIR(mode):
                return 0, f"is in {above}, which is {_kind(mode)}, expected a plain folder"
            plain_folders.add(above)
            above = above.rpartition("/")[0]
        info = os.lstat(self._path(key))
        return info.st_size, None if stat.S_ISREG(info.st_mode) else f"is {_kind(info.st_mode)}, not a regular file"

    @watched("writing to")
    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        with self._translate_errors("write", key):
            retry_stale(self._put, key, content, sync=sync)

    def _put(self, key: str, content: bytes, *, sync: bool) -> None:
        with open(self._path(key), "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    @watched("writing to")
    def replace(self, key: str, content: bytes, *, sync: bool = False) -> None:
        temporary = f"{key}.new-{uuid.uuid4().hex}"
        try:
            self.put(temporary, content, sync=sync)
            self.rename(temporary, key)
        except BaseException:
            with contextlib.suppress(StorageError):  # for example on a full disk
                self.remove(temporary)
            raise

    @watched("deleting from")
    def remove(self, key: str) -> None:
        with self._translate_errors("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            retry_stale(os.unlink, self._path(key))

    # Objects ----------------------------------------------------------------------------------------------

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        if self._uses_own_engine(stack):
            return FileWriter(self._path(data, stack.name), stack, sync)
        return TensorFileWriter(self, data, stack, open_in_folder(self.folder, data, stack, sync=sync))

    def array_reader(
        self, data: str, stack: Stack, stored: Mapping[str, tuple[int, str]], plan: Iterable[Sequence[Box]] = ()
    ) -> ArrayReader:
        if self._uses_own_engine(stack):
            plain = set[str]()
            folder = f"{data}/{stack.name}"
            return FileReader(
                self._path(folder), stack, stored, lambda index: self._inspect_file(f"{folder}/c/{index}", plain)[1]
            )
        return TensorFileReader(self, data, stack, stored, TensorReader(open_in_folder(self.folder, data, stack)))

    can_link = True

    @watched("linking into")
    def link(self, source: Store, old: str, new: str, length: int, *, sync: bool) -> None:
        stack = self._path(new.partition("/c/")[0])
        if not isinstance(source, Folder):
            raise StorageError(errno.EXDEV, f"{old} is in another store than {self.url}")
        link(source._path(old), self._path(new), stack, length, sync=sync)

    def _uses_own_engine(self, stack: Stack) -> bool:
        """The choice between `files` and tensorstore."""
        return self.io == "auto" and stack.compression is None

    @watched("reading")
    def digest(self, key: str, stack: Stack) -> tuple[int, str]:
        """Length and digest of an object."""
        with self._translate_errors("read", key):
            try:
                return retry_stale(self._digest, key, stack)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise DataError(f"{self.url}/{key} is missing") from error

    def _digest(self, key: str, stack: Stack) -> tuple[int, str]:
        with self._open_file(key) as (handle, status):
            size = status.st_size
            return size, read_digest(self._reader_of(key, handle), stack, size)

    @watched("looking at")
    def check_lengths(self, lengths: Mapping[str, int]) -> dict[str, str]:
        plain = set[str]()
        problems: dict[str, str] = {}
        for key, length in lengths.items():
            with self._translate_errors("look at", key):
                try:
                    size, problem = retry_stale(self._inspect_file, key, plain)
                    if not problem and size != length:
                        size = retry_stale(self._current_size, key)
                except (FileNotFoundError, NotADirectoryError):
                    size, problem = 0, "is missing"
            note_progress()
            if problem or size != length:
                problems[key] = problem or f"is {size} bytes long, expected {length}"
        return problems

    def _current_size(self, key: str) -> int:
        with self._open_file(key) as (handle, _):
            return current_size(handle)

    @contextlib.contextmanager
    def range_reader(self, key: str) -> Generator[ReadRange]:
        with self._translate_errors("read", key), self._open_file(key) as (handle, _):
            yield self._reader_of(key, handle)

    def _reader_of(self, key: str, handle: int) -> ReadRange:
        buffer = np.empty(0, np.uint8)

        def read(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            nonlocal buffer
            if len(buffer) < stop - start:
                buffer = np.empty(stop - start, np.uint8)  # reused: touching new memory costs more than the read
            read_into(f"{self.url}/{key}", handle, start, [buffer[: stop - start]])
            return buffer[: stop - start]

        return read

    # Publication ------------------------------------------------------------------------------------------

    @watched("preparing")
    def begin_save(self, save_id: str, previous: bytes | None) -> tuple[int, bool]:
        data = data_folder(save_id)
        note = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "save_id": save_id,
            "replaces": manifest_identity(previous),
        }
        with self._translate_errors("create", data), contextlib.ExitStack() as undo:
            is_new = not os.path.lexists(self.folder)
            if is_new:  # deleted only if empty: another process may be saving there too
                undo.callback(remove_if_empty, self.folder)
            handle = retry_stale(self._claim_folder, data, note)
            undo.pop_all()
            return handle, is_new

    def _claim_folder(self, data: str, note: dict[str, Any]) -> int:
        for tries_left in reversed(range(100)):
            try:
                return self._create_data_folder(data, note)
            except (FileNotFoundError, FileExistsError) as error:
                # Another process's `clear` may have mistaken the empty folder for the remains of a killed save.
                if not tries_left or error.errno == errno.ESTALE:
                    raise
        raise AssertionError

    def _create_data_folder(self, data: str, note: dict[str, Any]) -> int:
        """Create a data folder with its writer's note, and lock the note."""
        path, key = self._path(data), f"{data}/{WRITER}"
        _make_folders(self.folder)
        with self.locked(), contextlib.ExitStack() as undo:
            os.mkdir(path)
            undo.callback(remove_folder, path)
            handle = os.open(self._path(key), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            undo.callback(os.close, handle)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                note |= _lock_scope(handle)
            os.write(handle, json.dumps(note).encode())
            if self.read(key) is None:
                if not os.path.lexists(self._path(key)):
                    raise StorageError(errno.ENOENT, f"{self.url}/{data} was deleted while it was being created")
                raise StorageError(
                    errno.ENOTSUP,
                    f"cannot save to {self.url}: its file system does not show a file that is open for writing. If it"
                    " is an rclone mount, mount it with --vfs-cache-mode writes",
                )
            require_not_stalled()  # otherwise nobody would release the claim
            undo.pop_all()
            return handle

    def unlock(self, handle: int) -> None:
        watchdog = current_watchdog()
        if watchdog is not None and watchdog.is_abandoned:
            close_unwritten(handle)  # a thread that resumes after a stall may start no operation, but still lets go
        else:
            self._close(handle)

    @watched("closing a file in")
    def _close(self, handle: int) -> None:
        close_unwritten(handle)

    @contextlib.contextmanager
    def locked(self) -> Generator[int]:
        """The checkpoint's folder, open and locked, so that claims, sweeps and publications exclude each other."""
        handle = retry_stale(os.open, self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(handle)
            yield handle
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked in the meantime also has it open
            close_unwritten(handle)

    def _lock(self, handle: int) -> None:
        """Lock a folder until the handle is closed or this process dies. A suspended process keeps the lock."""
        deadline = awake_seconds() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if awake_seconds() > deadline:
                    raise StorageError(
                        errno.ETIMEDOUT,
                        f"another process has held the lock of {self.folder} for {_LOCK_SECONDS:g} s: look for"
                        " a process that was suspended during a save or a deletion",
                    ) from None
                note_progress()  # this error, not that of storage that hangs
                time.sleep(0.005)
            except OSError:  # a file system without locks
                return

    @watched("publishing")
    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        with self._translate_errors("publish", MANIFEST), self.locked() as handle:
            self._require_note(data, WRITER, previous)
            self._put_draft(data, manifest, sync=sync)  # first: see published_data
            if sync and previous is None:
                sync_path(self._path(data))  # nor is there a copy without a draft after a power loss
            self.put(f"{data}/{COPY}", manifest)  # not synced: it serves if the manifest is lost later
            # Another host, which the lock may not reach, deletes the note, then looks for a manifest, and only then
            # deletes the data. So either this process or that host sees the other one's change. A save is not
            # withdrawn because the note cannot be read: withdrawing it could fail for the same reason.
            self._replace_manifest_durably(handle, data, manifest, previous, WRITER, sync=sync)

    @watched("publishing")
    def republish(self, data: str, manifest: bytes, previous: bytes, *, sync: bool) -> None:
        with self._translate_errors("publish", MANIFEST), self.locked() as handle:
            if os.path.lexists(self._path(data, COPY)):
                self.replace(f"{data}/{COPY}", manifest)
            self._put_draft(data, manifest, sync=sync)
            self._replace_manifest_durably(handle, data, manifest, previous, None, sync=sync)

    @watched("publishing")
    def publish_copy(self, data: str, copy: bytes, damaged: bytes | None, *, sync: bool) -> None:
        with self._translate_errors("publish", MANIFEST), self.locked() as handle:
            self._require_note(data, COPY, damaged)
            self.remove(f"{data}/{WRITER}")  # of a writer that was killed: with a draft, it would seem unpublished
            self._put_draft(data, copy, sync=sync)
            self._replace_manifest_durably(handle, data, copy, damaged, COPY, sync=sync)

    def _replace_manifest_durably(
        self, folder: int, data: str, manifest: bytes, previous: bytes | None, proof: str | None, *, sync: bool
    ) -> None:
        """Replace the manifest `previous` of the open folder by the draft. `proof` is the file whose absence proves
        that the data was deleted."""
        self._publish_draft(data, manifest, previous)
        try:
            if sync:
                os.fsync(folder)
            if proof:
                self._require_note(data, proof, manifest, may_be_unreadable=True)
        except (OSError, JaxckptError):
            # The manifest is in place, but perhaps not durable, or its data was deleted. A save that raises must not
            # leave it published.
            if proof == WRITER:  # a repair keeps the copy, which is all that is left of the manifest
                with contextlib.suppress(OSError, JaxckptError):
                    self._remove_copy(data, sync=False)  # else the data seems to have been published
            with contextlib.suppress(OSError, JaxckptError):
                self._withdraw(data, manifest, previous)
            raise
        with contextlib.suppress(StorageError):
            self.remove(_draft_key(data))  # last: after a power loss, one of its two names exists

    def _require_note(self, data: str, name: str, current: bytes | None, *, may_be_unreadable: bool = False) -> None:
        """Raise if data was deleted, before its manifest was published as the successor of `current`, or after it was
        published as `current`.

        A suspended process that resumes may recreate deleted files, but never the file `name`, the note of the writer
        or the second copy of the manifest. If it is missing, the data was deleted.
        """
        try:
            exists = self.read(f"{data}/{name}") is not None
        except StorageError:
            if not may_be_unreadable:
                raise
            exists = _is_listed(self._path(data, name))
        if not exists:
            self._require_unchanged(current)
            raise StorageError(
                errno.ENOENT,
                f"{self.url}/{data} disappeared while it was being written: it was deleted, or its folder was moved or"
                " unmounted",
            )

    def _withdraw(self, data: str, manifest: bytes, previous: bytes | None) -> None:
        """Restore the manifest that was just replaced, if its data still exists."""
        old = None if previous is None else data_folder_of(previous)
        if previous is not None and old is not None and os.path.isdir(self._path(old)):
            self._put_draft(data, previous, sync=False)
            self._publish_draft(data, previous, manifest)
        else:
            self._require_unchanged(manifest)
            os.unlink(self._path(MANIFEST))

    def _require_unchanged(self, previous: bytes | None) -> None:
        if (current := self.read(MANIFEST)) != previous:
            raise overtaken_error(self.url, was_deleted=current is None)

    def _put_draft(self, data: str, manifest: bytes, *, sync: bool) -> None:
        """Write a manifest in the data folder, so that the remains of a crash are deleted with the data."""
        self.remove(_draft_key(data))  # a process that was killed may have left it as a second name of the manifest
        self.put(_draft_key(data), manifest, sync=sync)

    def _publish_draft(self, data: str, content: bytes, previous: bytes | None) -> None:
        """Replace the manifest `previous`, which is compared last, because the lock may not reach other hosts."""
        self._require_unchanged(previous)
        if previous is None:
            self._link_manifest(_draft_key(data), content)
        else:
            os.rename(self._path(_draft_key(data)), self._path(MANIFEST))

    def _link_manifest(self, temporary: str, content: bytes) -> None:
        """Publish a first manifest. A link, unlike a rename, fails if another host has published in the meantime."""
        old, new = self._path(temporary), self._path(MANIFEST)
        try:
            os.link(old, new, follow_symlinks=False)
            return
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _REFUSED_LINK:
                raise
            has_links = self._has_links(temporary)
            if self.read(MANIFEST) is None:
                if has_links:
                    raise
                os.rename(old, new)
                return
        if self.read(MANIFEST) != content:  # equal if NFS has executed the call twice
            raise overtaken_error(self.url)

    def _has_links(self, key: str) -> bool:
        """Whether a file can be linked into another folder. Tries it with a name that only this save uses."""
        folder = self._path(f"{key}-link")
        os.mkdir(folder)
        try:
            os.link(self._path(key), os.path.join(folder, MANIFEST), follow_symlinks=False)
        except OSError as error:
            if error.errno not in _REFUSED_LINK:
                raise
            return False
        finally:
            remove_folder(folder)
        return True

    @watched("deleting")
    def unpublish(self, *, sync: bool) -> None:
        with (
            self._translate_errors("delete", MANIFEST),
            contextlib.suppress(FileNotFoundError),
            self.locked() as handle,
        ):
            for data in filter(is_data_folder, self.names()):
                self._remove_copy(data, sync=sync)
            retry_stale(os.unlink, self._path(MANIFEST))
            if sync:  # otherwise a power loss could restore the manifest without its data
                os.fsync(handle)

    def _remove_copy(self, data: str, *, sync: bool) -> None:
        """Remove the second copy of a manifest, the first step of every deletion. Without `sync`, a power loss could
        restore the copy, but nothing that is deleted after it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            retry_stale(os.unlink, self._path(data, COPY))
            if sync:
                _sync_path(self._path(data))

    @watched("listing")
    def published_data(self) -> list[str]:
        # A writer writes its draft before the copy, and publishes it by a rename, or by a link, after which it removes
        # the draft. So a copy without a draft was published, even if the writer was killed before it removed its note.
        return [
            name
            for name in filter(is_data_folder, self.names())
            if os.path.lexists(self._path(name, COPY))
            and not (os.path.lexists(self._path(name, WRITER)) and os.path.lexists(self._path(_draft_key(name))))
        ]

    @watched("deleting")
    def discard(self, data: str) -> None:
        with self._translate_errors("delete", data):
            self._remove_copy(data, sync=True)
        self.delete(data)

    @watched("sweeping")
    def sweep(self, current: str | None, *, evict: bool = False) -> bool:
        """Keeps the data of a writer that is alive or, without `evict`, if its lock may not be visible here, that may
        still publish."""
        left = False
        # If the checkpoint's folder does not exist, or has just been deleted, there is nothing to delete.
        ignore_missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._translate_errors("sweep", ""), ignore_missing, self.locked():
            for name in self.names():
                if not is_data_folder(name) or name == current:
                    continue
                writer, note = self._find_writer(name)
                # The manifest is checked last, because the folder may have been published since the listing.
                manifest = self.read(MANIFEST)
                if self._may_publish(name, writer, note or {}, manifest, evict=evict):
                    left = True
                elif manifest is None and name in find_lost(self):
                    log_kept(self.url, name)
                    left = True
                elif self._delete_data(name, has_note=note is not None):
                    # With `evict`, the caller has just deleted this checkpoint, so that is nothing to log.
                    if not evict:
                        log_swept(self.url, name)
                else:
                    left = True
        return left

    def _may_publish(
        self, data: str, writer: _Writer, note: dict[str, Any], manifest: bytes | None, *, evict: bool
    ) -> bool:
        """Whether a data folder is published, or its writer may still publish it. With `evict`, only a writer that is
        known to be alive counts."""
        if may_reference_data(manifest, data):
            return True
        if writer is not _Writer.UNKNOWN:
            return writer is _Writer.ALIVE
        # Publication requires that the manifest is still the one that the save found when it began.
        return not evict and ("replaces" not in note or note["replaces"] == manifest_identity(manifest))

    def _delete_data(self, data: str, *, has_note: bool) -> bool:
        """Delete a data folder: the second copy of its manifest, then the writer's note. Without the note, a save that
        was taken for dead fails. If that save has just published the folder, the rest stays. Returns whether the folder
        is gone."""
        path, note = self._path(data), self._path(data, WRITER)
        try:
            self._remove_copy(data, sync=True)
            if has_note:
                os.unlink(note)
            else:
                os.rmdir(path)  # if it is empty, its writer may be about to create the note, and will try again
                return True
        except FileNotFoundError:
            if not has_note:
                return True
        except OSError:
            if has_note or os.path.lexists(note):
                return False
        if not may_reference_data(self.read(MANIFEST), data):
            remove_folder(path)
        return not os.path.lexists(path)

    def _find_writer(self, data: str) -> tuple[_Writer, dict[str, Any] | None]:
        """The writer of a data folder, and its note; None if the note does not exist."""
        try:
            # NFS locks only files that are open for writing.
            handle = os.open(self._path(data, WRITER), os.O_RDWR)
        except FileNotFoundError:
            # Its checkpoint was published and then replaced, or it died before it created the note.
            return _Writer.DEAD, None
        except OSError:
            return _Writer.ALIVE, {}
        try:
            content = os.read(handle, 4096)  # empty if the writer died before it wrote the note
            note, scope = parse_note(content), _lock_scope(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _Writer.ALIVE, note
            except OSError:  # a file system without locks
                return _Writer.UNKNOWN, note
            return _Writer.DEAD if not content or _shows_lock(note, scope) else _Writer.UNKNOWN, note
        except OSError:
            return _Writer.ALIVE, {}
        finally:
            os.close(handle)

    @watched("deleting")
    def clear(self, *, evict: bool = True) -> None:
        """Keeps the data of a writer whose lock shows that it is alive."""
        self.sweep(None, evict=evict)
        remove_if_empty(self.folder)

    @watched("sweeping")
    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Also deletes the note of a dead writer, and the second name of the manifest that it may have left."""
        if self._find_writer(data)[0] is _Writer.DEAD:
            with contextlib.suppress(StorageError):  # no permission, or a file system that is mounted read-only
                self.remove(_draft_key(data))
                self.remove(f"{data}/{WRITER}")
        named = {stack.name for stack in stacks}
        for name in self.child(data).names():
            if name not in named and os.path.isdir(self._path(data, name)):
                self.child(data).delete(name)

    # Durability -------------------------------------------------------------------------------------------

    @watched("syncing")
    def sync_folders(self, data: str, keys: Iterable[str]) -> None:
        folders = set[str]()
        for folder in keys:
            while folder := folder.rpartition("/")[0]:
                folders.add(folder)
        # Concurrently, because a journal then commits them together.
        paths = [self._path(data, folder) for folder in sorted(folders)]
        JoinedWork([submit(functools.partial(sync_path, path)) for path in paths]).result()

    @watched("syncing")
    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Includes the folder above, because this one may be new, and those above it that this process has created."""
        for stack in stacks:
            sync_path(self._path(data, stack.name, "zarr.json"))
            sync_path(self._path(data, stack.name))
        sync_path(self._path(data))
        sync_path(self.folder)
        is_new, folder = True, self.folder
        while is_new and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
            # A folder that this process has no permission to open existed before.
            if os.access(folder, os.R_OK):
                try:
                    sync_path(folder)
                except StorageError as error:  # the file system cannot sync folders
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                        raise
            is_new = _new_folders.pop(folder, False)

    # Folders ----------------------------------------------------------------------------------------------

    def absolute(self) -> Self:
        return replace(self, url=self.folder)

    @watched("looking for")
    def require_no_dangling_link(self) -> None:
        """Raise InputError if this folder, or one above it, is a broken symbolic link: no folder can be created
        there."""
        path = self.folder
        while not os.path.exists(path):
            if os.path.islink(path):
                raise InputError(
                    f"{path} is a symbolic link to {os.readlink(path)}, which does not exist; create that, or remove"
                    " the link"
                )
            path = os.path.dirname(path)

    @watched("looking at")
    def is_file(self) -> bool:
        return os.path.isfile(self.folder)

    @watched("looking at")
    def link_target(self) -> str | None:
        return os.path.realpath(self.folder) if os.path.islink(self.folder) else None

    @watched("listing")
    def names(self) -> list[str]:
        with self._translate_errors("list", ""):
            try:
                return sorted(retry_stale(os.listdir, self.folder))
            except (FileNotFoundError, NotADirectoryError) as error:
                if error.errno == errno.ESTALE:  # a server that has lost its files must not look like a new run
                    raise
                return []

    @watched("listing")
    def is_empty_folder(self, name: str) -> bool:
        path = self._path(name)
        with self._translate_errors("list", name):
            return os.path.isdir(path) and not os.path.islink(path) and _has_no_files(path)

    @watched("listing")
    def files_below(self, name: str) -> list[str]:
        """The keys of all files below a folder; of those that can be listed."""
        folders = ((path, names) for path, _, names in os.walk(self._path(name)))
        return [os.path.relpath(os.path.join(path, name), self.folder) for path, names in folders for name in names]

    @watched("listing")
    def folders(
        self, predicate: Callable[[str], bool] = lambda name: True, known: Container[str] = ()
    ) -> dict[str, bool | StorageError]:
        return {name: name in known or self._is_published(name) for name in filter(predicate, self.names())}

    @watched("listing")
    def names_below(self, predicate: Callable[[str], bool]) -> dict[str, list[str]]:
        return {name: self._names_if_allowed(name) for name in filter(predicate, self.names())}

    def _names_if_allowed(self, name: str) -> list[str]:
        try:
            return self.child(name).names()
        except StorageError as error:
            if error.errno not in UNLISTABLE:
                raise
            return []

    def _is_published(self, name: str) -> bool | StorageError:
        note_progress()
        try:
            retry_stale(os.stat, self._path(name, MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            try:
                return bool(find_lost(self.child(name)))
            except StorageError as error:
                return False if error.errno in UNLISTABLE else error
            except CorruptError:  # such as a link that leads nowhere: its reader gets the error
                return True
        except PermissionError:  # its reader gets the error, too, and the others are not concerned
            return True
        except OSError as error:
            return StorageError(error.errno, f"cannot look at {self.url}/{name}/{MANIFEST}: {error.strerror}")
        return True

    def child(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}", folder=self._path(name))

    def with_url(self, url: str) -> Self:
        return replace(self, url=url)

    @watched("preparing")
    def create_child(self, name: str) -> Self:
        with self._translate_errors("create", name):
            retry_stale(_make_folders, self._path(name))
        return self.child(name)

    def parent_and_name(self) -> tuple[Self, str] | None:
        folder, name = os.path.split(self.folder)
        return (replace(self, url=folder, folder=folder), name) if name else None

    def mark(self, name: str) -> None:
        pass

    def unmark(self, name: str) -> None:
        pass

    can_rename = True

    @watched("moving")
    def rename(self, name: str, to: str) -> None:
        with self._translate_errors("move", name), contextlib.suppress(FileNotFoundError):
            retry_stale(os.makedirs, os.path.dirname(self._path(to)), exist_ok=True)
            try:
                retry_stale(os.rename, self._path(name), self._path(to))
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                raise StorageError(
                    errno.EXDEV,
                    f"cannot move {self.url}/{name} to {self.url}/{to}: they are on different file systems, or on a"
                    " lower layer of overlayfs, where a folder cannot be renamed. Nothing was moved or deleted. With"
                    f" trash=True, {os.path.dirname(to)} must be a plain folder of the same file system; or omit trash",
                ) from error

    @watched("deleting")
    def delete(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._remove_copy(name, sync=False)
        remove_folder(self._path(name))

    # Inside -----------------------------------------------------------------------------------------------

    def _path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def _translate_errors(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return translate_os_errors(f"cannot {verb} {self.url}/{key}")


_new_folders: dict[str, bool] = {}
"""The folders, above that of a checkpoint or a run, that this process has created and not made durable."""

_MAX_NEW_FOLDERS = 1000
"""With `Options.sync=False`, nothing makes them durable."""


def _make_folders(path: str) -> None:
    """Create a folder and those above it, if they do not exist."""
    above = os.path.dirname(path)
    while not os.path.isdir(above) and above != os.path.dirname(above):
        _new_folders[above] = True
        above = os.path.dirname(above)
    for oldest in list(_new_folders)[:-_MAX_NEW_FOLDERS]:
        _new_folders.pop(oldest, None)
    os.makedirs(path, exist_ok=True)


def _draft_key(data: str) -> str:
    """The key of the draft: the manifest of a data folder before it is published, or a second name of it."""
    return f"{data}/{MANIFEST}"


def _is_listed(path: str) -> bool:
    """Whether a file exists, even if it cannot be opened. Raises OSError if that is unknown."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _revalidate(path: str) -> None:
    """Make a file system that caches names look up a file again. GlusterFS otherwise still opens and reads a file for a
    second after another host has replaced it.

    The server is asked for an attribute that does not exist. If it does not know the file, the kernel looks up its
    name again. Other file systems answer without asking a server.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.getxattr(path, "user.jaxckpt", follow_symlinks=False)


def _forget_content(handle: int) -> None:
    """Make the kernel ask a network file system for the content of a file again. With sshfs -o auto_cache, for example,
    it would otherwise return the content from before another host replaced the file by one of the same length."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _has_no_files(path: str) -> bool:
    with os.scandir(path) as entries:
        return all(entry.is_dir(follow_symlinks=False) and _has_no_files(entry.path) for entry in entries)


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def sync_path(path: str) -> None:
    """Make a file durable, or the names in a folder. Raises StorageError."""
    with translate_os_errors(f"cannot sync {path}"):
        retry_stale(_sync_path, path)


def _sync_path(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        note_progress()
    finally:
        os.close(handle)


def _lock_scope(handle: int) -> dict[str, str]:
    """What determines which processes see the lock of an open file: the start of the kernel, and the mounted device."""
    device = os.fstat(handle).st_dev
    return {"boot": _boot_id(), "device": f"{os.major(device)}:{os.minor(device)}"}


@functools.cache
def _boot_id() -> str:
    """An id of the current start of this machine's kernel; empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _shows_lock(note: dict[str, Any], scope: dict[str, str]) -> bool:
    """Whether this process would see the lock of the writer of a note if that writer was alive.

    It does through the same mount of one kernel. It also does on a disk of one host, even after a restart, because no
    other host has mounted that disk. Host names are not unique, and mounts over a network (their devices have the major
    number 0) may keep locks to themselves.
    """
    device = note.get("device")
    if not isinstance(device, str):  # the writer got no lock
        return False
    if scope["boot"] and (note.get("boot"), device) == (scope["boot"], scope["device"]):
        return True
    on_disks = not device.startswith("0:") and not scope["device"].startswith("0:")
    return on_disks and note.get("host") == socket.gethostname()
