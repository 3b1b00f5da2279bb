"""Arrays in .npz files, where they lie: stored members are read in place, deflated ones as a stream.

No pickle is read: an array of Python objects is refused.
"""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from jaxckpt._foreign.shards import FileBlock, c_strides, flat_boxes, opened
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, extent, intersection, volume, within
from jaxckpt._format.pieces import Array, as_bits
from jaxckpt._format.tree import nested
from jaxckpt._restore.source import Block, Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError, show

MAX_HEADER_BYTES = 10_000
"""Of the .npy header of a member: as NumPy has it."""

MAX_TEXT_BYTES = 1 << 20
"""Of a str or bytes."""

READ_BYTES = 1 << 20
"""What is inflated at once."""

SNAPSHOTS = 256
"""Most places of a deflated member from which reading can start; each takes about 50 KB."""

SNAPSHOT_BYTES = 16 << 20
"""Fewest bytes from one of them to the next."""

_LOOKED_AT = 1 << 16
"""Bytes of a member's name, at most."""

_UTF8 = 0x800  # the flag of a member whose name is not in code page 437

_MOST_INFLATED = 1032  # times: what deflate can reach


def recognises(path: str, names: Collection[str]) -> bool:
    """A file of that suffix, or, as `convert` gives it the name that is asked for, one that starts with an array."""
    if names or not os.path.isfile(path):
        return False
    if path.endswith(".npz"):
        return True
    with opened(path) as handle:
        head = os.pread(handle, 30 + _LOOKED_AT, 0)
    if not head.startswith(b"PK\3\4") or len(head) < 30:
        return False
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")


def open_npz(path: str) -> Foreign:
    """Arrays by name, nested dicts where names have "/": what `convert` writes, and numpy.savez. Raises DataError."""
    return compose(path, nested(read_npz(path)), "npz")


def read_npz(path: str) -> dict[str, ForeignArray | str | bytes]:
    """What an .npz file holds, by name. Only headers are read.

    Raises DataError where the file is damaged, or holds what is no array of numbers.
    """
    found: dict[str, ForeignArray | str | bytes] = {}
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        for info in _members(path):
            name = info.filename.removesuffix(".npy")
            if name in found:
                raise DataError(f"{path} has two members {info.filename!r}")
            member = _member(path, handle, info, size)
            found[name] = _array(path, name, handle, member)
    return found


def _members(path: str) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            found, expected = archive.infolist(), _count(path)
    except OSError:
        raise
    except Exception as error:  # zipfile lets out whatever its parsing meets
        raise DataError(f"{path} is no .npz file, or is damaged: {error}") from error
    # A damaged length makes zipfile take an entry for a part of the one before it.
    if len(found) != expected or any(info.comment for info in found):
        raise DataError(f"{path} is damaged: its directory has {len(found)} members, expected {expected}")
    return found


def _count(path: str) -> int:
    """How many members the record at the end of a zip file counts."""
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        end = os.pread(handle, 22, max(0, size - 22))
        if not end.startswith(b"PK\5\6"):
            raise ValueError("its end record is not at its end")
        (count,) = struct.unpack("<H", end[10:12])
        locator = os.pread(handle, 20, max(0, size - 42))
        if locator.startswith(b"PK\6\7"):
            (count,) = struct.unpack("<Q", os.pread(handle, 40, int.from_bytes(locator[8:16], "little"))[32:])
    return count


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of inflating a member."""

    position: int
    """Bytes that came out."""

    source: int
    """Bytes that went in."""

    crc: int
    inflater: Any


@dataclass(frozen=True, slots=True)
class _Member:
    """The bytes of a member."""

    path: str
    offset: int
    """Of what is stored of it, in the file."""

    n_stored: int
    n_bytes: int
    crc: int
    deflated: bool
    snapshots: dict[int, _Snapshot] = field(default_factory=dict[int, _Snapshot], compare=False, repr=False)
    """Where a stream can start: the first place met in each stretch of a deflated member."""

    def stream(self, handle: int, start: int) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of a deflated member, from at or before `start` on. Raises DataError."""
        known = [found for found in list(self.snapshots.values()) if found.position <= start]
        begin = _Snapshot(0, 0, 0, zlib.decompressobj(-15))
        now = max(known, key=lambda found: found.position, default=begin)
        position, source, crc, inflater = now.position, now.source, now.crc, now.inflater.copy()
        stretch = max(SNAPSHOT_BYTES, self.n_bytes // SNAPSHOTS)
        while position < self.n_bytes:
            packed = inflater.unconsumed_tail
            if not packed:
                packed = os.pread(handle, min(READ_BYTES, self.n_stored - source), self.offset + source)
                source += len(packed)
            try:
                data = inflater.decompress(packed, min(READ_BYTES, self.n_bytes - position))
            except zlib.error as error:
                raise DataError(f"{self.path} is damaged: {error}") from error
            if not data and (inflater.eof or not packed):
                raise DataError(f"{self.path} was cut, or is damaged: a member ends at byte {position}")
            crc = zlib.crc32(data, crc)
            if position + len(data) == self.n_bytes and crc != self.crc:
                raise DataError(f"{self.path} is damaged: a member has checksum {crc:#x}, expected {self.crc:#x}")
            yield position, data
            position += len(data)
            if position // stretch and position // stretch not in self.snapshots:
                self.snapshots[position // stretch] = _Snapshot(position, source, crc, inflater.copy())


def _member(path: str, handle: int, info: zipfile.ZipInfo, size: int) -> _Member:
    head = os.pread(handle, 30, info.header_offset) if 0 <= info.header_offset <= size - 30 else b""
    if head[:4] != b"PK\3\4":
        raise DataError(f"{path} is damaged: there is no member at byte {info.header_offset}")
    length, more = struct.unpack("<HH", head[26:30])
    name = info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    if os.pread(handle, length, info.header_offset + 30) != name:
        raise DataError(f"{path} is damaged: {info.filename!r} has another name at byte {info.header_offset}")
    offset = info.header_offset + 30 + length + more
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{path}: {info.filename!r} is encrypted, or compressed in a way that NumPy does not write")
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    most = info.compress_size * (_MOST_INFLATED if deflated else 1) + _MOST_INFLATED * deflated
    if offset + info.compress_size > size or info.file_size > most or (not deflated and info.file_size < most):
        raise DataError(f"{path} was cut, or is damaged: {info.filename!r} does not fit into its {size} bytes")
    return _Member(path, offset, info.compress_size, info.file_size, info.CRC, deflated)


def _head(handle: int, member: _Member, count: int) -> bytes:
    """The first bytes of a member."""
    count = min(count, member.n_bytes)
    if not member.deflated:
        return os.pread(handle, count, member.offset)
    try:  # deflate makes nothing twice as long
        return zlib.decompressobj(-15).decompress(
            os.pread(handle, min(2 * count, member.n_stored), member.offset), count
        )
    except zlib.error as error:
        raise DataError(f"{member.path} is damaged: {error}") from error


def _array(path: str, name: str, handle: int, member: _Member) -> ForeignArray | str | bytes:
    file = io.BytesIO(_head(handle, member, MAX_HEADER_BYTES + 12))
    try:
        shape, fortran, dtype = _described(file)
    except Exception as error:  # NumPy's parser, too
        raise DataError(f"{path}: {show(name)} is no array of NumPy: {str(error)[:200]}") from error
    start = file.tell()
    if dtype.hasobject:
        raise DataError(f"{path}: {show(name)} holds pickled Python objects, which could run any code: not read")
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(side or 1 for side in shape) >= 1 << 63:
        raise DataError(f"{path}: {show(name)} has shape {list(shape)}, which no array has")
    n_bytes = dtype.itemsize * math.prod(shape)
    if n_bytes != member.n_bytes - start:
        raise DataError(
            f"{path}: {show(name)} has {member.n_bytes - start} bytes, expected {n_bytes} of {dtype}{list(shape)}"
        )
    if dtype.kind in "SU" and not shape and n_bytes <= MAX_TEXT_BYTES:
        return _text(path, name, _head(handle, member, member.n_bytes), start, member.crc, dtype)
    if dtype.kind == "V":
        raise DataError(
            f"{path}: {show(name)} has dtype {dtype}: NumPy's format forgets dtypes that are not its own, such as"
            " bfloat16. Save a view of it as unsigned integers, or use safetensors"
        )
    if dtype.name not in DTYPES or not dtype.isnative:
        raise DataError(f"{path}: {show(name)} has dtype {dtype.str}, which JAX lacks")
    if member.deflated:
        return ForeignArray(dtype.name, shape, Deflated(member, start, dtype.name, shape, fortran))
    strides = tuple(math.prod(shape[:dim]) for dim in range(len(shape))) if fortran else None
    return ForeignArray(dtype.name, shape, Plain(path, member.offset + start, dtype.name, shape, strides, member))


def _described(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, Fortran order, dtype) from a .npy header."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of its format is not read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings(action="ignore"):  # that Python 2 wrote it
        return read(file, MAX_HEADER_BYTES)


def _text(path: str, name: str, raw: bytes, start: int, crc: int, dtype: np.dtype[Any]) -> str | bytes:
    if zlib.crc32(raw) != crc:
        raise DataError(f"{path} is damaged: {show(name)} has checksum {zlib.crc32(raw):#x}, expected {crc:#x}")
    try:
        return np.ndarray((), dtype, raw[start:] or b"\0").item()
    except ValueError as error:  # a number that is no character
        raise DataError(f"{path}: {show(name)} is no text: {error}") from error


@dataclass(frozen=True, slots=True)
class Plain(FileBlock):
    """An array in a member that is stored as it is."""

    member: _Member | None = None

    def read(self, box: Box, target: Array) -> None:
        FileBlock.read(self, box, target)
        if self.member is None or target.shape != self.shape:
            return
        stored = as_bits(target) if self.strides is None else as_bits(target).T
        if not stored.flags.c_contiguous:
            self.check()
            return
        with opened(self.path) as handle:
            head = os.pread(handle, self.offset - self.member.offset, self.member.offset)
        self._require(zlib.crc32(stored.reshape(-1).view(np.uint8).data, zlib.crc32(head)), self.member)

    def check(self) -> None:
        if (member := self.member) is None:
            return
        found = 0
        with opened(self.path) as handle:
            for at in range(0, member.n_bytes, READ_BYTES):
                found = zlib.crc32(os.pread(handle, min(READ_BYTES, member.n_bytes - at), member.offset + at), found)
        self._require(found, member)

    def _require(self, crc: int, member: _Member) -> None:
        if crc != member.crc:
            raise DataError(f"{self.path} is damaged: a member has checksum {crc:#x}, expected {member.crc:#x}")


@dataclass(frozen=True, slots=True)
class Deflated(Block):
    """An array in a deflated member."""

    member: _Member
    start: int
    """Of its first element, in the member."""

    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    def read(self, box: Box, target: Array) -> None:
        if not target.size:
            return
        target, shape = as_bits(target), self.shape
        if self.fortran:
            box, target, shape = box[::-1], target.T, shape[::-1]
        strides = c_strides(shape)
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(box, strides, strict=True))
        held, at = b"", 0
        with opened(self.member.path) as handle:
            for position, data in self.member.stream(handle, self.start + first * target.itemsize):
                at = at if held else position
                held += data
                # What comes before the array, and what is left of an element where a stream starts within it.
                skip = self.start - at if at < self.start else (self.start - at) % target.itemsize
                held, at = held[skip:], min(at + skip, at + len(held))
                if not held:
                    continue
                count = len(held) // target.itemsize
                element = (at - self.start) // target.itemsize
                _copy(shape, element, np.frombuffer(held, target.dtype, count), box, target)
                held, at = held[count * target.itemsize :], at + count * target.itemsize
                if last < element + count < math.prod(shape):  # to the end if it is near, where the checksum is
                    return


def _copy(shape: tuple[int, ...], element: int, values: Array, box: Box, target: Array) -> None:
    """Copy what a run of elements has of a box."""
    for run in flat_boxes(shape, element, element + len(values)):
        common = intersection(run, box)
        if common is not None:
            target[within(common, box)] = values[: volume(run)].reshape(extent(run))[within(common, run)]
        values = values[volume(run) :]
