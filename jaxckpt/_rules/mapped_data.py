"""Leaves built from source leaves: a box of a target is read as boxes of its sources, in bounded memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, box_at, extent, intersection, relative, slices_within, volume, whole_box
from jaxckpt._model.pieces import Array, assign
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import submit_waiting
from jaxckpt._rules.axis_layouts import AxisLayout, Interval, MisfitError, axes_of, cover, tiles
from jaxckpt._rules.rule import Rule
from jaxckpt._sources.foreign import ArrayData, AsyncArrayData, ForeignArray, Replicas, Tiled
from jaxckpt.errors import DataError, show_path

_WASTE = 2
"""The largest ratio of bytes read to bytes needed for which scattered parts of a dimension are read in one request."""

_MIN_SPLIT_BYTES = 64 << 10
"""Smaller reads are not split, even if little of them is needed, because each read has a fixed cost."""

_TEMPORARY_BYTES = 4 << 20
"""Approximate largest memory of one read."""


@dataclass(frozen=True, slots=True)
class MappedSource(ArrayData):
    """Source leaves of one shape and dtype, stacked and with their axes in the order of the target leaf."""

    layout: AxisLayout
    sizes: Mapping[str, int]
    stacked: tuple[str, ...]
    """The axes whose indices are separate source leaves."""

    data: Mapping[tuple[int, ...], ArrayData]
    """The source leaves, by their indices along the stacked axes."""

    dtype: str
    """Dtype of the source leaves."""

    unit_bytes: int
    """Bytes of the unit of a source leaf that can only be read completely; 0 without such a unit."""

    start: tuple[int, ...]
    """Start of the used part of each source leaf."""

    fixed: Mapping[str, int]
    """The index along each axis that only the source has."""

    rule: Rule
    """Computes target values from source values, before they are cast to the target's dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the target."""
        return tuple(math.prod(self.sizes[axis] for axis in dim) for dim in self.layout.target)

    @property
    def origins(self) -> Iterable[ArrayData]:
        return self.data.values()

    def read(self, box: Box, target: Array) -> None:
        axes = axes_of(self.layout.target)
        own = {axis: (value, value + 1) for axis, value in self.fixed.items()}
        for tile, intervals in tiles(self.layout.target, self.sizes, box):
            region = target[(*slices_within(tile, box), ...)]  # the "..." keeps a 0-d array an array
            region = region.reshape(extent(tuple(intervals[axis] for axis in axes)))
            for index in itertools.product(*(range(*intervals[axis]) for axis in self.stacked)):
                at = dict(zip(self.stacked, index, strict=True))
                picks = [at[axis] - intervals[axis][0] if axis in at else slice(None) for axis in axes]
                left = [axis for axis in axes if axis not in at]
                self._read_leaf(self.data[index], {**intervals, **own}, left, region[(*picks, ...)])

    def _read_leaf(self, data: ArrayData, needed: Mapping[str, Interval], order: Sequence[str], target: Array) -> None:
        """Fill `target`, whose dimensions are the axes in this order, with the needed intervals of a source leaf."""
        covers = [cover(dim, self.sizes, needed) for dim in self.layout.source]
        axes = axes_of(self.layout.source)
        taken = dict(zip(axes, itertools.chain.from_iterable(own for _, own in covers), strict=True))
        split = self._axis_to_split(needed, taken, target.size)
        if split is not None:
            a, b = needed[split]
            middle, number = (a + b) // 2, order.index(split)
            for half in ((a, middle), (middle, b)):
                into = target[(slice(None),) * number + (slice(half[0] - a, half[1] - a),)]
                self._read_leaf(data, {**needed, split: half}, order, into)
            return
        box = tuple((a + start, b + start) for ((a, b), _), start in zip(covers, self.start, strict=True))
        source = np.empty(extent(box), DTYPES[self.dtype])
        data.read(box, source)
        source = source.reshape(extent(tuple(taken.values())))
        spans = [tuple(side - taken[axis][0] for side in needed[axis]) for axis in axes]
        picks = [a if axis in self.fixed else slice(a, b) for axis, (a, b) in zip(axes, spans, strict=True)]
        left = [axis for axis in axes if axis not in self.fixed]
        source = _scaled(source[(*picks, ...)].transpose([left.index(axis) for axis in order]), self.rule)
        assign(target, source)

    def parts_from(self, index: tuple[int, ...], box: Box, values: Array) -> Iterator[tuple[Box, Array]]:
        """The parts of the target that a box of one source leaf becomes: each as a box in the space of the target's
        axes, and its values before they are cast."""
        used = box_at(self.start, [math.prod(self.sizes[axis] for axis in dim) for dim in self.layout.source])
        common = intersection(box, used)
        if common is None:
            return
        axes = axes_of(self.layout.source)
        left = [axis for axis in axes if axis not in self.fixed]
        at = {axis: (number, number + 1) for axis, number in zip(self.stacked, index, strict=True)}
        order = axes_of(self.layout.target)
        values = values[(*slices_within(common, box), ...)]
        inner = relative(common, used)
        for tile, intervals in tiles(self.layout.source, self.sizes, inner):
            if all(a <= self.fixed[axis] < b for axis, (a, b) in intervals.items() if axis in self.fixed):
                picks = [self.fixed[axis] - intervals[axis][0] if axis in self.fixed else slice(None) for axis in axes]
                part = values[(*slices_within(tile, inner), ...)].reshape([b - a for a, b in intervals.values()])
                part = part[(*picks, ...)].transpose([left.index(axis) for axis in order if axis in left])
                place = tuple((intervals | at)[axis] for axis in order)
                yield place, _scaled(part.reshape(extent(place)), self.rule)

    def _axis_to_split(self, needed: Mapping[str, Interval], taken: Mapping[str, Interval], count: int) -> str | None:
        """The axis to halve, if one read would be too large or would contain too much data that is not needed: `count`
        elements are."""
        itemsize = DTYPES[self.dtype].itemsize
        n_bytes = volume(tuple(taken.values())) * itemsize
        several = [axis for axis in axes_of(self.layout.source) if needed[axis][1] - needed[axis][0] > 1]
        if n_bytes > max(_WASTE * count * itemsize, _MIN_SPLIT_BYTES, self.unit_bytes):
            for dim in self.layout.source:
                if any(taken[axis] != needed[axis] for axis in dim):
                    return next(axis for axis in dim if axis in several)
        return several[0] if n_bytes > _TEMPORARY_BYTES and several else None


@dataclass(frozen=True, slots=True)
class ComparedData(Replicas):
    """A source leaf that is stored several times, by path. Each box that is read is compared with its copies."""

    def difference(self, first: str, other: str, box: Box) -> DataError:
        return DataError(
            f"{show_path(other)} differs from {show_path(first)}, and the rules take it for a copy (Rule.copies). If it"
            " is the head of a Hugging Face model, set tie_word_embeddings to false in config.json"
        )


class ComputedData(AsyncArrayData):
    """Data that is computed from the data of other leaves."""

    def start(self, box: Box, target: Array) -> Pending[None]:
        return submit_waiting(functools.partial(self.read, box, target))


@dataclass(frozen=True, slots=True)
class MappedData(Tiled, ComputedData):
    """A target leaf: adjacent pieces along one dimension."""

    is_padded: bool = False
    """Whether zeros fill the rest."""

    def read(self, box: Box, target: Array) -> None:
        if self.is_padded:
            target[...] = 0
        Tiled.read(self, box, target)


def _scaled(values: Array, rule: Rule) -> Array:
    """Scaled and offset values of the target of a rule, before they are cast to its dtype."""
    if rule.scale == 1 and rule.offset == 0:
        return values
    wide = np.result_type(values.dtype, np.float32)
    with np.errstate(all="ignore"):  # infinity and NaN are values like others
        return values.astype(wide) * wide.type(rule.scale) + wide.type(rule.offset)


# Scales ---------------------------------------------------------------------------------------------------


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
