"""The initial state as the target of a restore, and the source of leaves that a checkpoint lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxckpt._arguments.pytree import flatten_values
from jaxckpt._model.tree import Tree
from jaxckpt._restore.match import Uncommitted


def target_of(init: Callable[[], Tree]) -> tuple[Tree, Callable[[Sequence[int]], Sequence[Any]]]:
    """The result of `init` without its data, and a function that creates some of its leaves, by number."""
    if isinstance(init, jax.stages.Wrapped):  # jitted, so all its results are arrays
        shapes = jax.eval_shape(init)
        if all(leaf.sharding is not None for leaf in jax.tree.leaves(shapes)):
            return shapes, functools.partial(_compute_leaves, init, jax.tree.leaves(shapes))
    leaves, builder = flatten_values(init())
    target = builder.unflatten(map(_abstract, leaves))

    def initial(numbers: Sequence[int]) -> Sequence[Any]:
        made = [*leaves] or flatten_values(init())[0]  # called again if a local step was damaged
        leaves.clear()
        return [made[number] for number in numbers]

    return target, initial


def _compute_leaves(init: Callable[[], Tree], shapes: Sequence[Any], numbers: Sequence[int]) -> Sequence[Any]:
    """Some results of a jitted function, with its shardings. XLA removes the computation of the others."""
    if not numbers:
        return []
    # A sharding on an AbstractMesh is part of the type, so the array has it already.
    shardings = [
        None if isinstance(getattr(sharding, "mesh", None), AbstractMesh) else sharding
        for sharding in (shapes[number].sharding for number in numbers)
    ]

    def requested_leaves() -> list[Any]:
        leaves = jax.tree.leaves(init())
        return [leaves[number] for number in numbers]

    return jax.jit(requested_leaves, out_shardings=shardings)()


def _abstract(leaf: Any) -> Any:
    """A leaf as a target without its data."""
    if not isinstance(leaf, jax.Array):
        return leaf
    weak = getattr(leaf, "weak_type", False)  # PRNG keys lack the attribute
    if not leaf.committed:
        return Uncommitted(leaf.shape, leaf.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)
