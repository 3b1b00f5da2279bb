"""The spec of each leaf on a mesh: the one from `specs`, or its saved spec mapped by axis name."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxckpt._arguments.pytree import Leaf, flatten, key_problem, pattern_of
from jaxckpt._model.grid import Spec, axis_problem, divisibility_problem, replicate_indivisible, show_spec, spec_of
from jaxckpt._model.paths import closest_hint, containers_of, escape_key, longest_prefix, mask_numbers
from jaxckpt._model.select import parse_select, unmatched_hint
from jaxckpt._options import Options
from jaxckpt.errors import InputError, Problem, SpecError, show_count, show_path

Specs = Any
"""A PartitionSpec, a pytree prefix of them, or a function of (path, leaf), which has a shape and a dtype."""


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Leaves with the same layout."""

    paths: Sequence[str]
    shape: tuple[int, ...]

    own: Spec = ()
    """Their current or saved spec."""

    requested: Spec | None = None
    """The caller's spec for them, if any."""


def assign_specs(
    axes: Mapping[str, int], groups: Sequence[LeafGroup], options: Options
) -> tuple[list[Spec], list[Problem]]:
    """The spec of each group of leaves on a mesh with these axes, and a problem for each leaf that its spec does not
    fit.

    Without a requested spec, a leaf stays split by the axes of its own spec that the mesh also has. Raises SpecError if
    the mesh has none of the axes of any leaf, because everything would silently be replicated.
    """
    if all(group.requested is None for group in groups):
        _require_common_axis(axes, groups)
    specs: list[Spec] = []
    problems: list[Problem] = []
    for group in groups:
        spec = group.requested
        if spec is None:
            spec = tuple(tuple(axis for axis in entry if axis in axes) for entry in group.own)
        reason, remedy = axis_problem(axes, spec, group.shape), ""
        if not reason and (reason := divisibility_problem(axes, spec, group.shape)):
            if options.indivisible == "replicate":
                spec, reason = replicate_indivisible(axes, spec, group.shape), None
            else:
                remedy = 'give the leaf another spec, or pass Options(indivisible="replicate") to keep it whole'
        specs.append(spec)
        if reason:
            problems.extend(Problem(path, f"cannot be laid out: {reason}", remedy) for path in group.paths)
    return specs, problems


def _require_common_axis(axes: Mapping[str, int], groups: Iterable[LeafGroup]) -> None:
    split = [group for group in groups if any(group.own)]
    names = {axis for group in split for entry in group.own for axis in entry}
    if names and not names & axes.keys() and math.prod(axes.values()) > 1:
        problems = [Problem(path, f"has the spec {show_spec(group.own)}") for group in split for path in group.paths]
        raise SpecError.of(
            f"the mesh {dict(axes)} has none of the axes that the leaves' own specs name ({', '.join(sorted(names))}),"
            " so every leaf would be replicated",
            problems,
            "pass specs=, or specs=PartitionSpec() to replicate every leaf",
            listed=_lines_by_pattern(problems),
        )


def require_fit(problems: Sequence[Problem]) -> None:
    """Raise SpecError if there are leaves that their specs do not fit."""
    if problems:
        head = f"the specs do not fit {show_count(len(problems), 'leaf')}"
        raise SpecError.of(head, problems, listed=_lines_by_pattern(problems))


def _lines_by_pattern(problems: Sequence[Problem]) -> Iterator[str]:
    """A line for each problem, and one for all leaves that have the same problem and differ only in numbers."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((mask_numbers(problem.leaf or ""), problem.reason), []).append(problem)
    for (pattern, reason), group in groups.items():
        yield str(group[0]) if len(group) == 1 else f"{show_path(pattern)} ({show_count(len(group), 'leaf')}) {reason}"


# The caller's specs ---------------------------------------------------------------------------------------


def resolve_specs(specs: Specs, leaves: Sequence[tuple[str, Any]], on_host: Container[str] = ()) -> dict[str, Spec]:
    """The spec of each leaf for which `specs` has one. A key that is not in the tree may be a path or a glob, as in
    `select=`: the first that matches is for the leaves without another spec. Leaves `on_host` take a spec at their own
    path, that of a subtree without other leaves, and that of a function, which may return None for them. Raises a
    SpecError that names invalid or unused entries."""
    if specs is None:
        return {}
    if isinstance(specs, Mesh):  # a Mesh is callable (as a decorator), and must not be taken for a function
        raise SpecError("specs is a mesh: pass it as mesh=, and PartitionSpecs as specs=")
    # A callable Equinox module is a pytree, not a function.
    if callable(specs) and not isinstance(specs, PartitionSpec) and jax.tree_util.all_leaves([specs]):
        returned = ((path, specs(path, leaf)) for path, leaf in leaves)
        return {path: _require_spec(spec, path) for path, spec in returned if spec is not None or path not in on_host}
    if isinstance(specs, str) or _is_spec_entries(specs):
        entries: Sequence[Any] = (specs,) if isinstance(specs, str) else specs
        raise SpecError(f"specs is {specs!r}: write PartitionSpec({', '.join(map(repr, entries))})")
    entries = flatten(specs)[0]
    _refuse_bare_specs(specs, entries)
    by_prefix = {leaf.path: _require_spec(leaf.value, leaf.path) for leaf in entries}
    heads = {path: head for path, _ in leaves if (head := longest_prefix(path, by_prefix)) is not None}
    with_others = {head for path, head in heads.items() if path not in on_host}
    chosen = {
        path: head for path, head in heads.items() if path not in on_host or head == path or head not in with_others
    }
    used = set(chosen.values())
    # JAX sorts the keys of a dict; patterns apply in the caller's order.
    order = {escape_key(key): n for n, key in enumerate(specs)} if isinstance(specs, Mapping) else {}
    unused_keys = sorted(by_prefix.keys() - used, key=lambda prefix: (order.get(prefix.split("/")[0], 0), prefix))
    patterns = {prefix: parse_select(pattern) for prefix in unused_keys if (pattern := pattern_of(prefix))}
    for path, _ in leaves:
        if path not in on_host and (matches := [prefix for prefix, selector in patterns.items() if selector(path)]):
            chosen.setdefault(path, matches[0])
            used.update(matches)
    # One spec for all leaves is valid even if there are no leaves.
    unused = [prefix for prefix in by_prefix if prefix not in used and (prefix or leaves)]
    if unused:
        raise _unused_error(unused[0], [path for path, _ in leaves])
    return {path: by_prefix[head] for path, head in chosen.items()}


def _is_spec_entries(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether this is a tuple or list of axis names, as in a PartitionSpec, and not a pytree of specs."""
    if type(value) not in (tuple, list):
        return False
    entries = [entry for entry in cast("Sequence[object]", value) if entry is not None]
    names = [name for entry in entries for name in (cast("Any", entry) if type(entry) is tuple else (entry,))]
    return bool(names) and all(isinstance(name, str) for name in names)


def _refuse_bare_specs(specs: Specs, leaves: Sequence[Leaf]) -> None:
    """Raise SpecError if an entry of `specs`, which has these leaves, is a tuple or list of axis names."""
    invalid = next((leaf for leaf in leaves if not isinstance(leaf.value, PartitionSpec)), None)
    if invalid is None or not isinstance(invalid.value, str):
        return
    nodes = jax.tree_util.tree_leaves(
        specs, is_leaf=lambda node: isinstance(node, PartitionSpec) or _is_spec_entries(node)
    )
    entries: Any = next((node for node in nodes if not isinstance(node, PartitionSpec)), None)
    if not _is_spec_entries(entries):
        return
    depth = len(jax.tree_util.tree_flatten_with_path(entries)[0][0][0])
    path = "/".join(invalid.path.split("/")[:-depth])
    raise SpecError(f"specs has {entries!r} at {show_path(path)}: write PartitionSpec({', '.join(map(repr, entries))})")


def _unused_error(prefix: str, paths: Sequence[str]) -> SpecError:
    """The error for an entry of `specs` that applies to no leaf."""
    candidates = {*paths, *containers_of(paths)}
    if pattern := pattern_of(prefix):
        hint = unmatched_hint(pattern, candidates)
        return SpecError(f"specs has {pattern!r}, which matches no array on devices{hint}")
    if problem := key_problem("specs", prefix, "PartitionSpec(…)", paths):
        return SpecError(problem)
    hint = closest_hint(prefix, candidates)
    return SpecError(f"specs has {show_path(prefix)}, but no leaf at or below that path is an array on devices{hint}")


def _require_spec(spec: Any, path: str) -> Spec:
    if not isinstance(spec, PartitionSpec):
        raise SpecError(
            f"specs gives {reprlib.repr(spec)} for leaf {show_path(path)}; expected a jax.sharding.PartitionSpec"
            + (f", such as PartitionSpec({spec!r})" if isinstance(spec, str) else "")
        )
    if spec.reduced:
        raise SpecError(
            f"specs gives {spec} for leaf {show_path(path)}, but specs= takes no reduced mesh axes"
            f" ({', '.join(map(str, sorted(spec.reduced)))}): leave reduced= out; an array that has reduced axes keeps"
            " them, and a restore takes them from a jax.sharding.NamedSharding in the target"
        )
    try:
        return spec_of(spec)
    except SpecError as error:
        raise SpecError(f"leaf {show_path(path)}: {error}") from None


def require_mesh(mesh: object) -> None:
    """Raise InputError unless this is None or a mesh that can hold arrays."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InputError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes, found {reprlib.repr(mesh)}")


def mesh_axes(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> dict[str, int]:
    """Axis sizes of a mesh, or of a mapping of axis sizes. Raises InputError for anything else."""
    if not isinstance(mesh, (Mesh, AbstractMesh, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f'a mesh must be a jax.sharding.Mesh, an AbstractMesh, or axis sizes such as {{"data": 8}}, found'
            f" {reprlib.repr(mesh)}"
        )
    axes = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if not all(isinstance(name, str) and _is_size(size) for name, size in axes.items()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"a mesh needs axis names with sizes above zero, found {axes}")
    return axes


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
