"""Arrays in Zarr 2 or 3, in a folder or an OCDBT database, read with tensorstore."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jaxckpt._formats.index_files import convert_checked, from_json
from jaxckpt._formats.pickles import unreadable
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, touched_cells
from jaxckpt._model.pieces import Array
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._sources.foreign import AsyncArrayData, ForeignArray
from jaxckpt._store.foreign_files import Mark, SeenFiles, kvstore_of
from jaxckpt._store.storage_errors import translate_array_errors
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, show_lines


@dataclass(frozen=True, slots=True)
class ZarrArray(AsyncArrayData):
    """An array in a folder."""

    folder: ArrayFolder
    name: str
    driver: Literal["zarr", "zarr3"]
    metadata: Any
    strict: bool
    mark: Mark

    @property
    def marks(self) -> tuple[Mark]:
        return (self.mark,)

    def start(self, box: Box, target: Array) -> Pending[None]:
        reader = self.folder.array_reader(self.name, self.driver, self.metadata, strict=self.strict)
        return reader.read([(box, target)])[0]

    def read(self, box: Box, target: Array) -> None:
        with translate_array_errors(f"cannot read the array {self.name!r} of {self.folder.path}", reading=True):
            self.start(box, target).result()


@dataclass(frozen=True, slots=True)
class FilesOfChunks(AsyncArrayData):
    """An array in local files, each of which its writer may rewrite without the metadata."""

    array: ZarrArray

    prefix: str
    """The path of each file up to its grid index."""

    separator: str
    """It separates the numbers of a grid index."""

    sides: Sequence[int]
    """The shape of the chunk or shard in a file."""

    seen: SeenFiles = field(default_factory=SeenFiles, repr=False)
    """The files that were read."""

    unchecked: set[Mark] = field(default_factory=set[Mark], repr=False)
    """The marks of those that were read since the last time that `marks` was taken."""

    @property
    def marks(self) -> Iterable[Mark]:
        marks = list(self.unchecked.copy())
        self.unchecked.difference_update(marks)
        return (self.array.mark, *marks)

    def start(self, box: Box, target: Array) -> Pending[None]:
        indices = itertools.product(*(range(*bounds) for bounds in touched_cells(box, self.sides)))
        paths = [self.prefix + self.separator.join(map(str, index)) for index in indices]
        self.unchecked.update(self.seen.look_at(paths))
        return self.array.start(box, target)


_SEPARATORS = {"default": "/", "v2": "."}
"""Zarr 3's kinds of names of files, each with its usual separator."""


def _files_of_chunks(array: ZarrArray) -> FilesOfChunks | None:
    """An array in a folder with a file for each chunk or shard; None if tensorstore does not know their names."""
    prefix, metadata = os.path.join(array.folder.path, array.name, ""), array.metadata
    kind, separator, sides = "v2", metadata.get("dimension_separator", "."), metadata.get("chunks")
    if array.driver == "zarr3":
        encoding = convert_checked(array.name, metadata.get("chunk_key_encoding", {"name": "default"}), _Named)
        kind, sides = encoding.name, metadata["chunk_grid"]["configuration"]["chunk_shape"]
        separator = encoding.configuration.get("separator", _SEPARATORS.get(kind))
    if separator not in ("/", "."):
        return None
    if kind == "default":
        prefix += f"c{separator}" if sides else "c"
    return FilesOfChunks(array, prefix + ("0" if kind == "v2" and not sides else ""), separator, sides)


_Sides = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]
_ArrayInfo = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(dtype, shape, chunk) of an array."""


class _Zarr2(msgspec.Struct, frozen=True):
    shape: _Sides
    chunks: _Sides
    dtype: str
    compressor: dict[str, Any] | None = None
    filters: list[dict[str, Any]] | None = None


class _Named(msgspec.Struct, frozen=True):
    name: str
    configuration: dict[str, Any] = {}


class _Zarr3(msgspec.Struct, frozen=True):
    shape: _Sides
    chunk_grid: _Named
    data_type: str
    codecs: list[_Named]


def parse_zarr2(what: str, metadata: dict[str, Any], *, clip: bool = False) -> _ArrayInfo:
    record = convert_checked(what, metadata, _Zarr2)
    dtype = dtype_name_of(record.dtype)
    if dtype is None:
        raise DataError(f"{what} has dtype {record.dtype[:40]!r}")
    return _require_fit(what, dtype, record.shape, record.chunks, clip)


def dtype_name_of(text: str) -> str | None:
    """The name of a dtype that Zarr 2 writes, such as "<f4"; None if NumPy has none."""
    if text in DTYPES:
        return text
    if not re.fullmatch(r"[|<>=]?[A-Za-z]\w{0,15}(\[\w{1,9}\])?", text):  # numpy.dtype parses others, with any error
        return None
    try:
        return np.dtype(text).name
    except (TypeError, ValueError, OverflowError):
        return None


def parse_zarr3(what: str, metadata: dict[str, Any], *, clip: bool = False) -> _ArrayInfo:
    record = convert_checked(what, metadata, _Zarr3)
    chunked = [record.chunk_grid, *(codec for codec in record.codecs if codec.name == "sharding_indexed")]
    chunks = [
        convert_checked(what, metadata_part.configuration.get("chunk_shape"), _Sides) for metadata_part in chunked
    ]
    return [_require_fit(what, record.data_type, record.shape, chunk, clip) for chunk in chunks][-1]


def _require_fit(what: str, dtype: str, shape: Sequence[int], chunk: Sequence[int], clip: bool) -> _ArrayInfo:
    """The parts of an array's metadata, checked. With `clip`, chunks may be larger than the array."""
    if clip and len(chunk) == len(shape):
        chunk = [min(c, max(1, n)) for c, n in zip(chunk, shape, strict=True)]
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1  # other dtypes are refused by name
    if len(chunk) != len(shape) or any(not 1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True)):
        raise DataError(f"{what} has chunks of {list(chunk)[:40]}, which do not fit its shape {list(shape)[:40]}")
    if math.prod(side or 1 for side in shape) * itemsize >= 1 << 63:
        raise DataError(f"{what} has shape {list(shape)[:40]}, which is too large to address")
    return dtype, tuple(shape), tuple(chunk)


_READABLE = {
    "zarr": {"blosc", "bz2", "gzip", "zlib", "zstd"},
    "zarr3": {"regular", "blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"},
}
"""The codecs and the kind of grid that tensorstore reads."""


def _unreadable_codecs(what: str, metadata: dict[str, Any], driver: Driver) -> list[str]:
    """The codecs of an array, or its kind of grid, that tensorstore does not read. Raises DataError."""
    if driver == "zarr":
        of_zarr2 = convert_checked(what, metadata, _Zarr2)
        if of_zarr2.filters:
            return [str(filter.get("id")) for filter in of_zarr2.filters]
        codecs = [_Named(str(codec.get("id"))) for codec in (of_zarr2.compressor,) if codec]
    else:
        record = convert_checked(what, metadata, _Zarr3)
        codecs = [record.chunk_grid, *record.codecs]
        for codec in codecs:  # with those inside of shards, which are added on the way
            codecs += convert_checked(what, codec.configuration.get("codecs", []), list[_Named])
    return [codec.name for codec in codecs if codec.name not in _READABLE[driver]]


# Several arrays -------------------------------------------------------------------------------------------

Driver = Literal["zarr", "zarr3"]
_PARSERS: Mapping[str, tuple[str, Any]] = {"zarr": (".zarray", parse_zarr2), "zarr3": ("zarr.json", parse_zarr3)}


def read_metadata(
    folder: ArrayFolder, leaves: Mapping[str, str], driver: Driver, *, strict: bool
) -> dict[str, ForeignArray]:
    """The arrays of these names that exist in a folder, read together. `leaves` has the leaf of each for messages.

    Raises DataError if a name leads out of the folder, or an array is damaged; StorageError.
    """
    require_inside(folder, leaves)
    file, _ = _PARSERS[driver]
    arrays: dict[str, ForeignArray] = {}
    texts = folder.read_all([_key(name, file) for name in leaves])
    for (name, leaf), text in zip(leaves.items(), texts, strict=True):
        if text is not None:
            what = f"{folder.path}: the Zarr metadata of {leaf}"
            metadata = from_json(what, text, dict[str, Any])
            arrays[name] = _array(folder, name, what, metadata, driver, strict=strict, clip=False)
    return arrays


def described_array(
    folder: ArrayFolder, name: str, what: str, metadata: dict[str, Any], driver: Driver, *, strict: bool
) -> ForeignArray:
    """The array that Zarr metadata of any writer describes; a leaf that cannot be read if its dtype or its codecs are
    not supported. Raises DataError."""
    dtype = metadata.get("dtype" if driver == "zarr" else "data_type")
    if dtype is None:
        raise DataError(f"{what} has no data type")
    if not isinstance(dtype, str) or (dtype_name_of(dtype) if driver == "zarr" else dtype) not in DTYPES:
        return unreadable(f"has the data type {str(dtype)[:80]}, which JAX does not support")
    if names := _unreadable_codecs(what, metadata, driver):
        return unreadable(f"is stored with {names[0][:80]!r}, which tensorstore does not read")
    array = _array(folder, name, what, metadata, driver, strict=strict, clip=True)
    if folder.ocdbt or kvstore_of(folder.path) is not None:  # in a bucket, each file would take more requests
        return array
    assert isinstance(array.data, ZarrArray)
    files = _files_of_chunks(array.data)
    return array if files is None else replace(array, data=files)


def _array(
    folder: ArrayFolder, name: str, what: str, metadata: dict[str, Any], driver: Driver, *, strict: bool, clip: bool
) -> ForeignArray:
    file, parse = _PARSERS[driver]
    dtype, shape, chunk = parse(what, metadata, clip=clip)
    mark = folder.mark_of(_key(name, file))
    return ForeignArray(dtype, shape, ZarrArray(folder, name, driver, metadata, strict, mark), chunk=chunk)


def _key(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file


def require_inside(folder: ArrayFolder, names: Iterable[str]) -> None:
    """Raise DataError if arrays of these names would be outside the folder."""
    outside = [name for name in names if name and not {"", ".", ".."}.isdisjoint(name.split("/"))]
    if outside and not folder.ocdbt:
        raise DataError(
            f"{folder.path} has arrays whose names are not folders below it:\n{show_lines(map(repr, outside))}"
        )
