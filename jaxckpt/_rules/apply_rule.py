"""Applies a rule to the leaves of a source: returns the target's leaves, or the problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Spec, whole_box
from jaxckpt._model.leaves import SavedLeaf
from jaxckpt._model.records import MeshRecord
from jaxckpt._rules.axis_layouts import AxisLayout, Interval, solve
from jaxckpt._rules.mapped_data import ComparedData, MappedData, MappedSource
from jaxckpt._rules.rule import CaptureValues, Rule, captures, fill_captures, paths_in
from jaxckpt._rules.scales import dequantize
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, StackRow, as_foreign
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_path

# Leaves of the source -------------------------------------------------------------------------------------


class SourceLeaves:
    """The arrays of a source, by path."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._readers: dict[int, Any] = {}
        self._numbers = source.manifest.numbers
        self.paths = self._numbers.keys()

    def array(self, path: str) -> ForeignArray | str:
        """A leaf, or the reason why a rule cannot use it."""
        manifest = self._source.manifest
        record = manifest.leaves[self._numbers[path]]
        if record.stack is None or record.row is None or record.kind in ("key", "str", "bytes"):
            return f"{show_path(path)} is a {record.kind}, not a numeric array"
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
) -> Iterator[tuple[str, ForeignArray] | str]:
    """The target leaves of a rule, or texts that describe the problems."""
    kept = [name for name in captures(rule.source) if name in captures(rule.target)]
    stacked = tuple(name for name in captures(rule.source) if name not in kept)
    sources: dict[tuple[int, ...], list[dict[tuple[int, ...], str]]] = {}
    scale_of = {
        path: scaled.get(values)
        for found, scaled in zip(matches, scales, strict=False)
        for values, path in found.items()
    }
    for number, found in enumerate(matches):
        for values, path in found.items():
            of = dict(values)
            group = sources.setdefault(tuple(of[name] for name in kept), [{} for _ in matches])
            group[number][tuple(of[name] for name in stacked)] = path
    for number, name in enumerate(kept):
        yield from _number_problems(name, {values[number] for values in sources}, rule)
    for values, group in sources.items():
        numbers = dict(zip(kept, values, strict=True))
        absent = [name for name, paths in zip(paths_in(rule.source), group, strict=True) if not paths]
        if absent:
            yield f"{fill_captures(absent[0], numbers)} is missing"
            continue
        for number, name in enumerate(stacked):
            yield from _number_problems(name, {index[number] for paths in group for index in paths}, rule)
        stacks = [_stack_sources(rule, stacked, paths, scale_of, leaves) for paths in group]
        wrong = [stack for stack in stacks if isinstance(stack, str)]
        if wrong:
            yield from wrong
            continue
        yield from _targets_of_group(rule, stacked, numbers, [stack for stack in stacks if not isinstance(stack, str)])


def _number_problems(name: str, values: Set[int], rule: Rule) -> Iterator[str]:
    """A problem if the values of a number in the paths are not exactly 0 to its given size - 1."""
    count = rule.sizes.get(name)
    if count is None:
        return
    gaps = itertools.islice((number for number in range(count) if number not in values), 6)
    if odd := [*gaps, *sorted(number for number in values if number >= count)]:
        shown = ", ".join(map(str, odd[:5])) + (", …" if len(odd) > 5 else "")
        yield f"{{{name}}} must be 0 to {count - 1}; {'missing' if odd[0] < count else 'found'}: {shown}"


@dataclass(frozen=True, slots=True)
class _SourceStack:
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
) -> _SourceStack | str:
    """The leaves to stack, or the problem."""
    counts = tuple(max(index[number] for index in paths) + 1 for number in range(len(stacked)))
    if missing := math.prod(counts) - len(paths):
        # The first gap is at most the count of paths. The limit avoids counting up to a huge number in a path.
        sides = [range(min(count, len(paths) + 1)) for count in counts]
        gap = next(index for index in itertools.product(*sides) if index not in paths)
        shown = ", ".join(f"{name} = {value}" for name, value in zip(stacked, gap, strict=True))
        return f"{missing} of {math.prod(counts)} leaves to stack are missing, the first with {shown}"
    blocks: dict[tuple[int, ...], ArrayData] = {}
    first = None
    for index, path in paths.items():
        array = leaves.array(path)
        if rule.copies and not isinstance(array, str):
            array = _compared(array, path, paths_in(rule.copies), leaves)
        if path in scale_of and not isinstance(array, str):
            scaled = scale_of[path]
            scales = None if scaled is None else leaves.array(scaled)
            array = scales if isinstance(scales, str) else dequantize(path, array, scales, rule.block)
        if isinstance(array, str):
            return array
        first = first or array
        if (array.mesh, array.spec) != (first.mesh, first.spec):
            first = replace(first, mesh=None, spec=())
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            wanted = f"{first.dtype}{list(first.shape)}"
            return f"{show_path(path)} is {array.dtype}{list(array.shape)}, and others are {wanted}"
        blocks[index] = array.data
    assert first is not None
    return _SourceStack(counts, blocks, first, show_path(next(iter(paths.values()))))


def _compared(array: ForeignArray, path: str, copies: Sequence[str], leaves: SourceLeaves) -> ForeignArray | str:
    """A leaf that is compared with its copies when it is read, or the reason why they are not copies."""
    found: dict[str, ArrayData] = {}
    for name in copies:
        copy = leaves.array(name) if name in leaves.paths else f"{show_path(name)} is missing"
        if isinstance(copy, str):
            return copy
        if (copy.shape, copy.dtype) != (array.shape, array.dtype):
            shown = f"{copy.dtype}{list(copy.shape)}, and {show_path(path)} is {array.dtype}{list(array.shape)}"
            return f"{show_path(name)} is {shown}, so it is not a copy"
        found[name] = copy.data
    return replace(array, data=ComparedData(path, array.data, found))


def _targets_of_group(
    rule: Rule, stacked: tuple[str, ...], numbers: Mapping[str, int], stacks: Sequence[_SourceStack]
) -> Iterator[tuple[str, ForeignArray] | str]:
    """The target leaves that are built from one set of source leaves."""
    names = paths_in(rule.target)
    cuts = _cuts(rule, len(names), stacks[0])
    if isinstance(cuts, str):
        yield cuts
        return
    for name, cut in zip(names, cuts, strict=True):
        pieces: list[MappedSource] = []
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
        unstacked = [axis for axis in captures(name) if axis not in numbers]
        for values in itertools.product(*(range(pieces[0].sizes[axis]) for axis in unstacked)):
            fixed = dict(zip(unstacked, values, strict=True))
            held: list[tuple[Box, MappedSource]] = []
            end = 0
            for piece in pieces:
                box = list(whole_box(piece.shape))
                if len(pieces) > 1:
                    box[rule.axis] = end, (end := end + piece.shape[rule.axis])
                held.append((tuple(box), replace(piece, fixed=fixed)))
            shape = list(shapes[0])
            if len(pieces) > 1:
                shape[rule.axis] = end
            layout = pieces[0].layout.target
            shape = [rule.resized.get("".join(dim), side) for dim, side in zip(layout, shape, strict=True)]
            first = stacks[0].first
            mesh = first.mesh if all(stack.first.mesh == first.mesh for stack in stacks) else None
            array = ForeignArray(
                rule.dtype or first.dtype,
                tuple(shape),
                MappedData(held, is_padded=bool(rule.resized)),
                "numpy" if first.kind == "numpy_scalar" and shape else first.kind,
                chunk=_unit(pieces[0], first.chunk) if first.chunk else None,
                mesh=mesh,
                spec=_carry_over_spec(mesh, first.spec, pieces[0], shape) if mesh else (),
            )
            yield fill_captures(name, {**numbers, **fixed}), array


def _unit(piece: MappedSource, chunk: Sequence[int]) -> tuple[int, ...]:
    """The box of a target that corresponds to a chunk of its source, so that reads cut there read no source twice."""
    sizes = piece.sizes
    taken = dict.fromkeys(piece.stacked, 1)
    for dim, side in zip(piece.layout.source, chunk, strict=True):
        for number, axis in enumerate(dim):
            inner = math.prod(sizes[later] for later in dim[number + 1 :])
            taken[axis] = min(sizes[axis], max(1, side // inner))
            side = min(side, inner)
    unit: list[int] = []
    for dim in piece.layout.target:
        outer = next((number for number, axis in enumerate(dim) if taken[axis] > 1), len(dim))
        unit.append(math.prod([taken[axis] for axis in dim[outer : outer + 1]] + [sizes[a] for a in dim[outer + 1 :]]))
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


def _piece(rule: Rule, stacked: tuple[str, ...], stack: _SourceStack, cut: Interval | None) -> MappedSource | str:
    """A stack, or its part along `rule.axis`, in the layout of the target; or the reason why it does not fit."""
    shape, start = list(stack.first.shape), [0] * len(stack.first.shape)
    if cut is not None:
        start[rule.axis], shape[rule.axis] = cut[0], cut[1] - cut[0]
    axes = tuple((f"_{number}",) for number in range(len(shape)))
    layout = AxisLayout.parse(rule.layout) if rule.layout else AxisLayout(axes, axes)
    sizes = solve(layout.source, shape, {**rule.sizes, **dict(zip(stacked, stack.counts, strict=True))})
    if isinstance(sizes, str):
        return f"{stack.name} {sizes}"
    first = stack.first
    unit = math.prod(first.chunk or ()) * DTYPES[first.dtype].itemsize
    if DTYPES[first.dtype].kind == "c" and (rule.scale, rule.offset) != (1, 0):
        return f"{stack.name} is complex, and scale and offset are for real numbers"
    if first.dtype.startswith(("int", "uint", "bool")) and rule.dtype is None and (rule.scale, rule.offset) != (1, 0):
        return f"{stack.name} is {first.dtype}, and scale and offset produce floats: give the rule a dtype"
    return MappedSource(layout, sizes, stacked, stack.blocks, first.dtype, unit, tuple(start), {}, rule.computed)


def _cuts(rule: Rule, count: int, stack: _SourceStack) -> list[Interval] | list[None] | str:
    """The part of the source along `rule.axis` for each target."""
    if count == 1:
        return [None]
    shape = stack.first.shape
    if rule.axis >= len(shape):
        return f"{stack.name} has no dimension {rule.axis}"
    side, parts = shape[rule.axis], rule.parts
    if parts is None and side % count:
        return f"{stack.name} has a dimension of {side}, which is not {count} equal parts: give Rule.parts"
    parts = parts or (side // count,) * count
    if len(parts) != count or sum(parts) != side:
        return f"parts {list(parts)} do not add up to the dimension of {side} of {stack.name} for {count} leaves"
    ends = list(itertools.accumulate(parts))
    return list(zip([0, *ends[:-1]], ends, strict=True))
