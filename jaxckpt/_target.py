"""What is wanted of each saved leaf: the user's target, mesh, specs, select and rename held against the manifest."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxckpt._errors import InputError, LayoutError, MismatchError, SpecError, TreeError, listing
from jaxckpt._grid import Spec, show_spec, spec_of
from jaxckpt._layout import (
    PlannedSharding,
    Specs,
    by_axis_name,
    fit_spec,
    mesh_axes,
    partition_spec,
    resolve_specs,
    saved_sharding,
    show_layout,
)
from jaxckpt._manifest import LeafRecord, Manifest
from jaxckpt._options import Options
from jaxckpt._tree import (
    DTYPES,
    Select,
    Structure,
    Tree,
    closest,
    decode_value,
    flatten,
    lossless,
    nested,
    paths_of,
    prune,
    renamer,
    selector,
    show,
    structure_of,
    subtree,
    unflatten,
)

Rename = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a restore."""

    target: Tree = None
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
    specs: Specs = None
    select: Select | None = None
    rename: Rename | None = None
    strict: bool = True
    devices_per_process: int | None = None
    """For a plan on a mesh that is not here; None where the arrays will be made."""


class Uncommitted(jax.ShapeDtypeStruct):
    """In a target: an array that is not committed to its device, without its data."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What saved leaves are to become; a `resolve` makes one for all that are to become the same."""

    kind: Literal["jax", "key", "numpy", "numpy_scalar", "str", "bytes", "python"]

    dtype: Any = None
    """Wanted NumPy dtype, where it is another than the stored one; the Python type for kind "python"."""

    sharding: Sharding | PlannedSharding | None = None
    """For kinds "jax" and "key"; None puts it, uncommitted, on JAX's default device."""

    @property
    def cast(self) -> np.dtype[Any] | None:
        """The dtype that the stored one is cast to, if any."""
        return self.dtype if isinstance(self.dtype, np.dtype) else None


Build = Callable[[Mapping[int, Any]], Tree]
"""Makes the tree from the leaves' values by leaf number."""


@functools.cache
def numpy_goal(kind: str) -> Goal:
    """What a leaf of a kind is without devices."""
    return Goal("numpy" if kind in ("jax", "key") else kind)  # pyright: ignore[reportArgumentType]


def numpy_goals(manifest: Manifest, select: Select | None) -> tuple[dict[int, Goal], Build]:
    """The saved tree without devices, or what is selected of it."""
    numbers = _selected(manifest, select)
    goals = {number: numpy_goal(manifest.leaves[number].kind) for number in numbers}
    return goals, _builder(manifest.tree, manifest, goals)


def _builder(structure: Structure, manifest: Manifest, goals: Mapping[int, Goal]) -> Build:
    """Makes the tree of the leaves that have a goal."""
    some = len(goals) < len(manifest.leaves)
    return functools.partial(unflatten, prune(structure, {number: number for number in goals}) if some else structure)


def narrowed(manifest: Manifest, select: Select | None, rename: Rename | None) -> Manifest:
    """The manifest of the selected leaves alone, by their new paths; the data stays where it is. Raises TreeError."""
    structure, _ = _renamed(manifest, rename)
    structure = prune(structure, {number: number for number in _selected(manifest, select)})
    paths, numbers = paths_of(structure, len(manifest.leaves), 1 << 62)
    leaves = [
        msgspec.structs.replace(manifest.leaves[number], path=path) for path, number in zip(paths, numbers, strict=True)
    ]
    tree = prune(structure, {old: new for new, old in enumerate(numbers)})
    return msgspec.structs.replace(manifest, tree=tree, leaves=leaves)


@dataclass(frozen=True, slots=True)
class _SavedLeaf:
    """What a `specs` function is given of a saved leaf."""

    shape: tuple[int, ...]
    dtype: Any
    spec: Spec


def _selected(manifest: Manifest, select: Select | None) -> Sequence[int]:
    """Numbers of the leaves that `select` selects by their saved paths. Raises TreeError if there is none."""
    if select is None:
        return range(len(manifest.leaves))
    selected = selector(select)
    chosen = [number for number, leaf in enumerate(manifest.leaves) if selected(leaf.path)]
    if not chosen and manifest.leaves:
        raise TreeError(f"select={select!r} matches none of the {len(manifest.leaves)} leaves")
    return chosen


def resolve(manifest: Manifest, asked: Request, options: Options) -> tuple[dict[int, Goal], Build]:
    """Match the target with the checkpoint: what becomes of each leaf, and how the tree is built of them.

    Raises MismatchError, SpecError or LayoutError, each listing every leaf at fault.
    """
    if asked.specs is not None and asked.mesh is None:
        raise InputError("specs= needs mesh=: the mesh that the specs are of")
    chosen = _selected(manifest, asked.select)
    structure, found = _renamed(manifest, asked.rename)
    wanted = found
    if len(chosen) < len(found):
        among = set(chosen)
        wanted = {path: number for path, number in found.items() if number in among}
    layouts = _Layouts(manifest, asked, options, wanted)
    if asked.target is None:
        goals = {number: layouts.saved_goal(path, number) for path, number in wanted.items()}
        layouts.raise_problems()
        return goals, _builder(structure, manifest, goals)
    return _match(manifest, asked, layouts, structure, found, wanted)


def _renamed(manifest: Manifest, rename: Rename | None) -> tuple[Structure, dict[str, int]]:
    """The structure as it is wanted, and the wanted path of each leaf."""
    if rename is None:
        return manifest.tree, manifest.numbers
    renamed = renamer(rename)
    numbers: dict[str, int] = {}
    for number, leaf in enumerate(manifest.leaves):
        path = renamed(leaf.path)
        if path in numbers:
            other = manifest.leaves[numbers[path]].path
            raise TreeError(f"rename= gives {show(other)} and {show(leaf.path)} the same path {path!r}")
        numbers[path] = number
    return structure_of(nested(numbers)), numbers


def _match(
    manifest: Manifest,
    asked: Request,
    layouts: _Layouts,
    structure: Structure,
    found: Mapping[str, int],
    wanted: Mapping[str, int],
) -> tuple[dict[int, Goal], Build]:
    """Goals for a target tree, or a prefix of one."""
    leaves, _ = flatten(asked.target)
    treedef = jax.tree_util.tree_structure(asked.target)
    selected = selector(asked.select)
    goals: dict[int, Goal] = {}
    missing: list[str] = []
    parts: list[int | Build] = []
    """Number of each leaf of the target, or what makes it, or the tree that stands for it."""
    for leaf in leaves:
        number = wanted.get(leaf.path)
        if number is not None:
            goals[number] = layouts.target_goal(leaf.path, number, leaf.value)
            parts.append(number)
            continue
        below = _below(leaf.path, wanted) if isinstance(leaf.value, Sharding) else []
        if below:
            for path in below:
                goals[wanted[path]] = layouts.target_goal(path, wanted[path], leaf.value)
            part = prune(subtree(structure, leaf.path), {wanted[path]: wanted[path] for path in below})
            parts.append(functools.partial(unflatten, part))
            continue
        # A function, such as an activation in an Equinox module, is no state that a checkpoint could lack.
        kept = leaf.path in found or callable(leaf.value) or not selected(leaf.path)
        abstract = isinstance(leaf.value, (jax.ShapeDtypeStruct, Sharding))
        if not kept and (asked.strict or abstract):
            hint = closest(leaf.path, wanted) if len(missing) < 3 else ""  # finding it takes a look at every path
            missing.append(f"{show(leaf.path)} is not in the checkpoint{hint}")
        parts.append(functools.partial(_constant, leaf.value))
    extra = [path for path, number in wanted.items() if number not in goals] if asked.strict else []
    _raise_mismatch(manifest, missing, extra, layouts)

    def build(values: Mapping[int, Any]) -> Tree:
        leaves = [values[part] if isinstance(part, int) else part(values) for part in parts]
        return jax.tree_util.tree_unflatten(treedef, leaves)

    return goals, build


def _constant(value: Any, values: Mapping[int, Any]) -> Any:
    return value


def _below(path: str, wanted: Mapping[str, int]) -> list[str]:
    return list(wanted) if not path else [found for found in wanted if found.startswith(f"{path}/")]


def _raise_mismatch(manifest: Manifest, missing: list[str], extra: list[str], layouts: _Layouts) -> None:
    layouts.raise_problems(only_layouts=True)
    surplus = [f"{show(path)} is in the checkpoint but not in the target" for path in extra]
    problems = [*missing, *surplus, *layouts.mismatches]
    if problems:
        ways = [
            "strict=False keeps the target's value for missing leaves and leaves out extra ones"
            if missing or extra
            else "",
            "rename= matches other names" if missing and extra else "",
            'Options(cast="unsafe") allows lossy casts' if any("lossy" in text for text in layouts.mismatches) else "",
        ]
        raise MismatchError(
            f"target and checkpoint differ in {len(problems)} leaves; the checkpoint has {len(manifest.leaves)}:\n"
            f"{listing(problems)}\n" + "; ".join(way for way in ways if way),
            problems,
        )


class _Layouts:
    """Finds the sharding and dtype of each wanted leaf, and collects what does not fit."""

    def __init__(self, manifest: Manifest, asked: Request, options: Options, wanted: Mapping[str, int]) -> None:
        self._manifest = manifest
        self._asked = asked
        self._options = options
        self._axes = {} if asked.mesh is None else mesh_axes(asked.mesh)
        self._specs: dict[str, Spec] = {}
        if asked.specs is not None:
            leaves = ((path, number, manifest.leaves[number].kind) for path, number in wanted.items())
            arrays = [(path, self._as_leaf(number)) for path, number, kind in leaves if kind in ("jax", "key")]
            self._specs = resolve_specs(asked.specs, arrays)
        self._goals: dict[Hashable, Goal] = {}
        self._saved: dict[int, Sharding | LayoutError | None] = {}
        self.mismatches: list[str] = []
        self._spec_problems: list[str] = []
        self._unavailable: list[str] = []
        if asked.mesh is not None and asked.specs is None and math.prod(self._axes.values()) > 1:
            self._require_common_axis(wanted)

    def _require_common_axis(self, wanted: Mapping[str, int]) -> None:
        """A mesh that shares no axis name with the saved specs would silently replicate everything."""
        specs = {number: spec for number in range(len(self._manifest.layouts)) if (spec := self._layout_spec(number))}
        split = {
            path: specs[layout]
            for path, number in wanted.items()
            if (layout := self._manifest.leaves[number].layout) in specs
        }
        named = {axis for spec in split.values() for entry in spec for axis in entry}
        if named and not named & set(self._axes):
            raise SpecError(
                f"the mesh {self._axes} has none of the axes that the saved specs name ({', '.join(sorted(named))}),"
                " so every leaf would be replicated; pass specs=, or specs=PartitionSpec() if that is meant. Leaves:\n"
                + listing(f"{show(path)}: {show_spec(spec)}" for path, spec in split.items())
            )

    def _as_leaf(self, number: int) -> _SavedLeaf:
        record = self._manifest.leaves[number]
        return _SavedLeaf(self._shape(record), self._dtype(record), self._saved_spec(record))

    def _saved_spec(self, record: LeafRecord) -> Spec:
        return () if record.layout is None else self._layout_spec(record.layout)

    def _layout_spec(self, number: int) -> Spec:
        return tuple(tuple(axes) for axes in self._manifest.layouts[number].spec)

    def _shape(self, record: LeafRecord) -> tuple[int, ...]:
        """The shape as the user knows it: of the keys, not of their raw data."""
        if record.stack is None:
            return ()
        shape = self._manifest.leaf_shape(record)
        return shape[:-1] if record.kind == "key" else shape

    def _dtype(self, record: LeafRecord) -> Any:
        if record.kind == "key":
            return _key_dtype(record.impl or "")
        return DTYPES[self._manifest.stacks[record.stack].dtype] if record.stack is not None else None

    # Goals -----------------------------------------------------------------------------------------------

    def saved_goal(self, path: str, number: int) -> Goal:
        """The leaf as it was saved."""
        record = self._manifest.leaves[number]
        if record.value is not None:
            return Goal("python")
        form = (record.kind, record.stack, record.layout, self._specs.get(path))
        return self._goals.get(form) or self._noted(form, self._saved_goal(path, record))

    def _saved_goal(self, path: str, record: LeafRecord) -> Goal:
        if record.value is not None:
            return Goal("python")
        if record.kind not in ("jax", "key"):
            return numpy_goal(record.kind)
        self._check_x64(path, self._dtype(record))
        return Goal(record.kind, None, self._sharding(path, record, None))  # pyright: ignore[reportArgumentType]

    def target_goal(self, path: str, number: int, wanted: Any) -> Goal:
        """The leaf as a target leaf, or a sharding for it, asks."""
        record = self._manifest.leaves[number]
        tell = _attributes(type(wanted))
        if tell is None or record.value is not None:
            return self._target_goal(path, record, wanted)
        form = (record.kind, record.stack, record.layout, self._specs.get(path), type(wanted), tell(wanted))
        return self._goals.get(form) or self._noted(form, self._target_goal(path, record, wanted))

    def _noted(self, form: Hashable, goal: Goal) -> Goal:
        """Remember the goal of a form of leaf; while there are problems not, so that each leaf tells its own."""
        if not (self.mismatches or self._spec_problems or self._unavailable):
            self._goals[form] = goal
        return goal

    def _target_goal(self, path: str, record: LeafRecord, wanted: Any) -> Goal:
        if isinstance(wanted, Sharding):
            if record.value is not None or record.kind in ("str", "bytes"):
                return self._saved_goal(path, record)
            self._check_x64(path, self._dtype(record))
            kind = "key" if record.kind == "key" else "jax"
            return Goal(kind, None, self._sharding(path, record, wanted))
        if isinstance(wanted, (jax.Array, jax.ShapeDtypeStruct)):
            # What is not committed asks for no device of its own.
            uncommitted = isinstance(wanted, Uncommitted) or (isinstance(wanted, jax.Array) and not wanted.committed)
            dtype = self._check_array(path, record, wanted)
            kind = "key" if record.kind == "key" else "jax"
            self._check_x64(path, dtype)
            given = None if uncommitted else wanted.sharding
            here = uncommitted and self._asked.mesh is None
            sharding = None if here else self._sharding(path, record, given)
            return Goal(kind, dtype, sharding)
        if isinstance(wanted, (np.ndarray, np.generic)):
            dtype = self._check_array(path, record, wanted)
            return Goal("numpy" if isinstance(wanted, np.ndarray) else "numpy_scalar", dtype)
        if type(wanted) in (bool, int, float, complex, str, bytes):
            return self._python_goal(path, record, type(wanted))
        self.mismatches.append(
            f"{show(path)} is a {type(wanted).__qualname__} in the target, which is no leaf to restore"
        )
        return Goal("python")

    def _python_goal(self, path: str, record: LeafRecord, kind: type) -> Goal:
        saved = record.kind if record.value is not None or record.kind in ("str", "bytes") else None
        if saved == kind.__name__:
            return Goal("python" if record.value is not None else kind.__name__)  # pyright: ignore[reportArgumentType]
        rank = ["bool", "int", "float", "complex"]
        if kind.__name__ in rank and saved in rank and rank.index(saved) < rank.index(kind.__name__):
            value: Any = decode_value(saved, record.value or "")
            with contextlib.suppress(OverflowError):
                if kind(value) == value or value != value:
                    return Goal("python", kind)
        if kind.__name__ in rank and saved is None and record.kind != "key" and self._shape(record) == ():
            dtype = self._dtype(record)
            if lossless(dtype, np.dtype(kind)):
                return Goal("python", kind)
        shape = f"{self._dtype(record)}{list(self._shape(record))}" if saved is None else saved
        self.mismatches.append(f"{show(path)} is {shape} in the checkpoint, {kind.__name__} in the target")
        return Goal("python")

    def _check_array(self, path: str, record: LeafRecord, wanted: Any) -> Any:
        """The dtype to convert to, if it is another; notes a mismatch of shape or dtype."""
        shape, saved = self._shape(record), self._dtype(record)
        if record.kind in ("str", "bytes"):
            self.mismatches.append(f"{show(path)} is {record.kind} in the checkpoint, an array in the target")
            return None
        if shape != tuple(wanted.shape):
            self.mismatches.append(
                f"{show(path)} has shape {shape} in the checkpoint, {tuple(wanted.shape)} in the target"
            )
            return None
        if saved is None:  # a Python number for a 0-d array: by its value
            return self._check_number(path, record, wanted)
        if saved == wanted.dtype:
            return None
        keys = [jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in (saved, wanted.dtype)]
        if any(keys):
            self.mismatches.append(
                f"{show(path)} has dtype {saved} in the checkpoint, {wanted.dtype} in the target; PRNG keys do not cast"
            )
            return None
        if self._options.cast == "safe" and not lossless(saved, np.dtype(wanted.dtype)):
            self.mismatches.append(
                f"{show(path)} has dtype {saved} in the checkpoint, {wanted.dtype} in the target: a lossy cast"
            )
        return np.dtype(wanted.dtype)

    def _check_number(self, path: str, record: LeafRecord, wanted: Any) -> Any:
        """A Python number becomes any dtype that has its value; a float any float, as JAX's weak types do."""
        value: Any = decode_value(record.kind, record.value or "")
        dtype = np.dtype(wanted.dtype)
        made = fits = None
        with contextlib.suppress(TypeError, ValueError, OverflowError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what NumPy would warn of is told below
            made = np.asarray(value).astype(dtype).item()
            weak = isinstance(value, float) and jnp.issubdtype(dtype, jnp.inexact)
            fits = made == value or (
                weak and np.isfinite(made) == np.isfinite(value) and np.isnan(made) == np.isnan(value)
            )
        if made is None or (not fits and self._options.cast == "safe"):
            self.mismatches.append(
                f"{show(path)} is {record.kind} {(record.value or '')[:40]} in the checkpoint, {dtype} in the target:"
                f" {'no cast can make it' if made is None else 'a lossy cast'}"
            )
        return dtype

    def _check_x64(self, path: str, dtype: Any) -> None:
        if isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:  # pyright: ignore[reportUnknownMemberType]
            self.mismatches.append(
                f"{show(path)} is {dtype}, which JAX here would make {jax.dtypes.canonicalize_dtype(dtype)}, a lossy"
                " cast: set jax_enable_x64, or ask for the smaller dtype in a target"
            )

    def _sharding(self, path: str, record: LeafRecord, given: Sharding | None) -> Sharding | PlannedSharding | None:
        """Where the leaf goes: as given, else by mesh= and specs=, else as saved."""
        shape = self._shape(record)
        if given is not None:
            return self._checked(path, given, shape)
        if self._asked.mesh is None:
            return self._as_saved(path, record)
        spec = self._specs.get(path)
        spec = by_axis_name(self._saved_spec(record), self._axes) if spec is None else spec
        spec, problem = fit_spec(self._axes, spec, shape, self._options)
        if problem:
            self._spec_problems.append(f"{show(path)}: {problem}")
            return None
        if isinstance(self._asked.mesh, Mesh) and self._asked.devices_per_process is None:
            return NamedSharding(self._asked.mesh, partition_spec(spec))
        return PlannedSharding(tuple(self._axes.items()), spec, self._asked.devices_per_process or 1)

    def _checked(self, path: str, sharding: Sharding, shape: tuple[int, ...]) -> Sharding | PlannedSharding | None:
        """A sharding that the target gave, if the leaf's shape allows it."""
        if isinstance(sharding, NamedSharding):
            axes = dict(sharding.mesh.shape)
            if not isinstance(sharding.mesh, Mesh) and self._asked.devices_per_process is None:
                found = [mesh for mesh in (self._asked.mesh, _mesh_in_context()) if isinstance(mesh, Mesh)]
                if not found or dict(found[0].shape) != axes:
                    instead = dict(found[0].shape) if found else "none"
                    self._spec_problems.append(
                        f"{show(path)}: its sharding is on the AbstractMesh {axes}, which has no devices; pass such a"
                        f" mesh as mesh=, or set it with jax.set_mesh (found {instead})"
                    )
                    return None
                sharding = NamedSharding(found[0], sharding.spec, memory_kind=sharding.memory_kind)
            try:
                given = spec_of(sharding.spec)
            except SpecError as error:
                self._spec_problems.append(f"{show(path)}: {error}")
                return None
            spec, problem = fit_spec(axes, given, shape, self._options)
            if problem:
                self._spec_problems.append(f"{show(path)}: {problem}")
                return None
            if not isinstance(sharding.mesh, Mesh):
                return PlannedSharding(tuple(axes.items()), spec, self._asked.devices_per_process or 1)
            return sharding if spec == given else sharding.update(spec=partition_spec(spec))
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            self._spec_problems.append(f"{show(path)}: {error}")
            return None
        return sharding

    def _as_saved(self, path: str, record: LeafRecord) -> Sharding | None:
        if record.layout is None:
            return None
        if record.layout not in self._saved:
            try:
                self._saved[record.layout] = saved_sharding(self._manifest, record.layout)
            except LayoutError as error:
                self._saved[record.layout] = error
        found = self._saved[record.layout]
        if isinstance(found, LayoutError):
            self._unavailable.append(f"{show(path)}: {show_layout(*self._manifest.leaf_layout(record))}, i.e. {found}")
            return None
        return found

    def raise_problems(self, *, only_layouts: bool = False) -> None:
        if self._unavailable:
            raise LayoutError(
                f"{len(self._unavailable)} leaves were saved on devices that are not here. Pass mesh= to carry their"
                " specs over to another mesh by axis name, or target= with the shardings wanted, or use"
                f" jaxckpt.load_numpy for host arrays. Leaves:\n{listing(self._unavailable)}"
            )
        if self._spec_problems:
            raise SpecError(
                f"{len(self._spec_problems)} leaves do not fit their specs:\n{listing(self._spec_problems)}"
            )
        if self.mismatches and not only_layouts:
            raise MismatchError(
                f"{len(self.mismatches)} leaves cannot be restored as saved:\n{listing(self.mismatches)}",
                self.mismatches,
            )


def _mesh_in_context() -> Mesh | None:
    """The mesh of jax.set_mesh, if there is one; jax 0.6 does not tell."""
    mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    return mesh if mesh is not None and mesh.shape else None


@functools.cache
def _attributes(kind: type) -> Callable[[Any], Hashable] | None:
    """What the goal of a saved array depends on in a leaf of a target, by the leaf's type; None where it is no leaf."""
    if issubclass(kind, Sharding):
        return lambda wanted: wanted
    if issubclass(kind, jax.ShapeDtypeStruct):
        return operator.attrgetter("shape", "dtype", "sharding")
    if issubclass(kind, jax.Array):
        return operator.attrgetter("shape", "dtype", "sharding", "committed")
    if issubclass(kind, (np.ndarray, np.generic)):
        return operator.attrgetter("shape", "dtype")
    return None


@functools.cache
def _key_dtype(impl: str) -> Any:
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except ValueError as error:
        raise MismatchError(f"the checkpoint has PRNG keys of implementation {impl!r}, unknown to this JAX") from error
