"""Weighted sums of checkpoints, computed when their values are read: averages, soups, task vectors."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, cut_to_size, extent, whole_box
from jaxckpt._model.pieces import Array, assign
from jaxckpt._model.select import Select
from jaxckpt._model.tree import nested_dicts
from jaxckpt._options import Options, require_whole_number
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._rules.apply_rule import SourceLeaves
from jaxckpt._rules.mapped_data import ComputedData
from jaxckpt._rules.rename import Renaming, renamed_source
from jaxckpt._run_folder.run_paths import steps_of
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, Replicas
from jaxckpt._sources.open_source import Location, source_at
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
        checkpoints: The checkpoints, of the same leaves. "run@last5" means the newest 5 steps of a run.
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
    options = options or Options()
    if isinstance(checkpoints, (str, os.PathLike)):
        raise InputError(f"average takes a list of checkpoints, found {os.fspath(checkpoints)!r}")
    places = [place for location in checkpoints for place in _expanded(location, options)]
    if not places:
        raise InputError("average takes at least one checkpoint, found none")
    try:
        if isinstance(weights, Set):
            raise TypeError("a set has no order")
        factors = [1 / len(places)] * len(places) if weights is None else [float(factor) for factor in weights]
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"weights= must be a sequence of numbers: {error}") from error
    if len(factors) != len(places) or not all(map(math.isfinite, factors)):
        raise InputError(f"weights= needs one finite number for each of {show_count(len(places), 'checkpoint')}")
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
    made: dict[str, object] = {}
    exact: dict[str, Sequence[ForeignArray]] = {}
    for path in first.paths if not problems else ():
        values = [leaves.leaf(path) for leaves in (first, *others)]
        value = values[0]
        if not isinstance(value, ForeignArray):
            unequal = [source.url for source, other in zip(sources, values, strict=True) if other != value]
            text = f"is {value!r}, and another value in {unequal[0]}" if unequal else ""
        else:
            unequal = [v for v in values if not isinstance(v, ForeignArray) or _kind(v) != _kind(value)]
            text = f"is {value.dtype}{list(value.shape)}, and otherwise in another checkpoint" if unequal else ""
        if text:
            problems.append(Problem(path, text, _REMEDY))
        elif not isinstance(value, ForeignArray):
            made[path] = value
        elif _is_float(value):
            data = _WeightedData([array.data for array in values], factors, DTYPES[value.dtype])
            made[path] = replace(value, data=data)
        else:
            made[path], exact[path] = value, values
    urls = [source.url for source in sources]
    leaves = _ExactLeaves(_distinct(urls), exact)
    if problems:
        more = run_watched(f"comparing {', '.join(urls)}", options.timeout_seconds, leaves.problems)
        raise _error([*problems, *more])
    for path, (array, *_) in exact.items():
        made[path] = replace(array, data=_ExactData(path, leaves.copies(path), leaves))
    url = " + ".join(f"{factor:g} × {place}" for factor, place in zip(factors, urls, strict=True))
    composed = compose(url, nested_dicts(made), "average", metadata=sources[0].manifest.metadata)
    composed = replace(composed, origins=sources)
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
    match = _LAST.fullmatch(location) if isinstance(location, str) else None
    if match is None:
        return [location]
    count = require_whole_number(int(match[2]), "the number of steps", minimum=1)
    steps = steps_of(store_at(match[1], options)) or []
    if len(steps) < count:
        raise InputError(f"{location}: {match[1]} has {show_count(len(steps), 'step')}")
    return [step.url for step in steps[-count:]]


def _kind(array: ForeignArray) -> tuple[object, ...]:
    return array.dtype, array.shape, array.kind, array.impl


def _is_float(array: ForeignArray) -> bool:
    return array.kind not in ("key", "str", "bytes") and "float" in DTYPES[array.dtype].name


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
            term = values.astype(wide)
            np.multiply(term, wide.type(factor), out=term)
            np.add(total, term, out=total) if number else np.copyto(total, term)
        assign(target, total)

    @property
    def origins(self) -> Sequence[ArrayData]:
        return self.data
