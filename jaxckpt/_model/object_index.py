"""The index at the end of an object, its digest, and the problems of a stored object.

An object is its chunks in any order, each followed by its crc32c, and then the index: the offset and the length of each
chunk, and a crc32c (Zarr v3, sharding_indexed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import crc32c
import numpy as np

from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Bytes
from jaxckpt._model.stacks import Stack
from jaxckpt._model.zarr import chunk_box

ReadRange = Callable[[int, int], Bytes]
"""(start, stop) → that range of an object, valid until the next call."""

WINDOW_BYTES = 4 << 20
"""Bytes of an object that are checked together."""

_BLOSC_HEADER_BYTES = 16  # version, flags, typesize; then the decoded length, the block length and the encoded length

ABSENT = 0xFFFFFFFFFFFFFFFF  # the offset and length of a chunk that is not stored


def read_digest(read: ReadRange, stack: Stack, length: int) -> str:
    """Digest of an object of `length` bytes; "" if its index points outside of it.

    It is the crc32c of the checksums at the ends of the object's chunks, in index order. It distinguishes the contents
    of objects at the cost of reading 4 bytes per chunk. It is also "" if a chunk would decode to a wrong length.
    """
    data_bytes = length - stack.index_bytes
    if data_bytes < 0:
        return ""
    entries = read(data_bytes, length)[:-4].view("<u8").reshape(-1, 2).astype("<u8")
    present = entries[entries[:, 0] != ABSENT]
    if not _inside(present, data_bytes) or _wrong_decoded_lengths(read, stack, present.astype(np.int64).tolist()):
        return ""
    ends = present.sum(axis=1).astype(np.int64).tolist()
    return digest_of(np.frombuffer(b"".join(read(end - 4, end).tobytes() for end in ends), "<u4"))


@functools.lru_cache(maxsize=1024)
def intact_chunks_crc32c(stored_bytes: int, count: int) -> int:
    """Crc32c of this many intact chunks, each of `stored_bytes` with its checksum at its end.

    It does not depend on their content: after a message and its checksum, the state of a cyclic redundancy check
    depends only on their length and on the state before (R. N. Williams, "A painless guide to CRC error detection
    algorithms", 1993). So one call checks many chunks; like a checksum of each, it misses 1 of 2^32 random errors.
    """
    zeros = bytes(stored_bytes - 4)
    chunk = zeros + crc32c.crc32c(zeros).to_bytes(4, "little")
    return functools.reduce(lambda checksum, _: crc32c.crc32c(chunk, checksum), range(count), 0)


def digest_of(sums: np.ndarray[Any, Any]) -> str:
    """Digest of an object whose chunks have these checksums."""
    return f"{crc32c.crc32c(sums.tobytes()):08x}"


def encode_index(stack: Stack, numbers: Sequence[int]) -> bytes:
    """The index of an object whose uncompressed chunks have these numbers in the order of their offsets."""
    size = stack.chunk_stored_bytes
    entries = np.full((stack.chunks_per_object, 2), ABSENT, "<u8")
    entries[numbers, 0] = np.arange(len(numbers)) * size
    entries[numbers, 1] = size
    content = entries.tobytes()
    return content + crc32c.crc32c(content).to_bytes(4, "little")


Entries = np.ndarray[Any, np.dtype[np.uint64]]
"""[chunk, 2]: offset and length of each chunk of an object, by its number."""


def parse_index(tail: Bytes, data_bytes: int) -> Entries | str:
    """The entries of the index at the end of an object with this many bytes of chunks, or the index's problem."""
    if crc32c.crc32c(tail[:-4].data) != int(tail[-4:].view("<u4")[0]):
        return "has a damaged index: its crc32c does not match"
    entries = tail[:-4].view("<u8").reshape(-1, 2)
    present = entries[entries[:, 0] != ABSENT]
    if not _inside(present, data_bytes):
        return "has an index that points outside of it, or twice to the same bytes"
    return entries


def _inside(present: Entries, data_bytes: int) -> bool:
    """Whether all entries of an index point to chunks within this many bytes, which together are not longer."""
    starts, lengths = present[:, 0], present[:, 1]
    return not len(present) or bool(
        lengths.min() >= 4
        and lengths.max() <= data_bytes
        and starts.max() <= data_bytes - lengths.min()
        and (starts + lengths).max() <= data_bytes
        and lengths.sum(dtype=np.float64) <= data_bytes  # exact below 2^53, and never overflows
    )


def _wrong_decoded_lengths(read: ReadRange, stack: Stack, chunks: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The decoded length, by offset, of each chunk (offset, length) that would decode to a wrong length.

    Only blosc needs this check, because its decoder allocates the size in a chunk's header, up to 2 GiB.
    """
    if stack.compression != "blosc":
        return {}
    stated = {
        start: int(read(start + 4, start + 8).view("<u4")[0]) if size >= _BLOSC_HEADER_BYTES + 4 else 0
        for start, size in chunks
    }
    return {start: length for start, length in stated.items() if length != stack.chunk_stored_bytes - 4}


def problem_of(content: bytes, stack: Stack, index: tuple[int, ...], length: int, digest: str) -> str | None:
    """The first problem of an object that is in memory, and should have this length and digest."""
    if len(content) != length:
        return f"is {len(content)} bytes long, expected {length}"
    return next((reason for _, reason in object_problems(_range_reader(content), stack, index, length, digest)), None)


def digest_of_content(content: bytes, stack: Stack) -> str:
    """Digest of an object that is in memory."""
    return read_digest(_range_reader(content), stack, len(content))


def _range_reader(content: bytes) -> ReadRange:
    data = np.frombuffer(content, np.uint8)
    return lambda start, stop: data[start:stop]


def object_problems(
    read: ReadRange, stack: Stack, index: tuple[int, ...], length: int, expected_digest: str
) -> Iterator[tuple[Box | None, str]]:
    """The problems of an object, which should have `length` bytes and the digest `expected_digest`. `read(start, stop)`
    reads a range.

    Reads every chunk once and computes its checksum. Yields (box of the stack, or None for the whole object, reason).
    """
    data_bytes = length - stack.index_bytes
    if data_bytes < 0:
        yield None, f"is {length} bytes long, shorter than its index"
        return
    entries = parse_index(read(data_bytes, length), data_bytes)
    if isinstance(entries, str):
        yield None, entries
        return
    present = np.flatnonzero(entries[:, 0] != ABSENT)
    is_intact = True
    for number in set(range(len(entries))).difference(present.tolist()):
        box = chunk_box(stack, index, number)
        if box is not None:
            is_intact = False
            yield box, "lacks a chunk"
    sums = dict[int, bytes]()
    places = [(int(entries[number, 0]), int(entries[number, 1]), int(number)) for number in present]
    wrong_lengths = _wrong_decoded_lengths(read, stack, [(start, size) for start, size, _ in places])
    for window in _windows(sorted(places)):
        for (start, size, number), computed, stored in _checksums(read, window):
            sums[number] = stored
            reason = None
            if stack.compression is None and size != stack.chunk_stored_bytes:
                reason = f"has a chunk of {size} bytes, expected {stack.chunk_stored_bytes}"
            elif computed != int.from_bytes(stored, "little"):
                reason = "has a damaged chunk: its crc32c does not match"
            elif start in wrong_lengths:
                expected = stack.chunk_stored_bytes - 4
                reason = f"has a chunk that decodes to {wrong_lengths[start]} bytes, expected {expected}"
            if reason:
                is_intact = False
                yield chunk_box(stack, index, number), reason
    # If chunks are damaged, the digest would only report the same damage again.
    if is_intact and f"{crc32c.crc32c(b''.join(sums[number] for number in sorted(sums))):08x}" != expected_digest:
        yield None, "does not hold the data that was saved there"


_Entry = tuple[int, int, int]  # of an index: offset and length of a chunk, and its number


def _checksums(read: ReadRange, window: list[_Entry]) -> Iterator[tuple[_Entry, int, bytes]]:
    """(chunk, its crc32c, its stored crc32c) of each of some neighboring chunks, or of one larger chunk."""
    begun, stop = window[0][0], max(start + size for start, size, _ in window)
    if stop - begun > WINDOW_BYTES and len(window) == 1:
        computed = 0
        for start in range(begun, stop - 4, WINDOW_BYTES):
            computed = crc32c.crc32c(read(start, min(start + WINDOW_BYTES, stop - 4)).tobytes(), computed)
        yield window[0], computed, read(stop - 4, stop).tobytes()
        return
    content = read(begun, stop)
    for start, size, number in window:
        chunk = content[start - begun : start - begun + size]
        yield (start, size, number), crc32c.crc32c(chunk[:-4].data), chunk[-4:].tobytes()


def _windows(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Groups of neighboring chunks of at most `WINDOW_BYTES` in total, or of one larger chunk."""
    group: list[_Entry] = []
    for entry in entries:
        if group and entry[0] + entry[1] - group[0][0] > WINDOW_BYTES:
            yield group
            group = []
        group.append(entry)
    if group:
        yield group
