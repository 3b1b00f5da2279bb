"""A safe virtual machine for pickles: it imports nothing and calls only functions from its own table.

A pickle is a program. This machine runs the part of its language that builds data: numbers, text, lists, dicts. If the
pickle calls a name that is not in the table, the result is an `OpaqueObject`, which records the call and does nothing.

Large bytes objects are located but not read, so a pickle of arrays takes no more memory than a pickle of their names.

It is long because the machine has a method for each opcode.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from jaxckpt._formats.byte_reader import ByteReader

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
    is_instance: bool = False
    """Whether it was made by `__new__`, as namedtuples are, and instances of classes without a custom pickle."""

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes of an instance whose class does not customize its state."""
        return cast("dict[str, Any]", self.state) if isinstance(self.state, dict) else {}


class Unbuilt(abc.ABC):
    """The result of a call, until the pickle sets its state."""

    @abc.abstractmethod
    def build(self, state: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Machine(ByteReader):
    """The virtual machine of pickles."""

    calls: Mapping[str, AllowedFunction]
    persistent_call: AllowedFunction | None
    stack: list[Any] = field(default_factory=list[Any])
    _marks: list[list[Any]] = field(default_factory=list[list[Any]])
    memo: dict[int, Any] = field(default_factory=dict[int, Any])
    _globals: dict[str, Global] = field(default_factory=dict[str, Global])
    _n_copied: int = 0
    """How many values calls have copied."""

    def run(self) -> Any:
        operations = _OPERATIONS
        while True:
            try:
                code = self.window[self.window_index]
            except IndexError:
                self.fill(1)
                continue
            self.window_index += 1
            entry = operations[code]
            if entry is None:
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                raise ValueError(f"the opcode {bytes([code])!r} does not build data")
            operation, argument = entry
            if argument is None:
                operation(self)
            else:
                operation(self, argument)

    # Stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_top(self) -> None:
        self.push(self.stack[-1])

    def push_none(self) -> None:
        self.push(None)

    def push_new(self, kind: type) -> None:
        self.push(kind())

    def push_list(self) -> None:
        self.push(self.pop_to_mark())

    def push_dict(self) -> None:
        self.push(insert({}, self.pop_to_mark()))

    def push_tuple(self, count: int | None = None) -> None:
        self.push(tuple(self.pop_many(count)))

    def push_set(self) -> None:
        self.push(OpaqueObject("builtins.set"))

    def push_frozenset(self) -> None:
        self.push(OpaqueObject("builtins.set", tuple(self.pop_to_mark())))

    def push_line(self, parse: AllowedFunction) -> None:
        self.push(parse(self.line()))

    def push_number(self, width: int) -> None:
        self.push(self.number(width))

    def push_signed(self, width: int) -> None:
        self.push(int.from_bytes(self.take(width), "little", signed=True))

    def push_float(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def push_long(self, width: int) -> None:
        self.push_signed(self.number(width))

    def push_text(self, width: int) -> None:
        self.push(self.take(self.number(width)).decode("utf-8", "surrogatepass"))

    def push_text_of_python_2(self, width: int) -> None:
        raw = self.take(self.number(width))
        try:
            self.push(raw.decode())
        except UnicodeDecodeError:
            self.push(raw)

    def push_bytes(self, width: int) -> None:
        self.push(self.take_or_locate(self.number(width)))

    def push_from_memo(self, width: int | None = None) -> None:
        number = int(self.line()) if width is None else self.number(width)
        self.push(self.memo[number])

    def put(self, width: int | None = None) -> None:
        number = int(self.line()) if width is None else self.number(width)
        self.memo[number] = self.stack[-1]

    def put_next(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

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

    def pop_many(self, count: int | None = None) -> list[Any]:
        """The values at the top, or all that were pushed after the mark."""
        if count is None:
            return self.pop_to_mark()
        values = self.stack[-count:]
        if len(values) < count:
            raise IndexError
        del self.stack[-count:]
        return values

    # Containers

    def extend(self, count: int | None = None) -> None:
        values, target = self.pop_many(count), self.stack[-1]
        if isinstance(target, list):
            cast("list[Any]", target).extend(values)
        elif not isinstance(target, OpaqueObject):
            raise TypeError(f"items are appended to a {type(target).__name__}")

    def update(self, count: int | None = None) -> None:
        items, target = self.pop_many(count), self.stack[-1]
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
        full_name = f"{_MODULES.get(module, module)}.{name}"
        self.push(self._globals.setdefault(full_name, Global(full_name)))

    def named(self) -> None:
        self.name(*self.pop_many(2))

    def named_lines(self) -> None:
        self.name(self.line().decode(), self.line().decode())

    def reduce(self) -> None:
        self._call(*self.pop_many(2))

    def new(self) -> None:
        self.reduce()
        made = self.stack[-1]
        if isinstance(made, OpaqueObject):
            made.is_instance = True

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
            function = self.calls.get(called.name)
            if function is not None:
                self._n_copied += len(values) + sum([len(arg) for arg in values if isinstance(arg, _SIZED)])
                # A pickle could otherwise pass a long list to a million calls, and each call copies it.
                if self._n_copied > _MIN_COPIED + 16 * self.n_read:
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

    def persistent_line(self) -> None:
        self.push(self.line().decode())
        self.persistent()

    def persistent(self) -> None:
        if self.persistent_call is None:
            raise ValueError("it refers to an external object")
        self.push(self.persistent_call(self.stack.pop()))


_MIN_COPIED = 1 << 16
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


def _long(line: bytes) -> int:
    return int(line.rstrip(b"L"))


def _text(line: bytes) -> str:
    return line.decode("raw-unicode-escape")


def _quoted(line: bytes) -> str:
    """A Python 2 string in protocol 0."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a string has no quotes")
    return line[1:-1].decode("unicode_escape")


_CODES: Mapping[Any, Mapping[bytes, Any]] = {
    Machine.take: {b"\x80": 1, b"\x95": 8},  # PROTO, FRAME
    Machine.mark: {b"(": None},
    Machine.pop: {b"0": None},
    Machine.pop_to_mark: {b"1": None},
    Machine.push: {b"\x88": True, b"\x89": False, b")": ()},
    Machine.push_none: {b"N": None},
    Machine.push_top: {b"2": None},
    Machine.push_line: {b"I": _integer, b"L": _long, b"F": float, b"S": _quoted, b"V": _text},
    Machine.push_number: {b"K": 1, b"M": 2},
    Machine.push_signed: {b"J": 4},
    Machine.push_float: {b"G": None},
    Machine.push_long: {b"\x8a": 1, b"\x8b": 4},
    Machine.push_text_of_python_2: {b"U": 1, b"T": 4},
    Machine.push_text: {b"\x8c": 1, b"X": 4, b"\x8d": 8},
    Machine.push_bytes: {b"C": 1, b"B": 4, b"\x8e": 8, b"\x96": 8},  # the last is BYTEARRAY8
    Machine.push_new: {b"]": list, b"}": dict},
    Machine.push_list: {b"l": None},
    Machine.push_dict: {b"d": None},
    Machine.push_tuple: {b"t": None, b"\x85": 1, b"\x86": 2, b"\x87": 3},
    Machine.push_set: {b"\x8f": None},
    Machine.push_frozenset: {b"\x91": None},
    Machine.extend: {b"a": 1, b"e": None},
    Machine.update: {b"s": 2, b"u": None},
    Machine.add_items: {b"\x90": None},
    Machine.push_from_memo: {b"g": None, b"h": 1, b"j": 4},
    Machine.put: {b"p": None, b"q": 1, b"r": 4},
    Machine.put_next: {b"\x94": None},
    Machine.named: {b"\x93": None},
    Machine.named_lines: {b"c": None},
    Machine.reduce: {b"R": None},
    Machine.new: {b"\x81": None},
    Machine.new_with_keywords: {b"\x92": None},
    Machine.instance: {b"o": None},
    Machine.named_instance: {b"i": None},
    Machine.build: {b"b": None},
    Machine.persistent: {b"Q": None},
    Machine.persistent_line: {b"P": None},
}
"""The opcodes of each operation, each with the operation's argument; None if it takes none."""

_OPERATIONS: list[tuple[Any, Any] | None] = [None] * 256
for _operation, _codes in _CODES.items():
    for _code, _argument in _codes.items():
        _OPERATIONS[_code[0]] = _operation, _argument
