"""Writes the objects of a stack, and reads boxes of it: the interface of both engines.

- `files` moves uncompressed chunks on file systems, with system calls of its own.
- `tensors` moves the others on file systems, and `fetching` all on object stores, with tensorstore.

`Folder` and `Bucket` choose the engine of a stack. Nothing else depends on which one it is.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._pipeline.pipeline import Pending


class ObjectRecord(NamedTuple):
    """What a manifest records of an object."""

    length: int
    digest: str
    content: str = ""
    """The digest of its content; empty if not computed."""


class ArrayWriter(Protocol):
    """Writes objects of a stack."""

    memory_factor: ClassVar[int]
    """Host memory that it takes while it writes an object, as a multiple of the object's bytes."""

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        """Start to write the object at a grid index; with `content`, also compute the digest of its content. Until the
        result arrives, the pieces must not change."""
        ...


class ArrayReader(abc.ABC):
    """Reads boxes of a stack."""

    __slots__ = ()

    shares_chunks: ClassVar[bool] = False
    """Whether a chunk that consecutive boxes of one call need is read only once."""

    @abc.abstractmethod
    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        """Start to read boxes, each into an array of its shape. Neighboring boxes are read together."""
        ...

    def buffered_bytes(self, boxes: Sequence[Box]) -> int:
        """Bytes of memory, in addition to the arrays, that a read of these boxes needs until all results arrive."""
        return 0
