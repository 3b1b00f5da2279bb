"""Protobuf messages by their wire format, in a file: fields and where they lie, so that large ones are never copied.

Every length is held against the message around it before anything is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxckpt._runtime.errors import DataError

VARINT, LENGTH = 0, 2
_EIGHT, _FOUR = 1, 5

MAX_TEXT_BYTES = 1 << 16

_WINDOW_BYTES = 4096
"""What is read at once of the small fields between large ones."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message, and where its value lies in the file."""

    number: int
    kind: int
    start: int
    stop: int
    value: int = 0
    """Of a varint, signed."""


class Message:
    """A message in a file that is open."""

    def __init__(self, path: str, handle: int, size: int) -> None:
        self.path = path
        self.size = size
        self._handle = handle
        self._window = (0, b"")

    def _byte(self, at: int) -> int:
        start, held = self._window
        if not start <= at < start + len(held):
            start, held = self._window = (at, os.pread(self._handle, _WINDOW_BYTES, at))
            if not held:
                raise DataError(f"{self.path} was cut while it was read")
        return held[at - start]

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """(number, where it ends), of 64 bits."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise self.damaged(at, "a number is cut")
            byte = self._byte(at)
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (1 << 64) - 1, at
        raise self.damaged(at, "a number is too long")

    def damaged(self, at: int, why: str) -> DataError:
        return DataError(f"{self.path} is damaged, encrypted, or of another format: at byte {at} {why}")

    def fields(self, at: int, end: int) -> Iterator[Field]:
        """The fields of the message between two places."""
        while at < end:
            key, start = self._varint(at, end)
            number, kind = key >> 3, key & 7
            value = 0
            if kind == VARINT:
                value, stop = self._varint(start, end)
                value -= value >> 63 << 64
            elif kind == LENGTH:
                length, start = self._varint(start, end)
                stop = start + length
            elif kind in (_EIGHT, _FOUR):
                stop = start + (8 if kind == _EIGHT else 4)
            else:
                raise self.damaged(at, f"there is a field of type {kind}")
            if stop > end or not number:
                raise self.damaged(at, f"field {number} reaches to {stop}, the message to {end}")
            yield Field(number, kind, start, stop, value)
            at = stop

    def once(
        self, outer: Field, what: str, numbers: Collection[int], others: Collection[int] | None = None
    ) -> dict[int, Field]:
        """The fields of an inner message that occur once, by number. If `others` are given, only those may be there
        in addition."""
        fields: dict[int, Field] = {}
        for field in self.inner(outer, what):
            if others is not None and field.number not in numbers and field.number not in others:
                raise self.damaged(field.start, f"{what} has field {field.number}, which the format lacks")
            if field.number in numbers and fields.setdefault(field.number, field) is not field:
                raise self.damaged(field.start, f"{what} has field {field.number} twice")
        return fields

    def inner(self, outer: Field, what: str) -> Iterator[Field]:
        """The fields of an inner message."""
        if outer.kind != LENGTH:
            raise self.damaged(outer.start, f"{what} is no message")
        return self.fields(outer.start, outer.stop)

    def text(self, field: Field | None, what: str) -> str:
        """The value of a field that must be there."""
        if field is None or field.kind != LENGTH or field.stop - field.start > MAX_TEXT_BYTES:
            raise self.damaged(field.start if field else self.size, f"{what} is missing or too long")
        try:
            return os.pread(self._handle, field.stop - field.start, field.start).decode()
        except UnicodeDecodeError as error:
            raise self.damaged(field.start, f"{what} is no text") from error

    def integers(self, outer: Field, number: int, most: int) -> list[int]:
        """A repeated field of signed integers, packed or not."""
        numbers: list[int] = []
        for field in self.inner(outer, "a list"):
            if field.number != number:
                continue
            if field.kind not in (VARINT, LENGTH):
                raise self.damaged(field.start, "a list has what is no integer")
            at = field.start
            while at < field.stop:
                value, at = self._varint(at, field.stop)
                numbers.append(value - (value >> 63 << 64))
                if len(numbers) > most:
                    raise self.damaged(at, f"a list is longer than {most}")
        return numbers
