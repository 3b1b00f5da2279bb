"""Reads arrays in NumPy's format: .npy files, and Equinox's .eqx, which holds the leaves of a tree without names.

The members of an .npz file have the same header. No pickle is read: an array of Python objects cannot be read.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np

from jaxckpt._formats.pickles import unreadable
from jaxckpt._formats.shards import FileData, Swapped, f_strides
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import opened, read_head
from jaxckpt.errors import DataError

MAX_HEADER_BYTES = 10_000
"""The largest header: NumPy's limit."""

MAGIC = b"\x93NUMPY"

_E5M2, _BYTES = b"'descr': '<f1'", b"'descr': '|V1'"
"""What NumPy writes for float8_e5m2, and cannot read; what it can read in its place."""

_MAX_LINE_BYTES = 1 << 16
"""The longest line of hyperparameters before the arrays of an .eqx file."""


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of an array."""

    start: int
    """Bytes from the start of the header to the first element."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def n_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def read_npy_header(where: str, head: bytes) -> NpyHeader:
    """The header of an array that starts with these bytes. Raises DataError, which begins with `where`."""
    is_e5m2 = _E5M2 in head[:32]  # the start of the header; other arrays may follow
    file = io.BytesIO(head.replace(_E5M2, _BYTES, 1) if is_e5m2 else head)
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of its format is not supported")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings(action="ignore"):  # NumPy warns about headers that Python 2 wrote
            shape, fortran, dtype = read(file, MAX_HEADER_BYTES)
    except Exception as error:  # also from NumPy's parser
        raise DataError(f"{where} is not a NumPy array: {str(error)[:200]}") from error
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(side or 1 for side in shape) >= 1 << 63:
        raise DataError(f"{where} has shape {list(shape)}, which no array has")
    return NpyHeader(file.tell(), shape, fortran, DTYPES["float8_e5m2"] if is_e5m2 else dtype)


def array_of(record: NpyHeader, data_of: Callable[[str], ArrayData], void: str | None = None) -> ForeignArray:
    """The array that a header describes, or a leaf that cannot be read. `data_of` takes the name of its dtype.

    NumPy writes dtypes of other libraries as bytes without a meaning. `void` is their dtype; by default, those of two
    bytes are bfloat16, as for `jax.numpy.load`.
    """
    dtype, shape = record.dtype, record.shape
    if dtype.hasobject:
        return unreadable("holds pickled Python objects; they could run any code, so they are not read")
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        name = void or ("bfloat16" if dtype.itemsize == 2 else "")
        if name not in DTYPES or DTYPES[name].itemsize != dtype.itemsize:
            return unreadable(
                f"has dtype {dtype}, because NumPy's format does not record dtypes of other libraries: open .npz and"
                ' .npy files with jaxckpt.formats.npz_file(path, dtype="float8_e4m3fn"), for example, and .eqx files'
                " with eqx_file(path, target); files of ranks must be .safetensors"
            )
        return ForeignArray(name, shape, data_of(name))
    if dtype.name not in DTYPES:
        return unreadable(f"has dtype {dtype.str}, which JAX does not support")
    data = data_of(dtype.name)
    return ForeignArray(dtype.name, shape, data if dtype.isnative else Swapped(data))


def write_npy_header(file: IO[bytes], dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Write the header of an array, whose elements follow in C order."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)


# Files ----------------------------------------------------------------------------------------------------


def recognizes(path: str, names: Collection[str]) -> bool:
    if names:
        return False
    head = read_head(path, _MAX_LINE_BYTES if path.endswith(".eqx") else len(MAGIC))
    return head.startswith(MAGIC) or head.partition(b"\n")[2].startswith(MAGIC)


def open_npy(path: str, dtypes: Iterable[str] = ()) -> ForeignCheckpoint:
    """The array of a file, or a list of several, as `read_arrays` reads them. Raises DataError, StorageError."""
    arrays = read_arrays(path, dtypes)
    if path.endswith(".npy") and len(arrays) == 1:
        return compose(path, arrays[0], "npy")
    return compose(path, arrays, "eqx")


def read_arrays(path: str, dtypes: Iterable[str] = ()) -> list[ForeignArray]:
    """The arrays of a file, in its order. A line before them is ignored. `dtypes` are theirs, for those whose dtype the
    file does not record. Raises DataError, StorageError."""
    arrays: list[ForeignArray] = []
    voids = iter(dtypes)
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
            data_of = partial(_data, path, start, record.shape, strides)
            arrays.append(array_of(record, data_of, next(voids, None)))
    return arrays


def _data(path: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> FileData:
    return FileData(path, start, dtype, shape, strides)


FORMAT = Format("npy", recognizes, open_npy)
