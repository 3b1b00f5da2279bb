"""Compares two checkpoints, independently of the meshes and layouts from which they were saved."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxckpt._inspect.executors import UNIT_BYTES, OpenedElsewhere, Remembered, grouped, require_executor, spread
from jaxckpt._job.call import Call
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.grid import Box, cut_to_size, volume, whole_box
from jaxckpt._model.pieces import Array
from jaxckpt._model.records import SavedLeaf
from jaxckpt._model.select import Select, Selector, parse_select
from jaxckpt._model.tree import Structure, empty_positions, prune
from jaxckpt._options import Options, options_or_default
from jaxckpt._pipeline.lanes import run_alone
from jaxckpt._pipeline.progress import Report, display_progress
from jaxckpt._restore.read_loop import read_box
from jaxckpt._restore.resolve import LeafForm
from jaxckpt._restore.restore import fetch
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._sources.open_source import Location, source_at
from jaxckpt._sources.source import Source
from jaxckpt.errors import show_count, show_lines, show_path

_BATCH_ELEMENTS = 1 << 18
"""Elements that are compared in one call."""


@dataclass(frozen=True, slots=True)
class LeafDelta:
    """How one leaf differs between two checkpoints, a and b."""

    path: str
    """Path of the leaf."""

    a: str
    """Kind, dtype and shape in a, such as "jax float32[8, 4]". For a PRNG key, its raw data: "threefry2x32 uint32[2]".
    For a Python value, its kind, such as "int". Empty if a does not have the leaf."""

    b: str
    """Kind, dtype and shape in b, in the same form."""

    same_form: bool = True
    """Whether dtype and shape are the same. A Python number has those of its NumPy scalar, such as int64[]."""

    size: int = 0
    """Elements that were compared. 0 if the shapes differ, if only one side is text, or if one side is missing."""

    differing: int = 0
    """Elements that differ: in any bit if the dtypes are equal, otherwise in value."""

    max_abs: float = 0.0
    """The largest |a − b|, in float64. Infinite if only one of the two is NaN, if they are infinities of opposite sign,
    or if the difference exceeds float64. 0 for text."""

    max_rel: float = 0.0
    """The largest |a − b| / max(|a|, |b|), between 0 and 2; infinite as above. 0 for text."""

    @property
    def identical(self) -> bool:
        """Whether dtype, shape and every bit are the same. The kinds may differ: an array of JAX or of NumPy, a NumPy
        scalar, or a Python number."""
        return self.same_form and not self.differing

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds in a and b, such as ("jax", "numpy"); "" if one does not have the leaf."""
        return self.a.partition(" ")[0], self.b.partition(" ")[0]

    def __str__(self) -> str:
        if not self.a or not self.b:
            return f"{show_path(self.path)}: only in {'a' if self.a else 'b'} ({self.a or self.b})"
        contents = self.a if self.a == self.b else f"{self.a} → {self.b}"
        if not self.differing:
            return f"{show_path(self.path)}: {contents}" + (", equal values" if self.size else "")
        share = f"{self.differing:,} of {self.size:,} elements differ"
        if not self.max_abs:  # texts, or different bits of equal numbers, such as 0.0 and -0.0
            return f"{show_path(self.path)}: {contents}, {share}"
        largest = f"largest difference {self.max_abs:.6g} (relative {self.max_rel:.3g})"
        return f"{show_path(self.path)}: {contents}, {share}, {largest}"


@dataclass(frozen=True, slots=True)
class Delta:
    """The result of `diff`."""

    path_a: str
    """The path or URL of checkpoint a."""

    path_b: str
    """The path or URL of checkpoint b."""

    leaves: tuple[LeafDelta, ...]
    """The compared leaves of a and b, sorted by path: all of them, or those that `select` chooses."""

    same_structure: bool
    """Whether the containers of these leaves have the same types, keys and order. If only the leaves matter, test
    `not delta.differing` instead of `delta.identical`."""

    @property
    def differing(self) -> tuple[LeafDelta, ...]:
        """The leaves that are not identical."""
        return tuple(leaf for leaf in self.leaves if not leaf.identical)

    @property
    def other_kinds(self) -> tuple[LeafDelta, ...]:
        """The identical leaves whose kinds differ, as after an export: formats of other libraries have one kind."""
        return tuple(leaf for leaf in self.leaves if leaf.identical and leaf.a != leaf.b)

    @property
    def identical(self) -> bool:
        """Whether structure, dtypes, shapes and every bit of every leaf are the same. The kinds may differ."""
        return self.same_structure and not self.differing

    def __bool__(self) -> bool:
        raise TypeError("the truth value of a Delta is ambiguous: use .identical or .differing")

    def __repr__(self) -> str:
        return f"<Delta of {self.path_a!r} and {self.path_b!r}: {summarize(self)}>"

    def __str__(self) -> str:
        head = f"a = {self.path_a}\nb = {self.path_b}\n{summarize(self)}"
        return f"{head}\n{show_lines(map(str, self.differing))}".rstrip()


def summarize(delta: Delta) -> str:
    """Such as "2 of 31 leaves differ; the containers differ too", and which kinds of equal leaves differ."""
    count, leaves = len(delta.differing), show_count(len(delta.leaves), "leaf")
    if delta.identical:
        text = f"identical: {leaves}, bit by bit"
    elif not count:
        text = f"{leaves} equal, bit by bit; the containers differ"
    else:
        structure = "" if delta.same_structure else "; the containers differ too"
        text = f"{count:,} of {leaves} {'differs' if count == 1 else 'differ'}{structure}"
    kinds = collections.Counter(leaf.kinds for leaf in delta.other_kinds)
    named = ", ".join(f"{a} → {b} ({show_count(n, 'leaf')})" for (a, b), n in kinds.most_common())
    return f"{text}; other kinds: {named}" if kinds else text


@explain_keywords
def diff(
    path_a: Location,
    path_b: Location,
    *,
    select: Select | None = None,
    rename: Renaming | None = None,
    executor: Executor | None = None,
    options: Options | None = None,
) -> Delta:
    """Compare two checkpoints leaf by leaf: structure, dtypes, shapes and values.

    Meshes, specs, weak types, chunks and objects are not compared. Leaves that differ only in kind, such as an array of
    JAX and one of NumPy, are identical, and `other_kinds` lists them.

    Any single process may call this; no JAX backend is started. Both checkpoints are read in boxes, within
    `options.host_bytes`.

    Args:
        path_a: A path or URL that `save` wrote, or another checkpoint that `restore` accepts.
        path_b: The other checkpoint.
        select: Compare only these leaves, as for `restore`: those of a by their paths after `rename`.
        rename: Renames the leaves of a, as for `restore`.
        executor: As for `verify`. `rename` must pickle: a mapping, or a function of a module.
        options: See `Options`.

    Returns:
        Whether the structures agree, and for each leaf the kinds, dtypes and shapes, how many elements differ, and by
        how much.

    Raises:
        NotACheckpointError, CorruptError, StorageError: As `restore`, for either checkpoint.
        TreeError: A pattern of `select` matches nothing in either checkpoint, or a path of `rename` matches nothing.
        MismatchError: The `Rules` in `rename` do not fit a.
        InputError: Another argument is invalid.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> for name, last in (("a", 3.0), ("b", 3.5)):
        ...     tree = {"w": np.array([1.0, 2.0, last])}
        ...     info = jaxckpt.save(f"/tmp/jaxckpt-doc/diff-{name}", tree, overwrite=True)
        >>> delta = jaxckpt.diff("/tmp/jaxckpt-doc/diff-a", "/tmp/jaxckpt-doc/diff-b")
        >>> delta.identical, delta.differing[0].differing, delta.differing[0].max_abs
        (False, 1, 0.5)
    """
    options = options_or_default(options)
    require_executor(executor)
    # Each box needs a buffer on both sides. The other half of the memory is for reading.
    options = replace(options, host_bytes=max(1, options.host_bytes // 4))
    opened_a, opened_b = source_at(path_a, options), source_at(path_b, options)
    a, b = _Side(renamed_source(opened_a, rename), options), _Side(opened_b, options)
    all_leaves = {**a.numbers, **b.numbers}
    where = "either checkpoint" if rename is None else "either checkpoint after rename="
    selector = None if select is None else parse_select(select)
    chosen = set(all_leaves)
    if selector is not None:
        empty_paths = [path for side in (a, b) for path, _ in empty_positions(side.source.manifest.tree)]
        chosen = set(itertools.compress(all_leaves, selector.choose(all_leaves, where, empty_paths=empty_paths)))
    deltas = {
        path: LeafDelta(path, a.describe(path), b.describe(path), a.form(path) == b.form(path))
        for path in sorted(chosen)
    }
    in_both = {path: (a.leaf(path), b.leaf(path)) for path in deltas if path in a.numbers and path in b.numbers}
    pairs = {
        path: pair for path, pair in in_both.items() if len({(_is_text(leaf), leaf.stored_shape) for leaf in pair}) == 1
    }
    total = sum(leaf.nbytes for pair in pairs.values() for leaf in pair)
    most = min(options.host_bytes // 4, UNIT_BYTES if executor is not None else 4 * UNIT_BYTES)
    if executor is None:
        compare = functools.partial(_compare, lambda: a.source, lambda: b.source, options)
    else:
        elsewhere = [
            OpenedElsewhere.of(opened_a, path_a, options, rename),
            OpenedElsewhere.of(opened_b, path_b, options),
        ]
        compare = functools.partial(
            _compare, *(Remembered.of(side.open).get for side in elsewhere), elsewhere[0].options
        )
    with display_progress("diff", total, options.progress) as advance:
        compared = spread(executor, compare, _units(pairs, most), options.timeout_seconds)
        run_alone(functools.partial(_add_compared, compared, deltas, advance), options.timeout_seconds)
    return Delta(a.source.url, b.source.url, tuple(deltas.values()), a.structure(selector) == b.structure(selector))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints."""

    source: Source
    options: Options

    @property
    def numbers(self) -> Mapping[str, int]:
        """The number of each leaf, by path."""
        return self.source.manifest.numbers

    def leaf(self, path: str) -> SavedLeaf:
        return SavedLeaf(self.source.manifest, self.source.manifest.leaves[self.numbers[path]])

    def structure(self, select: Selector | None) -> Structure:
        """The containers of the selected leaves, and the selected empty containers."""
        tree = self.source.manifest.tree
        if select is None:
            return tree
        kept = [number for path, number in self.numbers.items() if select(path)]
        return prune(tree, {old: new for new, old in enumerate(kept)}, select)

    def describe(self, path: str) -> str:
        """Kind, dtype and shape; empty if it lacks the leaf."""
        if path not in self.numbers:
            return ""
        leaf = self.leaf(path)
        if not leaf.is_array:
            return leaf.kind
        return f"{leaf.record.impl or leaf.kind} {leaf.stack.dtype}{list(leaf.stored_shape)}"

    def form(self, path: str) -> Any:
        """What must be equal for a leaf to be identical, in addition to its elements."""
        leaf = self.leaf(path) if path in self.numbers else None
        if leaf is None or _is_text(leaf):
            return leaf and leaf.kind
        return leaf.stored_dtype.name, leaf.stored_shape

    def box(self, path: str, box: Box) -> Array:
        return read_box(self.source, self.numbers[path], box, self.options)

    def whole(self, paths: Sequence[str]) -> list[Array]:
        """Small leaves, which may be values in the manifest."""
        leaves = {self.numbers[path]: self.leaf(path) for path in paths}
        stored = dict.fromkeys((number for number, leaf in leaves.items() if leaf.is_array), LeafForm("numpy"))
        options = replace(self.options, progress=None)
        rendezvous = Call.alone("diff", self.source.url, options).rendezvous("reading")
        values = run_alone(lambda: fetch(self.source, stored, options, rendezvous), options.timeout_seconds)
        return [values[number] if leaf.is_array else _as_array(leaf.value) for number, leaf in leaves.items()]


_Cut = tuple[str, Box | None]
"""The path of a leaf, and a box of it; None for the whole leaf."""


def _units(pairs: Mapping[str, tuple[SavedLeaf, SavedLeaf]], most: int) -> Iterator[tuple[_Cut, ...]]:
    """What is compared at a time: whole leaves, and boxes of large ones, about `most` bytes."""

    def cuts() -> Iterator[tuple[_Cut, int]]:
        for path, (leaf, other) in pairs.items():
            size = max(leaf.nbytes, other.nbytes)
            if not (leaf.is_array and other.is_array) or size <= most:
                yield (path, None), size
                continue
            stack, itemsize = leaf.stack, size // math.prod(leaf.stored_shape)
            grids = (stack.object_sides[1:], stack.chunk_sides[1:])
            for box in cut_to_size(whole_box(leaf.stored_shape), grids, max(1, most // itemsize)):
                yield (path, box), volume(box) * itemsize

    return grouped(cuts(), most)


def _compare(
    a: Callable[[], Source], b: Callable[[], Source], options: Options, unit: tuple[_Cut, ...]
) -> tuple[list[LeafDelta], int]:
    """The differences of some leaves and boxes, and the bytes that were compared. In a lane, or in a worker."""
    sides = _Side(a(), options), _Side(b(), options)
    deltas, n_bytes = {path: LeafDelta(path, "", "") for path, _ in unit}, 0
    whole = [path for path, box in unit if box is None]
    arrays = itertools.chain(
        zip(whole, *(side.whole(whole) for side in sides), strict=True),
        ((path, *(side.box(path, box) for side in sides)) for path, box in unit if box is not None),
    )
    for path, *both in arrays:
        deltas[path] = _add_differences(deltas[path], *both)
        n_bytes += sum(array.nbytes for side, array in zip(sides, both, strict=True) if side.leaf(path).is_array)
    return [*deltas.values()], n_bytes


def _add_compared(
    compared: Generator[tuple[tuple[_Cut, ...], tuple[list[LeafDelta], int]]],
    deltas: dict[str, LeafDelta],
    advance: Report,
) -> None:
    """Add what units have shown to the leaves' differences. In a lane."""
    with contextlib.closing(compared):
        for _, (some, n_bytes) in compared:
            for delta in some:
                leaf = deltas[delta.path]
                deltas[delta.path] = replace(
                    leaf,
                    size=leaf.size + delta.size,
                    differing=leaf.differing + delta.differing,
                    max_abs=max(leaf.max_abs, delta.max_abs),
                    max_rel=max(leaf.max_rel, delta.max_rel),
                )
            advance(n_bytes)


def _is_text(leaf: SavedLeaf) -> bool:
    """Whether it is a str or bytes in the manifest."""
    return not leaf.is_array and leaf.kind in ("str", "bytes")


def _as_array(value: Any) -> Array:
    # NumPy's text dtypes drop trailing zeros.
    return np.asarray(value, object if isinstance(value, str | bytes) else None)


def _add_differences(leaf: LeafDelta, a: Array, b: Array) -> LeafDelta:
    """A leaf's differences, including those of one more box."""
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.size, _BATCH_ELEMENTS):  # 100 bytes each, in float64 copies and temporaries
        leaf = _add_batch(leaf, a[start : start + _BATCH_ELEMENTS], b[start : start + _BATCH_ELEMENTS])
    return leaf


def _add_batch(leaf: LeafDelta, a: Array, b: Array) -> LeafDelta:
    """As `_add_differences`, for at most `_BATCH_ELEMENTS` elements."""
    size = leaf.size + a.size
    if a.dtype == b.dtype and _is_number(a):
        differ = (_bits(a) != _bits(b)).reshape(*a.shape, -1).any(axis=-1)
    else:
        differ = ~_equal(a, b)
    count = int(np.count_nonzero(differ))
    if count and "O" in (a.dtype.kind, b.dtype.kind) and all(isinstance(n, int | np.integer) for n in (a[0], b[0])):
        x, y = int(a[0]), int(b[0])  # at least one is a Python int of more than 64 bits
        distance, scale = np.array([_float(abs(x - y))]), np.array([_float(max(abs(x), abs(y)))])
    elif not count or not (_is_number(a) and _is_number(b)):
        return replace(leaf, size=size, differing=leaf.differing + count)
    else:
        distance, scale = _distance(a[differ], b[differ])
    relative = np.divide(
        distance, scale, out=np.where(np.isinf(distance), np.inf, 0.0), where=(scale > 0) & np.isfinite(scale)
    )
    return replace(
        leaf,
        size=size,
        differing=leaf.differing + count,
        max_abs=max(leaf.max_abs, float(distance.max())),
        max_rel=max(leaf.max_rel, float(relative.max())),
    )


def _bits(array: Array) -> Array:
    """Elements as unsigned integers: one per element, or two in an additional last dimension."""
    itemsize = min(array.dtype.itemsize, 8)
    return np.ascontiguousarray(array).view(f"u{itemsize}")


def _is_number(array: Array) -> bool:
    return array.dtype.kind not in "OUS"


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _equal(a: Array, b: Array) -> Array:
    exact = all(array.dtype.kind in "biu" for array in (a, b))  # 64-bit integers may be equal as float64
    if exact or not (_is_number(a) and _is_number(b)):
        return np.asarray(a == b)
    a, b = _wide(a), _wide(b)
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _distance(a: Array, b: Array) -> tuple[Array, Array]:
    """(|a − b|, max(|a|, |b|)) of each element, in float64."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":  # exact, because two 64-bit integers may round to one float64
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return gap.astype(np.float64), np.maximum(np.abs(_wide(a)), np.abs(_wide(b)))
    a, b = _wide(a), _wide(b)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
    distance = np.where(_equal(a, b), 0.0, np.where(np.isnan(distance), np.inf, distance))
    return distance, np.maximum(np.abs(a), np.abs(b))


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
