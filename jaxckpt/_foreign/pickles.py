"""What a pickle says, without doing what it says: data is read, and no name in it is ever looked up.

A pickle is a program. This machine runs the part of its language that builds data: numbers, text, lists, dicts. Where
it calls something, the name is looked up in a table of a dozen functions of ours; anything else becomes an `Object`,
which remembers how it was called and does nothing. So a leaf that holds one cannot be read, and those around it can.

Bytes of some size are not read, only found: a pickle of arrays takes no more memory than one of their names.
"""

from __future__ import annotations

import collections
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jaxckpt._foreign.shards import FileBlock, Unreadable, opened
from jaxckpt._format.dtypes import DTYPES, MAX_RANK
from jaxckpt._format.paths import component
from jaxckpt._format.tree import MAX_DEPTH, Tree
from jaxckpt._restore.source import ForeignArray, Memory
from jaxckpt._runtime.errors import DataError

MAX_BYTES = 1 << 30
"""Of a pickle, less the bytes that are only found: what it makes is some dozen times as large."""

MAX_VALUES = 1 << 22
"""Values of a tree. A pickle may hold one list twice, so ten nested lists of ten are 10^10 values in 200 bytes."""

FOUND_BYTES = 1 << 16
"""Bytes objects from this size on are not read, but found."""

_WINDOW_BYTES = 1 << 12, 1 << 18
"""What is read at once: little at first, as large bytes are soon skipped, then ever more."""

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that the pickle would have imported."""

    name: str
    """With its module, in full."""


@dataclass(slots=True, eq=False)
class Object:
    """What the pickle would have made by calling something that is in no table."""

    name: str
    """Of what it would have called."""

    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an instance whose class says nothing else about them."""
        return cast("dict[str, Any]", self.state) if isinstance(self.state, dict) else {}


@dataclass(frozen=True, slots=True)
class FoundBytes:
    """A bytes object as it lies in the file."""

    path: str
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


def unpickle(
    path: str,
    start: int = 0,
    size: int | None = None,
    *,
    calls: Mapping[str, Call] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle in a file holds: Python's own data, `Object`s, `Global`s, NumPy arrays as ForeignArrays.

    `calls` has what may be called besides; it is given the arguments that the pickle has, and raises ValueError or
    TypeError where they are wrong. `persistent` takes the ids of what the pickle refers to. Not for a tree before
    `as_tree`: what it returns may contain itself. Raises DataError, StorageError.
    """
    with opened(path) as handle:
        length = os.fstat(handle).st_size
        end = length if size is None else start + size
        if not 0 <= start <= end <= length:
            raise DataError(f"{path} is {length} bytes long, expected at least {end}")
        machine = _Machine(path, handle, start, end, {**CALLS, **(calls or {})}, persistent)
        try:
            return machine.run()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            what = "a memo or mark that was never made" if isinstance(error, LookupError) else str(error)
            raise DataError(f"{path}: the pickle at byte {start} is damaged at byte {machine.at}: {what}") from error


class _Machine:
    """The virtual machine of pickles."""

    def __init__(
        self,
        path: str,
        handle: int,
        start: int,
        end: int,
        calls: Mapping[str, Call],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._path = path
        self._handle = handle
        self._end = end
        self._calls = calls
        self._persistent = persistent
        self._window = b""
        self._ahead, self._most_ahead = _WINDOW_BYTES
        self._first = start  # of the window, in the file
        self._next = 0  # in the window
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Global] = {}
        self._read = 0
        # Calls copy what they are given, and a pickle can give a long list a million times.
        self._budget = 1 << 16

    @property
    def at(self) -> int:
        return self._first + self._next

    def run(self) -> Any:
        operations = _OPERATIONS
        while True:
            try:
                code = self._window[self._next]
            except IndexError:
                self._fill(1)
                continue
            self._next += 1
            operation = operations[code]
            if operation is None:
                if code == 0x2E:  # STOP
                    return self._stack.pop()
                raise ValueError(f"operation {bytes([code])!r} is none of those that build data")
            operation(self)

    # Input

    def _fill(self, count: int) -> None:
        """Have so many bytes from here on in the window."""
        left = len(self._window) - self._next
        wanted = max(count - left, min(self._ahead, self._end - self.at - left))
        if self.at + count > self._end:
            raise ValueError(f"it ends within a value of {count} bytes")
        self._ahead = min(2 * self._ahead, self._most_ahead)
        self._read += wanted
        self._budget += 16 * wanted
        if self._read > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes besides its arrays")
        more = os.pread(self._handle, wanted, self.at + left)
        if len(more) < min(wanted, count - left):
            raise ValueError("the file was cut while it was read")
        self._first, self._window, self._next = self.at, self._window[self._next :] + more, 0

    def take(self, count: int) -> bytes:
        start, end = self._next, self._next + count
        if end > len(self._window):
            self._fill(count)
            start, end = 0, count
        self._next = end
        return self._window[start:end]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> bytes:
        found = self._window.find(b"\n", self._next)
        while found < 0:
            held = len(self._window) - self._next
            self._fill(min(2 * held + 1, self._end - self.at) if held < self._end - self.at else held + 1)
            found = self._window.find(b"\n", held)
        return self.take(found + 1 - self._next)[:-1]

    def bytes_of(self, count: int) -> bytes | FoundBytes:
        if count < FOUND_BYTES:
            return self.take(count)
        found = FoundBytes(self._path, self.at, count)
        if found.offset + count > self._end:
            raise ValueError(f"it ends within bytes of length {count}")
        self._first, self._window, self._next = found.offset + count, b"", 0
        self._ahead = _WINDOW_BYTES[0]
        return found

    # Stack

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def from_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._marks.pop()
        return found

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.from_mark()

    def duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def tuple_of(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    def long(self, width: int) -> None:
        self.push(int.from_bytes(self.take(self.number(width)), "little", signed=True))

    def text(self, width: int) -> None:
        self.push(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def text_of_python_2(self, width: int) -> None:
        raw = self.take(self.number(width))
        try:
            self.push(raw.decode())
        except UnicodeDecodeError:
            self.push(raw)

    # Containers

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            cast("list[Any]", target).extend(values)
        elif not isinstance(target, Object):
            raise TypeError(f"items are appended to a {type(target).__name__}")

    def appends(self) -> None:
        values = self.from_mark()
        self._extend(values)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        items = self.from_mark()
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, dict):
            _insert(cast("dict[Any, Any]", target), items)
        elif not isinstance(target, Object):
            raise TypeError(f"items are set in a {type(target).__name__}")

    def add_items(self) -> None:
        self.from_mark()
        if not isinstance(self._stack[-1], Object):
            raise TypeError("items are added to what is no set")

    def dict_from_mark(self) -> None:
        made: dict[Any, Any] = {}
        _insert(made, self.from_mark())
        self.push(made)

    def set_from_mark(self) -> None:
        self.from_mark()
        self.push(Object("builtins.set"))

    # Names and calls

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name is no text")
        known = f"{_MODULES.get(module, module)}.{name}"
        self.push(self._globals.setdefault(known, Global(known)))

    def stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.name(module, name)

    def reduce(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        self._call(called, args)

    def new_with_keywords(self) -> None:
        keywords, args, called = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if keywords:
            called = Object(called.name if isinstance(called, (Global, Object)) else "")
        self._call(called, args)

    def instance(self) -> None:
        called, *args = self.from_mark()
        self._call(called, tuple(args))

    def named_instance(self) -> None:
        module, name = self.line().decode(), self.line().decode()
        args = self.from_mark()
        self.name(module, name)
        self._call(self._stack.pop(), tuple(args))

    def _call(self, called: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise TypeError(f"the arguments of a call are a {type(args).__name__}")
        found = cast("tuple[Any, ...]", args)
        if isinstance(called, Global):
            function = self._calls.get(called.name)
            if function is not None:
                self._budget -= len(found) + sum([len(arg) for arg in found if isinstance(arg, _SIZED)])
                if self._budget < 0:
                    raise ValueError("its calls would copy far more than it holds")
                self.push(function(*found))
                return
        elif not isinstance(called, Object):
            raise TypeError(f"a {type(called).__name__} is called")
        self.push(Object(called.name, found))

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Object):
            target.state = state
        elif isinstance(target, (_NumpyDtype, _NumpyArray)):
            target.build(state)
        elif not isinstance(target, dict):  # attributes of an OrderedDict, as torch's modules have
            raise TypeError(f"a {type(target).__name__} has no state")

    def persistent(self, identity: Any) -> None:
        if self._persistent is None:
            raise ValueError("it refers to something outside of it")
        self.push(self._persistent(identity))


_SIZED = (str, bytes, tuple, list, dict)
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # of Python 2, as protocols 0 to 2 write them


def _insert(target: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    keys = [key if type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 63) else _odd(key) for key in items[::2]]
    expected = len(target) + len(keys)
    target.update(zip(keys, items[1::2], strict=True))
    if len(target) < expected:
        raise ValueError("a dict has one key twice")


_KEYS = (str, float, bool, bytes, type(None), Object, Global)


def _odd(key: Any) -> Object:
    """In place of a key whose hash takes time: of nested tuples each level can double it, and of integers beyond 64
    bits, and tuples of integers, millions can have one."""
    return Object(f"builtins.{type(key).__name__}")


def _integer(line: bytes) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else int(line)


def _quoted(line: bytes) -> str:
    """A string of Python 2 as protocol 0 writes it."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string has no quotes")
    return line[1:-1].decode("unicode_escape")


def _operations() -> list[Callable[[_Machine], None] | None]:
    m = _Machine
    table: dict[bytes, Callable[[_Machine], Any]] = {
        b"\x80": lambda m: m.take(1),  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME
        b"(": m.mark,
        b"0": m.pop,
        b"1": m.from_mark,
        b"2": m.duplicate,
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"I": lambda m: m.push(_integer(m.line())),
        b"L": lambda m: m.push(int(m.line().rstrip(b"L"))),
        b"F": lambda m: m.push(float(m.line())),
        b"J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
        b"K": lambda m: m.push(m.take(1)[0]),
        b"M": lambda m: m.push(m.number(2)),
        b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
        b"\x8a": lambda m: m.long(1),
        b"\x8b": lambda m: m.long(4),
        b"S": lambda m: m.push(_quoted(m.line())),
        b"U": lambda m: m.text_of_python_2(1),
        b"T": lambda m: m.text_of_python_2(4),
        b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
        b"\x8c": lambda m: m.text(1),
        b"X": lambda m: m.text(4),
        b"\x8d": lambda m: m.text(8),
        b"C": lambda m: m.push(m.bytes_of(m.number(1))),
        b"B": lambda m: m.push(m.bytes_of(m.number(4))),
        b"\x8e": lambda m: m.push(m.bytes_of(m.number(8))),
        b"\x96": lambda m: m.push(m.bytes_of(m.number(8))),  # BYTEARRAY8
        b"]": lambda m: m.push([]),
        b"l": lambda m: m.push(m.from_mark()),
        b"a": m.append,
        b"e": m.appends,
        b"}": lambda m: m.push({}),
        b"d": m.dict_from_mark,
        b"s": m.set_item,
        b"u": m.set_items,
        b")": lambda m: m.push(()),
        b"t": lambda m: m.push(tuple(m.from_mark())),
        b"\x85": lambda m: m.tuple_of(1),
        b"\x86": lambda m: m.tuple_of(2),
        b"\x87": lambda m: m.tuple_of(3),
        b"\x8f": lambda m: m.push(Object("builtins.set")),
        b"\x90": m.add_items,
        b"\x91": m.set_from_mark,
        b"g": lambda m: m.get(int(m.line())),
        b"h": lambda m: m.get(m.take(1)[0]),
        b"j": lambda m: m.get(m.number(4)),
        b"p": lambda m: m.put(int(m.line())),
        b"q": lambda m: m.put(m.take(1)[0]),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": m.memoize,
        b"c": lambda m: m.name(m.line().decode(), m.line().decode()),
        b"\x93": m.stack_name,
        b"R": m.reduce,
        b"\x81": m.reduce,  # NEWOBJ
        b"\x92": m.new_with_keywords,
        b"o": m.instance,
        b"i": m.named_instance,
        b"b": m.build,
        b"P": lambda m: m.persistent(m.line().decode()),
        b"Q": lambda m: m.persistent(m._stack.pop()),  # pyright: ignore[reportPrivateUsage]
    }
    return [table.get(bytes([code])) for code in range(256)]


_OPERATIONS = _operations()


# What may be called ---------------------------------------------------------------------------------------


def _ordered_dict(items: Sequence[Any] = ()) -> dict[Any, Any]:
    made: dict[Any, Any] = collections.OrderedDict()
    for key, value in items:
        _insert(made, [key, value])
    return made


def _default_dict(factory: Any = None) -> dict[Any, Any]:
    return {}


def _encoded(text: str, encoding: str) -> bytes:
    """bytes as protocols 0 to 2 write them."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding[:20]!r}")
    return text.encode("latin1")


def _bytes(*args: Any) -> Any:
    match args:
        case ():
            return b""
        case (bytes() | FoundBytes() as raw,):
            return raw
        case (str(text), str(encoding)):
            return _encoded(text, encoding)
        case _:
            raise TypeError("bytes are made of something else")


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number is not made of two floats")
    return complex(real, imaginary)


class _NumpyDtype:
    """numpy.dtype, until it is known to be one of ours."""

    def __init__(self, code: Any, align: Any = None, copy: Any = None) -> None:
        self.name: str | None = None
        self.order = "<"
        if isinstance(code, Global):
            self.name = code.name.removeprefix("ml_dtypes.")
        elif isinstance(code, str) and re.fullmatch(r"[|<>=]?[biufc]\d{1,2}", code):
            self.name = np.dtype(code[-2:] if code[-2:-1].isalpha() else code[-3:]).name
            self.order = code[0]
        if self.name not in DTYPES:
            self.name = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(cast("tuple[Any, ...]", state)) < 2:
            raise TypeError("a NumPy dtype has an odd state")
        self.order = str(cast("tuple[Any, ...]", state)[1])[:1]

    @property
    def known(self) -> str | None:
        return self.name if self.order in "<|=" else None


class _NumpyArray:
    """numpy.ndarray, until it has its data."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        self.array: ForeignArray | Object = Object("numpy.ndarray")

    def build(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.array = _numpy_array(data, dtype, shape, bool(fortran), "numpy")


def _numpy_array(data: Any, dtype: Any, shape: Any, fortran: bool, kind: Any) -> ForeignArray | Object:
    if not isinstance(dtype, _NumpyDtype):
        raise TypeError("the dtype of a NumPy array is none")
    name = dtype.known
    if name is None or not isinstance(data, (bytes, FoundBytes)):
        return Object("numpy.ndarray")
    sides = sizes(shape)
    needed = math.prod(sides) * DTYPES[name].itemsize
    if len(data) != needed:
        raise ValueError(f"a NumPy array {name}{list(sides)} has {len(data)} bytes, expected {needed}")
    if isinstance(data, bytes):
        array = np.frombuffer(data, DTYPES[name]).reshape(sides, order="F" if fortran else "C")
        return ForeignArray(name, sides, Memory(array), kind)
    strides = [math.prod(sides[:dim]) for dim in range(len(sides))] if fortran else None
    block = FileBlock(data.path, data.offset, name, sides, None if strides is None else tuple(strides))
    return ForeignArray(name, sides, block, kind)


def sizes(value: Any) -> tuple[int, ...]:
    """A shape, or the strides of one. Raises ValueError, TypeError where it is none that an array can have."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"a shape is a {type(value).__name__}")
    found = cast("Sequence[Any]", value)
    if len(found) > MAX_RANK:
        raise ValueError(f"an array has {len(found)} dimensions; at most {MAX_RANK} can be read")
    for side in found:
        if type(side) is not int or not 0 <= side < 1 << 63:
            raise ValueError("a shape has something else than sizes")
    return tuple(found)


def _numpy_scalar(dtype: Any, data: Any = None) -> ForeignArray | Object:
    return _numpy_array(data, dtype, (), False, "numpy_scalar")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C") -> ForeignArray | Object:
    return _numpy_array(data, dtype, shape, order == "F", "numpy")


def _of_numpy() -> dict[str, Call]:
    calls: dict[str, Call] = {"numpy.dtype": _NumpyDtype}
    for core in ("numpy.core", "numpy._core"):
        calls[f"{core}.multiarray._reconstruct"] = _NumpyArray
        calls[f"{core}.multiarray.scalar"] = _numpy_scalar
        calls[f"{core}.numeric._frombuffer"] = _from_buffer
    return calls


CALLS: Mapping[str, Call] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "_codecs.encode": _encoded,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    **_of_numpy(),
}
"""What any pickle may call."""


# Trees ----------------------------------------------------------------------------------------------------


def unreadable(reason: str) -> ForeignArray:
    """A leaf that cannot be read: an error where it is, none where it is left out."""
    return ForeignArray("uint8", (), Unreadable(f"it {reason}; leave it out with select="))


def as_tree(value: Any, where: str, rebuild: Callable[[Object], Tree | None] = lambda found: None) -> Tree:
    """What was unpickled as a tree that `compose` takes; leaves that are no data become unreadable ones.

    `rebuild` knows some Objects: it returns leaves for them, and None for the others. A dict whose keys JAX cannot
    sort, such as an optimizer's {"step": 2, 0: {…}}, becomes an OrderedDict in the order in which it was saved. Raises
    DataError if the value is too large or too deep for a tree, as what contains itself is.
    """
    left = MAX_VALUES

    def walk(node: Any, depth: int) -> Tree:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise DataError(f"{where} holds more than {MAX_VALUES} values, or values nested deeper than {MAX_DEPTH}")
        kind = type(node)
        if kind in (type(None), bool, int, float, complex, str, bytes, ForeignArray):
            return node
        if kind is list:
            return [walk(child, depth + 1) for child in node]
        if kind is tuple:
            return tuple(walk(child, depth + 1) for child in node)
        if kind is dict or kind is collections.OrderedDict:
            kinds = set(map(type, node))
            if not kinds <= {str, int, float, bool, bytes}:
                names = {key.name.rpartition(".")[2] if type(key) is Object else type(key).__name__ for key in node}
                return unreadable(f"is a dict with keys of type {', '.join(sorted(names))[:200]}")
            text = "".join(node if kinds == {str} else [key for key in node if type(key) is str])
            if not text.isascii() and not _is_utf8(text):
                return unreadable("is a dict whose keys are not UTF-8")
            if kinds - {str} and len({*map(component, node)}) < len(node):
                return unreadable("is a dict with keys that make the same path, such as 0 and '0'")
            if len(kinds) > 1:
                kind = collections.OrderedDict  # JAX sorts the keys of a dict, and cannot sort these
            return kind((key, walk(child, depth + 1)) for key, child in node.items())
        if kind is FoundBytes:
            return ForeignArray(
                "uint8", (node.size,), FileBlock(node.path, node.offset, "uint8", (node.size,)), "bytes"
            )
        if kind is _NumpyArray:
            return walk(node.array, depth + 1)
        if kind is Object and node.name in ("builtins.set", "builtins.frozenset"):
            return unreadable("is a set, which no pytree has")
        if kind is Object and (found := rebuild(node)) is not None:
            return found
        if kind is Object:
            return unreadable(f"holds what {node.name[:200]} would make, which only running code could tell")
        if kind is Global:
            return unreadable(f"holds the name {node.name[:200]}")
        return unreadable(f"holds a {kind.__name__.strip('_')}")

    return walk(value, 0)


def array_in(value: Any) -> ForeignArray | None:
    """A NumPy array that was unpickled; None for what is none, or of a dtype that is none of ours."""
    found = value.array if isinstance(value, _NumpyArray) else value
    return found if isinstance(found, ForeignArray) else None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def required(value: Any, name: str, where: str) -> Object:
    """An Object of a class, by the last part of its name. Raises DataError where it is something else."""
    if isinstance(value, Object) and value.name.rpartition(".")[2] == name:
        return value
    found = value.name if isinstance(value, (Object, Global)) else type(value).__name__
    raise DataError(f"{where} is {found[:200]}, expected {name}")
