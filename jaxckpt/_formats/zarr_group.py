"""Writes plain Zarr v3 groups, with an array for each leaf at its name, and recognizes them for `overwrite=True`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from typing import Any, Literal

import crc32c
import msgspec
import numpy as np

from jaxckpt._formats.export import Data, arrays_of, names_of, recorded_paths, slabs, write_json
from jaxckpt._formats.index_files import read_json
from jaxckpt._model import zarr
from jaxckpt._model.paths import path_prefixes
from jaxckpt._model.pieces import Pieces
from jaxckpt._model.stacks import Stack, chunk_shape, largest_chunk_bytes, object_shape
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._sources.format_registry import Format
from jaxckpt._sources.source import Source
from jaxckpt._store.files import FileWriter
from jaxckpt._store.foreign_files import list_names
from jaxckpt.errors import DataError, StorageError, TreeError, show_path

_METADATA = "zarr.json"


def write_zarr(source: Source, path: str, options: Options, report: Report) -> None:
    """Write a Zarr v3 group: an array for each leaf at its name, with sharding and crc32c as in jaxckpt's own arrays.

    bfloat16 and other dtypes that Zarr lacks are stored as unsigned integers of their width; the array's attributes
    name the dtype. Other values of the tree, and paths that do not follow from the names, are attributes of the group.
    Raises TreeError for leaves that Zarr cannot hold.

    The dimensions of the leaf "a/w" are named "a/w/0", "a/w/1", and so on, because xarray, which needs names, takes
    dimensions of the same name for one dimension. No other leaf or dimension has such a name.
    """
    arrays = arrays_of(source, options, report, _problem, keep_values=True)
    groups = {"", *(head for name in arrays for head in path_prefixes(name.rpartition("/")[0]))}
    if clashing := groups & arrays.keys():
        raise TreeError(f"{show_path(min(clashing))} is both a leaf and a container of others; give rename=")
    paths = names_of(source)
    leaves = zip(paths, source.manifest.leaves, strict=True)
    values = {name: {"kind": leaf.kind, "value": leaf.value} for name, leaf in leaves if leaf.value is not None}
    content = {"values": values, "paths": recorded_paths(paths)}
    ours = {key: value for key, value in content.items() if value}
    for name in sorted(groups):
        attributes = {"jaxckpt": ours} if not name and ours else {}
        node = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        write_json(os.path.join(path, name, _METADATA), node)
    for name, data in arrays.items():
        dimension_names = [f"{name}/{number}" for number in range(len(data.shape))]
        _write_array(os.path.join(path, name), data, dimension_names, options)


def _write_array(folder: str, data: Data, dimension_names: Sequence[str], options: Options) -> None:
    """Write an array as a stack of its own, with the first dimension as the stack's rows."""
    if not data.shape:
        _write_scalar(folder, data)
        return
    shape, itemsize = data.shape, data.dtype.itemsize
    chunk = chunk_shape(shape, itemsize, largest_chunk_bytes(math.prod(shape) * itemsize, options.chunk_bytes), shape)
    sides = object_shape(shape, chunk, itemsize, options.object_bytes, shape)
    stack = Stack("", data.dtype.name, shape[1:], shape[0], chunk, sides)
    metadata = {**json.loads(zarr.metadata(stack)), "dimension_names": dimension_names}
    write_json(os.path.join(folder, _METADATA), metadata)
    writer = FileWriter(folder, stack, sync=False)  # everything is synced at the end
    for index, box in stack.objects() if 0 not in shape else ():
        values = data[tuple(slice(*side) for side in box)]
        writer.write(index, Pieces(box, data.dtype, box[0][1] - box[0][0], [[(box, values)]])).result()


def _write_scalar(folder: str, data: Data) -> None:
    """Write a 0-d array: one chunk, without sharding."""
    metadata = json.loads(zarr.metadata(Stack("", data.dtype.name, (), 1, (1,), (1,))))
    metadata["shape"] = metadata["chunk_grid"]["configuration"]["chunk_shape"] = []
    metadata["codecs"] = metadata["codecs"][0]["configuration"]["codecs"]
    metadata["dimension_names"] = []
    write_json(os.path.join(folder, _METADATA), metadata)
    content = next(slabs(data)).tobytes()
    with open(os.path.join(folder, "c"), "wb") as file:
        file.write(content + crc32c.crc32c(content).to_bytes(4, "little"))


def _problem(name: str, dtype: np.dtype[Any]) -> str | None:
    """The problem with an array's name, if any: Zarr v3 or file systems do not allow a node of such a name."""
    fine = all(
        key.strip(".") != ""
        and not key.startswith("__")
        and key != _METADATA
        and {"\0", "\\"}.isdisjoint(key)  # some readers interpret a backslash as a slash
        and len(key.encode()) <= 255
        for key in name.split("/")
    )
    return None if fine else "has a name that Zarr does not allow"


# Recognizing a group --------------------------------------------------------------------------------------


def recognizes(path: str, names: Collection[str]) -> bool:
    return _METADATA in names and _node_type(path) == "group"


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to the group: nodes whose folders contain nothing else."""
    return {_METADATA, *(name for name in names if _is_node(os.path.join(path, name)))}


def _is_node(path: str) -> bool:
    kind = _node_type(path)
    names = {*list_names(path)} if kind else set[str]()
    return names <= ({_METADATA, "c"} if kind == "array" else owned_names(path, names)) and kind is not None


class _Node(msgspec.Struct):
    zarr_format: Literal[3]
    node_type: Literal["array", "group"]


def _node_type(path: str) -> str | None:
    """ "array" or "group", from the zarr.json in a folder; None without a valid one."""
    try:
        return read_json(os.path.join(path, _METADATA), _Node).node_type
    except (DataError, StorageError):
        return None


FORMAT = Format("zarr", recognizes, None, owned_names, write_zarr, (".zarr",))
