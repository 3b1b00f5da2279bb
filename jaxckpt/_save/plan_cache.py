"""Reuses the description and the plan of a save for the next one, because a training job saves similar trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxckpt._model.tree import Container, Structure, Tree
from jaxckpt._save.describe import Draft, first_occurrences
from jaxckpt._save.write_plan import SavePlan


@dataclass(frozen=True, slots=True)
class PlainTree:
    """A tree of plain jax.Arrays."""

    tree: Tree
    leaves: list[jax.Array]
    likeness: Any
    """Equal for trees that are stored in the same way, unless a custom node has changed in place."""

    @classmethod
    def of(cls, tree: Tree, subtrees: tuple[str, ...]) -> PlainTree | None:
        """The same tree; None if it has other leaves. Takes 2 ms for 2,000 leaves; describing them takes 11 ms."""
        try:
            leaves, treedef = jax.tree.flatten(tree)
        except (TypeError, ValueError, OverflowError, RecursionError, SystemError):
            return None  # reported with its path when the tree is described
        plain = type(leaves[0]) if leaves and isinstance(leaves[0], jax.Array) else None
        # The leaves of a tree of PRNG keys also have a single type.
        if plain is None or jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key) or issubclass(plain, Tracer):
            return None
        if any(type(leaf) is not plain or leaf.is_deleted() for leaf in leaves):
            return None
        forms = [(leaf.aval, leaf.sharding, leaf.committed) for leaf in leaves]
        return cls(tree, leaves, (treedef, forms, first_occurrences(leaves), subtrees))


class PlanCache:
    """The description and the plan of the last tree of plain arrays that a Checkpointer saved."""

    def __init__(self) -> None:
        self._entry: tuple[Any, Any, Draft, SavePlan] | None = None
        """Its likeness; its key paths, if a custom node may change them while the likeness stays equal; its draft
        without the values; and its plan."""

    def find(self, plain: PlainTree) -> tuple[Draft, SavePlan] | None:
        """The description and the plan of a tree that is like the last one."""
        if self._entry is None:
            return None
        likeness, paths, draft, plan = self._entry
        if not _is_equal(likeness, plain.likeness):
            return None
        if paths is not None and not _is_equal(paths, _key_paths(plain.tree)):
            return None
        values = {number: leaf for number, leaf in enumerate(plain.leaves) if number not in draft.ties}
        return replace(draft, values=values), plan

    def remember(self, plain: PlainTree, draft: Draft, plan: SavePlan) -> None:
        """Keep the description, without the values, and the plan of a tree."""
        if _has_str_keys(draft.structure):
            # A custom node may keep its keys in a list that changes in place, and would then still equal itself.
            paths = _key_paths(plain.tree) if _has_custom_nodes(draft.structure) else None
            self._entry = plain.likeness, paths, replace(draft, values={}), plan


def _is_equal(a: Any, b: Any) -> bool:
    try:
        return a == b
    except Exception:  # raised by static fields that cannot be compared, such as NumPy arrays
        return False


def _has_str_keys(structure: Structure) -> bool:
    """Whether all keys are str. Otherwise equal trees may have different paths, because 1, 1.0 and True are equal."""
    if not isinstance(structure, Container):
        return True
    return {*map(type, structure.keys or ())} <= {str} and all(map(_has_str_keys, structure.children))


def _has_custom_nodes(structure: Structure) -> bool:
    return isinstance(structure, Container) and (
        structure.type == "custom" or any(map(_has_custom_nodes, structure.children))
    )


def _key_paths(tree: Tree) -> Any:
    """JAX's path of each leaf. Takes 60 ms for 20,000 leaves; describing them takes 320 ms."""
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
