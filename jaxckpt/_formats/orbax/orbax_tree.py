"""The tree of an item: its containers, and its leaves, which are values or arrays that are read later.

It is long because Orbax has recorded trees in several ways, which share their leaves.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt._formats.export import tree_of_keys
from jaxckpt._formats.flax_msgpack import is_msgpack_map, read_msgpack
from jaxckpt._formats.index_files import from_json, read_json
from jaxckpt._formats.orbax.orbax_records import (
    AGGREGATE_FILE,
    ARRAYS_FOLDER,
    DATABASE_FILE,
    MAX_TREE_BYTES,
    SHARDINGS_FILE,
    STRINGS_FILE,
    TREE_FILE,
    ArrayRecords,
    KeyMetadata,
    Keys,
    ShardingRecord,
    TreeRecord,
    Value,
    mark_of,
    path_of,
    read_optional,
)
from jaxckpt._formats.zarr_arrays import Driver, ZarrArray, dtype_name_of, parse_zarr2, read_metadata, require_inside
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Spec, spec_problem
from jaxckpt._model.records import MeshRecord
from jaxckpt._model.tree import MAX_DEPTH, Container, Tree, keys_of, unflatten
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt._store.foreign_files import exists, marked, names_in, read_head, unless_replaced
from jaxckpt._store.storage_errors import translate_array_errors
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, StorageError, show_lines, show_path

# Leaves ---------------------------------------------------------------------------------------------------

_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
"""The value of each type of empty leaf."""

_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
"""Values of `value_type` for arrays. Other values are "string" and the types of empty leaves."""


def values_of(path: str, record: TreeRecord, leaves: Mapping[Keys, Value]) -> dict[Keys, Any]:
    """Each leaf as a value, or as an array that is read later."""
    elsewhere = {keys: leaf for keys, leaf in leaves.items() if leaf.skip_deserialize and leaf.value_type not in _EMPTY}
    values = aggregated_values(path, elsewhere)
    if elsewhere.keys() - values:
        without_data = [
            f"{show_path(path_of(keys))} ({leaf.value_type[:80]!r})"
            for keys, leaf in elsewhere.items()
            if keys not in values
        ]
        raise DataError(f"{path} has no data for {len(without_data)} of its leaves:\n{show_lines(without_data)}")
    if unknown := {leaf.value_type for leaf in leaves.values()} - _EMPTY.keys() - _ARRAYS - {"string"}:
        raise DataError(f"{path}/{TREE_FILE} has the value_type {min(unknown)[:80]!r}, which Orbax does not define")
    strings = read_optional(f"{path}/{STRINGS_FILE}", cast("type[Any]", Any))
    here = {keys: leaf for keys, leaf in leaves.items() if keys not in values}
    values |= _arrays(path, record, {keys: leaf for keys, leaf in here.items() if leaf.value_type in _ARRAYS})
    values |= {keys: _string(path, strings, keys) for keys, leaf in here.items() if leaf.value_type == "string"}
    values |= {keys: _EMPTY[leaf.value_type] for keys, leaf in here.items() if leaf.value_type in _EMPTY}
    return {keys: values[keys] for keys in leaves}


def _string(path: str, strings: Any, keys: Keys) -> str:
    """A str, found by the JSON pointer that Orbax derives from its name."""
    node = strings
    for key in ".".join(keys).split("/"):
        inner = cast("dict[str, Any]", node) if isinstance(node, dict) else {}
        node = inner.get(key.replace("~1", "/").replace("~0", "~"))
    if not isinstance(node, str):
        raise DataError(f"{path}/{STRINGS_FILE} lacks the leaf {show_path(path_of(keys))}")
    return node


# Arrays ---------------------------------------------------------------------------------------------------


def _arrays(path: str, record: TreeRecord, leaves: Mapping[Keys, Value]) -> dict[Keys, Any]:
    """The leaves that are arrays or Python numbers. The numbers are read here."""
    ocdbt = exists(f"{path}/{DATABASE_FILE}") if record.use_ocdbt is None else record.use_ocdbt
    folder = ArrayFolder.at(path, ocdbt=ocdbt, mark=None if ocdbt else mark_of(path))
    names = {keys: ".".join(keys) for keys in leaves}
    driver: Driver = "zarr3" if record.use_zarr3 else "zarr"
    strict = record.store_array_data_equal_to_fill_value
    located = read_metadata(folder, {n: show_path(path_of(keys)) for keys, n in names.items()}, driver, strict=strict)
    has_jax_arrays = any(leaf.value_type == "jax.Array" for leaf in leaves.values())
    shardings = (has_jax_arrays and read_optional(f"{path}/{SHARDINGS_FILE}", dict[str, str])) or {}
    impls = _key_impls(path) if has_jax_arrays else {}
    lost_impls = record.has_array_metadata and not names_in(f"{path}/{ARRAYS_FOLDER}")
    layouts: dict[str | None, tuple[MeshRecord | None, Spec]] = {None: (None, ())}  # few differ from each other
    arrays: dict[Keys, ForeignArray] = {}
    for keys, name in names.items():
        leaf = show_path(path_of(keys))
        if (array := located.get(name)) is None:
            raise DataError(f"{path} lacks the array {name!r} of the leaf {leaf}")
        dtype, shape = array.dtype, array.shape
        kind, impl, mesh, spec = "numpy", None, None, ()
        if leaves[keys].value_type == "jax.Array":
            impl = impls.get(name)
            kind = "jax" if impl is None else "key"
            if lost_impls and dtype == "uint32" and shape:
                raise DataError(f"{path}/{ARRAYS_FOLDER} is missing: it records whether {leaf} holds PRNG keys")
            sharding = shardings.get(base64.urlsafe_b64encode(name.encode()).decode())
            what = f"{path}/{SHARDINGS_FILE}: the sharding of {leaf}"
            if sharding not in layouts:
                layouts[sharding] = _parse_sharding(what, cast("str", sharding))
            mesh, spec = layouts[sharding]
            if problem := mesh and spec_problem(mesh.axes, spec, shape):
                raise DataError(f"{what} does not fit: {problem}")
        elif leaves[keys].value_type == "scalar":
            kind = "numpy_scalar"
            if shape:
                raise DataError(f"{path}: {leaf} is a scalar, but has shape {list(shape)}")
        arrays[keys] = replace(array, kind=kind, impl=impl, mesh=mesh, spec=spec)
    return arrays | _scalars(arrays)


def _scalars(arrays: Mapping[Keys, ForeignArray]) -> dict[Keys, Any]:
    """The values of arrays that are Python numbers, read together."""
    targets = {
        keys: np.empty((), DTYPES[array.dtype])
        for keys, array in arrays.items()
        if array.kind == "numpy_scalar" and array.dtype in ("bool", "int64", "float64", "complex128")
    }
    pending = {keys: cast("ZarrArray", arrays[keys].data).start((), target) for keys, target in targets.items()}
    for keys, started in pending.items():
        what = f"cannot read the leaf {show_path(path_of(keys))}"
        with unless_replaced(arrays[keys].data.marks), translate_array_errors(what, reading=True):
            started.result()
    return {keys: target.item() for keys, target in targets.items()}


def _key_impls(path: str) -> dict[str, str]:
    """The PRNG implementation of each array of typed keys. Every process recorded all arrays; Orbax reads one
    record."""
    notes = sorted(names_in(f"{path}/{ARRAYS_FOLDER}"))
    record = read_optional(f"{path}/{ARRAYS_FOLDER}/{notes[0]}", ArrayRecords) if notes else None
    arrays = [wrapped.array_metadata for wrapped in record.array_metadatas] if record else []
    impls = {array.param_name: (array.ext_metadata or {}).get("random_key_impl") for array in arrays}
    return {name: impl for name, impl in impls.items() if isinstance(impl, str)}


# Shardings ------------------------------------------------------------------------------------------------


def _parse_sharding(what: str, text: str) -> tuple[MeshRecord | None, Spec]:
    """(mesh, spec) of a recorded sharding. The mesh is None for a single device and for an unknown kind of sharding."""
    record = from_json(what, text, ShardingRecord)
    if record.sharding_type != "NamedSharding":
        return None, ()
    count = math.prod(record.shape)
    axes = dict(zip(record.axis_names, record.shape, strict=False))
    if not len(axes) == len(record.axis_names) == len(record.shape):
        raise DataError(f"{what} is damaged: axes {record.axis_names[:20]} of sizes {record.shape[:20]}")
    devices = list(range(count)) if record.device_mesh is None else list(_device_ids(record.device_mesh.mesh))
    if len(set(devices)) != count or len(devices) != count or min(devices, default=0) < 0:
        raise DataError(f"{what} is damaged: {len(devices)} devices on a mesh {axes}")
    types = [name.rpartition(".")[2] for name in record.axis_types or ["Auto"] * len(axes)]
    if len(types) != len(axes) or not {"Auto", "Explicit", "Manual"}.issuperset(types):
        raise DataError(f"{what} is damaged: axis types {types[:20]}")
    spec = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in record.partition_spec
    ]
    while spec and not spec[-1]:
        spec.pop()
    return MeshRecord(axes, devices, types), tuple(spec)


def _device_ids(mesh: list[Any]) -> Iterator[int]:
    """The ids of the devices of a mesh, in row-major order."""
    nodes: list[Any] = [mesh]
    while nodes:
        match nodes.pop():
            case list() as inner:
                nodes.extend(reversed(cast("list[Any]", inner)))
            case {"id": int(number)} if 0 <= number < 1 << 32:
                yield number
            case _:
                yield -1


# The aggregate file ---------------------------------------------------------------------------------------
# A leaf is its value, or refers to an array in the folder: by "PLACEHOLDER://params.kernel", or, in T5X's checkpoints,
# by tensorstore's spec. Orbax before 0.3 has no other record of the tree.

_PLACEHOLDER = "PLACEHOLDER://"


def is_aggregated(path: str) -> bool:
    """Whether a folder has the file. What cannot be read does not count: any folder may be next to a checkpoint."""
    try:
        return is_msgpack_map(read_head(f"{path}/{AGGREGATE_FILE}", 300))
    except (DataError, StorageError):
        return False


def owned_by_aggregate(path: str) -> set[str]:
    """The names in a folder that belong to the file's tree: arrays, and the file itself."""
    return {AGGREGATE_FILE} | {name for name in names_in(path) if exists(f"{path}/{name}/.zarray")}


def read_aggregate(path: str) -> Tree:
    """The tree of a folder without another record. Raises DataError, StorageError."""
    file = f"{path}/{AGGREGATE_FILE}"
    return read_msgpack(file, functools.partial(_array, ArrayFolder.at(path, ocdbt=False, mark=marked(file))))


def aggregated_values(path: str, leaves: Mapping[Keys, Any]) -> dict[Keys, Any]:
    """The values of those leaves that are in the file. Raises DataError, StorageError."""
    tree = read_msgpack(f"{path}/{AGGREGATE_FILE}") if leaves and is_aggregated(path) else {}
    values = {keys: functools.reduce(_child, keys, tree) for keys in leaves}
    return {keys: value for keys, value in values.items() if not _is_reference(value)}


def _child(node: Any, key: str) -> Any:
    """A child of a container of the file; a reference if it has none of this name."""
    if isinstance(node, list):
        node = dict(enumerate(cast("list[Any]", node)))
    children = {
        str(name): child for name, child in cast("dict[Any, Any]", node if isinstance(node, dict) else {}).items()
    }
    return children.get(key, _PLACEHOLDER)


def _is_reference(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.startswith(_PLACEHOLDER))


def _array(folder: ArrayFolder, node: Any) -> ForeignArray | None:
    """The array that a leaf refers to; None for other values."""
    match node:
        case str() if node.startswith(_PLACEHOLDER):
            name, spec = node.removeprefix(_PLACEHOLDER), None
        case {"driver": "zarr", "kvstore": {"path": str(path)}, "dtype": str(), "metadata": dict()}:
            name, spec = path.rstrip("/").rpartition("/")[2], cast("dict[str, Any]", node)
        case _:
            return None
    require_inside(folder, [name])
    found = read_metadata(folder, {name: repr(name)}, "zarr", strict=False).get(name)
    if found is None and spec is not None:
        found = _array_of_spec(folder, name, spec)
    if found is None:
        raise DataError(f"{folder.path} lacks the array {name!r}, to which {AGGREGATE_FILE} refers")
    return found


def _array_of_spec(folder: ArrayFolder, name: str, spec: Mapping[str, Any]) -> ForeignArray:
    """An array without Zarr metadata of its own, described by its spec in the file."""
    what = f"{folder.path}/{AGGREGATE_FILE}: the spec of {name!r}"
    if dtype_name_of(spec["dtype"]) is None:
        raise DataError(f"{what} has dtype {spec['dtype'][:40]!r}")
    dtype = spec["dtype"] if spec["dtype"] == "bfloat16" else np.dtype(DTYPES.get(spec["dtype"], spec["dtype"])).str
    metadata = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dtype": dtype, **spec["metadata"]}
    dtype, shape, chunk = parse_zarr2(what, metadata)
    data = ZarrArray(folder, name, "zarr", metadata, strict=False, mark=folder.mark_of(AGGREGATE_FILE))
    return ForeignArray(dtype, shape, data, chunk=chunk)


# Trees ----------------------------------------------------------------------------------------------------


def read_tree(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata."""
    record = read_json(f"{path}/{TREE_FILE}", TreeRecord, MAX_TREE_BYTES)
    entries = {tuple(key.key for key in entry.key_metadata): entry for entry in record.tree_metadata.values()}
    if len(entries) < len(record.tree_metadata):
        raise DataError(f"{path}/{TREE_FILE} is damaged: two of its leaves have the same keys")
    if any(len(keys) > MAX_DEPTH for keys in entries):
        raise DataError(f"{path}: the tree is nested deeper than {MAX_DEPTH} containers")
    values = values_of(path, record, {keys: entry.value_metadata for keys, entry in entries.items()})
    tree = _typed_tree(path, record.value_metadata_tree, values) if record.value_metadata_tree else None
    if tree is None:
        typed = {keys: tuple(_key(path, key) for key in entry.key_metadata) for keys, entry in entries.items()}
        tree = tree_of_keys(path, [(typed[keys], value) for keys, value in values.items()])
    has_metadata = record.custom_metadata is not None and record.custom_metadata is not msgspec.UNSET
    return tree, {"custom_metadata": record.custom_metadata} if has_metadata else {}


def _key(path: str, key: KeyMetadata) -> str | int:
    """A key of a dict or an index of a list. Raises DataError."""
    if key.key_type == 2:
        return key.key
    if not re.fullmatch("0|[1-9][0-9]{0,8}", key.key):
        raise DataError(f"{path}/{TREE_FILE} is damaged: {key.key[:80]!r} is not an index")
    return int(key.key)


def _typed_tree(path: str, text: str, values: Mapping[Keys, Any]) -> Tree | None:
    """The tree with its tuples and namedtuples; None if it has other leaves, because of a bug in Orbax."""
    used: list[Keys] = []

    def build(node: Any, keys: Keys) -> Tree:
        if len(keys) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
        match node:
            case {"category": "custom", "clazz": "ValueMetadataEntry"}:
                used.append(keys)
                return values[keys]
            case {"category": "custom", "clazz": "tuple", "entries": list(children)}:
                return tuple(build(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", children)))
            case {"category": "namedtuple", "clazz": str(name), "entries": list(children)}:
                fields = {str(field["key"]): build(field["value"], (*keys, str(field["key"]))) for field in children}
                name, numbers = name.rpartition(".")[2], tuple(range(len(fields)))
                node = Container(type="namedtuple", name=name, keys=tuple(fields), children=numbers)
                keys_of(node)  # raises if they are not valid names
                return unflatten(node, list(fields.values()))
            case dict():
                return {key: build(child, (*keys, key)) for key, child in cast("dict[str, Any]", node).items()}
            case list():
                return [build(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", node))]
            case _:
                raise ValueError(f"{str(node)[:80]!r} is not part of a tree")

    try:
        tree = build(json.loads(text), ())
    except KeyError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}/{TREE_FILE} has a damaged value_metadata_tree: {str(error)[:200]}") from error
    return tree if len(used) == len(values) else None
