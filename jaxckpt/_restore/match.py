"""The arguments of a restore, the saved leaf for each leaf of the target, and how the restored tree is assembled."""

from __future__ import annotations

import functools
import glob
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxckpt._arguments.casts import CASTABLE, Castable, Dtypes, resolve_casts
from jaxckpt._arguments.pytree import (
    Leaf,
    LeafType,
    TreeBuilder,
    call_user_function,
    flatten,
    flatten_values,
    is_reference,
    leaf_type,
    registered,
)
from jaxckpt._arguments.specs import Specs, mesh_axes
from jaxckpt._devices.shardings import TypedLeaf, mesh_in_context
from jaxckpt._model.paths import (
    closest_hint,
    containers_of,
    escape_key,
    join_paths,
    longest_prefix,
    path_prefixes,
    relative_path,
    unescape_key,
)
from jaxckpt._model.records import Manifest, SavedLeaf
from jaxckpt._model.select import Select, Selector, parse_select
from jaxckpt._model.tree import (
    Container,
    Structure,
    Tree,
    empty_positions,
    keys_of,
    nodes_of,
    numbers_of,
    prune,
    subtree,
    unflatten,
    unwrap_object,
    user_objects_of,
)
from jaxckpt._model.values import KINDS
from jaxckpt._options import Options, require_bool
from jaxckpt._restore.differences import AcceptedDifferences, Strict, Strictness, accepting, moved_remedy
from jaxckpt._rules.rename import Renaming, renamed_tree, require_single_root
from jaxckpt._rules.rule_set import Rules
from jaxckpt.errors import InputError, Problem, show_path

EXTRA = "in the checkpoint but not in the target"
"""What is wrong with an extra leaf."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of a restore."""

    target: Tree = None
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
    specs: Specs = None
    select: Select | None = None
    rename: Renaming | None = None
    strict: Strict = True
    devices_per_process: int | None = None
    """For a plan on a mesh that this machine does not have; None if the arrays will be created."""

    dtype: Dtypes = None
    """The requested dtypes, which override those of the target."""

    tied: bool = False
    """Whether leaves that were saved as one array are restored as one array."""

    manifest_sha256: str | None = None
    """The SHA-256 that the manifest must have, if any."""

    initial: Callable[[Sequence[int]], Sequence[Any]] | None = None
    """Creates the leaves of the target with these numbers, for leaves that do not come from the checkpoint."""

    @property
    def rules(self) -> Rules | None:
        """Rules through which the checkpoint is read, if `rename` is rules."""
        return self.rename if isinstance(self.rename, Rules) else None


class Uncommitted(jax.ShapeDtypeStruct):
    """In a target: an uncommitted array, without its data."""


def require_request(request: RestoreRequest) -> None:
    """Raise InputError for arguments that are invalid for every checkpoint."""
    Strictness.of(request.strict)
    require_bool(request.tied, "tied")
    if isinstance(request.target, (Mesh, AbstractMesh)):
        raise InputError("target is a mesh: pass it as mesh=, restore(path, mesh=…)")
    if isinstance(request.target, Options):
        raise InputError("target is an Options: pass it as options=, restore(path, options=…)")
    if request.specs is not None and request.mesh is None:
        raise InputError("specs= needs mesh=: the mesh whose axes the specs name, such as jax.sharding.get_mesh()")


@dataclass(frozen=True, slots=True)
class LeafRequests:
    """The requests for saved leaves, in three lists, because creating a record per leaf would take too long."""

    paths: Sequence[str]
    """The requested path of each leaf."""

    numbers: Sequence[int]
    """The number of each saved leaf."""

    values: Sequence[Any]
    """The target's leaf for each; None if the leaf is restored as it was saved."""


@dataclass(frozen=True, slots=True)
class Match:
    """The requested leaves, and how the tree is assembled from them."""

    requests: LeafRequests
    assembly: Assembly

    remedies: Sequence[str] = ()
    """Remedies for the problems as a whole."""

    accepted: AcceptedDifferences | None = None
    """The differences that `strict` accepts, if any."""

    has_any_match: bool = True
    """False if the target has leaves that a checkpoint can contain, and none of them is in this one."""


def requested_casts(
    manifest: Manifest, match: Match, request: RestoreRequest, policies: Mapping[str, str]
) -> tuple[dict[str, np.dtype[Any]], list[Problem]]:
    """The dtype of each requested path that has one in `dtype=`, and the problems."""
    states = [node for _, node in user_objects_of(manifest.tree)]
    states += [target_object.structure for target_object in match.assembly.objects]
    in_states = {number for state in states for number in numbers_of(state)}
    castable: list[Castable] = []
    for path, number in zip(match.requests.paths, match.requests.numbers, strict=True):
        leaf = TypedLeaf(manifest, manifest.leaves[number])
        is_array = leaf.is_array and leaf.kind in CASTABLE and number not in in_states
        castable.append(Castable(path, leaf, leaf.stored_dtype if is_array else None, leaf.shape))
    return resolve_casts(request.dtype, castable, policies)


# Matching paths -------------------------------------------------------------------------------------------


def match_paths(manifest: Manifest, request: RestoreRequest) -> tuple[Match, list[Problem]]:
    """The saved leaf for each leaf of the target, or all selected leaves without a target.

    The problems are missing and extra leaves. Raises TreeError if an entry of select= or rename= matches nothing.
    """
    select = None if request.select is None else parse_select(request.select)
    structure, numbers, chosen = renamed_tree(manifest, request.rename, select)
    selected = numbers
    if len(chosen) < len(numbers):
        chosen_numbers = set(chosen)
        selected = {path: number for path, number in numbers.items() if number in chosen_numbers}
    if request.target is None:
        require_single_root(manifest, numbers, chosen)
        Strictness.of(request.strict).require_used(structure)
        requests = LeafRequests([*selected], [*selected.values()], [None] * len(selected))
        if select is not None:
            structure = prune(structure, {number: number for number in chosen}, select)
        assembly = Assembly(manifest, flatten_values(0)[1], [SavedSubtree(structure)])  # the tree of a single leaf
        return Match(requests, assembly), []
    return _Comparison(manifest, request, select, structure, numbers, selected).match()


@dataclass(frozen=True, slots=True)
class _Refused:
    """A leaf of the target that cannot be restored."""

    problem: Problem
    saved_paths: Sequence[str] = ()
    """Paths of saved leaves that the problem is about."""


@dataclass(frozen=True)
class _Comparison:
    """A target, and the checkpoint that it is compared with."""

    manifest: Manifest
    request: RestoreRequest
    select: Selector | None
    structure: Structure
    """The tree of the checkpoint, renamed."""

    numbers: Mapping[str, int]
    """Number of each leaf of the checkpoint by its new path."""

    selected: Mapping[str, int]
    """The same for the selected leaves."""

    @functools.cached_property
    def strict(self) -> Strictness:
        """Whether a difference at a path is an error."""
        return Strictness.of(self.request.strict)

    @functools.cached_property
    def path_of(self) -> dict[int, str]:
        """New path of each selected leaf by its number."""
        return {number: path for path, number in self.selected.items()}

    @functools.cached_property
    def containers(self) -> set[str]:
        """The paths of all containers of selected leaves."""
        return containers_of(self.selected)

    @functools.cached_property
    def all_containers(self) -> set[str]:
        """The paths of all containers of leaves, selected or not."""
        return self.containers if self.selected is self.numbers else containers_of(self.numbers)

    @functools.cached_property
    def nodes(self) -> dict[str, Structure]:
        """What the structure has at each path, because `subtree` reads all keys of every container above it."""
        return dict(nodes_of(self.structure))

    def match(self) -> tuple[Match, list[Problem]]:
        leaves, target_structure = flatten(self.request.target)
        self.strict.require_used(target_structure, self.structure)
        leaves = _with_shardings(leaves, self.request.mesh)
        types = {kind: registered for kind in {type(leaf.value) for leaf in leaves} if (registered := leaf_type(kind))}
        outcomes = [
            self._match_object(leaf, types[type(leaf.value)])
            if types and type(leaf.value) in types
            else self._match_leaf(number, leaf)
            for number, leaf in enumerate(leaves)
        ]
        missing = [leaf for leaf, outcome in zip(leaves, outcomes, strict=True) if outcome is None]
        refused = [outcome for outcome in outcomes if isinstance(outcome, _Refused)]
        # No tree is assembled if a leaf is missing or refused, but the problems of all leaves are reported.
        origins = [
            Kept(leaf.value) if outcome is None or isinstance(outcome, _Refused) else outcome
            for leaf, outcome in zip(leaves, outcomes, strict=True)
        ]
        assembly = Assembly(self.manifest, flatten_values(self.request.target)[1], origins)
        requests = self._requests(leaves, origins)
        unrequested = self._unrequested_paths(requests, refused)
        extra = list(filter(self.strict, unrequested))
        problems = [
            *self._missing_problems(missing),
            *self._extra_problems(extra, target_structure),
            *(outcome.problem for outcome in refused),
        ]
        has_any_match = any(isinstance(origin, (int, SavedSubtree, TargetObject)) for origin in origins)
        if not has_any_match and (displaced := self._displaced_problems(leaves)):
            return Match(requests, assembly, has_any_match=False), displaced
        if not (has_any_match or problems or all(callable(leaf.value) for leaf in leaves)):
            problems = [replace(problem, remedy="") for problem in self._missing_problems(leaves)]
            return Match(
                requests, assembly, [self._moved_remedy(leaves) or _RENAME] if self.numbers else [], has_any_match=False
            ), problems
        is_accepting = self.strict.is_loose or (self.request.initial is not None and self.select is not None)
        accepted = self._accepted(leaves, origins, requests, unrequested) if is_accepting else None
        remedies = [*self._remedies(leaves, missing, extra, requests)] if problems else []
        return Match(requests, assembly, remedies, accepted), problems

    def _match_leaf(self, number: int, leaf: Leaf) -> LeafOrigin | _Refused | None:
        """Where a leaf comes from; None if the checkpoint lacks it. `number` is its number in the target."""
        saved = self.selected.get(leaf.path_in(self.selected) if leaf.is_variable else leaf.path)
        if saved is not None:
            return saved
        if isinstance(leaf.value, (Sharding, Format)):
            if leaf.path in self.containers or (self._is_empty(leaf.path) and self._is_selected(leaf.path)):
                return SavedSubtree(self._subtree(leaf.path))
        elif not _is_restorable(leaf.value) and (is_class(leaf.value) or leaf.path in self.containers):
            return _Refused(Problem(leaf.path, unrestorable_reason(leaf.value, is_container=True)))
        if leaf.path in self.containers or self._is_missing(leaf):
            return None
        if _is_abstract(leaf.value) and self.request.initial is not None:
            return Initialized(number)
        return Kept(leaf.value)

    def _match_object(self, leaf: Leaf, kind: LeafType) -> TargetObject | Kept | _Refused | None:
        """The saved state for an object of the target; None if the checkpoint lacks it. Without one, the object keeps
        its state if it is not selected, or if the restore is not strict."""
        saved = self.nodes.get(leaf.path)
        if saved is None:
            left_out = leaf.path in self.numbers or leaf.path in self.all_containers
            is_missing = self.strict(leaf.path) and not left_out and self._is_selected(leaf.path)
            return None if is_missing else Kept(leaf.value)
        numbers = [*numbers_of(saved)]
        left_out = [number for number in numbers if number not in self.path_of]
        if len(left_out) == len(numbers) > 0 or not (numbers or self._is_selected(leaf.path)):
            return Kept(leaf.value)
        if left_out:
            reason = f"is an object, and select= leaves out {len(left_out)} of the {len(numbers)} leaves of its state"
            return self._refused_object(Problem(leaf.path, reason))
        matched = TargetObject.of(leaf.path, leaf.value, kind, self.manifest, saved)
        return self._refused_object(matched) if isinstance(matched, Problem) else matched

    def _refused_object(self, problem: Problem) -> _Refused:
        path = problem.leaf or ""
        return _Refused(problem, [path, *(self.path_of[number] for number in self._numbers_below(path))])

    def _requests(self, leaves: Sequence[Leaf], origins: Sequence[LeafOrigin]) -> LeafRequests:
        """The requests for all saved leaves from which the tree is assembled."""
        numbers: list[int] = []
        requested: list[Any] = []
        for leaf, origin in zip(leaves, origins, strict=True):
            if isinstance(origin, int):
                numbers.append(origin)
                requested.append(leaf.value)
            elif isinstance(origin, TargetObject):
                in_state = [*numbers_of(origin.structure)]
                numbers.extend(in_state)
                requested.extend([None] * len(in_state))
            elif isinstance(origin, SavedSubtree):
                below = [*numbers_of(origin.structure)]
                numbers.extend(below)
                requested.extend(shardings_below(self.manifest, below, leaf.value))
        return LeafRequests([self.path_of[number] for number in numbers], numbers, requested)

    def _unrequested_paths(self, requests: LeafRequests, refused: Sequence[_Refused]) -> list[str]:
        """Paths of saved leaves that are selected, and that the target does not request."""
        if len(requests.paths) == len(self.selected):
            return []
        requested = {*requests.paths, *(path for outcome in refused for path in outcome.saved_paths)}
        return [path for path in self.selected if path not in requested]

    def _accepted(
        self, leaves: Sequence[Leaf], origins: Sequence[LeafOrigin], requests: LeafRequests, unrequested: Sequence[str]
    ) -> AcceptedDifferences | None:
        """The differences that are no errors, if any."""
        missing: list[str] = []
        unselected: list[str] = []
        for leaf, origin in zip(leaves, origins, strict=True):
            is_initialized = isinstance(origin, Initialized)
            if is_initialized and (leaf.path_in(self.numbers) if leaf.is_variable else leaf.path) in self.numbers:
                unselected.append(leaf.path)
            elif is_initialized or (isinstance(origin, Kept) and self._is_absent(leaf) and not self.strict(leaf.path)):
                missing.append(leaf.path)
        extra = [path for path in unrequested if not self.strict(path)]
        if not (missing or extra or unselected):
            return None
        return AcceptedDifferences(requests.paths, missing, extra, unselected, self._owner)

    def _numbers_below(self, path: str) -> list[int]:
        """The numbers of the selected leaves below a path that exists."""
        return [number for number in numbers_of(self.nodes[path]) if number in self.path_of]

    def _is_empty(self, path: str) -> bool:
        """Whether a saved container or empty position at a path has no leaves, such as None or optax.EmptyState()."""
        return path in self.nodes and next(numbers_of(self.nodes[path]), None) is None

    def _subtree(self, path: str) -> Structure:
        """The selected part of what was saved at a path that exists."""
        structure = self.nodes[path]
        numbers = self._numbers_below(path)
        if not numbers:
            return structure
        keeps = None if self.select is None else lambda tail: self._is_selected(join_paths(path, tail))
        return prune(structure, dict(zip(numbers, numbers, strict=True)), keeps)

    def _is_absent(self, leaf: Leaf) -> bool:
        """Whether the checkpoint should have a leaf of the target, and lacks it."""
        # A function, such as an activation in an Equinox module, is not state that a checkpoint could lack.
        return (
            not callable(leaf.value)
            and leaf.path not in self.numbers
            and self._is_selected(leaf.path)
            and not (isinstance(leaf.value, (Sharding, Format)) and leaf.path in self.all_containers)
        )

    def _is_missing(self, leaf: Leaf) -> bool:
        """Whether a leaf of the target that does not come from the checkpoint is a problem."""
        # A sharding has neither a value nor a shape, so the caller could not complete the tree.
        has_no_value = isinstance(leaf.value, (Sharding, Format)) and self.request.initial is None
        return self._is_absent(leaf) and (has_no_value or self.strict(leaf.path))

    def _is_selected(self, path: str) -> bool:
        """Whether `select` selects a leaf of the target that the checkpoint lacks."""
        return self.select is None or self.select(path)

    # Problems ---------------------------------------------------------------------------------------------

    @property
    def _owner(self) -> str:
        """What has the values of leaves that the checkpoint lacks."""
        return "target" if self.request.initial is None else "init"

    @property
    def _strict_remedy(self) -> str:
        return f"strict=False keeps the {self._owner}'s value for missing leaves and leaves out extra ones"

    def _missing_problems(self, leaves: Sequence[Leaf]) -> Iterator[Problem]:
        """Leaves of the target that the checkpoint lacks, the first of them with hints."""
        for number, leaf in enumerate(leaves):
            hint = ""
            if number < 3:  # each hint needs a scan of all paths
                try:
                    saved = subtree(self.structure, leaf.path)
                    hint = "; None was saved there" if saved is None else "; a container was saved there"
                except KeyError:
                    hint = closest_hint(leaf.path, self.selected)
            remedy = self._strict_remedy if self.strict(leaf.path) else ""
            if isinstance(leaf.value, (Sharding, Format)) and self.request.initial is None:
                remedy = "a Sharding has no value to keep: give an array, or leave it out"
            yield Problem(leaf.path, f"is not in the checkpoint{hint}", remedy)

    def _displaced_problems(self, leaves: Sequence[Leaf]) -> list[Problem]:
        """The problems if all leaves of the target are in the checkpoint, but in another container; otherwise none."""
        paths = [leaf.path for leaf in leaves if not callable(leaf.value)]
        if not paths or "" in paths:
            return []
        if heads := _missing_heads(paths, self.numbers):
            head = heads[0]
            saved_paths = [f"{head}/{path}" for path in paths]
            has_others = not all(path.startswith(f"{head}/") for path in self.numbers)
            example = ", for example," if len(heads) > 1 else ""
            shown = " and ".join(map(repr, heads)) if len(heads) < 4 else f"{head!r} and {len(heads) - 1:,} other paths"
            remedy = (
                f"all leaves of the target are below {shown} in the checkpoint: wrap the target{example} as"
                f" {_wrapped_target(self.structure, head)}"
            ) + (f" and pass select={glob.escape(head)!r}" if has_others else "")
        elif head := _extra_head(paths, self.numbers):
            saved_paths = [path.removeprefix(f"{head}/") for path in paths]
            remedy = f"the checkpoint has these leaves without {head!r}: pass only what the target has at {head!r}"
        else:
            return []
        return [
            Problem(path, f"is {saved_path!r} in the checkpoint", remedy)
            for path, saved_path in zip(paths, saved_paths, strict=True)
        ]

    def _extra_problems(self, paths: Sequence[str], target_structure: Structure) -> Iterator[Problem]:
        """Leaves of the checkpoint that the target, which has this structure, lacks."""
        empty = dict(empty_positions(target_structure)) if paths else {}
        for path in paths:
            head = longest_prefix(path, empty)
            hint = "" if head is None else f", which has {empty[head]} at {show_path(head)}"
            yield Problem(path, f"is {EXTRA}{hint}", self._strict_remedy)

    def _remedies(
        self, leaves: Sequence[Leaf], missing: Sequence[Leaf], extra: Sequence[str], requests: LeafRequests
    ) -> Iterator[str]:
        remedy = self._moved_remedy(leaves) if missing and extra else ""
        if missing and extra:
            yield remedy or _RENAME
        if not remedy and (accepted := accepting([*(leaf.path for leaf in missing), *extra], requests.paths)):
            yield f"{accepted} accepts only these missing and extra leaves"

    def _moved_remedy(self, leaves: Sequence[Leaf]) -> str:
        """How to find leaves that have other paths in the checkpoint, if their containers moved; otherwise empty."""
        if self.request.rename is not None:
            return ""
        if self.manifest.format == "eqx":
            return _UNNAMED
        records = self.manifest.leaves
        saved = {path: _saved_shape(SavedLeaf(self.manifest, records[n])) for path, n in self.selected.items()}
        wanted = (leaf for leaf in leaves if not callable(leaf.value) and self._is_selected(leaf.path))
        return moved_remedy(saved, {leaf.path: getattr(leaf.value, "shape", None) for leaf in wanted})


_UNNAMED = "an .eqx file holds no names: jaxckpt.formats.eqx_file(path, target) opens it with those of the target"

_RENAME = "rename= maps leaves that have other names in the checkpoint"


def _saved_shape(leaf: SavedLeaf) -> tuple[int, ...] | None:
    return leaf.shape if leaf.is_array and leaf.kind in CASTABLE else None


def _missing_heads(paths: Sequence[str], saved: Mapping[str, int]) -> list[str]:
    """The paths of the containers below which the checkpoint has all of `paths`: only the outermost, because the state
    of an optimizer repeats the paths of the parameters."""
    tail = f"/{paths[0]}"
    heads = (path.removesuffix(tail) for path in saved if path.endswith(tail))
    complete = [head for head in heads if all(f"{head}/{path}" in saved for path in paths)]
    depth = min((head.count("/") for head in complete), default=0)
    return [head for head in complete if head.count("/") == depth]


def _extra_head(paths: Sequence[str], saved: Mapping[str, int]) -> str | None:
    """A path above all of `paths`, without which the checkpoint has all of them."""
    heads = [head for head in itertools.islice(path_prefixes(paths[0]), 1, None) if head]
    return next((head for head in heads if all(relative_path(head, path) in saved for path in paths)), None)


def _wrapped_target(structure: Structure, head: str) -> str:
    """An expression for a tree with `target` at a path of a saved tree, such as `(None, target)` for the path "1"."""
    opening, closing = "", ""
    node: Structure = structure
    for name in head.split("/"):
        node = unwrap_object(node)
        keys = {escape_key(key): key for key in keys_of(node)} if isinstance(node, Container) else {}
        if isinstance(node, Container) and node.type in ("list", "tuple") and name in keys and int(name) < 3:
            left, right = "[]" if node.type == "list" else "()"
            opening += left + "None, " * int(name)
            closing = ("," if node.type == "tuple" and name == "0" else "") + right + closing
        else:
            opening, closing = f"{opening}{{{keys.get(name, unescape_key(name))!r}: ", "}" + closing
        # With rename=, the structure lacks the leaves that are not selected.
        node = subtree(node, name) if name in keys else None
    return f"{opening}target{closing}"


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
    types = Sharding, Format, jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic
    return issubclass(kind, types) or is_reference(kind)


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
    if kind == "AbstractVariable":
        return (
            "is an AbstractVariable in the target, which jax.eval_shape makes of a Variable with hijax=True: make the"
            " target with nnx.eval_shape"
        )
    if not is_container:
        return f"is a {kind} in the target, which cannot be restored"
    return (
        f"is a {kind} in the target, and a container in the checkpoint: JAX treats {kind} as a leaf. Register it as a"
        " pytree or with jaxckpt.register_leaf, as in the program that saved it, or give a dict"
    )


# Objects --------------------------------------------------------------------------------------------------


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


# The restored tree ----------------------------------------------------------------------------------------


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
            values[origin] if isinstance(origin, int) else self._leaf(origin, values, initialized)
            for origin in self.origins
        ]
        return self.builder.unflatten(leaves)

    def _leaf(
        self,
        origin: SavedSubtree | TargetObject | Kept | Initialized,
        values: Mapping[int, Any],
        initialized: Mapping[int, Any],
    ) -> Any:
        match origin:
            case SavedSubtree(structure):
                return unflatten(structure, values, functools.partial(revive_object, self.manifest))
            case TargetObject():
                return origin.restored_leaf(values)
            case Kept(value):
                return value
            case Initialized(number):
                return initialized[number]
