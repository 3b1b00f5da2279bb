"""Reads the msgpack files of `flax.serialization`: nested dicts, with arrays as extension types.

extension 1: an array, 3: a NumPy scalar, both as msgpack of (shape, dtype, bytes); 2: a complex number, as (real, imag)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt._formats.byte_reader import ByteReader, LocatedBytes
from jaxckpt._formats.pickle_machine import insert
from jaxckpt._formats.pickles import MAX_VALUES, as_tree, data_of_bytes, require_sizes, unreadable
from jaxckpt._formats.shards import tiled_flat
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.tree import MAX_DEPTH, Tree
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt._store.foreign_files import OpenFile, opened
from jaxckpt.errors import DataError

_CHUNKED = "__msgpack_chunked_array__"
"""The key of a dict that stands for an array of more than 1 GiB: its shape, and flat chunks."""


def is_msgpack_map(head: bytes) -> bool:
    """Whether a file begins with a map whose first key is text, as files of Flax do."""
    starts = {0xDE: 3, 0xDF: 5} | dict.fromkeys(range(0x81, 0x90), 1)
    key = head[starts.get(head[0], len(head)) :] if head else b""
    code = key[0] if key else 0
    text = key[1:][: code & 31] if 0xA0 < code < 0xC0 else key[2:][: key[1]] if code == 0xD9 and key[1:] else b""
    return bool(text) and text.isascii() and text.decode().isprintable()


def read_msgpack(path: str, rebuild: Callable[[Any], Tree | None] = lambda node: None) -> Tree:
    """The tree of a file of Flax, with its arrays as ForeignArrays. Large arrays are located, not read.

    `rebuild` may replace a str or dict by a leaf. Raises DataError, StorageError.
    """
    with opened(path) as handle:
        size = handle.size
        reader = _Reader(path, handle, 0, size, rebuild)
        try:
            value = reader.value()
            if reader.position != size:
                raise ValueError(f"it has {size - reader.position} bytes after its end")
        except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
            raise DataError(f"{path}: the msgpack is damaged at byte {reader.position}: {error}") from error
    return as_tree(value, path)


class _Reader(ByteReader):
    """Decodes msgpack."""

    def __init__(
        self, path: str, handle: OpenFile, start: int, end: int, rebuild: Callable[[Any], Tree | None]
    ) -> None:
        super().__init__(path, handle, start, end)
        self._rebuild = rebuild
        self._values_left = MAX_VALUES

    def value(self, depth: int = 0) -> Any:
        self._values_left -= 1
        if self._values_left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"it holds more than {MAX_VALUES} values, or values nested deeper than {MAX_DEPTH}")
        code = self.take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 0x100
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        if code in _NUMBERS:
            return self._number(_NUMBERS[code])
        kind, count = ("map" if code < 0x90 else "array", code & 15) if code < 0xA0 else ("text", code & 31)
        if code >= 0xC0:
            if code not in _SIZED:
                raise ValueError(f"the code {code:#x} is not msgpack")
            kind, width = _SIZED[code]
            count = 1 << code - 0xD4 if width is None else int.from_bytes(self.take(width), "big")
        match kind:
            case "map":
                return self._map(count, depth)
            case "array":
                return [self.value(depth + 1) for _ in range(count)]
            case "text":
                return self._rebuilt(self.take(count).decode())
            case "bytes":
                return self.take_or_locate(count)
            case _:
                return self._extension(count)

    def _number(self, kind: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def _rebuilt(self, node: Any) -> Any:
        found = self._rebuild(node)
        return node if found is None else found

    def _map(self, count: int, depth: int) -> Any:
        node: dict[Any, Any] = {}
        for _ in range(count):
            key = self.value(MAX_DEPTH)  # nothing that contains values
            insert(node, [key, self.value(depth + 1)])
        return self._chunked(node) if node.get(_CHUNKED) is True else self._rebuilt(node)

    def _extension(self, count: int) -> Any:
        code, end = self._number(">b"), self.position + count
        if code not in (1, 2, 3):
            self.skip(count)
            return unreadable(f"has the msgpack extension type {code}, which Flax does not write")
        content = self.value(MAX_DEPTH - 2)
        if self.position != end:
            raise ValueError(f"an extension ends at byte {self.position}, expected {end}")
        if code == 2:
            real, imaginary = content
            return complex(real, imaginary)
        shape, dtype, data = content
        if dtype not in DTYPES:
            return unreadable(f"has dtype {str(dtype)[:80]}, which JAX does not support")
        if not isinstance(data, (bytes, LocatedBytes)):
            raise TypeError("an array has no bytes")
        sides = require_sizes(shape)
        return ForeignArray(dtype, sides, data_of_bytes(data, dtype, sides), "numpy_scalar" if code == 3 else "jax")

    def _chunked(self, node: Mapping[Any, Any]) -> ForeignArray:
        """An array from its flat chunks."""
        shape, chunks = (_in_order(node[name]) for name in ("shape", "chunks"))
        sides = require_sizes(shape)
        for chunk in chunks:
            if not isinstance(chunk, ForeignArray) or chunk.dtype != chunks[0].dtype or len(chunk.shape) != 1:
                raise TypeError("a chunk of an array is not an array of one dimension and of the dtype of the others")
        return ForeignArray(chunks[0].dtype, sides, tiled_flat(self.path, sides, chunks))


def _in_order(node: Any) -> list[Any]:
    """The values of a tuple, which Flax stores as a dict with the keys "0", "1" and so on."""
    return [node[str(number)] for number in range(len(node))] if isinstance(node, dict) else list(node)


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = dict(zip(range(0xCA, 0xD4), (">" + kind for kind in "fdBHIQbhiq"), strict=True))
_SIZED: Mapping[int, tuple[str, int | None]] = {
    **{
        first + n: (kind, 1 << n)
        for first, kind in ((0xC4, "bytes"), (0xC7, "extension"), (0xD9, "text"))
        for n in range(3)
    },
    **{first + n: (kind, 2 << n) for first, kind in ((0xDC, "array"), (0xDE, "map")) for n in range(2)},
    **dict.fromkeys(range(0xD4, 0xD9), ("extension", None)),
}
"""The kind of a value with a length, and the bytes of the length; None if it follows from the code."""
