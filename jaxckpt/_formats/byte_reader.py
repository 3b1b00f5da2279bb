"""Reads a file of many small values and some large ones from front to back. Large bytes are located but not read."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxckpt._store.foreign_files import OpenFile

MAX_BYTES = 1 << 30
"""The most bytes that are read, without those that are only located. Objects take a dozen times as much memory."""

MIN_LOCATED_BYTES = 1 << 16
"""Bytes objects of at least this size are located but not read."""

_WINDOW_BYTES = 1 << 12, 1 << 18
"""Bytes per read: few at first, because large bytes are soon skipped, then more."""


@dataclass(frozen=True, slots=True)
class LocatedBytes:
    """The position of a bytes object in the file."""

    path: str
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


@dataclass(slots=True, eq=False)
class ByteReader:
    """Reads a part of an open file. Methods raise ValueError if it ends too early or holds too much."""

    path: str
    handle: OpenFile
    window_start: int
    """Position in the file of the window's first byte; at first, of the part."""

    end: int
    window: bytes = field(default=b"", init=False)
    window_index: int = field(default=0, init=False)
    """The next byte in the window."""

    n_read: int = field(default=0, init=False)
    _read_ahead_bytes: int = field(default=_WINDOW_BYTES[0], init=False)

    @property
    def position(self) -> int:
        return self.window_start + self.window_index

    def fill(self, count: int) -> None:
        """Make at least this many bytes available in the window."""
        left = len(self.window) - self.window_index
        size = max(count - left, min(self._read_ahead_bytes, self.end - self.position - left))
        if self.position + count > self.end:
            raise ValueError(f"it ends in the middle of a value of {count} bytes")
        self._read_ahead_bytes = min(2 * self._read_ahead_bytes, _WINDOW_BYTES[1])
        self.n_read += size
        if self.n_read > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes in addition to its arrays")
        more = self.handle.read(size, self.position + left)
        if len(more) < min(size, count - left):
            raise ValueError("the file was truncated while it was being read")
        self.window_start, self.window = self.position, self.window[self.window_index :] + more
        self.window_index = 0

    def take(self, count: int) -> bytes:
        start, end = self.window_index, self.window_index + count
        if end > len(self.window):
            self.fill(count)
            start, end = 0, count
        self.window_index = end
        return self.window[start:end]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> bytes:
        end = self.window.find(b"\n", self.window_index)
        while end < 0:
            left, all_left = len(self.window) - self.window_index, self.end - self.position
            self.fill(min(2 * left + 1, all_left) if left < all_left else left + 1)
            end = self.window.find(b"\n", left)
        return self.take(end + 1 - self.window_index)[:-1]

    def take_or_locate(self, count: int) -> bytes | LocatedBytes:
        """Bytes, or their position if they are many."""
        if count < MIN_LOCATED_BYTES:
            return self.take(count)
        skipped = LocatedBytes(self.path, self.position, count)
        self.skip(count)
        return skipped

    def skip(self, count: int) -> None:
        position = self.position + count
        if position > self.end:
            raise ValueError(f"it ends in the middle of bytes of length {count}")
        self.window_start, self.window, self.window_index = position, b"", 0
        self._read_ahead_bytes = _WINDOW_BYTES[0]
