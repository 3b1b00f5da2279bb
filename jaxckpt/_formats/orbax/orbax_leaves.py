"""The leaves of an item: values, and arrays in Zarr or OCDBT with the shardings that Orbax recorded."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from jaxckpt._formats.index_files import from_json
from jaxckpt._formats.orbax.orbax_aggregate import aggregated_values
from jaxckpt._formats.orbax.orbax_records import (
    ARRAYS_FOLDER,
    DATABASE_FILE,
    SHARDINGS_FILE,
    STRINGS_FILE,
    TREE_FILE,
    ArrayRecords,
    Keys,
    ShardingRecord,
    TreeRecord,
    Value,
    mark_of,
    path_of,
    read_optional,
)
from jaxckpt._formats.zarr_arrays import Driver, ZarrArray, read_metadata
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Spec, spec_problem
from jaxckpt._model.records import MeshRecord
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt._store.foreign_files import exists, names_in, unless_replaced
from jaxckpt._store.storage_errors import translate_array_errors
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, show_lines, show_path

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
