"""The file `checkpoint` of Orbax before 0.6 and of T5X: leaves in Flax's msgpack.

A leaf is its value, or refers to an array in the folder: by "PLACEHOLDER://params.kernel", or, in T5X's checkpoints, by
tensorstore's spec. Orbax before 0.3 has no other record of the tree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from jaxckpt._formats.flax_msgpack import is_msgpack_map, read_msgpack
from jaxckpt._formats.orbax.orbax_records import AGGREGATE_FILE, Keys
from jaxckpt._formats.zarr_arrays import ZarrArray, dtype_name_of, parse_zarr2, read_metadata, require_inside
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.tree import Tree
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt._store.foreign_files import exists, marked, names_in, read_head
from jaxckpt._store.tensors import ArrayFolder
from jaxckpt.errors import DataError, StorageError

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
