"""OneFlow's checkpoints (output of `flow.save`), read without OneFlow: of one rank, or of all ranks combined.

pickled_data in the folder: a pickle of the object ─▶ its tensors: other folders, each with "meta" (shape and dtype,
  as protobuf text) and "out" (the bytes)
a file, the default of OneFlow 1.0: a pickle of the object with its tensors as NumPy arrays
"""

from __future__ import annotations

import collections
import functools
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxckpt._arguments.pytree import flatten
from jaxckpt._formats.index_files import path_inside, reads_files
from jaxckpt._formats.pickle_machine import OpaqueObject
from jaxckpt._formats.pickles import as_array, as_tree, unpickle, unreadable
from jaxckpt._formats.rank_files import Files, assemble, common_url, paths_of
from jaxckpt._formats.shards import FileData
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES, MAX_RANK
from jaxckpt._model.tree import Structure, Tree, nested_dicts, unflatten
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, InMemoryData, with_files
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import (
    exists,
    is_folder,
    list_names,
    names_in,
    names_or_empty,
    opened,
    read_head,
    read_small,
    using_files,
)
from jaxckpt.errors import DataError, NotACheckpointError

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jaxckpt._arguments.specs import Specs

_PICKLE, _DONE, _GRAPH, _META, _DATA = "pickled_data", "snapshot_done", "model.mlir", "meta", "out"
_MAGIC = b"__oneflow__"
_PICKLED_TENSOR_NAME = re.compile(r"(global_)?tensor_\d+")
"""Names of tensor folders that a pickle refers to. The tensors' own names are only in the pickle."""

_DTYPES = {  # oneflow/core/common/data_type.proto
    "kFloat": (2, "float32"),
    "kDouble": (3, "float64"),
    "kInt8": (4, "int8"),
    "kInt32": (5, "int32"),
    "kInt64": (6, "int64"),
    "kUInt8": (7, "uint8"),
    "kFloat16": (9, "float16"),
    "kBFloat16": (11, "bfloat16"),
    "kBool": (12, "bool"),
    "kUInt16": (13, "uint16"),
    "kUInt32": (14, "uint32"),
    "kUInt64": (15, "uint64"),
    "kInt16": (17, "int16"),
    "kComplex64": (20, "complex64"),
    "kComplex128": (21, "complex128"),
}
_DTYPE_BY_NUMBER = dict(_DTYPES.values())

MAX_META_BYTES = 1 << 16

_MESSAGE = re.compile(
    r"\s*shape\s*\{\s*(?P<dims>(?:dim:\s*\d{1,18}\s*)*)\}\s*(?:stride\s*\{[^{}]*\}\s*)?data_type:\s*(?P<dtype>\w+)\s*"
)


def recognizes(path: str, names: Collection[str]) -> bool:
    if names:
        return any(name in names for name in (_PICKLE, _DONE, _GRAPH))
    start = read_head(path, 128)
    return start.startswith(b"\x80") and b"protocol_version" in start and _MAGIC in start


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to this format."""
    folders = {name for name in names if {*names_or_empty(os.path.join(path, name))} == {_META, _DATA}}
    return folders | {_PICKLE, _DONE, _GRAPH}


def open_oneflow(path: str) -> ForeignCheckpoint:
    """The tree that one rank saved, which is complete if its tensors were global."""
    return compose(path, _saved(path), "oneflow")


@explain_keywords
@reads_files
def oneflow_ranks(
    files: Files, *, mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None, specs: Specs = None
) -> ForeignCheckpoint:
    """Combine the files that the ranks of a OneFlow job saved separately into one checkpoint of global arrays.

    Pass the result to `restore`, `load_numpy`, `open`, `convert`, `diff` or `verify` in place of a path. OneFlow does
    not record how local tensors were split, so the caller passes it here. Only the descriptions of arrays are read
    here; arrays are read from the rank files later, box by box. Every process makes this call.

    Global tensors that one rank saved (`flow.save(…, global_dst_rank=0)`) do not need this function: open them by their
    path.

    Args:
        files: The path that each rank gave to `flow.save`, a file or a folder, or its URL, as {rank: path}.
        mesh: The mesh on which the ranks were numbered, in row-major order: axis sizes such as {"data": 2, "model": 4},
            or a Mesh or AbstractMesh, of which only the axis sizes count. By default one axis "rank" with the number of
            files.
        specs: How each tensor was split over that mesh: a PartitionSpec for all, a mapping of path → PartitionSpec, or
            a function of (path, leaf). `sbp.split(dim)` is an axis name at that dimension, `sbp.broadcast` is none.
            Without a spec, each rank holds the whole tensor. Ranks that hold the same box are replicas: one is enough,
            and they are compared when they are read.

    Returns:
        A checkpoint with the tree that the ranks saved, of global arrays. It refers to the files, which must stay in
        place.

    Raises:
        DataError: A file is missing or damaged; shards of an array overlap, or no rank has some box of it; or a number
            or text differs between ranks.
        SpecError: A spec does not fit the mesh or its array.

    Examples:
        >>> import os, jax, numpy as np, jaxckpt
        >>> for rank in range(2):
        ...     os.makedirs(f"/tmp/jaxckpt-doc/oneflow{rank}/w", exist_ok=True)
        ...     np.float32([rank, rank]).tofile(f"/tmp/jaxckpt-doc/oneflow{rank}/w/out")
        ...     with open(f"/tmp/jaxckpt-doc/oneflow{rank}/w/meta", "w") as file:
        ...         print("shape { dim: 2 } data_type: kFloat", file=file)
        >>> ranks = {rank: f"/tmp/jaxckpt-doc/oneflow{rank}" for rank in range(2)}
        >>> jaxckpt.load_numpy(jaxckpt.formats.oneflow_ranks(ranks, specs={"w": jax.P("rank")}))
        {'w': array([0., 0., 1., 1.], dtype=float32)}
    """
    paths, opened_files = paths_of(files)
    rank_values: dict[int, dict[str, Any]] = {}
    structures: list[Structure] = []
    for rank, path in paths.items():
        with using_files(opened_files):
            leaves, structure = flatten(_saved(path))
        rank_values[rank] = {leaf.path: leaf.value for leaf in leaves}
        structures.append(structure)
    whole = assemble(rank_values, {path: path for values in rank_values.values() for path in values}, mesh, specs)
    if all(structure == structures[0] for structure in structures):
        tree = unflatten(structures[0], [whole[path] for path in next(iter(rank_values.values()))])
    else:  # stages of a pipeline
        tree = nested_dicts(whole)
    return with_files(compose(common_url(paths), tree, "oneflow", files=paths.values()), opened_files)


def _saved(path: str) -> Tree:
    """The tree that one rank saved."""
    if not exists(path):
        raise NotACheckpointError(f"{path} does not exist")
    if not is_folder(path):
        return _unpickled(path, None)
    names = list_names(path)
    if _PICKLE in names:
        return _unpickled(os.path.join(path, _PICKLE), path)
    folders = {name: os.path.join(path, name) for name in names}
    tensors = {name: _tensor_in(at) for name, at in folders.items() if {_META, _DATA} <= {*names_in(at)}}
    if not tensors:
        raise NotACheckpointError(f"{path} has neither {_PICKLE} nor folders with {_META} and {_DATA}")
    if all(map(_PICKLED_TENSOR_NAME.fullmatch, tensors)):
        raise DataError(f"{path}/{_PICKLE} is missing: flow.save had not finished, or the file was deleted")
    return tensors


def _unpickled(path: str, folder: str | None) -> Tree:
    """The tree in a pickle. Its tensors are in the pickle, or in subfolders of `folder` if that is given."""
    tensors: list[OpaqueObject] = []

    def tensor(name: str, *args: Any) -> OpaqueObject:
        tensors.append(OpaqueObject(name, args))
        return tensors[-1]

    content = unpickle(path, calls={name: functools.partial(tensor, name) for name in _TENSORS})
    match content:
        case {"protocol_version": 1, "data": data}:
            tree = as_tree(data, path, lambda made: _tensor(made, path, folder))
        case _:
            raise DataError(f"{path} is not a file that flow.save writes: it has no protocol_version 1 with data")
    if folder is not None:
        _require_unique_folders(folder, path, tensors)
    return tree


_TENSORS = ("oneflow.Tensor", "oneflow.nn.Parameter")


def _require_unique_folders(folder: str, path: str, tensors: Iterable[OpaqueObject]) -> None:
    """Raise DataError unless each folder belongs to exactly one tensor in the pickle.

    Shared tensors are references to one object in the pickle.
    """
    counts = collections.Counter(name for tensor in tensors if isinstance(name := tensor.fields.get("path"), str))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise DataError(f"{path} is damaged: two of its tensors are in {min(twice)[:200]!r}")
    folders = {name for name in list_names(folder) if _PICKLED_TENSOR_NAME.fullmatch(name)}
    if lost := folders - counts.keys():
        raise DataError(
            f"{path} has no leaf for {os.path.join(folder, min(lost))}: it is damaged, or from another save"
        )


def _tensor(made: OpaqueObject, path: str, folder: str | None) -> Tree | None:
    """A tensor from the result of `Tensor.__getstate__`."""
    if made.name not in _TENSORS:
        return None
    match made.fields:
        case {"path": str(name)} if folder is not None:
            return _tensor_in(path_inside(folder, name, path))
        case {"data": data, "dtype": OpaqueObject(state=int(number))}:
            array = as_array(data)
            if array is not None and number in _DTYPE_BY_NUMBER:
                return _with_dtype(array, _DTYPE_BY_NUMBER[number], path)
            return unreadable(f"is a tensor of OneFlow's data type {number}, which NumPy and JAX do not support")
        case _:
            raise DataError(f"{path}: a tensor has neither its data nor a path")


def _with_dtype(array: ForeignArray, dtype: str, path: str) -> ForeignArray:
    """A tensor from its NumPy array. bfloat16 tensors were saved as float32, because NumPy has no bfloat16."""
    if array.dtype == dtype:
        return replace(array, kind="jax")
    if (array.dtype, dtype) == ("float32", "bfloat16") and isinstance(array.data, FileData | InMemoryData):
        return ForeignArray(dtype, array.shape, _bfloat16_from_float32(array.data))
    raise DataError(f"{path}: a tensor of dtype {dtype} has its data in {array.dtype}")


def _bfloat16_from_float32(stored: FileData | InMemoryData) -> ArrayData:
    """bfloat16 values that are stored as float32."""
    if isinstance(stored, InMemoryData):
        array = np.ascontiguousarray(stored.array)
        halves = array.view("<u2").reshape(*stored.array.shape, 2)[..., 1]
        return InMemoryData(np.ascontiguousarray(halves).view(DTYPES["bfloat16"]).reshape(stored.array.shape))
    strides = tuple(2 * step for step in stored.element_strides)
    return replace(stored, offset=stored.offset + 2, dtype="bfloat16", strides=strides)


def _tensor_in(folder: str) -> ForeignArray:
    """A tensor in its own folder."""
    meta, data = os.path.join(folder, _META), os.path.join(folder, _DATA)
    text = read_small(meta, MAX_META_BYTES)
    with opened(data) as handle:
        size = handle.size
    message = _MESSAGE.fullmatch(text.decode("ascii", "replace"))
    if message is None:
        raise DataError(f"{meta} has no shape and data_type: {text[:200]!r}")
    if message["dtype"] not in _DTYPES:
        return unreadable(
            f"is a tensor of OneFlow's data type {message['dtype'][:40]}, which NumPy and JAX do not support"
        )
    dtype = _DTYPES[message["dtype"]][1]
    shape = tuple(map(int, re.findall(r"\d+", message["dims"])))
    if len(shape) > MAX_RANK:
        raise DataError(f"{meta}: the tensor has {len(shape)} dimensions; at most {MAX_RANK} can be read")
    count = math.prod(shape)
    if dtype == "bfloat16" and count and size == 4 * count:
        return ForeignArray(dtype, shape, _bfloat16_from_float32(FileData(data, 0, "float32", shape)))
    if size != count * DTYPES[dtype].itemsize:
        raise DataError(
            f"{data} is {size} bytes long, expected {count * DTYPES[dtype].itemsize} of {dtype}{list(shape)}"
        )
    return ForeignArray(dtype, shape, FileData(data, 0, dtype, shape))


FORMAT = Format("oneflow", recognizes, open_oneflow, owned_names)
