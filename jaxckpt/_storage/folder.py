"""A checkpoint on a file system.

Its control files go through the file system itself, where the order of writing, fsync and rename can be stated exactly;
arrays through `files`, or where they are compressed through tensorstore. Nothing but plain files, in plain folders
below the checkpoint's own, is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box
from jaxckpt._format.names import MANIFEST, WRITER, is_data, may_name, names_data
from jaxckpt._format.pieces import Pieces
from jaxckpt._format.stacks import Stack, indexed_objects_of
from jaxckpt._runtime.errors import CheckpointExistsError, DataError, StorageError
from jaxckpt._runtime.options import Options
from jaxckpt._storage.files import FileReader, FileWriter, read_into
from jaxckpt._storage.store import (
    MANIFEST_LIMIT_BYTES,
    ROOT_CONTEXT,
    Array,
    ArrayReader,
    ArrayWriter,
    Pending,
    Store,
    TensorReader,
    Writer,
    begin_write,
    open_spec,
    storage_errors,
)

_LOCK_SECONDS = 300.0
"""A sweep that holds it may have many files to delete."""


@cache
def _context(*, sync: bool) -> ts.Context:
    # No two processes write one object, so no lock is needed around it.
    return ts.Context({"file_io_sync": sync, "file_io_locking": {"mode": "none"}}, parent=ROOT_CONTEXT)


@dataclass(frozen=True, slots=True)
class Folder(Store):
    """The folder of one checkpoint on a file system."""

    folder: str
    """Its absolute path."""

    # Small files -----------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        try:
            with self._opened(key) as (handle, size):
                if size > MANIFEST_LIMIT_BYTES:
                    raise DataError(f"{self.url}/{key} is over {MANIFEST_LIMIT_BYTES} bytes: no such file of ours is")
                with open(handle, "rb", closefd=False) as file:
                    return file.read(size)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._refused("read", key, error) from error

    @contextlib.contextmanager
    def _opened(self, key: str) -> Generator[tuple[int, int]]:
        """(handle, size) of a plain file below. Raises DataError where it is something else, or not below."""
        _, odd = self._look(key, set())
        if odd:
            raise DataError(f"{self.url}/{key} {odd}")
        # Whoever puts a pipe there meanwhile shall not hold us up.
        handle = os.open(os.path.join(self.folder, key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield handle, os.fstat(handle).st_size
        finally:
            os.close(handle)

    def _look(self, key: str, plain: set[str]) -> tuple[int, str | None]:
        """(size of a file below, what is wrong where it is not a plain file in folders below).

        A link could lead anywhere, a pipe or a device never end. `plain` remembers folders that were looked at.
        """
        above = key.rpartition("/")[0]
        while above and above not in plain:
            mode = os.lstat(os.path.join(self.folder, above)).st_mode
            if not stat.S_ISDIR(mode):
                return 0, f"lies in {above}, which is {_kind(mode)}, expected a plain folder"
            plain.add(above)
            above = above.rpartition("/")[0]
        info = os.lstat(os.path.join(self.folder, key))
        return info.st_size, None if stat.S_ISREG(info.st_mode) else f"is {_kind(info.st_mode)}, expected a plain file"

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        try:
            self._write(key, content, sync=sync)
        except OSError as error:
            raise self._refused("write", key, error) from error

    def _write(self, key: str, content: bytes, *, sync: bool) -> None:
        with open(os.path.join(self.folder, key), "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.folder, key))

    def delete(self, name: str) -> None:
        shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refused("list", "", error) from error

    def child(self, name: str) -> Self:
        return type(self)(f"{self.url}/{name}", os.path.join(self.folder, name))

    def made(self, name: str) -> Self:
        child = self.child(name)
        try:
            os.makedirs(child.folder, exist_ok=True)
        except OSError as error:
            raise self._refused("create", name, error) from error
        return child

    def cut(self, ending: str) -> Self:
        return type(self)(self.url.removesuffix(ending), self.folder.removesuffix(ending))

    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bool]:
        names = filter(wanted, self.names())
        return {name: os.path.exists(os.path.join(self.folder, name, MANIFEST)) for name in names}

    def mark(self, name: str) -> None:
        pass

    def unmark(self, name: str) -> None:
        pass

    @property
    def sees_writers(self) -> bool:
        return True

    def is_file(self) -> bool:
        return os.path.isfile(self.folder)

    # A save's own folder ----------------------------------------------------------------------------------

    def begin(self, save_id: str, previous: bytes | None) -> Writer:
        """The note is locked for as long as the writer lives."""
        data = f"data-{save_id}"
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "save_id": save_id}).encode()
        for tries_left in reversed(range(100)):
            try:
                return Writer(self, data, self._begin(os.path.join(self.folder, data), note))
            except (FileNotFoundError, FileExistsError) as error:
                # Another process's `clear` may have taken the folder, still empty, for what a killed save left.
                if not tries_left:
                    raise self._refused("create", data, error) from error
            except OSError as error:
                raise self._refused("create", data, error) from error
        raise AssertionError

    def _begin(self, path: str, note: bytes) -> int:
        """Make a data folder with its writer's note, and lock that."""
        os.makedirs(self.folder, exist_ok=True)
        with self._locked(), contextlib.ExitStack() as undo:
            os.mkdir(path)
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            handle = os.open(os.path.join(path, WRITER), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
            undo.callback(os.close, handle)
            with contextlib.suppress(OSError):  # a file system without locks: then nothing is ever swept on it
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, note)
            undo.pop_all()
            return handle

    @contextlib.contextmanager
    def _locked(self) -> Generator[int]:
        """The checkpoint's own folder, open and locked: beginnings, sweeps and publications take turns."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(handle)
            yield handle
        finally:
            try:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open too
            except OSError:
                pass
            finally:
                os.close(handle)

    def _lock(self, handle: int) -> None:
        """Released when closed, and when this process dies; but one that is stopped keeps it."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StorageError(
                        errno.ETIMEDOUT,
                        f"another process has held the lock of {self.folder} for {_LOCK_SECONDS:g} s: is one stopped"
                        " there, amid a save or a deletion?",
                    ) from None
                time.sleep(0.005)
            except OSError:  # as above
                return

    def create_array(self, data: str, stack: Stack) -> None:
        try:
            os.makedirs(os.path.join(self.folder, data, stack.name), exist_ok=True)
        except OSError as error:
            raise self._refused("create", f"{data}/{stack.name}", error) from error
        super(Folder, self).create_array(data, stack)

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        try:
            with self._locked() as handle:
                if self.read(MANIFEST) != previous:
                    raise self.overtaken()
                # What was deleted while we slept may have come back with our later writes, but not this.
                if not names_data(previous, data) and not os.path.exists(os.path.join(self.folder, data, WRITER)):
                    raise StorageError(errno.ENOENT, f"{self.url}/{data} was deleted while it was being written")
                self._replace_manifest(data, manifest, sync=sync)
                try:
                    if sync:
                        os.fsync(handle)
                except OSError:
                    # In place, but perhaps not for ever: a save that raises must not have published.
                    with contextlib.suppress(OSError):
                        if previous is None:
                            os.unlink(os.path.join(self.folder, MANIFEST))
                        else:
                            self._replace_manifest(data, previous, sync=False)
                    raise
        except (CheckpointExistsError, StorageError):
            raise
        except OSError as error:
            raise self._refused("publish", MANIFEST, error) from error

    def _replace_manifest(self, data: str, content: bytes, *, sync: bool) -> None:
        # Written beside the data, then renamed into place: what a crash leaves goes with the data.
        self._write(f"{data}/{MANIFEST}", content, sync=sync)
        os.rename(os.path.join(self.folder, data, MANIFEST), os.path.join(self.folder, MANIFEST))

    def unpublish(self, *, sync: bool) -> None:
        try:
            with self._locked() as handle:
                os.unlink(os.path.join(self.folder, MANIFEST))
                if sync:  # else a power loss could bring it back, without its data
                    os.fsync(handle)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._refused("delete", MANIFEST, error) from error

    def give_up(self, data: str) -> None:
        self.delete(data)

    def sweep(self, current: str | None) -> bool:
        """A folder is left alone while its writer may live: while its lock is held, or where it was written on another
        host, whose locks may not show here."""
        left = False
        try:
            with self._locked():
                for name in self.names():
                    if not is_data(name) or name == current:
                        continue
                    path = os.path.join(self.folder, name)
                    # Named by the manifest is asked last: it may have been published since we listed it.
                    if _abandoned(path) and not may_name(self.read(MANIFEST), name):
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        left = True
        except StorageError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return False  # not there, or just taken away
        except OSError as error:
            raise self._refused("sweep", "", error) from error
        return left

    def clear(self) -> None:
        """What a live writer has is left."""
        self.sweep(None)
        with contextlib.suppress(OSError):  # not empty: somebody is writing in it
            os.rmdir(self.folder)

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """And a dead writer's note."""
        if _abandoned(os.path.join(self.folder, data)):
            self.remove(f"{data}/{WRITER}")
        named = {stack.name for stack in stacks}
        for name in self.child(data).names():
            if name not in named and os.path.isdir(os.path.join(self.folder, data, name)):
                self.child(data).delete(name)

    # Arrays -----------------------------------------------------------------------------------------------

    def array_writer(self, data: str, stack: Stack, options: Options) -> ArrayWriter:
        if stack.compression is None:
            return FileWriter(os.path.join(self.folder, data, stack.name), stack, options.sync)
        return _CompressedWriter(self, data, stack, self._opened_array(data, stack, sync=options.sync))

    def array_reader(self, data: str, stack: Stack, expected: Mapping[str, tuple[int, str]]) -> ArrayReader:
        if stack.compression is None:
            plain = set[str]()
            below = len(self.folder) + 1
            folder = os.path.join(self.folder, data, stack.name)
            return FileReader(folder, stack, expected, lambda path: self._look(path[below:], plain)[1])
        return _CompressedReader(self, data, stack, expected, TensorReader(self._opened_array(data, stack, sync=False)))

    def _opened_array(self, data: str, stack: Stack, *, sync: bool) -> ts.TensorStore:
        return open_spec({"driver": "file", "path": f"{self.folder}/{data}/{stack.name}/"}, stack, _context(sync=sync))

    def digest(self, key: str, stack: Stack) -> tuple[int, str]:
        """Length and digest of an object."""
        try:
            with self._opened(key) as (_, size), self.ranges(key) as read:
                return size, zarr.digest(read, stack, size)
        except FileNotFoundError as error:
            raise DataError(f"{self.url}/{key} is missing") from error
        except OSError as error:
            raise self._refused("read", key, error) from error

    def misfits(self, expected: Mapping[str, int]) -> dict[str, str]:
        plain = set[str]()
        found: dict[str, str] = {}
        for key, length in expected.items():
            try:
                size, odd = self._look(key, plain)
            except (FileNotFoundError, NotADirectoryError):
                size, odd = 0, "is missing"
            except OSError as error:
                raise self._refused("look at", key, error) from error
            if odd or size != length:
                found[key] = odd or f"is {size} bytes long, expected {length}"
        return found

    @contextlib.contextmanager
    def ranges(self, key: str) -> Generator[zarr.ReadRange]:
        buffer = np.empty(0, np.uint8)

        def read(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
            nonlocal buffer
            if len(buffer) < stop - start:
                buffer = np.empty(stop - start, np.uint8)  # used again: its first touch costs more than the read
            read_into(f"{self.url}/{key}", handle, start, [buffer[: stop - start]])
            return buffer[: stop - start]

        try:
            with self._opened(key) as (handle, _):
                yield read
        except OSError as error:
            raise self._refused("read", key, error) from error

    # Durability -------------------------------------------------------------------------------------------

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        top = os.path.join(self.folder, data, stack.name)
        folders = {top}
        for index in indices:
            folder = os.path.dirname(os.path.join(self.folder, data, zarr.object_key(stack, index)))
            while len(folder) > len(top):
                folders.add(folder)
                folder = os.path.dirname(folder)
        for folder in sorted(folders):
            self._fsync(folder)

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Any folder above may be new."""
        top = os.path.join(self.folder, data)
        for stack in stacks:
            self._fsync(os.path.join(top, stack.name, "zarr.json"))
            self._fsync(os.path.join(top, stack.name))
        self._fsync(top)
        self._fsync(self.folder)
        folder = os.path.dirname(self.folder)
        # Up to the first that we may not even open: it was there before us.
        while os.access(folder, os.R_OK):
            try:
                self._fsync(folder)
            except StorageError as error:
                if error.errno not in (
                    errno.EINVAL,
                    errno.ENOSYS,
                    errno.ENOTSUP,
                ):  # a file system that syncs no folders
                    raise
            if folder == os.path.dirname(folder):
                return
            folder = os.path.dirname(folder)

    def _fsync(self, path: str) -> None:
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, f"cannot sync {path}: {error.strerror or error}") from error

    def _refused(self, verb: str, key: str, error: OSError) -> StorageError:
        return StorageError(error.errno or errno.EIO, f"cannot {verb} {self.url}/{key}: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class _CompressedReader:
    """Has tensorstore read and decompress; that the objects are those that were saved is looked up before."""

    store: Folder
    data: str
    stack: Stack
    expected: Mapping[str, tuple[int, str]]
    array: TensorReader
    known: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        for box, _ in wanted:
            for index, _, _ in indexed_objects_of(self.stack, box):
                if index not in self.known:
                    self._require(index)
                    self.known.add(index)
        return self.array.read(wanted)

    def _require(self, index: tuple[int, ...]) -> None:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        length, digest = self.expected["/".join(map(str, index))]
        problem = self.store.misfits({key: length}).get(key)
        if not problem and self.store.digest(key, self.stack)[1] != digest:
            problem = "holds other data than was saved there"
        if problem:
            raise DataError(f"{self.store.url}/{key} {problem}")


@dataclass(frozen=True, slots=True)
class _CompressedWriter:
    """Has tensorstore compress and write objects."""

    store: Folder
    data: str
    stack: Stack
    array: ts.TensorStore

    def write(self, index: tuple[int, ...], pieces: Pieces) -> _Write:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        return _Write(self.store, self.stack, key, begin_write(self.array, pieces))


@dataclass(frozen=True, slots=True)
class _Write:
    """An object that is being written."""

    store: Folder
    stack: Stack
    key: str
    pending: Any

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> tuple[int, str]:
        with storage_errors("cannot write the checkpoint"):
            self.pending.result()
        return self.store.digest(self.key, self.stack)


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def _abandoned(path: str) -> bool:
    """Whether the writer of a data folder is surely gone."""
    try:
        handle = os.open(os.path.join(path, WRITER), os.O_RDWR)  # NFS locks only what is open for writing
    except FileNotFoundError:
        return True  # once published, and replaced since; or its writer died before it could say so
    except OSError:
        return False
    try:
        note = os.read(handle, 4096)
        if note and json.loads(note).get("host") != socket.gethostname():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return False
    finally:
        os.close(handle)
    return True
