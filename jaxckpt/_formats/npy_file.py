"""Reads files of arrays in NumPy's format: .npy, and Equinox's .eqx, which holds the leaves of a tree without names."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.index_files import located_together, reads_files
from jaxckpt._formats.npy import MAGIC, MAX_HEADER_BYTES, array_of, read_npy_header
from jaxckpt._formats.shards import FileData, f_strides
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint, with_files
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import opened, read_head, using_files
from jaxckpt.errors import DataError, MismatchError, Problem, show_count

_MAX_LINE_BYTES = 1 << 16
"""The longest line of hyperparameters before the arrays of an .eqx file."""


def recognizes(path: str, names: Collection[str]) -> bool:
    if names:
        return False
    head = read_head(path, _MAX_LINE_BYTES if path.endswith(".eqx") else len(MAGIC))
    return head.startswith(MAGIC) or head.partition(b"\n")[2].startswith(MAGIC)


def open_npy(path: str) -> ForeignCheckpoint:
    """The array of a file, or a list of several. A line before them is ignored. Raises DataError, StorageError."""
    arrays = _read_arrays(path)
    if path.endswith(".npy") and len(arrays) == 1:
        return compose(path, arrays[0], "npy")
    return compose(path, arrays, "eqx")


@explain_keywords
@reads_files
def eqx_file(path: str | os.PathLike[str], target: Tree) -> ForeignCheckpoint:
    """Open a file of `equinox.tree_serialise_leaves` with the names of its leaves, which the file does not hold.

    Args:
        path: The file, or its URL.
        target: A pytree with the structure and shapes of the one that was saved: a module, as for
            `equinox.tree_deserialise_leaves`, or a dict. Its arrays may be jax.ShapeDtypeStruct. As in Equinox,
            functions and other leaves that are not numbers or arrays are not in the file.

    Returns:
        A checkpoint, which `restore` and the other functions accept in place of a path.

    Raises:
        MismatchError: The file has another number of arrays than `target`, or arrays of other shapes.
        DataError: The file is damaged.
    """
    leaves, _ = flatten(target)
    paths = [leaf.path for leaf in leaves if _is_stored(leaf.value)]
    shapes = [np.shape(leaf.value) for leaf in leaves if _is_stored(leaf.value)]
    (place,), opened_files = located_together({"path": path})
    with using_files(opened_files):
        arrays = _read_arrays(place)
        problems = [
            Problem(path, f"has shape {shape} in target, and {array.shape} in the file")
            for path, shape, array in zip(paths, shapes, arrays, strict=False)
            if shape != array.shape
        ]
        if problems or len(paths) != len(arrays):
            raise MismatchError.of(
                f"{place} has {show_count(len(arrays), 'array')}, in the order of the tree that was saved, and target"
                f" has {len(paths)}; they do not match",
                problems,
            )
        named = jax.tree.map(partial(_named, iter(arrays)), target)
        return with_files(compose(place, named, "eqx"), opened_files)


def _named(stored: Iterator[ForeignArray], value: Any) -> Any:
    """What a leaf of the target was: the next array of the file, a text of the target, or nothing."""
    if not _is_stored(value):
        return value if isinstance(value, (str, bytes)) else None
    array = next(stored)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return array
    if isinstance(value, np.ndarray):
        return replace(array, kind="numpy")
    data = np.empty((), DTYPES[array.dtype])
    array.data.read((), data)
    return type(value)(data.item())


def _is_stored(value: Any) -> bool:
    """Whether Equinox stores a leaf."""
    return isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex))


def _read_arrays(path: str) -> list[ForeignArray]:
    """The arrays of a file, in its order. A line before them is ignored. Raises DataError, StorageError."""
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
            arrays.append(array_of(record, partial(_data, path, start, record.shape, strides)))
    return arrays


def _data(path: str, start: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> FileData:
    return FileData(path, start, dtype, shape, strides)


FORMAT = Format("npy", recognizes, open_npy)
