"""Layouts of one array in another, in einops notation: which box of one corresponds to which box of the other.

"(h d) m -> m h d": a source of two dimensions, the first of which is h × d in C order, becomes a target of three. An
axis is a name; a dimension is one axis, or several in parentheses, the last one running fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxckpt._model.grid import Box, flat_boxes, volume
from jaxckpt.errors import InputError, show_count

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dimension, the outermost first."""

Interval = tuple[int, int]


class MisfitError(Exception):
    """The reason why a rule does not fit a checkpoint."""


_DIMENSION = re.compile(r"\s*(?:\(([^()]*)\)|([A-Za-z_]\w*|1))")


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """How the dimensions of a source and of a target consist of the same axes."""

    source: Dims
    target: Dims

    @classmethod
    def parse(cls, text: str) -> AxisLayout:
        """Parse a text such as "(h d) m -> m h d". Raises InputError."""
        sides = text.split("->")
        if len(sides) != 2:
            raise InputError(f"layout {text!r} must be of the form 'a b -> b a'")
        source, target = (_dims(side, text) for side in sides)
        return cls(source, target)

    def inverse(self) -> AxisLayout:
        return AxisLayout(self.target, self.source)

    def __str__(self) -> str:
        return f"{_text(self.source)} -> {_text(self.target)}"


def axes_of(dims: Dims) -> list[str]:
    """The axes of all dimensions, in order."""
    return [axis for dim in dims for axis in dim]


def _dims(side: str, text: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    at, side = 0, side.rstrip()
    while at < len(side):
        match = _DIMENSION.match(side, at)
        if match is None:
            raise InputError(f"layout {text!r} cannot be parsed at {side[at:].strip()!r}")
        names = match[1].split() if match[1] is not None else [match[2]]
        if not all(re.fullmatch(r"[A-Za-z_]\w*|1", name) for name in names):
            raise InputError(f"layout {text!r} cannot be parsed at {match[0].strip()!r}")
        dims.append(tuple(name for name in names if name != "1"))
        at = match.end()
    names = axes_of(tuple(dims))
    if len(set(names)) != len(names):
        raise InputError(f"layout {text!r} has an axis twice on one side")
    return tuple(dims)


def _text(dims: Dims) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else "1" for dim in dims)


def solve(name: str, dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
    """The size of every axis of an array of this shape, given some of them. Raises MisfitError, with the name."""
    if len(dims) != len(shape):
        raise MisfitError(f"{name} has {show_count(len(shape), 'dimension')}, but {_text(dims)!r} has {len(dims)}")
    solved = dict(sizes)
    for dim, side in zip(dims, shape, strict=True):
        unknown = [axis for axis in dim if axis not in solved]
        if len(unknown) > 1:
            raise MisfitError(f"{name} does not determine the sizes of {' and '.join(unknown)}: give them in sizes=")
        product = math.prod(solved[axis] for axis in dim if axis in solved)
        if unknown and (not product or side % product):
            raise MisfitError(
                f"{name} has a dimension of {side}, which is not divisible by {product} (for {_text((dim,))!r})"
            )
        if unknown:
            solved[unknown[0]] = side // product
        elif product != side:
            raise MisfitError(f"{name} has a dimension of {side}, but {_text((dim,))!r} is {product}")
    return solved


def tiles(dims: Dims, sizes: Mapping[str, int], box: Box) -> Iterator[tuple[Box, dict[str, Interval]]]:
    """A box of an array, split into disjoint boxes that are also boxes in the space of the axes.

    Yields each box with its interval along every axis.
    """
    per_dim = [list(_runs([sizes[axis] for axis in dim], side)) for dim, side in zip(dims, box, strict=True)]
    for runs in itertools.product(*per_dim):
        intervals = dict(zip(axes_of(dims), itertools.chain.from_iterable(own for _, own in runs), strict=True))
        yield tuple(side for side, _ in runs), intervals


def _runs(sizes: Sequence[int], side: Interval) -> Iterator[tuple[Interval, list[Interval]]]:
    """An interval of a dimension as boxes of its axes: the end of a row, whole rows, and the start of a row."""
    start = side[0]
    for box in flat_boxes(sizes, *side):
        yield (start, start := start + volume(box)), [*box]


def cover(
    dim: Sequence[str], sizes: Mapping[str, int], needed: Mapping[str, Interval]
) -> tuple[Interval, list[Interval]]:
    """The smallest contiguous interval of a dimension that contains the needed intervals of its axes, and its interval
    along each axis.

    That is the needed interval for the outermost axis with more than one needed index, and for the axes outside of it.
    Axes inside of it are complete.
    """
    taken: list[Interval] = []
    start, is_whole = 0, False
    for number, axis in enumerate(dim):
        a, b = (0, sizes[axis]) if is_whole else needed[axis]
        inner = math.prod(sizes[later] for later in dim[number + 1 :])
        start += a * inner
        taken.append((a, b))
        is_whole = is_whole or b - a != 1
    return (start, start + math.prod(b - a for a, b in taken)), taken
