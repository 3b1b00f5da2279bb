"""Applies a rule to the leaves of a source: returns the target's leaves, and the problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Spec, whole_box
from jaxckpt._model.paths import relative_path
from jaxckpt._model.records import MeshRecord, SavedLeaf
from jaxckpt._rules.axis_layouts import AxisLayout, Interval, MisfitError, solve
from jaxckpt._rules.mapped_data import ComparedData, MappedData, MappedSource, dequantize
from jaxckpt._rules.rule import CaptureValues, Rule, captures, fill_captures, paths_in
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, StackRow, as_foreign
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_path

# Leaves of the source -------------------------------------------------------------------------------------


class SourceLeaves:
    """The arrays of a source, or those below a container of it, by path."""

    def __init__(self, source: Source, within: str = "") -> None:
        self._source = source
        self._readers: dict[int, Any] = {}
        self._numbers = source.manifest.numbers
        self.paths = self._numbers.keys()
        if within:
            self.paths = {path: None for path in self._numbers if relative_path(within, path) is not None}.keys()

    def array(self, path: str, *, or_key: bool = False) -> ForeignArray:
        """An array of numbers, or with `or_key` of PRNG keys. Raises MisfitError for another leaf."""
        leaf = self.leaf(path)
        if not isinstance(leaf, ForeignArray) or leaf.kind in ("str", "bytes") or (leaf.kind == "key" and not or_key):
            kind = self._source.manifest.leaves[self._numbers[path]].kind
            raise MisfitError(f"{show_path(path)} is a {kind}, not a numeric array: list it in Rules.drop")
        return leaf

    def leaf(self, path: str) -> Any:
        """A leaf as it is: an array, or a Python value."""
        manifest = self._source.manifest
        record = manifest.leaves[self._numbers[path]]
        if record.stack is None or record.row is None:
            return SavedLeaf(manifest, record).value
        if isinstance(self._source, ForeignCheckpoint):
            block = self._source.row_data[record.stack][record.row]
        else:
            if record.stack not in self._readers:
                self._readers[record.stack] = self._source.array_reader(record.stack)
            block = StackRow(self._readers[record.stack], record.row)
        return as_foreign(SavedLeaf(manifest, record), block)


# Leaves of the target -------------------------------------------------------------------------------------


def apply_rule(
    rule: Rule,
    matches: Sequence[Mapping[CaptureValues, str]],
    scales: Sequence[Mapping[CaptureValues, str]],
    leaves: SourceLeaves,
) -> tuple[list[tuple[str, ForeignArray]], list[str]]:
    """The target leaves of a rule, by path, and texts that describe the problems."""
    targets: list[tuple[str, ForeignArray]] = []
    problems: list[str] = []
    kept = [name for name in captures(rule.source) if name in captures(rule.target)]
    stacked = tuple(name for name in captures(rule.source) if name not in kept)
    sources: dict[tuple[int, ...], list[dict[tuple[int, ...], str]]] = {}
    scale_of = {
        path: scaled.get(values)
        for paths, scaled in zip(matches, scales, strict=False)
        for values, path in paths.items()
    }
    for number, paths in enumerate(matches):
        for values, path in paths.items():
            of = dict(values)
            group = sources.setdefault(tuple(of[name] for name in kept), [{} for _ in matches])
            group[number][tuple(of[name] for name in stacked)] = path
    for number, name in enumerate(kept):
        problems += _number_problems(name, {values[number] for values in sources}, rule)
    for values, group in sources.items():
        numbers = dict(zip(kept, values, strict=True))
        absent = [name for name, paths in zip(paths_in(rule.source), group, strict=True) if not paths]
        if absent:
            problems.append(f"{fill_captures(absent[0], numbers)} is missing")
            continue
        for number, name in enumerate(stacked):
            problems += _number_problems(name, {index[number] for paths in group for index in paths}, rule)
        stacks: list[_SourceStack] = []
        for paths in group:
            try:
                stacks.append(_stack_sources(rule, stacked, paths, scale_of, leaves))
                if len(stacks) == len(group):
                    if isinstance(rule.axis, str) and len(stacks) > 1:
                        axes, stacks = (*stacked, rule.axis), [_merged(stacks)]
                    else:
                        axes = stacked
                    targets.extend(_targets_of_group(rule, axes, numbers, stacks))
            except MisfitError as misfit:
                problems.append(str(misfit))
    return targets, problems


def _number_problems(name: str, values: Set[int], rule: Rule) -> Iterator[str]:
    """A problem if the values of a number in the paths are not exactly the given ones, or 0 to its given size - 1."""
    expected = rule.numbers.get(name) or range(rule.sizes.get(name, 0))
    if not expected:
        return
    gaps = [*itertools.islice((number for number in expected if number not in values), 6)]
    if invalid := [*gaps, *sorted(number for number in values if number not in expected)]:
        shown = ", ".join(map(str, invalid[:5])) + (", …" if len(invalid) > 5 else "")
        whole = range(expected[0], expected[-1] + 1)
        is_whole = expected == whole or (len(expected) == len(whole) and [*expected] == [*whole])
        ends = f"{expected[0]} to {expected[-1]}" if is_whole else expected
        yield f"{{{name}}} must be {ends}; {'missing' if gaps else 'found'}: {shown}"


class _SourceStack(NamedTuple):
    """Source leaves of one shape and dtype."""

    counts: tuple[int, ...]
    blocks: Mapping[tuple[int, ...], ArrayData]
    first: ForeignArray
    name: str


def _stack_sources(
    rule: Rule,
    stacked: Sequence[str],
    paths: Mapping[tuple[int, ...], str],
    scale_of: Mapping[str, str | None],
    leaves: SourceLeaves,
) -> _SourceStack:
    """The leaves to stack. Raises MisfitError."""
    chosen = [rule.numbers.get(name) for name in stacked]
    paths = {
        tuple(own.index(value) if own else value for own, value in zip(chosen, values, strict=True)): path
        for values, path in paths.items()
    }
    counts = tuple(max(index[number] for index in paths) + 1 for number in range(len(stacked)))
    if missing := math.prod(counts) - len(paths):
        # The first gap is at most the count of paths. The limit avoids counting up to a huge number in a path.
        sides = [range(min(count, len(paths) + 1)) for count in counts]
        gap = next(index for index in itertools.product(*sides) if index not in paths)
        shown = ", ".join(f"{name} = {value}" for name, value in zip(stacked, gap, strict=True))
        raise MisfitError(f"{missing} of {math.prod(counts)} leaves to stack are missing, the first with {shown}")
    blocks: dict[tuple[int, ...], ArrayData] = {}
    first = None
    for index, path in paths.items():
        array = leaves.array(path, or_key=rule.takes_keys)
        if rule.copies:
            array = _compared(array, path, paths_in(rule.copies), leaves)
        if path in scale_of:
            scaled = scale_of[path]
            array = dequantize(
                path, array, None if scaled is None else leaves.array(scaled), rule.block, is_packed=bool(rule.packed)
            )
        first = first or array
        if (array.mesh, array.spec) != (first.mesh, first.spec):
            first = replace(first, mesh=None, spec=())
        if _shown(array) != _shown(first):
            raise MisfitError(f"{show_path(path)} is {_shown(array)}, and others are {_shown(first)}")
        blocks[index] = array.data
    assert first is not None
    return _SourceStack(counts, blocks, first, show_path(next(iter(paths.values()))))


def _merged(stacks: Sequence[_SourceStack]) -> _SourceStack:
    """Stacks of equal leaves as one, with an additional last axis. Raises MisfitError."""
    first = stacks[0]
    for stack in stacks:
        if (stack.counts, _shown(stack.first)) != (first.counts, _shown(first.first)):
            raise MisfitError(f"{stack.name} is {_shown(stack.first)}, and {first.name} is {_shown(first.first)}")
    blocks = {(*index, number): data for number, stack in enumerate(stacks) for index, data in stack.blocks.items()}
    return first._replace(counts=(*first.counts, len(stacks)), blocks=blocks)


def _shown(array: ForeignArray) -> str:
    return f"{f'key<{array.impl}>' if array.kind == 'key' else array.dtype}{list(array.shape[: rank_of(array)])}"


def rank_of(array: ForeignArray) -> int:
    """The number of its dimensions, without the last one of the raw data of PRNG keys."""
    return len(array.shape) - (array.kind == "key")


def _compared(array: ForeignArray, path: str, names: Sequence[str], leaves: SourceLeaves) -> ForeignArray:
    """A leaf that is compared with its copies when it is read. Raises MisfitError if they cannot be copies."""
    copies: dict[str, ArrayData] = {}
    for name in names:
        if name not in leaves.paths:
            raise MisfitError(f"{show_path(name)} is missing")
        copy = leaves.array(name)
        if (copy.shape, copy.dtype) != (array.shape, array.dtype):
            raise MisfitError(
                f"{show_path(name)} is {_shown(copy)}, and {show_path(path)} is {_shown(array)}, so it is not a copy"
            )
        copies[name] = copy.data
    return replace(array, data=ComparedData(path, {path: array.data, **copies}))


def _targets_of_group(
    rule: Rule, stacked: tuple[str, ...], numbers: Mapping[str, int], stacks: Sequence[_SourceStack]
) -> Iterator[tuple[str, ForeignArray]]:
    """The target leaves that are built from one set of source leaves. Raises MisfitError."""
    names = paths_in(rule.target)
    own_axis = rule.axis if isinstance(rule.axis, str) else None
    for position, (name, cut) in enumerate(zip(names, _cuts(rule, len(names), stacks[0]), strict=True)):
        pieces = [_piece(rule, stacked, stack, cut) for stack in stacks]
        shapes = [piece.shape for piece in pieces]
        if len(pieces) > 1:
            assert isinstance(rule.axis, int)  # otherwise they are one stack
            other_sides = {(*shape[: rule.axis], -1, *shape[rule.axis + 1 :]) for shape in shapes}
            shown = " and ".join(str(list(shape)) for shape in shapes)
            if len(other_sides) > 1 or len({piece.dtype for piece in pieces}) > 1 or rule.axis >= len(shapes[0]):
                raise MisfitError(f"{shown} cannot be joined along dimension {rule.axis}")
            if rule.parts is not None and [*rule.parts] != [shape[rule.axis] for shape in shapes]:
                raise MisfitError(f"{shown} are not the parts {[*rule.parts]}")
        unstacked = [axis for axis in captures(name) if axis not in numbers]
        for values in itertools.product(*(range(pieces[0].sizes[axis]) for axis in unstacked)):
            fixed = dict(zip(unstacked, values, strict=True))
            numbered = {axis: rule.numbers[axis][at] if axis in rule.numbers else at for axis, at in fixed.items()}
            if own_axis and len(names) > 1:
                fixed[own_axis] = position
            placed: list[tuple[Box, MappedSource]] = []
            shape, end = list(shapes[0]), 0
            for piece in pieces:
                box = list(whole_box(piece.shape))
                if len(pieces) > 1 and isinstance(rule.axis, int):
                    box[rule.axis] = end, (end := end + piece.shape[rule.axis])
                    shape[rule.axis] = end
                placed.append((tuple(box), replace(piece, fixed=fixed)))
            layout = pieces[0].layout.target
            shape = [rule.resized.get("".join(dim), side) for dim, side in zip(layout, shape, strict=True)]
            first = stacks[0].first
            mesh = first.mesh if all(stack.first.mesh == first.mesh for stack in stacks) else None
            array = ForeignArray(
                rule.dtype or first.dtype,
                tuple(shape),
                MappedData(placed, is_padded=bool(rule.resized)),
                "numpy" if first.kind == "numpy_scalar" and shape else first.kind,
                first.impl,
                chunk=_unit(pieces[0], first.chunk) if first.chunk else None,
                mesh=mesh,
                spec=_carry_over_spec(mesh, first.spec, pieces[0], shape) if mesh else (),
            )
            yield fill_captures(name, {**numbers, **numbered}), array


def _unit(piece: MappedSource, chunk: Sequence[int]) -> tuple[int, ...]:
    """The box of a target that corresponds to a chunk of its source, so that reads cut there read no source twice."""
    sizes = piece.sizes
    taken = dict.fromkeys(piece.stacked, 1)
    for dim, side in zip(piece.layout.source, chunk, strict=True):
        for number, axis in enumerate(dim):
            inner = max(1, math.prod(sizes[later] for later in dim[number + 1 :]))  # an axis may be empty
            taken[axis] = min(sizes[axis], max(1, side // inner))
            side = min(side, inner)
    unit: list[int] = []
    for dim in piece.layout.target:
        outer = next((number for number, axis in enumerate(dim) if taken[axis] > 1), len(dim))
        n_taken = math.prod([taken[axis] for axis in dim[outer : outer + 1]] + [sizes[a] for a in dim[outer + 1 :]])
        unit.append(max(1, n_taken))
    return tuple(unit)


def _carry_over_spec(mesh: MeshRecord, spec: Spec, piece: MappedSource, shape: Sequence[int]) -> Spec:
    """The spec of a target of this shape: a mesh axis stays with the outermost axis of the dimension that it splits.

    If the target lacks that axis, or its size is not divisible by the mesh axis, the target is not split.
    """
    of_axis = {dim[0]: entry for dim, entry in zip(piece.layout.source, spec, strict=False) if dim}
    entries: list[tuple[str, ...]] = []
    for dim, side in zip(piece.layout.target, shape, strict=True):
        entry = of_axis.get(dim[0], ()) if dim else ()
        count = math.prod(mesh.axes[name] for name in entry)
        entries.append(() if side % count or (dim and piece.sizes[dim[0]] % count) else entry)
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def _piece(rule: Rule, stacked: tuple[str, ...], stack: _SourceStack, cut: Interval | None) -> MappedSource:
    """A stack, or its part along `rule.axis`, in the layout of the target. Raises MisfitError."""
    shape, start = list(stack.first.shape), [0] * len(stack.first.shape)
    if cut is not None and isinstance(rule.axis, int):
        start[rule.axis], shape[rule.axis] = cut[0], cut[1] - cut[0]
    axes = tuple((f"_{number}",) for number in range(len(shape)))
    layout = AxisLayout.parse(rule.layout) if rule.layout else AxisLayout(axes, axes)
    if rule.layout and stack.first.kind == "key":
        layout = AxisLayout((*layout.source, axes[-1]), (*layout.target, axes[-1]))
    given = {**rule.sizes, **{name: len(values) for name, values in rule.numbers.items()}}
    if isinstance(rule.axis, str):
        given[rule.axis] = max(len(paths_in(rule.source)), len(paths_in(rule.target)))
    sizes = solve(stack.name, layout.source, shape, {**given, **dict(zip(stacked, stack.counts, strict=True))})
    first = stack.first
    unit = math.prod(first.chunk or ()) * DTYPES[first.dtype].itemsize
    if (rule.scale, rule.offset) != (1, 0):
        if DTYPES[first.dtype].kind == "c":
            raise MisfitError(f"{stack.name} is complex, and scale and offset are for real numbers")
        if first.dtype.startswith(("int", "uint", "bool")) and rule.dtype is None:
            raise MisfitError(
                f"{stack.name} is {first.dtype}, and scale and offset produce floats: give the rule a dtype"
            )
    return MappedSource(layout, sizes, stacked, stack.blocks, first.dtype, unit, tuple(start), {}, rule)


def _cuts(rule: Rule, count: int, stack: _SourceStack) -> Sequence[Interval | None]:
    """The part of the source along `rule.axis` for each target. Raises MisfitError."""
    if count == 1 or isinstance(rule.axis, str):
        return [None] * count
    shape = stack.first.shape
    if rule.axis >= len(shape):
        raise MisfitError(f"{stack.name} has no dimension {rule.axis}")
    side, parts = shape[rule.axis], rule.parts
    if parts is None and side % count:
        raise MisfitError(f"{stack.name} has a dimension of {side}, which is not {count} equal parts: give Rule.parts")
    parts = parts or (side // count,) * count
    if len(parts) != count or sum(parts) != side:
        raise MisfitError(
            f"parts {list(parts)} do not add up to the dimension of {side} of {stack.name} for {count} leaves"
        )
    return list(itertools.pairwise(itertools.accumulate(parts, initial=0)))
