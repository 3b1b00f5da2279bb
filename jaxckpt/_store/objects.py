"""The bytes of a checkpoint: its small files, its arrays, and its objects as bytes."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._model.zarr import ReadRange

MAX_FILE_BYTES = 1 << 30
"""The largest file that `Objects.read` reads."""

Pending = Any
"""Running work: `.result()` waits and raises, `.done()` reports whether it has ended."""


class Objects(Protocol):
    """Reads and writes the files below one path."""

    @property
    def url(self) -> str:
        """The path as the user gave it, without a trailing slash."""
        ...

    # Small files

    def read(self, key: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """The contents of several small files; None for those that do not exist."""
        ...

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        """Write a small file into an existing folder. With `sync`, its content is durable; the folder is synced
        later."""

    def remove(self, key: str) -> None:
        """Delete a small file, if it exists."""

    # Arrays

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        """A writer for the objects of a stack. With `sync`, an object is durable when it counts as written."""
        ...

    def array_reader(
        self,
        data: str,
        stack: Stack,
        stored: Mapping[str, tuple[int, str]],
        plan: Iterable[Sequence[Box]] = (),
    ) -> ArrayReader:
        """A reader for a stack whose objects have these lengths and digests, by grid index.

        `plan` has the boxes of each future read. Reads nothing: the array's metadata is built from the manifest.
        """
        ...

    # Objects as bytes

    can_link: bool
    """Whether an object of another checkpoint can be linked into this one without a copy."""

    def link(self, source: Objects, old: str, new: str, length: int, *, sync: bool) -> None:
        """Link the object of `length` bytes at the key `old` of `source` to the key `new` here. Raises StorageError if
        that is impossible: ENOENT if there is no such object. With `sync` its data is made durable first."""
        ...

    def check_lengths(self, lengths: Mapping[str, int]) -> dict[str, str]:
        """The problems of objects of these lengths that can be found without reading them completely."""
        ...

    def range_reader(self, key: str) -> contextlib.AbstractContextManager[ReadRange]:
        """A function that reads ranges of an object. It raises DataError if the object is too short."""
        ...


class ArrayWriter(Protocol):
    """Writes objects of a stack."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending:
        """Start to write the object at a grid index. The result is its length, its digest and, if `content` is set, the
        digest of its content, otherwise "". Until the result arrives, the pieces must not change."""
        ...


class ArrayReader(abc.ABC):
    """Reads boxes of a stack."""

    __slots__ = ()

    shares_chunks: ClassVar[bool] = False
    """Whether a chunk that consecutive boxes of one call need is read only once."""

    @abc.abstractmethod
    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        """Start to read boxes, each into an array of its shape. Neighboring boxes are read together."""
        ...

    def buffered_bytes(self, boxes: Sequence[Box]) -> int:
        """Bytes of memory, in addition to the arrays, that a read of these boxes needs until all results arrive."""
        return 0
