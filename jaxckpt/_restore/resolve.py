"""Decides the result of each requested leaf: path, kind, shape, dtype and layout. Raises one error for all problems."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxckpt._arguments.casts import ALLOW_LOSS, Dtypes, Verdict, judge_cast, resolve_policies
from jaxckpt._arguments.pytree import is_reference
from jaxckpt._arguments.specs import LeafGroup, assign_specs, mesh_axes, require_fit, resolve_specs
from jaxckpt._devices.device_layout import order_problem, warn_of_orders
from jaxckpt._devices.shardings import (
    PlannedSharding,
    TypedLeaf,
    key_dtype,
    mesh_in_context,
    named_sharding,
    partition_spec,
    reduced_axes,
    saved_sharding,
)
from jaxckpt._model.dtypes import DTYPES, dtype_name, is_lossless
from jaxckpt._model.grid import Spec, spec_of
from jaxckpt._model.records import Manifest
from jaxckpt._model.tree import numbers_of, user_objects_of
from jaxckpt._model.values import KINDS, NUMBER_KINDS, PYTHON_KINDS
from jaxckpt._options import Options
from jaxckpt._restore.differences import AcceptedDifferences
from jaxckpt._restore.match import (
    EXTRA,
    Assembly,
    LeafRequests,
    Match,
    RestoreRequest,
    Uncommitted,
    is_array_like,
    match_paths,
    requested_casts,
    unrestorable_reason,
)
from jaxckpt.errors import LayoutError, MismatchError, Problem, SpecError, show_count, show_path

_Dtype = np.dtype[Any]


@dataclass(frozen=True, slots=True)
class LeafForm:
    """The form in which a saved leaf is restored. `resolve` shares one among all leaves with equal results."""

    kind: str
    """One of `KINDS`."""

    cast: _Dtype | None = None
    """The dtype that the stored one is cast to, if any."""

    sharding: Sharding | PlannedSharding | None = None
    """The sharding, for kinds "jax" and "key". None: the array is uncommitted, on JAX's default device."""

    weak: bool = False
    """Whether the array gets a weak type, as jnp.asarray(0.5) has."""

    is_reference: bool = False
    """Whether the leaf is a jax.Ref to the array."""

    @property
    def on_devices(self) -> bool:
        return KINDS[self.kind].on_devices


@dataclass(frozen=True, slots=True)
class Resolved:
    """What each leaf of a checkpoint is restored as, and how the tree is assembled from the leaves."""

    leaves: Mapping[int, LeafForm]
    """By leaf number in the checkpoint."""

    assembly: Assembly

    paths: Mapping[int, str]
    """The path of each of these leaves in the restored tree, by number."""

    accepted: AcceptedDifferences | None = None
    """The differences between target and checkpoint that `strict` accepts."""

    unproven: Mapping[int, Problem] = field(default_factory=dict[int, Problem])
    """The problem of each leaf, by number, that exists if its cast changes any of its values."""

    unsplit: Sequence[int] = ()
    """Numbers of the arrays that are replicated because neither `specs=` nor the checkpoint has a spec for them."""


@functools.cache
def host_leaf(kind: str, cast: _Dtype | None = None) -> LeafForm:
    """What a leaf is restored as without devices: kind "numpy" for kinds that are restored onto devices."""
    return LeafForm("numpy" if KINDS[kind].on_devices else kind, cast)


def host_leaves(manifest: Manifest, dtype: Dtypes, options: Options) -> Resolved:
    """What the leaves of the saved tree are restored as without devices.

    Raises MismatchError that lists every leaf that cannot be cast.
    """
    request = RestoreRequest(dtype=dtype)
    match, _ = match_paths(manifest, request)
    requests = match.requests
    if dtype is None:
        forms = {number: host_leaf(manifest.leaves[number].kind) for number in requests.numbers}
        return Resolved(forms, match.assembly, dict(zip(requests.numbers, requests.paths, strict=True)))
    leaves = (TypedLeaf(manifest, manifest.leaves[number]) for number in requests.numbers)
    policies = resolve_policies(options.cast, requests.paths, leaves)
    casts, losses = requested_casts(manifest, match, request, policies)
    if losses:
        _raise_problems(manifest, request, match, losses, [], [])
    groups = _group(manifest, requests, {}, casts, policies)
    return _resolved(groups, [host_leaf(group.leaf.kind, group.cast) for group in groups], match)


def resolve(manifest: Manifest, request: RestoreRequest, options: Options) -> Resolved:
    """Decide, after `match_paths`, the form in which each leaf is restored, and how the tree is built from the leaves.

    Raises MismatchError, SpecError or LayoutError, each listing every leaf at fault. A leaf that fails a check is not
    laid out, because its shape differs from the requested shape.
    """
    match, differences = match_paths(manifest, request)
    specs = {} if request.specs is None else _requested_specs(manifest, match.requests, request)
    leaves = (TypedLeaf(manifest, manifest.leaves[number]) for number in match.requests.numbers)
    policies = resolve_policies(options.cast, match.requests.paths, leaves)
    casts, losses = ({}, []) if request.dtype is None else requested_casts(manifest, match, request, policies)
    warn_of_orders(
        zip(match.requests.paths, match.requests.values, strict=True),
        "restores make the default one, and jax.device_put with the target's format changes it",
    )
    groups = _group(manifest, match.requests, specs, casts, policies)
    checked, mismatches = _check(groups)
    laid_out, misfits, unavailable = _assign_shardings(request, groups, checked, options)
    mismatches = [*differences, *losses, *mismatches]
    if mismatches or misfits or unavailable:
        _raise_problems(manifest, request, match, mismatches, misfits, unavailable)
    resolved = _resolved(groups, laid_out, match)
    return resolved if request.mesh is None else replace(resolved, unsplit=_unsplit(request.mesh, groups, laid_out))


def _resolved(groups: Sequence[_Group], form_by_group: Sequence[LeafForm | None], match: Match) -> Resolved:
    """The result, by leaf number, of the result for each group."""
    numbers = match.requests.numbers
    forms: dict[int, LeafForm] = {}
    unproven: dict[int, Problem] = {}
    for group, form in zip(groups, form_by_group, strict=True):
        if form is not None:
            of_group = [numbers[index] for index in group.indices]
            forms |= dict.fromkeys(of_group, form)
            if reason := _doubt(group, form):
                unproven |= zip(of_group, group.problems(reason), strict=True)
    paths = dict(zip(numbers, match.requests.paths, strict=True))
    return Resolved(forms, match.assembly, paths, match.accepted, unproven)


def _raise_problems(
    manifest: Manifest,
    request: RestoreRequest,
    match: Match,
    mismatches: Sequence[Problem],
    misfits: Sequence[Problem],
    unavailable: Sequence[Problem],
) -> None:
    """Raise one error: for problems of layouts if there are any, otherwise for the mismatches."""
    if unavailable:
        raise LayoutError.of(
            f"cannot restore {show_count(len(unavailable), 'leaf')} in the saved layout",
            unavailable,
            "Pass mesh= to carry their specs over to another mesh by axis name, or target= with the shardings wanted,"
            " or use jaxckpt.load_numpy for host arrays",
        )
    require_fit(misfits)
    n_leaves, n_saved = show_count(len(mismatches), "leaf"), f"{len(manifest.leaves):,}"
    if not match.has_any_match:
        head = f"none of the target's {n_leaves} would come from the checkpoint, which has {n_saved}"
    elif request.target is None:
        head = f"{n_leaves} cannot be restored as saved"
    else:
        head = f"target and checkpoint differ in {n_leaves}; the checkpoint has {n_saved}"
    raise MismatchError.of(head, mismatches, *match.remedies, listed=_mismatch_lines(mismatches))


_SHOWN_EXTRA = 3
"""The most extra leaves of a container that are listed one by one, so that they do not bury the other problems."""


def _mismatch_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """A line for each problem, and one for all extra leaves of a container if they are many."""
    extra: dict[str, list[str]] = {}
    for problem in problems:
        path = problem.leaf or ""
        if problem.reason == f"is {EXTRA}" and "/" in path:
            extra.setdefault(path.partition("/")[0], []).append(path)
    many = {paths[0]: (container, len(paths)) for container, paths in extra.items() if len(paths) > _SHOWN_EXTRA}
    grouped = {path for container, _ in many.values() for path in extra[container]}
    for problem in problems:
        path = problem.leaf or ""
        if path in many:
            container, count = many[path]
            yield f"{show_path(path)} and {count - 1:,} more leaves below {show_path(container)} are {EXTRA}"
        elif path not in grouped:
            yield str(problem)


# Grouping -------------------------------------------------------------------------------------------------


class _Reason(NamedTuple):
    """A `Problem` without the path of its leaf."""

    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Saved leaves with equal requests. 20,000 leaves are checked and laid out as a few groups."""

    requests: LeafRequests
    indices: list[int]
    """Indices of the leaves in `requests`."""

    leaf: TypedLeaf
    """The first leaf of the group."""

    spec: Spec | None
    """The spec that `specs=` gives them, if any."""

    dtype: _Dtype | None
    """The dtype that `dtype=` gives them, if any."""

    policy: str
    """What `Options.cast` allows for them."""

    @property
    def requested(self) -> Any:
        """The leaf of the target; None if the leaves are restored as they were saved."""
        return self.requests.values[self.indices[0]]

    @property
    def cast(self) -> _Dtype | None:
        """The dtype that `dtype=` gives them, unless they have it."""
        return None if self.dtype is None or self.leaf.dtype == self.dtype else self.dtype

    @property
    def paths(self) -> list[str]:
        return [self.requests.paths[index] for index in self.indices]

    def problems(self, reason: _Reason) -> Iterator[Problem]:
        """The same problem for each leaf."""
        return (Problem(path, *reason) for path in self.paths)


def _requested_specs(manifest: Manifest, requests: LeafRequests, request: RestoreRequest) -> dict[str, Spec]:
    """The spec of each requested path for which `specs=` has one. Raises SpecError."""
    asked = zip(requests.paths, requests.numbers, requests.values, strict=True)
    leaves = [(path, TypedLeaf(manifest, manifest.leaves[number]), value) for path, number, value in asked]
    states = {number for _, node in user_objects_of(manifest.tree) for number in numbers_of(node)}
    in_states = {manifest.leaves[number].path for number in states}
    taking = [(path, leaf, value) for path, leaf, value in leaves if _takes_spec(leaf, value, in_states)]
    on_host = {path for path, leaf, value in taking if value is None and not leaf.on_devices}
    return resolve_specs(request.specs, [(path, leaf) for path, leaf, _ in taking], on_host)


def _takes_spec(leaf: TypedLeaf, requested: Any, in_states: Container[str]) -> bool:
    """Whether `specs=` may apply to a leaf: to an array without a target, unless it belongs to the state of an object,
    and to what the target describes as an array on devices."""
    if requested is None:
        return leaf.on_devices or (leaf.kind == "numpy" and leaf.path not in in_states)
    return is_array_like(type(requested)) and not isinstance(requested, (np.ndarray, np.generic))


def _group(
    manifest: Manifest,
    requests: LeafRequests,
    specs: Mapping[str, Spec],
    casts: Mapping[str, _Dtype],
    policies: Mapping[str, str],
) -> list[_Group]:
    """The requests in groups, by the properties of the saved leaf and the target's leaf that determine the result."""
    leaves = manifest.leaves
    indices_by_key = collections.defaultdict[Hashable, list[int]](list)
    asked = zip(requests.paths, requests.numbers, requests.values, strict=True)
    for index, (path, number, requested) in enumerate(asked):
        record = leaves[number]
        spec = specs.get(path) if specs else None
        dtype = casts.get(path) if casts else None
        key = (record.kind, record.impl, record.stack, record.layout, record.weak, spec, dtype, policies[path])
        if requested is not None:
            attributes = _attributes(type(requested))
            if attributes is None or record.value is not None:  # the result depends on the value
                key = path
            else:
                key = (key, type(requested), attributes(requested))
        indices_by_key[key].append(index)
    groups: list[_Group] = []
    for indices in indices_by_key.values():
        path, leaf = requests.paths[indices[0]], TypedLeaf(manifest, leaves[requests.numbers[indices[0]]])
        groups.append(_Group(requests, indices, leaf, specs.get(path), casts.get(path), policies[path]))
    return groups


@functools.cache
def _attributes(kind: type) -> Callable[[Any], Hashable] | None:
    """A function that returns the attributes of a target's leaf that determine what a saved array is restored as; None
    for a value."""
    if not is_array_like(kind):
        return None
    if issubclass(kind, (Sharding, Format)):
        return lambda requested: requested
    names = ["shape", "dtype"]
    if issubclass(kind, jax.ShapeDtypeStruct):
        others = "_dll", "is_ref", "vma", "manual_axis_type"
        names += ["sharding", "weak_type", *(name for name in others if hasattr(kind, name))]
    elif issubclass(kind, jax.Array):
        names += ["sharding", "committed", *(["weak_type"] if hasattr(kind, "weak_type") else [])]  # PRNG keys lack it
    elif is_reference(kind):
        names.append("sharding")
    return operator.attrgetter(*names)


# Checking kind, shape and dtype ---------------------------------------------------------------------------


def _check(groups: Sequence[_Group]) -> tuple[list[LeafForm | None], list[Problem]]:
    """What each group is restored as, without a sharding yet; None and a problem if the request cannot be satisfied."""
    forms = [_leaf_form(group) for group in groups]
    problems = [
        problem
        for group, form in zip(groups, forms, strict=True)
        if isinstance(form, _Reason)
        for problem in group.problems(form)
    ]
    return [None if isinstance(form, _Reason) else form for form in forms], problems


def _leaf_form(group: _Group) -> LeafForm | _Reason:
    """The form for a leaf of a target, or for None: as it was saved, but on devices if `specs=` has a spec for it."""
    leaf, requested, policy, dtype = group.leaf, group.requested, group.policy, group.dtype
    if isinstance(requested, Tracer):
        return _Reason("is a tracer in the target: call restore outside of jit, grad and vmap")
    if leaf.kind == "key" and key_dtype(leaf.record.impl or "") is None:
        return _Reason(
            f"has PRNG keys of implementation {leaf.record.impl!r} in the checkpoint, which JAX does not know in this"
            " program; leave it out with select=, or read its raw data with load_numpy"
        )
    if requested is None or isinstance(requested, (Sharding, Format)):
        dtype = group.cast
        if isinstance(requested, Format) and requested.sharding is None:
            return _Reason("is a Format without a sharding in the target")
        is_value = not leaf.is_array or leaf.kind in ("str", "bytes")
        if is_value or (requested is None and not leaf.on_devices and group.spec is None):
            return host_leaf(leaf.kind) if dtype is None else LeafForm(leaf.kind, dtype)
        form = _device_leaf(leaf, requested, dtype, leaf.record.weak and dtype is None, policy)
        if isinstance(form, _Reason) and requested is None and not leaf.on_devices:
            keep = "without a spec (None from a function), it comes back as a NumPy array"
            return form._replace(remedy=f"{form.remedy}; {keep}")
        return form
    is_ref = requested.is_ref if isinstance(requested, jax.ShapeDtypeStruct) else is_reference(type(requested))
    if is_ref or isinstance(requested, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        if axes := _manual_axes(requested):
            return _Reason(
                f"describes an array inside shard_map (manual mesh axes {', '.join(axes)}) in the target: give the"
                " array outside of shard_map"
            )
        cast = _cast_dtype(leaf, requested, policy, dtype)
        if isinstance(cast, _Reason):
            return cast
        if isinstance(requested, (np.ndarray, np.generic)):
            return LeafForm("numpy" if isinstance(requested, np.ndarray) else "numpy_scalar", cast)
        # PRNG keys have no weak type, and a jax.Ref has that of its array.
        typed = getattr(getattr(requested, "aval", None), "inner_aval", requested)
        weak = dtype is None and getattr(typed, "weak_type", False)
        form = _device_leaf(leaf, requested, cast, weak, policy)
        return replace(form, is_reference=True) if is_ref and isinstance(form, LeafForm) else form
    if type(requested) in PYTHON_KINDS:
        return _python_leaf(leaf, PYTHON_KINDS[type(requested)])
    return _Reason(unrestorable_reason(requested, is_container=False))


def _manual_axes(requested: Any) -> list[str]:
    """The mesh axes over which a leaf of a target is manual, as inside shard_map."""
    manual = getattr(requested, "manual_axis_type", None)
    groups = (getattr(manual, name, ()) for name in ("varying", "unreduced", "reduced"))
    return sorted({*(getattr(requested, "vma", None) or ()), *itertools.chain.from_iterable(groups)})


def _device_leaf(leaf: TypedLeaf, requested: Any, cast: _Dtype | None, weak: bool, policy: str) -> LeafForm | _Reason:
    """An array on devices, with a dtype that JAX supports in its current configuration, and in the default order in
    device memory, because restore makes no other."""
    if leaf.kind == "key":
        form = LeafForm("key")
    else:
        dtype = leaf.dtype if cast is None else cast
        supported = np.dtype(jax.dtypes.canonicalize_dtype(dtype))  # pyright: ignore[reportUnknownMemberType]
        if supported != dtype and policy == "safe":
            return _Reason(
                f"would be {dtype}, which JAX converts to {supported} while jax_enable_x64 is off: a lossy cast",
                'jax.config.update("jax_enable_x64", True) keeps 64 bits, as do NumPy arrays in the target and'
                ' load_numpy; Options(cast="unsafe") restores 32 bits',
            )
        form = LeafForm("jax", cast if supported == dtype else supported, weak=weak)
    problem = order_problem(requested, form.cast or leaf.dtype, leaf.shape)
    return _Reason(problem) if problem else form


_OTHER_SHAPE = "leave leaves of another shape out with select=, or change their shape by Rules in rename="


def _cast_dtype(leaf: TypedLeaf, requested: Any, policy: str, dtype: _Dtype | None) -> _Dtype | _Reason | None:
    """The dtype to cast to for an array in a target; None for the stored dtype. `dtype` overrides the target's."""
    is_key = jnp.issubdtype(requested.dtype, jax.dtypes.prng_key)
    if not is_key and dtype_name(np.dtype(requested.dtype)) not in DTYPES:
        return _Reason(f"is an array of dtype {requested.dtype} in the target, which no checkpoint can contain")
    if leaf.kind in ("str", "bytes") or (is_key and not leaf.is_array):
        return _Reason(f"is {leaf.kind} in the checkpoint, {'PRNG keys' if is_key else 'an array'} in the target")
    differs = f"has dtype {leaf.dtype} in the checkpoint, {requested.dtype} in the target"
    if is_key != (leaf.kind == "key"):
        advice = (
            "a key, and use jax.random.key_data" if leaf.kind == "key" else "an array, and use jax.random.wrap_key_data"
        )
        return _Reason(f"{differs}; PRNG keys do not cast: restore it as {advice}")
    if leaf.shape != tuple(requested.shape):
        return _Reason(
            f"has shape {leaf.shape} in the checkpoint, {tuple(requested.shape)} in the target", _OTHER_SHAPE
        )
    if not leaf.is_array:
        return _cast_number(leaf, np.dtype(requested.dtype), policy)
    if dtype is not None:  # checked when it was given
        return None if leaf.dtype == dtype else dtype
    if leaf.dtype == requested.dtype:
        return None
    if is_key:
        return _Reason(f"{differs}; PRNG keys do not cast")
    if judge_cast(leaf.dtype, np.dtype(requested.dtype), policy, leaf.shape) is Verdict.REFUSED:
        return _Reason(f"{differs}: a lossy cast", ALLOW_LOSS)
    return np.dtype(requested.dtype)


def _doubt(group: _Group, form: LeafForm) -> _Reason | None:
    """What is wrong with a group if its cast changes values; None if the cast is made in any case."""
    leaf, cast = group.leaf, form.cast
    if cast is None or not leaf.is_array or leaf.kind == "key":
        return None
    may_round = group.dtype is not None
    if judge_cast(leaf.dtype, cast, group.policy, leaf.shape, may_round=may_round) is not Verdict.DEPENDS_ON_VALUES:
        return None
    differs = f", but dtype= gives {cast}" if may_round else f" in the checkpoint, {cast} in the target"
    return _Reason(f"has dtype {leaf.dtype}{differs}: a lossy cast", ALLOW_LOSS)


def _cast_number(leaf: TypedLeaf, dtype: _Dtype, policy: str) -> _Dtype | _Reason:
    """The dtype for a Python number: any dtype that holds its value, and for a float any float dtype, as for JAX's weak
    types. Otherwise the reason against it."""
    value, cast_value, fits = leaf.value, None, False
    with contextlib.suppress(TypeError, ValueError, OverflowError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reported as a problem below instead of a NumPy warning
        cast_value = np.asarray(value).astype(dtype).item()
        inexact = jnp.complexfloating if isinstance(value, complex) else jnp.inexact
        weak = isinstance(value, (float, complex)) and jnp.issubdtype(dtype, inexact)
        is_same = cast_value == value and (value != 0 or str(complex(cast_value)) == str(complex(value)))  # -0.0
        fits = is_same or (
            weak and np.isfinite(cast_value) == np.isfinite(value) and np.isnan(cast_value) == np.isnan(value)
        )
    if cast_value is not None and (fits or policy == "unsafe"):
        return dtype
    shown = (leaf.record.value or "")[:40]
    differs = f"is {leaf.kind} {shown} in the checkpoint, {dtype} in the target"
    if cast_value is None:
        return _Reason(f"{differs}: the value cannot be cast")
    return _Reason(f"{differs}: a lossy cast", ALLOW_LOSS)


def _python_leaf(leaf: TypedLeaf, kind: str) -> LeafForm | _Reason:
    """A Python value of a kind, from a saved value or from an array of one number."""
    saved = leaf.kind if not leaf.is_array or leaf.kind in ("str", "bytes") else None
    if saved == kind:
        return LeafForm(kind)
    if kind in NUMBER_KINDS:
        convert = KINDS[kind].type
        if saved in NUMBER_KINDS and NUMBER_KINDS.index(saved) < NUMBER_KINDS.index(kind):
            value = leaf.value
            with contextlib.suppress(OverflowError):
                if convert(value) == value or value != value:
                    return LeafForm(kind)
        if saved is None and leaf.kind != "key" and leaf.shape == () and is_lossless(leaf.dtype, np.dtype(convert)):
            return LeafForm(kind)
    saved_as = f"{leaf.dtype}{list(leaf.shape)}" if saved is None else saved
    return _Reason(f"is {saved_as} in the checkpoint, {kind} in the target")


# Laying out -----------------------------------------------------------------------------------------------


def _assign_shardings(
    request: RestoreRequest, groups: Sequence[_Group], forms: Sequence[LeafForm | None], options: Options
) -> tuple[list[LeafForm | None], list[Problem], list[Problem]]:
    """The forms with their shardings: from the target, otherwise from mesh= and specs=, otherwise as saved.

    The problems are leaves that do not fit their specs, and leaves whose saved devices do not exist here.
    """
    shardings: dict[int, Sharding | PlannedSharding | None] = {}  # by the index of the group
    misfits: list[Problem] = []
    unavailable: list[Problem] = []
    by_mesh: dict[int, _Group] = {}
    saved_shardings: dict[int, Sharding | LayoutError | None] = {}
    for index, (group, form) in enumerate(zip(groups, forms, strict=True)):
        if form is None or not form.on_devices:
            continue
        leaf, sharding = group.leaf, _requested_sharding(group.requested)
        if sharding is not None:
            sharding = _fit_sharding(sharding, leaf.shape, request, options)
        elif request.mesh is not None:
            by_mesh[index] = group
        elif not _is_uncommitted(group.requested) and leaf.record.layout is not None:
            layout = leaf.record.layout
            if layout not in saved_shardings:
                saved_shardings[layout] = _try_saved_sharding(leaf.manifest, layout)
            sharding = saved_shardings[layout]
        if isinstance(sharding, LayoutError):
            unavailable.extend(group.problems(_Reason(f"was saved as {leaf.layout}, which {sharding}")))
        elif isinstance(sharding, _Reason):
            misfits.extend(group.problems(sharding))
        else:
            shardings[index] = sharding
    if request.mesh is not None and by_mesh:
        axes = mesh_axes(request.mesh)
        leaf_groups = [
            LeafGroup(group.paths, group.leaf.shape, group.leaf.spec, group.spec) for group in by_mesh.values()
        ]
        specs, problems = assign_specs(axes, leaf_groups, options)
        misfits.extend(problems)
        for (index, group), spec in zip(by_mesh.items(), [] if problems else specs, strict=not problems):
            sharding = _on_mesh(request, axes, spec, group)
            if isinstance(sharding, _Reason):
                misfits.extend(group.problems(sharding))
            else:
                shardings[index] = sharding
    laid_out = [form and replace(form, sharding=shardings.get(index)) for index, form in enumerate(forms)]
    return laid_out, misfits, unavailable


def _unsplit(mesh: Any, groups: Sequence[_Group], forms: Sequence[LeafForm | None]) -> list[int]:
    """Numbers of the arrays that `mesh=` replicates on several devices without being asked to."""
    if math.prod(mesh_axes(mesh).values()) == 1:
        return []
    return [
        group.requests.numbers[index]
        for group, form in zip(groups, forms, strict=True)
        if form is not None and form.on_devices and _requested_sharding(group.requested) is None
        if group.spec is None and group.leaf.mesh is None and group.leaf.shape
        for index in group.indices
    ]


def _try_saved_sharding(manifest: Manifest, layout: int) -> Sharding | LayoutError | None:
    try:
        return saved_sharding(manifest, layout)
    except LayoutError as error:
        return error


def _is_uncommitted(requested: Any) -> bool:
    """Whether a leaf of a target requests no particular device."""
    return isinstance(requested, Uncommitted) or (isinstance(requested, jax.Array) and not requested.committed)


def _requested_sharding(requested: Any) -> Sharding | None:
    """The sharding that a leaf of a target requests."""
    if requested is None or isinstance(requested, Sharding):
        return requested
    return None if _is_uncommitted(requested) else requested.sharding


def _on_mesh(
    request: RestoreRequest, axes: Mapping[str, int], spec: Spec, group: _Group
) -> NamedSharding | PlannedSharding | _Reason:
    if not isinstance(request.mesh, Mesh) or request.devices_per_process is not None:
        return PlannedSharding(tuple(axes.items()), spec, request.devices_per_process or 1)
    try:
        reduced = group.leaf.reduced if group.spec is None else ()
        return named_sharding(request.mesh, spec, group.leaf.memory, reduced)
    except LayoutError as error:
        return _Reason(f"cannot be laid out: {error}")


def _fit_sharding(
    sharding: Sharding, shape: tuple[int, ...], request: RestoreRequest, options: Options
) -> Sharding | PlannedSharding | _Reason:
    """A sharding from the target, if the leaf's shape allows it."""
    if not isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            return _Reason(f"cannot be laid out: {error}")
        return sharding
    axes = dict(sharding.mesh.shape)
    if not isinstance(sharding.mesh, Mesh) and request.devices_per_process is None:
        mesh = next((mesh for mesh in (request.mesh, mesh_in_context()) if isinstance(mesh, Mesh)), None)
        if mesh is None or dict(mesh.shape) != axes:
            return _Reason(
                f"cannot be laid out: its sharding is on the AbstractMesh {axes}, which has no devices (found"
                f" {'none' if mesh is None else dict(mesh.shape)})",
                "pass a mesh with these axis sizes as mesh= or to jax.set_mesh, or make the target under"
                " jax.set_mesh(mesh)",
            )
        sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    try:
        requested_spec = spec_of(sharding.spec)
    except SpecError as error:
        return _Reason(f"cannot be laid out: {error}")
    (spec,), problems = assign_specs(axes, [LeafGroup([""], shape, requested=requested_spec)], options)
    if problems:
        return _Reason(problems[0].reason, problems[0].remedy)
    if not isinstance(sharding.mesh, Mesh):
        return PlannedSharding(tuple(axes.items()), spec, request.devices_per_process or 1)
    return sharding if spec == requested_spec else sharding.update(spec=partition_spec(spec, reduced_axes(sharding)))
