"""Checkpoints of ColossalAI, read without it and without torch.

pytorch_model-meta-dist-<n>.json, one for each rank of tensor and pipeline parallelism: the box of each parameter it
  holds, and in which file ─▶ a tensor of a .bin or .safetensors file
pytorch_model.bin.index.json, pytorch_optim.bin.index.json: the file of each whole tensor, of each parameter's state
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import msgspec

from jaxckpt._foreign.pickles import as_tree, unpickle, unreadable
from jaxckpt._foreign.safetensors import read_header, read_metadata
from jaxckpt._foreign.shards import FileBlock, distinct, inside, read_json, replicas, require_named, tiled
from jaxckpt._foreign.torch import read_saved
from jaxckpt._format.grid import Box
from jaxckpt._format.tree import Tree
from jaxckpt._restore.source import Block, Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError, InputError, show

_META = re.compile(r"pytorch_model-meta-dist-(\d+)(\.index)?\.json")
_INDEX = re.compile(r"(?P<what>pytorch_optim|.*)\.(?P<kind>bin|safetensors)\.index(\.[^.]+)?\.json")
"""A prefix that the user gave to the files stands before ".json"."""


def recognises(path: str, names: Collection[str]) -> bool:
    return any(map(_META.fullmatch, names)) or any(map(_is_ours, names))


def _is_ours(name: str) -> bool:
    """Whether it is an index of ours; one of whole tensors in safetensors files is nobody's in particular."""
    found = _INDEX.fullmatch(name)
    return found is not None and (found["kind"] == "bin" or found["what"] == "pytorch_optim")


def owned(path: str, names: Collection[str]) -> set[str]:
    """The names in its folder that are its own."""
    found: set[str] = set()
    for name in names:
        if _META.fullmatch(name):
            shards = read_json(os.path.join(path, name), _Meta).metadata.values()
            found |= {name, *(shard.file for shard in shards)}
        elif _is_ours(name):
            index = read_json(os.path.join(path, name), _Index)
            found |= {name, *index.weight_map.values(), str(index.metadata.get("param_groups"))}
    return found


def open_colossalai(path: str) -> Foreign:
    """A folder that ColossalAI's booster wrote: of a model, of an optimizer, or of both."""
    names = sorted(os.listdir(path))
    metas = [name for name in names if _META.fullmatch(name)]
    indices = [name for name in names if _is_ours(name)]
    optimizers = [name for name in indices if name.startswith("pytorch_optim")]
    models = [name for name in indices if name not in optimizers]
    if len(models) + bool(metas) > 1 or len(optimizers) > 1:
        raise InputError(
            f"{path} has several indices ({', '.join([*metas[:1], *indices][:5])}): give a folder for each"
        )
    parts: dict[str, Tree] = {}
    if metas:
        parts["model"] = _distributed(path, metas)
    for name in models:
        parts["model"] = _whole(path, os.path.join(path, name))
    for name in optimizers:
        parts["optimizer"] = _optimizer(path, os.path.join(path, name))
    (first, *more) = parts.values()
    return compose(path, parts if more else first, "colossalai")


# A file for each rank -------------------------------------------------------------------------------------

_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Shard(msgspec.Struct, frozen=True):
    offsets: tuple[_Size, ...]
    lengths: tuple[_Size, ...]
    global_shape: tuple[_Size, ...]
    file: str

    @property
    def box(self) -> Box:
        return tuple((start, start + side) for start, side in zip(self.offsets, self.lengths, strict=True))


class _Meta(msgspec.Struct, frozen=True):
    metadata: dict[str, _Shard]


def _distributed(path: str, metas: Sequence[str]) -> Tree:
    numbers = sorted(int(cast("re.Match[str]", _META.fullmatch(name))[1]) for name in metas)
    if numbers != list(range(len(numbers))):
        raise DataError(f"{path} has the pytorch_model-meta-dist files {numbers[:20]}: some are missing")
    files: dict[str, Mapping[str, Tree]] = {}
    shards: dict[str, list[_Shard]] = {}
    for name in metas:
        where = os.path.join(path, name)
        for tensor, shard in read_json(where, _Meta).metadata.items():
            if not len(shard.offsets) == len(shard.lengths) == len(shard.global_shape):
                raise DataError(f"{where}: the offsets, lengths and global_shape of {show(tensor)} are not of one rank")
            if shard.file not in files:
                files[shard.file] = _tensors(inside(path, shard.file, where))
            shards.setdefault(tensor, []).append(shard)
    tree: dict[str, Tree] = {tensor: _together(tensor, found, files) for tensor, found in shards.items()}
    return tree | _unlisted(files, shards)


def _tensors(path: str) -> Mapping[str, Tree]:
    """What a file of either kind holds, by name."""
    if path.endswith(".safetensors"):
        return read_header(path)
    found = read_saved(path)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, expected a dict of tensors")
    return cast("dict[str, Tree]", found)


def _together(name: str, shards: Sequence[_Shard], files: Mapping[str, Mapping[str, Tree]]) -> ForeignArray:
    """A parameter from what the ranks hold of it; what several hold, as most norms, are replicas."""
    shape = shards[0].global_shape
    held: dict[Box, list[tuple[Block, str]]] = {}
    dtype = ""
    for shard in shards:
        array = files[shard.file].get(name)
        if not isinstance(array, ForeignArray):
            raise DataError(f"{show(name)} is not in {shard.file}, which should hold it")
        if (shard.global_shape, array.dtype) != (shape, dtype or array.dtype):
            raise DataError(
                f"{show(name)} is of {array.dtype}{list(shard.global_shape)} in {shard.file},"
                f" of {dtype or array.dtype}{list(shape)} in {shards[0].file}"
            )
        dtype = array.dtype
        # The last rank's may be longer: a vocabulary is padded so that it divides.
        fits = len(array.shape) == len(shape) and all(
            side == length or (side > length and start + length == whole)
            for side, length, start, whole in zip(array.shape, shard.lengths, shard.offsets, shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"{show(name)} is {list(array.shape)} in {shard.file}, expected {list(shard.lengths)} at"
                f" {list(shard.offsets)} of {list(shape)}"
            )
        held.setdefault(shard.box, []).append((array.block, shard.file))
    parts = [
        (box, replicas([block for block, _ in found], [file for _, file in found], name)) for box, found in held.items()
    ]
    return ForeignArray(dtype, shape, tiled(name, shape, parts))


def _unlisted(files: Mapping[str, Mapping[str, Tree]], listed: Collection[str]) -> dict[str, Tree]:
    """What the metadata does not mention: buffers, which every rank holds whole, and extra states."""
    found: dict[str, dict[str, Tree]] = {}
    for file, tensors in files.items():
        for name, value in tensors.items():
            if name not in listed:
                found.setdefault(name, {})[file] = value
    return {name: _replicated(name, values) for name, values in found.items()}


def _replicated(name: str, values: Mapping[str, Tree]) -> Tree:
    (file, first), *others = values.items()
    if not others:
        return first
    if not isinstance(first, ForeignArray):
        return unreadable(f"is in {len(values)} files, and no tensor that could be compared")
    for other, value in others:
        if not isinstance(value, ForeignArray) or (value.dtype, value.shape) != (first.dtype, first.shape):
            raise DataError(f"{show(name)} is of another shape or dtype in {other} than in {file}")
    return replace(first, block=replicas([value.block for value in values.values()], list(values), name))


# Files of whole tensors -----------------------------------------------------------------------------------


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def _whole(path: str, where: str) -> Tree:
    tree: dict[str, Tree] = {}
    for file, expected in _files(path, where, read_json(where, _Index)).items():
        found = _tensors(inside(path, file, where))
        _require_names(where, file, found.keys(), expected)
        tree |= found
    return tree


def _files(path: str, where: str, index: _Index) -> dict[str, set[str]]:
    """The names that each file should hold."""
    files: dict[str, set[str]] = {}
    for name, file in index.weight_map.items():
        files.setdefault(file, set()).add(name)
    require_named(path, files, where)
    return files


def _require_names(where: str, file: str, found: Collection[Any], expected: Collection[str]) -> None:
    odd = {str(name) for name in found} ^ {*expected}
    if odd:
        name = min(odd)
        told = "is in the index but not there" if name in expected else "is there but not in the index"
        raise DataError(f"{file}: {show(name)} {told} ({where})")


def _optimizer(path: str, where: str) -> Tree:
    """As `Optimizer.state_dict()` has it."""
    index = read_json(where, _Index)
    state: dict[Any, Tree] = {}
    for file, expected in _files(path, where, index).items():
        at = inside(path, file, where)
        found = _flat_states(at) if at.endswith(".safetensors") else _tensors(at)
        _require_names(where, file, found.keys(), expected)
        state |= found
    groups = index.metadata.get("param_groups")
    if not isinstance(groups, str):
        raise DataError(f"{where} names no file of param_groups")
    return {"param_groups": read_saved(inside(path, groups, where)), "state": state}


def _flat_states(path: str) -> dict[Any, Tree]:
    """The states of a file that was written in the background: "state-<parameter>-<name>", values pickled as bytes."""
    told = read_metadata(path).get("non_tensor_keys", "[]")
    try:
        pickled = set(msgspec.convert(json.loads(told, object_pairs_hook=distinct), list[str]))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DataError(f"{path}: its non_tensor_keys are damaged: {error}") from error
    states: dict[Any, dict[str, Tree]] = {}
    for name, array in read_header(path).items():
        separator = name[len("state") : len("state") + 1]
        parts = name.split(separator) if separator in ("-", ".") else []
        if len(parts) != 3 or parts[0] != "state":
            raise DataError(f"{path}: {show(name)} is no state of a parameter")
        parameter = int(parts[1]) if re.fullmatch(r"\d{1,18}", parts[1]) else parts[1]
        value: Tree = array
        if name in pickled and isinstance(array.block, FileBlock):
            size = array.block.end - array.block.offset
            value = as_tree(unpickle(path, array.block.offset, size), f"{show(name)} in {path}")
        states.setdefault(parameter, {})[parts[2]] = value
    return dict(states)
