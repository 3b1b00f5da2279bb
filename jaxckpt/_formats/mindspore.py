"""MindSpore's checkpoints: .ckpt files and folders of ranks, combined according to its strategy files.

A .ckpt file is a protobuf message. This module parses its wire format and reads only tags, shapes and types. Tensors
are read when they are needed.

    Checkpoint  = {1: Value}*               mindspore/ccsrc/utils/checkpoint.proto
    Value       = {1: tag, 2: TensorProto}  a tensor of more than 512 MiB is stored as several Values with one tag
    TensorProto = {1: dims*, 2: type, 3: content}
    Strategy    = {1: stage, 2: operators*, 3: {1: name, 2: Layout}*}               node_strategy.proto
    Layout      = {1: dev_matrix, 2: tensor_map, 3: param_split_shape, 4: indices_offset, 5: field,
                   6: opt_weight_shard_step, 7: opt_weight_shard_size}

It is long because files of ranks have a meaning only with their strategy, which has two file formats and several files.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from jaxckpt._formats.index_files import convert_checked, from_json, located_together, reads_files
from jaxckpt._formats.protobuf import Message, Schema
from jaxckpt._formats.rank_files import (
    MAX_RANKS,
    Files,
    RankValues,
    assemble,
    common_url,
    group_by_name,
    paths_in,
    paths_of,
)
from jaxckpt._formats.safetensors import read_header
from jaxckpt._formats.shards import FileData, from_boxes, from_ranks, replicated, tiled_flat
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.dtypes import DTYPES, MAX_RANK
from jaxckpt._model.grid import Box, Spec, pieces_along
from jaxckpt._model.paths import escape_key
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint, with_files
from jaxckpt._sources.format_registry import Format
from jaxckpt._store.foreign_files import OpenFile, is_folder, list_names, opened, read_head, read_small, using_files
from jaxckpt.errors import DataError, InputError, show_path

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from jaxckpt._arguments.specs import Specs

MAX_STRATEGY_BYTES = 256 << 20
MAX_TEXT_BYTES = 1 << 20

_DTYPES = {
    theirs: theirs.lower()
    for theirs in (
        "Bool Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Uint8 Uint16 Uint32 Uint64"
        " Float16 Float32 Float64 BFloat16 Complex64 Complex128"
    ).split()
}

_RANK_FOLDER = re.compile(r"rank_?([0-9]{1,7})")

_TRAILER = b"crc_num"
"""The mark before the 10-byte checksum that `save_checkpoint(crc_check=True)` appends to the message."""


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether this is a .ckpt file of MindSpore. PyTorch files with that suffix are zip files or pickles."""
    return not names and path.endswith(".ckpt") and read_head(path, 1) == b"\n"  # the tag of field 1, length-delimited


def open_mindspore(path: str) -> ForeignCheckpoint:
    """A .ckpt file: a dict of names. Raises DataError."""
    return compose(path, read_ckpt(path), "mindspore")


@explain_keywords
@reads_files
def mindspore_ranks(
    files: Files | str | os.PathLike[str],
    *,
    strategy: str | os.PathLike[str] | None = None,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    specs: Specs = None,
) -> ForeignCheckpoint:
    """Combine the files that the ranks of a MindSpore job saved into one checkpoint of global arrays.

    Pass the result to `restore`, `load_numpy`, `open`, `convert`, `diff` or `verify` in place of a path; no merge step
    is needed. Only headers are read here; arrays are read from the rank files later, box by box. Every process makes
    this call.

    Args:
        files: The file of each rank, .ckpt or .safetensors, as {rank: path}; or the folder with the folders rank_0,
            rank_1, …, each with one file. Paths or URLs.
        strategy: The strategy file of the job (`strategy_ckpt_save_file`), protobuf or JSON, for one pipeline stage or
            merged; or a folder with the files of all stages. Each rank holds the whole of an array that is not in it.
            The axes of its device matrices are named "d0", "d1", … from the left; that of pipeline stages is "stage".
        mesh: Without a strategy, the mesh on which the ranks were numbered, as for `rank_files`.
        specs: Without a strategy, how each array was split over that mesh, as for `rank_files`.

    Returns:
        A checkpoint: a dict of global arrays by name. It refers to the files, which must stay in place.

    Raises:
        DataError: A file is missing or damaged; or shards of an array overlap, or no rank has some box of it. The error
            names the array and the box.
        NotACheckpointError: The folder does not exist, or has no rank folders.
        SpecError: A spec does not fit the mesh or its array.
        InputError: Both a strategy and a mesh or specs were given, or a rank's folder does not have exactly one file.
        TreeError: An array has a dtype that NumPy and JAX do not support.

    Examples:
        >>> import jax, numpy as np, jaxckpt
        >>> for rank in range(2):
        ...     info = jaxckpt.save("/tmp/jaxckpt-doc/rank", {"w": np.arange(3) + 3 * rank}, overwrite=True)
        ...     jaxckpt.convert(info.path, f"/tmp/jaxckpt-doc/ranks/rank_{rank}/w.safetensors", overwrite=True)
        >>> ranks = jaxckpt.formats.mindspore_ranks("/tmp/jaxckpt-doc/ranks", mesh={"mp": 2}, specs=jax.P("mp"))
        >>> jaxckpt.load_numpy(ranks)
        {'w': array([0, 1, 2, 3, 4, 5])}
    """
    if strategy is not None and (mesh is not None or specs is not None):
        raise InputError("a strategy determines the mesh and the specs: pass either strategy= or mesh= and specs=")
    if isinstance(files, Mapping):
        paths, opened_files = paths_of(files)
    else:
        (folder,), opened_files = located_together({"the folder of the ranks": files})
        with using_files(opened_files):
            paths = paths_in(folder, _RANK_FOLDER)
    with using_files(opened_files):
        rank_values = {n: read_header(p) if p.endswith(".safetensors") else read_ckpt(p) for n, p in paths.items()}
    if strategy is None:
        leaf_paths = {name: escape_key(name) for values in rank_values.values() for name in values}
        tree = assemble(rank_values, leaf_paths, mesh, specs)
    else:
        (path,), its_files = located_together({"strategy": strategy})
        with using_files(its_files):
            layouts = read_strategy(path)
        tree = _assemble_by_strategy(rank_values, layouts)
    return with_files(compose(common_url(paths), tree, "mindspore", files=paths.values()), opened_files)


# Strategies -----------------------------------------------------------------------------------------------

_Dims = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]


class ArrayLayout(msgspec.Struct, frozen=True):
    """The layout of an array on the devices of a pipeline stage."""

    dev_matrix: _Dims
    """Sides of the grid of devices, which are numbered in row-major order."""

    tensor_map: tuple[Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)], ...]
    """For each dimension of the array, the dimension of the grid that splits it, counted from the right; -1: none."""

    param_split_shape: _Dims = ()
    """The number of rows of each shard, if the user split them unevenly."""

    indices_offset: _Dims = ()
    """With `param_split_shape`, the offset of the ids in each shard. Only its presence is used here: without it, rows
    are split evenly."""

    field: int = 0
    """If positive, rows are split within each of this many fields."""

    opt_weight_shard_step: int = 0
    """If the optimizer splits the rows further: the distance, in ranks, of its shards of one shard of the model.
    0: it does not split them."""

    opt_weight_shard_size: int = 0
    """The number of the optimizer's shards of one shard of the model; -1: the largest possible number."""

    tensor_shape: _Dims | None = None
    """The global shape; only in JSON files."""


Strategy = dict[int, dict[str, ArrayLayout]]
"""The layouts of each pipeline stage, by name."""


class _Operator(msgspec.Struct, frozen=True):
    stage: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


class _StrategyFile(msgspec.Struct, frozen=True):
    """The parts of a strategy file, protobuf or JSON, that are read."""

    parallel_layout_item: dict[str, ArrayLayout]
    parallel_strategy_item: dict[str, _Operator] = {}


def read_strategy(path: str) -> Strategy:
    """The layouts in a strategy file, or in those of a folder. Raises DataError."""
    if is_folder(path):
        stages: Strategy = {}
        for name in list_names(path):
            if name.endswith((".ckpt", ".json")):
                # Each rank may have written the file of its stage. These files are equal.
                for stage, layouts in read_strategy(os.path.join(path, name)).items():
                    if stages.setdefault(stage, layouts) != layouts:
                        raise DataError(f"{path} has two strategies of stage {stage}, the second in {name}")
        if not stages:
            raise DataError(f"{path} has no strategy files (.ckpt or .json)")
        return stages
    content = read_small(path, MAX_STRATEGY_BYTES)
    if content.lstrip()[:1] == b"{":  # a message starts with the number of its stage
        record = from_json(f"the strategy file {path}", content, _StrategyFile)
    else:
        with opened(path) as handle:
            record = _from_wire(Message(path, handle, len(content)))
    if not record.parallel_layout_item:
        raise DataError(f"the strategy file {path} has no arrays")
    merged = [re.fullmatch(r"([0-9]{1,7})-(.+)", name) for name in record.parallel_layout_item]
    if all(merged):  # by merge_pipeline_strategys: "1-weight" is the array of stage 1
        stages = {}
        for match, layout in zip(merged, record.parallel_layout_item.values(), strict=True):
            if match is not None:
                stages.setdefault(int(match[1]), {})[match[2]] = layout
        return stages
    stage = next((operator.stage for operator in record.parallel_strategy_item.values()), 0)
    return {stage: record.parallel_layout_item}


def _assemble_by_strategy(rank_values: RankValues, strategy: Strategy) -> dict[str, ForeignArray | str | bytes]:
    """The global arrays by name, from the arrays of each rank."""
    arrays, whole = group_by_name(rank_values)
    n_devices, n_stages = _devices_per_stage(strategy), max(strategy) + 1
    if lost := [rank for rank in rank_values if rank // n_devices not in strategy]:
        raise DataError(
            f"rank {lost[0]} belongs to stage {lost[0] // n_devices}, as each stage has {n_devices} devices;"
            f" the strategy has stages {', '.join(map(str, sorted(strategy)))}"
        )
    for name, shards in arrays.items():
        stages = [stage for stage, layouts in strategy.items() if name in layouts]
        if not stages:  # not in the strategy, such as a learning rate, so whole in each rank
            whole[name] = from_ranks(name, shards, {"rank": max(rank_values) + 1}, ())
            continue
        of_stages: list[tuple[int, ForeignArray]] = []
        for stage in stages:
            # Ranks may have saved arrays of other stages too, as they were before the first step.
            own = {rank: shard for rank, shard in shards.items() if rank // n_devices == stage}
            if own:  # an array that several stages share may be saved by only one of them
                of_stages.append((stage, _assemble_array(name, own, strategy[stage][name], n_stages)))
        if not of_stages:
            raise DataError(
                f"{show_path(name)} is missing from every rank of stage {', '.join(map(str, stages))}, where it is"
                " trained"
            )
        whole[name] = replicated(name, {f"stage {stage}": array for stage, array in of_stages})
    return whole


def _devices_per_stage(strategy: Strategy) -> int:
    counts = {
        math.prod(layout.dev_matrix): show_path(name)
        for layouts in strategy.values()
        for name, layout in layouts.items()
    }
    if len(counts) > 1:
        raise DataError(f"the strategy has different numbers of devices for {', '.join(counts.values())}")
    (count,) = counts
    if not 0 < count * (max(strategy) + 1) <= MAX_RANKS:
        raise DataError(f"the strategy has {count * (max(strategy) + 1)} devices; expected 1 to {MAX_RANKS}")
    return count


def _assemble_array(name: str, shards: Mapping[int, ForeignArray], layout: ArrayLayout, n_stages: int) -> ForeignArray:
    """The global array from the shards of a stage's ranks."""
    rank = len(next(iter(shards.values())).shape)
    if max(layout.tensor_map, default=-1) < 0 and not layout.opt_weight_shard_step:
        layout = msgspec.structs.replace(layout, tensor_map=(-1,) * rank)  # the map of a scalar may have one entry
    if len(layout.tensor_map) != rank or max(layout.tensor_map, default=-1) >= len(layout.dev_matrix):
        raise DataError(
            f"{show_path(name)} has {rank} dimensions; its strategy has tensor_map {list(layout.tensor_map)} over"
            f" dev_matrix {list(layout.dev_matrix)}"
        )
    if layout.field > 0:
        raise DataError(f"{show_path(name)} is split within each of {layout.field} fields, which jaxckpt cannot read")
    sides, tensor_map = _optimizer_shards(name, layout)
    names = [f"d{number}" for number in range(len(sides))]
    spec = tuple(tuple(names[-1 - dim] for dim in dims) for dims in tensor_map)
    axes = {"stage": n_stages} if n_stages > 1 else {}
    axes |= zip(names, sides, strict=True)
    if layout.param_split_shape and layout.indices_offset and spec and spec[0]:
        array = _assemble_uneven(name, shards, layout.param_split_shape, axes, spec)
    else:
        array = from_ranks(name, shards, axes, spec)
    if layout.tensor_shape is not None and array.shape != layout.tensor_shape:
        raise DataError(
            f"{show_path(name)} has shape {list(array.shape)} by its shards, but its strategy has"
            f" {list(layout.tensor_shape)}"
        )
    return array


def _optimizer_shards(name: str, layout: ArrayLayout) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The sides of the device grid, extended by the optimizer's own split of rows; and for each dimension of the array,
    the dimensions of that grid that split it, counted from the right.

    The ranks that hold the same shard of the model are `step` apart, and each has one `size`th of the shard's rows. As
    in MindSpore's _construct_tensor_layout_for_opt_shard.
    """
    split = [1 if dim < 0 else layout.dev_matrix[-1 - dim] for dim in layout.tensor_map]
    step, size = layout.opt_weight_shard_step, layout.opt_weight_shard_size
    if step == 0 or size == 0:
        return layout.dev_matrix, tuple(() if dim < 0 else (dim,) for dim in layout.tensor_map)
    count = math.prod(layout.dev_matrix)
    size = count // step if size == -1 and step > 0 else size
    if not split or step != math.prod(split) or size < 1 or count % (step * size):
        raise DataError(
            f"{show_path(name)} has opt_weight_shard_step {step} and size {layout.opt_weight_shard_size}, which do not"
            f" fit {count} devices and its split {split}"
        )
    rank = len(split)
    own = [(rank - 1 - dim,) if side > 1 else () for dim, side in enumerate(split)]
    return (count // (step * size), size, *split), ((*own[0], rank), *own[1:])


def _assemble_uneven(
    name: str, shards: Mapping[int, ForeignArray], rows: Sequence[int], axes: Mapping[str, int], spec: Spec
) -> ForeignArray:
    """An array whose rows are split unevenly, its columns evenly."""
    split = pieces_along(axes, spec, len(spec))
    if len(rows) != math.prod(split) or any(side > 1 for side in split[1:]):
        raise DataError(f"{show_path(name)} has param_split_shape {list(rows)}, which does not fit its split {split}")
    boxes: dict[int, Box] = {}
    for rank, shard in shards.items():
        position = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
        number = int(position[spec[0][0]])
        start = sum(rows[:number])
        boxes[rank] = ((start, start + rows[number]), *((0, side) for side in shard.shape[1:]))
    return from_boxes(name, shards, boxes, (sum(rows), *next(iter(shards.values())).shape[1:]))


# Checkpoints ----------------------------------------------------------------------------------------------


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor, or a range of its elements."""

    type: str
    content: tuple[int, int]
    """Its first byte in the file, and the byte after its last."""

    dims: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_RANK)] = ()

    @property
    def n_bytes(self) -> int:
        return self.content[1] - self.content[0]


class _Value(msgspec.Struct, frozen=True):
    tag: str
    tensor: _Tensor


_TENSOR = Schema("a tensor", {1: ("dims", "numbers"), 2: ("type", "text"), 3: ("content", "span")}, strict=True)
_VALUE = Schema("a value", {1: ("tag", "text"), 2: ("tensor", _TENSOR), 3: ("map", "span")}, strict=True)


def read_ckpt(path: str) -> dict[str, ForeignArray | str]:
    """The tensors of a .ckpt file by name. Reads everything except the contents of the tensors.

    Raises DataError if the file is damaged or encrypted, or contains something other than tensors.
    """
    tensors: dict[str, ForeignArray | str] = {}
    with opened(path) as handle:
        size = handle.size
        if size >= 17 and handle.read(len(_TRAILER), size - 17) == _TRAILER:
            size -= 17
        for tag, values in itertools.groupby(_values(Message(path, handle, size)), key=lambda value: value.tag):
            if tag in tensors:
                raise DataError(f"{path} has {show_path(tag)} twice")
            tensors[tag] = _read_tensor(path, tag, [value.tensor for value in values], handle)
    if not tensors:
        raise DataError(f"{path} is empty")
    return tensors


def _values(wire: Message) -> Iterator[_Value]:
    for field in wire.fields(0, wire.size):
        if field.number != 1:
            raise wire.damage_error(field.start, f"field {field.number} is not part of the format")
        value = wire.read(field, _VALUE)
        if "map" in value:
            tag = show_path(value.get("tag", ""))
            raise DataError(f"{wire.path}: {tag} is a MapParameter, a table of hashed keys, which JAX does not support")
        yield convert_checked(wire.path, value, _Value)


def _read_tensor(path: str, tag: str, runs: Sequence[_Tensor], handle: OpenFile) -> ForeignArray | str:
    """The tensor or text that consists of one or more ranges of elements."""
    first, where = runs[0], f"{path}: {show_path(tag)}"
    if differing := [run for run in runs if (run.dims, run.type) != (first.dims, first.type)]:
        raise DataError(
            f"{where} is {first.type}{list(first.dims)} and then {differing[0].type}{list(differing[0].dims)}"
        )
    n_bytes = sum(run.n_bytes for run in runs)
    offset = first.content[0]
    if first.type == "str":
        # As NumPy stores text: UTF-32, padded with zeros.
        if n_bytes > MAX_TEXT_BYTES or len(runs) > 1:
            raise DataError(f"{where} is a text of {n_bytes} bytes; at most {MAX_TEXT_BYTES} are read")
        content = bytearray(n_bytes)
        handle.read_into(offset, [content])
        try:
            return content.decode("utf-32-le", "surrogatepass").rstrip("\0")
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not text: {error}") from error
    if first.type not in _DTYPES:
        # Not by its name alone: "float32", a damaged "Float32", would be ours.
        dtype = f"{first.type[:40]} of MindSpore"
        return ForeignArray(dtype, first.dims, FileData(path, offset, "uint8", (n_bytes,)))
    dtype = _DTYPES[first.type]
    size = DTYPES[dtype].itemsize
    shape = () if first.dims == (0,) and n_bytes else first.dims  # older versions write scalars this way
    expected = math.prod(shape) * size
    if math.prod(side or 1 for side in shape) * size >= 1 << 63 or n_bytes != expected:
        raise DataError(f"{where} has {n_bytes} bytes, expected {expected} of {first.type}{list(shape)}")
    if len(runs) == 1:
        return ForeignArray(dtype, shape, FileData(path, offset, dtype, shape))
    chunks: list[ForeignArray] = []
    for run in runs:
        count, rest = divmod(run.n_bytes, size)
        if rest:
            raise DataError(f"{where} is split over several values, one of which ends in the middle of an element")
        chunks.append(ForeignArray(dtype, (count,), FileData(path, run.content[0], dtype, (count,))))
    return ForeignArray(dtype, shape, tiled_flat(escape_key(tag), shape, chunks))


# Strategies as messages -----------------------------------------------------------------------------------


_LIST = Schema("a list", {1: ("numbers", "numbers")})
_LAYOUT = Schema(
    "a layout",
    {
        1: ("dev_matrix", _LIST),
        2: ("tensor_map", _LIST),
        3: ("param_split_shape", _LIST),
        4: ("indices_offset", _LIST),
        5: ("field", "number"),
        6: ("opt_weight_shard_step", "number"),
        7: ("opt_weight_shard_size", "number"),
    },
)
_ITEMS = {
    2: ("parallel_strategy_item", Schema("an operator", {1: ("stage", "number")})),
    3: ("parallel_layout_item", _LAYOUT),
}
"""For each field of a strategy: its name in JSON, and the fields of its entries."""


def _from_wire(wire: Message) -> _StrategyFile:
    items: dict[str, dict[str, Any]] = {name: {} for name, _ in _ITEMS.values()}
    for outer in wire.fields(0, wire.size):
        if outer.number not in _ITEMS:
            continue
        name, schema = _ITEMS[outer.number]
        item = wire.read(outer, Schema("an item", {1: ("name", "text"), 2: ("value", schema)}))
        if not {"name", "value"} <= item.keys() or item["name"] in items[name]:
            raise wire.damage_error(outer.start, f"{schema.what} has no unique name, or no value")
        # A list is a message of its own.
        items[name][item["name"]] = {
            key: value.get("numbers", []) if isinstance(value, dict) else value for key, value in item["value"].items()
        }
    return convert_checked(f"the strategy file {wire.path}", items, _StrategyFile)


FORMAT = Format("mindspore", recognizes, open_mindspore)
