"""Equinox's .eqx files with the names of their leaves, which a target gives: the files hold only arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.index_files import located_together, reads_files
from jaxckpt._formats.npy_file import read_arrays
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint, Unreadable, with_files
from jaxckpt._store.foreign_files import using_files
from jaxckpt.errors import MismatchError, Problem, show_count


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
    leaves = [leaf for leaf in flatten(target)[0] if _is_stored(leaf.value)]
    paths = [leaf.path for leaf in leaves]
    shapes = [np.shape(leaf.value) for leaf in leaves]
    dtypes = [str(getattr(leaf.value, "dtype", "")) for leaf in leaves]
    (place,), opened_files = located_together({"path": path})
    with using_files(opened_files):
        arrays = read_arrays(place, dtypes)
        problems = [
            Problem(path, array.data.reason)
            if isinstance(array.data, Unreadable)
            else Problem(path, f"has shape {shape} in target, and {array.shape} in the file")
            for path, shape, array in zip(paths, shapes, arrays, strict=False)
            if isinstance(array.data, Unreadable) or shape != array.shape
        ]
        if problems or len(paths) != len(arrays):
            raise MismatchError.of(
                f"{place} has {show_count(len(arrays), 'array')}, in the order of the tree that was saved, and target"
                f" has {len(paths)}; they do not match",
                problems,
            )
        named = jax.tree.map(partial(_named, zip(paths, arrays, strict=True)), target)
        return with_files(compose(place, named, "eqx"), opened_files)


def _named(stored: Iterator[tuple[str, ForeignArray]], value: Any) -> Any:
    """What a leaf of the target was: the next array of the file, a text of the target, or nothing."""
    if not _is_stored(value):
        return value if isinstance(value, (str, bytes)) else None
    path, array = next(stored)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return array
    if isinstance(value, np.ndarray):
        return replace(array, kind="numpy")
    data = np.empty((), DTYPES[array.dtype])
    array.data.read((), data)
    return _number(path, type(value), data.item())


def _number(path: str, kind: Any, stored: Any) -> Any:
    """A number of the file as one of the target's type. Raises MismatchError if it is not the same number."""
    with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(over="ignore"):
        number = kind(stored)
        value = number.item() if isinstance(number, np.generic) else number  # NumPy compares in its own precision
        if value == stored or (value != value and stored != stored):
            return number
    raise MismatchError.of(
        "the file has another number", [Problem(path, f"is {stored!r}, which is not a {kind.__name__}, as in target")]
    )


def _is_stored(value: Any) -> bool:
    """Whether Equinox stores a leaf."""
    return isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex))
