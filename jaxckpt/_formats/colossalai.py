"""Reads checkpoints of ColossalAI, without ColossalAI and torch.

pytorch_model-meta-dist-<n>.json, one per rank of tensor and pipeline parallelism: the box of each of its parameters,
  and its file ─▶ a tensor in a .bin or .safetensors file
pytorch_model.bin.index.json, pytorch_optim.bin.index.json: the file of each whole tensor, of each parameter's state
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from jaxckpt._formats.index_files import (
    Index,
    from_json,
    index_counts,
    path_inside,
    read_indexed,
    read_json,
    several_indices_error,
)
from jaxckpt._formats.pickles import as_tree, unpickle, unreadable
from jaxckpt._formats.safetensors import read_header, read_header_and_metadata
from jaxckpt._formats.shards import FileData, joined, replicated
from jaxckpt._formats.torch import read_saved, read_tensors
from jaxckpt._model.grid import Box, box_at
from jaxckpt._model.records import Size
from jaxckpt._model.tree import Tree
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import is_folder, list_names
from jaxckpt.errors import DataError, show_path

_META = re.compile(r"pytorch_model-meta-dist-(\d+)(\.index)?\.json")
_INDEX = re.compile(r"(?P<what>pytorch_optim|.*)\.(?P<kind>bin|safetensors)\.index(\.[^.]+)?\.json")
"""If the user chose a prefix for the files, it comes before ".json"."""


def recognizes(path: str, names: Collection[str]) -> bool:
    if not names:
        return path.endswith(".json") and any(_indices([os.path.basename(path)]))
    return any(map(_META.fullmatch, names)) or any(_indices(names))


def _indices(names: Collection[str]) -> tuple[list[str], list[str]]:
    """The indices of models, and of optimizers, that ColossalAI wrote, or may have written.

    Many libraries write an index of whole tensors in safetensors files. It is ColossalAI's if the folder also has the
    index of an optimizer. Otherwise an index of .bin files is not ColossalAI's either, because Hugging Face's models
    have both, or have it beside a single safetensors file.
    """
    matches = list(filter(None, map(_INDEX.fullmatch, sorted(names))))
    optimizers = [match[0] for match in matches if match["what"] == "pytorch_optim"]
    is_safetensors = "model.safetensors" in names or any(match["kind"] == "safetensors" for match in matches)
    if not optimizers and is_safetensors:
        return [], []
    return [match[0] for match in matches if match[0] not in optimizers], optimizers


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to this format."""
    own: set[str] = set()
    models, optimizers = _indices(names)
    for name in names:
        if _META.fullmatch(name):
            shards = read_json(os.path.join(path, name), _Meta).metadata.values()
            own |= {name, *(shard.file for shard in shards)}
        elif name in models and not index_counts(path, name, single := name.partition(".index.")[0]):
            own |= {name, single}
        elif name in (*models, *optimizers):
            index = read_json(os.path.join(path, name), Index)
            own |= {name, *index.weight_map.values(), str((index.metadata or {}).get("param_groups"))}
    return own


def open_colossalai(path: str) -> ForeignCheckpoint:
    """A folder that ColossalAI's booster wrote, with a model, an optimizer, or both. Raises DataError, InputError."""
    is_index = not is_folder(path)
    folder, names = (os.path.dirname(path), [os.path.basename(path)]) if is_index else (path, list_names(path))
    metas = [name for name in names if _META.fullmatch(name)]
    models, optimizers = _indices(names)
    if len(models) + bool(metas) > 1 or len(optimizers) > 1:
        raise several_indices_error(path, [*sorted([*models, *optimizers]), *metas[:1]])
    trees: dict[str, Tree] = {}
    if metas:
        trees["model"] = _read_distributed(path, metas)
    for name in models:
        single = name.partition(".index.")[0]
        if is_index or index_counts(path, name, single):
            trees["model"] = read_indexed(folder, os.path.join(folder, name), _tensors)
        else:
            trees["model"] = _tensors(os.path.join(path, single))
    for name in optimizers:
        trees["optimizer"] = _optimizer(folder, os.path.join(folder, name))
    if not trees:
        raise DataError(f"{path} was deleted while it was being opened")
    (first, *more) = trees.values()
    return compose(path, trees if more else first, "colossalai")


# A file for each rank -------------------------------------------------------------------------------------


class _Shard(msgspec.Struct, frozen=True):
    offsets: tuple[Size, ...]
    lengths: tuple[Size, ...]
    global_shape: tuple[Size, ...]
    file: str


class _Meta(msgspec.Struct, frozen=True):
    metadata: dict[str, _Shard]


def _read_distributed(path: str, metas: Sequence[str]) -> Tree:
    """The tree of a model whose shards the files of all ranks describe. Raises DataError."""
    numbers = sorted(int(cast("re.Match[str]", _META.fullmatch(name))[1]) for name in metas)
    if numbers != list(range(len(numbers))):
        raise DataError(f"{path} has the pytorch_model-meta-dist files {numbers[:20]}: some are missing")
    files: dict[str, Mapping[str, Tree]] = {}
    shards: dict[str, list[_Shard]] = {}
    for name in metas:
        where = os.path.join(path, name)
        for tensor, shard in read_json(where, _Meta).metadata.items():
            if not len(shard.offsets) == len(shard.lengths) == len(shard.global_shape):
                raise DataError(
                    f"{where}: the offsets, lengths and global_shape of {show_path(tensor)} have different numbers of"
                    " dimensions"
                )
            if shard.file not in files:
                files[shard.file] = _tensors(path_inside(path, shard.file, where))
            shards.setdefault(tensor, []).append(shard)
    tree: dict[str, Tree] = {
        tensor: _parameter(tensor, tensor_shards, files) for tensor, tensor_shards in shards.items()
    }
    return tree | _unlisted_tensors(files, shards)


def _tensors(path: str) -> Mapping[str, Tree]:
    """The tensors of a .safetensors or .bin file, by name."""
    return read_header(path) if path.endswith(".safetensors") else read_tensors(path)


def _parameter(name: str, shards: Sequence[_Shard], files: Mapping[str, Mapping[str, Tree]]) -> ForeignArray:
    """A parameter from the shards of the ranks. Equal shards, as for most norms, are replicas."""
    shape = shards[0].global_shape
    pieces: list[tuple[str, Box, ForeignArray]] = []
    for shard in shards:
        array = files[shard.file].get(name)
        if not isinstance(array, ForeignArray):
            raise DataError(f"{show_path(name)} is not in {shard.file}, which should hold it")
        if shard.global_shape != shape:
            raise DataError(
                f"{show_path(name)} has the global_shape {list(shard.global_shape)} in {shard.file}, {list(shape)} in"
                f" {shards[0].file}"
            )
        # The last shard may be longer, because a vocabulary is padded to a divisible size.
        fits = len(array.shape) == len(shape) and all(
            side == length or (side > length and start + length == whole)
            for side, length, start, whole in zip(array.shape, shard.lengths, shard.offsets, shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"{show_path(name)} is {list(array.shape)} in {shard.file}, expected {list(shard.lengths)} at"
                f" {list(shard.offsets)} of {list(shape)}"
            )
        box = box_at(shard.offsets, shard.lengths)
        pieces.append((shard.file, box, replace(array, shape=shard.lengths)))
    return joined(name, shape, pieces)


def _unlisted_tensors(files: Mapping[str, Mapping[str, Tree]], listed: Collection[str]) -> dict[str, Tree]:
    """Tensors that are not in the metadata: buffers, which every rank holds completely, and extra states."""
    copies: dict[str, dict[str, Tree]] = {}
    for file, tensors in files.items():
        for name, value in tensors.items():
            if name not in listed:
                copies.setdefault(name, {})[file] = value
    return {name: _replicated(name, values) for name, values in copies.items()}


def _replicated(name: str, values: Mapping[str, Tree]) -> Tree:
    if len(values) == 1:
        return next(iter(values.values()))
    arrays = {file: value for file, value in values.items() if isinstance(value, ForeignArray)}
    if len(arrays) < len(values):
        return unreadable(f"is in {len(values)} files, but is not a tensor that can be compared")
    return replicated(name, arrays)


# The optimizer --------------------------------------------------------------------------------------------


def _optimizer(path: str, where: str) -> Tree:
    """The optimizer in the form of `Optimizer.state_dict()`."""
    groups = (read_json(where, Index).metadata or {}).get("param_groups")
    if not isinstance(groups, str):
        raise DataError(f"{where} does not name a param_groups file")
    state = read_indexed(path, where, _states)
    return {"param_groups": read_saved(path_inside(path, groups, where)), "state": state}


def _states(path: str) -> Mapping[Any, Tree]:
    """The states by parameter, from one file. In a .safetensors file, which ColossalAI writes in the background, their
    names are "state-<parameter>-<name>", and values other than tensors are pickles in arrays of bytes."""
    if not path.endswith(".safetensors"):
        return _tensors(path)
    tensors, metadata = read_header_and_metadata(path)
    pickled = set(from_json(f"{path}: the list non_tensor_keys", metadata.get("non_tensor_keys", "[]"), list[str]))
    states: dict[Any, dict[str, Tree]] = {}
    for name, array in tensors.items():
        separator = name[len("state") : len("state") + 1]
        words = name.split(separator) if separator in ("-", ".") else []
        if len(words) != 3 or words[0] != "state":
            raise DataError(f"{path}: {show_path(name)} is not the state of a parameter")
        parameter = int(words[1]) if re.fullmatch(r"\d{1,18}", words[1]) else words[1]
        value: Tree = array
        if name in pickled and isinstance(array.data, FileData):
            size = array.data.end - array.data.offset
            value = as_tree(unpickle(path, array.data.offset, size), f"{show_path(name)} in {path}")
        states.setdefault(parameter, {})[words[2]] = value
    return dict(states)


FORMAT = Format(
    "colossalai", recognizes, open_colossalai, owned_names, index_names=("pytorch_model.bin.index.json",), order=-1
)
