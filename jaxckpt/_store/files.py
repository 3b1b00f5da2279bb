"""Reads and writes objects as plain files with jaxckpt's own threads.

tensorstore's zarr3 driver is used for compressed chunks, on object stores, and with Options(io="tensorstore"). For
plain files it is slower, because a checksum costs it two copies through fresh memory: on tmpfs with 2 cores it takes
0.9 s of CPU to write 1 GiB and 0.7 s to read it. The file system alone takes 0.3 and 0.25 s, and this module 0.5 and
0.4 s. Each engine reads the other's files.

write:  object ─▶ new file ─▶ encoded by `codec` ─▶ writev ─▶ fsync
read:   boxes ─▶ objects ─▶ files, each with its index ─▶ preadv, as `codec` asks for it ─▶ decoded into the boxes
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.grid import Box, slices_within
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import JoinedWork, note_progress, submit
from jaxckpt._store.codec import ChunkTable, ObjectDecoder, Target, encode
from jaxckpt._store.storage_errors import retry_stale, translate_os_errors
from jaxckpt._store.store import MAX_FILE_BYTES, ArrayReader, ObjectRecord
from jaxckpt.errors import DataError, StorageError

MAX_BUFFERS = 1024  # largest number per system call: IOV_MAX of Linux and macOS


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Writes objects of a stack that is not compressed."""

    folder: str
    """The stack's folder, which has its zarr.json."""

    stack: Stack

    sync: bool
    """Whether an object must be on disk before it counts as written."""

    memory_factor: ClassVar[int] = 1
    """Counted as if pieces that are not contiguous were gathered at once. `codec` gathers 4 MiB at a time."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        return submit(functools.partial(self._write, index, pieces, content))

    def _write(self, index: tuple[int, ...], pieces: Pieces, content: bool) -> ObjectRecord:
        path = _path(self.folder, index)
        with translate_os_errors(f"cannot write {path}"):
            handle = retry_stale(_create_file, path, self.folder)
            try:
                written = encode(self.stack, index, pieces, functools.partial(write_all, handle), content=content)
                if self.sync:
                    os.fsync(handle)
                return written
            finally:
                os.close(handle)


@dataclass(frozen=True, slots=True)
class FileReader(ArrayReader):
    """Reads boxes of a stack that is not compressed."""

    shares_chunks: ClassVar[bool] = True
    serves_any_plan: ClassVar[bool] = True

    folder: str
    """The stack's folder, which has its zarr.json."""

    stack: Stack

    expected: Mapping[str, tuple[int, str]]
    """Length and digest of each object, by grid index."""

    path_problem: Callable[[str], str | None]
    """Returns a problem if the object at a grid index is not a regular file in real folders, because a link could lead
    anywhere."""

    chunk_tables: dict[tuple[int, ...], ChunkTable] = field(default_factory=dict[tuple[int, ...], ChunkTable])
    """The indexes of the objects that were opened."""

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        by_object: dict[tuple[int, ...], list[Target]] = {}
        touched: list[list[tuple[int, ...]]] = []
        for box, target in targets:
            touched.append([])
            for index, common, _ in indexed_objects_of(self.stack, box):
                by_object.setdefault(index, []).append((common, target[slices_within(common, box)]))
                touched[-1].append(index)
        work = {index: submit(functools.partial(self._read, index, boxes)) for index, boxes in by_object.items()}
        return [JoinedWork([work[index] for index in indices]) for indices in touched]

    def _read(self, index: tuple[int, ...], targets: Sequence[Target]) -> None:
        """Read the needed boxes of one object."""
        path = _path(self.folder, index)
        with translate_os_errors(f"cannot read {path}"):
            try:
                retry_stale(self._read_object, path, index, targets)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
                    raise DataError(f"{path} is missing") from error
                raise

    def _read_object(self, path: str, index: tuple[int, ...], targets: Sequence[Target]) -> None:
        problem = None if index in self.chunk_tables else self.path_problem(zarr.index_key(index))
        if problem:
            raise DataError(f"{path} {problem}")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            table, read = self._chunk_table(path, handle, index), functools.partial(read_into, path, handle)
            ObjectDecoder(self.stack, index, path, table, read).read(targets)
        finally:
            os.close(handle)

    def _chunk_table(self, path: str, handle: int, index: tuple[int, ...]) -> ChunkTable:
        """The index of an object; read once."""
        if (chunk_table := self.chunk_tables.get(index)) is not None:
            return chunk_table
        length, digest = self.expected[zarr.index_key(index)]
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file")
        if status.st_size != length and (size := current_size(handle)) != length:
            raise DataError(f"{path} is {size} bytes long, expected {length}")
        tail = np.empty(self.stack.index_bytes, np.uint8)
        read_into(path, handle, length - len(tail), [tail])
        # Two threads may have read it at the same time; both must note their checks in one object.
        return self.chunk_tables.setdefault(index, ChunkTable(path, self.stack, tail, length, digest))


def link(old: str, new: str, base_folder: str, length: int, *, sync: bool) -> None:
    """Give the file `old` of `length` bytes a second name, `new`. Creates missing folders below the folder
    `base_folder`.

    Raises StorageError, and creates nothing, if the file is missing or has another length (ENOENT), or if the file
    system refuses the link: across devices, for files of other users, or beyond its limit of links. With `sync` the
    file's data is made durable first. The folders are synced later, together with those of new files.
    """
    with translate_os_errors(f"cannot link {old} to {new}"):
        if sync:
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _link(old, new, base_folder)
        # Checked by its new name, because the old name may refer to another file by now.
        status = os.lstat(new)
        if not stat.S_ISREG(status.st_mode) or status.st_size != length:
            os.unlink(new)
            raise StorageError(errno.ENOENT, f"cannot link {old}: it is no longer a file of {length} bytes")


def _link(old: str, new: str, base_folder: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        make_folders(new, base_folder)
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:  # NFS may execute a call twice
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise


# System calls ---------------------------------------------------------------------------------------------


def _path(folder: str, index: tuple[int, ...]) -> str:
    return f"{folder}/c/{zarr.index_key(index)}"


def _create_file(path: str, folder: str) -> int:
    """Create a file, and the folders that it needs below `folder`."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        make_folders(path, folder)
        return os.open(path, flags, 0o666)


def make_folders(path: str, folder: str) -> None:
    """Create the folders of an object below its stack's `folder`. If that was deleted, the save fails."""
    above = [os.path.dirname(path)]
    while len(above[-1]) > len(folder) + 2:
        above.append(os.path.dirname(above[-1]))
    for missing in reversed(above):
        with contextlib.suppress(FileExistsError):
            os.mkdir(missing)


def write_all(handle: int, buffers: Sequence[Any]) -> None:
    """Append buffers to a file."""

    def write_next(rest: Sequence[Any]) -> int:
        count = os.writev(handle, rest)
        note_progress()
        return count

    _move_all(buffers, write_next)


def file_system_kinds(device: int) -> set[str]:
    """The kinds of the file systems that are mounted with this number (`st_dev`), such as "ext4" or "fuse.sshfs"; none
    if it is not known. Only on Linux."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split(" - ") for line in file]
    except OSError:
        return set()
    return {kind.split()[0] for mount, kind in mounts if mount.split()[2] == number}


def read_into(path: str, handle: int, start: int, buffers: Sequence[Any]) -> None:
    """Fill buffers with the content of a file from `start` on. Raises DataError if the file is too short."""

    def read_next(rest: Sequence[Any]) -> int:
        nonlocal start
        count = os.preadv(handle, rest, start)
        if not count:
            raise DataError(f"{path} was truncated while it was being read")
        note_progress()
        start += count
        return count

    _move_all(buffers, read_next)


def read_to_end(path: str, handle: int) -> bytes:
    """The content of a file. Raises DataError if it has more than MAX_FILE_BYTES.

    FUSE caches the size of a file that another host has replaced, and ends reads there. A read makes it ask for the
    size again, so the end is where a read returns nothing and the size after that agrees.
    """
    pieces, count, size, at_end = list[bytes](), 0, os.fstat(handle).st_size, False
    while True:
        if max(count, size) > MAX_FILE_BYTES:
            raise DataError(f"{path} is over {MAX_FILE_BYTES} bytes: jaxckpt writes no file this large")
        if piece := os.read(handle, max(size - count, 0) + 4096):
            pieces.append(piece)
            count += len(piece)
            at_end = False
            continue
        size = os.fstat(handle).st_size
        if at_end or size <= count:
            return b"".join(pieces)
        at_end = True


def current_size(handle: int) -> int:
    """The size of an open file. Reads a byte, because FUSE then asks for the size again instead of using its cache."""
    os.pread(handle, 1, 0)
    return os.fstat(handle).st_size


def _move_all(buffers: Sequence[Any], move_some: Callable[[Sequence[Any]], int]) -> None:
    """Call a system call, which may stop after any byte, until all buffers are written or filled."""
    for first in range(0, len(buffers), MAX_BUFFERS):
        rest: list[Any] = list(buffers[first : first + MAX_BUFFERS])
        left = sum(map(len, rest))
        while left:
            count = move_some(rest)
            left -= count
            if left:
                rest = _skip_bytes(rest, count)


def _skip_bytes(buffers: list[Any], count: int) -> list[Any]:
    """The buffers without their first `count` bytes."""
    for number, buffer in enumerate(buffers):
        size = len(buffer)
        if count < size:
            return [memoryview(buffer)[count:], *buffers[number + 1 :]]
        count -= size
    return []


# Deleting folders -----------------------------------------------------------------------------------------


def remove_folder(path: str, above: int | None = None) -> None:
    """Delete a folder with everything in it. Anything that cannot be deleted stays. `above` is the open folder that it
    is in, if not given by its path."""
    # Unlike shutil.rmtree, this continues after every error: ESTALE on NFS, where another host may delete the same
    # folder, or an error at close. Working in open folders keeps a link that replaces one from leading elsewhere.
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            with os.scandir(folder) as scan:
                entries = list(scan)
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        remove_folder(entry.name, folder)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
                require_not_stalled()
                note_progress()  # deleting many files may take long
        finally:
            close_unwritten(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path, dir_fd=above)


def close_unwritten(handle: int) -> None:
    """Close a handle that nothing needs to be written through. The system may report an error, but closes it in any
    case."""
    with contextlib.suppress(OSError):
        os.close(handle)


def remove_if_empty(path: str) -> None:
    """Delete a folder unless something is in it, for example because another process is writing there."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
