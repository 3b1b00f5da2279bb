"""A checkpoint on a file system: claimed with locks, published by rename.

Its control files go through the file system itself, where the order of writing, fsync and rename can be stated exactly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Self

from jaxckpt._format import zarr
from jaxckpt._format.names import MANIFEST, WRITER, is_data, may_name, names_data
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import StorageError
from jaxckpt._storage.claims import overtaken
from jaxckpt._storage.errors import system_errors
from jaxckpt._storage.folder_objects import FolderObjects
from jaxckpt._storage.store import Writer

_LOCK_SECONDS = 300.0
"""A sweep that holds it may have many files to delete."""


@dataclass(frozen=True, slots=True)
class Folder(FolderObjects):
    """The folder of one checkpoint on a file system."""

    # Claim and publish ------------------------------------------------------------------------------------

    def begin(self, save_id: str, previous: bytes | None) -> Writer:
        """The note is locked for as long as the writer lives."""
        data = f"data-{save_id}"
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "save_id": save_id}).encode()
        with self._refused("create", data):
            for tries_left in reversed(range(100)):
                try:
                    return Writer(self, data, self._begin(self._path(data), note))
                except (FileNotFoundError, FileExistsError):
                    # Another process's `clear` may have taken the folder, still empty, for what a killed save left.
                    if not tries_left:
                        raise
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
        """Released when closed, and when this process dies; but a stopped process keeps it."""
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
        with self._refused("create", f"{data}/{stack.name}"):
            os.makedirs(self._path(data, stack.name), exist_ok=True)
        self.put(f"{data}/{stack.name}/zarr.json", zarr.metadata(stack))

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        with self._refused("publish", MANIFEST), self._locked() as handle:
            if self.read(MANIFEST) != previous:
                raise overtaken(self.url)
            # What was deleted while we slept may have come back with our later writes, but not this.
            if not names_data(previous, data) and not os.path.exists(self._path(data, WRITER)):
                raise StorageError(errno.ENOENT, f"{self.url}/{data} was deleted while it was being written")
            self._replace_manifest(data, manifest, sync=sync)
            try:
                if sync:
                    os.fsync(handle)
            except OSError:
                # In place, but perhaps not for ever: a save that raises must not have published.
                with contextlib.suppress(OSError):
                    if previous is None:
                        os.unlink(self._path(MANIFEST))
                    else:
                        self._replace_manifest(data, previous, sync=False)
                raise

    def _replace_manifest(self, data: str, content: bytes, *, sync: bool) -> None:
        # Written in the data folder, then renamed into place: what a crash leaves goes with the data.
        self.put(f"{data}/{MANIFEST}", content, sync=sync)
        os.rename(self._path(data, MANIFEST), self._path(MANIFEST))

    def unpublish(self, *, sync: bool) -> None:
        with self._refused("delete", MANIFEST), contextlib.suppress(FileNotFoundError), self._locked() as handle:
            os.unlink(self._path(MANIFEST))
            if sync:  # else a power loss could bring it back, without its data
                os.fsync(handle)

    def give_up(self, data: str) -> None:
        self.delete(data)

    def sweep(self, current: str | None) -> bool:
        """A folder is left alone while its writer may live: while its lock is held, or if it was written on another
        host, whose locks may not show here."""
        left = False
        # If the checkpoint's folder does not exist, or has just been deleted, nothing is left.
        gone = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with self._refused("sweep", ""), gone, self._locked():
            for name in self.names():
                if not is_data(name) or name == current:
                    continue
                path = self._path(name)
                # Named by the manifest is asked last: it may have been published since we listed it.
                if _abandoned(path) and not may_name(self.read(MANIFEST), name):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    left = True
        return left

    def clear(self, *, evict: bool = True) -> None:
        """What a live writer has is left: its lock shows that it lives."""
        self.sweep(None)
        with contextlib.suppress(OSError):  # not empty: another process is writing in it
            os.rmdir(self.folder)

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """And a dead writer's note."""
        if _abandoned(self._path(data)):
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
        for folder in sorted(folders):
            sync_path(folder)

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Any folder above may be new."""
        for stack in stacks:
            sync_path(self._path(data, stack.name, "zarr.json"))
            sync_path(self._path(data, stack.name))
        sync_path(self._path(data))
        sync_path(self.folder)
        folder = os.path.dirname(self.folder)
        # Up to the first that we may not even open: it was there before us.
        while os.access(folder, os.R_OK):
            try:
                sync_path(folder)
            except StorageError as error:  # a file system that syncs no folders
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
                    raise
            if folder == os.path.dirname(folder):
                return
            folder = os.path.dirname(folder)

    # The directory that it is -----------------------------------------------------------------------------

    def anchored(self) -> Self:
        return replace(self, url=self.folder)

    def is_file(self) -> bool:
        return os.path.isfile(self.folder)

    def names(self) -> list[str]:
        with self._refused("list", ""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.folder))
        return []

    def folders(self) -> dict[str, bool]:
        return {name: os.path.exists(self._path(name, MANIFEST)) for name in self.names()}

    def child(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}", folder=self._path(name))

    def above(self) -> tuple[Self, str] | None:
        folder, name = os.path.split(self.folder)
        return (replace(self, url=folder, folder=folder), name) if name else None

    def mark(self, name: str) -> None:
        pass

    def unmark(self, name: str) -> None:
        pass

    def delete(self, name: str) -> None:
        shutil.rmtree(self._path(name), ignore_errors=True)


def sync_path(path: str) -> None:
    """Make a file durable, or the names in a folder. Raises StorageError."""
    with system_errors(f"cannot sync {path}"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
