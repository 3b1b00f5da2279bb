"""Rules between two trees: names, axes, stacks, parts, casts; a checkpoint seen through them is another checkpoint.

A device's box of a target leaf is traced back to boxes of source leaves, so that each process reads what its own shards
are made of, and no leaf is ever whole in host memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxckpt._format.grid import Box, intersection, whole, within
from jaxckpt._format.pieces import Array
from jaxckpt._format.tree import DTYPES, closest, nested, show
from jaxckpt._restore.axes import Interval, Layout, axes_of, cover, solve, tiles
from jaxckpt._restore.source import Block, Foreign, ForeignArray, Source, StartedBlock, compose
from jaxckpt._runtime.errors import InputError, MismatchError, counted, listing
from jaxckpt._storage.files import Workers
from jaxckpt._storage.store import Pending

Names = str | tuple[str, ...]

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)\}")
_WASTE = 2
"""Bytes read over bytes needed, at most, if parts of a dimension lie scattered: below that, one read takes them all."""

_WHOLE_BYTES = 64 << 10
"""What is no larger is read at once, whatever is needed of it."""

_TEMPORARY_BYTES = 4 << 20
"""Of one box on its way, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How leaves of a source become leaves of a target.

    Examples:
        >>> from jaxckpt import Rule
        >>> one = Rule(
        ...     source="model.layers.{i}.self_attn.q_proj.weight", target="layers/q/kernel",
        ...     layout="(heads dim) model -> i model heads dim", sizes={"dim": 64},
        ... )
        >>> one.inverse().layout
        'i model heads dim -> (heads dim) model'
    """

    source: Names
    """The path of the source leaf; `{i}` stands for a whole number. Several paths are joined along `axis`."""

    target: Names
    """The path of the target leaf. A number that only the source has becomes an axis of the layout, along which the
    leaves are stacked; one that only the target has is an axis of the source. Several paths are parts along `axis`."""

    layout: str = ""
    """The axes of source and target as einops writes them, such as "(h d) m -> m h d". Empty: as they are."""

    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sizes of axes that do not follow from the shapes."""

    axis: int = 0
    """Along which dimension several sources are joined, or several targets cut, of the array that is joined."""

    parts: tuple[int, ...] | None = None
    """Sizes along `axis` of several targets; by default they are equal."""

    dtype: str | None = None
    """The target's dtype, as NumPy casts; None keeps the source's."""

    scale: float = 1.0
    offset: float = 0.0
    """The target's values are source × scale + offset, computed in float32 (float64 for float64)."""

    tied: bool = False
    """Whether the source is also that of another rule, which is the one that its inverse takes it from."""

    def inverse(self) -> Rule:
        """From target to source. The dtype of the source is not known: the inverse casts to none."""
        return Rule(
            source=self.target,
            target=self.source,
            layout=str(Layout.parse(self.layout).inverse()) if self.layout else "",
            sizes=self.sizes,
            axis=self.axis,
            parts=self.parts,
            scale=1 / self.scale,
            offset=-self.offset / self.scale,
        )

    def __post_init__(self) -> None:
        for what, names in (("source", self.source), ("target", self.target)):
            for name in _several(names):
                if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise InputError(f"Rule.{what} must be a path or a tuple of paths, found {names!r}")
        if len(_several(self.source)) > 1 and len(_several(self.target)) > 1:
            raise InputError(f"{self} joins several sources into several targets: make it two rules")
        if self.dtype is not None and self.dtype not in DTYPES:
            hint = closest(self.dtype, DTYPES)
            raise InputError(f"Rule.dtype {self.dtype!r} is unknown{f'; did you mean {hint!r}?' if hint else ''}")
        if not self.scale:
            raise InputError(f"{self} has scale 0")
        if self.layout:
            layout = Layout.parse(self.layout)
            only = set(axes_of(layout.source)) ^ set(axes_of(layout.target))
            numbers = set(_captures(self.source)) ^ set(_captures(self.target))
            if only != numbers:
                raise InputError(
                    f"{self}: axes {sorted(only)} are on one side of the layout, numbers {sorted(numbers)} in the paths"
                    " of one side; they must be the same"
                )
        elif set(_captures(self.source)) != set(_captures(self.target)):
            raise InputError(f"{self} stacks or unstacks leaves, so it needs a layout that names the axis")

    @property
    def keeps_values(self) -> bool:
        return self.scale == 1 and self.offset == 0

    def computed(self, values: Array) -> Array:
        """Values of the target, before they are cast to its dtype."""
        if self.keeps_values:
            return values
        wide = np.float64 if values.dtype == np.float64 else np.float32
        return values.astype(wide) * wide(self.scale) + wide(self.offset)

    def __str__(self) -> str:
        return f"rule {' + '.join(_several(self.source))} → {' + '.join(_several(self.target))}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A mapping between two trees; `restore`, `load_numpy`, `open`, `plan` and `convert` take it as `rename=`."""

    rules: Sequence[Rule]

    drop: Sequence[str] = ()
    """Paths of source leaves that the target lacks; `{i}` stands for a whole number."""

    def inverse(self) -> Rules:
        """From target to source; leaves that are dropped do not come back."""
        tied = [name for rule in self.rules if rule.tied for name in _several(rule.target)]
        return Rules([rule.inverse() for rule in self.rules if not rule.tied], tied)

    def over(self, source: Source) -> Foreign:
        """A checkpoint as it looks through the rules. Raises MismatchError that lists all that does not fit."""
        leaves = _Leaves(source)
        problems: list[str] = []
        targets: dict[str, ForeignArray] = {}
        claimed: dict[str, Rule] = {}
        for rule in self.rules:
            matches = [_matches(name, leaves.paths) for name in _several(rule.source)]
            if not any(matches):
                near = closest(_several(rule.source)[0], leaves.paths)
                problems.append(f"{rule} matches nothing" + (f"; the closest leaf is {show(near)}" if near else ""))
                continue
            paths = [] if rule.tied else [path for found in matches for path in found.values()]
            problems += [
                f"{show(path)} is claimed by {claimed[path]} and by {rule}"
                for path in paths
                if claimed.setdefault(path, rule) is not rule
            ]
            for made in _made(rule, matches, leaves):
                if isinstance(made, str):
                    problems.append(f"{rule}: {made}")
                elif made[0] in targets:
                    problems.append(f"{show(made[0])} is made by {rule} and by another rule")
                else:
                    targets[made[0]] = made[1]
        dropped = {path for name in self.drop for path in _matches(name, leaves.paths).values()}
        problems += [f"drop {name!r} matches nothing" for name in self.drop if not _matches(name, leaves.paths)]
        problems += [f"{show(path)} matches no rule" for path in leaves.paths if path not in claimed.keys() | dropped]
        if problems:
            raise MismatchError(
                f"the rules do not fit {source.url} in {counted(len(problems), 'place')}:\n{listing(problems)}\n"
                "Rules.drop names leaves that are not wanted.",
                problems,
            )
        return compose(source.url, nested(targets), source.manifest.format, metadata=source.manifest.metadata)


# Names ----------------------------------------------------------------------------------------------------


def _several(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _captures(names: Names) -> list[str]:
    return list(dict.fromkeys(name for one in _several(names) for name in _CAPTURE.findall(one)))


Numbers = tuple[tuple[str, int], ...]
"""What the captures of a path stand for, by name."""


def _matches(name: str, paths: Iterable[str]) -> dict[Numbers, str]:
    """The paths that a name with captures fits, by what these stand for."""
    parts = _CAPTURE.split(name)
    seen: set[str] = set()
    pattern = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            pattern += re.escape(part)
        else:
            pattern += f"(?P={part})" if part in seen else f"(?P<{part}>0|[1-9][0-9]*)"
            seen.add(part)
    compiled = re.compile(pattern)
    found: dict[Numbers, str] = {}
    for path in paths:
        match = compiled.fullmatch(path)
        if match:
            found[tuple(sorted((key, int(value)) for key, value in match.groupdict().items()))] = path
    return found


def _filled(name: str, numbers: Mapping[str, int]) -> str:
    return _CAPTURE.sub(lambda match: str(numbers[match[1]]), name)


# Leaves of the source -------------------------------------------------------------------------------------


class _Leaves:
    """The arrays of a source, by path."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._readers: dict[int, Any] = {}
        self.paths = list(source.manifest.numbers)

    def array(self, path: str) -> ForeignArray | str:
        """A leaf, or why it is none that a rule could take."""
        manifest = self._source.manifest
        record = manifest.leaves[manifest.numbers[path]]
        if record.stack is None or record.row is None or record.kind in ("key", "str", "bytes"):
            return f"{show(path)} is a {record.kind}, no array of numbers"
        stack = manifest.stacks[record.stack]
        if isinstance(self._source, Foreign):
            block = self._source.blocks[record.stack][record.row]
        else:
            if record.stack not in self._readers:
                self._readers[record.stack] = self._source.array_reader(record.stack)
            block = _Row(self._readers[record.stack], record.row)
        return ForeignArray(stack.dtype, tuple(stack.shape), block, record.kind)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _Row(Block):
    """A leaf of the source."""

    reader: Any
    row: int

    def read(self, box: Box, target: Array) -> None:
        for pending in self.reader.read([(((self.row, self.row + 1), *box), target[None])]):
            pending.result()


# Leaves of the target -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """Source leaves of one shape and dtype as the target has them: stacked, and their axes in its order."""

    layout: Layout
    sizes: Mapping[str, int]
    stacked: tuple[str, ...]
    """The axes of which each index is a leaf of its own."""

    blocks: Mapping[tuple[int, ...], Block]
    """By the indices of these."""

    dtype: str
    start: tuple[int, ...]
    """Where what is taken of each source leaf begins."""

    fixed: Mapping[str, int]
    """The index of axes of the source that the target lacks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the target."""
        return tuple(math.prod(self.sizes[axis] for axis in dim) for dim in self.layout.target)

    def read(self, box: Box, target: Array) -> None:
        """Fill `target`, of the source's dtype, with a box."""
        axes = axes_of(self.layout.target)
        for tile, intervals in tiles(self.layout.target, self.sizes, box):
            region = target[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(tile, box, strict=True))]
            region = region.reshape([b - a for a, b in (intervals[axis] for axis in axes)])
            own = {axis: (value, value + 1) for axis, value in self.fixed.items()}
            for index in itertools.product(*(range(*intervals[axis]) for axis in self.stacked)):
                at = dict(zip(self.stacked, index, strict=True))
                # What is left has the axes of the source leaf, in the order of the target.
                one = region[tuple(at[axis] - intervals[axis][0] if axis in at else slice(None) for axis in axes)]
                left = [axis for axis in axes if axis not in at]
                self._read_leaf(self.blocks[index], {**intervals, **own}, left, one)

    def _read_leaf(self, block: Block, wanted: Mapping[str, Interval], order: Sequence[str], target: Array) -> None:
        """Fill `target`, whose dimensions are the axes in this order, with the wanted intervals of a source leaf."""
        covers = [cover(dim, self.sizes, wanted) for dim in self.layout.source]
        taken = {
            axis: side
            for dim, (_, found) in zip(self.layout.source, covers, strict=True)
            for axis, side in zip(dim, found, strict=True)
        }
        n_bytes = math.prod(b - a for a, b in taken.values()) * DTYPES[self.dtype].itemsize
        split = self._split(wanted, taken, n_bytes, target.nbytes)
        if split is not None:
            a, b = wanted[split]
            number = order.index(split)
            per = 1 if n_bytes > _WASTE * target.nbytes else -(-(b - a) // 2)
            for first in range(a, b, per):
                part = target[(slice(None),) * number + (slice(first - a, first - a + per),)]
                self._read_leaf(block, {**wanted, split: (first, min(b, first + per))}, order, part)
            return
        box = tuple((a + start, b + start) for ((a, b), _), start in zip(covers, self.start, strict=True))
        source = np.empty([b - a for a, b in box], target.dtype)
        block.read(box, source)
        axes = axes_of(self.layout.source)
        source = source.reshape([taken[axis][1] - taken[axis][0] for axis in axes])
        source = source[
            tuple(slice(wanted[axis][0] - taken[axis][0], wanted[axis][1] - taken[axis][0]) for axis in axes)
        ]
        kept = [number for number, axis in enumerate(axes) if axis not in self.fixed]
        source = source.reshape([source.shape[number] for number in kept])
        left = [axes[number] for number in kept]
        np.copyto(target, source.transpose([left.index(axis) for axis in order]))

    def _split(
        self, wanted: Mapping[str, Interval], taken: Mapping[str, Interval], n_bytes: int, needed: int
    ) -> str | None:
        """The axis to go through part by part: where one read would take much that is not needed, or much at once."""
        several = [axis for axis in axes_of(self.layout.source) if wanted[axis][1] - wanted[axis][0] > 1]
        if n_bytes > max(_WASTE * needed, _WHOLE_BYTES):
            for dim in self.layout.source:
                if any(taken[axis] != wanted[axis] for axis in dim):
                    return next(axis for axis in dim if axis in several)
        return several[0] if n_bytes > _TEMPORARY_BYTES and several else None


_workers = Workers()
"""Not those that move bytes: a leaf of the target waits for these."""


@dataclass(frozen=True, slots=True)
class _Mapped(StartedBlock):
    """A leaf of the target: pieces next to each other along an axis, with other values."""

    pieces: Sequence[tuple[Box, _Piece]]
    """Each with its box in the leaf."""

    rule: Rule

    def start(self, box: Box, target: Array) -> Pending:
        return _workers.submit(lambda: self.read(box, target))

    def read(self, box: Box, target: Array) -> None:
        for held, piece in self.pieces:
            common = intersection(held, box)
            if common is None:
                continue
            into = target[within(common, box)]
            part = tuple((a - start, b - start) for (a, b), (start, _) in zip(common, held, strict=True))
            if self.rule.keeps_values and DTYPES[piece.dtype] == target.dtype:
                piece.read(part, into)
            else:
                raw = np.empty(into.shape, DTYPES[piece.dtype])
                piece.read(part, raw)
                np.copyto(into, self.rule.computed(raw), casting="unsafe")


def _made(
    rule: Rule, matches: Sequence[Mapping[Numbers, str]], leaves: _Leaves
) -> Iterator[tuple[str, ForeignArray] | str]:
    """The target leaves that a rule makes; a text says what does not fit."""
    kept = [name for name in _captures(rule.source) if name in _captures(rule.target)]
    stacked = tuple(name for name in _captures(rule.source) if name not in kept)
    sources: dict[tuple[int, ...], list[dict[tuple[int, ...], str]]] = {}
    for number, found in enumerate(matches):
        for values, path in found.items():
            of = dict(values)
            group = sources.setdefault(tuple(of[name] for name in kept), [{} for _ in matches])
            group[number][tuple(of[name] for name in stacked)] = path
    for values, group in sources.items():
        numbers = dict(zip(kept, values, strict=True))
        absent = [name for name, paths in zip(_several(rule.source), group, strict=True) if not paths]
        if absent:
            yield f"{_filled(absent[0], numbers)} is missing"
            continue
        stacks = [_stack(stacked, paths, leaves) for paths in group]
        wrong = [stack for stack in stacks if isinstance(stack, str)]
        if wrong:
            yield from wrong
            continue
        yield from _of_group(rule, stacked, numbers, [stack for stack in stacks if not isinstance(stack, str)])


@dataclass(frozen=True, slots=True)
class _Stack:
    """Source leaves of one shape and dtype."""

    counts: tuple[int, ...]
    blocks: Mapping[tuple[int, ...], Block]
    first: ForeignArray
    name: str


def _stack(stacked: Sequence[str], paths: Mapping[tuple[int, ...], str], leaves: _Leaves) -> _Stack | str:
    """The leaves to stack, or what is wrong with them."""
    counts = tuple(max(index[number] for index in paths) + 1 for number in range(len(stacked)))
    missing = [index for index in itertools.product(*map(range, counts)) if index not in paths]
    if missing:
        shown = ", ".join(f"{name} = {value}" for name, value in zip(stacked, missing[0], strict=True))
        return f"{len(missing)} of {math.prod(counts)} leaves to stack are missing, the first with {shown}"
    blocks: dict[tuple[int, ...], Block] = {}
    first = None
    for index, path in paths.items():
        array = leaves.array(path)
        if isinstance(array, str):
            return array
        first = first or array
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            wanted = f"{first.dtype}{list(first.shape)}"
            return f"{show(path)} is {array.dtype}{list(array.shape)}, and others are {wanted}"
        blocks[index] = array.block
    assert first is not None
    return _Stack(counts, blocks, first, show(next(iter(paths.values()))))


def _of_group(
    rule: Rule, stacked: tuple[str, ...], numbers: Mapping[str, int], stacks: Sequence[_Stack]
) -> Iterator[tuple[str, ForeignArray] | str]:
    """The target leaves that are made of one set of source leaves."""
    names = _several(rule.target)
    cuts = _cuts(rule, len(names), stacks[0])
    if isinstance(cuts, str):
        yield cuts
        return
    for name, cut in zip(names, cuts, strict=True):
        pieces: list[_Piece] = []
        for stack in stacks:
            piece = _piece(rule, stacked, stack, cut)
            if isinstance(piece, str):
                yield piece
                return
            pieces.append(piece)
        shapes = [piece.shape for piece in pieces]
        others = {(*shape[: rule.axis], -1, *shape[rule.axis + 1 :]) for shape in shapes}
        if len(pieces) > 1 and (len(others) > 1 or len({piece.dtype for piece in pieces}) > 1 or not shapes[0]):
            yield f"{' and '.join(str(list(shape)) for shape in shapes)} cannot be joined along dimension {rule.axis}"
            return
        unstacked = [axis for axis in dict.fromkeys(_CAPTURE.findall(name)) if axis not in numbers]
        for values in itertools.product(*(range(pieces[0].sizes[axis]) for axis in unstacked)):
            fixed = dict(zip(unstacked, values, strict=True))
            held: list[tuple[Box, _Piece]] = []
            end = 0
            for piece in pieces:
                box = list(whole(piece.shape))
                if len(pieces) > 1:
                    box[rule.axis] = end, (end := end + piece.shape[rule.axis])
                held.append((tuple(box), replace(piece, fixed=fixed)))
            shape = list(shapes[0])
            if len(pieces) > 1:
                shape[rule.axis] = end
            first = stacks[0].first
            array = replace(
                first, dtype=rule.dtype or first.dtype, shape=tuple(shape), block=_Mapped(held, rule), chunk=None
            )
            yield _filled(name, {**numbers, **fixed}), array


def _piece(rule: Rule, stacked: tuple[str, ...], stack: _Stack, cut: Interval | None) -> _Piece | str:
    """A stack, or the part of it along `rule.axis`, as the target has it; or why it does not fit."""
    shape, start = list(stack.first.shape), [0] * len(stack.first.shape)
    if cut is not None:
        start[rule.axis], shape[rule.axis] = cut[0], cut[1] - cut[0]
    axes = tuple((f"_{number}",) for number in range(len(shape)))
    layout = Layout.parse(rule.layout) if rule.layout else Layout(axes, axes)
    sizes = solve(layout.source, shape, {**rule.sizes, **dict(zip(stacked, stack.counts, strict=True))})
    if isinstance(sizes, str):
        return f"{stack.name} {sizes}"
    return _Piece(layout, sizes, stacked, stack.blocks, stack.first.dtype, tuple(start), {})


def _cuts(rule: Rule, count: int, stack: _Stack) -> list[Interval] | list[None] | str:
    """What each of the targets takes of the source along `rule.axis`."""
    if count == 1:
        return [None]
    shape = stack.first.shape
    if rule.axis >= len(shape):
        return f"{stack.name} has no dimension {rule.axis}"
    side, parts = shape[rule.axis], rule.parts
    if parts is None and side % count:
        return f"{stack.name} has a dimension of {side}, which {count} equal parts do not make up: give Rule.parts"
    parts = parts or (side // count,) * count
    if len(parts) != count or sum(parts) != side:
        return f"parts {list(parts)} do not make up the dimension of {side} of {stack.name} for {count} leaves"
    ends = list(itertools.accumulate(parts))
    return list(zip([0, *ends[:-1]], ends, strict=True))
