"""A checkpoint on a file system: claimed with locks, published by a link or a rename.

Control files are written with plain system calls, so that the order of writes, fsync and rename is exact. Arrays are
written by `files`, or by tensorstore if they are compressed or `Options.io` asks for it. Only regular files in real
folders (no symbolic links) below the checkpoint's folder are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box
from jaxckpt._format.names import MANIFEST, WRITER, is_data_folder, is_data_referenced, may_reference_data
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import DataError, InputError, StorageError
from jaxckpt._runtime.events import log_swept
from jaxckpt._runtime.stalls import require_not_stalled
from jaxckpt._storage.claims import overtaken_error, parse_note
from jaxckpt._storage.errors import translate_os_errors
from jaxckpt._storage.files import FileReader, FileWriter, read_into
from jaxckpt._storage.links import link
from jaxckpt._storage.objects import MAX_FILE_BYTES, ArrayReader, ArrayWriter, Objects
from jaxckpt._storage.removal import close_unwritten, remove_folder
from jaxckpt._storage.store import DataClaim
from jaxckpt._storage.tensor_files import TensorFileReader, TensorFileWriter
from jaxckpt._storage.tensors import ROOT_CONTEXT, TensorReader, local_store, open_array
from jaxckpt._storage.watched import watched
from jaxckpt._storage.workers import JoinedWork, note_progress, submit

_LOCK_SECONDS = 300.0
"""How long to wait for the lock. A sweep that holds it may have many files to delete."""

_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""Errors of file systems without hard links, or without those from another folder, such as AFS."""


@functools.cache
def _context(*, sync: bool) -> ts.Context:
    # No two processes write the same object, so writing it needs no lock.
    return ts.Context({"file_io_sync": sync, "file_io_locking": {"mode": "none"}}, parent=ROOT_CONTEXT)


@watched(
    read="reading",
    read_all="reading",
    put="writing to",
    remove="deleting from",
    array_writer=None,
    array_reader=None,
    link="linking into",
    digest="reading",
    check_lengths="looking at",
    range_reader=None,
    begin_save="preparing",
    unlock="closing a file in",
    create_array="preparing",
    publish="publishing",
    unpublish="deleting",
    discard="deleting",
    sweep="sweeping",
    clear="deleting",
    trim="sweeping",
    sync_folders="syncing",
    sync_data="syncing",
    absolute=None,
    require_no_dangling_link="looking for",
    is_file="looking at",
    is_link="looking at",
    remove_link="deleting",
    names="listing",
    files_below="listing",
    folders="listing",
    child=None,
    with_url=None,
    create_child="preparing",
    parent_and_name=None,
    mark=None,
    unmark=None,
    rename="moving",
    delete="deleting",
)
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

    def read(self, key: str) -> bytes | None:
        with self._translate_errors("read", key):
            try:
                with self._open_file(key) as (handle, size), open(handle, "rb", closefd=False) as file:
                    if size > MAX_FILE_BYTES:
                        raise DataError(
                            f"{self.url}/{key} is over {MAX_FILE_BYTES} bytes: jaxckpt writes no file this large"
                        )
                    return file.read(size)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        return [self.read(key) for key in keys]

    @contextlib.contextmanager
    def _open_file(self, key: str) -> Generator[tuple[int, int]]:
        """(handle, size) of a regular file below this folder. Raises DataError if it is anything else."""
        _, odd = self._inspect_file(key, set())
        if odd:
            raise DataError(f"{self.url}/{key} {odd}")
        # O_NONBLOCK, so that a pipe that has just replaced the file cannot block this process.
        handle = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield handle, os.fstat(handle).st_size
        finally:
            os.close(handle)

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

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        with self._translate_errors("write", key), open(self._path(key), "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def remove(self, key: str) -> None:
        with self._translate_errors("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(key))

    # Arrays -----------------------------------------------------------------------------------------------

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        if self._uses_own_engine(stack):
            return FileWriter(self._path(data, stack.name), stack, sync)
        return TensorFileWriter(self, data, stack, self._open_array(data, stack, sync=sync))

    def array_reader(
        self,
        data: str,
        stack: Stack,
        stored: Mapping[str, tuple[int, str]],
        plan: Iterable[Sequence[Box]] = (),
    ) -> ArrayReader:
        if self._uses_own_engine(stack):
            plain = set[str]()
            below = len(self._path(""))
            folder = self._path(data, stack.name)
            return FileReader(folder, stack, stored, lambda path: self._inspect_file(path[below:], plain)[1])
        return TensorFileReader(self, data, stack, stored, TensorReader(self._open_array(data, stack, sync=False)))

    can_link = True

    def link(self, source: Objects, old: str, new: str, length: int, *, sync: bool) -> bool:
        stack = self._path(new.partition("/c/")[0])
        same_kind = isinstance(source, Folder)
        return same_kind and link(source._path(old), self._path(new), stack, length, sync=sync)

    def _uses_own_engine(self, stack: Stack) -> bool:
        return self.io == "auto" and stack.compression is None

    def _open_array(self, data: str, stack: Stack, *, sync: bool) -> ts.TensorStore:
        return open_array(local_store(self._path(data, stack.name, "")), stack, _context(sync=sync))

    # Objects as bytes -------------------------------------------------------------------------------------

    def digest(self, key: str, stack: Stack) -> tuple[int, str]:
        """Length and digest of an object."""
        with self._translate_errors("read", key):
            try:
                with self._open_file(key) as (handle, size):
                    return size, zarr.read_digest(self._reader_of(key, handle), stack, size)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise DataError(f"{self.url}/{key} is missing") from error

    def check_lengths(self, lengths: Mapping[str, int]) -> dict[str, str]:
        plain = set[str]()
        found: dict[str, str] = {}
        for key, length in lengths.items():
            with self._translate_errors("look at", key):
                try:
                    size, odd = self._inspect_file(key, plain)
                except (FileNotFoundError, NotADirectoryError):
                    size, odd = 0, "is missing"
            note_progress()
            if odd or size != length:
                found[key] = odd or f"is {size} bytes long, expected {length}"
        return found

    @contextlib.contextmanager
    def range_reader(self, key: str) -> Generator[zarr.ReadRange]:
        with self._translate_errors("read", key), self._open_file(key) as (handle, _):
            yield self._reader_of(key, handle)

    def _reader_of(self, key: str, handle: int) -> zarr.ReadRange:
        buffer = np.empty(0, np.uint8)

        def read(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            nonlocal buffer
            if len(buffer) < stop - start:
                buffer = np.empty(stop - start, np.uint8)  # reused: touching new memory costs more than the read
            read_into(f"{self.url}/{key}", handle, start, [buffer[: stop - start]])
            return buffer[: stop - start]

        return read

    # Claim and publish ------------------------------------------------------------------------------------

    def begin_save(self, save_id: str, previous: bytes | None) -> DataClaim:
        """The note stays locked while the writer is alive."""
        data = f"data-{save_id}"
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "save_id": save_id}).encode()
        with self._translate_errors("create", data):
            for tries_left in reversed(range(100)):
                try:
                    return DataClaim(self, data, self._create_data_folder(self._path(data), note))
                except (FileNotFoundError, FileExistsError):
                    # Another process's `clear` may have mistaken the empty folder for the remains of a killed save.
                    if not tries_left:
                        raise
        raise AssertionError

    def _create_data_folder(self, path: str, note: bytes) -> int:
        """Create a data folder with its writer's note, and lock the note."""
        os.makedirs(self.folder, exist_ok=True)
        with self._locked(), contextlib.ExitStack() as undo:
            os.mkdir(path)
            undo.callback(remove_folder, path)
            handle = os.open(os.path.join(path, WRITER), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            undo.callback(os.close, handle)
            with contextlib.suppress(OSError):  # a file system without locks; a sweep then keeps the folder
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, note)
            require_not_stalled()  # otherwise nobody would release the claim
            undo.pop_all()
            return handle

    def unlock(self, handle: int) -> None:
        close_unwritten(handle)

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """The checkpoint's folder, open and locked, so that claims, sweeps and publications exclude each other."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(handle)
            yield handle
        finally:
            try:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked in the meantime also has it open
            except OSError:
                pass
            finally:
                close_unwritten(handle)

    def _lock(self, handle: int) -> None:
        """Lock a folder until the handle is closed or this process dies. A suspended process keeps the lock."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(
                        errno.ETIMEDOUT,
                        f"another process has held the lock of {self.folder} for {_LOCK_SECONDS:g} s: look for"
                        " a process that was suspended during a save or a deletion",
                    ) from None
                time.sleep(0.005)
            except OSError:  # a file system without locks
                return

    def create_array(self, data: str, stack: Stack) -> None:
        with self._translate_errors("create", f"{data}/{stack.name}"):
            os.makedirs(self._path(data, stack.name), exist_ok=True)
        self.put(f"{data}/{stack.name}/zarr.json", zarr.metadata(stack))

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        with self._translate_errors("publish", MANIFEST), self._locked() as handle:
            # A suspended process that resumes may recreate deleted files, but never the writer's note. A missing note
            # therefore proves that the data was deleted.
            if not is_data_referenced(previous, data) and self.read(f"{data}/{WRITER}") is None:
                self._require_unchanged(previous)
                raise StorageError(errno.ENOENT, f"{self.url}/{data} was deleted while it was being written")
            self._replace_manifest(data, manifest, previous, sync=sync)
            try:
                if sync:
                    os.fsync(handle)
            except OSError:
                # The manifest is in place but perhaps not durable. A save that raises must not leave it published.
                with contextlib.suppress(OSError):
                    if previous is None:
                        os.unlink(self._path(MANIFEST))
                    else:
                        self._replace_manifest(data, previous, manifest, sync=False)
                raise

    def _require_unchanged(self, previous: bytes | None) -> None:
        if self.read(MANIFEST) != previous:
            raise overtaken_error(self.url)

    def _replace_manifest(self, data: str, content: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Replace the manifest `previous`, which is compared last, because the lock may not reach other hosts."""
        # Written in the data folder, so that the remains of a crash are deleted with the data.
        temporary = f"{data}/{MANIFEST}"
        self.remove(temporary)  # a process that was killed may have left it as a second name of the manifest
        self.put(temporary, content, sync=sync)
        try:
            self._require_unchanged(previous)
            if previous is None:
                self._link_manifest(temporary)
            else:
                os.rename(self._path(temporary), self._path(MANIFEST))
        finally:
            with contextlib.suppress(StorageError):
                self.remove(temporary)

    def _link_manifest(self, temporary: str) -> None:
        """Publish a first manifest. A link, unlike a rename, fails if another host has published in the meantime."""
        old, new = self._path(temporary), self._path(MANIFEST)
        try:
            os.link(old, new, follow_symlinks=False)
        except FileExistsError:
            if not os.path.samestat(os.lstat(old), os.lstat(new)):  # NFS may execute a call twice
                raise overtaken_error(self.url) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(old, new)

    def unpublish(self, *, sync: bool) -> None:
        with (
            self._translate_errors("delete", MANIFEST),
            contextlib.suppress(FileNotFoundError),
            self._locked() as handle,
        ):
            os.unlink(self._path(MANIFEST))
            if sync:  # otherwise a power loss could restore the manifest without its data
                os.fsync(handle)

    def discard(self, data: str) -> None:
        self.delete(data)

    def sweep(self, current: str | None) -> bool:
        """Keeps folders whose writer may be alive: its lock is held, or it runs on another host, whose locks may not be
        visible here."""
        return self._sweep(current, log_swept)

    def _sweep(self, current: str | None, log: Callable[[str, str], object]) -> bool:
        """Delete data folders other than `current` whose writer is dead. Returns whether any is left."""
        left = False
        # If the checkpoint's folder does not exist, or has just been deleted, there is nothing to delete.
        gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._translate_errors("sweep", ""), gone, self._locked():
            for name in self.names():
                if not is_data_folder(name) or name == current:
                    continue
                path = self._path(name)
                # The manifest is checked last, because the folder may have been published since the listing.
                if _is_abandoned(path) and not may_reference_data(self.read(MANIFEST), name):
                    remove_folder(path)
                    if not os.path.lexists(path):
                        log(self.url, name)
                        continue
                left = True
        return left

    def clear(self, *, evict: bool = True) -> None:
        """Keeps the data of a live writer, because its lock shows that it is alive."""
        self._sweep(None, lambda url, name: None)  # logs nothing: this data is not the remains of a save
        with contextlib.suppress(OSError):  # not empty: another process is writing in it
            os.rmdir(self.folder)

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Also deletes the note of a dead writer."""
        if _is_abandoned(self._path(data)):
            with contextlib.suppress(StorageError):  # no permission, or a file system that is mounted read-only
                self.remove(f"{data}/{WRITER}")
        named = {stack.name for stack in stacks}
        for name in self.child(data).names():
            if name not in named and os.path.isdir(self._path(data, name)):
                self.child(data).delete(name)

    # Durability -------------------------------------------------------------------------------------------

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        top = self._path(data, stack.name)
        folders = {top}
        for index in indices:
            folder = os.path.dirname(self._path(data, zarr.object_key(stack, index)))
            while len(folder) > len(top):
                folders.add(folder)
                folder = os.path.dirname(folder)
        # Concurrently, because a journal then commits them together.
        JoinedWork([submit(functools.partial(sync_path, folder)) for folder in sorted(folders)]).result()

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Includes the folders above, because any of them may be new."""
        for stack in stacks:
            sync_path(self._path(data, stack.name, "zarr.json"))
            sync_path(self._path(data, stack.name))
        sync_path(self._path(data))
        sync_path(self.folder)
        folder = os.path.dirname(self.folder)
        # Stops at the first folder that this process has no permission to open, because that folder must have existed.
        while os.access(folder, os.R_OK):
            try:
                sync_path(folder)
            except StorageError as error:  # the file system cannot sync folders
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                    raise
            if folder == os.path.dirname(folder):
                return
            folder = os.path.dirname(folder)

    # As a directory of checkpoints ------------------------------------------------------------------------

    def absolute(self) -> Self:
        return replace(self, url=self.folder)

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

    def is_file(self) -> bool:
        return os.path.isfile(self.folder)

    def is_link(self) -> bool:
        return os.path.islink(self.folder)

    def remove_link(self) -> None:
        """Delete this symbolic link, but not the folder that it leads to."""
        with translate_os_errors(f"cannot delete {self.url}"):
            os.unlink(self.folder)

    def names(self) -> list[str]:
        with self._translate_errors("list", ""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.folder))
        return []

    def files_below(self, name: str) -> list[str]:
        """The keys of all files below a folder; of those that can be listed."""
        found = ((path, names) for path, _, names in os.walk(self._path(name)))
        return [os.path.relpath(os.path.join(path, name), self.folder) for path, names in found for name in names]

    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bool | StorageError]:
        return {name: self._is_published(name) for name in filter(wanted, self.names())}

    def _is_published(self, name: str) -> bool | StorageError:
        note_progress()
        try:
            os.stat(self._path(name, MANIFEST))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            return StorageError(error.errno, f"cannot look at {self.url}/{name}/{MANIFEST}: {error.strerror}")
        return True

    def child(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}", folder=self._path(name))

    def with_url(self, url: str) -> Self:
        return replace(self, url=url)

    def create_child(self, name: str) -> Self:
        with self._translate_errors("create", name):
            os.makedirs(self._path(name), exist_ok=True)
        return self.child(name)

    def parent_and_name(self) -> tuple[Self, str] | None:
        folder, name = os.path.split(self.folder)
        return (replace(self, url=folder, folder=folder), name) if name else None

    def mark(self, name: str) -> None:
        pass

    def unmark(self, name: str) -> None:
        pass

    def rename(self, name: str, to: str) -> None:
        """Rename a folder below this one atomically. Does nothing if it does not exist."""
        with self._translate_errors("move", name), contextlib.suppress(FileNotFoundError):
            os.makedirs(os.path.dirname(self._path(to)), exist_ok=True)
            os.rename(self._path(name), self._path(to))

    def delete(self, name: str) -> None:
        remove_folder(self._path(name))

    # Inside -----------------------------------------------------------------------------------------------

    def _path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def _translate_errors(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return translate_os_errors(f"cannot {verb} {self.url}/{key}")


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def sync_path(path: str) -> None:
    """Make a file durable, or the names in a folder. Raises StorageError."""
    with translate_os_errors(f"cannot sync {path}"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            note_progress()
        finally:
            os.close(handle)


def _is_abandoned(path: str) -> bool:
    """Whether the writer of a data folder is known to be dead."""
    try:
        handle = os.open(os.path.join(path, WRITER), os.O_RDWR)  # NFS locks only files that are open for writing
    except FileNotFoundError:
        return True  # its checkpoint was published and then replaced, or its writer died before it created the note
    except OSError:
        return False
    try:
        note = os.read(handle, 4096)  # empty if the writer died before it wrote the note
        if note and parse_note(note).get("host") != socket.gethostname():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
