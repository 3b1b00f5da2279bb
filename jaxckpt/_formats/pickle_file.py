"""Reads pickles of trees of NumPy and JAX arrays, such as those of Haiku and Brax, without running their code.

Namedtuples become tuples, and other instances dicts of their attributes, because their classes are not imported.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jaxckpt._formats.pickle_machine import Global, OpaqueObject
from jaxckpt._formats.pickles import NumpyArray, as_tree, unpickle
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import read_head


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether a file is a pickle. Those of protocols 0 and 1, which have no mark, need a suffix."""
    head = b"" if names else read_head(path, 2)
    if head[:1] == b"\x80":
        return head[1:2] in (b"\2", b"\3", b"\4", b"\5")
    return path.endswith((".pkl", ".pickle")) and head[:1] in (b"(", b"]", b"}", b"c")


def open_pickle(path: str) -> ForeignCheckpoint:
    """The tree of a pickle. Objects that are not data become unreadable leaves. Raises DataError, StorageError."""
    return compose(path, as_tree(unpickle(path, calls=_CALLS), path, _rebuilt, is_whole_checkpoint=True), "pickle")


def _rebuilt(made: OpaqueObject) -> Tree | None:
    """The values of an instance of a class that is not imported; None for other objects."""
    match made:
        case OpaqueObject(args=(*values,), state=None, is_instance=True) if values or made.name != "builtins.object":
            return tuple(values)
        case OpaqueObject(args=(), state=dict() as attributes, is_instance=True):
            return attributes
        case OpaqueObject(
            name="copyreg._reconstructor", args=(Global(), Global(name="builtins.tuple"), tuple() as values)
        ):
            return values
        case OpaqueObject(name="copyreg._reconstructor", args=(Global(), Global(name="builtins.object"), None)):
            return made.fields or None
        case _:
            return None


def _jax_array(function: Any, args: Any, state: Any, _abstract: Any) -> ForeignArray | OpaqueObject:
    """A jax.Array, which pickles itself as a NumPy array. Raises TypeError, ValueError."""
    array = NumpyArray(*args)
    array.build(state)
    return replace(array.array, kind="jax") if isinstance(array.array, ForeignArray) else array.array


_CALLS = {
    "jax._src.array._reconstruct_array": _jax_array,
    "jax._src.device_array.reconstruct_device_array": _jax_array,
    "jax.interpreters.xla.reconstruct_device_array": _jax_array,
    "flax.core.frozen_dict.FrozenDict": lambda mapping=None: {} if mapping is None else mapping,
    "haiku._src.data_structures.FlatMapping": lambda mapping: mapping,
    "haiku._src.data_structures.FlatMap": lambda mapping: mapping,
}
"""The functions that these pickles call, in addition to NumPy's."""

# The last: other formats begin with a pickle.
FORMAT = Format("pickle", recognizes, open_pickle, order=1)
