"""Rules between two trees: names, axes, stacks, parts, casts; a checkpoint seen through them is another checkpoint.

A device's box of a target leaf is traced back to boxes of source leaves, so that each process reads what its own shards
are made of, and no leaf is ever whole in host memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, whole
from jaxckpt._format.paths import closest
from jaxckpt._format.pieces import Array
from jaxckpt._format.tree import nested
from jaxckpt._restore.rule_layouts import Interval, Layout, axes_of, solve
from jaxckpt._restore.rule_reading import Mapped, Piece
from jaxckpt._restore.source import ArrayData, Foreign, ForeignArray, Source, StackRow, compose
from jaxckpt._runtime.errors import InputError, MismatchError, Problem, counted, show

Names = str | tuple[str, ...]

_CAPTURE = re.compile(r"\{([A-Za-z_]\w*)\}")


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
    """Sizes of axes that do not follow from the shapes. A number of the paths can be given too, such as {"i": 32}: then
    it is an error if one of 0 to 31 is missing."""

    axis: int = 0
    """The dimension of the target along which several sources are joined, or of the source that several targets cut."""

    parts: tuple[int, ...] | None = None
    """Sizes along `axis` of several sources or targets. By default those of targets are equal. Sources that are not of
    equal size need it for the inverse."""

    dtype: str | None = None
    """The target's dtype, as NumPy casts; None keeps the source's."""

    scale: float = 1.0
    offset: float = 0.0
    """The target's values are source × scale + offset, computed in float32, or in float64 for float64 and int64."""

    tied: bool = False
    """Whether another rule has the same source. The inverse takes the source from the other rule's target."""

    def inverse(self, dtype: str | None = None) -> Rule:
        """From target to source. Where this rule casts, the inverse casts to `dtype`; None keeps the target's."""
        return Rule(
            source=self.target,
            target=self.source,
            layout=str(Layout.parse(self.layout).inverse()) if self.layout else "",
            sizes=self.sizes,
            axis=self.axis,
            parts=self.parts,
            dtype=None if self.dtype is None else dtype,
            scale=1 / self.scale,
            offset=-self.offset / self.scale,
        )

    def __post_init__(self) -> None:
        for what, names in (("source", self.source), ("target", self.target)):
            for name in _several(names):
                if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise InputError(f"Rule.{what} must be a path or a tuple of paths, found {names!r}")
                if set(_captures(name)) != set(_captures(names)):
                    raise InputError(f"{self}: all paths of Rule.{what} must have the same numbers")
        several = max(len(_several(self.source)), len(_several(self.target))) > 1
        if len(_several(self.source)) > 1 and len(_several(self.target)) > 1:
            raise InputError(f"{self} joins several sources into several targets: make it two rules")
        if self.parts is not None and not several:
            raise InputError(f"{self} has parts=, but one source and one target")
        if self.axis < 0:
            raise InputError(f"{self} has axis={self.axis}; it must count from the first dimension")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"Rule.dtype {self.dtype!r} is unknown{closest(self.dtype, DTYPES)}")
        if not self.scale or not math.isfinite(self.scale) or not math.isfinite(self.offset):
            raise InputError(f"{self} has scale {self.scale} and offset {self.offset}, which have no inverse")
        numbers = set(_captures(self.source)) ^ set(_captures(self.target))
        known = {*_captures(self.source), *_captures(self.target)}
        if self.layout:
            layout = Layout.parse(self.layout)
            only = set(axes_of(layout.source)) ^ set(axes_of(layout.target))
            known |= {*axes_of(layout.source), *axes_of(layout.target)}
            if only != numbers:
                raise InputError(
                    f"{self}: the layout has axes {sorted(only)} on one side only, and the paths have numbers"
                    f" {sorted(numbers)} on one side only; they must be the same"
                )
        elif numbers:
            raise InputError(f"{self} stacks or unstacks leaves, so it needs a layout that names the axis")
        if unknown := sorted(self.sizes.keys() - known):
            raise InputError(f"{self}: sizes= names {unknown[0]!r}, which is no axis{closest(unknown[0], known)}")

    def computed(self, values: Array) -> Array:
        """Values of the target, before they are cast to its dtype."""
        if self.scale == 1 and self.offset == 0:
            return values
        wide = np.result_type(values.dtype, np.float32)
        return values.astype(wide) * wide.type(self.scale) + wide.type(self.offset)

    def __str__(self) -> str:
        return f"rule {' + '.join(_several(self.source))} → {' + '.join(_several(self.target))}"


@dataclass(frozen=True, slots=True)
class Rules:
    """A mapping between two trees: `restore`, `load_numpy`, `open`, `plan`, `diff` and `convert` take it as `rename=`.

    A checkpoint that is read through rules has the leaves that the rules make and no others, each in nested dicts by
    its path. Every array of the source must be named by a rule or by `drop`. Nothing is read until a value is wanted,
    and then only what it is made of.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> from jaxckpt import Rule, Rules
        >>> tree = {f"h.{i}.w": np.full((2, 3), i) for i in range(4)}
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/rules", tree, overwrite=True)
        >>> rules = Rules([Rule(source="h.{i}.w", target="layers/w", layout="out in -> i in out")])
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/rules", rename=rules)["layers"]["w"].shape
        (4, 3, 2)
    """

    rules: Sequence[Rule]

    drop: Sequence[str] = ()
    """Paths of source leaves that the target lacks; `{i}` stands for a whole number."""

    def inverse(self, dtype: str | None = None) -> Rules:
        """From target to source; leaves that are dropped do not come back.

        Args:
            dtype: The source's dtype where a rule casts; None keeps the target's.
        """
        tied = [name for rule in self.rules if rule.tied for name in _several(rule.target)]
        return Rules([rule.inverse(dtype) for rule in self.rules if not rule.tied], tied)

    def over(self, source: Source) -> Foreign:
        """A checkpoint as it looks through the rules. Raises MismatchError that lists all that does not fit."""
        leaves = _Leaves(source)
        problems: list[Problem] = []
        targets: dict[str, ForeignArray] = {}
        claimed: dict[str, Rule] = {}
        for rule in self.rules:
            matches = [_matches(name, leaves.paths) for name in _several(rule.source)]
            if not any(matches):
                problems.append(
                    Problem(None, f"{rule} matches nothing{closest(_several(rule.source)[0], leaves.paths)}")
                )
                continue
            paths = [] if rule.tied else [path for found in matches for path in found.values()]
            problems += [
                Problem(path, f"is claimed by {claimed[path]} and by {rule}")
                for path in paths
                if claimed.setdefault(path, rule) is not rule
            ]
            for made in _made(rule, matches, leaves):
                if isinstance(made, str):
                    problems.append(Problem(None, f"{rule}: {made}"))
                elif made[0] in targets:
                    problems.append(Problem(made[0], f"is made by {rule} and by another rule"))
                else:
                    targets[made[0]] = made[1]
        dropped: set[str] = set()
        for name in self.drop:
            found = _matches(name, leaves.paths)
            dropped |= set(found.values())
            if not found:
                problems.append(Problem(None, f"drop {name!r} matches nothing{closest(name, leaves.paths)}"))
        named = claimed.keys() | dropped
        problems += [Problem(path, "matches no rule") for path in leaves.paths if path not in named]
        if problems:
            raise MismatchError.of(
                f"the rules do not fit {source.url} in {counted(len(problems), 'place')}",
                problems,
                "Rules.drop names leaves that are not wanted",
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
        self._numbers = source.manifest.numbers
        self.paths = list(self._numbers)

    def array(self, path: str) -> ForeignArray | str:
        """A leaf, or why it is none that a rule could take."""
        manifest = self._source.manifest
        record = manifest.leaves[self._numbers[path]]
        if record.stack is None or record.row is None or record.kind in ("key", "str", "bytes"):
            return f"{show(path)} is a {record.kind}, no array of numbers"
        stack = manifest.stacks[record.stack]
        if isinstance(self._source, Foreign):
            block = self._source.blocks[record.stack][record.row]
        else:
            if record.stack not in self._readers:
                self._readers[record.stack] = self._source.array_reader(record.stack)
            block = StackRow(self._readers[record.stack], record.row)
        chunk = tuple(stack.chunk[1:])
        return ForeignArray(stack.dtype, tuple(stack.shape), block, record.kind, chunk=chunk)  # pyright: ignore[reportArgumentType]


# Leaves of the target -------------------------------------------------------------------------------------


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
    for number, name in enumerate(kept):
        yield from _missing(name, {values[number] for values in sources}, rule)
    for values, group in sources.items():
        numbers = dict(zip(kept, values, strict=True))
        absent = [name for name, paths in zip(_several(rule.source), group, strict=True) if not paths]
        if absent:
            yield f"{_filled(absent[0], numbers)} is missing"
            continue
        for number, name in enumerate(stacked):
            yield from _missing(name, {index[number] for paths in group for index in paths}, rule)
        stacks = [_stack(stacked, paths, leaves) for paths in group]
        wrong = [stack for stack in stacks if isinstance(stack, str)]
        if wrong:
            yield from wrong
            continue
        yield from _of_group(rule, stacked, numbers, [stack for stack in stacks if not isinstance(stack, str)])


def _missing(name: str, values: Set[int], rule: Rule) -> Iterator[str]:
    """A problem if a number of the paths is not 0, 1, … up to the size that is given for it."""
    count = rule.sizes.get(name)
    if count is not None and values != set(range(count)):
        odd = sorted(values ^ set(range(count)))
        shown = ", ".join(map(str, odd[:5])) + (", …" if len(odd) > 5 else "")
        yield f"{{{name}}} must be 0 to {count - 1}; {'missing' if odd[0] < count else 'found'}: {shown}"


@dataclass(frozen=True, slots=True)
class _Stack:
    """Source leaves of one shape and dtype."""

    counts: tuple[int, ...]
    blocks: Mapping[tuple[int, ...], ArrayData]
    first: ForeignArray
    name: str


def _stack(stacked: Sequence[str], paths: Mapping[tuple[int, ...], str], leaves: _Leaves) -> _Stack | str:
    """The leaves to stack, or what is wrong with them."""
    counts = tuple(max(index[number] for index in paths) + 1 for number in range(len(stacked)))
    missing = [index for index in itertools.product(*map(range, counts)) if index not in paths]
    if missing:
        shown = ", ".join(f"{name} = {value}" for name, value in zip(stacked, missing[0], strict=True))
        return f"{len(missing)} of {math.prod(counts)} leaves to stack are missing, the first with {shown}"
    blocks: dict[tuple[int, ...], ArrayData] = {}
    first = None
    for index, path in paths.items():
        array = leaves.array(path)
        if isinstance(array, str):
            return array
        first = first or array
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            wanted = f"{first.dtype}{list(first.shape)}"
            return f"{show(path)} is {array.dtype}{list(array.shape)}, and others are {wanted}"
        blocks[index] = array.data
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
        pieces: list[Piece] = []
        for stack in stacks:
            piece = _piece(rule, stacked, stack, cut)
            if isinstance(piece, str):
                yield piece
                return
            pieces.append(piece)
        shapes = [piece.shape for piece in pieces]
        others = {(*shape[: rule.axis], -1, *shape[rule.axis + 1 :]) for shape in shapes}
        if len(pieces) > 1 and (
            len(others) > 1 or len({piece.dtype for piece in pieces}) > 1 or rule.axis >= len(shapes[0])
        ):
            yield f"{' and '.join(str(list(shape)) for shape in shapes)} cannot be joined along dimension {rule.axis}"
            return
        if len(pieces) > 1 and rule.parts is not None and [*rule.parts] != [shape[rule.axis] for shape in shapes]:
            yield f"{' and '.join(str(list(shape)) for shape in shapes)} are not the parts {[*rule.parts]}"
            return
        unstacked = [axis for axis in dict.fromkeys(_CAPTURE.findall(name)) if axis not in numbers]
        for values in itertools.product(*(range(pieces[0].sizes[axis]) for axis in unstacked)):
            fixed = dict(zip(unstacked, values, strict=True))
            held: list[tuple[Box, Piece]] = []
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
            kind = "numpy" if first.kind == "numpy_scalar" and shape else first.kind
            array = ForeignArray(rule.dtype or first.dtype, tuple(shape), Mapped(held), kind)
            yield _filled(name, {**numbers, **fixed}), array


def _piece(rule: Rule, stacked: tuple[str, ...], stack: _Stack, cut: Interval | None) -> Piece | str:
    """A stack, or the part of it along `rule.axis`, as the target has it; or why it does not fit."""
    shape, start = list(stack.first.shape), [0] * len(stack.first.shape)
    if cut is not None:
        start[rule.axis], shape[rule.axis] = cut[0], cut[1] - cut[0]
    axes = tuple((f"_{number}",) for number in range(len(shape)))
    layout = Layout.parse(rule.layout) if rule.layout else Layout(axes, axes)
    sizes = solve(layout.source, shape, {**rule.sizes, **dict(zip(stacked, stack.counts, strict=True))})
    if isinstance(sizes, str):
        return f"{stack.name} {sizes}"
    first = stack.first
    unit = math.prod(first.chunk or ()) * DTYPES[first.dtype].itemsize
    if DTYPES[first.dtype].kind == "c" and (rule.scale, rule.offset) != (1, 0):
        return f"{stack.name} is complex, and scale and offset are for real numbers"
    return Piece(layout, sizes, stacked, stack.blocks, first.dtype, unit, tuple(start), {}, rule.computed)


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
