"""Restoring: manifest → plan → store.read into final buffers → jax.Array."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxckpt import _manifest as manifests
from jaxckpt._coord import Group
from jaxckpt._errors import (
    DataError,
    InputError,
    LayoutError,
    MismatchError,
    PeersDisagreeError,
    SpecError,
    TreeError,
    listing,
)
from jaxckpt._grid import Box, Spec, extent, intersection, spec_of, volume, whole, within
from jaxckpt._layout import (
    Placement,
    PlannedSharding,
    Specs,
    by_axis_name,
    distinct,
    fit_spec,
    longest_head,
    mesh_axes,
    partition_spec,
    placement,
    resolve_specs,
    saved_sharding,
    show_layout,
)
from jaxckpt._manifest import LeafRecord, Manifest
from jaxckpt._options import Options
from jaxckpt._plan import ReadStep, Region, Stack, Want, indexed_objects_of, plan_read
from jaxckpt._progress import Report, reporting
from jaxckpt._store import Array, Pending, Store, aligned_empty, object_key, storage_errors
from jaxckpt._tree import (
    ABSENT,
    DTYPES,
    Select,
    Structure,
    Tree,
    closest,
    decode_value,
    flatten,
    nested,
    renamer,
    selector,
    show,
    structure_of,
    subtree,
    unflatten,
    walk,
)

Rename = Callable[[str], str] | Mapping[str, str]

WHOLE_BYTES = 1 << 20
"""Leaves below this are read whole and cut by JAX, which costs 30 µs each on 8 devices where placing piece by piece
costs 300 µs; larger ones are read piece by piece into buffers that JAX takes over."""


def restore(
    path: str | os.PathLike[str],
    target: Tree = None,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    select: Select | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    options: Options | None = None,
) -> Tree:
    """Read a checkpoint back onto devices; every process of the job calls it, with the same arguments.

    Each process reads the chunks that its own devices need, none of them twice.

    Args:
        path: Where `save` wrote.
        target: What is wanted: a pytree, or a prefix of one, of jax.ShapeDtypeStruct (with or without sharding), of
            jax.sharding.Sharding, or of arrays whose shape, dtype and sharding are wanted (their values are not
            looked at). NumPy arrays and Python scalars in it ask for such. Without it, the tree as it was saved.
        mesh: Where leaves go for which `target` gives no sharding: saved specs are carried over by axis name; axes
            that this mesh lacks are dropped. Leaves saved without a spec are replicated.
        specs: With `mesh`: a PartitionSpec, a pytree prefix of them, or a function of (path, leaf), instead of the
            saved ones.
        select: Restore only these leaves: a glob over saved paths ("params/**"; a container's path selects all below
            it), a compiled regular expression, several of them, or a function of the path. Other leaves keep the
            target's value; without a target, dicts come back without them and sequences with None in their place.
        rename: Saved path → wanted path: a mapping of leaf or container paths, or a function. Without a target, a
            renamed tree comes back as nested dicts.
        strict: Missing leaves and leaves of the checkpoint that the target lacks are errors. With False, a missing
            leaf keeps the target's value (an abstract one is an error still), and extra leaves are left out. Another
            shape is always an error; another dtype follows `options.cast`.
        options: See `Options`.

    Returns:
        A pytree: the target's structure, or the saved one. jax.Arrays where arrays were saved from devices, otherwise
        what was saved: NumPy arrays and scalars, int, str, and so on.

    Raises:
        NotACheckpointError: No manifest at `path`.
        MismatchError: Missing, extra, misshaped or lossily cast leaves; one error lists them all.
        SpecError: A spec does not fit its leaf or the mesh.
        LayoutError: Neither target nor mesh, and the saved devices are not here.
        CorruptError: What is stored is not what was saved; the message names the leaf.
        PeerError: Another process failed, or sees another checkpoint.

    Example:
        >>> import jax, jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/restore", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> jaxckpt.restore("/tmp/jaxckpt-doc/restore", mesh=jax.make_mesh((1,), ("data",)))["w"].shape
        (8, 4)
    """
    options = options or Options()
    store = Store.at(path)
    group = Group.current(options.timeout_seconds)
    manifest: Manifest | None = None

    def look() -> str:
        nonlocal manifest
        manifest, content = manifests.load(store)
        return hashlib.sha256(content).hexdigest()

    def agree(digests: list[str]) -> str:
        if len(set(digests)) > 1:
            raise PeersDisagreeError(
                f"the processes see different checkpoints at {store.url}: it was replaced meanwhile, or is not shared"
            )
        return ""

    result: Tree = None

    def read() -> str:
        nonlocal result
        assert manifest is not None
        asked = Request(target, mesh, specs, select, rename, strict)
        goals, build = resolve(manifest, asked, options)
        result = build(fetch(store, manifest, goals, options))
        return ""

    group.meet("opening the checkpoint", look, agree)
    group.meet("restoring", read)
    return result


def load_numpy(
    path: str | os.PathLike[str], *, select: Select | None = None, options: Options | None = None
) -> Tree:
    """Read a checkpoint into host memory, for inference or a look: no mesh, no devices, no JAX backend is started.

    Args:
        path: Where `save` wrote.
        select: Only these leaves, as for `restore`.
        options: See `Options`.

    Returns:
        The saved tree with NumPy arrays for arrays (dtypes of ml_dtypes for bfloat16, float8 and int4). A typed PRNG
        key comes back as its raw uint32 data.

    Raises:
        NotACheckpointError, CorruptError: As `restore`.

    Example:
        >>> import numpy as np, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/numpy", {"w": np.arange(3)}, overwrite=True)
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/numpy")
        {'w': array([0, 1, 2])}
    """
    store = Store.at(path)
    manifest, _ = manifests.load(store)
    selected = selector(select)
    goals = {
        number: numpy_goal(manifest, number)
        for number, leaf in enumerate(manifest.leaves)
        if selected(leaf.path)
    }
    values = fetch(store, manifest, goals, options or Options())
    return unflatten(manifest.tree, [values.get(number, ABSENT) for number in range(len(manifest.leaves))])


# What is wanted -------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Goal:
    """What one saved leaf is to become."""

    leaf: int
    """Its number in the manifest."""

    kind: Literal["jax", "key", "numpy", "numpy_scalar", "str", "bytes", "python"]

    dtype: Any = None
    """Wanted NumPy dtype, where it is another than the stored one; the Python type for kind "python"."""

    sharding: Sharding | PlannedSharding | None = None
    """For kinds "jax" and "key"; None puts it, uncommitted, on JAX's default device."""


Build = Callable[[Mapping[int, Any]], Tree]
"""Makes the tree from the leaves' values by leaf number."""


def numpy_goal(manifest: Manifest, number: int) -> Goal:
    """A leaf as it is without devices."""
    kind = manifest.leaves[number].kind
    return Goal(number, "numpy" if kind in ("jax", "key") else kind)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, slots=True)
class _SavedLeaf:
    """What a `specs` function is given of a saved leaf."""

    shape: tuple[int, ...]
    dtype: Any
    spec: Spec


def resolve(manifest: Manifest, asked: Request, options: Options) -> tuple[dict[int, Goal], Build]:
    """Match the target with the checkpoint: what becomes of each leaf, and how the tree is built of them.

    Raises MismatchError, SpecError or LayoutError, each listing every leaf at fault.
    """
    if asked.specs is not None and asked.mesh is None:
        raise InputError("specs= needs mesh=: the mesh that the specs are of")
    selected = selector(asked.select)
    chosen = {leaf.path: number for number, leaf in enumerate(manifest.leaves) if selected(leaf.path)}
    if asked.select is not None and not chosen and manifest.leaves:
        raise TreeError(f"select={asked.select!r} matches none of the {len(manifest.leaves)} leaves")
    structure, found = _renamed(manifest, asked.rename)
    wanted = {path: number for path, number in found.items() if manifest.leaves[number].path in chosen}
    layouts = _Layouts(manifest, asked, options, wanted)
    if asked.target is None:
        goals = {number: layouts.saved_goal(path, number) for path, number in wanted.items()}
        layouts.raise_problems()

        def build(values: Mapping[int, Any]) -> Tree:
            return unflatten(structure, [values.get(n, ABSENT) for n in range(len(manifest.leaves))])

        return goals, build
    return _match(manifest, asked, layouts, structure, found, wanted)


def _renamed(manifest: Manifest, rename: Rename | None) -> tuple[Structure, dict[str, int]]:
    """The structure as it is wanted, and the wanted path of each leaf."""
    if rename is None:
        return manifest.tree, {leaf.path: number for number, leaf in enumerate(manifest.leaves)}
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
    makers: list[Callable[[Mapping[int, Any]], Any]] = []
    for leaf in leaves:
        number = wanted.get(leaf.path)
        if number is not None:
            goals[number] = layouts.target_goal(leaf.path, number, leaf.value)
            makers.append(functools.partial(_value_of, number))
            continue
        below = _below(leaf.path, wanted) if isinstance(leaf.value, Sharding) else []
        if below:
            for path in below:
                goals[wanted[path]] = layouts.target_goal(path, wanted[path], leaf.value)
            makers.append(functools.partial(_subtree_of, subtree(structure, leaf.path), len(manifest.leaves)))
            continue
        kept = leaf.path in found or (asked.select is not None and not selected(leaf.path))
        abstract = isinstance(leaf.value, (jax.ShapeDtypeStruct, Sharding))
        if not kept and (asked.strict or abstract):
            missing.append(f"{show(leaf.path)} is not in the checkpoint{closest(leaf.path, wanted)}")
        makers.append(functools.partial(_constant, leaf.value))
    extra = [path for path, number in wanted.items() if number not in goals] if asked.strict else []
    _raise_mismatch(manifest, missing, extra, layouts)

    def build(values: Mapping[int, Any]) -> Tree:
        return jax.tree_util.tree_unflatten(treedef, [make(values) for make in makers])

    return goals, build


def _value_of(number: int, values: Mapping[int, Any]) -> Any:
    return values[number]


def _subtree_of(structure: Structure, count: int, values: Mapping[int, Any]) -> Tree:
    return unflatten(structure, [values.get(number, ABSENT) for number in range(count)])


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
            "strict=False keeps the target's value for missing leaves and leaves out extra ones" if missing or extra else "",
            "rename= matches other names" if missing and extra else "",
            'Options(cast="unsafe") allows lossy casts' if any("lossy" in text for text in layouts.mismatches) else "",
        ]
        raise MismatchError(
            f"target and checkpoint differ in {len(problems)} of {len(manifest.leaves)} leaves:\n{listing(problems)}\n"
            + "; ".join(way for way in ways if way),
            problems,
        )


class _Layouts:
    """Finds the sharding and dtype of each wanted leaf, and collects what does not fit."""

    def __init__(self, manifest: Manifest, asked: Request, options: Options, wanted: Mapping[str, int]) -> None:
        self._manifest = manifest
        self._asked = asked
        self._options = options
        self._axes = {} if asked.mesh is None else mesh_axes(asked.mesh)
        arrays = [
            (path, self._as_leaf(number))
            for path, number in wanted.items()
            if manifest.leaves[number].kind in ("jax", "key")
        ]
        self._specs = resolve_specs(asked.specs, arrays)
        self._saved: dict[int, Sharding | None | LayoutError] = {}
        self.mismatches: list[str] = []
        self._spec_problems: list[str] = []
        self._unavailable: list[str] = []
        if asked.mesh is not None and asked.specs is None and math_prod(self._axes.values()) > 1:
            self._require_common_axis(wanted)

    def _require_common_axis(self, wanted: Mapping[str, int]) -> None:
        """A mesh that shares no axis name with the saved specs would silently replicate everything."""
        split = {
            path: spec
            for path, number in wanted.items()
            if (spec := self._saved_spec(self._manifest.leaves[number]))
        }
        named = {axis for spec in split.values() for entry in spec for axis in entry}
        if named and not named & set(self._axes):
            raise SpecError(
                f"the mesh {self._axes} has none of the axes that the saved specs name ({', '.join(sorted(named))}),"
                " so every leaf would be replicated; pass specs=, or specs=PartitionSpec() if that is meant. Leaves:\n"
                + listing(f"{show(path)}: {spec}" for path, spec in split.items())
            )

    def _as_leaf(self, number: int) -> _SavedLeaf:
        record = self._manifest.leaves[number]
        return _SavedLeaf(self._shape(record), self._dtype(record), self._saved_spec(record))

    def _saved_spec(self, record: LeafRecord) -> Spec:
        return self._manifest.leaf_layout(record)[1]

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
            return Goal(number, "python")
        if record.kind not in ("jax", "key"):
            return numpy_goal(self._manifest, number)
        self._check_x64(path, self._dtype(record))
        return Goal(number, record.kind, None, self._sharding(path, number, None))  # pyright: ignore[reportArgumentType]

    def target_goal(self, path: str, number: int, wanted: Any) -> Goal:
        """The leaf as a target leaf, or a sharding for it, asks."""
        record = self._manifest.leaves[number]
        if isinstance(wanted, Sharding):
            if record.value is not None or record.kind in ("str", "bytes"):
                return self.saved_goal(path, number)
            self._check_x64(path, self._dtype(record))
            kind = "key" if record.kind == "key" else "jax"
            return Goal(number, kind, None, self._sharding(path, number, wanted))
        if isinstance(wanted, (jax.Array, jax.ShapeDtypeStruct)):
            given = wanted.sharding
            uncommitted = isinstance(wanted, jax.Array) and not wanted.committed
            dtype = self._check_array(path, record, wanted)
            kind = "key" if record.kind == "key" else "jax"
            self._check_x64(path, dtype)
            sharding = None if uncommitted else self._sharding(path, number, given)
            return Goal(number, kind, dtype, sharding)
        if isinstance(wanted, (np.ndarray, np.generic)):
            dtype = self._check_array(path, record, wanted)
            return Goal(number, "numpy" if isinstance(wanted, np.ndarray) else "numpy_scalar", dtype)
        if type(wanted) in (bool, int, float, complex, str, bytes):
            return self._python_goal(path, number, type(wanted))
        self.mismatches.append(f"{show(path)} is a {type(wanted).__qualname__} in the target, which is no leaf to restore")
        return Goal(number, "python")

    def _python_goal(self, path: str, number: int, kind: type) -> Goal:
        record = self._manifest.leaves[number]
        saved = record.kind if record.value is not None or record.kind in ("str", "bytes") else None
        if saved == kind.__name__:
            return Goal(number, "python" if record.value is not None else kind.__name__)  # pyright: ignore[reportArgumentType]
        rank = ["bool", "int", "float", "complex"]
        if kind.__name__ in rank and saved in rank and rank.index(saved) < rank.index(kind.__name__):
            return Goal(number, "python", kind)
        if kind.__name__ in rank and saved is None and record.kind != "key" and self._shape(record) == ():
            dtype = self._dtype(record)
            if np.can_cast(dtype, np.dtype(kind), "safe"):
                return Goal(number, "python", kind)
        shape = f"{self._dtype(record)}{list(self._shape(record))}" if saved is None else saved
        self.mismatches.append(f"{show(path)} is {shape} in the checkpoint, {kind.__name__} in the target")
        return Goal(number, "python")

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
        keys = [jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in (saved, wanted.dtype)]
        if any(keys):
            self.mismatches.append(
                f"{show(path)} has dtype {saved} in the checkpoint, {wanted.dtype} in the target; PRNG keys do not cast"
            )
            return None
        if self._options.cast == "safe" and not np.can_cast(saved, wanted.dtype, "safe"):
            self.mismatches.append(
                f"{show(path)} has dtype {saved} in the checkpoint, {wanted.dtype} in the target: a lossy cast"
            )
        return np.dtype(wanted.dtype)

    def _check_number(self, path: str, record: LeafRecord, wanted: Any) -> Any:
        value: Any = decode_value(record.kind, record.value or "")
        try:
            if self._options.cast == "unsafe" or bool(np.asarray(value).astype(wanted.dtype) == value) or value != value:
                return np.dtype(wanted.dtype)
        except (TypeError, ValueError, OverflowError):
            pass
        self.mismatches.append(
            f"{show(path)} is {record.kind} {record.value} in the checkpoint, {wanted.dtype} in the target: a lossy cast"
        )
        return np.dtype(wanted.dtype)

    def _check_x64(self, path: str, dtype: Any) -> None:
        if isinstance(dtype, np.dtype) and jax.dtypes.canonicalize_dtype(dtype) != dtype:  # pyright: ignore[reportUnknownMemberType]
            self.mismatches.append(
                f"{show(path)} is {dtype}, which JAX here would make {jax.dtypes.canonicalize_dtype(dtype)}, a lossy"
                " cast: set jax_enable_x64, or ask for the smaller dtype in a target"
            )

    def _sharding(self, path: str, number: int, given: Sharding | None) -> Sharding | PlannedSharding | None:
        """Where the leaf goes: as given, else by mesh= and specs=, else as saved."""
        record = self._manifest.leaves[number]
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

    def _checked(
        self, path: str, sharding: Sharding, shape: tuple[int, ...]
    ) -> Sharding | PlannedSharding | None:
        """A sharding that the target gave, if the leaf's shape allows it."""
        if isinstance(sharding, NamedSharding):
            axes = dict(sharding.mesh.shape)
            if not isinstance(sharding.mesh, Mesh) and self._asked.devices_per_process is None:
                self._spec_problems.append(f"{show(path)}: its sharding is on an AbstractMesh, which has no devices")
                return None
            spec, problem = fit_spec(axes, spec_of(sharding.spec), shape, self._options)
            if problem:
                self._spec_problems.append(f"{show(path)}: {problem}")
                return None
            if not isinstance(sharding.mesh, Mesh):
                return PlannedSharding(tuple(axes.items()), spec, self._asked.devices_per_process or 1)
            return sharding if spec == spec_of(sharding.spec) else sharding.update(spec=partition_spec(spec))
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


def math_prod(sizes: Any) -> int:
    return int(np.prod(list(sizes), dtype=np.int64))


@functools.cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


# Reading --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a leaf's boxes go: for each box that is read, the devices that get it; none for the host."""

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, ...], ...]
    whole: bool
    """Whether the one box is handed to JAX with the sharding, and JAX cuts it."""


def fetch(store: Store, manifest: Manifest, goals: Mapping[int, Goal], options: Options) -> dict[int, Any]:
    """The value of every goal by leaf number."""
    stacks = [record.stack() for record in manifest.stacks]
    values: dict[int, Any] = {}
    by_row: dict[tuple[int, int], Goal] = {}
    wants: list[Want] = []
    homes: dict[tuple[Any, ...], _Home] = {}
    for number, goal in goals.items():
        record = manifest.leaves[number]
        if record.value is not None:
            values[number] = _from_text(record, goal)
            continue
        assert record.stack is not None and record.row is not None
        by_row[record.stack, record.row] = goal
        wants.append(Want(record.stack, record.row, _home(goal, stacks[record.stack], homes).boxes))
    steps = plan_read(stacks, wants)
    check_stored(store, manifest, stacks, steps)
    paths = {(leaf.stack, leaf.row): leaf.path for leaf in manifest.leaves if leaf.stack is not None}
    total = sum(step.n_bytes for step in steps)
    with reporting("restore", total, options.progress) as report:
        for step, buffers in _read(store, manifest.data, stacks, steps, options, paths, report):
            _deliver(step, buffers, by_row, homes, stacks[step.stack], manifest, values)
    _deliver_empty(wants, by_row, homes, stacks, manifest, values)
    return values


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Box, list[Any]]:
    """Each distinct box that this process's devices want, with those devices."""
    found: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        found.setdefault(box, []).append(device)  # pyright: ignore[reportArgumentType]
    return found


def _home(goal: Goal, stack: Stack, homes: dict[tuple[Any, ...], _Home]) -> _Home:
    key = (goal.sharding, goal.kind in ("jax", "key"), stack.shape, stack.itemsize)
    if key not in homes:
        on_host = goal.sharding is None
        n_bytes = volume(whole(stack.shape)) * stack.itemsize
        if on_host or (goal.sharding.is_fully_addressable and n_bytes < WHOLE_BYTES):  # pyright: ignore
            homes[key] = _Home((whole(stack.shape),), ((),), True)
        else:
            found = local_boxes(goal.sharding, stack.shape)  # pyright: ignore[reportArgumentType]
            homes[key] = _Home(tuple(found), tuple(map(tuple, found.values())), False)
    return homes[key]


def check_stored(store: Store, manifest: Manifest, stacks: Sequence[Stack], steps: Sequence[ReadStep]) -> None:
    """Before reading: every object that will be touched is there and of its length, and zarr.json is as it was.

    An object that will be read whole must also have its digest: its chunks' checksums tell that they are undamaged,
    the digest that they are the ones saved here.
    """
    if store.folder is None:
        return
    touched: dict[int, dict[tuple[int, ...], list[int]]] = {}
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    for step in steps:
        found = touched.setdefault(step.stack, {})
        for region in step.regions:
            for index, part, obj in indexed_objects_of(stacks[step.stack], region.box):
                sizes = found.setdefault(index, [0, volume(obj)])
                sizes[0] += volume(part)
                rows.setdefault((step.stack, index), part[0][0])
    problems: list[str] = []
    for number, found in touched.items():
        stack, record = stacks[number], manifest.stacks[number]
        text = store.read(f"{manifest.data}/{stack.name}/zarr.json")
        if text is None or hashlib.sha256(text).hexdigest() != record.sha256:
            state = "is missing" if text is None else "is not the one that was saved"
            problems.append(f"{store.url}/{manifest.data}/{stack.name}/zarr.json {state}")
        lengths = store.sizes(manifest.data, stack, found)
        for index, (read, held) in found.items():
            key = object_key(stack, index)
            length, digest = record.objects["/".join(map(str, index))]
            name = f"{store.url}/{manifest.data}/{key}"
            first = leaf_at(manifest, number, rows[number, index])
            if lengths[key] is None:
                problems.append(f"{show(first)}: {name} is missing")
            elif lengths[key] != length:
                problems.append(f"{show(first)}: {name} is {lengths[key]} bytes long, expected {length}")
            elif read == held:
                try:
                    if store.digest(manifest.data, stack, index)[1] != digest:
                        problems.append(f"{show(first)}: {name} holds other data than was saved there")
                except DataError as error:
                    problems.append(f"{show(first)}: {error}")
    if problems:
        raise DataError(f"{len(problems)} files of the checkpoint are not as they were saved:\n{listing(problems)}")


def leaf_at(manifest: Manifest, stack: int, row: int) -> str:
    """Path of the leaf in a row of a stack."""
    return next(leaf.path for leaf in manifest.leaves if (leaf.stack, leaf.row) == (stack, row))


def read_box(store: Store, manifest: Manifest, number: int, box: Box, options: Options) -> Array:
    """One box of one leaf, as a NumPy array of the stored dtype."""
    record = manifest.leaves[number]
    assert record.stack is not None and record.row is not None
    stacks = [found.stack() for found in manifest.stacks]
    if not volume(box):
        return np.empty(extent(box), DTYPES[stacks[record.stack].dtype])
    # One step however large: the buffer is the result.
    steps = plan_read(stacks, [Want(record.stack, record.row, (box,))])
    check_stored(store, manifest, stacks, steps)
    paths = {(record.stack, row): leaf_at(manifest, record.stack, row) for row in range(*steps[0].runs[0].rows)}
    ((_, buffers),) = _read(store, manifest.data, stacks, steps, options, paths, lambda moved: None)
    return buffers[0][0][0]


Buffers = list[list[Array]]
"""For each run of a step, the buffer of each box: [rows of the run, *sides of the box]."""


def _read(
    store: Store,
    data: str,
    stacks: Sequence[Stack],
    steps: Sequence[ReadStep],
    options: Options,
    paths: Mapping[tuple[int | None, int | None], str],
    report: Report,
) -> Iterator[tuple[ReadStep, Buffers]]:
    """Read the steps, some ahead of each other within `options.host_bytes`, and yield each when it is complete."""
    under_way: deque[tuple[ReadStep, Buffers, list[tuple[Region, Array | None, Pending]]]] = deque()
    in_flight = 0

    def land() -> tuple[ReadStep, Buffers]:
        nonlocal in_flight
        step, buffers, reads = under_way.popleft()
        for region, staged, pending in reads:
            rows = range(*region.box[0])
            named = ", ".join(show(paths[step.stack, row]) for row in rows[:3])
            with storage_errors(f"cannot read leaf {named}{', …' if len(rows) > 3 else ''}"):
                pending.result()
            if staged is not None:
                _scatter(region, staged, step, buffers)
        in_flight -= step.n_bytes + step.staged_bytes
        report(step.n_bytes)
        return step, buffers

    for step in steps:
        stack = stacks[step.stack]
        while under_way and in_flight + step.n_bytes + step.staged_bytes > options.host_bytes:
            yield land()
        array = store.open_array(data, stack, mapped=options.mmap)
        dtype = DTYPES[stack.dtype]
        buffers = [
            [aligned_empty((run.rows[1] - run.rows[0], *extent(box)), dtype) for box in run.boxes] for run in step.runs
        ]
        reads: list[tuple[Region, Array | None, Pending]] = []
        with store.batch() as batch:
            for region in step.regions:
                staged = None if len(region.serves) == 1 else aligned_empty(extent(region.box), dtype)
                target = _place(region, step, buffers) if staged is None else staged
                reads.append((region, staged, store.read_into(array, region.box, target, batch)))
        under_way.append((step, buffers, reads))
        in_flight += step.n_bytes + step.staged_bytes
    while under_way:
        yield land()


def _place(region: Region, step: ReadStep, buffers: Buffers) -> Array:
    """The part of the one buffer that a region serves."""
    run, box = region.serves[0]
    return buffers[run][box][within(region.box, (step.runs[run].rows, *step.runs[run].boxes[box]))]


def _scatter(region: Region, staged: Array, step: ReadStep, buffers: Buffers) -> None:
    for run, box in region.serves:
        held = (step.runs[run].rows, *step.runs[run].boxes[box])
        common = intersection(region.box, held)
        if common is not None:
            buffers[run][box][within(common, held)] = staged[within(common, region.box)]


# Handing over ---------------------------------------------------------------------------------------------


def _deliver(
    step: ReadStep,
    buffers: Buffers,
    by_row: Mapping[tuple[int, int], Goal],
    homes: dict[tuple[Any, ...], _Home],
    stack: Stack,
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    """Turn a step's buffers into leaves: rows become arrays of the host, or go to the devices in one batched call."""
    hosts: list[Array] = []
    targets: list[Any] = []
    pieces: list[tuple[Goal, int]] = []
    for run, found in zip(step.runs, buffers, strict=True):
        for offset, row in enumerate(range(*run.rows)):
            goal = by_row[step.stack, row]
            home = _home(goal, stack, homes)
            views = [_cast(buffer[offset], goal) for buffer in found]
            if goal.kind not in ("jax", "key"):
                values[goal.leaf] = _on_host(views[0], goal)
                continue
            begun = len(hosts)
            if home.whole:
                hosts.append(views[0])
                targets.append(goal.sharding)
            else:
                for view, devices in zip(views, home.devices, strict=True):
                    hosts.extend([view] * len(devices))
                    targets.extend(devices)
            pieces.append((goal, len(hosts) - begun))
    if pieces:
        _to_devices(hosts, targets, pieces, homes, stack, manifest, values)


def _to_devices(
    hosts: list[Array],
    targets: list[Any],
    pieces: list[tuple[Goal, int]],
    homes: dict[tuple[Any, ...], _Home],
    stack: Stack,
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    placed = iter(jax.device_put(hosts, targets))
    for goal, count in pieces:
        parts = [next(placed) for _ in range(count)]
        if _home(goal, stack, homes).whole:
            array = parts[0]
        else:
            array = jax.make_array_from_single_device_arrays(stack.shape, goal.sharding, parts)  # pyright: ignore
        values[goal.leaf] = _as_key(array, goal, manifest)


def _as_key(array: Any, goal: Goal, manifest: Manifest) -> Any:
    if goal.kind != "key":
        return array
    return jax.random.wrap_key_data(array, impl=manifest.leaves[goal.leaf].impl)


def _cast(view: Array, goal: Goal) -> Array:
    return view.astype(goal.dtype) if isinstance(goal.dtype, np.dtype) and goal.dtype != view.dtype else view


def _on_host(view: Array, goal: Goal) -> Any:
    match goal.kind:
        case "numpy":
            return view
        case "numpy_scalar":
            return view[()]
        case "str":
            return view.tobytes().decode("utf-8", "surrogatepass")
        case "bytes":
            return view.tobytes()
        case _:
            return goal.dtype(view.item())


def _from_text(record: LeafRecord, goal: Goal) -> Any:
    """A leaf that lies in the manifest itself."""
    value = decode_value(record.kind, record.value or "")
    if goal.kind == "python":
        return value if goal.dtype is None else goal.dtype(value)
    array = np.asarray(value).astype(goal.dtype) if goal.dtype is not None else np.asarray(value)
    if goal.kind == "numpy":
        return array
    if goal.kind == "numpy_scalar":
        return array[()]
    if goal.kind != "jax":
        return value
    return jax.device_put(array, goal.sharding)  # pyright: ignore[reportArgumentType]


def _deliver_empty(
    wants: Sequence[Want],
    by_row: Mapping[tuple[int, int], Goal],
    homes: dict[tuple[Any, ...], _Home],
    stacks: Sequence[Stack],
    manifest: Manifest,
    values: dict[int, Any],
) -> None:
    """Leaves of no bytes: nothing was read for them."""
    for want in wants:
        goal = by_row[want.stack, want.row]
        if goal.leaf in values:
            continue
        stack = stacks[want.stack]
        dtype = goal.dtype if isinstance(goal.dtype, np.dtype) else DTYPES[stack.dtype]
        home = _home(goal, stack, homes)
        if goal.kind not in ("jax", "key"):
            values[goal.leaf] = _on_host(np.empty(stack.shape, dtype), goal)
        elif home.whole:
            values[goal.leaf] = _as_key(
                jax.device_put(np.empty(stack.shape, dtype), goal.sharding), goal, manifest  # pyright: ignore
            )
        else:
            devices = [device for found in home.devices for device in found]
            boxes = [box for box, found in zip(home.boxes, home.devices, strict=True) for _ in found]
            parts = [jax.device_put(np.empty(extent(box), dtype), d) for box, d in zip(boxes, devices, strict=True)]
            array = jax.make_array_from_single_device_arrays(stack.shape, goal.sharding, parts)  # pyright: ignore
            values[goal.leaf] = _as_key(array, goal, manifest)
