"""Reads zip archives in a file, or in a part of one: the position of each member's bytes.

directory at the end ─▶ each member's header ─▶ its bytes; every length is checked against the archive before it is used
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from jaxckpt._store.foreign_files import OpenFile, opened, read_head
from jaxckpt.errors import DataError

MAX_DIRECTORY_BYTES = 1 << 28

READ_BYTES = 1 << 20
"""Bytes per read to compute a checksum."""

_LOCAL, _CENTRAL, _END, _END_64, _LOCATOR_64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_ENCRYPTED, _UTF8 = 1, 0x800
_STORED, _DEFLATED = 0, 8

_MAX_INFLATION = 1032
"""The largest number of output bytes that deflate can produce from one input byte."""


def first_name(path: str) -> str:
    """The name of the first member of a zip archive; empty if the path is not an archive."""
    start = read_head(path, 30 + (1 << 16))
    if len(start) < 30 or not start.startswith(_LOCAL):
        return ""
    return start[30 : 30 + int.from_bytes(start[26:28], "little")].decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive."""

    path: str
    """Path of the file that holds the archive."""

    name: str

    offset: int
    """Offset in the file of its stored bytes."""

    n_stored: int
    """Number of stored bytes."""

    n_bytes: int
    """Number of bytes after decompression."""

    crc32: int
    deflated: bool

    def check(self) -> None:
        """Raise DataError unless the data of a member that is not deflated has the recorded checksum."""
        crc32 = 0
        with opened(self.path) as handle:
            for at in range(0, self.n_bytes, READ_BYTES):
                crc32 = zlib.crc32(handle.read(min(READ_BYTES, self.n_bytes - at), self.offset + at), crc32)
        self.require_crc32(crc32)

    def require_crc32(self, crc32: int) -> None:
        """Raise DataError unless this is the recorded checksum."""
        if crc32 != self.crc32:
            raise DataError(
                f"{self.path}: {self.name} at byte {self.offset} was altered:"
                f" its CRC-32 checksum is {crc32:08x}, expected {self.crc32:08x}"
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A member's entry in the directory."""

    raw_name: bytes
    comment: bytes
    flags: int
    method: int
    crc32: int
    header_offset: int
    n_stored: int
    n_bytes: int


@contextlib.contextmanager
def opened_archive(path: str, start: int = 0, size: int | None = None) -> Generator[Archive]:
    """An archive in a part of a file.

    Errors from damaged content, in the archive or in the body of the `with` statement, become a DataError that names
    the file and the part.
    """
    with opened(path) as handle:
        length = handle.size
        if start + (size or 0) > length:
            raise DataError(f"{path} is {length} bytes long, expected at least {start + (size or 0)}")
        try:
            yield Archive(path, handle, start, length - start if size is None else size)
        except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
            raise DataError(f"{path}: the archive at byte {start} is damaged: {error}") from error


class Archive:
    """A zip archive with its directory. Methods raise ValueError or struct.error if it is damaged."""

    def __init__(self, path: str, handle: OpenFile, start: int, size: int) -> None:
        self.path = path
        self.handle = handle
        self.start = start
        self._size = size
        self._tail = b""
        self._tail = self._read(max(0, size - (1 << 12)), min(size, 1 << 12))
        self._entries = self._directory()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Member:
        """A member with the position of its bytes, which only its own header gives."""
        entry = self._entries[name]
        if entry.flags & _ENCRYPTED or entry.method not in (_STORED, _DEFLATED):
            raise ValueError(f"{name[:80]!r} is encrypted, or compressed by a method other than deflate")
        header = self._read(entry.header_offset, 30)
        if not header.startswith(_LOCAL):
            raise ValueError(f"{name[:80]!r} is not where its directory says")
        length, more = struct.unpack("<HH", header[26:30])
        if self._read(entry.header_offset + 30, length) != entry.raw_name:
            raise ValueError(f"{name[:80]!r} has another name at byte {entry.header_offset}")
        offset, stored, count = entry.header_offset + 30 + length + more, entry.n_stored, entry.n_bytes
        deflated = entry.method == _DEFLATED
        if offset + stored > self._size:
            raise ValueError(
                f"{name[:80]!r} of {stored} bytes at byte {offset} is beyond the archive's {self._size} bytes"
            )
        if count > (stored + 1) * _MAX_INFLATION if deflated else count != stored:
            raise ValueError(f"{name[:80]!r} cannot hold {count} bytes in the {stored} that are stored")
        return Member(self.path, name, self.start + offset, stored, count, entry.crc32, deflated)

    def comment(self, name: str) -> str:
        """The comment on a member."""
        return self._entries[name].comment.decode(errors="replace")

    def content(self, member: Member, most: int) -> bytes:
        """At most the first `most` bytes of a member that is not deflated."""
        return self._read(member.offset - self.start, min(member.n_stored, most))

    def _read(self, offset: int, size: int) -> bytes:
        """Bytes of the archive, by their offset in it. Raises ValueError if they are outside of it."""
        if offset < 0 or offset + size > self._size:
            raise ValueError(f"bytes {offset} to {offset + size} are beyond the archive's {self._size} bytes")
        first = self._size - len(self._tail)
        if offset >= first:
            return self._tail[offset - first : offset - first + size]
        data = self.handle.read(size, self.start + offset)
        if len(data) < size:
            raise ValueError("the file was truncated")
        return data

    def _directory(self) -> dict[str, _Entry]:
        """The entries of the directory at the end of the archive, also in zip64 form. Raises ValueError."""
        at = self._size - 22
        if at < 0 or not (end := self._read(at, 22)).startswith(_END):
            raise ValueError("it has no directory at its end: it was truncated, or is not a zip archive")
        count, size, offset = struct.unpack("<HII", end[10:20])
        if at >= 20 and (locator := self._read(at - 20, 20)).startswith(_LOCATOR_64):
            end = self._read(int.from_bytes(locator[8:16], "little"), 56)
            if not end.startswith(_END_64):
                raise ValueError("its directory is not where it should be")
            count, size, offset = struct.unpack("<QQQ", end[32:56])
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size} bytes; at most {MAX_DIRECTORY_BYTES} are read")
        data = self._read(offset, size)
        entries: dict[str, _Entry] = {}
        at = 0
        for _ in range(count):
            if data[at : at + 4] != _CENTRAL:
                raise ValueError("its directory is damaged")
            flags, method, _, _, crc32, stored, length, *sizes = struct.unpack("<HHHHIIIHHH", data[at + 8 : at + 34])
            header = int.from_bytes(data[at + 42 : at + 46], "little")
            name_end = at + 46 + sizes[0]
            raw_name, wide = data[at + 46 : name_end], _zip64_values(data[name_end : name_end + sizes[1]])
            length, stored, header = (
                next(wide, -1) if value == 0xFFFFFFFF else value for value in (length, stored, header)
            )
            if min(length, stored, header) < 0:
                raise ValueError("its directory is damaged")
            name = raw_name.decode("utf-8" if flags & _UTF8 else "cp437")
            if name in entries:
                raise ValueError(f"{name[:80]!r} appears twice in its directory")
            at = name_end + sizes[1] + sizes[2]
            comment = data[name_end + sizes[1] : at]
            entries[name] = _Entry(raw_name, comment, flags, method, crc32, header, stored, length)
        if at != size:
            raise ValueError(f"the {count} entries of its directory have {at} bytes, expected {size}")
        return entries


def _zip64_values(extra: bytes) -> Iterator[int]:
    """The 64-bit sizes and offsets in an extra field of a directory entry."""
    while len(extra) >= 4:
        kind, size = struct.unpack("<HH", extra[:4])
        if kind == 1:
            yield from struct.unpack(f"<{size // 8}Q", extra[4 : 4 + size // 8 * 8])
            return
        extra = extra[4 + size :]
