"""The bytes of a checkpoint: its small files, its arrays, and its objects as bytes."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from jaxckpt._format.grid import Box
from jaxckpt._format.pieces import Array, Pieces
from jaxckpt._format.stacks import Stack
from jaxckpt._format.zarr import ReadRange

MOST_BYTES = 1 << 30
"""Of a small file."""

Pending = Any
"""Work under way: `.result()` waits and raises, `.done()` asks."""


class Objects(Protocol):
    """Reads and writes what is below one path."""

    @property
    def url(self) -> str:
        """The path as the user gave it, without a trailing slash."""
        ...

    # Small files

    def read(self, key: str) -> bytes | None:
        """The whole of a small file; None if it does not exist."""

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """Several small files."""
        ...

    def put(self, key: str, content: bytes, *, sync: bool = False) -> None:
        """Write a small file into an existing folder, which is synced later."""

    def remove(self, key: str) -> None:
        """Delete a small file, if it exists."""

    # Arrays

    def array_writer(self, data: str, stack: Stack, *, sync: bool) -> ArrayWriter:
        """For the objects of a stack; with `sync` each is durable when it counts as written."""
        ...

    def array_reader(
        self,
        data: str,
        stack: Stack,
        stored: Mapping[str, tuple[int, str]],
        plan: Iterable[Sequence[Box]] = (),
    ) -> ArrayReader:
        """Of a stack whose objects have these lengths and digests, by place in the grid.

        `plan` has the boxes of each read to come. Nothing is read: the array's metadata is built from the manifest.
        """
        ...

    # Objects as bytes

    links: bool
    """Whether an object of another checkpoint can get a name in this one without being copied."""

    def link(self, source: Objects, old: str, new: str, length: int, *, sync: bool) -> bool:
        """Have the object of `length` bytes at the key `old` of `source` at the key `new` here as well; returns whether
        that was possible. With `sync` its data is made durable first."""
        ...

    def misfits(self, lengths: Mapping[str, int]) -> dict[str, str]:
        """What is wrong with objects of these lengths, as far as that shows without reading them whole."""
        ...

    def ranges(self, key: str) -> contextlib.AbstractContextManager[ReadRange]:
        """Reads ranges of an object. Raises DataError if the object ends before."""
        ...


class ArrayWriter(Protocol):
    """Writes objects of a stack."""

    def write(self, index: tuple[int, ...], pieces: Pieces) -> Pending:
        """Start to write the object at a place in the grid. The result is its length and digest; until then the pieces
        must not change."""
        ...


class ArrayReader(abc.ABC):
    """Reads boxes of a stack."""

    __slots__ = ()

    shares_chunks: ClassVar[bool] = False
    """Whether chunks that several boxes of one call want are read once, if these follow each other in the call."""

    @abc.abstractmethod
    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending]:
        """Start to read boxes, each into an array of its shape; neighbours are read together."""
        ...

    def held_bytes(self, boxes: Sequence[Box]) -> int:
        """Bytes that a read of these boxes holds, in addition to the arrays, until all its results are there."""
        return 0
