"""Objects of a checkpoint on a file system, read and written with tensorstore."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tensorstore as ts

from jaxckpt._model import zarr
from jaxckpt._model.chunks import content_digest
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import MappedWork, note_progress, submit
from jaxckpt._store.arrays import ArrayReader, ObjectRecord
from jaxckpt._store.storage_errors import translate_tensorstore_errors
from jaxckpt._store.tensors import TensorReader, begin_write
from jaxckpt.errors import DataError

if TYPE_CHECKING:
    from jaxckpt._store.folder import Folder


@dataclass(frozen=True, slots=True)
class TensorFileReader(ArrayReader):
    """Reads and decodes objects with tensorstore, after comparing them with the manifest."""

    files: Folder
    data: str
    stack: Stack
    stored: Mapping[str, tuple[int, str]]
    array: TensorReader
    checked: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        for box, _ in wanted:
            for index, _, _ in indexed_objects_of(self.stack, box):
                if index not in self.checked:
                    self._require_intact(index)
                    self.checked.add(index)
                    note_progress()
        return self.array.read(wanted)

    def _require_intact(self, index: tuple[int, ...]) -> None:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        length, digest = self.stored["/".join(map(str, index))]
        problem = self.files.check_lengths({key: length}).get(key)
        if not problem and self.files.digest(key, self.stack)[1] != digest:
            problem = "does not hold the data that was saved there"
        if problem:
            raise DataError(f"{self.files.url}/{key} {problem}")


@dataclass(frozen=True, slots=True)
class TensorFileWriter:
    """Encodes and writes objects with tensorstore."""

    files: Folder
    data: str
    stack: Stack
    array: ts.TensorStore

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        compare = submit(functools.partial(content_digest, self.stack, index, pieces)) if content else None
        return MappedWork(begin_write(self.array, pieces), functools.partial(self._written, key, compare))

    def _written(self, key: str, compare: Pending[str] | None, pending: Pending[None]) -> ObjectRecord:
        with translate_tensorstore_errors(f"cannot write {self.files.url}/{key}"):
            pending.result()
        return ObjectRecord(*self.files.digest(key, self.stack), compare.result() if compare else "")
