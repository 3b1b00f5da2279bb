"""The arguments of a restore, and the saved leaf for each leaf of the target."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._arguments.casts import CASTABLE, Castable, Dtypes, resolve_casts
from jaxckpt._arguments.leaf_types import LeafType, leaf_type
from jaxckpt._arguments.pytree import Leaf, flatten
from jaxckpt._arguments.specs import Specs, mesh_axes
from jaxckpt._devices.current_mesh import mesh_in_context
from jaxckpt._devices.prng_keys import TypedLeaf
from jaxckpt._model.paths import closest_hint, escape_key, longest_prefix, path_prefixes
from jaxckpt._model.records import Manifest
from jaxckpt._model.select import Rename, Select, Selector, origins, parse_select
from jaxckpt._model.tree import (
    Container,
    Structure,
    Tree,
    keys_of,
    numbers_of,
    prune,
    subtree,
    unflatten,
    unwrap_object,
    user_objects_of,
)
from jaxckpt._options import Options, require_bool
from jaxckpt._restore.stateful_objects import TargetObject, revive_object, shardings_below
from jaxckpt._rules.rename import renamed_tree, require_single_root, selected_numbers
from jaxckpt._rules.rules import Rules
from jaxckpt.errors import InputError, Problem, show_path


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of a restore."""

    target: Tree = None
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
    specs: Specs = None
    select: Select | None = None
    rename: Rename | None = None
    rules: Rules | None = None
    """Rules through which the checkpoint is read. `split_rename` sets either this or `rename`."""

    strict: bool = True
    devices_per_process: int | None = None
    """For a plan on a mesh that this machine does not have; None if the arrays will be created."""

    dtype: Dtypes = None
    """The requested dtypes, which override those of the target."""

    tied: bool = False
    """Whether leaves that were saved as one array are restored as one array."""

    initial: Callable[[Sequence[int]], Sequence[Any]] | None = None
    """Creates the leaves of the target with these numbers, for leaves that do not come from the checkpoint."""


class Uncommitted(jax.ShapeDtypeStruct):
    """In a target: an uncommitted array, without its data."""


def require_request(request: RestoreRequest) -> None:
    """Raise InputError for arguments that are invalid for every checkpoint."""
    require_bool(request.strict, "strict")
    require_bool(request.tied, "tied")
    if isinstance(request.target, (Mesh, AbstractMesh)):
        raise InputError("target is a mesh: pass it as mesh=, restore(path, mesh=…)")
    if isinstance(request.target, Options):
        raise InputError("target is an Options: pass it as options=, restore(path, options=…)")
    if request.specs is not None and request.mesh is None:
        raise InputError("specs= needs mesh=: the mesh whose axes the specs name")


@dataclass(frozen=True, slots=True)
class LeafRequests:
    """The requests for saved leaves, in three lists, because creating a record per leaf would take too long."""

    paths: Sequence[str]
    """The requested path of each leaf."""

    numbers: Sequence[int]
    """The number of each saved leaf."""

    values: Sequence[Any]
    """The target's leaf for each; None if the leaf is restored as it was saved."""


Build = Callable[[Mapping[int, Any], Sequence[Any]], Tree]
"""Creates the tree from the leaves' values by leaf number, and from the leaves of `RestoreRequest.initial`."""


@dataclass(frozen=True, slots=True)
class Match:
    """The requested leaves, their requests, and how the tree is built from them."""

    requests: LeafRequests
    build: Build

    to_initialize: Sequence[int] = ()
    """Numbers of the target's leaves that `RestoreRequest.initial` creates."""

    objects: Sequence[TargetObject] = ()
    """Objects of the target whose state was saved."""

    remedies: Sequence[str] = ()
    """Remedies for the problems as a whole."""

    has_any_match: bool = True
    """False if the target has leaves that a checkpoint can contain, and none of them is in this one."""


# Choosing saved leaves ------------------------------------------------------------------------------------


def build_selected(structure: Structure, manifest: Manifest, chosen: Sequence[int]) -> Build:
    """Builds the tree of only the chosen leaves."""
    some = len(chosen) < len(manifest.leaves)
    pruned = prune(structure, {number: number for number in chosen}) if some else structure
    return lambda values, initial: unflatten(pruned, values, functools.partial(revive_object, manifest))


def given_casts(
    manifest: Manifest, match: Match, request: RestoreRequest, policies: Mapping[str, str]
) -> tuple[dict[str, np.dtype[Any]], list[Problem]]:
    """The dtype of each requested path whose dtype `dtype=` changes, and the problems."""
    if request.dtype is None:
        return {}, []
    states = [*(node for _, node in user_objects_of(manifest.tree)), *(one.structure for one in match.objects)]
    kept = {number for state in states for number in numbers_of(state)}
    castable: list[Castable] = []
    for path, number in zip(match.requests.paths, match.requests.numbers, strict=True):
        leaf = TypedLeaf(manifest, manifest.leaves[number])
        is_array = leaf.is_array and leaf.kind in CASTABLE and number not in kept
        castable.append(Castable(path, leaf, leaf.stored_dtype if is_array else None, leaf.shape))
    return resolve_casts(request.dtype, castable, policies)


# Matching paths -------------------------------------------------------------------------------------------


def match_paths(manifest: Manifest, request: RestoreRequest) -> tuple[Match, list[Problem]]:
    """The saved leaf for each leaf of the target, or all selected leaves without a target.

    The problems are missing and extra leaves. Raises TreeError if an entry of select= or rename= matches nothing.
    """
    select = None if request.select is None else parse_select(request.select)
    chosen = selected_numbers(manifest, select)
    structure, numbers = renamed_tree(manifest, request.rename, chosen)
    wanted = numbers
    if len(chosen) < len(numbers):
        among = set(chosen)
        wanted = {path: number for path, number in numbers.items() if number in among}
    if request.target is None:
        asks = LeafRequests([*wanted], [*wanted.values()], [None] * len(wanted))
        require_single_root(manifest, numbers, chosen)
        return Match(asks, build_selected(structure, manifest, chosen)), []
    return _Matching(manifest, request, select, structure, numbers, wanted).match()


@dataclass(frozen=True, slots=True)
class _Matching:
    """A target and the checkpoint that it is compared with."""

    manifest: Manifest
    request: RestoreRequest
    select: Selector | None
    structure: Structure
    """The tree of the checkpoint, renamed."""

    numbers: Mapping[str, int]
    """Number of each leaf of the checkpoint by its new path."""

    wanted: Mapping[str, int]
    """The same for the selected leaves."""

    def match(self) -> tuple[Match, list[Problem]]:
        leaves, shape = flatten(self.request.target)
        leaves = _with_shardings(leaves, self.request.mesh)
        treedef = jax.tree_util.tree_structure(self.request.target)
        types = {kind: found for kind in {type(leaf.value) for leaf in leaves} if (found := leaf_type(kind))}
        wanted = self.wanted
        by_number = {number: path for path, number in wanted.items()} if types else {}
        containers: set[str] | None = None
        requests = LeafRequests(paths := list[str](), numbers := list[int](), requested := list[Any]())
        subtrees: dict[int, Structure] = {}
        objects: dict[int, TargetObject] = {}
        missing: list[Leaf] = []
        refused: list[Problem] = []
        handled_paths = set[str]()
        values: dict[int, Any] = {}
        """The values of leaves that keep the target's value, by their index."""
        to_initialize: list[int] = []
        sources: list[int | None] = []
        """Number of the saved leaf for each leaf of the target, if it comes from one."""
        for place, leaf in enumerate(leaves):
            if types and type(leaf.value) in types:
                sources.append(None)
                values[place] = leaf.value
                found = self._match_object(leaf, types[type(leaf.value)], by_number)
                if isinstance(found, TargetObject):
                    objects[place] = found
                    below = [*numbers_of(found.structure)]
                    numbers.extend(below)
                    paths.extend(by_number[number] for number in below)
                    requested.extend([None] * len(below))
                elif isinstance(found, Problem):
                    refused.append(found)
                    handled_paths.update([leaf.path, *self._leaves_below(leaf.path, wanted)])
                elif found:
                    missing.append(leaf)
                continue
            path = leaf.path_in(wanted) if leaf.is_variable else leaf.path
            number = wanted.get(path)
            sources.append(number)
            if number is not None:
                paths.append(path)
                numbers.append(number)
                requested.append(leaf.value)
                continue
            containers = _containers_of(wanted) if containers is None else containers
            if isinstance(leaf.value, (Sharding, Format)):
                below = self._leaves_below(leaf.path, wanted)
                if below or _is_empty(self.structure, leaf.path):
                    paths.extend(below)
                    numbers.extend(wanted[path] for path in below)
                    requested.extend(
                        shardings_below(self.manifest, numbers[-len(below) :] if below else [], leaf.value)
                    )
                    subtrees[place] = self._subtree(leaf.path, below)
                    continue
            elif not _is_restorable(leaf.value) and (is_class(leaf.value) or leaf.path in containers):
                refused.append(Problem(leaf.path, unrestorable_reason(leaf.value, is_container=True)))
                continue
            values[place] = leaf.value
            if leaf.path in containers or self._is_missing(leaf):
                missing.append(leaf)
            elif _is_abstract(leaf.value) and self.request.initial is not None:
                to_initialize.append(place)

        def build(restored: Mapping[int, Any], initial: Sequence[Any]) -> Tree:
            own = values | dict(zip(to_initialize, initial, strict=True))
            revive = functools.partial(revive_object, self.manifest)
            own |= {place: unflatten(part, restored, revive) for place, part in subtrees.items()}
            own |= {place: one.restored_leaf(restored) for place, one in objects.items()}
            made = [own[place] if number is None else restored[number] for place, number in enumerate(sources)]
            return jax.tree_util.tree_unflatten(treedef, made)

        extra: list[str] = []
        if self.request.strict and len(paths) < len(wanted):
            handled_paths.update(paths)
            extra = [path for path in wanted if path not in handled_paths]
        problems = [*self._missing_problems(missing), *self._extra(extra, shape), *refused]
        if not (problems or paths or subtrees or objects or all(callable(leaf.value) for leaf in leaves)):
            problems = [replace(problem, remedy="") for problem in self._missing_problems(leaves)]
            remedies = ["rename= maps leaves that have other names in the checkpoint"]
            return Match(requests, build, remedies=remedies, has_any_match=False), problems
        return Match(requests, build, to_initialize, [*objects.values()], [*self._remedies(missing, extra)]), problems

    def _match_object(self, leaf: Leaf, kind: LeafType, by_number: Mapping[int, str]) -> TargetObject | Problem | bool:
        """The saved state for an object of the target, or a problem. Without a saved state: True if that is an error,
        False if the object keeps its state because it is not selected or the restore is not strict."""
        try:
            saved = subtree(self.structure, leaf.path)
        except KeyError:
            saved = None
        if saved is None:
            left_out = leaf.path in self.numbers or self._leaves_below(leaf.path, self.numbers)
            return self.request.strict and not left_out and self._is_selected(leaf.path)
        numbers = [*numbers_of(saved)]
        left = [number for number in numbers if number not in by_number]
        if len(left) == len(numbers) > 0 or not (numbers or self._is_selected(leaf.path)):
            return False
        if not left:
            return TargetObject.of(leaf.path, leaf.value, kind, self.manifest, saved)
        return Problem(
            leaf.path, f"is an object, and select= leaves out {len(left)} of the {len(numbers)} leaves of its state"
        )

    def _leaves_below(self, path: str, among: Mapping[str, int]) -> list[str]:
        return [leaf for leaf in among if leaf.startswith(f"{path}/")] if path else list(among)

    def _subtree(self, path: str, below: Sequence[str]) -> Structure:
        part = subtree(self.structure, path)
        return prune(part, {self.wanted[leaf]: self.wanted[leaf] for leaf in below}) if below else part

    def _is_missing(self, leaf: Leaf) -> bool:
        """Whether a leaf of the target that does not come from the checkpoint is a problem."""
        # A function, such as an activation in an Equinox module, is not state that a checkpoint could lack.
        if callable(leaf.value) or leaf.path in self.numbers or not self._is_selected(leaf.path):
            return False
        if isinstance(leaf.value, (Sharding, Format)) and self._leaves_below(leaf.path, self.numbers):
            return False
        # A sharding has neither a value nor a shape, so the caller could not complete the tree.
        return self.request.strict or (isinstance(leaf.value, (Sharding, Format)) and self.request.initial is None)

    def _is_selected(self, path: str) -> bool:
        """Whether `select`, which uses saved paths, selects a leaf of the target that the checkpoint lacks.

        If `rename` is a function, the saved path is unknown, and the leaf counts as selected.
        """
        if self.select is None:
            return True
        olds = origins(self.request.rename, path)
        return olds is None or any(map(self.select, olds))

    # Problems ---------------------------------------------------------------------------------------------

    @property
    def _strict_remedy(self) -> str:
        owner = "target" if self.request.initial is None else "init"
        return f"strict=False keeps the {owner}'s value for missing leaves and leaves out extra ones"

    def _missing_problems(self, leaves: Sequence[Leaf]) -> Iterator[Problem]:
        """Leaves of the target that the checkpoint lacks, the first of them with hints."""
        for place, leaf in enumerate(leaves):
            hint = ""
            if place < 3:  # each hint needs a scan of all paths
                try:
                    saved = subtree(self.structure, leaf.path)
                    hint = "; None was saved there" if saved is None else "; a container was saved there"
                except KeyError:
                    hint = closest_hint(leaf.path, self.wanted)
            remedy = self._strict_remedy if self.request.strict else ""
            if isinstance(leaf.value, (Sharding, Format)) and self.request.initial is None:
                remedy = "a Sharding has no value to keep: give an array, or leave it out"
            yield Problem(leaf.path, f"is not in the checkpoint{hint}", remedy)

    def _extra(self, paths: Sequence[str], shape: Structure) -> Iterator[Problem]:
        """Leaves of the checkpoint that the target, which has this structure, lacks."""
        empty = dict(_empty_places(shape, "")) if paths else {}
        for path in paths:
            at = longest_prefix(path, empty)
            hint = "" if at is None else f", which has {empty[at]} at {show_path(at)}"
            yield Problem(path, f"is in the checkpoint but not in the target{hint}", self._strict_remedy)

    def _remedies(self, missing: Sequence[Leaf], extra: Sequence[str]) -> Iterator[str]:
        if missing and self.select is not None and callable(self.request.rename):
            yield "since rename= is a function, missing leaves count as selected; a mapping shows which are not"
        if missing and extra:
            yield "rename= maps leaves that have other names in the checkpoint"


def _with_shardings(leaves: Sequence[Leaf], mesh: object) -> Sequence[Leaf]:
    """Leaves of a target, with devices and PartitionSpecs replaced by shardings, as in `jax.device_put`."""
    kinds = {type(leaf.value) for leaf in leaves}  # few types for thousands of leaves
    if not any(issubclass(kind, (jax.Device, PartitionSpec)) for kind in kinds):
        return leaves
    return [msgspec.structs.replace(leaf, value=_as_sharding(leaf, mesh)) for leaf in leaves]


def _as_sharding(leaf: Leaf, mesh: Any) -> Any:
    """The value of a target's leaf, with a device or PartitionSpec replaced by a sharding. Raises InputError."""
    value = leaf.value
    if isinstance(value, jax.Device):
        return SingleDeviceSharding(value)
    if not isinstance(value, PartitionSpec):
        return value
    mesh = mesh_in_context() if mesh is None else mesh
    if mesh is None:
        raise InputError(
            f"target has the {value} at {show_path(leaf.path)}, and there is no mesh: pass mesh=, or set one with"
            " jax.set_mesh"
        )
    if not isinstance(mesh, (Mesh, AbstractMesh)):  # a plan for axis sizes
        axes = mesh_axes(mesh)
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    try:
        return NamedSharding(mesh, value)
    except ValueError as error:
        raise InputError(f"target has the {value} at {show_path(leaf.path)}: {error}") from error


def _is_abstract(value: Any) -> bool:
    return isinstance(value, (jax.ShapeDtypeStruct, Sharding, Format))


@functools.cache
def is_array_like(kind: type) -> bool:
    """Whether leaves of this type in a target describe arrays."""
    return issubclass(kind, (Sharding, Format, jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic))


def _is_restorable(value: Any) -> bool:
    """Whether a leaf of a target is, or describes, a leaf that a checkpoint can hold."""
    return is_array_like(type(value)) or isinstance(value, (int, float, complex, str, bytes))


def is_class(value: object) -> bool:
    """Whether this is a class, such as the dtype jnp.bfloat16, instead of a leaf."""
    return isinstance(value, (type, np.dtype))


def unrestorable_reason(value: object, *, is_container: bool) -> str:
    """The reason why a value in a target cannot be restored."""
    kind = type(value).__qualname__
    if is_class(value):
        return f"is a {kind} in the target, which cannot be restored; give a jax.ShapeDtypeStruct(shape, dtype)"
    if not is_container:
        return f"is a {kind} in the target, which cannot be restored"
    return (
        f"is a {kind} in the target, and a container in the checkpoint: JAX treats {kind} as a leaf. Register it as a"
        " pytree, or give a dict"
    )


def _containers_of(paths: Iterable[str]) -> set[str]:
    """The paths of all containers of these leaves."""
    above = set[str]()
    for path in paths:
        for head in itertools.islice(path_prefixes(path), 1, None):
            if head in above:
                break
            above.add(head)
    return above


def _is_empty(structure: Structure, path: str) -> bool:
    """Whether a saved container or empty position at a path has no leaves, such as None or optax.EmptyState()."""
    try:
        return next(numbers_of(subtree(structure, path)), None) is None
    except KeyError:
        return False


def _empty_places(node: Structure, path: str) -> Iterator[tuple[str, str]]:
    """Paths at which a tree has None or a container without children, with a word for which of the two."""
    node = unwrap_object(node)
    if node is None:
        yield path, "None"
    elif isinstance(node, Container):
        if not node.children:
            yield path, f"an empty {node.name or node.type}"
        for key, child in zip(keys_of(node), node.children, strict=True):
            yield from _empty_places(child, f"{path}/{escape_key(key)}" if path else escape_key(key))
