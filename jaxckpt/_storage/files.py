"""Objects as plain files: encoded, checksummed, written and read by threads of our own, without a copy where it can be.

tensorstore's zarr3 driver would do all of this, and does where chunks are compressed or lie on an object store. But a
checksum costs it two copies through fresh memory: on tmpfs with 2 cores it takes 0.9 s of CPU to write 1 GiB and 0.7 s
to read it, where the file system alone takes 0.3 and 0.25, and this module 0.5 and 0.4 (docs/performance.md). The
files are such as it would write.

write:  object ─▶ blocks of chunks ─▶ where they lie, or gathered ─▶ crc32c of each chunk ─▶ writev ─▶ index ─▶ fsync
read:   box ─▶ objects ─▶ index ─▶ blocks of chunks ─▶ preadv to where they are wanted, or scattered ─▶ crc32c compared
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

import crc32c
import numpy as np

from jaxckpt._format import zarr
from jaxckpt._format.grid import Box, contains, extent, within
from jaxckpt._format.pieces import Array, Pieces, as_bits
from jaxckpt._format.stacks import Stack, indexed_objects_of
from jaxckpt._format.zarr import Bytes
from jaxckpt._runtime.errors import DataError, StorageError
from jaxckpt._runtime.threads import Task, ending, start_thread
from jaxckpt._storage.store import Pending

T = TypeVar("T")

BATCH_BYTES = 4 << 20
"""Bytes that are written or read in one system call, about, where they need not be gathered or scattered: while one is
under way other threads have their turn, and only between two must this one wait for its own."""

BUFFERS = 1024  # most of one system call: IOV_MAX of Linux and macOS


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Writes objects of a stack that is not compressed."""

    folder: str
    """Where its zarr.json lies."""

    stack: Stack

    sync: bool
    """Whether an object reaches the disk before it counts as written."""

    def write(self, index: tuple[int, ...], pieces: Pieces) -> Pending:
        return submit(lambda: self._write(index, pieces))

    def _write(self, index: tuple[int, ...], pieces: Pieces) -> tuple[int, str]:
        path = _path(self.folder, index)
        try:
            handle = _created(path, self.folder)
            try:
                written = self._encode(handle, index, pieces)
                if self.sync:
                    os.fsync(handle)
                return written
            finally:
                os.close(handle)
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, f"cannot write {path}: {error.strerror or error}") from error

    def _encode(self, handle: int, index: tuple[int, ...], pieces: Pieces) -> tuple[int, str]:
        """Write an object; returns its length and digest."""
        stack = self.stack
        size = stack.chunk_stored_bytes
        entries = np.full((stack.chunks_per_object, 2), zarr.ABSENT, "<u8")
        sums = np.zeros(stack.chunks_per_object, "<u4")
        scratch = np.empty(0, np.uint8)
        length = 0
        waiting = _Waiting(handle)
        for block in zarr.blocks(stack, index, pieces.box):
            data = pieces.in_place(block.box)
            if data is None:
                waiting.write()  # what is in the scratch
                if not len(scratch):
                    scratch = np.empty(block.chunks * (size - 4), np.uint8)
                data = pieces.gathered(block.box, scratch)
            chunks = _rows(data, block.chunks)
            numbers = slice(block.first, block.first + block.chunks)
            sums[numbers] = _checksums(chunks)
            entries[numbers, 0] = np.arange(length, length + block.chunks * size, size)
            entries[numbers, 1] = size
            waiting.add(_interleaved(chunks, sums[numbers]), block.chunks * size)
            length += block.chunks * size
        tail = entries.tobytes()
        waiting.add([tail, crc32c.crc32c(tail).to_bytes(4, "little")], stack.index_bytes)
        waiting.write()
        return length + stack.index_bytes, zarr.digest_of(sums[entries[:, 0] != zarr.ABSENT])


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads boxes of a stack that is not compressed."""

    folder: str
    """Where its zarr.json lies."""

    stack: Stack

    expected: Mapping[str, tuple[int, str]]
    """Length and digest of each object, by its place in the grid."""

    oddity: Callable[[str], str | None]
    """What is wrong with a path that is no plain file in plain folders; a link could lead anywhere. Raises OSError."""

    indices: dict[tuple[int, ...], _Index] = field(default_factory=dict[tuple[int, ...], "_Index"])
    """Of the objects that were opened."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        parts: dict[tuple[int, ...], list[_Part]] = {}
        touched: list[list[tuple[int, ...]]] = []
        for box, target in wanted:
            touched.append([])
            for index, part, _ in indexed_objects_of(self.stack, box):
                parts.setdefault(index, []).append((part, target[within(part, box)]))
                touched[-1].append(index)
        work = {index: submit(functools.partial(self._read, index, found)) for index, found in parts.items()}
        return [All([work[index] for index in indices]) for indices in touched]

    def _read(self, index: tuple[int, ...], parts: Sequence[_Part]) -> None:
        """Read what is wanted of one object."""
        path = _path(self.folder, index)
        try:
            odd = None if index in self.indices else self.oddity(path)
            if odd:
                raise DataError(f"{path} {odd}")
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self._decode(path, handle, index, parts)
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise DataError(f"{path} is missing") from error
            raise StorageError(error.errno or errno.EIO, f"cannot read {path}: {error.strerror or error}") from error

    def _decode(self, path: str, handle: int, index: tuple[int, ...], parts: Sequence[_Part]) -> None:
        """In the order of the file. What is wanted where it lies in memory as in the file is read to there, much of it
        at once; else a block is read aside, and copied while it is still in the core's cache."""
        stack = self.stack
        size = stack.chunk_stored_bytes
        found = self._index(path, handle, index)
        wanted = [(block, *part) for part in parts for block in zarr.blocks(stack, index, part[0])]
        wanted.sort(key=lambda one: one[0].first)
        scratch = np.empty(0, np.uint8)
        first, chunks = 0, list[Any]()  # that wait to be read in place
        for block, part, target in wanted:
            place = _place(block, part, target)
            if chunks and (place is None or first + len(chunks) != block.first or len(chunks) * size >= BATCH_BYTES):
                self._fill(path, handle, index, found, first, chunks)
                chunks = []
            if place is not None:
                first = first if chunks else block.first
                chunks += _rows(place, block.chunks)
                continue
            if not len(scratch):
                scratch = np.empty(max(block.chunks for block, _, _ in wanted) * (size - 4), np.uint8)
            data = scratch[: block.chunks * (size - 4)]
            self._fill(path, handle, index, found, block.first, _rows(data, block.chunks))
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block.box, part, strict=True))
            held = as_bits(data.view(target.dtype)).reshape(extent(block.box))
            np.copyto(as_bits(target)[within(common, part)], held[within(common, block.box)])
        if chunks:
            self._fill(path, handle, index, found, first, chunks)

    def _fill(
        self, path: str, handle: int, index: tuple[int, ...], found: _Index, first: int, chunks: Sequence[Any]
    ) -> None:
        """Read chunks, the first of which has this number, and check them."""
        sums = np.empty(len(chunks), "<u4")
        for start, begun, end in found.runs(path, first, len(chunks)):
            read_into(path, handle, start, _interleaved(chunks[begun:end], sums[begun:end]))
        damaged = np.flatnonzero(np.array(_checksums(chunks), "<u4") != sums)
        if len(damaged):
            box = zarr.chunk_box(self.stack, index, first + int(damaged[0]))
            raise DataError(f"{path} has a damaged chunk ({box} of the stack): its crc32c does not match")
        if self.stack.dtype == "bool" and any(np.max(chunk) > 1 for chunk in chunks):
            raise DataError(f"{path} has values that are neither true nor false")
        found.note(path, first, sums)

    def _index(self, path: str, handle: int, index: tuple[int, ...]) -> _Index:
        """The index of an object; read once."""
        with self.lock:
            found = self.indices.get(index)
        if found is not None:
            return found
        length, digest = self.expected["/".join(map(str, index))]
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is no plain file")
        if status.st_size != length:
            raise DataError(f"{path} is {status.st_size} bytes long, expected {length}")
        tail = np.empty(self.stack.index_bytes, np.uint8)
        read_into(path, handle, length - len(tail), [tail])
        if crc32c.crc32c(tail[:-4].data) != int(tail[-4:].view("<u4")[0]):
            raise DataError(f"{path} has a damaged index: its crc32c does not match")
        entries = tail[:-4].view("<u8").reshape(-1, 2)
        if not zarr.inside(entries[entries[:, 0] != zarr.ABSENT], length - len(tail)):
            raise DataError(f"{path} has an index that points outside of it")
        made = _Index(path, entries, self.stack.chunk_stored_bytes, digest)
        with self.lock:  # of two that read it at once, one is kept: what they note must come together
            return self.indices.setdefault(index, made)


class _Index:
    """What lies where in an object, and the checksums of its chunks as far as they were read."""

    def __init__(self, path: str, entries: np.ndarray[Any, np.dtype[np.uint64]], size: int, digest: str) -> None:
        self._present = entries[:, 0] != zarr.ABSENT
        if (entries[self._present, 1] != size).any():
            raise DataError(f"{path} has a chunk of another size than {size} bytes")
        self._size = size
        self._starts = entries[:, 0].astype(np.int64)  # those that point into the file
        self._all_in_order = bool(self._present.all() and (np.diff(self._starts) == size).all())
        self._digest = digest
        self._sums = np.zeros(len(entries), "<u4")
        self._unread = self._present.copy()
        self._lock = threading.Lock()

    def runs(self, path: str, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(offset, first, last) of those of some chunks that lie one after the other in the file."""
        if self._all_in_order:
            yield int(self._starts[first]), 0, count
            return
        if not self._present[first : first + count].all():
            raise DataError(f"{path} lacks a chunk")
        starts = self._starts[first : first + count]
        cuts = [0, *(np.flatnonzero(np.diff(starts) != self._size) + 1).tolist(), count]
        for begun, end in itertools.pairwise(cuts):
            yield int(starts[begun]), begun, end

    def note(self, path: str, first: int, sums: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Chunks were read. Once all are, the object's digest tells that they are those that were saved here."""
        numbers = slice(first, first + len(sums))
        with self._lock:
            self._sums[numbers] = sums
            self._unread[numbers] = False
            complete = not self._unread.any()
        if complete and zarr.digest_of(self._sums[self._present]) != self._digest:
            raise DataError(f"{path} holds other data than was saved there")


_Part = tuple[Box, Array]
"""What is wanted of an object, and where."""


def _place(block: zarr.Block, part: Box, target: Array) -> Bytes | None:
    """Where the bytes of a block are wanted, if they are all wanted, in one piece."""
    if not contains(part, block.box):
        return None
    place = target[within(block.box, part)]
    return place.reshape(-1).view(np.uint8) if place.flags.c_contiguous else None


# System calls ---------------------------------------------------------------------------------------------


def _path(folder: str, index: tuple[int, ...]) -> str:
    return f"{folder}/c/{'/'.join(map(str, index))}"


def _created(path: str, folder: str) -> int:
    """A new file, and the folders that it needs below `folder`, which must be there: its deletion ends the save."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        above = [os.path.dirname(path)]
        while len(above[-1]) > len(folder) + 2:
            above.append(os.path.dirname(above[-1]))
        for missing in reversed(above):
            try:
                os.mkdir(missing)
            except FileExistsError:
                continue
        return os.open(path, flags, 0o666)


def _rows(data: Bytes, count: int) -> list[Any]:
    """The chunks of a block."""
    return [data] if count == 1 else list(data.reshape(count, -1))


def _interleaved(chunks: Sequence[Any], sums: np.ndarray[Any, np.dtype[np.uint32]]) -> list[Any]:
    """Buffers as they follow in the file: each chunk and its checksum."""
    buffers: list[Any] = [None] * (2 * len(chunks))
    buffers[0::2] = chunks
    buffers[1::2] = sums.view(np.uint8).reshape(-1, 4)
    return buffers


class _Waiting:
    """Buffers that will be written together."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._buffers: list[Any] = []
        self._bytes = 0

    def add(self, buffers: list[Any], n_bytes: int) -> None:
        self._buffers += buffers
        self._bytes += n_bytes
        if self._bytes >= BATCH_BYTES:
            self.write()

    def write(self) -> None:
        _write_all(self._handle, self._buffers)
        self._buffers, self._bytes = [], 0


def _checksums(chunks: Sequence[Any]) -> list[int]:
    """Crc32c of each chunk, without a chance for other threads where one takes no longer than 40 µs: to get its turn
    back may take Python's switch interval, 5 ms, where another thread is busy in Python."""
    release = 0 if len(chunks[0]) <= 1 << 20 else 1
    return [crc32c.crc32c(chunk, 0, release) for chunk in chunks]


def _write_all(handle: int, buffers: Sequence[Any]) -> None:
    for first in range(0, len(buffers), BUFFERS):
        rest = list(buffers[first : first + BUFFERS])
        count = os.writev(handle, rest)
        while rest := _after(rest, count):
            count = os.writev(handle, rest)


def read_into(path: str, handle: int, start: int, buffers: Sequence[Any]) -> None:
    """Fill buffers with what lies in a file from `start` on. Raises DataError where it ends before."""
    for first in range(0, len(buffers), BUFFERS):
        rest: list[Any] = list(buffers[first : first + BUFFERS])
        while rest:
            count = os.preadv(handle, rest, start)
            if not count:
                raise DataError(f"{path} was cut while it was read")
            start += count
            rest = _after(rest, count)


def _after(buffers: list[Any], count: int) -> list[Any]:
    """What is left of buffers after so many bytes of them: a system call may stop anywhere."""
    for number, buffer in enumerate(buffers):
        size = len(buffer)
        if count < size:
            return [memoryview(buffer)[count:], *buffers[number + 1 :]]
        count -= size
    return []


# Threads --------------------------------------------------------------------------------------------------


class Workers:
    """Threads that move bytes. Unlike those of a ThreadPoolExecutor they still do while the interpreter ends, when a
    save_async is seen to its end."""

    def __init__(self) -> None:
        self._todo = SimpleQueue[Task[Any]]()
        self._lock = threading.Lock()
        self._started = False

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                # More than there are cores only take each other's turns: 4 on 2 cores made a restore 5 to 8 % slower.
                for number in range(min(32, max(2, os.cpu_count() or 1))):
                    start_thread(self._run, f"jaxckpt-files-{number}")
                self._started = True

    def submit(self, work: Callable[[], T]) -> Task[T]:
        task = Task(work)
        try:
            if not self._started:
                self._start()
        except RuntimeError:
            if not ending():
                raise
            task.run()  # Python 3.12 starts no thread any more
        else:
            self._todo.put(task)
        return task

    def _run(self) -> None:
        while True:
            task = self._todo.get()
            task.run()
            del task  # it holds the data


_workers = Workers()


def renew_workers() -> None:
    """Leave the threads as they are and start others with the next work: in a fork, or when these hang."""
    global _workers
    _workers = Workers()


os.register_at_fork(after_in_child=renew_workers)


def submit(work: Callable[[], T]) -> Task[T]:
    """Have a piece of work done by the threads that move bytes; it must not wait for another such piece."""
    return _workers.submit(work)


@dataclass(frozen=True, slots=True)
class All:
    """Several pieces of work as one."""

    parts: Sequence[Any]
    """Tasks, futures of another library, or others of this kind."""

    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def result(self) -> None:
        """Raises what the first of them raised, once none is under way: they write into the caller's memory."""
        error = None
        for part in self.parts:
            try:
                part.result()
            except Exception as found:
                error = error or found
        if error is not None:
            raise error
