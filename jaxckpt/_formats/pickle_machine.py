"""A safe virtual machine for pickles: it imports nothing and calls only functions from its own table.

A pickle is a program. This machine runs the part of its language that builds data: numbers, text, lists, dicts. If the
pickle calls a name that is not in the table, the result is an `OpaqueObject`, which records the call and does nothing.

Large bytes objects are located but not read, so a pickle of arrays takes no more memory than a pickle of their names.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from jaxckpt._formats.local_files import read_at

MAX_BYTES = 1 << 30
"""The largest pickle, without bytes that are only located. Its objects take about a dozen times as much memory."""

MIN_LOCATED_BYTES = 1 << 16
"""Bytes objects of at least this size are located but not read."""

_WINDOW_BYTES = 1 << 12, 1 << 18
"""Bytes per read: few at first, because large bytes are soon skipped, then more."""

AllowedFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A name that the pickle would have imported."""

    name: str
    """The full name, with its module."""


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """The result of a call to a name that is not in the table."""

    name: str
    """Name of the called function or class."""

    args: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an instance whose class does not customize its state."""
        return cast("dict[str, Any]", self.state) if isinstance(self.state, dict) else {}


class Unbuilt(abc.ABC):
    """The result of a call, until the pickle sets its state."""

    @abc.abstractmethod
    def build(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class LocatedBytes:
    """The position of a bytes object in the file."""

    path: str
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size


@dataclass(slots=True, eq=False)
class Machine:
    """The virtual machine of pickles."""

    _path: str
    _handle: int
    _window_start: int
    """Position in the file of the window's first byte; at first, of the pickle."""

    _end: int
    _calls: Mapping[str, AllowedFunction]
    _persistent: Callable[[Any], Any] | None
    _window: bytes = b""
    _window_index: int = 0
    """The next byte in the window."""

    _read_ahead_bytes: int = _WINDOW_BYTES[0]
    stack: list[Any] = field(default_factory=list[Any])
    _marks: list[list[Any]] = field(default_factory=list[list[Any]])
    memo: dict[int, Any] = field(default_factory=dict[int, Any])
    _globals: dict[str, Global] = field(default_factory=dict[str, Global])
    _n_read: int = 0
    _budget: int = 1 << 16
    """How many more values calls may copy. A pickle could otherwise pass a long list to a million calls, and each call
    copies it."""

    @property
    def position(self) -> int:
        return self._window_start + self._window_index

    def run(self) -> Any:
        operations = _OPERATIONS
        while True:
            try:
                code = self._window[self._window_index]
            except IndexError:
                self._fill(1)
                continue
            self._window_index += 1
            operation = operations[code]
            if operation is None:
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                raise ValueError(f"the opcode {bytes([code])!r} does not build data")
            operation(self)

    # Input

    def _fill(self, count: int) -> None:
        """Make at least this many bytes available in the window."""
        left = len(self._window) - self._window_index
        wanted = max(count - left, min(self._read_ahead_bytes, self._end - self.position - left))
        if self.position + count > self._end:
            raise ValueError(f"it ends in the middle of a value of {count} bytes")
        self._read_ahead_bytes = min(2 * self._read_ahead_bytes, _WINDOW_BYTES[1])
        self._n_read += wanted
        self._budget += 16 * wanted
        if self._n_read > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes in addition to its arrays")
        more = read_at(self._handle, wanted, self.position + left)
        if len(more) < min(wanted, count - left):
            raise ValueError("the file was truncated while it was being read")
        self._window_start, self._window, self._window_index = (
            self.position,
            self._window[self._window_index :] + more,
            0,
        )

    def take(self, count: int) -> bytes:
        start, end = self._window_index, self._window_index + count
        if end > len(self._window):
            self._fill(count)
            start, end = 0, count
        self._window_index = end
        return self._window[start:end]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> bytes:
        end = self._window.find(b"\n", self._window_index)
        while end < 0:
            held = len(self._window) - self._window_index
            self._fill(min(2 * held + 1, self._end - self.position) if held < self._end - self.position else held + 1)
            end = self._window.find(b"\n", held)
        return self.take(end + 1 - self._window_index)[:-1]

    def read_bytes(self, count: int) -> bytes | LocatedBytes:
        if count < MIN_LOCATED_BYTES:
            return self.take(count)
        skipped = LocatedBytes(self._path, self.position, count)
        if skipped.offset + count > self._end:
            raise ValueError(f"it ends in the middle of bytes of length {count}")
        self._window_start, self._window, self._window_index = skipped.offset + count, b"", 0
        self._read_ahead_bytes = _WINDOW_BYTES[0]
        return skipped

    # Stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        values, self.stack = self.stack, self._marks.pop()
        return values

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def pop_many(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        if len(values) < count:
            raise IndexError
        del self.stack[-count:]
        return values

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

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            cast("list[Any]", target).extend(values)
        elif not isinstance(target, OpaqueObject):
            raise TypeError(f"items are appended to a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            insert(cast("dict[Any, Any]", target), items)
        elif not isinstance(target, OpaqueObject):
            raise TypeError(f"items are set in a {type(target).__name__}")

    def add_items(self) -> None:
        self.pop_to_mark()
        if not isinstance(self.stack[-1], OpaqueObject):
            raise TypeError("items are added to something that is not a set")

    # Names and calls

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise TypeError("a name is not text")
        known = f"{_MODULES.get(module, module)}.{name}"
        self.push(self._globals.setdefault(known, Global(known)))

    def reduce(self) -> None:
        self._call(*self.pop_many(2))

    def new_with_keywords(self) -> None:
        called, args, keywords = self.pop_many(3)
        if keywords:
            called = OpaqueObject(called.name if isinstance(called, (Global, OpaqueObject)) else "")
        self._call(called, args)

    def instance(self) -> None:
        called, *args = self.pop_to_mark()
        self._call(called, tuple(args))

    def named_instance(self) -> None:
        module, name = self.line().decode(), self.line().decode()
        args = self.pop_to_mark()
        self.name(module, name)
        self._call(self.stack.pop(), tuple(args))

    def _call(self, called: Any, args: Any) -> None:
        if not isinstance(args, tuple):
            raise TypeError(f"the arguments of a call are a {type(args).__name__}")
        values = cast("tuple[Any, ...]", args)
        if isinstance(called, Global):
            function = self._calls.get(called.name)
            if function is not None:
                self._budget -= len(values) + sum([len(arg) for arg in values if isinstance(arg, _SIZED)])
                if self._budget < 0:
                    raise ValueError("its calls would copy far more than it holds")
                self.push(function(*values))
                return
        elif not isinstance(called, OpaqueObject):
            raise TypeError(f"a {type(called).__name__} is called")
        self.push(OpaqueObject(called.name, values))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, OpaqueObject):
            target.state = state
        elif isinstance(target, Unbuilt):
            target.build(state)
        elif not isinstance(target, dict):  # the attributes of an OrderedDict, as in torch's modules, are ignored
            raise TypeError(f"a {type(target).__name__} has no state")

    def persistent(self, identity: Any) -> None:
        if self._persistent is None:
            raise ValueError("it refers to an external object")
        self.push(self._persistent(identity))


_SIZED = (str, bytes, tuple, list, dict)
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # of Python 2, as protocols 0 to 2 write them


def insert(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
    """The dict with more items: a key, its value, the next key and so on. Raises ValueError if a key repeats."""
    if len(items) % 2:
        raise ValueError("a key has no value")
    keys = [
        key if type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 63) else _replace_slow_key(key)
        for key in items[::2]
    ]
    expected = len(target) + len(keys)
    target.update(zip(keys, items[1::2], strict=True))
    if len(target) < expected:
        raise ValueError("a dict has the same key twice")
    return target


_KEYS = (str, float, bool, bytes, type(None), OpaqueObject, Global)


def _replace_slow_key(key: Any) -> OpaqueObject:
    """Replaces a key that could make a dict slow: each level of nested tuples can double the time of its hash, and
    millions of large integers or tuples of integers can have equal hashes."""
    return OpaqueObject(f"builtins.{type(key).__name__}")


def _integer(line: bytes) -> int | bool:
    return line == b"01" if line in (b"00", b"01") else int(line)


def _quoted(line: bytes) -> str:
    """A Python 2 string in protocol 0."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string has no quotes")
    return line[1:-1].decode("unicode_escape")


def _build_operations() -> list[Callable[[Machine], None] | None]:
    m = Machine
    table: dict[bytes, Callable[[Machine], Any]] = {
        b"\x80": lambda m: m.take(1),  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME
        b"(": m.mark,
        b"0": m.pop,
        b"1": m.pop_to_mark,
        b"2": lambda m: m.push(m.stack[-1]),
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
        b"C": lambda m: m.push(m.read_bytes(m.number(1))),
        b"B": lambda m: m.push(m.read_bytes(m.number(4))),
        b"\x8e": lambda m: m.push(m.read_bytes(m.number(8))),
        b"\x96": lambda m: m.push(m.read_bytes(m.number(8))),  # BYTEARRAY8
        b"]": lambda m: m.push([]),
        b"l": lambda m: m.push(m.pop_to_mark()),
        b"a": lambda m: m.extend([m.stack.pop()]),
        b"e": lambda m: m.extend(m.pop_to_mark()),
        b"}": lambda m: m.push({}),
        b"d": lambda m: m.push(insert({}, m.pop_to_mark())),
        b"s": lambda m: m.update(m.pop_many(2)),
        b"u": lambda m: m.update(m.pop_to_mark()),
        b")": lambda m: m.push(()),
        b"t": lambda m: m.push(tuple(m.pop_to_mark())),
        b"\x85": lambda m: m.push(tuple(m.pop_many(1))),
        b"\x86": lambda m: m.push(tuple(m.pop_many(2))),
        b"\x87": lambda m: m.push(tuple(m.pop_many(3))),
        b"\x8f": lambda m: m.push(OpaqueObject("builtins.set")),
        b"\x90": m.add_items,
        b"\x91": lambda m: m.push(OpaqueObject("builtins.set", tuple(m.pop_to_mark()))),
        b"g": lambda m: m.push(m.memo[int(m.line())]),
        b"h": lambda m: m.push(m.memo[m.take(1)[0]]),
        b"j": lambda m: m.push(m.memo[m.number(4)]),
        b"p": lambda m: m.put(int(m.line())),
        b"q": lambda m: m.put(m.take(1)[0]),
        b"r": lambda m: m.put(m.number(4)),
        b"\x94": lambda m: m.put(len(m.memo)),
        b"c": lambda m: m.name(m.line().decode(), m.line().decode()),
        b"\x93": lambda m: m.name(*m.pop_many(2)),
        b"R": m.reduce,
        b"\x81": m.reduce,  # NEWOBJ
        b"\x92": m.new_with_keywords,
        b"o": m.instance,
        b"i": m.named_instance,
        b"b": m.build,
        b"P": lambda m: m.persistent(m.line().decode()),
        b"Q": lambda m: m.persistent(m.stack.pop()),
    }
    return [table.get(bytes([code])) for code in range(256)]


_OPERATIONS = _build_operations()
