"""Reads and writes arrays with tensorstore."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorstore as ts

from jaxckpt._model import zarr
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._model.stacks import Stack
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._store.arrays import ArrayReader
from jaxckpt._store.storage_errors import clean_error_text, translate_tensorstore_errors
from jaxckpt.errors import DataError, StorageError

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


def open_array(kvstore: Any, stack: Stack, context: ts.Context) -> ts.TensorStore:
    """A stack as a tensorstore array on a key-value store. Nothing is read."""
    spec = {
        "driver": "zarr3",
        "kvstore": kvstore,
        "metadata": json.loads(zarr.metadata(stack)),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    with translate_tensorstore_errors(f"cannot open the array {stack.name}", reading=True):
        return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def begin_write(array: ts.TensorStore, pieces: Pieces) -> Pending[None]:
    """Start to write an object."""
    view = array[tuple(slice(a, b) for a, b in pieces.box)]
    source = pieces.array().view(array.dtype.numpy_dtype)
    return view.write(source, can_reference_source_data_indefinitely=True)


@dataclass(frozen=True, slots=True)
class TensorReader(ArrayReader):
    """Reads boxes of a tensorstore array."""

    array: ts.TensorStore

    def read(self, wanted: Sequence[tuple[Box, Array]]) -> list[Pending[None]]:
        pending: list[Pending[None]] = []
        with ts.Batch() as batch:
            for box, target in wanted:
                view = self.array[tuple(slice(a, b) for a, b in box)][ts.d[:].translate_to[0]]
                pending.append(ts.array(target.view(self.array.dtype.numpy_dtype)).write(view, batch=batch))
        return pending


@dataclass(frozen=True, slots=True)
class ArrayFolder:
    """Arrays that another library wrote through tensorstore: each in a folder of its name, or all in one OCDBT
    database."""

    path: str
    """A local folder."""

    ocdbt: bool

    # The cache keeps nodes of the database. Without it, each read would start at the root.
    context: ts.Context = field(
        default_factory=lambda: ts.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#ocdbt": {"total_bytes_limit": 32 << 20}}
        )
    )

    def _spec(self, name: str = "") -> dict[str, Any]:
        below = f"{name}/" if name else ""
        if not self.ocdbt:
            return local_store(f"{self.path}/{below}")
        base = local_store(f"{self.path}/")
        return {"driver": "ocdbt", "base": base, "path": below, "cache_pool": "cache_pool#ocdbt"}

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several small values, None for missing ones. Raises DataError, StorageError."""
        with translate_tensorstore_errors(f"cannot read the metadata of arrays in {self.path}", reading=True):
            folder = ts.KvStore.open(self._spec(), context=self.context).result()
            results = [pending.result() for pending in [folder.read(key) for key in keys]]
        return [None if result.state == "missing" else bytes(result.value) for result in results]

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
