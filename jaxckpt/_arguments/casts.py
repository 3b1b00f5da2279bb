"""The dtype that each leaf is cast to: the one from `dtype=`, if the cast loses no more than requested."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxckpt._arguments.pytree import flatten
from jaxckpt._format.dtypes import DTYPES, dtype_name, is_lossless
from jaxckpt._format.paths import closest_hint, longest_prefix
from jaxckpt._runtime.errors import InputError, Problem, show_path
from jaxckpt._runtime.options import Options

Dtypes = Any
"""A dtype, a pytree prefix of them, or a function of (path, leaf)."""

CASTABLE = ("jax", "numpy", "numpy_scalar")
"""The kinds of leaves that can be cast."""

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


@dataclass(frozen=True, slots=True)
class Castable:
    """A leaf that `dtype=` may apply to."""

    path: str
    leaf: Any
    """The argument for a `dtype` function."""

    dtype: np.dtype[Any] | None
    """Its current dtype; None for PRNG keys, for values that are not arrays, and in the state of an object."""


def resolve_casts(
    requested: Dtypes, leaves: Sequence[Castable], options: Options
) -> tuple[dict[str, np.dtype[Any]], list[Problem]]:
    """The new dtype of each leaf whose dtype changes, by path, and the problems.

    A dtype for the tree or a container applies to the leaves below with the same kind of number: bfloat16 does not
    change integers. A function, or a dtype at a leaf's own path, applies to any kind. Raises InputError if an entry is
    not a dtype or matches nothing.
    """
    chosen: dict[str, np.dtype[Any]] = {}
    problems: list[Problem] = []
    for one, wanted in _requested_dtypes(requested, leaves):
        if one.dtype is None:
            reason = f"is not a numeric array, or belongs to the state of an object, but dtype= gives {wanted} for it"
            problems.append(Problem(one.path, reason, "leave the leaf out of dtype="))
        elif wanted != one.dtype:
            chosen[one.path] = wanted
            if not _may_cast(one.dtype, wanted, options):
                reason = f"has dtype {one.dtype}, but dtype= gives {wanted}: a lossy cast"
                problems.append(Problem(one.path, reason, 'Options(cast="unsafe") allows lossy casts'))
    return chosen, problems


def _requested_dtypes(requested: Dtypes, leaves: Sequence[Castable]) -> list[tuple[Castable, np.dtype[Any]]]:
    """(leaf, dtype) of each leaf for which a dtype is requested."""
    if (
        callable(requested)
        and not _is_dtype(requested)
        and not isinstance(requested, Mesh)
        and jax.tree_util.all_leaves([requested])
    ):
        answers = [(one, requested(one.path, one.leaf)) for one in leaves if one.dtype is not None]
        return [(one, _dtype(answer, one.path)) for one, answer in answers if answer is not None]
    by_prefix = {entry.path: _dtype(entry.value, entry.path) for entry in flatten(requested)[0]}
    unused = dict(by_prefix)
    found: list[tuple[Castable, np.dtype[Any]]] = []
    for one in leaves:
        head = longest_prefix(one.path, by_prefix)
        if head is not None and (head == one.path or _is_same_kind(one.dtype, by_prefix[head])):
            unused.pop(head, None)
            found.append((one, by_prefix[head]))
    if unused:
        path, dtype = next(iter(unused.items()))
        hint = closest_hint(path, (one.path for one in leaves)) if path else ""
        raise InputError(f"dtype= gives {dtype} for {show_path(path)}, but no leaf there has that kind of number{hint}")
    return found


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


def _is_same_kind(own: np.dtype[Any] | None, wanted: np.dtype[Any]) -> bool:
    """Whether two dtypes have the same kind of number."""
    return own is not None and any(jnp.issubdtype(own, kind) and jnp.issubdtype(wanted, kind) for kind in _KINDS)


def _may_cast(own: np.dtype[Any], wanted: np.dtype[Any], options: Options) -> bool:
    """Whether a cast loses nothing, or only digits of a float."""
    inexact = any(jnp.issubdtype(own, kind) and jnp.issubdtype(wanted, kind) for kind in _KINDS[2:])
    return inexact or options.cast == "unsafe" or is_lossless(own, wanted)
