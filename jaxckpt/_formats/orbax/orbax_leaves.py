"""The leaves of an item: values, and arrays in Zarr or OCDBT with the shardings that Orbax recorded."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np

from jaxckpt._formats.local_files import convert_checked, exists, from_json, names_in
from jaxckpt._formats.orbax.orbax_records import (
    ARRAYS_FOLDER,
    SHARDINGS_FILE,
    STRINGS_FILE,
    TREE_FILE,
    ArrayRecords,
    Keys,
    ShardingRecord,
    TreeRecord,
    Value,
    path_of,
    read_optional,
)
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Spec, spec_problem
from jaxckpt._model.pieces import Array
from jaxckpt._model.records import MeshRecord
from jaxckpt._pipeline.pipeline import Pending
from jaxckpt._sources.foreign import AsyncArrayData, ForeignArray
from jaxckpt._store.storage_errors import translate_tensorstore_errors
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, show_lines, show_path

_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}
"""The value of each type of empty leaf."""

_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}
"""Values of `value_type` for arrays. Other values are "string" and the types of empty leaves."""


def values_of(path: str, record: TreeRecord, leaves: Mapping[Keys, Value]) -> dict[Keys, Any]:
    """Each leaf as a value, or as an array that is read later."""
    without_data = [
        f"{show_path(path_of(keys))} ({leaf.value_type[:80]!r})"
        for keys, leaf in leaves.items()
        if leaf.skip_deserialize and leaf.value_type not in _EMPTY
    ]
    if without_data:
        raise DataError(f"{path} has no data for {len(without_data)} of its leaves:\n{show_lines(without_data)}")
    if unknown := {leaf.value_type for leaf in leaves.values()} - _EMPTY.keys() - _ARRAYS - {"string"}:
        raise DataError(f"{path}/{TREE_FILE} has the value_type {min(unknown)[:80]!r}, which Orbax does not define")
    strings = read_optional(f"{path}/{STRINGS_FILE}", cast("type[Any]", Any))
    values = _arrays(path, record, {keys: leaf for keys, leaf in leaves.items() if leaf.value_type in _ARRAYS})
    values |= {keys: _string(path, strings, keys) for keys, leaf in leaves.items() if leaf.value_type == "string"}
    values |= {keys: _EMPTY[leaf.value_type] for keys, leaf in leaves.items() if leaf.value_type in _EMPTY}
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


@dataclass(frozen=True, slots=True)
class _ZarrArray(AsyncArrayData):
    """An array of an item."""

    folder: ArrayFolder
    name: str
    driver: Literal["zarr", "zarr3"]
    metadata: Any
    strict: bool

    def start(self, box: Box, target: Array) -> Pending[None]:
        reader = self.folder.array_reader(self.name, self.driver, self.metadata, strict=self.strict)
        return reader.read([(box, target)])[0]

    def read(self, box: Box, target: Array) -> None:
        with translate_tensorstore_errors(f"cannot read the array {self.name!r} of {self.folder.path}", reading=True):
            self.start(box, target).result()


def _arrays(path: str, record: TreeRecord, leaves: Mapping[Keys, Value]) -> dict[Keys, Any]:
    """The leaves that are arrays or Python numbers. The numbers are read here."""
    ocdbt = exists(f"{path}/manifest.ocdbt") if record.use_ocdbt is None else record.use_ocdbt
    folder = ArrayFolder(path, ocdbt)
    names = {keys: ".".join(keys) for keys in leaves}
    outside = [name for name in names.values() if name and not {"", ".", ".."}.isdisjoint(name.split("/"))]
    if outside and not ocdbt:
        raise DataError(f"{path} has arrays whose names are not folders below it:\n{show_lines(map(repr, outside))}")
    driver, file, parse_metadata = (
        ("zarr3", "zarr.json", _parse_zarr3) if record.use_zarr3 else ("zarr", ".zarray", _parse_zarr2)
    )
    texts = folder.read_all([f"{name}/{file}" if name else file for name in names.values()])
    has_jax_arrays = any(leaf.value_type == "jax.Array" for leaf in leaves.values())
    shardings = (has_jax_arrays and read_optional(f"{path}/{SHARDINGS_FILE}", dict[str, str])) or {}
    impls = _key_impls(path) if has_jax_arrays else {}
    lost_impls = record.has_array_metadata and not names_in(f"{path}/{ARRAYS_FOLDER}")
    layouts: dict[str | None, tuple[MeshRecord | None, Spec]] = {None: (None, ())}  # few differ from each other
    arrays: dict[Keys, ForeignArray] = {}
    for (keys, name), text in zip(names.items(), texts, strict=True):
        leaf = show_path(path_of(keys))
        if text is None:
            raise DataError(f"{path} lacks the array {name!r} of the leaf {leaf}")
        what = f"{path}: the Zarr metadata of {leaf}"
        metadata = from_json(what, text, dict[str, Any])
        zarr = _ZarrArray(folder, name, driver, metadata, record.store_array_data_equal_to_fill_value)
        dtype, shape, chunk = parse_metadata(what, metadata)
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
        arrays[keys] = ForeignArray(dtype, shape, zarr, kind, impl, chunk, mesh, spec)
    return arrays | _scalars(arrays)


def _scalars(arrays: Mapping[Keys, ForeignArray]) -> dict[Keys, Any]:
    """The values of arrays that are Python numbers, read together."""
    targets = {
        keys: np.empty((), DTYPES[array.dtype])
        for keys, array in arrays.items()
        if array.kind == "numpy_scalar" and array.dtype in ("bool", "int64", "float64", "complex128")
    }
    pending = {keys: cast("_ZarrArray", arrays[keys].data).start((), target) for keys, target in targets.items()}
    for keys, started in pending.items():
        with translate_tensorstore_errors(f"cannot read the leaf {show_path(path_of(keys))}", reading=True):
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


# Zarr metadata --------------------------------------------------------------------------------------------

_Sides = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]
_ArrayInfo = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(dtype, shape, chunk) of an array."""


class _Zarr2(msgspec.Struct, frozen=True):
    shape: _Sides
    chunks: _Sides
    dtype: str


class _Named(msgspec.Struct, frozen=True):
    name: str
    configuration: dict[str, Any] = {}


class _Zarr3(msgspec.Struct, frozen=True):
    shape: _Sides
    chunk_grid: _Named
    data_type: str
    codecs: list[_Named]


def _parse_zarr2(what: str, metadata: dict[str, Any]) -> _ArrayInfo:
    record = convert_checked(what, metadata, _Zarr2)
    dtype = record.dtype
    if dtype not in DTYPES:
        try:
            dtype = np.dtype(dtype).name
        except TypeError as error:
            raise DataError(f"{what} has dtype {dtype[:40]!r}") from error
    return _require_fit(what, dtype, record.shape, record.chunks)


def _parse_zarr3(what: str, metadata: dict[str, Any]) -> _ArrayInfo:
    record = convert_checked(what, metadata, _Zarr3)
    chunked = [record.chunk_grid, *(codec for codec in record.codecs if codec.name == "sharding_indexed")]
    chunks = [
        convert_checked(what, metadata_part.configuration.get("chunk_shape"), _Sides) for metadata_part in chunked
    ]
    return [_require_fit(what, record.data_type, record.shape, chunk) for chunk in chunks][-1]


def _require_fit(what: str, dtype: str, shape: Sequence[int], chunk: Sequence[int]) -> _ArrayInfo:
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1  # other dtypes are refused by name
    if len(chunk) != len(shape) or any(not 1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True)):
        raise DataError(f"{what} has chunks of {list(chunk)[:40]}, which do not fit its shape {list(shape)[:40]}")
    if math.prod(side or 1 for side in shape) * itemsize >= 1 << 63:
        raise DataError(f"{what} has shape {list(shape)[:40]}, which is too large to address")
    return dtype, tuple(shape), tuple(chunk)


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
