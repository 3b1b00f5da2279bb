"""Reads and writes objects as plain files with jaxckpt's own threads, including checksums, without a copy if possible.

tensorstore's zarr3 driver is used for compressed chunks, on object stores, and with Options(io="tensorstore"). For
plain files it is slower, because a checksum costs it two copies through fresh memory: on tmpfs with 2 cores it takes
0.9 s of CPU to write 1 GiB and 0.7 s to read it. The file system alone takes 0.3 and 0.25 s, and this module 0.5 and
0.4 s (docs/performance.md). Each engine reads the other's files.

write:  object ─▶ runs of chunks, in place or gathered ─▶ crc32c of each chunk ─▶ writev ─▶ index ─▶ fsync
read:   box ─▶ objects ─▶ index ─▶ runs of chunks ─▶ preadv to their destination, or to a buffer ─▶ crc32c compared
                                                                       copied from the buffer to the boxes ◀─┘
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import crc32c
import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.chunks import chunk_digest, chunks_of, combined_digest, contiguous_bytes, scatter
from jaxckpt._model.grid import Box, box_at, hull, show_box, slices_within, touched_cells, volume
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._model.zarr import Bytes, Chunks
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import THREADS, JoinedWork, note_progress, submit
from jaxckpt._store.arrays import ArrayReader, ObjectRecord
from jaxckpt._store.storage_errors import retry_stale, translate_os_errors
from jaxckpt._store.store import MAX_FILE_BYTES
from jaxckpt.errors import DataError

BATCH_BYTES = 4 << 20
READ_BYTES = 16 << 20
"""Approximate bytes per system call that writes, or that reads into the destination. A thread releases the GIL for a
system call and then waits to get it back, so few calls are better than many."""

BLOCK_BYTES = max(2 << 20, min(8 << 20, (32 << 20) // THREADS))
"""Bytes of chunks that a thread reads together to copy them from there: of all threads 32 MiB, which the cores' shared
cache may hold, but between 2 and 8 MiB. With smaller blocks, the threads wait more often for Python's lock; on 2 cores,
8 MiB restore 7 to 15 % faster than 2 MiB, and 16 MiB are no faster."""

MAX_BUFFERS = 1024  # largest number per system call: IOV_MAX of Linux and macOS


T = TypeVar("T")

Sums = np.ndarray[Any, np.dtype[np.uint32]]
"""Checksums of chunks."""


@dataclass(frozen=True, slots=True)
class FileWriter:
    """Writes objects of a stack that is not compressed."""

    folder: str
    """The stack's folder, which has its zarr.json."""

    stack: Stack

    sync: bool
    """Whether an object must be on disk before it counts as written."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        return submit(lambda: self._write(index, pieces, content))

    def _write(self, index: tuple[int, ...], pieces: Pieces, content: bool) -> ObjectRecord:
        path = _path(self.folder, index)
        with translate_os_errors(f"cannot write {path}"):
            handle = retry_stale(_create_file, path, self.folder)
            try:
                written = self._encode(handle, index, pieces, content)
                if self.sync:
                    os.fsync(handle)
                return written
            finally:
                os.close(handle)

    def _encode(self, handle: int, index: tuple[int, ...], pieces: Pieces, content: bool) -> ObjectRecord:
        """Write an object; with `content`, also compute the digest of its content."""
        stack = self.stack
        size = stack.chunk_stored_bytes
        out = _Output(handle, size, content)
        for numbers, data in chunks_of(stack, index, pieces, out.write):
            out.add(numbers, data)
        entries = np.full((stack.chunks_per_object, 2), zarr.ABSENT, "<u8")
        entries[out.numbers, 0] = np.arange(len(out.numbers)) * size
        entries[out.numbers, 1] = size
        tail = entries.tobytes()
        out.buffers += [tail, crc32c.crc32c(tail).to_bytes(4, "little")]
        out.write()
        in_order = np.array(out.sums, "<u4")[np.argsort(out.numbers)]
        compared = combined_digest(zip(out.numbers, out.contents, strict=True)) if content else ""
        return ObjectRecord(len(out.numbers) * size + stack.index_bytes, zarr.digest_of(in_order), compared)


@dataclass(frozen=True, slots=True)
class FileReader(ArrayReader):
    """Reads boxes of a stack that is not compressed, from the stack's `folder`."""

    shares_chunks: ClassVar[bool] = True

    folder: str
    """The stack's folder, which has its zarr.json."""

    stack: Stack

    expected: Mapping[str, tuple[int, str]]
    """Length and digest of each object, by grid index."""

    path_problem: Callable[[str], str | None]
    """Returns a problem if a path is not a regular file in real folders, because a link could lead anywhere."""

    chunk_indexes: dict[tuple[int, ...], _ChunkIndex] = field(default_factory=dict[tuple[int, ...], "_ChunkIndex"])
    """The indexes of the objects that were opened."""

    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        by_object: dict[tuple[int, ...], list[_Wanted]] = {}
        touched: list[list[tuple[int, ...]]] = []
        for box, target in wanted:
            touched.append([])
            for index, common, _ in indexed_objects_of(self.stack, box):
                by_object.setdefault(index, []).append((common, target[slices_within(common, box)]))
                touched[-1].append(index)
        work = {index: submit(functools.partial(self._read, index, boxes)) for index, boxes in by_object.items()}
        return [JoinedWork([work[index] for index in indices]) for indices in touched]

    def _read(self, index: tuple[int, ...], wanted: Sequence[_Wanted]) -> None:
        """Read the needed boxes of one object."""
        path = _path(self.folder, index)
        with translate_os_errors(f"cannot read {path}"):
            try:
                retry_stale(self._read_object, path, index, wanted)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
                    raise DataError(f"{path} is missing") from error
                raise

    def _read_object(self, path: str, index: tuple[int, ...], wanted: Sequence[_Wanted]) -> None:
        odd = None if index in self.chunk_indexes else self.path_problem(path)
        if odd:
            raise DataError(f"{path} {odd}")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _OpenObject(self.stack, index, path, handle, self._chunk_index(path, handle, index)).read(wanted)
        finally:
            os.close(handle)

    def _chunk_index(self, path: str, handle: int, index: tuple[int, ...]) -> _ChunkIndex:
        """The index of an object; read once."""
        with self.lock:
            found = self.chunk_indexes.get(index)
        if found is not None:
            return found
        length, digest = self.expected["/".join(map(str, index))]
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file")
        if status.st_size != length and (size := current_size(handle)) != length:
            raise DataError(f"{path} is {size} bytes long, expected {length}")
        tail = np.empty(self.stack.index_bytes, np.uint8)
        read_into(path, handle, length - len(tail), [tail])
        entries = zarr.parse_index(tail, length - len(tail))
        if isinstance(entries, str):
            raise DataError(f"{path} {entries}")
        made = _ChunkIndex(path, entries, self.stack.chunk_stored_bytes, digest)
        with self.lock:  # two threads may have read it at the same time; both must note their checks in one object
            return self.chunk_indexes.setdefault(index, made)


_Wanted = tuple[Box, Array]
"""A box within an object, and the array that it is read into."""


@dataclass(frozen=True, slots=True)
class _OpenObject:
    """An object that is being read."""

    stack: Stack
    index: tuple[int, ...]
    path: str
    handle: int
    found: _ChunkIndex

    def read(self, wanted: Sequence[_Wanted]) -> None:
        """Fill arrays. Chunks whose destination is contiguous memory are read in place, in file order. Other
        chunks are read into a buffer that fits the core's cache, checked, and copied from there."""
        places, buffered = list[tuple[Sequence[int], Bytes]](), list[tuple[Chunks, Sequence[_Wanted]]]()
        scattered: list[list[_Wanted]] = []
        for together in _group_by_shared_chunks(wanted, self.stack.chunk):
            if (runs := self._runs_in_place(together)) is None:
                scattered.append(together)
                continue
            places += ((chunks.numbers, place) for chunks, place in runs if place is not None)
            buffered += ((chunks, together) for chunks, place in runs if place is None)
        for together in _merge_tiling_groups(scattered, self.stack.chunk):
            part = hull(box for box, _ in together)
            blocks = zarr.chunk_blocks(self.stack, self.index, part, self.found.starts, BLOCK_BYTES)
            buffered += ((chunks, together) for chunks in blocks)
        buffered.sort(key=lambda one: self.found.starts[one[0].numbers[0]])
        self._read_in_place(places)
        self._read_buffered(buffered)

    def _runs_in_place(self, wanted: Sequence[_Wanted]) -> list[tuple[Chunks, Bytes | None]] | None:
        """The chunks of a box, each with its destination if that is contiguous memory. None if not even one chunk has a
        contiguous destination, or if there are several boxes, which share chunks."""
        if len(wanted) > 1:
            return None
        ((box, target),) = wanted
        run = zarr.contiguous_chunk_numbers(self.stack, self.index, box) if target.flags.c_contiguous else None
        if run is not None:
            return [(Chunks(run, box, range(len(box))), target.reshape(-1).view(np.uint8))]
        firsts = (-(-start // side) * side for (start, _), side in zip(box, self.stack.chunk, strict=True))
        if contiguous_bytes(box_at(firsts, self.stack.chunk), box, target) is None:
            return None
        runs = zarr.chunk_runs(self.stack, self.index, box)
        return [(chunks, contiguous_bytes(chunks.box, box, target)) for chunks in runs]

    def _read_in_place(self, places: Sequence[tuple[Sequence[int], Bytes]]) -> None:
        """Read chunks directly into their destinations, in file order, then check them."""
        numbers = [number for some, _ in places for number in some]
        chunks = [chunk for some, place in places for chunk in _split_chunks(place, len(some))]
        order = np.argsort(self.found.starts[numbers]).tolist()
        numbers, chunks = [numbers[place] for place in order], [chunks[place] for place in order]
        stored = np.empty(len(chunks), "<u4")
        buffers = _interleave(chunks, stored)
        sums = list[int]()
        for runs in self.found.runs(self.path, numbers, range(0, len(chunks), self._n_chunks(READ_BYTES))):
            for start, begun, end in runs:
                read_into(self.path, self.handle, start, buffers[2 * begun : 2 * end])
            sums += [_checksum(chunk, 64 << 10) for chunk in chunks[runs[0][1] : runs[-1][2]]]
        self._check(numbers, sums, stored, self.stack.dtype == "bool" and any(map(_has_odd_bools, chunks)))

    def _read_buffered(self, wanted: Sequence[tuple[Chunks, Sequence[_Wanted]]]) -> None:
        """Read chunks into a buffer, copy them to the wanted boxes, and check them."""
        size = self.stack.chunk_stored_bytes
        numbers = [number for chunks, _ in wanted for number in chunks.numbers]
        most = max(0, *(len(chunks.numbers) for chunks, _ in wanted), min(self._n_chunks(BLOCK_BYTES), len(numbers)))
        scratch = np.empty((most, size), np.uint8)
        memory = scratch.reshape(-1).data
        together = list(_batches(wanted, most))
        counts = (sum(len(chunks.numbers) for chunks, _ in some) for some in together)
        borders = {0, *itertools.accumulate(counts)}
        sums, stored, odd = list[int](), list[bytes](), False
        for some, runs in zip(together, self.found.runs(self.path, numbers, borders), strict=True):
            first, count = runs[0][1], runs[-1][2] - runs[0][1]
            for start, begun, end in runs:
                read_into(self.path, self.handle, start, [memory[(begun - first) * size : (end - first) * size]])
            tails = scratch[:count, -4:].tobytes()
            stored.append(tails)
            if _checksum(memory[: count * size]) == zarr.intact_chunks_crc32c(size, count):
                sums += np.frombuffer(tails, "<u4").tolist()
            else:
                sums += map(_checksum, scratch[:count, :-4])
            odd = odd or (self.stack.dtype == "bool" and _has_odd_bools(scratch[:count, :-4]))
            place = 0
            for chunks, targets in some:
                scatter(self.stack, chunks, scratch[place:].reshape(-1), targets)
                place += len(chunks.numbers)
        self._check(numbers, sums, np.frombuffer(b"".join(stored), "<u4"), odd)

    def _n_chunks(self, n_bytes: int) -> int:
        """The number of chunks that have about this many bytes."""
        return -(-n_bytes // self.stack.chunk_stored_bytes)

    def _check(self, numbers: Sequence[int], sums: Sequence[int], stored: Sums, odd: bool) -> None:
        """Raise DataError unless the chunks are unchanged since they were saved. `odd`: a bool is neither 0 nor 1."""
        if not numbers:
            return
        damaged = np.flatnonzero(np.array(sums, "<u4") != stored)
        if len(damaged):
            box = zarr.chunk_box(self.stack, self.index, numbers[int(damaged[0])])
            assert box is not None, "chunks outside of the stack are not read"
            place = f"{show_box(box)} of the stack"
            raise DataError(f"{self.path} has a damaged chunk ({place}): its crc32c does not match")
        if odd:
            raise DataError(f"{self.path} has values that are neither true nor false")
        self.found.record_sums(self.path, numbers, stored)


def _has_odd_bools(data: Array) -> bool:
    return bool(np.max(data) > 1)


class _ChunkIndex:
    """The index of an object: offsets of its chunks, and the checksums of those that were read."""

    def __init__(self, path: str, entries: zarr.Entries, size: int, digest: str) -> None:
        self._present = entries[:, 0] != zarr.ABSENT
        if (entries[self._present, 1] != size).any():
            raise DataError(f"{path} has a chunk whose size is not {size} bytes")
        self._size = size
        self.starts = entries[:, 0].astype(np.int64)
        """The offset of each chunk; arbitrary if the object lacks the chunk."""

        self._digest = digest
        self._sums = np.zeros(len(entries), "<u4")
        self._unread = self._present.copy()
        self._lock = threading.Lock()

    def runs(self, path: str, numbers: Sequence[int], borders: Collection[int]) -> Iterator[list[tuple[int, int, int]]]:
        """(offset in the file, first, last) of each run of chunks that are adjacent in the file.

        Yields one list for the chunks from each border to the next. First, last and borders are indices in `numbers`.
        """
        if not numbers:
            return
        wanted = np.asarray(numbers)
        if not self._present[wanted].all():
            raise DataError(f"{path} lacks a chunk")
        starts = self.starts[wanted]
        cuts = sorted({*borders, *(np.flatnonzero(np.diff(starts) != self._size) + 1).tolist(), len(numbers)})
        runs = list[tuple[int, int, int]]()
        for start, (begun, end) in zip(starts[cuts[:-1]].tolist(), itertools.pairwise(cuts), strict=True):
            if begun in borders and runs:
                yield runs
                runs = []
            runs.append((start, begun, end))
        yield runs

    def record_sums(self, path: str, chunks: Sequence[int], sums: Sums) -> None:
        """Note chunks that were read. After the last one, the object's digest proves that they belong to this save."""
        numbers = np.asarray(chunks)
        with self._lock:
            self._sums[numbers] = sums
            self._unread[numbers] = False
            complete = not self._unread.any()
        if complete and zarr.digest_of(self._sums[self._present]) != self._digest:
            raise DataError(f"{path} does not hold the data that was saved there")


def _group_by_shared_chunks(wanted: Sequence[_Wanted], sides: Sequence[int]) -> Iterator[list[_Wanted]]:
    """Group neighboring boxes that share chunks."""
    group: list[_Wanted] = []
    held: Sequence[tuple[int, int]] = ()
    for one in wanted:
        found = touched_cells(one[0], sides)
        if group and all(a < d and c < b for (a, b), (c, d) in zip(found, held, strict=True)):
            held = hull((found, tuple(held)))
        else:
            if group:
                yield group
            group, held = [], found
        group.append(one)
    if group:
        yield group


def _merge_tiling_groups(groups: list[list[_Wanted]], sides: Sequence[int]) -> list[list[_Wanted]]:
    """Merge all groups into one if the chunks that they touch form a box, which is then read in file order."""
    found = [touched_cells(hull(box for box, _ in group), sides) for group in groups]
    if len(groups) > 1 and sum(map(volume, found)) == volume(hull(found)):
        return [[one for group in groups for one in group]]
    return groups


def _batches(wanted: Sequence[tuple[Chunks, T]], most: int) -> Iterator[list[tuple[Chunks, T]]]:
    """Consecutive items in batches of at most `most` chunks."""
    group: list[tuple[Chunks, T]] = []
    count = 0
    for one in wanted:
        if group and count + len(one[0].numbers) > most:
            yield group
            group, count = [], 0
        group.append(one)
        count += len(one[0].numbers)
    if group:
        yield group


# System calls ---------------------------------------------------------------------------------------------


def _path(folder: str, index: tuple[int, ...]) -> str:
    return f"{folder}/c/{'/'.join(map(str, index))}"


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
        try:
            os.mkdir(missing)
        except FileExistsError:
            continue


def _split_chunks(data: Bytes, count: int) -> list[Any]:
    """The chunks of a run."""
    return [data] if count == 1 else list(data.reshape(count, -1))


def _interleave(chunks: Sequence[Any], sums: Sums) -> list[Any]:
    """Buffers in file order: each chunk and its checksum."""
    buffers: list[Any] = [None] * (2 * len(chunks))
    buffers[0::2] = chunks
    buffers[1::2] = sums.view(np.uint8).reshape(-1, 4)
    return buffers


class _Output:
    """Writes chunks to a file, each followed by its checksum."""

    def __init__(self, handle: int, stored_bytes: int, content: bool) -> None:
        self.numbers: list[int] = []
        """Numbers of the chunks, in file order."""

        self.sums: list[int] = []
        """Checksums of these chunks."""

        self.contents: list[bytes] = []
        """Digests of these chunks, if `content` is set. They are computed here because the chunk is then in the
        processor's cache: this takes a quarter of the time."""

        self.buffers: list[Any] = []
        """Chunks and checksums for the next write."""

        self._content = content

        self._handle = handle
        self._stored_bytes = stored_bytes
        self._waiting_bytes = 0

    def add(self, numbers: Sequence[int], data: Bytes) -> None:
        """Write chunks that follow each other in memory. The memory must not change until the next `write`."""
        for chunk in _split_chunks(data, len(numbers)):
            found = _checksum(chunk)
            self.sums.append(found)
            if self._content:
                self.contents.append(chunk_digest(chunk))
            self.buffers += (chunk, found.to_bytes(4, "little"))
            self._waiting_bytes += self._stored_bytes
            if self._waiting_bytes >= BATCH_BYTES:
                self.write()
        self.numbers += numbers

    def write(self) -> None:
        write_all(self._handle, self.buffers)
        self.buffers, self._waiting_bytes = [], 0


def _checksum(data: Any, held_bytes: int = 1 << 20) -> int:
    """Crc32c. Holds the GIL for at most this many bytes, 40 µs by default, because getting the GIL back from a busy
    Python thread may take the switch interval of 5 ms. Threads that read are rarely busy in Python: 64 KiB for these
    makes a restore 2 to 8 % faster."""
    return crc32c.crc32c(data, 0, 0 if len(data) <= held_bytes else 1)


def write_all(handle: int, buffers: Sequence[Any]) -> None:
    """Append buffers to a file."""
    _move_all(buffers, lambda rest: os.writev(handle, rest))


def read_into(path: str, handle: int, start: int, buffers: Sequence[Any]) -> None:
    """Fill buffers with the content of a file from `start` on. Raises DataError if the file is too short."""

    def read_some(rest: Sequence[Any]) -> int:
        nonlocal start
        count = os.preadv(handle, rest, start)
        if not count:
            raise DataError(f"{path} was truncated while it was being read")
        note_progress()
        start += count
        return count

    _move_all(buffers, read_some)


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
