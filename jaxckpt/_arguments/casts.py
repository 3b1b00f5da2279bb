"""The dtype that each leaf is cast to: the one from `dtype=`, if the cast loses no more than `Options.cast` allows."""

from __future__ import annotations

import enum
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxckpt._arguments.pytree import flatten, is_meant_for, key_problem
from jaxckpt._model.dtypes import DTYPES, NAN_LESS, dtype_name, is_lossless
from jaxckpt._model.paths import closest_hint, containers_of, longest_prefix, relative_path
from jaxckpt._model.pieces import Array, assign
from jaxckpt._options import CAST_POLICIES, CastPolicies
from jaxckpt.errors import InputError, Problem, show_path

Dtypes = Any
"""A dtype, a pytree prefix of them, or a function of (path, leaf)."""

CASTABLE = ("jax", "numpy", "numpy_scalar")
"""The kinds of leaves that can be cast."""

ALLOW_LOSS = 'Options(cast="unsafe") allows lossy casts, for the whole tree or by leaf'

CHECKED_BYTES = 64 << 10
"""Leaves up to this size are read to see whether a cast loses any of their values: every process reads them whole, so
that all of them decide alike."""

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclass(frozen=True, slots=True)
class Castable:
    """A leaf that `dtype=` may apply to."""

    path: str
    leaf: Any
    """The argument for a `dtype` function."""

    dtype: np.dtype[Any] | None
    """Its current dtype; None for PRNG keys, for values that are not arrays, and in the state of an object."""

    shape: tuple[int, ...] | None = None
    """Its shape if its values can be read before the cast, otherwise None."""


def resolve_casts(
    requested: Dtypes, leaves: Sequence[Castable], policies: Mapping[str, str]
) -> tuple[dict[str, np.dtype[Any]], list[Problem]]:
    """The dtype of each leaf that has one in `dtype=`, by path, and the problems. It may be the leaf's current dtype.

    A dtype for the tree or a container applies to the leaves below with the same kind of number: bfloat16 does not
    change integers. A function, or a dtype at a leaf's own path, applies to any kind. Raises InputError if an entry is
    not a dtype or matches nothing.
    """
    chosen: dict[str, np.dtype[Any]] = {}
    problems: list[Problem] = []
    for leaf, dtype in _requested_dtypes(requested, leaves):
        if leaf.dtype is None:
            reason = f"is not a numeric array, or belongs to the state of an object, but dtype= gives {dtype} for it"
            problems.append(Problem(leaf.path, reason, "leave the leaf out of dtype="))
            continue
        chosen[leaf.path] = dtype
        if judge_cast(leaf.dtype, dtype, policies[leaf.path], leaf.shape, may_round=True) is Verdict.REFUSED:
            nan = f", in which NaN would become {NAN_LESS[dtype.name]}" if dtype.name in NAN_LESS else ""
            reason = f"has dtype {leaf.dtype}, but dtype= gives {dtype}: a lossy cast{nan}"
            problems.append(Problem(leaf.path, reason, ALLOW_LOSS))
    return chosen, problems


def _requested_dtypes(requested: Dtypes, leaves: Sequence[Castable]) -> list[tuple[Castable, np.dtype[Any]]]:
    """(leaf, dtype) of each leaf for which a dtype is requested."""
    if (
        callable(requested)
        and not _is_dtype(requested)
        and not isinstance(requested, Mesh)
        and jax.tree_util.all_leaves([requested])
    ):
        answers = [(leaf, requested(leaf.path, leaf.leaf)) for leaf in leaves if leaf.dtype is not None]
        return [(leaf, _dtype(answer, leaf.path)) for leaf, answer in answers if answer is not None]
    by_prefix = {entry.path: _dtype(entry.value, entry.path) for entry in flatten(requested)[0]}
    unused = dict(by_prefix)
    leaf_dtypes: list[tuple[Castable, np.dtype[Any]]] = []
    for leaf in leaves:
        head = longest_prefix(leaf.path, by_prefix)
        if head is not None and (head == leaf.path or _is_same_kind(leaf.dtype, by_prefix[head])):
            unused.pop(head, None)
            leaf_dtypes.append((leaf, by_prefix[head]))
    if unused:
        path, dtype = next(iter(unused.items()))
        raise _unused_error(path, dtype, [leaf.path for leaf in leaves])
    return leaf_dtypes


def _unused_error(prefix: str, dtype: np.dtype[Any], paths: Sequence[str]) -> InputError:
    """The error for an entry of `dtype=` that applies to no leaf."""
    if problem := key_problem("dtype", prefix, f'"{dtype}"', paths):
        return InputError(problem)
    if any(relative_path(prefix, path) is not None for path in paths) or not prefix:
        return InputError(f"dtype= gives {dtype} for {show_path(prefix)}, but no leaf there has that kind of number")
    hint = closest_hint(prefix, {*paths, *containers_of(paths)})
    return InputError(f"dtype= gives {dtype} for {show_path(prefix)}, but no leaf is at or below that path{hint}")


def _is_dtype(value: object) -> bool:
    return isinstance(value, (str, type, np.dtype)) or hasattr(value, "dtype")


def _dtype(value: Any, path: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value) if _is_dtype(value) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype_name(dtype) not in DTYPES:
        raise InputError(
            f"dtype= gives {reprlib.repr(value)} for {show_path(path)}; expected a dtype such as jnp.bfloat16, one of"
            f" {', '.join(DTYPES)}"
        )
    return DTYPES[dtype_name(dtype)]  # in the byte order of this machine


def _is_same_kind(own: np.dtype[Any] | None, requested: np.dtype[Any]) -> bool:
    """Whether two dtypes have the same kind of number."""
    return own is not None and any(jnp.issubdtype(own, kind) and jnp.issubdtype(requested, kind) for kind in _KINDS)


# Losses ---------------------------------------------------------------------------------------------------


def resolve_policies(requested: CastPolicies, paths: Sequence[str], leaves: Iterable[Any]) -> dict[str, str]:
    """What `Options.cast` allows for each leaf, by path. Raises InputError if an entry is not a policy.

    Entries that match no leaf are ignored, because options serve several calls, and a cast without an entry is refused:
    all except those that would match if they were paths.
    """
    if isinstance(requested, str):
        return dict.fromkeys(paths, requested)
    if callable(requested):
        by_path = zip(paths, leaves, strict=True)
        return {path: _policy(requested(path, leaf) or "safe", path) for path, leaf in by_path}
    by_prefix = {entry.path: _policy(entry.value, entry.path) for entry in flatten(requested)[0]}
    heads = {path: longest_prefix(path, by_prefix) for path in paths}
    for prefix in by_prefix.keys() - set(heads.values()):
        if is_meant_for(prefix, paths) and (
            problem := key_problem("Options.cast", prefix, f'"{by_prefix[prefix]}"', paths)
        ):
            raise InputError(problem)
    return {path: "safe" if head is None else by_prefix[head] for path, head in heads.items()}


def _policy(value: object, path: str) -> str:
    if not isinstance(value, str) or value not in CAST_POLICIES:
        raise InputError(
            f"Options.cast gives {reprlib.repr(value)} for {show_path(path)}; expected one of {CAST_POLICIES}"
        )
    return value


class Verdict(enum.Enum):
    """Whether a cast is made."""

    ALLOWED = enum.auto()
    DEPENDS_ON_VALUES = enum.auto()
    REFUSED = enum.auto()


def judge_cast(
    own: np.dtype[Any], requested: np.dtype[Any], policy: str, shape: tuple[int, ...] | None, *, may_round: bool = False
) -> Verdict:
    """Whether the policy allows a cast of a leaf of this shape; None if its values cannot be read before the cast.

    With `may_round`, floats may lose digits and range, but NaN must not become a number.
    """
    if policy == "unsafe" or is_lossless(own, requested):
        return Verdict.ALLOWED
    if (
        may_round
        and requested.name not in NAN_LESS
        and any(jnp.issubdtype(own, kind) and jnp.issubdtype(requested, kind) for kind in _KINDS[2:])
    ):
        return Verdict.ALLOWED
    if shape is None or "c" in (own.kind, requested.kind) or requested.kind == "b":
        return Verdict.REFUSED
    # An array of floats fits a narrower dtype only by chance, such as before its first update.
    is_countable = math.prod(shape) == 1 or jnp.issubdtype(own, jnp.integer)
    is_small = math.prod(shape) * own.itemsize <= CHECKED_BYTES
    return Verdict.DEPENDS_ON_VALUES if is_countable and is_small else Verdict.REFUSED


def lost_value(values: Array, dtype: np.dtype[Any]) -> object | None:
    """The first of some real numbers that a cast changes, including the sign of a zero; None if it changes none."""
    made = np.empty(values.shape, dtype)
    assign(made, values)
    for before, after in zip(_numbers(values), _numbers(made), strict=True):
        is_nan = before != before and after != after
        if not is_nan and (before != after or math.copysign(1, before) != math.copysign(1, after)):
            return before
    return None


def _numbers(values: Array) -> list[Any]:
    """The values as Python numbers, which compare exactly."""
    # float64 holds every value of the dtypes of ml_dtypes.
    return (values if values.dtype.kind in "biuf" else values.astype(np.float64)).ravel().tolist()
