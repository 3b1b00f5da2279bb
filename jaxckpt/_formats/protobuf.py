"""Parses protobuf messages in a file into fields and their positions, without reading large fields.

Every length is compared with the enclosing message before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxckpt._store.foreign_files import OpenFile
from jaxckpt.errors import DataError

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5

MAX_TEXT_BYTES = 1 << 16

MAX_NUMBERS = 1 << 17
"""The most integers in a repeated field."""

_WINDOW_BYTES = 4096
"""Bytes per read of the small fields between large ones."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message, and the position of its value in the file."""

    number: int
    wire_type: int
    start: int
    stop: int
    value: int = 0
    """Value of a varint, signed."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The known fields of a message."""

    what: str
    """Name of the message in errors."""

    fields: Mapping[int, tuple[str, Literal["number", "numbers", "text", "span"] | Schema]]
    """Name and type of each field, by number: an integer, repeated integers, text, the position of the field's bytes in
    the file, or a message."""

    strict: bool = False
    """Whether other fields are an error."""


class Message:
    """A message in an open file."""

    def __init__(self, path: str, handle: OpenFile, size: int) -> None:
        self.path = path
        self.size = size
        self._handle = handle
        self._window = (0, b"")

    def _byte(self, at: int) -> int:
        start, content = self._window
        if not start <= at < start + len(content):
            start, content = self._window = (at, self._handle.read(_WINDOW_BYTES, at))
            if not content:
                raise DataError(f"{self.path} was truncated while it was being read")
        return content[at - start]

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """A varint of up to 64 bits, as (number, end position)."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise self.damage_error(at, "a number is truncated")
            byte = self._byte(at)
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (1 << 64) - 1, at
        raise self.damage_error(at, "a number is too long")

    def damage_error(self, at: int, why: str) -> DataError:
        return DataError(f"{self.path} is damaged, encrypted or in another format: at byte {at} {why}")

    def fields(self, at: int, end: int) -> Iterator[Field]:
        """The fields of the message between two positions."""
        while at < end:
            key, start = self._varint(at, end)
            number, kind = key >> 3, key & 7
            value = 0
            if kind == _VARINT:
                value, stop = self._varint(start, end)
                value -= value >> 63 << 64
            elif kind == _LENGTH_DELIMITED:
                length, start = self._varint(start, end)
                stop = start + length
            elif kind in (_FIXED64, _FIXED32):
                stop = start + (8 if kind == _FIXED64 else 4)
            else:
                raise self.damage_error(at, f"a field has the unknown type {kind}")
            if not number:
                raise self.damage_error(at, "a field has the number 0")
            if stop > end:
                raise self.damage_error(at, f"field {number} extends to byte {stop}, but the message ends at {end}")
            yield Field(number, kind, start, stop, value)
            at = stop

    def read(self, outer: Field, schema: Schema) -> dict[str, Any]:
        """The known fields of an inner message, by name."""
        values: dict[str, Any] = {}
        for field in self.fields(*self.span(outer)):
            what = f"{schema.what} has field {field.number}"
            name, kind = schema.fields.get(field.number, ("", None))
            if kind is None and schema.strict:
                raise self.damage_error(field.start, f"{what}, which is not part of the format")
            if name in values and kind != "numbers":
                raise self.damage_error(field.start, f"{what} twice")
            match kind:
                case "number":
                    values[name] = self.number(field)
                case "numbers":
                    self._extend(values.setdefault(name, []), field)
                case "text":
                    values[name] = self.text(field)
                case "span":
                    values[name] = self.span(field)
                case Schema():
                    values[name] = self.read(field, kind)
                case None:
                    pass
        return values

    def _extend(self, numbers: list[int], field: Field) -> None:
        """Append the integers of a repeated field, packed or not."""
        if field.wire_type not in (_VARINT, _LENGTH_DELIMITED):
            raise self.damage_error(field.start, "a list has an item that is not an integer")
        at = field.start
        while at < field.stop:
            value, at = self._varint(at, field.stop)
            numbers.append(value - (value >> 63 << 64))
            if len(numbers) > MAX_NUMBERS:
                raise self.damage_error(at, f"a list is longer than {MAX_NUMBERS}")

    def number(self, field: Field) -> int:
        """A field as an integer."""
        if field.wire_type != _VARINT:
            raise self.damage_error(field.start, f"field {field.number} is not a number")
        return field.value

    def span(self, field: Field) -> tuple[int, int]:
        """The position of a field's bytes in the file."""
        if field.wire_type != _LENGTH_DELIMITED:
            raise self.damage_error(field.start, f"field {field.number} has no length")
        return field.start, field.stop

    def text(self, field: Field) -> str:
        """A field as text of at most `MAX_TEXT_BYTES`. Raises DataError."""
        start, stop = self.span(field)
        if stop - start > MAX_TEXT_BYTES:
            raise self.damage_error(start, f"a text is longer than {MAX_TEXT_BYTES} bytes")
        content = bytearray(stop - start)
        self._handle.read_into(start, [content])
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.damage_error(start, f"field {field.number} is not text") from error
