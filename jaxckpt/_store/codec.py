"""Encodes and decodes objects whose chunks are not compressed, without a copy if possible.

encode:  object ─▶ runs of chunks, in place or gathered ─▶ crc32c of each chunk ─▶ buffers to write ─▶ index
decode:  boxes ─▶ runs of chunks ─▶ read to their destination, or to a buffer ─▶ crc32c compared
                                               copied from the buffer to the boxes ◀─┘
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.chunks import chunk_digest, chunks_of, combined_digest, contiguous_bytes, scatter
from jaxckpt._model.grid import Box, box_at, hull, show_box, touched_cells, volume
from jaxckpt._model.object_index import ABSENT, digest_of, encode_index, intact_chunks_crc32c, parse_index
from jaxckpt._model.pieces import Array, Bytes, Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._model.zarr import Chunks
from jaxckpt._options import THREADS
from jaxckpt._store.store import ObjectRecord
from jaxckpt.errors import DataError

WRITE_BYTES, READ_BYTES = 4 << 20, 16 << 20
"""Approximate bytes per system call: one that writes, one that reads into the destination. A thread releases the GIL
for a system call and then waits to get it back, so few calls are better than many. As much is gathered with one call of
NumPy: next to a loop that computes in Python for 0.1 ms a step, a background save of 1 GiB takes 0.8 s, and took 12 s
when each chunk of 2 MiB was gathered and written by itself."""

_HELD_BYTES, _HELD_BYTES_IF_BUSY = 1 << 20, 16 << 20
"""Bytes of chunks whose checksums a save computes before it releases the GIL."""

BLOCK_BYTES = max(2 << 20, min(8 << 20, (32 << 20) // THREADS))
"""Bytes of chunks that a thread reads together to copy them from there: of all threads 32 MiB, which the cores' shared
cache may hold, but between 2 and 8 MiB. With smaller blocks, the threads wait more often for Python's lock; on 2 cores,
8 MiB restore 7 to 15 % faster than 2 MiB, and 16 MiB are no faster."""


Sums = np.ndarray[Any, np.dtype[np.uint32]]
"""Checksums of chunks."""


# Encoding -------------------------------------------------------------------------------------------------


def encode(
    stack: Stack, index: tuple[int, ...], pieces: Pieces, write: Callable[[Sequence[Any]], object], *, content: bool
) -> ObjectRecord:
    """Encode an object. `write` gets its bytes in sequence, and must be done with them when it returns. With `content`,
    also compute the digest of its content."""
    queue = _ChunkQueue(write, stack.chunk_stored_bytes, content)
    for numbers, data in chunks_of(stack, index, pieces, queue.flush, WRITE_BYTES):
        queue.add(numbers, data)
    queue.buffers.append(encode_index(stack, queue.numbers))
    queue.flush()
    in_order = np.array(queue.sums, "<u4")[np.argsort(queue.numbers)]
    compared = combined_digest(zip(queue.numbers, queue.contents, strict=True)) if content else ""
    return ObjectRecord(
        len(queue.numbers) * stack.chunk_stored_bytes + stack.index_bytes, digest_of(in_order), compared
    )


class _ChunkQueue:
    """The chunks of an object, each followed by its checksum, on their way to `write`."""

    def __init__(self, write: Callable[[Sequence[Any]], object], stored_bytes: int, content: bool) -> None:
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
        self._write = write
        self._stored_bytes = stored_bytes
        self._waiting_bytes = 0
        self._held_bytes = 0  # of chunks, since the GIL was released for one
        self._most_held_bytes = _HELD_BYTES

    def add(self, numbers: Sequence[int], data: Bytes) -> None:
        """Queue chunks that follow each other in memory. The memory must not change until the next `flush`."""
        for chunk in _split_chunks(data, len(numbers)):
            checksum = self._checksum(chunk)
            self.sums.append(checksum)
            if self._content:
                self.contents.append(chunk_digest(chunk))
            self.buffers += (chunk, checksum.to_bytes(4, "little"))
            self._waiting_bytes += self._stored_bytes
            if self._waiting_bytes >= WRITE_BYTES:
                self.flush()
        self.numbers += numbers

    def _checksum(self, chunk: Any) -> int:
        """Crc32c. Releases the GIL for one chunk in each MiB, which takes about 0.1 ms. If it then waits for a thread
        that computes in Python, for the switch interval of 5 ms, it releases the GIL for one chunk in 16 MiB: next to
        such a thread, a save of 1 GiB takes 4.0 s instead of 6.3 s."""
        self._held_bytes += len(chunk)
        if self._held_bytes <= self._most_held_bytes:
            return crc32c.crc32c(chunk, 0, 0)
        begin = time.perf_counter()
        checksum = crc32c.crc32c(chunk, 0, 1)
        has_waited = time.perf_counter() - begin > 0.002
        self._held_bytes, self._most_held_bytes = 0, _HELD_BYTES_IF_BUSY if has_waited else _HELD_BYTES
        return checksum

    def flush(self) -> None:
        self._write(self.buffers)
        self.buffers, self._waiting_bytes = [], 0


def _split_chunks(data: Bytes, count: int) -> list[Any]:
    """The chunks of a run."""
    return [data] if count == 1 else list(data.reshape(count, -1))


# Decoding -------------------------------------------------------------------------------------------------


Target = tuple[Box, Array]
"""A box within an object, and the array that it is read into."""

_Block = tuple[Chunks, Sequence[Target]]
"""Chunks that are read together, and the boxes that they overlap."""


@dataclass(frozen=True, slots=True)
class ObjectDecoder:
    """Reads boxes of one object."""

    stack: Stack
    index: tuple[int, ...]
    path: str
    chunk_table: ChunkTable

    read_into: Callable[[int, Sequence[Any]], object]
    """Fills buffers, in sequence, with the object's bytes from an offset on."""

    def read(self, targets: Sequence[Target]) -> None:
        """Fill arrays. Chunks whose destination is contiguous memory are read in place, in file order. Other
        chunks are read into a buffer that fits the core's cache, checked, and copied from there."""
        destinations, buffered = list[tuple[Sequence[int], Bytes]](), list[_Block]()
        scattered: list[list[Target]] = []
        for group in _group_by_shared_chunks(targets, self.stack.chunk_sides):
            in_place, others = self._runs_in_place(group)
            if not in_place:
                scattered.append(group)
                continue
            destinations += in_place
            buffered += ((chunks, group) for chunks in others)
        for group in _merge_tiling_groups(scattered, self.stack.chunk_sides) if len(scattered) > 1 else scattered:
            region = hull(box for box, _ in group)
            blocks = zarr.chunk_blocks(self.stack, self.index, region, self.chunk_table.starts, BLOCK_BYTES)
            buffered += ((chunks, group) for chunks in blocks)
        buffered.sort(key=lambda block: self.chunk_table.starts[block[0].numbers[0]])
        if destinations:
            self._read_in_place(destinations)
        if buffered:
            self._read_buffered(buffered)

    def _runs_in_place(self, targets: Sequence[Target]) -> tuple[list[tuple[Sequence[int], Bytes]], list[Chunks]]:
        """(runs of chunks with their destination, if that is contiguous memory; all other chunks) of a box. Two empty
        lists if the first whole chunk has no such destination, or if there are several boxes, which share chunks."""
        if len(targets) > 1:
            return [], []
        ((box, target),) = targets
        run = zarr.contiguous_chunk_numbers(self.stack, self.index, box) if target.flags.c_contiguous else None
        if run is not None:
            return [(run, target.reshape(-1).view(np.uint8))], []
        firsts = (-(-start // side) * side for (start, _), side in zip(box, self.stack.chunk_sides, strict=True))
        if contiguous_bytes(box_at(firsts, self.stack.chunk_sides), box, target) is None:
            return [], []
        runs = [(run, contiguous_bytes(run.box, box, target)) for run in zarr.chunk_runs(self.stack, self.index, box)]
        in_place = [(chunks.numbers, destination) for chunks, destination in runs if destination is not None]
        return in_place, [chunks for chunks, destination in runs if destination is None]

    def _read_in_place(self, destinations: Sequence[tuple[Sequence[int], Bytes]]) -> None:
        """Read chunks directly into their destinations, in file order, then check them."""
        numbers = [number for run, _ in destinations for number in run]
        chunks = [chunk for run, destination in destinations for chunk in _split_chunks(destination, len(run))]
        order = np.argsort(self.chunk_table.starts[numbers]).tolist()
        numbers, chunks = [numbers[position] for position in order], [chunks[position] for position in order]
        stored = np.empty(len(chunks), "<u4")
        buffers: list[Any] = [None] * (2 * len(chunks))  # in file order: each chunk and its checksum
        buffers[0::2], buffers[1::2] = chunks, stored.view(np.uint8).reshape(-1, 4)
        sums = list[int]()
        for runs in self.chunk_table.runs(self.path, numbers, range(0, len(chunks), self._n_chunks(READ_BYTES))):
            for start, begun, end in runs:
                self.read_into(start, buffers[2 * begun : 2 * end])
            sums += [_checksum(chunk) for chunk in chunks[runs[0][1] : runs[-1][2]]]
        self._check(numbers, sums, stored, self.stack.dtype == "bool" and any(map(_has_invalid_bools, chunks)))

    def _read_buffered(self, blocks: Sequence[_Block]) -> None:
        """Read chunks into a buffer, copy them to the targets, and check them."""
        size = self.stack.chunk_stored_bytes
        numbers = [number for chunks, _ in blocks for number in chunks.numbers]
        most = max(0, *(len(chunks.numbers) for chunks, _ in blocks), min(self._n_chunks(BLOCK_BYTES), len(numbers)))
        scratch = np.empty((most, size), np.uint8)
        memory = scratch.reshape(-1).data
        batches = list(_batches(blocks, most))
        counts = (sum(len(chunks.numbers) for chunks, _ in batch) for batch in batches)
        borders = {0, *itertools.accumulate(counts)}
        sums, stored, has_invalid_bools = list[int](), list[bytes](), False
        for batch, runs in zip(batches, self.chunk_table.runs(self.path, numbers, borders), strict=True):
            first, count = runs[0][1], runs[-1][2] - runs[0][1]
            for start, begun, end in runs:
                self.read_into(start, [memory[(begun - first) * size : (end - first) * size]])
            tails = scratch[:count, -4:].tobytes()
            stored.append(tails)
            if _checksum(memory[: count * size]) == intact_chunks_crc32c(size, count):
                sums += np.frombuffer(tails, "<u4").tolist()
            else:
                sums += map(_checksum, scratch[:count, :-4])
            has_invalid_bools = has_invalid_bools or (
                self.stack.dtype == "bool" and _has_invalid_bools(scratch[:count, :-4])
            )
            position = 0
            for chunks, targets in batch:
                scatter(self.stack, chunks, scratch[position:].reshape(-1), targets)
                position += len(chunks.numbers)
        self._check(numbers, sums, np.frombuffer(b"".join(stored), "<u4"), has_invalid_bools)

    def _n_chunks(self, n_bytes: int) -> int:
        """The number of chunks that have about this many bytes."""
        return -(-n_bytes // self.stack.chunk_stored_bytes)

    def _check(self, numbers: Sequence[int], sums: Sequence[int], stored: Sums, has_invalid_bools: bool) -> None:
        """Raise DataError unless the chunks are unchanged since they were saved. `has_invalid_bools`: a bool is
        neither 0 nor 1."""
        if not numbers:
            return
        damaged = np.flatnonzero(np.array(sums, "<u4") != stored)
        if len(damaged):
            raise self._damage(numbers[int(damaged[0])])
        if has_invalid_bools:
            raise DataError(f"{self.path} has values that are neither true nor false")
        self.chunk_table.record_sums(self.path, numbers, stored)

    def _damage(self, number: int) -> DataError:
        """The error of a damaged chunk. Not in a variable of the function that raises it: its traceback holds that
        function's variables, so the buffers of the read would stay in memory."""
        box = zarr.chunk_box(self.stack, self.index, number)
        assert box is not None, "chunks outside of the stack are not read"
        location = f"{show_box(box)} of the stack"
        error = DataError(f"{self.path} has a damaged chunk ({location}): its crc32c does not match")
        error.rows = box[0]
        return error


def _has_invalid_bools(data: Array) -> bool:
    return bool(np.max(data) > 1)


class ChunkTable:
    """The index at the end of an object: offsets of its chunks, and the checksums of those that were read."""

    def __init__(self, path: str, stack: Stack, tail: Bytes, length: int, digest: str) -> None:
        """`tail` is the stored index of an object of `length` bytes. Raises DataError."""
        entries, size = parse_index(tail, length - len(tail)), stack.chunk_stored_bytes
        if isinstance(entries, str):
            raise DataError(f"{path} {entries}")
        self._present = entries[:, 0] != ABSENT
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
        chunk_numbers = np.asarray(numbers)
        if not self._present[chunk_numbers].all():
            raise DataError(f"{path} lacks a chunk")
        starts = self.starts[chunk_numbers]
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
        if complete and digest_of(self._sums[self._present]) != self._digest:
            raise DataError(f"{path} does not hold the data that was saved there")


def _group_by_shared_chunks(targets: Sequence[Target], sides: Sequence[int]) -> Iterator[list[Target]]:
    """Group neighboring boxes that share chunks."""
    group: list[Target] = []
    group_cells: Box = ()
    for target in targets:
        cells = touched_cells(target[0], sides)
        if group and all(a < d and c < b for (a, b), (c, d) in zip(cells, group_cells, strict=True)):
            group_cells = hull((cells, group_cells))
        else:
            if group:
                yield group
            group, group_cells = [], cells
        group.append(target)
    if group:
        yield group


def _merge_tiling_groups(groups: list[list[Target]], sides: Sequence[int]) -> list[list[Target]]:
    """Merge all groups into one if the chunks that they touch form a box, which is then read in file order."""
    group_cells = [touched_cells(hull(box for box, _ in group), sides) for group in groups]
    if sum(map(volume, group_cells)) == volume(hull(group_cells)):
        return [[target for group in groups for target in group]]
    return groups


def _batches(blocks: Sequence[_Block], most: int) -> Iterator[list[_Block]]:
    """Consecutive blocks in batches of at most `most` chunks."""
    group: list[_Block] = []
    count = 0
    for block in blocks:
        if group and count + len(block[0].numbers) > most:
            yield group
            group, count = [], 0
        group.append(block)
        count += len(block[0].numbers)
    if group:
        yield group


# Checksums ------------------------------------------------------------------------------------------------


def _checksum(data: Any) -> int:
    """Crc32c. Releases the GIL for more than 64 KiB: threads that read rarely wait for one that computes in Python. A
    restore takes 2 to 8 % longer with 1 MiB."""
    return crc32c.crc32c(data, 0, len(data) > 64 << 10)
