"""The bytes of a checkpoint on a file system.

Nothing is read but plain files in plain folders below the checkpoint's own. Arrays go through `files`, and through
tensorstore if they are compressed or `Options.io` says so.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import tensorstore as ts

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box
from jaxckpt._format.pieces import Array, Pieces
from jaxckpt._format.stacks import Stack, indexed_objects_of
from jaxckpt._runtime.errors import DataError
from jaxckpt._storage.errors import storage_errors, system_errors
from jaxckpt._storage.files import FileReader, FileWriter, read_into
from jaxckpt._storage.objects import MOST_BYTES, ArrayReader, ArrayWriter, Pending
from jaxckpt._storage.tensors import ROOT_CONTEXT, TensorReader, begin_write, open_array


@cache
def _context(*, sync: bool) -> ts.Context:
    # No two processes write one object, so no lock is needed around it.
    return ts.Context({"file_io_sync": sync, "file_io_locking": {"mode": "none"}}, parent=ROOT_CONTEXT)


@dataclass(frozen=True, slots=True)
class FolderObjects:
    """The files below one folder."""

    url: str

    folder: str
    """Its absolute path."""

    io: Literal["auto", "tensorstore"] = "auto"
    """See `Options.io`."""

    # Small files -----------------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        with self._refused("read", key):
            try:
                with self._opened(key) as (handle, size), open(handle, "rb", closefd=False) as file:
                    if size > MOST_BYTES:
                        raise DataError(f"{self.url}/{key} is over {MOST_BYTES} bytes: no such file of ours is")
                    return file.read(size)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        return [self.read(key) for key in keys]

    @contextlib.contextmanager
    def _opened(self, key: str) -> Generator[tuple[int, int]]:
        """(handle, size) of a plain file below. Raises DataError if it is something else, or not below."""
        _, odd = self._look(key, set())
        if odd:
            raise DataError(f"{self.url}/{key} {odd}")
        # O_NONBLOCK: a pipe that has just taken its place must not block.
        handle = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            yield handle, os.fstat(handle).st_size
        finally:
            os.close(handle)

    def _look(self, key: str, plain: set[str]) -> tuple[int, str | None]:
        """(size of a file below, what is wrong unless it is a plain file in folders below).

        A link could lead anywhere, a pipe or a device never end. `plain` remembers folders that were looked at.
        """
        above = key.rpartition("/")[0]
        while above and above not in plain:
            mode = os.lstat(self._path(above)).st_mode
            if not stat.S_ISDIR(mode):
                return 0, f"lies in {above}, which is {_kind(mode)}, expected a plain folder"
            plain.add(above)
            above = above.rpartition("/")[0]
        info = os.lstat(self._path(key))
        return info.st_size, None if stat.S_ISREG(info.st_mode) else f"is {_kind(info.st_mode)}, expected a plain file"

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        with self._refused("write", key), open(self._path(key), "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    # Arrays -----------------------------------------------------------------------------------------------

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        if self._own_files(stack):
            return FileWriter(self._path(data, stack.name), stack, sync)
        return _TensorFileWriter(self, data, stack, self._open_array(data, stack, sync=sync))

    def array_reader(
        self,
        data: str,
        stack: Stack,
        stored: Mapping[str, tuple[int, str]],
        plan: Iterable[Sequence[Box]] = (),
        most_bytes: int = 0,
    ) -> ArrayReader:
        if self._own_files(stack):
            plain = set[str]()
            below = len(self._path(""))
            folder = self._path(data, stack.name)
            return FileReader(folder, stack, stored, lambda path: self._look(path[below:], plain)[1])
        return _TensorFileReader(self, data, stack, stored, TensorReader(self._open_array(data, stack, sync=False)))

    def _own_files(self, stack: Stack) -> bool:
        return self.io == "auto" and stack.compression is None

    def _open_array(self, data: str, stack: Stack, *, sync: bool) -> ts.TensorStore:
        return open_array({"driver": "file", "path": self._path(data, stack.name, "")}, stack, _context(sync=sync))

    # Objects as bytes -------------------------------------------------------------------------------------

    def digest(self, key: str, stack: Stack) -> tuple[int, str]:
        """Length and digest of an object."""
        with self._refused("read", key):
            try:
                with self._opened(key) as (_, size), self.ranges(key) as read:
                    return size, zarr.digest(read, stack, size)
            except FileNotFoundError as error:
                raise DataError(f"{self.url}/{key} is missing") from error

    def misfits(self, lengths: Mapping[str, int]) -> dict[str, str]:
        plain = set[str]()
        found: dict[str, str] = {}
        for key, length in lengths.items():
            with self._refused("look at", key):
                try:
                    size, odd = self._look(key, plain)
                except (FileNotFoundError, NotADirectoryError):
                    size, odd = 0, "is missing"
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

        with self._refused("read", key), self._opened(key) as (handle, _):
            yield read

    # Inside -----------------------------------------------------------------------------------------------

    def _path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def _refused(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return system_errors(f"cannot {verb} {self.url}/{key}")


@dataclass(frozen=True, slots=True)
class _TensorFileReader(ArrayReader):
    """Has tensorstore read and decode objects, which are first compared with those that were saved."""

    files: FolderObjects
    data: str
    stack: Stack
    stored: Mapping[str, tuple[int, str]]
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
        length, digest = self.stored["/".join(map(str, index))]
        problem = self.files.misfits({key: length}).get(key)
        if not problem and self.files.digest(key, self.stack)[1] != digest:
            problem = "holds other data than was saved there"
        if problem:
            raise DataError(f"{self.files.url}/{key} {problem}")


@dataclass(frozen=True, slots=True)
class _TensorFileWriter:
    """Has tensorstore encode and write objects."""

    files: FolderObjects
    data: str
    stack: Stack
    array: ts.TensorStore

    def write(self, index: tuple[int, ...], pieces: Pieces) -> Pending:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        return _Write(self.files, self.stack, key, begin_write(self.array, pieces))


@dataclass(frozen=True, slots=True)
class _Write:
    """An object that is being written."""

    files: FolderObjects
    stack: Stack
    key: str
    pending: Any

    def done(self) -> bool:
        return self.pending.done()

    def result(self) -> tuple[int, str]:
        with storage_errors(f"cannot write {self.files.url}/{self.key}"):
            self.pending.result()
        return self.files.digest(self.key, self.stack)


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
