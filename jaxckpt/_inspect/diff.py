"""How far two checkpoints differ, whatever meshes and layouts they were saved from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxckpt._format.grid import Box, cut_down, volume, whole
from jaxckpt._format.records import Manifest
from jaxckpt._format.tree import DTYPES, Select, Structure, decode_value, prune, selector, show
from jaxckpt._restore.reading import read_box
from jaxckpt._restore.restore import fetch
from jaxckpt._restore.source import Location, Source, source_at
from jaxckpt._restore.target import Goal, Renaming, renamed_source
from jaxckpt._runtime.errors import counted, listing
from jaxckpt._runtime.options import Options, given
from jaxckpt._runtime.progress import reporting
from jaxckpt._storage.store import Array

_TOGETHER = 1 << 18
"""Elements that are compared at once."""


@dataclass(frozen=True, slots=True)
class LeafDelta:
    """How one leaf differs between two checkpoints, a and b."""

    path: str

    a: str
    """Kind, dtype and shape in a, such as "jax float32[8, 4]"; for a PRNG key "threefry2x32 uint32[2]", its raw data;
    for a value of Python's its kind, such as "int"; empty where a lacks it."""

    b: str
    """The same in b."""

    size: int = 0
    """Elements that were compared; 0 where the shapes differ, one is a value of Python's and the other an array, or one
    is missing."""

    differing: int = 0
    """Elements that differ: in any bit where the dtypes are equal, else in value."""

    max_abs: float = 0.0
    """The greatest |a − b|, in float64; inf where only one of two is NaN, or they are infinities of two signs, or it is
    beyond float64. 0 for texts."""

    max_rel: float = 0.0
    """The greatest |a − b| / max(|a|, |b|), between 0 and 2; inf as above. 0 for texts."""

    @property
    def identical(self) -> bool:
        """Whether kind, dtype, shape and every bit are the same."""
        return self.a == self.b and not self.differing

    def __str__(self) -> str:
        if not self.a or not self.b:
            return f"{show(self.path)}: only in {'a' if self.a else 'b'} ({self.a or self.b})"
        what = self.a if self.a == self.b else f"{self.a} → {self.b}"
        if not self.differing:
            return f"{show(self.path)}: {what}" + (", equal values" if self.size else "")
        share = f"{self.differing:,} of {self.size:,} elements differ"
        if not self.max_abs:  # texts, or bits that mean one number, such as 0.0 and -0.0
            return f"{show(self.path)}: {what}, {share}"
        return f"{show(self.path)}: {what}, {share}, by {self.max_abs:.6g} at most, relatively {self.max_rel:.3g}"


@dataclass(frozen=True, slots=True)
class Delta:
    """What `diff` found."""

    path_a: str
    """Where a is."""

    path_b: str
    """Where b is."""

    leaves: tuple[LeafDelta, ...]
    """Every leaf of either, in order of path."""

    same_structure: bool
    """Whether the containers of these leaves are the same: their types, keys and order."""

    @property
    def differing(self) -> tuple[LeafDelta, ...]:
        """The leaves that are not identical."""
        return tuple(leaf for leaf in self.leaves if not leaf.identical)

    @property
    def identical(self) -> bool:
        """Whether structure, kinds, dtypes, shapes and every bit of every leaf are the same."""
        return self.same_structure and not self.differing

    def __bool__(self) -> bool:
        raise TypeError("a Delta is neither true nor false: ask .identical or .differing")

    def __str__(self) -> str:
        head = f"a = {self.path_a}\nb = {self.path_b}\n"
        if self.identical:
            return f"{head}identical: {counted(len(self.leaves), 'leaf')}, bit by bit"
        structure = "" if self.same_structure else "\n  the containers differ"
        found = self.differing
        told = f"{head}{len(found)} of {counted(len(self.leaves), 'leaf')} differ{structure}"
        return f"{told}\n{listing(map(str, found))}".rstrip()


def diff(
    path_a: Location,
    path_b: Location,
    *,
    select: Select | None = None,
    rename: Renaming | None = None,
    options: Options | None = None,
) -> Delta:
    """Compare two checkpoints leaf by leaf: structure, kinds, dtypes, shapes and values.

    Meshes, specs, weak types, chunks and objects are not compared.

    Any process may call it alone; no JAX backend is started. Both are read in boxes, within `options.host_bytes`.

    Args:
        path_a: Where `save` wrote one, or another checkpoint that `restore` takes.
        path_b: The other.
        select: Only these leaves, as for `restore`, of either, by their paths after `rename`.
        rename: Of the leaves of a, as for `restore`.
        options: See `Options`; `manifest_sha256` is not used.

    Returns:
        Structure, and for each leaf kinds, dtypes and shapes, how many elements differ and how far.

    Raises:
        NotACheckpointError, CorruptError, StorageError: As `restore`, of either.
        TreeError: A pattern of `select` matches nothing in either.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> for name, last in (("a", 3.0), ("b", 3.5)):
        ...     tree = {"w": np.array([1.0, 2.0, last])}
        ...     info = jaxckpt.save(f"/tmp/jaxckpt-doc/diff-{name}", tree, overwrite=True)
        >>> delta = jaxckpt.diff("/tmp/jaxckpt-doc/diff-a", "/tmp/jaxckpt-doc/diff-b")
        >>> delta.identical, delta.differing[0].differing, delta.differing[0].max_abs
        (False, 1, 0.5)
    """
    options = given(options)
    # Two buffers of each box, and what reading takes besides.
    options = replace(options, host_bytes=max(1, options.host_bytes // 4))
    a, b = _Side.at(path_a, options, rename), _Side.at(path_b, options)
    either = a.numbers | b.numbers
    chosen = set(itertools.compress(either, selector(select).choose(either, "either checkpoint")))
    leaves = {path: LeafDelta(path, a.describe(path), b.describe(path)) for path in sorted(chosen)}
    both = [path for path in leaves if path in a.numbers and path in b.numbers]
    common = [path for path in both if a.shape(path) == b.shape(path)]
    total = sum(a.n_bytes(path) + b.n_bytes(path) for path in common)
    with reporting("diff", total, options.progress) as report:
        for path, part_a, part_b in _parts(a, b, common, options):
            leaves[path] = _with(leaves[path], part_a, part_b)
            if a.shape(path) is not None:
                report(part_a.nbytes + part_b.nbytes)
    return Delta(a.source.url, b.source.url, tuple(leaves.values()), a.structure(chosen) == b.structure(chosen))


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints."""

    source: Source
    manifest: Manifest
    numbers: dict[str, int]
    """Number of each leaf by its path."""

    options: Options

    @classmethod
    def at(cls, path: Location, options: Options, rename: Renaming | None = None) -> _Side:
        source = renamed_source(source_at(path, replace(options, manifest_sha256=None))[0], rename)
        return cls(source, source.manifest, source.manifest.numbers, options)

    def structure(self, chosen: set[str]) -> Structure:
        """The containers, as far as they hold the chosen leaves."""
        if chosen >= self.numbers.keys():
            return self.manifest.tree
        kept = [number for path, number in self.numbers.items() if path in chosen]
        return prune(self.manifest.tree, {old: new for new, old in enumerate(kept)})

    def describe(self, path: str) -> str:
        if path not in self.numbers:
            return ""
        record = self.manifest.leaves[self.numbers[path]]
        if record.stack is None:
            return record.kind
        return f"{record.impl or record.kind} {self.dtype(path)}{list(self.shape(path) or ())}"

    def shape(self, path: str) -> tuple[int, ...] | None:
        """Its shape; None for a value that lies in the manifest."""
        record = self.manifest.leaves[self.numbers[path]]
        return None if record.stack is None else self.manifest.leaf_shape(record)

    def dtype(self, path: str) -> str:
        return self.manifest.stacks[self.manifest.place(self.manifest.leaves[self.numbers[path]])[0]].dtype

    def n_bytes(self, path: str) -> int:
        shape = self.shape(path)
        return 0 if shape is None else math.prod(shape) * DTYPES[self.dtype(path)].itemsize

    def value(self, path: str) -> Array:
        """What lies in the manifest."""
        record = self.manifest.leaves[self.numbers[path]]
        value = decode_value(record.kind, record.value or "")
        # NumPy's own texts end where their trailing zeros begin.
        return np.asarray(value, object if isinstance(value, str | bytes) else None)

    def box(self, path: str, box: Box) -> Array:
        return read_box(self.source, self.numbers[path], box, self.options)

    def fetch(self, paths: list[str]) -> list[Array]:
        goals = dict.fromkeys((self.numbers[path] for path in paths), Goal("numpy"))
        values = fetch(self.source, goals, replace(self.options, progress=None))
        return [values[self.numbers[path]] for path in paths]


def _parts(a: _Side, b: _Side, paths: list[str], options: Options) -> Iterator[tuple[str, Array, Array]]:
    """The leaves of both, small ones several at a time and large ones in boxes."""
    together: list[str] = []
    held = 0
    for path in paths:
        shape = a.shape(path)
        if shape is None:
            yield path, a.value(path), b.value(path)
            continue
        size = max(a.n_bytes(path), b.n_bytes(path))
        if size <= options.host_bytes:
            if together and held + size > options.host_bytes:
                yield from zip(together, a.fetch(together), b.fetch(together), strict=True)
                together, held = [], 0
            together.append(path)
            held += size
            continue
        stack = a.manifest.stacks[a.manifest.place(a.manifest.leaves[a.numbers[path]])[0]]
        itemsize = size // math.prod(shape)
        fits = options.host_bytes // itemsize
        for box in cut_down(
            whole(shape), (stack.object[1:], stack.chunk[1:]), lambda box, fits=fits: volume(box) <= fits
        ):
            yield path, a.box(path, box), b.box(path, box)
    if together:
        yield from zip(together, a.fetch(together), b.fetch(together), strict=True)


def _with(leaf: LeafDelta, a: Array, b: Array) -> LeafDelta:
    """A leaf's differences with those of one more part."""
    a, b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.size, _TOGETHER):  # in float64 and with all that lies between, each takes 100 bytes
        leaf = _with_few(leaf, a[start : start + _TOGETHER], b[start : start + _TOGETHER])
    return leaf


def _with_few(leaf: LeafDelta, a: Array, b: Array) -> LeafDelta:
    found = leaf.size + a.size
    if a.dtype == b.dtype and _is_number(a):
        differ = (_bits(a) != _bits(b)).reshape(*a.shape, -1).any(axis=-1)
    else:
        differ = ~_equal(a, b)
    count = int(np.count_nonzero(differ))
    if count and "O" in (a.dtype.kind, b.dtype.kind) and all(isinstance(n, int | np.integer) for n in (a[0], b[0])):
        x, y = int(a[0]), int(b[0])  # at least one is of Python's own, beyond 64 bits
        distance, scale = np.array([_float(abs(x - y))]), np.array([_float(max(abs(x), abs(y)))])
    elif not count or not (_is_number(a) and _is_number(b)):
        return replace(leaf, size=found, differing=leaf.differing + count)
    else:
        distance, scale = _distance(a[differ], b[differ])
    relative = np.divide(
        distance, scale, out=np.where(np.isinf(distance), np.inf, 0.0), where=(scale > 0) & np.isfinite(scale)
    )
    return replace(
        leaf,
        size=found,
        differing=leaf.differing + count,
        max_abs=max(leaf.max_abs, float(distance.max())),
        max_rel=max(leaf.max_rel, float(relative.max())),
    )


def _bits(array: Array) -> Array:
    """Elements as unsigned integers: one, or two in a last dimension, for each."""
    itemsize = min(array.dtype.itemsize, 8)
    return np.ascontiguousarray(array).view(f"u{itemsize}")


def _is_number(array: Array) -> bool:
    return array.dtype.kind not in "OUS"


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _equal(a: Array, b: Array) -> Array:
    exact = all(array.dtype.kind in "biu" for array in (a, b))  # in float64 those of 64 bits may round to one value
    if exact or not (_is_number(a) and _is_number(b)):
        return np.asarray(a == b)
    a, b = _wide(a), _wide(b)
    return (a == b) | (np.isnan(a) & np.isnan(b))


def _distance(a: Array, b: Array) -> tuple[Array, Array]:
    """(|a − b|, max(|a|, |b|)) of each element, in float64."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":  # exact, where two of 64 bits may round to one float64
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return gap.astype(np.float64), np.maximum(np.abs(_wide(a)), np.abs(_wide(b)))
    a, b = _wide(a), _wide(b)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
    distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
    return distance, np.maximum(np.abs(a), np.abs(b))


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
