"""How the restored tree is assembled: where each of its leaves comes from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt._arguments.pytree import TreeBuilder, flatten_values
from jaxckpt._model.records import Manifest
from jaxckpt._model.select import Selector
from jaxckpt._model.tree import Structure, Tree, prune, unflatten
from jaxckpt._restore.stateful_objects import TargetObject, revive_object


@dataclass(frozen=True, slots=True)
class SavedSubtree:
    """A part of the saved tree, restored where the target has one leaf."""

    structure: Structure
    """The part, with leaf numbers."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The target's own leaf."""

    value: Any


@dataclass(frozen=True, slots=True)
class Initialized:
    """A leaf that `RestoreRequest.initial` creates."""

    number: int
    """The number of the leaf in the target."""


LeafOrigin = int | SavedSubtree | TargetObject | Kept | Initialized
"""Where a leaf of the restored tree comes from. An int is the number of a saved leaf."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The restored tree, without the values of its leaves."""

    manifest: Manifest
    builder: TreeBuilder
    """Builds the tree from its leaves."""

    origins: Sequence[LeafOrigin]
    """Where each leaf comes from."""

    @classmethod
    def of_saved(
        cls, manifest: Manifest, structure: Structure, chosen: Sequence[int], select: Selector | None = None
    ) -> Assembly:
        """The saved tree, which has this structure after `rename=`, with only the leaves and empty containers that
        `select` selects; `chosen` are the numbers of these leaves."""
        if select is not None:
            structure = prune(structure, {number: number for number in chosen}, select)
        return cls(manifest, flatten_values(0)[1], [SavedSubtree(structure)])  # the tree of a single leaf

    @property
    def to_initialize(self) -> list[int]:
        """Numbers of the target's leaves that `RestoreRequest.initial` creates."""
        return [origin.number for origin in self.origins if isinstance(origin, Initialized)]

    @property
    def objects(self) -> list[TargetObject]:
        """Objects of the target that receive their state after everything has been read."""
        return [origin for origin in self.origins if isinstance(origin, TargetObject)]

    def assemble(self, values: Mapping[int, Any], initial: Sequence[Any]) -> Tree:
        """The tree, from saved leaves by their number in the checkpoint, and from the leaves of `to_initialize`."""
        initialized = dict(zip(self.to_initialize, initial, strict=True))
        leaves = [
            values[origin] if type(origin) is int else self._leaf(origin, values, initialized)
            for origin in self.origins
        ]
        return self.builder.unflatten(leaves)

    def _leaf(self, origin: LeafOrigin, values: Mapping[int, Any], initialized: Mapping[int, Any]) -> Any:
        match origin:
            case int():
                return values[origin]
            case SavedSubtree(structure):
                return unflatten(structure, values, functools.partial(revive_object, self.manifest))
            case TargetObject():
                return origin.restored_leaf(values)
            case Kept(value):
                return value
            case Initialized(number):
                return initialized[number]
