"""Reads HDF5 with h5py, which it needs: plain files, Keras's .weights.h5 and .h5, and .keras, an archive with one.

Datasets that are contiguous are read in place, without h5py. Links to other files, and data in other files, are not
followed.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._formats.pickles import MAX_VALUES, unreadable
from jaxckpt._formats.shards import FileData
from jaxckpt._formats.zips import opened_archive
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box
from jaxckpt._model.pieces import Array
from jaxckpt._model.tree import MAX_DEPTH, Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import OpenFile, opened, read_head
from jaxckpt.errors import DataError, InputError, JaxckptError

_MAGIC = b"\x89HDF\r\n\x1a\n"
_KERAS_MEMBER = "model.weights.h5"


def recognizes(path: str, names: Collection[str]) -> bool:
    if names or path.endswith(".keras"):
        return not names
    head = read_head(path, 2048 + len(_MAGIC))
    # A user block may be before it, as in MATLAB's files. A tar archive may hold an HDF5 file there.
    places = (0,) if head[257:262] == b"ustar" else (0, 512, 1024, 2048)
    return any(head.startswith(_MAGIC, place) for place in places)


@dataclass(frozen=True, slots=True)
class _Hdf5:
    """An HDF5 file, or the part of an archive that is one."""

    path: str
    start: int
    size: int

    @contextmanager
    def opened(self) -> Generator[Any]:
        """The file in h5py. Raises DataError, InputError, StorageError."""
        try:
            import h5py  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise InputError(
                f"{self.path}: HDF5 is read with h5py, which is not installed: pip install h5py"
            ) from error
        with opened(self.path) as handle:
            try:
                with h5py.File(_Stream(handle, self.start, self.size), "r") as file:
                    yield file
            except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, JaxckptError) or getattr(error, "errno", None):  # of `_Stream`, not of h5py
                    raise
                raise DataError(f"{self.path} is damaged: {str(error)[:200]}") from error


class _Stream(io.RawIOBase):
    """A part of an open file as a Python file."""

    def __init__(self, handle: OpenFile, start: int, size: int) -> None:
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self._size - self._at))
        buffer[:count] = self._handle.read(count, self._start + self._at)
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _Dataset(ArrayData):
    """A dataset that h5py reads: it is in chunks, compressed, or stored in a type that h5py converts."""

    hdf5: _Hdf5
    name: str
    dtype: str

    def read(self, box: Box, target: Array) -> None:
        with self.hdf5.opened() as file:
            values = file[self.name][tuple(slice(*side) for side in box)]
            target[...] = np.asarray(values).astype(values.dtype.newbyteorder("="), copy=False).view(target.dtype)


def open_hdf5(path: str) -> ForeignCheckpoint:
    """The datasets in the tree of their groups. Raises DataError, InputError, StorageError."""
    with opened(path) as file:
        hdf5 = _Hdf5(path, 0, file.size)
    if path.endswith(".keras"):
        with opened_archive(path) as archive:
            if _KERAS_MEMBER not in archive or (member := archive[_KERAS_MEMBER]).deflated:
                raise DataError(f"{path} has no uncompressed {_KERAS_MEMBER}: it is not a model that Keras 3 saved")
            hdf5 = _Hdf5(path, member.offset, member.n_bytes)
    with hdf5.opened() as file:
        return compose(path, _tree(hdf5, file, itertools.count(1)), "hdf5")


def _tree(hdf5: _Hdf5, group: Any, numbers: Iterator[int], depth: int = 0) -> Tree:
    """The tree of a group. Groups without arrays are left out. `numbers` counts all values: a group may contain
    itself."""
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    tree: dict[str, Any] = {}
    for name in group:
        if depth > MAX_DEPTH or next(numbers) > MAX_VALUES:
            raise DataError(
                f"{hdf5.path} holds more than {MAX_VALUES} values, or groups nested deeper than {MAX_DEPTH}"
            )
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            tree[name] = unreadable("is a link to another place, which is not followed")
            continue
        child = group[name]
        if isinstance(child, h5py.Dataset):
            tree[name] = _array(hdf5, child)
        elif isinstance(child, h5py.Group) and (below := _tree(hdf5, child, numbers, depth + 1)):
            tree[name] = below
    return tree


def _array(hdf5: _Hdf5, dataset: Any) -> ForeignArray:
    import h5py  # pyright: ignore[reportMissingTypeStubs]

    if dataset.external or dataset.is_virtual:
        return unreadable("has its data in other files, which are not followed")
    dtype, shape = dataset.dtype, dataset.shape
    # h5py stores bfloat16 as opaque bytes. Keras 3 records the name in an attribute, which is not read: HDF5 allocates
    # up to 4 GiB for a text with a damaged length.
    name = "bfloat16" if dtype.kind == "V" and dtype.names is None else dtype.name
    if shape is None or dtype.subdtype or name not in DTYPES or DTYPES[name].itemsize != dtype.itemsize:
        return unreadable(f"has dtype {dtype}, which JAX does not support")
    filters = dataset.id.get_create_plist()
    for code, *_ in map(filters.get_filter, range(filters.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            return unreadable(f"is compressed with HDF5's filter {code}, which h5py lacks: import hdf5plugin first")
    offset = dataset.id.get_offset()
    # h5py reads small floats of other kinds as larger ones, and any enum of FALSE and TRUE as bool.
    is_stored = dtype.isnative and dataset.id.get_type().equal(h5py.h5t.py_create(dtype, logical=True))
    if offset is not None and not dataset.chunks and (dtype.kind == "V" or is_stored):
        data = FileData(hdf5.path, hdf5.start + offset, name, shape)
        if data.end > hdf5.start + hdf5.size:
            raise DataError(f"{hdf5.path} is too short for {dataset.name[:80]!r}")
        return ForeignArray(name, shape, data)
    return ForeignArray(name, shape, _Dataset(hdf5, dataset.name, name), chunk=_chunk(dataset))


def _chunk(dataset: Any) -> tuple[int, ...] | None:
    """The sides of a chunk, if the dataset has them."""
    if dataset.chunks is None:
        return None
    return tuple(min(c, max(1, n)) for c, n in zip(dataset.chunks, dataset.shape, strict=True))


FORMAT = Format("hdf5", recognizes, open_hdf5)
