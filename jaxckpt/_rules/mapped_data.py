"""Leaves built from source leaves: a box of a target is read as boxes of its sources, in bounded memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, box_at, extent, intersection, relative, slices_within, volume
from jaxckpt._model.pieces import Array, assign
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._pipeline.workers import submit_waiting
from jaxckpt._rules.axis_layouts import AxisLayout, Interval, axes_of, cover, tiles
from jaxckpt._rules.rule import Rule
from jaxckpt._sources.foreign import ArrayData, AsyncArrayData, Replicas, Tiled
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
            f"{show_path(other)} differs from {show_path(first)}, and the rules take it for a copy (Rule.copies)"
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
