"""Dequantizes leaves of a source to float32: each value times the scale of its block."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, extent, whole_box
from jaxckpt._model.pieces import Array
from jaxckpt._rules.axis_layouts import MisfitError
from jaxckpt._sources.foreign import ArrayData, ForeignArray
from jaxckpt.errors import show_path


def dequantize(
    path: str,
    array: ForeignArray,
    scales: ForeignArray | None,
    block: tuple[int, ...] | None,
    *,
    is_packed: bool = False,
) -> ForeignArray:
    """A quantized leaf as float32. A leaf of floats may have no scales. Raises MisfitError if its scales do not fit.

    Args:
        path: Path of the leaf, for messages.
        array: The quantized values.
        scales: One for each block of values. Without `block`, each side of the scales is the side of the values or 1;
            missing dimensions at the end count as 1.
        block: The sides of a block; at the end of a dimension, blocks may be smaller.
        is_packed: Whether each byte holds two values of float4_e2m1fn, and the scales are exponents.
    """
    if is_packed and (scales is None or (array.dtype, scales.dtype) != ("uint8", "uint8") or not array.shape):
        raise MisfitError(f"{show_path(path)} and its scales must be bytes, found {array.dtype}")
    if is_packed and scales is not None:
        shape, chunk = ((*sides[:-1], 2 * sides[-1]) if sides else None for sides in (array.shape, array.chunk))
        assert shape is not None
        array = replace(array, dtype="float4_e2m1fn", shape=shape, chunk=chunk, data=_UnpackedData(array.data))
        scales = replace(scales, dtype="float8_e8m0fnu")
    unsupported = [
        operand.dtype
        for operand in (array, scales)
        if operand is not None and operand.dtype.startswith(("bool", "complex"))
    ]
    if unsupported:
        raise MisfitError(f"{show_path(path)} and its scales must be real numbers, found {unsupported[0]}")
    if scales is None:
        if array.dtype not in ("bfloat16", "float16", "float32", "float64"):
            raise MisfitError(f"{show_path(path)} is {array.dtype}, and has no scales")
        return replace(array, dtype="float32", data=_DequantizedData(array, None, ()))
    sides = scales.shape + (1,) * (len(array.shape) - len(scales.shape))
    if block is None and math.prod(sides) == 1:
        block, sides = array.shape, (1,) * len(array.shape)
    elif block is None:
        block = tuple(n if side == 1 else 1 for n, side in zip(array.shape, sides, strict=False))
    counts = tuple(-(-n // step) for n, step in zip(array.shape, block, strict=False))
    if len(block) != len(array.shape) or sides != counts:
        blocks = f"blocks of {list(block)}" if len(block) == len(array.shape) else f"block={list(block)}"
        raise MisfitError(
            f"{show_path(path)} has shape {list(array.shape)}, and scales of shape {list(scales.shape)} for {blocks}"
        )
    return replace(array, dtype="float32", data=_DequantizedData(array, scales, block))


@dataclass(frozen=True, slots=True)
class _UnpackedData(ArrayData):
    """4-bit values, one for each half of a byte of the stored data; those of even index are in the low bits."""

    data: ArrayData

    def read(self, box: Box, target: Array) -> None:
        *outer, (a, b) = box
        packed = (*outer, (a // 2, -(-b // 2)))
        values = np.empty(extent(packed), np.uint8)
        self.data.read(packed, values)
        unpacked = np.stack([values & 15, values >> 4], -1).reshape(*extent(tuple(outer)), -1)
        target.view(np.uint8)[...] = unpacked[..., a % 2 : a % 2 + b - a]

    @property
    def origins(self) -> tuple[ArrayData]:
        return (self.data,)


@dataclass(frozen=True, slots=True)
class _DequantizedData(ArrayData):
    """A quantized leaf: each value is multiplied by the scale of its block when it is read."""

    array: ForeignArray
    scales: ForeignArray | None
    block: tuple[int, ...]

    def read(self, box: Box, target: Array) -> None:
        values = np.empty(target.shape, DTYPES[self.array.dtype])
        self.array.data.read(box, values)
        np.copyto(target, values, casting="unsafe")
        if self.scales is not None:
            np.multiply(target, self._scales(self.scales, box), out=target)

    def _scales(self, scales: ForeignArray, box: Box) -> Array:
        """The scales of a box, in a shape that NumPy broadcasts to it."""
        scale_box = tuple((a // step, -(-b // step)) for (a, b), step in zip(box, self.block, strict=True))
        own = whole_box(scales.shape) if math.prod(scales.shape) == 1 else scale_box[: len(scales.shape)]
        values = np.empty(extent(own), DTYPES[scales.dtype])
        scales.data.read(own, values)
        values = values.astype(np.float32).reshape(extent(scale_box))
        for dim, ((a, b), (first, last), step) in enumerate(zip(box, scale_box, self.block, strict=True)):
            if last - first > 1:
                values = values.take(np.arange(a, b) // step - first, dim)
        return values

    @property
    def origins(self) -> Iterable[ArrayData]:
        return (array.data for array in (self.array, self.scales) if array is not None)
