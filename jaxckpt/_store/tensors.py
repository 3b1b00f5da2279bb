"""Reads and writes arrays on a file system with tensorstore."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import tensorstore as ts

from jaxckpt._model import zarr
from jaxckpt._model.chunks import content_digest
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack, indexed_objects_of
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import MappedWork, note_progress, submit
from jaxckpt._store.foreign_files import Mark, kvstore_of, marked, unless_replaced
from jaxckpt._store.storage_errors import clean_error_text, translate_array_errors
from jaxckpt._store.store import ArrayReader, ObjectRecord
from jaxckpt.errors import DataError, StorageError

if TYPE_CHECKING:
    from jaxckpt._store.folder import Folder

ENCODING_MEMORY_FACTOR = 4
"""Host memory in which tensorstore encodes an object, as a multiple of the object's bytes: it gathers and encodes each
chunk, and malloc keeps about as much again in the arenas of its threads. Measured as peak resident memory for a tree of
2 GiB: 470–670 MiB with 256 MiB of objects in flight, 130–210 MiB with 64 MiB, which took 10 % longer."""

# One parent context, so that memory:// paths refer to the same memory in every call.
ROOT_CONTEXT = ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def local_store(path: str) -> dict[str, str]:
    """tensorstore's spec of a folder. Raises StorageError if its path is not valid UTF-8."""
    if re.search("[\ud800-\udfff]", path):
        raise StorageError(
            errno.EILSEQ,
            f"tensorstore cannot open {path!r}, which is not valid UTF-8: rename it, or save without compression and"
            ' with Options.io="auto"',
        )
    return {"driver": "file", "path": path}


@functools.cache
def _file_context(*, sync: bool) -> ts.Context:
    # No two processes write the same object, so writing it needs no lock.
    return ts.Context({"file_io_sync": sync, "file_io_locking": {"mode": "none"}}, parent=ROOT_CONTEXT)


def open_in_folder(folder: str, data: str, stack: Stack, *, sync: bool = False) -> ts.TensorStore:
    """A stack of a checkpoint on a file system. With `sync`, an object is durable when it counts as written."""
    return open_array(local_store(os.path.join(folder, data, stack.name, "")), stack, _file_context(sync=sync))


def open_array(kvstore: Any, stack: Stack, context: ts.Context) -> ts.TensorStore:
    """A stack as a tensorstore array on a key-value store. Nothing is read."""
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": json.loads(zarr.metadata(stack)),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    with translate_array_errors(f"cannot open the array {stack.name}", reading=True):
        return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def compress(data: Array) -> Array:
    """Bytes as one zstd frame, which holds their number."""
    codecs = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [data.size]}}
    metadata = {"shape": [data.size], "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata, "create": True}
    array = ts.open({**spec, "store_data_equal_to_fill_value": True}, context=ts.Context()).result()
    array.write(data, can_reference_source_data_indefinitely=True).result()
    assert array.kvstore is not None
    return np.frombuffer(array.kvstore.read("c/0").result().value, np.uint8)


def begin_write(array: ts.TensorStore, pieces: Pieces) -> Pending[None]:
    """Start to write an object."""
    view = array[tuple(slice(a, b) for a, b in pieces.box)]
    source = pieces.array().view(array.dtype.numpy_dtype)
    return view.write(source, can_reference_source_data_indefinitely=True)


@dataclass(frozen=True, slots=True)
class TensorReader(ArrayReader):
    """Reads boxes of a tensorstore array."""

    array: ts.TensorStore

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        pending: list[Pending[None]] = []
        with ts.Batch() as batch:
            for box, target in targets:
                view = self.array[tuple(slice(a, b) for a, b in box)][ts.d[:].translate_to[0]]
                pending.append(ts.array(target.view(self.array.dtype.numpy_dtype)).write(view, batch=batch))
        return pending


@dataclass(frozen=True, slots=True)
class TensorFileReader(ArrayReader):
    """Reads and decodes objects with tensorstore, after comparing them with the manifest."""

    files: Folder
    data: str
    stack: Stack
    stored: Mapping[str, tuple[int, str]]
    array: TensorReader
    checked: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def read(self, targets: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        for box, _ in targets:
            for index, _, _ in indexed_objects_of(self.stack, box):
                if index not in self.checked:
                    self._require_intact(index)
                    self.checked.add(index)
                    note_progress()
        return self.array.read(targets)

    def _require_intact(self, index: tuple[int, ...]) -> None:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        length, digest = self.stored[zarr.index_key(index)]
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

    memory_factor: ClassVar[int] = ENCODING_MEMORY_FACTOR

    def write(self, index: tuple[int, ...], pieces: Pieces, content: bool = False) -> Pending[ObjectRecord]:
        key = f"{self.data}/{zarr.object_key(self.stack, index)}"
        compare = submit(functools.partial(content_digest, self.stack, index, pieces)) if content else None
        return MappedWork(begin_write(self.array, pieces), functools.partial(self._written, key, compare))

    def _written(self, key: str, compare: Pending[str] | None, pending: Pending[None]) -> ObjectRecord:
        with translate_array_errors(f"cannot write {self.files.url}/{key}"):
            pending.result()
        return ObjectRecord(*self.files.digest(key, self.stack), compare.result() if compare else "")


@dataclass(frozen=True, slots=True)
class ArrayFolder:
    """Arrays that another library wrote through tensorstore: each in a folder of its name, or all in one OCDBT
    database."""

    path: str
    """A folder: a local path, or a path in the bucket of `foreign_files.using_files`."""

    ocdbt: bool
    base: Mapping[str, Any]
    """tensorstore's spec of the folder, without a slash at the end of its path."""

    context: ts.Context

    mark: Mark | None = None
    """The mark of all arrays, if one file is rewritten whenever any of them is."""

    @classmethod
    def at(cls, path: str, *, ocdbt: bool, mark: Mark | None = None) -> Self:
        mark = marked(f"{path}/manifest.ocdbt") if ocdbt else mark
        base, parent = kvstore_of(path) or (local_store(path), None)
        # The cache keeps nodes of the database. Without it, each read would start at the root.
        caches = {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#ocdbt": {"total_bytes_limit": 32 << 20}}
        return cls(path, ocdbt, {**base, "path": base["path"].rstrip("/")}, ts.Context(caches, parent=parent), mark)

    def mark_of(self, key: str) -> Mark:
        """The mark of an array whose metadata has this key."""
        return self.mark or marked(f"{self.path}/{key}")

    def _spec(self, name: str = "") -> dict[str, Any]:
        below = f"{name}/" if name else ""
        base = {**self.base, "path": f"{self.base['path']}/"}
        if not self.ocdbt:
            return {**base, "path": f"{base['path']}{below}"}
        return {"driver": "ocdbt", "base": base, "path": below, "cache_pool": "cache_pool#ocdbt"}

    @contextlib.contextmanager
    def _reading(self, what: str) -> Generator[None]:
        marks = [self.mark] if self.mark else []
        with unless_replaced(marks), translate_array_errors(f"cannot {what} {self.path}", reading=True):
            yield

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several small values, None for missing ones. Raises DataError, StorageError."""
        with self._reading("read the metadata of arrays in"):
            folder = ts.KvStore.open(self._spec(), context=self.context).result()
            results = [pending.result() for pending in [folder.read(key) for key in keys]]
        return [None if result.state == "missing" else bytes(result.value) for result in results]

    def list_keys(self) -> list[str]:
        """All keys, sorted. Raises DataError, StorageError."""
        with self._reading("list the arrays in"):
            keys = ts.KvStore.open(self._spec(), context=self.context).result().list().result()
        return sorted(key.decode("utf-8", "surrogateescape") for key in keys)

    def array_reader(self, name: str, driver: str, metadata: Any, *, strict: bool) -> TensorReader:
        """A reader of the array with this name and Zarr metadata. Reads nothing yet. Unless `strict`, a missing chunk
        reads as the fill value. Raises DataError if the metadata is malformed."""
        spec = {
            "driver": driver,
            "kvstore": self._spec(name),
            "metadata": metadata,
            "fill_missing_data_reads": not strict,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        try:
            return TensorReader(ts.open(spec, open=True, assume_metadata=True, context=self.context).result())
        except (ValueError, OverflowError) as error:
            raise DataError(f"the Zarr metadata of {name!r} is damaged: {clean_error_text(str(error))}") from error
