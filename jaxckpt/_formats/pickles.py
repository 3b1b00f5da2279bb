"""Reads the content of a pickle without running it: Python data, NumPy arrays, and trees with some unreadable leaves.

A table of a dozen functions replaces the functions that a pickle calls. A leaf with the result of any other call cannot
be read, but the other leaves can.
"""

from __future__ import annotations

import collections
import functools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from jaxckpt._formats.byte_reader import LocatedBytes
from jaxckpt._formats.pickle_machine import AllowedFunction, Global, Machine, OpaqueObject, Unbuilt, insert
from jaxckpt._formats.shards import FileData, Swapped, f_strides
from jaxckpt._model.dtypes import DTYPES, MAX_RANK
from jaxckpt._model.paths import escape_key
from jaxckpt._model.tree import MAX_DEPTH, Tree
from jaxckpt._model.values import is_utf8
from jaxckpt._sources.foreign import ForeignArray, InMemoryData, Unreadable
from jaxckpt._store.foreign_files import opened
from jaxckpt.errors import DataError

MAX_VALUES = 1 << 22
"""The most values of a tree. A pickle can repeat a list cheaply: ten levels of ten references are 10^10 values in 200
bytes."""


def unpickle(
    path: str,
    start: int = 0,
    size: int | None = None,
    *,
    calls: Mapping[str, AllowedFunction] | None = None,
    persistent: AllowedFunction | None = None,
) -> Any:
    """The content of a pickle in a file, as from `unpickle_at`."""
    return unpickle_at(path, start, size, calls=calls, persistent=persistent)[0]


def unpickle_at(
    path: str,
    start: int,
    size: int | None = None,
    *,
    calls: Mapping[str, AllowedFunction] | None = None,
    persistent: AllowedFunction | None = None,
) -> tuple[Any, int]:
    """The content of a pickle in a file, and the position of its end.

    The content is Python data, `OpaqueObject`s, `Global`s, and NumPy arrays as ForeignArrays.

    `calls` has additional functions. They receive the arguments from the pickle, and raise ValueError or TypeError if
    these are invalid. `persistent` receives the ids of external objects. The result may contain itself: pass it to
    `as_tree` before using it as a tree. Raises DataError, StorageError.
    """
    with opened(path) as handle:
        length = handle.size
        end = length if size is None else start + size
        if not 0 <= start <= end <= length:
            raise DataError(f"{path} is {length} bytes long, expected at least {end}")
        machine = Machine(path, handle, start, end, {**ALLOWED_FUNCTIONS, **(calls or {})}, persistent)
        try:
            return machine.run(), machine.position
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            problem = (
                "it refers to a memo or mark that does not exist" if isinstance(error, LookupError) else str(error)
            )
            raise DataError(
                f"{path}: the pickle at byte {start} is damaged at byte {machine.position}: {problem}"
            ) from error


# Allowed calls --------------------------------------------------------------------------------------------


def _ordered_dict(items: Sequence[Any] = ()) -> dict[Any, Any]:
    made: dict[Any, Any] = collections.OrderedDict()
    for key, value in items:
        insert(made, [key, value])
    return made


def _encoded(text: str, encoding: str) -> bytes:
    """A bytes object, in the form that protocols 0 to 2 have for it."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding[:20]!r}")
    return text.encode("latin1")


def _bytes(*args: Any) -> Any:
    match args:
        case ():
            return b""
        case (bytes() | LocatedBytes() as raw,):
            return raw
        case (str(text), str(encoding)):
            return _encoded(text, encoding)
        case _:
            raise TypeError("bytes are built from an unexpected value")


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number is not made of two floats")
    return complex(real, imaginary)


class _NumpyDtype(Unbuilt):
    """A numpy.dtype, before its state is set and checked."""

    def __init__(self, code: Any, align: Any = None, copy: Any = None) -> None:
        self.name: str | None = None
        self.order = "<"
        if isinstance(code, Global):
            self.name = code.name.removeprefix("ml_dtypes.").removeprefix("jaxlib.xla_extension.")
        elif isinstance(code, str) and re.fullmatch(r"[|<>=]?[biufc]\d{1,2}", code):
            self.name = np.dtype(code[-2:] if code[-2:-1].isalpha() else code[-3:]).name
            self.order = code[0]
        if self.name not in DTYPES:
            self.name = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(cast("tuple[Any, ...]", state)) < 2:
            raise TypeError("a NumPy dtype has an unexpected state")
        self.order = str(cast("tuple[Any, ...]", state)[1])[:1]


class NumpyArray(Unbuilt):
    """A numpy.ndarray, before its data is set."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        self.array: ForeignArray | OpaqueObject = OpaqueObject("numpy.ndarray")

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _ndarray(data, dtype, shape, bool(fortran))


def _ndarray(
    data: Any, dtype: Any, shape: Any, fortran: bool = False, kind: Any = "numpy"
) -> ForeignArray | OpaqueObject:
    """An array from the arguments of NumPy's functions; an `OpaqueObject` if its dtype or data is not supported."""
    if not isinstance(dtype, _NumpyDtype):
        raise TypeError("the dtype of a NumPy array is missing")
    name = dtype.name
    if name is None or not isinstance(data, (bytes, LocatedBytes)):
        return OpaqueObject("numpy.ndarray")
    sides = require_sizes(shape)
    stored = data_of_bytes(data, name, sides, fortran)
    return ForeignArray(name, sides, Swapped(stored) if dtype.order == ">" else stored, kind)


def data_of_bytes(
    data: bytes | LocatedBytes, dtype: str, shape: tuple[int, ...], fortran: bool = False
) -> InMemoryData | FileData:
    """The data of an array from its bytes. Raises ValueError if their number does not fit its shape."""
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if len(data) != needed:
        raise ValueError(f"an array {dtype}{list(shape)} has {len(data)} bytes, expected {needed}")
    if isinstance(data, bytes):
        return InMemoryData(np.frombuffer(data, DTYPES[dtype]).reshape(shape, order="F" if fortran else "C"))
    return FileData(data.path, data.offset, dtype, shape, f_strides(shape) if fortran else None)


def require_sizes(value: Any) -> tuple[int, ...]:
    """A shape or strides as a tuple. Raises ValueError or TypeError if no array can have them."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a shape is a {type(value).__name__}")
    numbers = cast("Sequence[Any]", value)
    if len(numbers) > MAX_RANK:
        raise ValueError(f"an array has {len(numbers)} dimensions; at most {MAX_RANK} can be read")
    for side in numbers:
        if type(side) is not int or not 0 <= side < 1 << 63:
            raise ValueError("a shape contains something other than sizes")
    return tuple(numbers)


ALLOWED_FUNCTIONS: Mapping[str, AllowedFunction] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": lambda factory=None: {},
    "_codecs.encode": _encoded,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "numpy.dtype": _NumpyDtype,
    **{
        f"numpy.{core}.{name}": call
        for core in ("core", "_core")
        for name, call in (
            ("multiarray._reconstruct", NumpyArray),
            ("multiarray.scalar", lambda dtype, data=None: _ndarray(data, dtype, (), kind="numpy_scalar")),
            ("numeric._frombuffer", lambda data, dtype, shape, order="C": _ndarray(data, dtype, shape, order == "F")),
        )
    },
}
"""The functions that any pickle may call, by the names that pickles use for them."""


# Trees ----------------------------------------------------------------------------------------------------


def unreadable(reason: str, *, is_whole_checkpoint: bool = False) -> ForeignArray:
    """A leaf that cannot be read. Restoring it raises an error; excluding it does not."""
    data = Unreadable(f"it {reason}")
    if is_whole_checkpoint:
        data = replace(data, remedy="save its arrays as a dict, such as its state_dict()")
    return ForeignArray("uint8", (), data)


def as_tree(
    value: Any,
    where: str,
    rebuild: Callable[[OpaqueObject], Tree | None] = lambda made: None,
    *,
    is_whole_checkpoint: bool = False,
) -> Tree:
    """An unpickled value as a tree for `compose`. Leaves that are not data become unreadable leaves.

    `rebuild` returns values for the OpaqueObjects that it knows, and None for others. A dict whose keys JAX cannot
    sort, such as an optimizer's {"step": 2, 0: {…}}, becomes an OrderedDict in its saved order. Raises DataError if the
    value is too large or too deep for a tree, for example if it contains itself.
    """
    left = MAX_VALUES

    def walk(node: Any, depth: int) -> Tree:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise DataError(f"{where} holds more than {MAX_VALUES} values, or values nested deeper than {MAX_DEPTH}")
        kind = type(node)
        refused = functools.partial(unreadable, is_whole_checkpoint=is_whole_checkpoint and depth == 0)
        if kind in (type(None), bool, int, float, complex, str, bytes, ForeignArray):
            return node
        if kind is list:
            return [walk(child, depth + 1) for child in node]
        if kind is tuple:
            return tuple(walk(child, depth + 1) for child in node)
        if kind is dict or kind is collections.OrderedDict:
            kinds = set(map(type, node))
            if not kinds <= {str, int, float, bool, bytes}:
                names = {
                    key.name.rpartition(".")[2] if type(key) is OpaqueObject else type(key).__name__ for key in node
                }
                return refused(f"is a dict with keys of type {', '.join(sorted(names))[:200]}")
            text = "".join(node if kinds == {str} else [key for key in node if type(key) is str])
            if not is_utf8(text):
                return refused("is a dict whose keys are not UTF-8")
            if kinds - {str} and len({*map(escape_key, node)}) < len(node):
                return refused("is a dict with keys that make the same path, such as 0 and '0'")
            if len(kinds) > 1:
                kind = collections.OrderedDict  # JAX sorts the keys of a dict, and cannot sort these
            return kind((key, walk(child, depth + 1)) for key, child in node.items())
        if kind is LocatedBytes:
            return ForeignArray("uint8", (node.size,), FileData(node.path, node.offset, "uint8", (node.size,)), "bytes")
        if kind is NumpyArray:
            return walk(node.array, depth + 1)
        if kind is OpaqueObject and node.name in ("builtins.set", "builtins.frozenset"):
            return refused("is a set, which a pytree cannot hold")
        if kind is OpaqueObject and (made := rebuild(node)) is not None:
            return walk(made, depth + 1)
        if kind is OpaqueObject:
            return refused(f"holds an object made by {node.name[:200]}, whose code is never run")
        if kind is Global:
            return refused(f"holds the name {node.name[:200]}")
        return refused(f"holds a {kind.__name__.strip('_')}")

    return walk(value, 0)


def as_array(value: Any) -> ForeignArray | None:
    """An unpickled NumPy array; None for other values and for unsupported dtypes."""
    array = value.array if isinstance(value, NumpyArray) else value
    return array if isinstance(array, ForeignArray) else None


def require_instance(value: Any, name: str, where: str) -> OpaqueObject:
    """An Object of a class, by the last part of its name. Raises DataError for anything else."""
    if isinstance(value, OpaqueObject) and value.name.rpartition(".")[2] == name:
        return value
    named = value.name if isinstance(value, (OpaqueObject, Global)) else type(value).__name__
    raise DataError(f"{where} is {named[:200]}, expected {name}")
