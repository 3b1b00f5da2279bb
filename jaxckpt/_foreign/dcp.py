"""Checkpoints of torch.distributed.checkpoint (DCP), read without torch.

.metadata: a pickle: for each name its chunks, or that it is a Python object ─▶ where each lies in __<rank>_<n>.distcp
shard-*.safetensors, as its HuggingFaceStorageWriter writes them: where each chunk belongs is told by its file's header
common.pt, metadata.json: in a folder of Megatron Core, what is not sharded, merged at the root of the tree
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec

from jaxckpt._foreign.pickles import Global, Object, required, sizes, unpickle, unreadable
from jaxckpt._foreign.safetensors import read_header, read_metadata
from jaxckpt._foreign.shards import inside, read_json, require_length, tiled
from jaxckpt._foreign.torch import SavedTensor, dtype_of, read_saved
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, volume
from jaxckpt._format.tree import MAX_DEPTH, Tree
from jaxckpt._restore.source import Block, Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError, NotACheckpointError, show

_METADATA = ".metadata"
_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")


def recognises(path: str, names: Collection[str]) -> bool:
    return any(name == _METADATA or name.endswith(".distcp") or _SHARD.fullmatch(name) for name in names)


_OWNED = re.compile(r"\.metadata|__\d+_\d+\.distcp|shard-\d+-.*\.safetensors|common\.pt|metadata\.json")


def owned(path: str, names: Collection[str]) -> set[str]:
    """The names in its folder that are its own."""
    return set(filter(_OWNED.fullmatch, names))


def open_dcp(path: str) -> Foreign:
    """A folder that torch.distributed.checkpoint wrote."""
    names = os.listdir(path)
    if _METADATA in names:
        return compose(path, _with_common_state(path, names, _tree_of(path)), "dcp")
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if shards:
        return compose(path, _sharded(path, shards), "dcp")
    if any(name.endswith(_METADATA) for name in names):
        raise DataError(f"{path} was saved with use_collectives=False: each rank's is a checkpoint of its own")
    raise NotACheckpointError(f"{path} has .distcp files but no {_METADATA}: the save never ended")


# .metadata ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an item lies."""

    path: str
    offset: int
    size: int
    encoded: str
    """The encodings of its bytes; empty where they are as they are."""


def _tree_of(path: str) -> dict[str, Tree]:
    where = os.path.join(path, _METADATA)
    metadata = required(unpickle(where, calls={"torch.Size": sizes}), "Metadata", where).fields
    items = _by_name(metadata.get("state_dict_metadata"))
    if items is None:
        raise DataError(f"{where}: its state_dict_metadata is no dict of names")
    mapping = _by_name(metadata.get("planner_data")) or {}  # None where the planner flattened nothing
    places = _places(path, where, metadata.get("storage_data"))
    leaves: dict[tuple[str | int, ...], Tree] = {}
    for name, item in items.items():
        at = mapping.get(name, (name,))
        if not _is_path(at):
            raise DataError(f"{where}: {show(name)} has no path of str and int")
        if at in leaves:
            raise DataError(f"{where}: two of its names have the path {show('/'.join(map(str, at)))}")
        leaves[at] = _leaf(where, name, item, places)
    return _nested(where, leaves)


def _by_name(value: Any) -> dict[str, Any] | None:
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        return cast("dict[str, Any]", value)
    return None


def _is_path(value: Any) -> bool:
    if not isinstance(value, tuple):
        return False
    keys = cast("tuple[Any, ...]", value)
    return (
        0 < len(keys) <= MAX_DEPTH
        and type(keys[0]) is str
        and all(type(key) is str or (type(key) is int and 0 <= key < 1 << 31) for key in keys)
    )


Places = Mapping[tuple[str, tuple[int, ...] | None], _Place]
"""Where items lie, by name and, for a chunk of a tensor, its offset."""


def _places(path: str, where: str, storage: Any) -> Places:
    if not isinstance(storage, dict):
        raise DataError(f"{where}: its storage_data is no dict")
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    ends: dict[str, int] = {}
    for key, value in cast("dict[Any, Any]", storage).items():
        index = required(key, "MetadataIndex", where).fields
        info = required(value, "_StorageInfo", where).fields
        try:
            name, file = _text(index.get("fqn")), _text(info.get("relative_path"))
            start, size = sizes((info.get("offset"), info.get("length")))
            offset = None if index.get("offset") is None else sizes(index["offset"])
            encoded = ", ".join(map(_text, info.get("transform_descriptors") or ()))
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: a place in its storage_data is damaged: {error}") from error
        place = _Place(inside(path, file, where), start, size, encoded)
        places[name, offset] = place
        ends[place.path] = max(ends.get(place.path, 0), start + size)
    for file, end in ends.items():
        require_length(file, end)
    return places


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _leaf(where: str, name: str, item: Any, places: Places) -> Tree:
    kind = item.name.rpartition(".")[2] if isinstance(item, Object) else type(item).__name__
    if kind == "BytesStorageMetadata":
        return _python_object(where, name, places)
    fields = required(item, "TensorStorageMetadata", f"{where}: {show(name)}").fields
    try:
        shape = sizes(fields.get("size"))
        dtype = _dtype(required(fields.get("properties"), "TensorProperties", f"{where}: {show(name)}"))
        found = fields.get("chunks")
        boxes = list(dict.fromkeys(map(_box, found if isinstance(found, list) else [])))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {show(name)} is damaged: {error}") from error
    if dtype not in DTYPES:
        return unreadable(f"has dtype {dtype}, which NumPy and JAX lack")
    parts: list[tuple[Box, Block]] = []
    for box in boxes:
        if not volume(box):
            continue
        place = places.get((name, tuple(start for start, _ in box)))
        if place is None:
            raise DataError(f"{where}: the chunk of {show(name)} at {[start for start, _ in box]} lies in no file")
        if place.encoded:
            return unreadable(f"was encoded by {place.encoded}, which this library cannot undo")
        side = tuple(stop - start for start, stop in box)
        needed = volume(box) * DTYPES[dtype].itemsize
        if place.size < needed:
            raise DataError(f"{where}: a chunk of {show(name)}, {dtype}{list(side)}, has {place.size} bytes in all")
        parts.append((box, SavedTensor(place.path, place.offset, place.size, dtype, side)))
    return ForeignArray(dtype, shape, tiled(name, shape, parts))


def _box(chunk: Any) -> Box:
    fields = required(chunk, "ChunkStorageMetadata", "a chunk").fields
    offsets, sides = sizes(fields.get("offsets")), sizes(fields.get("sizes"))
    if len(offsets) != len(sides):
        raise ValueError(f"a chunk of {list(sides)} is at {list(offsets)}")
    return tuple((offset, offset + side) for offset, side in zip(offsets, sides, strict=True))


def _dtype(properties: Object) -> str:
    """The dtype of a tensor; its own name, with dots, where it is none of ours."""
    state = cast("tuple[Any, ...] | None", properties.state) if isinstance(properties.state, tuple) else None
    value = state[0] if state else properties.fields.get("dtype")
    return dtype_of(value) or (value.name if isinstance(value, Global) else "unknown")


def _python_object(where: str, name: str, places: Places) -> Tree:
    place = places.get((name, None))
    if place is None:
        raise DataError(f"{where}: the object {show(name)} lies in no file")
    if place.encoded:
        return unreadable(f"was encoded by {place.encoded}, which this library cannot undo")
    try:
        return read_saved(place.path, place.offset, place.size)
    except DataError as error:  # of one object: the tensors beside it can be read
        return unreadable(f"cannot be read: {error}")


def _nested(where: str, leaves: Mapping[tuple[str | int, ...], Tree]) -> dict[str, Tree]:
    """The tree of dicts and lists: an int leads into a list."""
    root: dict[Any, Any] = {}
    inner: dict[tuple[str | int, ...], dict[Any, Any]] = {(): root}
    for path, leaf in leaves.items():
        for depth in range(1, len(path)):
            if path[:depth] not in inner:
                inner[path[:depth]] = node = {}
                _set(where, inner[path[: depth - 1]], path[:depth], node)
        _set(where, inner[path[:-1]], path, leaf)
    for path, node in sorted(inner.items(), key=lambda item: -len(item[0])):
        kinds = {type(key) for key in node}
        if kinds == {int} and path:
            if sorted(node) != list(range(len(node))):
                raise DataError(
                    f"{where}: the list {show('/'.join(map(str, path)))} has the places {sorted(node)[:20]}"
                )
            inner[path[:-1]][path[-1]] = [node[number] for number in range(len(node))]
        elif kinds - {str}:
            raise DataError(f"{where}: {show('/'.join(map(str, path)))} has names and numbers for keys")
    return root


def _set(where: str, node: dict[Any, Any], path: Sequence[str | int], value: Tree) -> None:
    if path[-1] in node:
        raise DataError(f"{where}: {show('/'.join(map(str, path)))} is there twice")
    node[path[-1]] = value


# Megatron Core --------------------------------------------------------------------------------------------

_COMMON, _CONFIG = "common.pt", "metadata.json"
_COMMON_STATE = "common_state/shard_0_1"
"""The object that newer versions write instead of common.pt, in a list of one."""


def _with_common_state(path: str, names: Collection[str], tree: dict[str, Tree]) -> Tree:
    """The tree of a folder of Megatron Core, with what is not sharded; of others as it is.

    megatron/core/dist_checkpointing/serialization.py: load_common_state_dict, load
    """
    if _COMMON in names:
        where, common = os.path.join(path, _COMMON), read_saved(os.path.join(path, _COMMON))
    elif _CONFIG in names and _is_megatron(os.path.join(path, _CONFIG)):
        found, tree = tree.get(_COMMON_STATE), {name: tree[name] for name in tree if name != _COMMON_STATE}
        if not isinstance(found, list) or len(cast("list[Tree]", found)) != 1:
            raise DataError(f"{path}/{_COMMON} is missing: it holds what Megatron does not shard")
        where, common = path, cast("list[Tree]", found)[0]
    else:
        return tree
    if not isinstance(common, dict):
        raise DataError(f"{where}: the common state is a {type(common).__name__}, expected a dict")
    return _merged(cast("dict[Any, Tree]", common), tree, where, "")


def _is_megatron(path: str) -> bool:
    config = read_json(path, cast("type[Any]", Any))
    return isinstance(config, dict) and "sharded_backend" in config


def _merged(first: Tree, second: Tree, where: str, path: str) -> Tree:
    """Two trees in one, as megatron/core/dist_checkpointing/dict_utils.py merges them."""
    if isinstance(first, dict) and isinstance(second, dict):
        one, two = cast("dict[Any, Tree]", first), cast("dict[Any, Tree]", second)
        both = {key: _merged(one[key], two[key], where, f"{path}/{key}".lstrip("/")) for key in one.keys() & two.keys()}
        return {**one, **two, **both}
    if isinstance(first, list) and isinstance(second, list):
        one, two = cast("list[Tree]", first), cast("list[Tree]", second)
        if len(one) == len(two):
            return [_merged(a, b, where, f"{path}/{n}") for n, (a, b) in enumerate(zip(one, two, strict=True))]
    raise DataError(f"{where}: {show(path)} is in the common state and among what is sharded")


# Sharded safetensors --------------------------------------------------------------------------------------


class _Saved(msgspec.Struct, frozen=True):
    saved_offsets: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


def _sharded(path: str, names: Sequence[str]) -> Tree:
    ranks = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
    if ranks != {*range(1, len(ranks) + 1)}:
        lost = next(number for number in range(1, max(ranks) + 1) if number not in ranks)
        raise DataError(f"{path} has no file of shard {lost}, but one of shard {max(ranks)}")
    warnings.warn(
        f"{path} records neither how many files it has nor the shapes of its arrays: both are taken from the files of"
        f" {len(ranks)} ranks that are there; check that the job had as many",
        stacklevel=2,
    )
    parts: dict[str, list[tuple[Box, ForeignArray, str]]] = {}
    for name in names:
        where = os.path.join(path, name)
        text = read_metadata(where).get("DCP_SHARDING_INFO")
        try:
            told = msgspec.convert(json.loads(text or ""), dict[str, _Saved])
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise DataError(f"{where}: its DCP_SHARDING_INFO is missing or damaged: {error}") from error
        for tensor, array in read_header(where).items():
            offsets = told[tensor].saved_offsets if tensor in told else []
            if len(offsets) != len(array.shape):
                raise DataError(f"{where}: {show(tensor)} of shape {list(array.shape)} is at {offsets}")
            box = tuple((start, start + side) for start, side in zip(offsets, array.shape, strict=True))
            parts.setdefault(tensor, []).append((box, array, where))
    return {tensor: _together(tensor, found) for tensor, found in parts.items()}


def _together(name: str, parts: Sequence[tuple[Box, ForeignArray, str]]) -> ForeignArray:
    """A tensor from its chunks. Its shape is what they reach to: the format does not record it."""
    first, where = parts[0][1:]
    for _, array, other in parts:
        if (array.dtype, len(array.shape)) != (first.dtype, len(first.shape)):
            raise DataError(
                f"{show(name)} is {first.dtype}{list(first.shape)} in {where},"
                f" {array.dtype}{list(array.shape)} in {other}"
            )
    shape = tuple(max(box[dim][1] for box, _, _ in parts) for dim in range(len(first.shape)))
    if math.prod(shape) and first.dtype not in DTYPES:
        return unreadable(f"has dtype {first.dtype}, which NumPy and JAX lack")
    return ForeignArray(first.dtype, shape, tiled(name, shape, [(box, array.block) for box, array, _ in parts]))
