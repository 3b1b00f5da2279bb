"""Reads checkpoints of torch.distributed.checkpoint (DCP) without torch.

.metadata: a pickle with the chunks of each tensor, and names of Python objects ─▶ positions in __<rank>_<n>.distcp
shard-*.safetensors, written by its HuggingFaceStorageWriter: the header of each file has the positions of its chunks
common.pt, metadata.json: in a folder of Megatron Core, unsharded values, which are merged at the root of the tree
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec

from jaxckpt._formats.export import tree_of_keys
from jaxckpt._formats.index_files import convert_checked, from_json, path_inside, read_json, require_length
from jaxckpt._formats.pickle_machine import Global, OpaqueObject
from jaxckpt._formats.pickles import require_instance, require_sizes, unpickle, unreadable
from jaxckpt._formats.safetensors import read_header_and_metadata
from jaxckpt._formats.shards import require_alike, tiled
from jaxckpt._formats.torch import SavedTensor, dtype_of, read_saved
from jaxckpt._model.dtypes import DTYPES, MAX_RANK
from jaxckpt._model.grid import Box, box_at
from jaxckpt._model.records import Size
from jaxckpt._model.tree import MAX_DEPTH, Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import list_names, opened
from jaxckpt.errors import DataError, NotACheckpointError, show_path

_METADATA = ".metadata"
_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")


def recognizes(path: str, names: Collection[str]) -> bool:
    if not names:
        return os.path.basename(path) == _METADATA
    if any(name == _METADATA or name.endswith(".distcp") or _SHARD.fullmatch(name) for name in names):
        return True
    return {_COMMON, _CONFIG} <= {*names} and _is_megatron(os.path.join(path, _CONFIG))


_OWNED = re.compile(r"\.metadata|__\d+_\d+\.distcp|shard-\d+-.*\.safetensors|common\.pt|metadata\.json")


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to this format."""
    return set(filter(_OWNED.fullmatch, names))


def open_dcp(path: str) -> ForeignCheckpoint:
    """A folder that torch.distributed.checkpoint wrote, or its .metadata. Raises DataError, StorageError."""
    path = os.path.dirname(path) if os.path.basename(path) == _METADATA else path
    names = list_names(path)
    if _METADATA in names:
        return compose(path, _with_common_state(path, names, _tree_of(path)), "dcp")
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if shards:
        return compose(path, _sharded(path, shards), "dcp")
    if any(name.endswith(_METADATA) for name in names):
        raise DataError(f"{path} was saved with use_collectives=False: each rank's files are a separate checkpoint")
    if not any(name.endswith(".distcp") for name in names):
        raise NotACheckpointError(
            f"{path} has no .distcp files: it is incomplete, or of another backend of Megatron than torch_dist, with"
            " which Megatron can save it again"
        )
    raise NotACheckpointError(f"{path} has .distcp files but no {_METADATA}: the save never finished")


# .metadata ------------------------------------------------------------------------------------------------


def _tree_of(path: str) -> dict[str, Tree]:
    """The tree that `.metadata` describes, with tensors that are read later. Raises DataError."""
    where = os.path.join(path, _METADATA)
    metadata = require_instance(unpickle(where, calls={"torch.Size": require_sizes}), "Metadata", where).fields
    items = _str_keyed_dict(metadata.get("state_dict_metadata"))
    if items is None:
        raise DataError(f"{where}: its state_dict_metadata is not a dict of names")
    mapping = _str_keyed_dict(metadata.get("planner_data")) or {}  # None if the planner flattened nothing
    stored = _stored_items(path, where, metadata.get("storage_data"))
    leaves: dict[tuple[str | int, ...], Tree] = {}
    for name, item in items.items():
        at: tuple[str | int, ...] = convert_checked(
            f"{where}: the path of {show_path(name)}", mapping.get(name, (name,)), _Path
        )
        if at in leaves:
            raise DataError(f"{where}: two of its names have the path {show_path('/'.join(map(str, at)))}")
        leaves[at] = _leaf(where, name, item, stored)
    for at in leaves:
        if any(at[:depth] in leaves for depth in range(1, len(at))):
            raise DataError(f"{where}: {show_path('/'.join(map(str, at)))} is below another leaf")
    tree = tree_of_keys(where, [*leaves.items()]) if leaves else {}
    if not isinstance(tree, dict):
        raise DataError(f"{where}: its tree is a list, expected a dict")
    return cast("dict[str, Tree]", tree)


def _str_keyed_dict(value: Any) -> dict[str, Any] | None:
    """A dict with str keys; None for other values."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        return cast("dict[str, Any]", value)
    return None


_Path: Any = Annotated[
    tuple[str | Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(min_length=1, max_length=MAX_DEPTH)
]
"""The keys of the path to a leaf. An int is an index of a list."""

_Sides = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_RANK)]
_Record = TypeVar("_Record", bound=msgspec.Struct)


class MetadataIndex(msgspec.Struct):
    fqn: str
    offset: _Sides | None = None
    """Offset of a chunk in its tensor."""


class _StorageInfo(msgspec.Struct):
    relative_path: str
    offset: Size
    length: Size
    transform_descriptors: Sequence[str] | None = None
    """The encodings of its bytes; empty if they are not encoded."""


class ChunkStorageMetadata(msgspec.Struct):
    offsets: _Sides
    sizes: _Sides


class TensorStorageMetadata(msgspec.Struct):
    size: _Sides
    properties: Any
    chunks: list[Any] = []


def _record(where: str, value: Any, kind: type[_Record]) -> _Record:
    """A `kind` from an unpickled instance of torch's class of the same name. Raises DataError."""
    return convert_checked(where, require_instance(value, kind.__name__, where).fields, kind)


StoredItems = Mapping[tuple[str, tuple[int, ...] | None], _StorageInfo]
"""The file, offset and length of each item, by its name and, for a chunk of a tensor, the chunk's offset."""


def _stored_items(path: str, where: str, storage: Any) -> StoredItems:
    """The items in `storage_data`, after a check that each file is long enough. Raises DataError."""
    if not isinstance(storage, dict):
        raise DataError(f"{where}: its storage_data is not a dict")
    items: dict[tuple[str, tuple[int, ...] | None], _StorageInfo] = {}
    ends: dict[str, int] = {}
    what = f"{where}: an entry of its storage_data"
    for key, value in cast("dict[Any, Any]", storage).items():
        index, info = _record(what, key, MetadataIndex), _record(what, value, _StorageInfo)
        info.relative_path = path_inside(path, info.relative_path, where)
        items[index.fqn, index.offset] = info
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        require_length(file, end)
    return items


def _leaf(where: str, name: str, item: Any, stored: StoredItems) -> Tree:
    """A tensor or Python object of the metadata as a leaf. Raises DataError."""
    if isinstance(item, OpaqueObject) and item.name.rpartition(".")[2] == "BytesStorageMetadata":
        return _python_object(where, name, stored)
    what = f"{where}: {show_path(name)}"
    tensor = _record(what, item, TensorStorageMetadata)
    dtype = _dtype(require_instance(tensor.properties, "TensorProperties", what))
    chunks = [_record(what, chunk, ChunkStorageMetadata) for chunk in tensor.chunks]
    if wrong := [chunk for chunk in chunks if len(chunk.offsets) != len(chunk.sizes)]:
        raise DataError(f"{what} has a chunk of {list(wrong[0].sizes)} at {list(wrong[0].offsets)}")
    if dtype not in DTYPES:
        return unreadable(f"has dtype {dtype}, which NumPy and JAX do not support")
    pieces: dict[Box, ArrayData] = {}
    for chunk in chunks:
        if 0 in chunk.sizes:
            continue
        info = stored.get((name, chunk.offsets))
        if info is None:
            raise DataError(f"{where}: the chunk of {show_path(name)} at {list(chunk.offsets)} is not in any file")
        if info.transform_descriptors:
            return _encoded(info)
        n_bytes = math.prod(chunk.sizes) * DTYPES[dtype].itemsize
        if info.length == n_bytes:
            _require_torch_save(info)
        if info.length < n_bytes:
            raise DataError(
                f"{where}: a chunk of {show_path(name)}, {dtype}{list(chunk.sizes)}, has {info.length} bytes in all"
            )
        pieces[box_at(chunk.offsets, chunk.sizes)] = SavedTensor(
            info.relative_path, info.offset, info.length, dtype, chunk.sizes
        )
    return ForeignArray(dtype, tensor.size, tiled(name, tensor.size, pieces.items()))


def _require_torch_save(info: _StorageInfo) -> None:
    """Raise DataError if the item is in a safetensors file within its file. Then its length is that of the bare tensor;
    a file of torch.save is longer.

    torch/distributed/checkpoint/filesystem.py: _write_files_from_queue with SerializationFormat.SAFETENSORS, whose
    result FileSystemReader.read_data passes to torch.load.
    """
    with opened(info.relative_path) as handle:
        head = handle.read(9, info.offset)
    if head[8:] == b"{":  # after the length of the header
        raise DataError(
            f"{info.relative_path} was written with serialization_format=SAFETENSORS, which"
            " torch.distributed.checkpoint cannot load either: save again with SerializationFormat.TORCH_SAVE, or with"
            " HuggingFaceStorageWriter for safetensors"
        )


def _encoded(info: _StorageInfo) -> ForeignArray:
    """An unreadable leaf for an item whose bytes are encoded, for example compressed."""
    return unreadable(f"was encoded by {', '.join(info.transform_descriptors or ())}, which jaxckpt cannot decode")


def _dtype(properties: OpaqueObject) -> str:
    """The dtype of a tensor, or its full name with dots if jaxckpt does not support it."""
    state = cast("tuple[Any, ...] | None", properties.state) if isinstance(properties.state, tuple) else None
    value = state[0] if state else properties.fields.get("dtype")
    return dtype_of(value) or (value.name if isinstance(value, Global) else "unknown")


def _python_object(where: str, name: str, stored: StoredItems) -> Tree:
    """A Python object, which is a file of torch.save by itself; an unreadable leaf if it is damaged."""
    info = stored.get((name, None))
    if info is None:
        raise DataError(f"{where}: the object {show_path(name)} is not in any file")
    if info.transform_descriptors:
        return _encoded(info)
    try:
        return read_saved(info.relative_path, info.offset, info.length)
    except DataError as error:  # concerns one object; other tensors can still be read
        return unreadable(f"cannot be read: {error}")


# Megatron Core --------------------------------------------------------------------------------------------

_COMMON, _CONFIG = "common.pt", "metadata.json"
_COMMON_STATE = "common_state/shard_0_1"
"""The object that newer versions write instead of common.pt, in a list of one."""


def _with_common_state(path: str, names: Collection[str], tree: dict[str, Tree]) -> Tree:
    """The tree of a folder of Megatron Core, with its unsharded values; unchanged for other folders.

    megatron/core/dist_checkpointing/serialization.py: load_common_state_dict, load
    """
    if _COMMON in names:
        where, common = os.path.join(path, _COMMON), read_saved(os.path.join(path, _COMMON))
    elif _CONFIG in names and _is_megatron(os.path.join(path, _CONFIG)):
        objects, tree = tree.get(_COMMON_STATE), {name: tree[name] for name in tree if name != _COMMON_STATE}
        if not isinstance(objects, list) or len(cast("list[Tree]", objects)) != 1:
            raise DataError(f"{path}/{_COMMON} is missing: it holds what Megatron does not shard")
        where, common = path, cast("list[Tree]", objects)[0]
    else:
        return tree
    if not isinstance(common, dict):
        raise DataError(f"{where}: the common state is a {type(common).__name__}, expected a dict")
    return _merged(cast("dict[Any, Tree]", common), tree, where, "")


def _is_megatron(path: str) -> bool:
    config = read_json(path, cast("type[Any]", Any))
    return isinstance(config, dict) and "sharded_backend" in config


def _merged(first: Tree, second: Tree, where: str, path: str) -> Tree:
    """Merge two trees like megatron/core/dist_checkpointing/dict_utils.py."""
    if isinstance(first, dict) and isinstance(second, dict):
        a, b = cast("dict[Any, Tree]", first), cast("dict[Any, Tree]", second)
        common = {key: _merged(a[key], b[key], where, f"{path}/{key}".lstrip("/")) for key in a.keys() & b.keys()}
        return {**a, **b, **common}
    if isinstance(first, list) and isinstance(second, list):
        a, b = cast("list[Tree]", first), cast("list[Tree]", second)
        if len(a) == len(b):
            return [_merged(*pair, where, f"{path}/{n}") for n, pair in enumerate(zip(a, b, strict=True))]
    raise DataError(f"{where}: {show_path(path)} is in both the common and the sharded state")


# Sharded safetensors --------------------------------------------------------------------------------------


class _SavedOffsets(msgspec.Struct, frozen=True):
    saved_offsets: list[Size]


def _sharded(path: str, names: Sequence[str]) -> Tree:
    """The tensors by name, from the chunks in safetensors files. Raises DataError."""
    ranks = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
    if ranks != {*range(1, len(ranks) + 1)}:
        lost = next(number for number in range(1, max(ranks) + 1) if number not in ranks)
        raise DataError(f"{path} has a file for shard {max(ranks)}, but none for shard {lost}")
    warnings.warn(
        f"{path} records neither how many files it has nor the shapes of its arrays: both are taken from the files of"
        f" {len(ranks)} ranks that exist; check that the job had that many ranks",
        stacklevel=2,
    )
    chunks: dict[str, list[tuple[Box, ForeignArray, str]]] = {}
    for name in names:
        where = os.path.join(path, name)
        tensors, metadata = read_header_and_metadata(where)
        text = metadata.get("DCP_SHARDING_INFO", "")
        placed = from_json(f"{where}: its DCP_SHARDING_INFO", text, dict[str, _SavedOffsets])
        for tensor, array in tensors.items():
            offsets = placed[tensor].saved_offsets if tensor in placed else []
            if len(offsets) != len(array.shape):
                raise DataError(f"{where}: {show_path(tensor)} of shape {list(array.shape)} is at {offsets}")
            chunks.setdefault(tensor, []).append((box_at(offsets, array.shape), array, where))
    return {tensor: _join_chunks(tensor, tensor_chunks) for tensor, tensor_chunks in chunks.items()}


def _join_chunks(name: str, chunks: Sequence[tuple[Box, ForeignArray, str]]) -> ForeignArray:
    """A tensor from its chunks. Its shape is the extent of the chunks, because the format does not record it."""
    require_alike(name, [(where, array) for _, array, where in chunks], shapes=False)
    first = chunks[0][1]
    shape = tuple(max(box[dim][1] for box, _, _ in chunks) for dim in range(len(first.shape)))
    if math.prod(shape) and first.dtype not in DTYPES:
        return unreadable(f"has dtype {first.dtype}, which NumPy and JAX do not support")
    return ForeignArray(first.dtype, shape, tiled(name, shape, [(box, array.data) for box, array, _ in chunks]))


FORMAT = Format("dcp", recognizes, open_dcp, owned_names, index_names=(_METADATA, _COMMON, _CONFIG), order=-1)
