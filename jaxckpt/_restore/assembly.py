"""How the restored tree is assembled: where each of its leaves comes from."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt._arguments.leaf_types import LeafType, call_user_function, registered
from jaxckpt._arguments.pytree import TreeBuilder, flatten_values
from jaxckpt._model.records import Manifest
from jaxckpt._model.select import Selector
from jaxckpt._model.tree import Container, Structure, Tree, numbers_of, prune, unflatten, user_objects_of
from jaxckpt._model.values import KINDS
from jaxckpt.errors import Problem


def revive_object(manifest: Manifest, node: Container, state: Any) -> Any:
    """A saved object: created by the type that is registered under its name, or its state if there is no such type."""
    kind = registered(node.name or "")
    if kind is None or kind.from_state is None:
        return state
    first = next(numbers_of(node), None)
    path = "" if first is None else manifest.leaves[first].path
    return call_user_function(kind.from_state, f"a {kind.name} was created from the state at", path, state)


@dataclass(frozen=True, slots=True)
class TargetObject:
    """An object of a target, and the structure of its saved state."""

    path: str
    leaf: Any
    type: LeafType
    manifest: Manifest
    structure: Structure
    """The structure of the saved state, with leaf numbers."""

    @classmethod
    def of(cls, path: str, leaf: Any, kind: LeafType, manifest: Manifest, saved: Structure) -> TargetObject | Problem:
        """The object with the saved state in `saved`; a problem if the saved object has another class."""
        record = saved if isinstance(saved, Container) and saved.type == "object" else None
        if record is not None and not kind.is_named(record.name or ""):
            return Problem(
                path,
                f"is the state of a {record.name} in the checkpoint, a {kind.name} in the target",
                "leave the object out with select=, and set its state yourself from jaxckpt.load_numpy; for a class"
                " that was renamed, jaxckpt.register_leaf takes the old name=",
            )
        return cls(path, leaf, kind, manifest, saved if record is None else record.children[0])

    @property
    def can_set_state(self) -> bool:
        """Whether the restored tree contains the target's own leaf, with the saved state."""
        return self.type.set_state is not None

    def state(self, values: Mapping[int, Any]) -> Any:
        """The saved state as a tree, from the values of leaves by number."""
        return unflatten(self.structure, values, functools.partial(revive_object, self.manifest))

    def restored_leaf(self, values: Mapping[int, Any]) -> Any:
        """The leaf of the restored tree: the target's own if it can receive a state, otherwise a new one."""
        if self.can_set_state or self.type.from_state is None:
            return self.leaf
        return call_user_function(
            self.type.from_state, f"a {self.type.name} was created for", self.path, self.state(values)
        )

    def set_state(self, state: Any) -> None:
        """Set the state of the target's own leaf."""
        assert self.type.set_state is not None, self.path
        doing = f"the state of the {self.type.name} was set (objects before it in the tree already have theirs) at"
        call_user_function(self.type.set_state, doing, self.path, self.leaf, state)


def shardings_below(manifest: Manifest, numbers: Sequence[int], sharding: Any) -> list[Any]:
    """What a target's sharding at a container requests of each leaf below it: that sharding, or None for host leaves in
    the state of an object."""
    states = {number for _, node in user_objects_of(manifest.tree) for number in numbers_of(node)}
    on_host = {number for number in states if not KINDS[manifest.leaves[number].kind].on_devices}
    return [None if number in on_host else sharding for number in numbers]


# The tree -------------------------------------------------------------------------------------------------


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

    def assemble(self, values: Mapping[int, Any], initialized: Mapping[int, Any] = {}) -> Tree:
        """The tree, from saved leaves by their number in the checkpoint, and from the leaves of `to_initialize` by
        theirs in the target."""
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
