"""The kinds of leaves, how each is rebuilt from its stored form, and small values as text in the manifest."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

INLINE_BYTES = 4096
"""A str or bytes leaf up to this size is stored in the manifest itself; a larger one as an array of bytes."""


# Numbers as text ------------------------------------------------------------------------------------------


def encode_float(value: float) -> str:
    """A float as text that restores every bit: its repr, or its IEEE 754 bits if the repr is ambiguous."""
    return repr(value) if math.isfinite(value) else f"0x{struct.pack('>d', value).hex()}"


def decode_float(text: str) -> float:
    """The float that `encode_float` wrote. Raises ValueError."""
    if not text.startswith("0x"):
        return float(text)
    if len(text) != 18:
        raise ValueError(f"{text[:40]!r} is not a 64-bit float")
    return struct.unpack(">d", bytes.fromhex(text[2:]))[0]


def _encode_int(value: int) -> str:
    return str(value) if abs(value) < 1 << 63 else hex(value)


def decode_int(text: str) -> int:
    """An int of any size. Raises ValueError."""
    # Hexadecimal beyond 64 bits, because decimal takes quadratic time.
    if len(text) > 20 and not text.startswith(("0x", "-0x")):
        raise ValueError(f"{text[:40]!r}… is not an integer: those beyond 64 bits are hexadecimal")
    return int(text, 0)


def _decode_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text[:40]!r} is neither true nor false")
    return text == "true"


def _encode_complex(value: complex) -> str:
    return f"{encode_float(value.real)} {encode_float(value.imag)}"


def _decode_complex(text: str) -> complex:
    real, imag = text.split(" ")
    return complex(decode_float(real), decode_float(imag))


def encode_bytes(value: bytes) -> str:
    """Bytes as text, in base64."""
    return base64.b64encode(value).decode()


def decode_bytes(text: str) -> bytes:
    """The bytes that `encode_bytes` wrote. Raises ValueError."""
    return base64.b64decode(text, validate=True)


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON cannot represent
        return False
    return True


# Kinds ----------------------------------------------------------------------------------------------------


def _is_raw(dtype: str, rank: int) -> bool:
    """Whether an array is a one-dimensional array of bytes."""
    return dtype == "uint8" and rank == 1


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a saved leaf."""

    type: type
    """The type of its values without devices."""

    encode: Callable[[Any], str] | None = None
    """A value as text, for a kind whose small values are stored in the manifest."""

    decode: Callable[[str], Any] | None = None
    """The value from its text. Raises ValueError."""

    from_array: Callable[[np.ndarray[Any, Any]], Any] = lambda array: array
    """The value from its stored array, without devices. Raises UnicodeDecodeError."""

    holds: Callable[[str, int], bool] | None = None
    """Whether it can be stored as an array of this dtype and rank; None for a kind that is never stored as an array."""

    on_devices: bool = False
    """Whether it is restored onto devices. Without devices it is restored as kind "numpy"."""


KINDS: Mapping[str, Kind] = {
    "jax": Kind(np.ndarray, holds=lambda dtype, rank: True, on_devices=True),
    "key": Kind(np.ndarray, holds=lambda dtype, rank: dtype == "uint32" and rank > 0, on_devices=True),
    "numpy": Kind(np.ndarray, holds=lambda dtype, rank: True),
    "numpy_scalar": Kind(np.generic, from_array=lambda array: array[()], holds=lambda dtype, rank: rank == 0),
    "bool": Kind(bool, lambda value: str(value).lower(), _decode_bool, lambda array: bool(array.item())),
    "int": Kind(int, _encode_int, decode_int, lambda array: int(array.item())),
    "float": Kind(float, encode_float, decode_float, lambda array: float(array.item())),
    "complex": Kind(complex, _encode_complex, _decode_complex, lambda array: complex(array.item())),
    "str": Kind(str, str, str, lambda array: array.tobytes().decode("utf-8", "surrogatepass"), _is_raw),
    "bytes": Kind(bytes, encode_bytes, decode_bytes, lambda array: array.tobytes(), _is_raw),
}
"""Every kind of leaf; "key" is a typed PRNG key, which is stored as its raw data."""

PYTHON_KINDS: Mapping[type, str] = {kind.type: name for name, kind in KINDS.items() if kind.encode}
"""The kind of each type of Python value."""

NUMBER_KINDS = ("bool", "int", "float", "complex")
"""Kinds of Python numbers. Each can hold the values of the kinds before it."""


def encode_value(value: object) -> tuple[str, str] | None:
    """(kind, text) of a leaf small enough to be stored in the manifest; None for one that is stored as an array."""
    name = PYTHON_KINDS.get(type(value))
    if name is None or (isinstance(value, (str, bytes)) and len(value) > INLINE_BYTES):
        return None
    encode = KINDS[name].encode
    return None if encode is None or (isinstance(value, str) and not is_utf8(value)) else (name, encode(value))


def array_of(value: str | bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A large str or bytes as the array that stores it. `Kind.from_array` returns the value."""
    return np.frombuffer(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value, np.uint8)


def decode_value(kind: str, text: str) -> Any:
    """The leaf from its text. Raises ValueError if the text is malformed."""
    decode = KINDS[kind].decode if kind in KINDS else None
    if decode is None:
        raise ValueError(f"{text[:40]!r} is not a value of kind {kind!r}")
    return decode(text)
