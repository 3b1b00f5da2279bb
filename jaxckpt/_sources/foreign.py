"""Checkpoints of other libraries: arrays that can be read box by box, under a manifest that is composed in memory."""

from __future__ import annotations

import abc
import errno
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np

from jaxckpt._keywords import explain_names
from jaxckpt._model.grid import Box, Spec, intersection, relative, show_box, slices_within
from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._model.records import LeafRecord, Manifest, MeshRecord, SavedLeaf
from jaxckpt._pipeline.lanes import operate
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import JoinedWork, submit
from jaxckpt._sources.source import Source
from jaxckpt._store.foreign_files import Mark, OpenedFiles, require_unchanged, url_of, using_files
from jaxckpt._store.store import ArrayReader
from jaxckpt.errors import DataError, JaxckptError, StorageError, UnsupportedError, show_path


class ArrayData(abc.ABC):
    """The data of an array, or of a part of one, in a foreign checkpoint."""

    @abc.abstractmethod
    def read(self, box: Box, target: Array) -> None:
        """Fill `target` with a box of it, with a few MiB of additional host memory. Raises DataError, StorageError.

        Called by several threads at once.
        """

    @property
    def origins(self) -> Iterable[ArrayData]:
        """The data that this data is made of; none if it is stored itself."""
        return ()

    def check(self) -> None:
        """Verify the stored data with its checksums, if the format has any.

        Raises DataError, StorageError.
        """
        for data in self.origins:
            data.check()

    @property
    def marks(self) -> Iterable[Mark]:
        """Files that differ from their marks if data that was read may be of a later save; none if `read` finds out."""
        return itertools.chain.from_iterable(data.marks for data in self.origins)


class AsyncArrayData(ArrayData):
    """Data that can be read asynchronously, without a thread of jaxckpt."""

    @abc.abstractmethod
    def start(self, box: Box, target: Array) -> Pending[None]:
        """Start to fill `target` with a box. It and its result raise tensorstore's errors."""

    def read(self, box: Box, target: Array) -> None:
        self.start(box, target).result()


@dataclass(frozen=True, slots=True)
class StackRow(AsyncArrayData):
    """A leaf of a jaxckpt checkpoint."""

    reader: ArrayReader
    row: int

    def start(self, box: Box, target: Array) -> Pending[None]:
        (pending,) = self.reader.read([(((self.row, self.row + 1), *box), target[None])])
        return pending


@dataclass(frozen=True, slots=True)
class InMemoryData(ArrayData):
    """A small array that was read together with the index files."""

    array: Array

    def read(self, box: Box, target: Array) -> None:
        np.copyto(as_bits(target), as_bits(self.array)[tuple(slice(*side) for side in box)])


@dataclass(frozen=True, slots=True)
class InFiles(ArrayData):
    """The data of an array in files that must not be replaced."""

    data: ArrayData
    files: OpenedFiles = field(repr=False)

    def read(self, box: Box, target: Array) -> None:
        with using_files(self.files):
            self.data.read(box, target)

    @property
    def origins(self) -> tuple[ArrayData]:
        return (self.data,)

    def check(self) -> None:
        with using_files(self.files):
            self.data.check()


@dataclass(frozen=True, slots=True)
class Unreadable(ArrayData):
    """A leaf that cannot be read, in a checkpoint whose other leaves can. It is not damaged."""

    reason: str

    all_reasons: str = ""
    """Lines with the path and the reason of each such leaf of the checkpoint."""

    remedy: str = "leave it out with select="

    def read(self, box: Box, target: Array) -> None:
        reasons = self.all_reasons or self.reason
        raise UnsupportedError(
            f"it is not damaged, but of a kind that jaxckpt does not read; {self.remedy}:\n{reasons}"
        )


@dataclass(frozen=True, slots=True)
class Tiled(ArrayData):
    """An array assembled from pieces, each with its box."""

    pieces: Sequence[tuple[Box, ArrayData]]

    def read(self, box: Box, target: Array) -> None:
        for own_box, data in self.pieces:
            common = intersection(own_box, box)
            if common is not None:  # the "..." keeps a 0-d array an array
                data.read(relative(common, own_box), target[(*slices_within(common, box), ...)])

    @property
    def origins(self) -> Iterable[ArrayData]:
        return (data for _, data in self.pieces)


@dataclass(frozen=True, slots=True)
class Replicas(ArrayData):
    """Copies of an array that must be equal: each read reads all of them and compares them bit for bit."""

    path: str
    """Path of the leaf."""

    copies: Mapping[str, ArrayData]
    """The copies by name, for messages: "rank 3"."""

    def read(self, box: Box, target: Array) -> None:
        if (names := self.different_copies(box, target)) is not None:
            raise self.difference(*names, box)

    def different_copies(self, box: Box, target: Array) -> tuple[str, str] | None:
        """Fill `target` with a box. Returns the names of two copies that differ there, if any."""
        (first, data), *others = self.copies.items()
        data.read(box, target)
        for name, copy in others:
            other = np.empty_like(target)
            copy.read(box, other)
            if as_bits(other).tobytes() != as_bits(target).tobytes():
                return first, name
        return None

    def difference(self, first: str, other: str, box: Box) -> JaxckptError:
        """The error if two copies differ in a box."""
        return DataError(
            f"{show_path(self.path)}: {show_box(box)} of its shard is not the same in {first} and {other}, which should"
            " hold replicas"
        )

    @property
    def origins(self) -> Iterable[ArrayData]:
        return self.copies.values()


@explain_names
@dataclass(frozen=True, slots=True)
class ForeignArray:
    """A leaf of a foreign checkpoint."""

    dtype: str
    """Name of a dtype: one of `dtypes.DTYPES`, or another name if the array cannot be read."""

    shape: tuple[int, ...]
    """Its global shape; for a PRNG key, of its raw data."""

    data: ArrayData

    kind: Literal["jax", "numpy", "numpy_scalar", "key", "str", "bytes"] = "jax"
    """The kind of the leaf. "str" and "bytes" are arrays of bytes, "str" in UTF-8."""

    impl: str | None = None
    """PRNG implementation, for kind "key"."""

    chunk: tuple[int, ...] | None = None
    """Shape of the unit that can only be read completely; None if any box can be read."""

    mesh: MeshRecord | None = None
    """The mesh at the time of the save, if known."""

    spec: Spec = ()
    """For each leading dimension, the axes of the mesh that split it."""


def as_foreign(leaf: SavedLeaf, data: ArrayData) -> ForeignArray:
    """An array of a checkpoint as a leaf of a foreign one, with its data."""
    kind: Any = leaf.kind
    stack, record = leaf.stack, leaf.record
    return ForeignArray(stack.dtype, stack.shape, data, kind, record.impl, stack.chunk_sides[1:], leaf.mesh, leaf.spec)


@explain_names
@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint of another library."""

    url: str
    manifest: Manifest
    row_data: Sequence[Sequence[ArrayData]] = field(repr=False)
    """The data of each row of each stack."""

    files: Sequence[str] = field(default=(), repr=False)
    """The files or folders that it was assembled from, if not from `url`."""

    origins: Sequence[Source] = field(default=(), repr=False)
    """The checkpoint of which this one is a view, or those that it is made of."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.manifest)).hexdigest()

    def require_metadata(self, stacks: Sequence[int]) -> None:
        pass

    def array_reader(self, stack: int, plan: Iterable[Sequence[Box]] = ()) -> ArrayReader:
        return _RowReader(self.row_data[stack])

    def require_unchanged(self, numbers: Iterable[int]) -> None:
        operate(f"looking at {self.url}", lambda: self._require_unchanged(numbers))

    def _require_unchanged(self, numbers: Iterable[int]) -> None:
        leaves = [self.manifest.leaves[number] for number in numbers]
        places = (self.manifest.stack_and_row(leaf) for leaf in leaves if leaf.stack is not None)
        rows = (self.row_data[stack][row] for stack, row in places)
        require_unchanged(dict.fromkeys(mark for data in rows for mark in data.marks))

    def change_since_open(self) -> str | None:
        if change := next(filter(None, (origin.change_since_open() for origin in self.origins)), None):
            return change
        try:
            self._require_unchanged(range(len(self.manifest.leaves)))
        except DataError:
            return f"{self.url} was deleted"
        except StorageError as error:
            if error.errno != errno.ESTALE:
                raise
            return f"{self.url} was replaced by another"
        return None


def with_files(checkpoint: ForeignCheckpoint, files: OpenedFiles) -> ForeignCheckpoint:
    """A checkpoint that was opened among these files, so that its data is read from them."""
    # tensorstore reads the others, or they are in memory.
    others = AsyncArrayData, InMemoryData, Unreadable
    row_data = [[d if isinstance(d, others) else InFiles(d, files) for d in rows] for rows in checkpoint.row_data]
    urls = tuple(map(url_of, checkpoint.files))
    return replace(checkpoint, url=url_of(checkpoint.url), row_data=row_data, files=urls)


def unreadable_reason(source: Source, leaf: LeafRecord) -> str | None:
    """The reason why a leaf cannot be read although it is not damaged; None for other leaves."""
    if not isinstance(source, ForeignCheckpoint) or leaf.stack is None or leaf.row is None:
        return None
    data = source.row_data[leaf.stack][leaf.row]
    return data.reason if isinstance(data, Unreadable) else None


@dataclass(frozen=True, slots=True)
class _RowReader(ArrayReader):
    rows: Sequence[ArrayData]

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        return [self._start(box, target) for box, target in targets]

    def _start(self, box: Box, target: Array) -> Pending[None]:
        # The "..." keeps a scalar an array.
        row_targets = [(data, target[row, ...]) for row, data in enumerate(self.rows[slice(*box[0])])]
        started = [data.start(box[1:], into) for data, into in row_targets if isinstance(data, AsyncArrayData)]
        rest = [(data, into) for data, into in row_targets if not isinstance(data, AsyncArrayData)]
        if rest:
            started.append(submit(functools.partial(_read_all, rest, box[1:])))
        return JoinedWork(started)


def _read_all(row_targets: Sequence[tuple[ArrayData, Array]], box: Box) -> None:
    for data, into in row_targets:
        data.read(box, into)
