"""Keys of containers: which can be stored, and their JSON, which keeps their type."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxckpt._model.paths import are_strings
from jaxckpt._model.values import decode_bytes, decode_float, encode_bytes, encode_float, is_utf8
from jaxckpt.errors import TreeError, show_path

MAX_KEY_DEPTH = 40
"""The greatest nesting depth of tuples in a key. Inside 200 nested containers, `manifest.MAX_NESTING` leaves room for
49 nested tuples."""

Key = str | int | float | bool | bytes | tuple["Key", ...]


def plain_key(entry: Any, path: str) -> Key:
    """The plain key in an entry of JAX's key path. Raises TreeError for keys that cannot be stored."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return _checked_key(getattr(entry, attribute), path)
    return _checked_key(str(entry), path)


def _checked_key(key: object, path: str, depth: int = 0) -> Key:
    """A key as the plain value that a restore returns. An enum member becomes its value, a namedtuple a tuple."""
    if isinstance(key, np.generic):
        key = key.item()
    match key:
        case tuple() if depth < MAX_KEY_DEPTH:
            return tuple(_checked_key(inner, path, depth + 1) for inner in cast("tuple[object, ...]", key))
        case tuple():
            raise TreeError(
                f"the container at {show_path(path)} has a key of tuples nested deeper than {MAX_KEY_DEPTH}; make it a"
                " str"
            )
        case bool():
            return key
        case float():
            return float.__float__(key)
        case bytes():
            return b"".join([key])
        case int() if abs(key) < 1 << 63:
            return int(key)
        case str() if is_utf8(key):
            return str.__str__(key)
        case _:
            pass
    raise TreeError(
        f"the container at {show_path(path)} has the key {ascii(key)[:80]} of type {type(key).__name__}; keys may be"
        " str (UTF-8), int (64 bits), float, bool, bytes, or tuples of them"
    )


def encode_keys(keys: Sequence[Key]) -> tuple[Any, ...]:
    """Keys as JSON values: str and int unchanged, others tagged with their type."""
    return cast("tuple[str, ...]", tuple(keys)) if are_strings(keys) else tuple(map(_encode_key, keys))


def _encode_key(key: Key) -> Any:
    """A key as a JSON value that keeps its type: str and int unchanged, others tagged."""
    if isinstance(key, bool):
        return {"bool": key}
    if isinstance(key, (str, int)):
        return key
    if isinstance(key, float):
        return {"float": encode_float(key)}
    if isinstance(key, bytes):
        return {"bytes": encode_bytes(key)}
    return {"tuple": [_encode_key(inner) for inner in key]}


def _decode_key(record: Any) -> Key:
    match record:
        case bool():
            pass
        case str():
            return record
        case int() if abs(record) < 1 << 63:
            return record
        case {"bool": bool(value)}:
            return value
        case {"float": str(text)}:
            return decode_float(text)
        case {"bytes": str(text)}:
            return decode_bytes(text)
        case {"tuple": list(inner)}:
            return tuple(_decode_key(key) for key in cast("list[Any]", inner))
        case _:
            pass
    raise ValueError(f"{record!r} is not a key")


def decode_keys(keys: tuple[Any, ...]) -> Sequence[Key]:
    return cast("Sequence[str]", keys) if are_strings(keys) else [_decode_key(key) for key in keys]


_MAX_COLLISIONS = 64


def keys_problem(keys: Sequence[Key]) -> str | None:
    """The reason why a dict cannot be built from these keys in linear time; None if it can.

    An attacker can choose keys with equal hashes: millions of tuples of -1 and -2 share one hash, and a dict of them
    takes hours to build.
    """
    if not are_strings(keys):
        hashes = collections.Counter(map(hash, keys))
        if max(hashes.values(), default=0) > _MAX_COLLISIONS:
            return f"more than {_MAX_COLLISIONS} keys with the same hash"
    if len(set(keys)) == len(keys):
        return None
    ((key, count),) = collections.Counter(keys).most_common(1)
    return f"the key {repr(key)[:80]} {count} times"
