"""Weighted sums of checkpoints, computed when their values are read: averages, soups, task vectors."""

from __future__ import annotations

import functools
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np

from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, cut_to_size, extent, whole_box
from jaxckpt._model.pieces import Array, assign
from jaxckpt._model.select import Select
from jaxckpt._model.tree import nested_dicts
from jaxckpt._model.values import encode_value
from jaxckpt._options import Options, options_or_default, require_whole_number
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._rules.apply_rule import SourceLeaves
from jaxckpt._rules.mapped_data import ComputedData
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._run_folder.run_paths import steps_of
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, Replicas
from jaxckpt._sources.open_source import Location, NamedStep, foreign_steps_of, source_at
from jaxckpt._store.store_path import local_path, store_at
from jaxckpt.errors import DataError, InputError, MismatchError, Problem, show_count


@explain_keywords
def average(
    checkpoints: Sequence[Location],
    *,
    weights: Sequence[float] | None = None,
    select: Select | None = None,
    rename: Renaming | None = None,
    executor: Executor | None = None,
    options: Options | None = None,
) -> ForeignCheckpoint:
    """The weighted sum of checkpoints of any format. Values are computed when they are read.

    Pass the result to `convert`, `restore` or `load_numpy`. Floating-point leaves are weight × value, added in the
    order of the checkpoints in float32 (float64 for float64), and rounded once to their dtype. The bits do not depend
    on the number of processes or on chunks. All other leaves must be equal.

    Args:
        checkpoints: The checkpoints, of the same leaves. "run@last5" means the newest 5 steps of a run. The tree is
            that of the first.
        weights: A factor for each checkpoint, such as (1, 1, -1) for "a + b - c". By default, all are 1 / count.
        select: Only these leaves, such as "params".
        rename: As for `restore`; for every checkpoint.
        executor: The default of `executor=` of a `convert` of the result: its workers compute the values.
        options: See `Options`.

    Raises:
        MismatchError: Leaves differ in path, shape or dtype, or a Python value differs. A read raises it if an array of
            another dtype than float differs.
        InputError: An argument is invalid.
        Exception: As `jaxckpt.open`.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> for n in (1, 2):
        ...     info = jaxckpt.save(f"/tmp/jaxckpt-doc/average{n}", {"w": np.full(2, n, "float32")}, overwrite=True)
        >>> jaxckpt.load_numpy(jaxckpt.weights.average([f"/tmp/jaxckpt-doc/average{n}" for n in (1, 2)]))
        {'w': array([1.5, 1.5], dtype=float32)}
    """
    options = options_or_default(options)
    if isinstance(checkpoints, (str, Set, Mapping)) or not isinstance(checkpoints, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"average takes a list of checkpoints, found {checkpoints!r}")
    places = [place for location in checkpoints for place in _expanded(location, options)]
    if not places:
        raise InputError("average takes at least one checkpoint, found none")
    try:
        if isinstance(weights, (str, bytes, Set, Mapping)):
            raise TypeError(f"found a {type(weights).__name__}")
        factors = [1 / len(places)] * len(places) if weights is None else [float(factor) for factor in weights]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"weights= must be a sequence of numbers: {error}") from error
    if len(factors) != len(places) or not all(abs(factor) <= _LARGEST for factor in factors):
        raise InputError(f"weights= needs one finite float32 for each of {show_count(len(places), 'checkpoint')}")
    sources = [renamed_source(source_at(place, options), rename, select) for place in places]
    first, *others = [SourceLeaves(source) for source in sources]
    problems = [
        Problem(path, f"is only in {one.url}, and not in {other.url}")
        for source, leaves in zip(sources[1:], others, strict=True)
        for one, other, extra in (
            (sources[0], source, first.paths - leaves.paths),
            (source, sources[0], leaves.paths - first.paths),
        )
        for path in sorted(extra)
    ]
    urls = [source.url for source in sources]
    made: dict[str, object] = {}
    exact: dict[str, Sequence[ForeignArray]] = {}
    for path in first.paths if not problems else ():
        values = [leaves.leaf(path) for leaves in (first, *others)]
        value = values[0]
        others_of = zip(urls, values, strict=True)
        unequal = next(((url, other) for url, other in others_of if _kind(other) != _kind(value)), None)
        made[path] = value
        if unequal is not None:
            url, other = unequal
            problems.append(Problem(path, f"is {_shown(value)}, and {_shown(other)} in {url}", _REMEDY))
        elif not isinstance(value, ForeignArray):
            pass
        elif not _is_float(value):
            exact[path] = values
        elif DTYPES[value.dtype].itemsize == 1 and any(f"{path}{suffix}" in first.paths for suffix in _SCALES):
            problems.append(Problem(path, "is quantized, and would be added without its scales", _DEQUANTIZE))
        else:
            data = _WeightedData([array.data for array in values], factors, DTYPES[value.dtype])
            made[path] = replace(value, data=data)
    leaves = _ExactLeaves(_distinct(urls), exact)
    if problems:
        more = run_watched(f"comparing {', '.join(urls)}", options.timeout_seconds, leaves.problems)
        raise _error([*problems, *more])
    for path, (array, *_) in exact.items():
        made[path] = replace(array, data=_ExactData(path, leaves.copies(path), leaves))
    url = " + ".join(f"{factor:g} × {place}" for factor, place in zip(factors, urls, strict=True))
    composed = compose(url, nested_dicts(made), "average", metadata=sources[0].manifest.metadata)
    manifest = composed.manifest
    records = [manifest.leaves[manifest.numbers[leaf.path]] for leaf in sources[0].manifest.leaves]
    manifest = msgspec.structs.replace(manifest, tree=sources[0].manifest.tree, leaves=records)
    composed = replace(composed, manifest=manifest, origins=sources)
    paths = [local_path(place) or place if isinstance(place, str) else place for place in places]
    again = functools.partial(
        average, paths, weights=factors, select=select, rename=rename, options=replace(options, progress=None)
    )
    own = {field.name: getattr(composed, field.name) for field in fields(ForeignCheckpoint)}
    return Average(**own, again=again, executor=executor)


@dataclass(frozen=True, slots=True)
class Average(ForeignCheckpoint):
    """The weighted sum of checkpoints. It pickles as their paths, so that other processes compute values of it."""

    again: Callable[[], ForeignCheckpoint] = field(kw_only=True, repr=False, compare=False)
    """Opens the checkpoints again."""

    executor: Executor | None = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.again, ()


_LAST = re.compile(r"(.+)@last([1-9]\d*)")


def _expanded(location: Location, options: Options) -> Iterable[Location]:
    """The checkpoints that a location stands for. Raises InputError if a run has too few steps."""
    match = None
    if isinstance(location, (str, os.PathLike)) and not isinstance(location, NamedStep):
        match = _LAST.fullmatch(str(os.fspath(location)))
    if match is None:
        return [location]
    run, count = match[1], require_whole_number(int(match[2]), "the number of steps", minimum=1)
    steps = [step.url for step in steps_of(store_at(run, options)) or ()]
    steps = steps or [f"{run}@{step.number}" for step in foreign_steps_of(run, options)]
    if not steps:  # a checkpoint of this name, or an error that says what is there
        return [location]
    if len(steps) < count:
        raise InputError(f"{match[0]}: {run} has {show_count(len(steps), 'step')}")
    return steps[-count:]


def _kind(value: object) -> object:
    """What must be equal in all checkpoints: of an array its dtype, shape and kind, of a Python value all bits."""
    if not isinstance(value, ForeignArray):
        return encode_value(value)
    return value.dtype, value.shape, value.kind if value.kind in _SPECIAL else "array", value.impl


def _shown(value: object) -> str:
    if not isinstance(value, ForeignArray):
        return reprlib.repr(value)
    return f"{f'{value.kind} of ' if value.kind in _SPECIAL else ''}{value.dtype}{list(value.shape)}"


_SPECIAL = ("key", "str", "bytes")
"""The kinds of arrays that are not numbers."""


def _is_float(array: ForeignArray) -> bool:
    return array.kind not in _SPECIAL and "float" in DTYPES[array.dtype].name


_LARGEST = float(np.finfo(np.float32).max)

_SCALES = ("_scale", "_scale_inv")
"""What is appended to the path of a quantized leaf for that of its scales."""

_DEQUANTIZE = "pass rename=huggingface_rules(folder), which dequantizes"

_REMEDY = "choose the leaves to average with select=, such as params"

_COMPARED_ELEMENTS = 1 << 20
"""How many elements of a leaf are compared at a time."""


def _error(problems: Sequence[Problem]) -> MismatchError:
    return MismatchError.of(f"{show_count(len(problems), 'leaf')} cannot be averaged", problems)


@dataclass(frozen=True, slots=True)
class _ExactLeaves:
    """The arrays that are not floats, by path, each from every checkpoint."""

    names: Sequence[str]
    """The name of each checkpoint. All differ."""

    arrays: Mapping[str, Sequence[ForeignArray]]

    def copies(self, path: str) -> Mapping[str, ArrayData]:
        """The data of a leaf, by checkpoint."""
        return {name: array.data for name, array in zip(self.names, self.arrays[path], strict=True)}

    def problems(self) -> list[Problem]:
        """A problem for each leaf that differs or cannot be read. Reads all of them."""
        return [problem for path in self.arrays if (problem := self._problem(path))]

    def _problem(self, path: str) -> Problem | None:
        array, *_ = self.arrays[path]
        replicas = Replicas(path, self.copies(path))
        try:
            for box in cut_to_size(whole_box(array.shape), [[1] * len(array.shape)], _COMPARED_ELEMENTS):
                names = replicas.different_copies(box, np.empty(extent(box), DTYPES[array.dtype]))
                if names is not None:
                    what = f"{array.dtype}{list(array.shape)}"
                    reason = f"is not a float, but {what}, and differs between {names[0]} and {names[1]}"
                    return Problem(path, reason, _REMEDY)
        except DataError as error:
            return Problem(path, f"cannot be read: {error}", _REMEDY)
        return None


def _distinct(urls: Sequence[str]) -> list[str]:
    """The URLs, with a number if several are equal: the checkpoints of several files in one folder have its URL."""
    return [url if urls.count(url) == 1 else f"{url} (number {number})" for number, url in enumerate(urls, 1)]


@dataclass(frozen=True, slots=True)
class _ExactData(Replicas):
    """A leaf that is not averaged. If it differs, the error names all such leaves."""

    leaves: _ExactLeaves

    def difference(self, first: str, other: str, box: Box) -> MismatchError:
        return _error(self.leaves.problems())


@dataclass(frozen=True, slots=True)
class _WeightedData(ComputedData):
    """Factor × value, added in a fixed order, element by element."""

    data: Sequence[ArrayData]
    factors: Sequence[float]
    dtype: np.dtype[np.generic]

    def read(self, box: Box, target: Array) -> None:
        wide = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        values = np.empty(target.shape, self.dtype)
        total = np.zeros(target.shape, wide)
        for number, (data, factor) in enumerate(zip(self.data, self.factors, strict=True)):
            data.read(box, values)
            with np.errstate(all="ignore"):  # infinity and NaN are values like others
                term = values.astype(wide)
                np.multiply(term, wide.type(factor), out=term)
                np.add(total, term, out=total) if number else np.copyto(total, term)
        assign(target, total)

    @property
    def origins(self) -> Sequence[ArrayData]:
        return self.data
