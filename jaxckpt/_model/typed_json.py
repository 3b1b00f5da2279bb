"""Values of typed records, from JSON or from plain objects, in any thread.

msgspec examines a class when it first converts to it. Until that has ended, another thread that converts to the same
class crashes the process (msgspec 0.22, `StructInfo_Convert`, which publishes the description of a class before its
fields are known). So one thread at a time examines, and nothing is converted to a class before.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_examination = threading.Lock()
os.register_at_fork(after_in_child=_examination._at_fork_reinit)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def decode(content: bytes | str, kind: type[T]) -> T:
    """A value of `kind` from JSON. Raises ValueError, RecursionError."""
    return _decoder(kind).decode(content)


def convert(value: object, kind: type[T]) -> T:
    """A value of `kind` from dicts, lists and scalars. Raises ValueError, RecursionError."""
    _decoder(kind)
    return msgspec.convert(value, kind)


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    decoder = _decoders.get(kind)
    if decoder is None:
        with _examination:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return cast("msgspec.json.Decoder[T]", decoder)
