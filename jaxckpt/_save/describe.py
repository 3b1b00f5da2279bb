"""Describes how a tree will be stored: its structure, its leaves with their layouts, and their values."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxckpt._arguments.casts import CASTABLE, Castable, Dtypes, resolve_casts, resolve_policies
from jaxckpt._arguments.pytree import Leaf, flatten
from jaxckpt._arguments.specs import LeafGroup, Specs, assign_specs, mesh_axes, require_fit, require_mesh, resolve_specs
from jaxckpt._devices.device_layout import warn_of_orders
from jaxckpt._devices.shardings import LayoutTable, key_dtype, memory_kind, named_sharding, process_layout, reduced_axes
from jaxckpt._job.rendezvous import process_names
from jaxckpt._model.checks import MAX_TIED
from jaxckpt._model.dtypes import DTYPES, MAX_RANK, dtype_name
from jaxckpt._model.grid import Layout, Spec, intersect_holders, spec_of
from jaxckpt._model.paths import closest_hint
from jaxckpt._model.pieces import Array
from jaxckpt._model.records import LeafRecord
from jaxckpt._model.select import parse_select
from jaxckpt._model.tree import Structure, Tree, nodes_of
from jaxckpt._model.values import KINDS, PYTHON_KINDS, array_of, encode_value
from jaxckpt._options import Options, StagingMemory
from jaxckpt._save.write_plan import ArrayLeaf
from jaxckpt.errors import InputError, LayoutError, Problem, SpecError, TreeError, show_count, show_path

Value = Any
"""A leaf's jax.Array or NumPy array, or an object with shape and dtype that is read when indexed."""


@dataclass(slots=True)
class Draft:
    """The tree as it will be recorded, with the values of its array leaves by leaf number."""

    structure: Structure
    records: list[LeafRecord] = field(default_factory=list[LeafRecord])
    arrays: list[ArrayLeaf] = field(default_factory=list[ArrayLeaf])
    values: dict[int, Value] = field(default_factory=dict[int, Value])
    table: LayoutTable = field(default_factory=LayoutTable)
    state_leaves: frozenset[int] = frozenset()
    """Leaves in the state of an object. They are never cast, and are equal in all processes."""

    casts: dict[int, np.dtype[Any]] = field(default_factory=dict[int, "np.dtype[Any]"])
    """The stored dtype of each leaf that is cast."""

    ties: dict[int, int] = field(default_factory=dict[int, int])
    """For each leaf that is the same array as an earlier leaf, in the same layout: the number of the earlier leaf,
    whose row it shares. It has no entry in `arrays` and `values`."""

    staging_memory: StagingMemory = "auto"
    """`Options.staging_memory`: where the values are copied."""


_HOST = ((0,),)  # the holder of the single cell of a host-local leaf: process 0


def describe(
    tree: Tree, mesh: Mesh | None, specs: Specs, options: Options, subtrees: tuple[str, ...] = (), dtype: Dtypes = None
) -> Draft:
    """Flatten a tree and decide how each leaf will be stored. TreeError and SpecError list all leaves at fault.

    The leaves of each subtree (path of a subtree) are stored separately from all others, so that they can be dropped.
    """
    if specs is not None and mesh is None:
        raise InputError("save(specs=…) needs mesh=: the mesh whose axes the specs name")
    require_mesh(mesh)
    leaves, structure = flatten(tree, states=True)
    state_leaves = frozenset(number for number, leaf in enumerate(leaves) if leaf.in_state)
    draft = Draft(structure, state_leaves=state_leaves, staging_memory=options.staging_memory)
    problems: list[Problem] = []
    for leaf in leaves:
        try:
            record, value = _record(leaf)
        except TreeError as error:
            problems.append(Problem(leaf.path, str(error)))
            continue
        draft.records.append(record)
        if value is not None:
            draft.values[len(draft.records) - 1] = value
    if problems:
        raise TreeError.of(f"{len(problems)} of {show_count(len(leaves), 'leaf')} cannot be stored", problems)
    warn_of_orders(
        ((leaf.path, leaf.value) for leaf in leaves), "checkpoints do not record it, and restores make the default one"
    )
    if dtype is not None:
        _choose_casts(leaves, draft, dtype, options)
    _set_layouts(leaves, draft, mesh, specs, options)
    if subtrees:
        tests, used = [parse_select(subtree) for subtree in subtrees], 0
        for index, array in enumerate(draft.arrays):
            path = draft.records[array.number].path
            bits = sum(1 << number for number, test in enumerate(tests) if test(path))  # subtrees may overlap
            draft.arrays[index] = msgspec.structs.replace(array, subtree=bits)
            used |= bits
        unused = [subtree for number, subtree in enumerate(subtrees) if not used >> number & 1]
        for message in _missing(unused, draft.structure).values():  # a subtree may hold no arrays
            raise TreeError(message)
    _tie(leaves, draft)
    return draft


def _choose_casts(leaves: Sequence[Leaf], draft: Draft, dtype: Dtypes, options: Options) -> None:
    """Note which leaves are cast. Raises TreeError that lists all leaves that cannot be cast."""
    castable = [
        Castable(
            leaf.path, leaf.value, draft.values[number].dtype if record.kind in CASTABLE and not leaf.in_state else None
        )
        for number, (leaf, record) in enumerate(zip(leaves, draft.records, strict=True))
    ]
    policies = resolve_policies(options.cast, [entry.path for entry in castable], (entry.leaf for entry in castable))
    casts, problems = resolve_casts(dtype, castable, policies)
    if problems:
        raise TreeError.of(f"dtype= cannot be met for {show_count(len(problems), 'leaf')}", problems)
    for number, record in enumerate(draft.records):
        if record.path in casts and casts[record.path] != draft.values[number].dtype:
            draft.casts[number] = casts[record.path]
            draft.records[number] = msgspec.structs.replace(record, weak=False)


def _tie(leaves: Sequence[Leaf], draft: Draft) -> None:
    """Store leaves that are the same array in the same layout only once."""
    if first_occurrences([leaves[number].value for number in draft.values]) is None:
        return
    first: dict[Hashable, int] = {}
    counts = collections.Counter[int]()
    for array in draft.arrays:
        if draft.records[array.number].kind in ("jax", "key", "numpy"):
            key = id(leaves[array.number].value), array.dtype, array.layout, array.is_exchanged, array.subtree
            first_number = first.setdefault(key, array.number)
            if counts[first_number] == MAX_TIED:
                first_number = first[key] = array.number
            counts[first_number] += 1
            if first_number != array.number:
                draft.ties[array.number] = first_number
                del draft.values[array.number]
    draft.arrays = [array for array in draft.arrays if array.number not in draft.ties]


def first_occurrences(leaves: Sequence[Any]) -> list[int] | None:
    """For each leaf, the index of the first leaf that is the same object; None if all differ."""
    if len(set(map(id, leaves))) == len(leaves):
        return None
    first = dict[int, int]()
    return [first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves)]


def missing_subtrees(tree: Tree, subtrees: Sequence[str]) -> dict[str, str]:
    """For each subtree at whose path a tree has nothing, the message of an error. Raises TreeError for other reasons.

    Takes less time than describing the tree.
    """
    return _missing(subtrees, flatten(tree, states=True)[1]) if subtrees else {}


def _missing(subtrees: Sequence[str], structure: Structure) -> dict[str, str]:
    paths = [path for path, _ in nodes_of(structure) if path] if subtrees else []
    return {
        subtree: f"keep_last_of has {subtree!r}, but the tree has nothing at that path{closest_hint(subtree, paths)}"
        for subtree in subtrees
        if not any(map(parse_select(subtree), paths))
    }


_ARRAY_TYPES = set[type]()
"""Types known to be jax.Array, because isinstance takes a Python call per leaf."""


def _record(leaf: Leaf) -> tuple[LeafRecord, jax.Array | Array | None]:
    """The record of a leaf, and the array to store for it. Raises TreeError (a reason, without the path)."""
    value = leaf.value
    if isinstance(value, Tracer):
        raise TreeError("is a tracer: call save outside of jit, grad and vmap")
    if type(value) in _ARRAY_TYPES or isinstance(value, jax.Array):
        _ARRAY_TYPES.add(type(value))
        if value.is_deleted():
            raise TreeError("is a deleted array: it was donated to a jitted call, or deleted")
        if dtype_name(value.dtype) not in DTYPES and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return LeafRecord(leaf.path, "key", impl=_impl(value)), jax.random.key_data(value)
        return LeafRecord(leaf.path, "jax", weak=value.weak_type), _require_storable(value)
    if isinstance(value, np.generic):
        return LeafRecord(leaf.path, "numpy_scalar"), _require_storable(np.asarray(value))
    if isinstance(value, np.ndarray):
        array = _require_storable(value)
        if isinstance(value, np.ma.MaskedArray):
            raise TreeError("is a MaskedArray; save its .data and its .mask as two leaves")
        if type(value) not in (np.ndarray, np.memmap):
            raise TreeError(f"is a {type(value).__name__}; make it a plain array with np.asarray")
        return LeafRecord(leaf.path, "numpy"), array
    if type(value) not in PYTHON_KINDS:
        raise TreeError(
            f"is of type {type(value).__module__}.{type(value).__qualname__}; leaves may be jax.Array, NumPy arrays"
            " and scalars, bool, int, float, complex, str, bytes"
            + (
                "; leave functions out, as jax.tree.map(lambda leaf: None if callable(leaf) else leaf, tree) does"
                if callable(value)
                else "; a jax.ShapeDtypeStruct has no values: save the arrays themselves"
                if isinstance(value, jax.ShapeDtypeStruct)
                else ", or objects with state_dict and load_state_dict; jaxckpt.register_leaf adds other types"
            )
        )
    inline = encode_value(value)
    if inline is not None:
        return LeafRecord(leaf.path, inline[0], value=inline[1]), None
    return LeafRecord(leaf.path, type(value).__name__), array_of(value)


def _impl(keys: jax.Array) -> str:
    """The name of the implementation of PRNG keys. Raises TreeError if they could not be restored from it."""
    if keys.ndim >= MAX_RANK:
        raise TreeError(f"has PRNG keys of {keys.ndim} dimensions; at most {MAX_RANK - 1} can be stored")
    name = str(jax.random.key_impl(keys))
    if key_dtype(name) != keys.dtype:
        raise TreeError(
            f"has PRNG keys of implementation {name!r}, which jax.random.key(0, impl={name!r}) does not create, so"
            " they could not be restored; save jax.random.key_data of them"
        )
    return name


def _require_storable(value: Any) -> Any:
    if dtype_name(value.dtype) not in DTYPES:
        raise TreeError(f"has dtype {value.dtype}, which cannot be stored: {_instead_of_dtype(value.dtype)}")
    if value.ndim > MAX_RANK:
        raise TreeError(f"has {value.ndim} dimensions; at most {MAX_RANK} can be stored")
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def _instead_of_dtype(dtype: Any) -> str:
    """What to do instead of storing an array of another dtype."""
    if dtype == jax.dtypes.float0:
        return "it is the gradient of integers, which has no values; leave it out"
    if dtype.kind in "SUOT":
        return "leaf.tolist() makes leaves of its items"
    if dtype.kind in "mM":
        return "save leaf.astype(np.int64), and the unit"
    if dtype.names:
        return "save {name: leaf[name] for name in leaf.dtype.names}"
    return f"cast it to one of {', '.join(DTYPES)}"


def _set_layouts(leaves: Sequence[Leaf], draft: Draft, mesh: Mesh | None, specs: Specs, options: Options) -> None:
    """Set the layout of each array leaf and of its record. Raises SpecError that lists all leaves at fault."""
    on_devices = {name for name, kind in KINDS.items() if kind.on_devices}
    requested_specs: Mapping[str, Spec] = {}
    if specs is not None:
        pairs = zip(leaves, draft.records, strict=True)
        requested_specs = resolve_specs(
            specs, [(leaf.path, leaf.value) for leaf, record in pairs if record.kind in on_devices]
        )
    groups: dict[Hashable, list[int]] = {}
    for number, value in draft.values.items():
        record = draft.records[number]
        if record.kind in on_devices:
            # The stored raw data of a PRNG key has one dimension more than the recorded key.
            leaf = leaves[number].value
            own = value is leaf or leaf.sharding
            form = value.sharding, value.shape, value.committed, own, requested_specs.get(record.path)
            groups.setdefault(form, []).append(number)
    shardings: Sequence[NamedSharding | None] = [None] * len(groups)
    problems: list[Problem] = []
    if mesh is not None:
        shardings, problems = _shardings(leaves, groups.values(), mesh, requested_specs, options)
        require_fit(problems)
    layouts: dict[int, tuple[Layout, bool, int]] = {}
    for group, sharding in zip(groups.values(), shardings, strict=True):
        try:
            layout = _leaf_layout(leaves[group[0]], draft.values[group[0]], sharding, draft.table)
        except SpecError as error:
            problems.extend(_layout_problem(leaves[number].path, error) for number in group)
            continue
        layouts.update(dict.fromkeys(group, layout))
    require_fit(problems)
    for number, value in draft.values.items():
        placed = layouts.get(number)
        if placed is None:
            layout, is_exchanged = Layout((1,) * value.ndim, _HOST), False
        else:
            layout, is_exchanged, record = placed
            draft.records[number] = msgspec.structs.replace(draft.records[number], layout=record)
        dtype = draft.casts.get(number, value.dtype) if draft.casts else value.dtype
        draft.arrays.append(ArrayLeaf(number, dtype_name(dtype), value.shape, layout, is_exchanged))


def _shardings(
    leaves: Sequence[Leaf],
    groups: Collection[Sequence[int]],
    mesh: Mesh,
    requested_specs: Mapping[str, Spec],
    options: Options,
) -> tuple[list[NamedSharding], list[Problem]]:
    """The sharding of each group of leaves on the storage mesh, and the problems."""
    leaf_groups, problems = list[LeafGroup](), list[Problem]()
    for group in groups:
        first, paths = leaves[group[0]], [leaves[number].path for number in group]
        spec, sharding = requested_specs.get(first.path), first.value.sharding
        try:
            own = spec_of(sharding.spec) if spec is None and isinstance(sharding, NamedSharding) else ()
            leaf_groups.append(LeafGroup(paths, first.value.shape, own, spec))
        except SpecError as error:
            problems.extend(_layout_problem(path, error) for path in paths)
    if problems:
        return [], problems
    specs, problems = assign_specs(mesh_axes(mesh), leaf_groups, options)
    if problems:
        return [], problems
    shardings = list[NamedSharding]()
    for group, spec in zip(groups, specs, strict=True):
        try:
            first = leaves[group[0]]
            own = first.value.sharding
            reduced = () if first.path in requested_specs else reduced_axes(own)
            shardings.append(named_sharding(mesh, spec, memory_kind(own), reduced))
        except LayoutError as error:
            problems.extend(_layout_problem(leaves[number].path, error) for number in group)
    return shardings, problems


def _layout_problem(path: str, error: Exception) -> Problem:
    return Problem(path, f"cannot be laid out: {error}")


def _leaf_layout(
    leaf: Leaf, value: jax.Array, mesh_sharding: NamedSharding | None, table: LayoutTable
) -> tuple[Layout, bool, int]:
    """Cells and holders of a leaf, whether it must be exchanged first, and the index of its layout record."""
    own = value.sharding if value.committed else None
    stored = own if mesh_sharding is None else mesh_sharding
    layout, is_exchanged = Layout((1,) * value.ndim, _HOST), False
    if stored is not None:  # otherwise each process has its own array on its own default device
        layout, is_exchanged = _storage_layout(own, stored, value.shape, leaf.path)
    recorded = leaf.value.sharding if mesh_sharding is None else mesh_sharding
    return layout, is_exchanged, table.add(recorded, committed=mesh_sharding is not None or leaf.value.committed)


def _storage_layout(own: Sharding | None, stored: Sharding, shape: tuple[int, ...], path: str) -> tuple[Layout, bool]:
    """Cells and holders of a leaf with layout `own` that is stored as `stored`, and whether it must be exchanged first.

    `own` is None for an uncommitted leaf, which every process holds completely.
    """
    layout = process_layout(stored, shape)
    if own is None or stored == own:
        return layout, False
    own_layout = process_layout(own, shape)
    # A holder in the storage layout can write a cell only if the pieces on its own devices cover it.
    able = intersect_holders(layout, own_layout)
    if able is not None:
        return able, False
    if own_layout.processes != frozenset(range(jax.process_count())):
        raise LayoutError(
            f"leaf {show_path(path)} is only on devices of {process_names(sorted(own_layout.processes))}, but with"
            f" mesh=, {process_names(sorted(layout.processes))} would write it; save it without mesh=, or replicate it"
            " over all processes first"
        )
    if not isinstance(own, NamedSharding):
        raise LayoutError(
            f"leaf {show_path(path)} has a {type(own).__name__}, and only a NamedSharding can be changed by mesh=; save"
            " it without mesh=, or pass it to jax.device_put with a NamedSharding first"
        )
    return layout, True
