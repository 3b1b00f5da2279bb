"""What is wanted of each saved leaf: the user's target, mesh, specs, select and rename held against the manifest."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxckpt._format.grid import Spec, spec_of
from jaxckpt._format.layouts import (
    PlannedSharding,
    Specs,
    by_axis_name,
    fit_spec,
    longest_head,
    mesh_axes,
    on_mesh,
    partition_spec,
    require_common_axis,
    resolve_specs,
    saved_sharding,
    show_layout,
)
from jaxckpt._format.records import LeafRecord, Manifest
from jaxckpt._format.tree import (
    DTYPES,
    Container,
    Leaf,
    Rename,
    Select,
    Selector,
    Structure,
    Tree,
    closest,
    component,
    decode_value,
    flatten,
    key_dtype,
    keys_of,
    lossless,
    nested,
    origins,
    paths_of,
    prune,
    renamed,
    selector,
    show,
    structure_of,
    subtree,
    unflatten,
)
from jaxckpt._restore.rules import Rules
from jaxckpt._restore.source import Foreign, Native
from jaxckpt._runtime.errors import InputError, LayoutError, MismatchError, SpecError, counted, listing
from jaxckpt._runtime.options import Options, flag

Renaming = Rename | Rules
"""What is passed as rename=: new names, or rules."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a restore."""

    target: Tree = None
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
    specs: Specs = None
    select: Select | None = None
    rename: Rename | None = None
    rules: Rules | None = None
    """What the checkpoint is read through: `split_rename` gives either this or `rename`."""

    strict: bool = True
    devices_per_process: int | None = None
    """For a plan on a mesh that is not here; None where the arrays will be made."""

    initial: Callable[[Sequence[int]], Sequence[Any]] | None = None
    """Makes the leaves of the target that have these numbers, for those that do not come from the checkpoint."""


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

    weak: bool = False
    """Whether the array's type is to be weak, as that of jnp.asarray(0.5) is."""

    @property
    def cast(self) -> np.dtype[Any] | None:
        """The dtype that the stored one is cast to, if any."""
        return self.dtype if isinstance(self.dtype, np.dtype) else None


Build = Callable[[Mapping[int, Any], Sequence[Any]], Tree]
"""Makes the tree from the leaves' values by leaf number, and from what `Request.initial` made."""

_Part = Callable[[Mapping[int, Any]], Any]
"""Makes a part of the tree from the leaves' values by leaf number."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What becomes of each leaf of a checkpoint, and how the tree is built of them."""

    goals: Mapping[int, Goal]
    """By the number of the leaf in the checkpoint."""

    build: Build

    lacking: Sequence[int] = ()
    """Numbers of the target's leaves that `Request.initial` is to make."""


@functools.cache
def numpy_goal(kind: str) -> Goal:
    """What a leaf of a kind is without devices."""
    return Goal("numpy" if kind in ("jax", "key") else kind)  # pyright: ignore[reportArgumentType]


def numpy_goals(manifest: Manifest, select: Select | None) -> Resolved:
    """The saved tree without devices, or what is selected of it."""
    goals = {number: numpy_goal(manifest.leaves[number].kind) for number in _selected(manifest, _test(select))}
    return Resolved(goals, _builder(manifest.tree, manifest, goals))


def _builder(structure: Structure, manifest: Manifest, goals: Mapping[int, Goal]) -> Build:
    """Makes the tree of the leaves that have a goal."""
    some = len(goals) < len(manifest.leaves)
    pruned = prune(structure, {number: number for number in goals}) if some else structure
    return lambda values, initial: unflatten(pruned, values)


def narrowed(manifest: Manifest, select: Select | None, rename: Rename | None) -> Manifest:
    """The manifest of the selected leaves alone, by their new paths; the data stays where it is. Raises TreeError."""
    structure, _ = _renamed(manifest, rename)
    structure = prune(structure, {number: number for number in _selected(manifest, _test(select))})
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


def _test(select: Select | None) -> Selector | None:
    return None if select is None else selector(select)


def _selected(manifest: Manifest, test: Selector | None) -> Sequence[int]:
    """Numbers of the leaves that are selected by their saved paths. Raises TreeError if an entry selects none."""
    if test is None:
        return range(len(manifest.leaves))
    return [number for number, is_chosen in enumerate(test.choose(manifest.numbers)) if is_chosen]


def require_request(asked: Request) -> None:
    """Raise InputError for arguments that are none, whatever the checkpoint."""
    flag(asked.strict, "strict")
    if isinstance(asked.target, (Mesh, AbstractMesh)):
        raise InputError("target is a mesh: pass it as mesh=, restore(path, mesh=…)")
    if isinstance(asked.target, Options):
        raise InputError("target is an Options: pass it as options=, restore(path, options=…)")


def resolve(manifest: Manifest, asked: Request, options: Options) -> Resolved:
    """Match the target with the checkpoint: what becomes of each leaf, and how the tree is built of them.

    Raises MismatchError, SpecError or LayoutError, each listing every leaf at fault.
    """
    if asked.specs is not None and asked.mesh is None:
        raise InputError("specs= needs mesh=: the mesh that the specs are of")
    test = _test(asked.select)
    chosen = _selected(manifest, test)
    structure, found = _renamed(manifest, asked.rename)
    wanted = found
    if len(chosen) < len(found):
        among = set(chosen)
        wanted = {path: number for path, number in found.items() if number in among}
    layouts = _Layouts(manifest, asked, options, wanted)
    if asked.target is None:
        goals = {number: layouts.saved_goal(path, number) for path, number in wanted.items()}
        layouts.raise_problems()
        return Resolved(goals, _builder(structure, manifest, goals))
    return _match(asked, test, layouts, structure, found, wanted)


def _renamed(manifest: Manifest, rename: Rename | None) -> tuple[Structure, dict[str, int]]:
    """The structure as it is wanted, and the wanted path of each leaf."""
    if rename is None:
        return manifest.tree, manifest.numbers
    numbers = {path: number for number, path in enumerate(renamed(rename, manifest.numbers))}
    return structure_of(nested(numbers)), numbers


def _match(
    asked: Request,
    test: Selector | None,
    layouts: _Layouts,
    structure: Structure,
    found: Mapping[str, int],
    wanted: Mapping[str, int],
) -> Resolved:
    """Goals for a target tree, or a prefix of one."""
    leaves, shape = flatten(asked.target)
    treedef = jax.tree_util.tree_structure(asked.target)
    goals: dict[int, Goal] = {}
    missing: list[Leaf] = []
    lacking: list[int] = []
    containers = functools.cache(lambda: _above(wanted))
    is_met = False  # whether anything comes from the checkpoint
    parts: list[int | _Part] = []
    """Number of each leaf of the target, or what makes it, or the tree that stands for it."""
    for leaf in leaves:
        number = wanted.get(leaf.path)
        if number is not None:
            goals[number] = layouts.target_goal(leaf.path, number, leaf.value)
            parts.append(number)
            is_met = True
            continue
        is_sharding = isinstance(leaf.value, (Sharding, Format))
        below = _below(leaf.path, wanted) if is_sharding else []
        if below or (is_sharding and _is_empty(structure, leaf.path)):
            for path in below:
                goals[wanted[path]] = layouts.target_goal(path, wanted[path], leaf.value)
            part = subtree(structure, leaf.path)
            pruned = prune(part, {wanted[path]: wanted[path] for path in below}) if below else part
            parts.append(functools.partial(unflatten, pruned))
            is_met = True
            continue
        if not _is_restorable(leaf.value) and (_is_class(leaf.value) or leaf.path in containers()):
            layouts.refuse(leaf.path, leaf.value)
            continue
        if _is_abstract(leaf.value) and asked.initial is not None:
            lacking.append(len(parts))
        parts.append(functools.partial(_constant, leaf.value))
        # A function, such as an activation in an Equinox module, is no state that a checkpoint could lack.
        stays = callable(leaf.value) or not _is_asked(leaf.path, test, asked.rename)
        kept = stays or leaf.path in found or (is_sharding and bool(_below(leaf.path, found)))
        if not kept and (asked.strict or (_is_abstract(leaf.value) and asked.initial is None)):
            missing.append(leaf)
    extra = [path for path, number in wanted.items() if number not in goals] if asked.strict else []
    layouts.raise_problems(only_layouts=True)
    problems = [*_missing(missing, structure, wanted), *_extra(extra, shape), *layouts.mismatches]
    if problems:
        raise MismatchError(
            f"target and checkpoint differ in {counted(len(problems), 'leaf')}; the checkpoint has {len(found)}:\n"
            + "\n".join(filter(None, [listing(problems), "; ".join(_remedies(asked, missing, extra, layouts))])),
            problems,
        )
    if not is_met and any(not callable(leaf.value) for leaf in leaves):
        problems = [*_missing(leaves, structure, wanted)]
        raise MismatchError(
            f"none of the target's {counted(len(leaves), 'leaf')} would come from the checkpoint, which has"
            f" {len(found)}; rename= matches other names:\n{listing(problems)}",
            problems,
        )

    def build(values: Mapping[int, Any], initial: Sequence[Any]) -> Tree:
        made = [values[part] if isinstance(part, int) else part(values) for part in parts]
        for number, value in zip(lacking, initial, strict=True):
            made[number] = value
        return jax.tree_util.tree_unflatten(treedef, made)

    return Resolved(goals, build, lacking)


def _constant(value: Any, values: Mapping[int, Any]) -> Any:
    return value


def _is_abstract(value: Any) -> bool:
    return isinstance(value, (jax.ShapeDtypeStruct, Sharding, Format))


def _is_restorable(value: Any) -> bool:
    """Whether a leaf of a target is one that a checkpoint could hold, or stands for such."""
    return _attributes(type(value)) is not None or isinstance(value, (int, float, complex, str, bytes))


def _above(paths: Iterable[str]) -> set[str]:
    """The paths of all containers that these leaves lie in."""
    found = set[str]()
    for path in paths:
        while path:
            path = path.rpartition("/")[0]
            if path in found:
                break
            found.add(path)
    return found


def _below(path: str, wanted: Mapping[str, int]) -> list[str]:
    return list(wanted) if not path else [found for found in wanted if found.startswith(f"{path}/")]


def _is_empty(structure: Structure, path: str) -> bool:
    """Whether what was saved at a path has no leaves, such as None or optax.EmptyState()."""
    try:
        return next(_numbers(subtree(structure, path)), None) is None
    except KeyError:
        return False


def _numbers(structure: Structure) -> Iterator[int]:
    """Numbers of the leaves of a structure."""
    if isinstance(structure, int):
        yield structure
    elif structure is not None:
        for child in structure.children:
            yield from _numbers(child)


def _is_asked(path: str, test: Selector | None, rename: Rename | None) -> bool:
    """Whether `select`, which is about saved paths, selects a leaf of the target that the checkpoint lacks.

    If `rename` is a function, nobody knows the saved path; then it counts as selected.
    """
    if test is None:
        return True
    olds = origins(rename, path)
    return olds is None or any(map(test, olds))


def _missing(leaves: Sequence[Leaf], structure: Structure, wanted: Mapping[str, int]) -> Iterator[str]:
    """A line for each leaf of the target that the checkpoint lacks, the first with hints."""
    for number, leaf in enumerate(leaves):
        hint = ""
        if number < 3:  # finding one takes a look at every path
            try:
                saved = subtree(structure, leaf.path)
                hint = "; None was saved there" if saved is None else "; a container was saved there"
            except KeyError:
                hint = closest(leaf.path, wanted)
        yield f"{show(leaf.path)} is not in the checkpoint{hint}"


def _extra(paths: Sequence[str], shape: Structure) -> Iterator[str]:
    """A line for each leaf of the checkpoint that the target lacks."""
    empty = dict(_empty_places(shape, "")) if paths else {}
    for path in paths:
        at = longest_head(path, empty)
        hint = "" if at is None else f", which has {empty[at]} at {show(at)}"
        yield f"{show(path)} is in the checkpoint but not in the target{hint}"


def _empty_places(node: Structure, path: str) -> Iterator[tuple[str, str]]:
    """Where a tree has None or a container without children, and which of the two in words."""
    if node is None:
        yield path, "None"
    elif isinstance(node, Container):
        if not node.children:
            yield path, f"an empty {node.name or node.type}"
        for key, child in zip(keys_of(node), node.children, strict=True):
            yield from _empty_places(child, f"{path}/{component(key)}" if path else component(key))


def _remedies(asked: Request, missing: Sequence[Leaf], extra: Sequence[str], layouts: _Layouts) -> Iterator[str]:
    """What the caller can do about a mismatch."""
    owner = "target" if asked.initial is None else "init"
    if asked.strict and (missing or extra):
        yield f"strict=False keeps the {owner}'s value for missing leaves and leaves out extra ones"
    if asked.initial is None and any(_is_abstract(leaf.value) for leaf in missing):
        yield "a ShapeDtypeStruct or a Sharding has no value to keep: give an array, or leave it out of the target"
    if missing and asked.select is not None and callable(asked.rename):
        yield "since rename= is a function, missing leaves count as selected; a mapping shows which are not"
    if missing and extra:
        yield "rename= matches other names"
    yield from layouts.remedies()


class _Layouts:
    """Finds the sharding and dtype of each wanted leaf, and collects what does not fit."""

    def __init__(self, manifest: Manifest, asked: Request, options: Options, wanted: Mapping[str, int]) -> None:
        self._manifest = manifest
        self._asked = asked
        self._options = options
        self._wanted = wanted
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
        self._halved = False
        """Whether a leaf is of 64 bits, which JAX is set to make 32."""

        if asked.mesh is not None and asked.specs is None:
            numbers = range(len(manifest.layouts))
            specs = {number: spec for number in numbers if (spec := self._layout_spec(number))}
            split = {
                path: specs[layout]
                for path, number in wanted.items()
                if (layout := manifest.leaves[number].layout) in specs
            }
            require_common_axis(self._axes, split)

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
            return self._key_dtype(record)
        return DTYPES[self._manifest.stacks[record.stack].dtype] if record.stack is not None else None

    @staticmethod
    def _key_dtype(record: LeafRecord) -> Any:
        try:
            return key_dtype(record.impl or "")
        except ValueError as error:
            raise MismatchError(
                f"{show(record.path)} has PRNG keys of implementation {record.impl!r} in the checkpoint, which this JAX"
                " does not know; leave it out with select=, or read its raw data with load_numpy"
            ) from error

    # Goals -----------------------------------------------------------------------------------------------

    def saved_goal(self, path: str, number: int) -> Goal:
        """The leaf as it was saved."""
        record = self._manifest.leaves[number]
        if record.value is not None:
            return Goal("python")
        # All of a saved leaf that its goal depends on. Written out twice: a call for each leaf would double the time.
        form = (record.kind, record.impl, record.stack, record.layout, record.weak, self._specs.get(path))
        return self._goals.get(form) or self._noted(form, self._saved_goal(path, record))

    def _saved_goal(self, path: str, record: LeafRecord) -> Goal:
        if record.value is not None:
            return Goal("python")
        if record.kind not in ("jax", "key"):
            return numpy_goal(record.kind)
        return self._device_goal(path, record, None, None, weak=record.weak)

    def target_goal(self, path: str, number: int, wanted: Any) -> Goal:
        """The leaf as a target leaf, or a sharding for it, asks."""
        record = self._manifest.leaves[number]
        tell = _attributes(type(wanted))
        if tell is None or record.value is not None:
            return self._target_goal(path, record, wanted)
        saved = (record.kind, record.impl, record.stack, record.layout, record.weak, self._specs.get(path))
        form = (saved, type(wanted), tell(wanted))
        return self._goals.get(form) or self._noted(form, self._target_goal(path, record, wanted))

    def _noted(self, form: Hashable, goal: Goal) -> Goal:
        """Remember the goal of a form of leaf; while there are problems not, so that each leaf tells its own."""
        if not (self.mismatches or self._spec_problems or self._unavailable):
            self._goals[form] = goal
        return goal

    def _target_goal(self, path: str, record: LeafRecord, wanted: Any) -> Goal:
        if isinstance(wanted, Tracer):
            self.mismatches.append(
                f"{show(path)} is a tracer in the target: call restore outside of jit, grad and vmap"
            )
            return Goal("python")
        if isinstance(wanted, Format):
            self._check_format(path, record, wanted)
            if wanted.sharding is None:
                self.mismatches.append(f"{show(path)} is a Format without a sharding in the target")
                return Goal("python")
            wanted = wanted.sharding
        if isinstance(wanted, Sharding):
            if record.value is not None or record.kind in ("str", "bytes"):
                return self._saved_goal(path, record)
            return self._device_goal(path, record, None, wanted, weak=record.weak)
        if isinstance(wanted, (jax.Array, jax.ShapeDtypeStruct)):
            # What is not committed asks for no device of its own.
            uncommitted = isinstance(wanted, Uncommitted) or (isinstance(wanted, jax.Array) and not wanted.committed)
            known = len(self.mismatches)
            dtype = self._check_array(path, record, wanted)
            if isinstance(wanted, jax.ShapeDtypeStruct):
                self._check_format(path, record, wanted)
            if len(self.mismatches) > known:  # one line for each leaf
                return Goal("python")
            given = None if uncommitted else wanted.sharding
            weak = getattr(wanted, "weak_type", False)  # PRNG keys have none
            return self._device_goal(path, record, dtype, given, weak=weak, anywhere=uncommitted)
        if isinstance(wanted, (np.ndarray, np.generic)):
            dtype = self._check_array(path, record, wanted)
            return Goal("numpy" if isinstance(wanted, np.ndarray) else "numpy_scalar", dtype)
        if type(wanted) in (bool, int, float, complex, str, bytes):
            return self._python_goal(path, record, type(wanted))
        self.refuse(path, wanted)
        return Goal("python")

    def refuse(self, path: str, wanted: Any) -> None:
        """Note that the target has something that is no leaf to restore."""
        kind = type(wanted).__qualname__
        if _is_class(wanted):
            problem = "which is no leaf to restore; give a jax.ShapeDtypeStruct(shape, dtype)"
        elif path in self._wanted:
            problem = "which is no leaf to restore"
        else:
            problem = (
                f"and a container in the checkpoint: JAX takes {kind} for a leaf. Register it as a pytree, or give a"
                " dict"
            )
        self.mismatches.append(f"{show(path)} is a {kind} in the target, {problem}")

    def _device_goal(
        self,
        path: str,
        record: LeafRecord,
        dtype: Any,
        given: Sharding | None,
        *,
        weak: bool,
        anywhere: bool = False,
    ) -> Goal:
        """An array on devices: of a dtype, if it is another than the saved one, and where it is given, if anywhere."""
        kind = "key" if record.kind == "key" else "jax"
        dtype = self._canonical(path, record, dtype)
        here = anywhere and self._asked.mesh is None
        return Goal(kind, dtype, None if here else self._sharding(path, record, given), weak and kind == "jax")

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
        is_key = jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key)
        if record.kind in ("str", "bytes") or (record.value is not None and is_key):
            what = "PRNG keys" if is_key else "an array"
            self.mismatches.append(f"{show(path)} is {record.kind} in the checkpoint, {what} in the target")
            return None
        if is_key != (record.kind == "key"):
            way = "a key and use jax.random.key_data" if record.kind == "key" else "it is, and use wrap_key_data"
            self.mismatches.append(
                f"{show(path)} has dtype {saved} in the checkpoint, {wanted.dtype} in the target; PRNG keys do not"
                f" cast: restore it as {way}"
            )
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
        if is_key:
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

    def _canonical(self, path: str, record: LeafRecord, dtype: Any) -> Any:
        """The dtype to convert to, if any, to get one that JAX makes as it is set; notes that a leaf loses bits."""
        wanted = self._dtype(record) if dtype is None else dtype
        if not isinstance(wanted, np.dtype):
            return dtype
        made = _canonical_dtype(wanted)
        if made == wanted:
            return dtype
        if self._options.cast == "safe":
            self._halved = True
            self.mismatches.append(
                f"{show(path)} would be {wanted}, which JAX makes {made} while jax_enable_x64 is off: a lossy cast"
            )
        return made

    def _check_format(self, path: str, record: LeafRecord, wanted: Any) -> None:
        """Note a layout in device memory that is not the default one: restore does not make others."""
        # Format.layout was Format.device_local_layout before jax 0.7; that of a ShapeDtypeStruct has no public name.
        named = ("layout", "device_local_layout") if isinstance(wanted, Format) else ("_dll",)
        layout = next((found for name in named if (found := getattr(wanted, name, None)) is not None), None)
        order = getattr(layout, "major_to_minor", None)  # None of Layout.AUTO
        tiling = getattr(layout, "tiling", None) or getattr(layout, "_tiling", None)
        if order is not None and (tuple(order) != tuple(range(len(self._shape(record)))) or tiling):
            self.mismatches.append(
                f"{show(path)} asks for {layout} in the target; restore makes arrays in the default layout: give the"
                " sharding alone, and pass what is restored to jax.device_put with the Format"
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
            try:
                return on_mesh(self._asked.mesh, spec, self._memory(record))
            except LayoutError as error:
                self._spec_problems.append(f"{show(path)}: {error}")
                return None
        return PlannedSharding(tuple(self._axes.items()), spec, self._asked.devices_per_process or 1)

    def _memory(self, record: LeafRecord) -> str | None:
        return None if record.layout is None else self._manifest.layouts[record.layout].memory

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
                f"{counted(len(self.mismatches), 'leaf')} cannot be restored as saved:\n"
                + "\n".join([listing(self.mismatches), *self.remedies()]),
                self.mismatches,
            )

    def remedies(self) -> Iterator[str]:
        """What the caller can do about mismatches of dtype."""
        if self._halved:
            yield (
                'jax.config.update("jax_enable_x64", True) keeps 64 bits, as do NumPy arrays in the target and'
                ' load_numpy; Options(cast="unsafe") restores 32 bits'
            )
        elif any("lossy" in text for text in self.mismatches):
            yield 'Options(cast="unsafe") allows lossy casts'


def _mesh_in_context() -> Mesh | None:
    """The mesh of jax.set_mesh, if there is one; jax 0.6 does not tell."""
    mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
    return mesh if mesh is not None and mesh.shape else None


@functools.cache
def _attributes(kind: type) -> Callable[[Any], Hashable] | None:
    """What the goal of a saved array depends on in a leaf of a target, by the leaf's type; None where it is no leaf."""
    if issubclass(kind, (Sharding, Format)):
        return lambda wanted: wanted
    if issubclass(kind, jax.ShapeDtypeStruct):
        layout = ["_dll"] if hasattr(kind, "_dll") else []
        return operator.attrgetter("shape", "dtype", "sharding", "weak_type", *layout)
    if issubclass(kind, jax.Array):
        weak = ["weak_type"] if hasattr(kind, "weak_type") else []  # PRNG keys have none
        return operator.attrgetter("shape", "dtype", "sharding", "committed", *weak)
    if issubclass(kind, (np.ndarray, np.generic)):
        return operator.attrgetter("shape", "dtype")
    return None


def _canonical_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What JAX makes of a dtype as it is set."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))  # pyright: ignore[reportUnknownMemberType]


def _is_class(value: object) -> bool:
    """Whether it is a dtype, such as jnp.bfloat16, or another class, where a leaf is expected."""
    return isinstance(value, (type, np.dtype))


# What is passed as rename= ---------------------------------------------------------------------------------


def split_rename(rename: Renaming | None) -> tuple[Rename | None, Rules | None]:
    """The new names and the rules of what was passed as `rename=`, at most one of which there is."""
    return (None, rename) if isinstance(rename, Rules) else (rename, None)


def renamed_source(source: Native | Foreign, rename: Renaming | None) -> Native | Foreign:
    """A checkpoint with its leaves renamed, or as it looks through rules. Raises MismatchError, TreeError."""
    if isinstance(rename, Rules):
        return rename.over(source)
    return source if rename is None else replace(source, manifest=narrowed(source.manifest, None, rename))
