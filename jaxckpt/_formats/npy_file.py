"""Reads files of arrays in NumPy's format: .npy, and Equinox's .eqx, which holds the leaves of a tree without names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from jaxckpt._formats.npy import MAGIC, MAX_HEADER_BYTES, array_of, read_npy_header
from jaxckpt._formats.shards import FileData, f_strides
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import opened, read_head
from jaxckpt.errors import DataError

_MAX_LINE_BYTES = 1 << 16
"""The longest line of hyperparameters before the arrays of an .eqx file."""


def recognizes(path: str, names: Collection[str]) -> bool:
    if names:
        return False
    head = read_head(path, _MAX_LINE_BYTES if path.endswith(".eqx") else len(MAGIC))
    return head.startswith(MAGIC) or head.partition(b"\n")[2].startswith(MAGIC)


def open_npy(path: str) -> ForeignCheckpoint:
    """The array of a file, or a list of several. A line before them is ignored. Raises DataError, StorageError."""
    arrays = read_arrays(path)
    if path.endswith(".npy") and len(arrays) == 1:
        return compose(path, arrays[0], "npy")
    return compose(path, arrays, "eqx")


def read_arrays(path: str, dtypes: Sequence[str] = ()) -> list[ForeignArray]:
    """The arrays of a file, in its order. A line before them is ignored. `dtypes` are theirs, for those whose dtype the
    file does not record. Raises DataError, StorageError."""
    arrays: list[ForeignArray] = []
    with opened(path) as handle:
        size = handle.size
        head = handle.read(_MAX_LINE_BYTES, 0)
        at = 0 if head.startswith(MAGIC) else len(head.partition(b"\n")[0]) + 1
        while at < size:
            where = f"{path}: the array at byte {at}"
            record = read_npy_header(where, handle.read(MAX_HEADER_BYTES + 12, at))
            start, at = at + record.start, at + record.start + record.n_bytes
            if record.dtype.hasobject:  # its length is not recorded
                at = size
            elif at > size:
                raise DataError(f"{where} ends at byte {at}, but the file has {size}")
            strides = f_strides(record.shape) if record.fortran else None
            void = dtypes[len(arrays)] if len(arrays) < len(dtypes) else None
            arrays.append(array_of(record, partial(_data, path, start, record.shape, strides), void))
    return arrays


def _data(path: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> FileData:
    return FileData(path, start, dtype, shape, strides)


FORMAT = Format("npy", recognizes, open_npy)
