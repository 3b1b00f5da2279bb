"""MindSpore's checkpoints: .ckpt files and folders of ranks, put together by its strategy files.

A .ckpt file is a protobuf message, read here by its wire format: only tags, shapes and types, never the tensors, which
stay in the file until they are asked for.

    Checkpoint  = {1: Value}*                                       mindspore/ccsrc/utils/checkpoint.proto
    Value       = {1: tag, 2: TensorProto}                          a tensor above 512 MiB lies in several with one tag
    TensorProto = {1: dims*, 2: type, 3: content}
    Strategy    = {1: stage, 2: operators*, 3: {1: name, 2: Layout}*}               node_strategy.proto
    Layout      = {1: dev_matrix, 2: tensor_map, 3: param_split_shape, 4: indices_offset, 5: field,
                   6: opt_weight_shard_step, 7: opt_weight_shard_size}
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxckpt._foreign.local_files import converted, from_json, head, listed, opened, read_small
from jaxckpt._foreign.protobuf import LENGTH, VARINT, Field, Message
from jaxckpt._foreign.rank_files import MAX_RANKS, Files, OfRanks, assemble, by_name, common_url, paths_in, paths_of
from jaxckpt._foreign.safetensors import read_header
from jaxckpt._foreign.shards import FileData, flat_boxes, from_boxes, from_ranks, replicated, tiled
from jaxckpt._format.dtypes import DTYPES, MAX_RANK
from jaxckpt._format.grid import Box, Spec, pieces_along
from jaxckpt._format.paths import component
from jaxckpt._format.specs import Specs
from jaxckpt._restore.source import Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError, InputError, show

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
"""Before the checksum that `save_checkpoint(crc_check=True)` puts behind the message, in 10 bytes."""


def recognises(path: str, names: Collection[str]) -> bool:
    """A .ckpt file; not PyTorch's, which many name so too: it is a zip file or a pickle."""
    return not names and path.endswith(".ckpt") and head(path, 1) == b"\n"  # field 1, of a length


def open_mindspore(path: str) -> Foreign:
    """A .ckpt file: a dict of names. Raises DataError."""
    return compose(path, read_ckpt(path), "mindspore")


def mindspore_ranks(
    files: Files | str | os.PathLike[str],
    *,
    strategy: str | os.PathLike[str] | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    specs: Specs = None,
) -> Foreign:
    """The checkpoint that the ranks of a MindSpore job wrote, as one of global arrays.

    `restore`, `load_numpy`, `open`, `convert`, `diff` and `verify` take it in place of a path: there is nothing to
    merge first. Only headers are read here; arrays are read from the files where they lie, box by box. Call it on
    every process.

    Args:
        files: The file of each rank, .ckpt or .safetensors, as {rank: path}; or the folder that has the folders rank_0,
            rank_1, … with one file each.
        strategy: The strategy file of the job (`strategy_ckpt_save_file`), protobuf or JSON, of one pipeline stage or
            merged; or a folder of those of all stages. An array that it lacks is whole in each rank. The axes of its
            device matrices are named "d0", "d1", … from the left, that of several pipeline stages "stage".
        mesh_shape: Without a strategy, the mesh that the ranks were numbered on, row by row, as for `rank_files`.
        specs: Without a strategy, how each array was split over that mesh, as for `rank_files`.

    Raises:
        DataError: A file is missing or damaged; shards of an array overlap, or leave a box of it that no rank has. The
            error names the array and the box.
        NotACheckpointError: The folder is not there, or has no folders of ranks.
        InputError: Both a strategy and specs; several files in the folder of a rank.
        TreeError: An array of a dtype that NumPy and JAX lack.

    Examples:
        >>> import jax, numpy as np, jaxckpt
        >>> for rank in range(2):
        ...     info = jaxckpt.save("/tmp/jaxckpt-doc/part", {"w": np.arange(3) + 3 * rank}, overwrite=True)
        ...     jaxckpt.convert(info.path, f"/tmp/jaxckpt-doc/ranks/rank_{rank}/w.safetensors", overwrite=True)
        >>> found = jaxckpt.mindspore_ranks("/tmp/jaxckpt-doc/ranks", mesh_shape={"mp": 2}, specs=jax.P("mp"))
        >>> jaxckpt.load_numpy(found)
        {'w': array([0, 1, 2, 3, 4, 5])}
    """
    if strategy is not None and (mesh_shape is not None or specs is not None):
        raise InputError("a strategy says what mesh_shape= and specs= would; pass one or the other")
    paths = paths_of(files) if isinstance(files, Mapping) else paths_in(files, _RANK_FOLDER)
    held = {rank: read_header(p) if p.endswith(".safetensors") else read_ckpt(p) for rank, p in paths.items()}
    if strategy is None:
        found = assemble(held, mesh_shape, specs)
    else:
        found = _put_together(held, read_strategy(os.path.abspath(os.path.expanduser(os.fspath(strategy)))))
    return compose(common_url(paths), found, "mindspore", files=paths.values())


# Strategies -----------------------------------------------------------------------------------------------

_Dims = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]


class Layout(msgspec.Struct, frozen=True):
    """How an array lies on the devices of a pipeline stage."""

    dev_matrix: _Dims
    """Sides of the grid that devices are numbered on, row by row."""

    tensor_map: tuple[Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)], ...]
    """For each dimension of the array the one of the grid that splits it, counted from the right; -1: none."""

    param_split_shape: _Dims = ()
    """Where rows are split unevenly by hand, how many each shard has."""

    indices_offset: _Dims = ()
    """With `param_split_shape`, of the ids in each; not used here."""

    field: int = 0
    """Above 0: rows are split within each of so many fields."""

    opt_weight_shard_step: int = 0
    """Distance in ranks of the shards that the optimizer splits rows into once more; 0: it does not."""

    opt_weight_shard_size: int = 0
    """How many those are; -1: as many as there can be."""

    tensor_shape: _Dims | None = None
    """The global shape: in JSON files alone."""


Strategy = dict[int, dict[str, Layout]]
"""The layouts of each pipeline stage, by name."""


class _Operator(msgspec.Struct, frozen=True):
    stage: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


class _StrategyFile(msgspec.Struct, frozen=True):
    """What is read of a strategy file, of either form."""

    parallel_layout_item: dict[str, Layout]
    parallel_strategy_item: dict[str, _Operator] = {}


def read_strategy(path: str) -> Strategy:
    """The layouts in a strategy file, or in those of a folder. Raises DataError."""
    if os.path.isdir(path):
        stages: Strategy = {}
        for name in listed(path):
            if name.endswith((".ckpt", ".json")):
                # Each rank may have written that of its stage: they are the same.
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


def _put_together(held: OfRanks, strategy: Strategy) -> dict[str, ForeignArray | str | bytes]:
    """The global arrays by name, from what each rank holds."""
    arrays, whole = by_name(held)
    n_devices, n_stages = _devices_of_a_stage(strategy), max(strategy) + 1
    if lost := [rank for rank in held if rank // n_devices not in strategy]:
        raise DataError(
            f"rank {lost[0]} is of stage {lost[0] // n_devices}, as each has {n_devices} devices; the strategy is of"
            f" {', '.join(map(str, sorted(strategy)))}"
        )
    for name, shards in arrays.items():
        stages = [stage for stage, layouts in strategy.items() if name in layouts]
        if not stages:  # a learning rate, for example
            whole[name] = from_ranks(name, shards, {"rank": max(held) + 1}, ())
            continue
        of_stages: list[tuple[int, ForeignArray]] = []
        for stage in stages:
            # Ranks may have saved arrays of other stages too, as they were before the first step.
            own = {rank: shard for rank, shard in shards.items() if rank // n_devices == stage}
            if own:  # what stages share is saved by one of them
                of_stages.append((stage, _laid_out(name, own, strategy[stage][name], n_stages)))
        if not of_stages:
            raise DataError(f"{show(name)} is in no rank of stage {', '.join(map(str, stages))}, where it is trained")
        whole[name] = replicated(name, {f"stage {stage}": array for stage, array in of_stages})
    return whole


def _devices_of_a_stage(strategy: Strategy) -> int:
    counts = {
        math.prod(layout.dev_matrix): show(name) for layouts in strategy.values() for name, layout in layouts.items()
    }
    if len(counts) > 1:
        raise DataError(f"the strategy has another number of devices for each of {', '.join(counts.values())}")
    (count,) = counts
    if not 0 < count * (max(strategy) + 1) <= MAX_RANKS:
        raise DataError(f"the strategy has {count * (max(strategy) + 1)} devices; expected 1 to {MAX_RANKS}")
    return count


def _laid_out(name: str, shards: Mapping[int, ForeignArray], layout: Layout, n_stages: int) -> ForeignArray:
    """The global array from what the ranks of a stage hold of it."""
    rank = len(next(iter(shards.values())).shape)
    if max(layout.tensor_map, default=-1) < 0 and not layout.opt_weight_shard_step:
        layout = msgspec.structs.replace(layout, tensor_map=(-1,) * rank)  # a scalar may have one entry
    if len(layout.tensor_map) != rank or max(layout.tensor_map, default=-1) >= len(layout.dev_matrix):
        raise DataError(
            f"{show(name)} has {rank} dimensions; its strategy has tensor_map {list(layout.tensor_map)} over"
            f" dev_matrix {list(layout.dev_matrix)}"
        )
    if layout.field > 0:
        raise DataError(f"{show(name)} is split within each of {layout.field} fields, which is not read")
    sides = _optimizer_shards(name, layout)
    names = [f"d{number}" for number in range(len(sides.dev_matrix))]
    spec = tuple(tuple(names[-1 - dim] for dim in dims) for dims in sides.tensor_map)
    axes = {"stage": n_stages} if n_stages > 1 else {}
    axes |= zip(names, sides.dev_matrix, strict=True)
    if layout.param_split_shape and layout.indices_offset and spec and spec[0]:
        array = _by_hand(name, shards, layout.param_split_shape, axes, spec)
    else:
        array = from_ranks(name, shards, axes, spec)
    if layout.tensor_shape is not None and array.shape != layout.tensor_shape:
        raise DataError(
            f"{show(name)} would be {list(array.shape)} of its shards, its strategy has {list(layout.tensor_shape)}"
        )
    return array


@dataclass(frozen=True, slots=True)
class _Sides:
    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    """For each dimension of the array those of the grid that split it, counted from the right."""


def _optimizer_shards(name: str, layout: Layout) -> _Sides:
    """The grid with the optimizer's own split of rows, as MindSpore's _construct_tensor_layout_for_opt_shard has it.

    The ranks that hold a shard of the model lie `step` apart, and each has one `size`th of the shard's rows.
    """
    split = [1 if dim < 0 else layout.dev_matrix[-1 - dim] for dim in layout.tensor_map]
    step, size = layout.opt_weight_shard_step, layout.opt_weight_shard_size
    if step == 0 or size == 0:
        return _Sides(layout.dev_matrix, tuple(() if dim < 0 else (dim,) for dim in layout.tensor_map))
    count = math.prod(layout.dev_matrix)
    size = count // step if size == -1 and step > 0 else size
    if not split or step != math.prod(split) or size < 1 or count % (step * size):
        raise DataError(
            f"{show(name)} has opt_weight_shard_step {step} and size {layout.opt_weight_shard_size}, which do not fit"
            f" {count} devices and its split {split}"
        )
    rank = len(split)
    own = [(rank - 1 - dim,) if side > 1 else () for dim, side in enumerate(split)]
    return _Sides((count // (step * size), size, *split), ((*own[0], rank), *own[1:]))


def _by_hand(
    name: str, shards: Mapping[int, ForeignArray], rows: Sequence[int], axes: Mapping[str, int], spec: Spec
) -> ForeignArray:
    """An array whose rows are split unevenly, its columns evenly."""
    split = pieces_along(axes, spec, len(spec))
    if len(rows) != math.prod(split) or any(side > 1 for side in split[1:]):
        raise DataError(f"{show(name)} has param_split_shape {list(rows)}, which does not fit its split {split}")
    boxes: dict[int, Box] = {}
    for rank, shard in shards.items():
        place = dict(zip(axes, np.unravel_index(rank, tuple(axes.values())), strict=True))
        number = int(place[spec[0][0]])
        start = sum(rows[:number])
        boxes[rank] = ((start, start + rows[number]), *((0, side) for side in shard.shape[1:]))
    return from_boxes(name, shards, boxes, (sum(rows), *next(iter(shards.values())).shape[1:]))


# Checkpoints ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor, or a run of its elements."""

    tag: str
    type: str
    dims: tuple[int, ...]
    start: int
    """Of its content, in the file."""

    stop: int


def read_ckpt(path: str) -> dict[str, ForeignArray | str]:
    """What a .ckpt file holds, by name as a key of a dict. Only what lies between the tensors is read.

    Raises DataError where it is damaged or encrypted, or holds what is no tensor.
    """
    tensors: dict[str, ForeignArray | str] = {}
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        if size >= 17 and os.pread(handle, len(_TRAILER), size - 17) == _TRAILER:
            size -= 17
        wire = Message(path, handle, size)
        runs: list[_Value] = []
        for value in _values(wire):
            if runs and value.tag != runs[0].tag:
                _add(path, tensors, handle, runs)
                runs = []
            if runs and (value.dims, value.type) != (runs[0].dims, runs[0].type):
                raise DataError(
                    f"{path}: {show(value.tag)} is {runs[0].type}{list(runs[0].dims)} and then"
                    f" {value.type}{list(value.dims)}"
                )
            runs.append(value)
        if runs:
            _add(path, tensors, handle, runs)
    if not tensors:
        raise DataError(f"{path} is empty")
    return tensors


def _add(path: str, tensors: dict[str, ForeignArray | str], handle: int, runs: Sequence[_Value]) -> None:
    """Enter the tensor, or text, that lies in one or more runs."""
    first = runs[0]
    if first.tag in tensors:
        raise DataError(f"{path} has {show(first.tag)} twice")
    n_bytes = sum(run.stop - run.start for run in runs)
    if first.type == "str":
        tensors[first.tag] = _text(path, first, handle, n_bytes)
        return
    if first.type not in _DTYPES:
        tensors[first.tag] = ForeignArray(first.type[:40], first.dims, FileData(path, first.start, "uint8", (n_bytes,)))
        return
    dtype = _DTYPES[first.type]
    size = DTYPES[dtype].itemsize
    shape = () if first.dims == (0,) and n_bytes else first.dims  # older versions write a scalar so
    if math.prod(side or 1 for side in shape) * size >= 1 << 63 or n_bytes != math.prod(shape) * size:
        raise DataError(
            f"{path}: {show(first.tag)} has {n_bytes} bytes, expected {math.prod(shape) * size} of"
            f" {first.type}{list(shape)}"
        )
    if len(runs) == 1:
        tensors[first.tag] = ForeignArray(dtype, shape, FileData(path, first.start, dtype, shape))
        return
    pieces: list[tuple[Box, FileData]] = []
    element = 0
    for run in runs:
        count, rest = divmod(run.stop - run.start, size)
        if rest:
            raise DataError(f"{path}: {show(first.tag)} lies in several values, one of which ends within an element")
        offset = run.start
        for box in flat_boxes(shape, element, element + count):
            sides = tuple(stop - start for start, stop in box)
            pieces.append((box, FileData(path, offset, dtype, sides)))
            offset += size * math.prod(sides)
        element += count
    tensors[first.tag] = ForeignArray(dtype, shape, tiled(component(first.tag), shape, pieces))


def _text(path: str, value: _Value, handle: int, n_bytes: int) -> str:
    # As NumPy has it: UTF-32, filled up with zeros.
    if n_bytes > MAX_TEXT_BYTES or n_bytes != value.stop - value.start:
        raise DataError(f"{path}: {show(value.tag)} is a text of {n_bytes} bytes; at most {MAX_TEXT_BYTES} are read")
    try:
        return os.pread(handle, n_bytes, value.start).decode("utf-32-le", "surrogatepass").rstrip("\0")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {show(value.tag)} is no text: {error}") from error


def _values(wire: Message) -> Iterator[_Value]:
    for field in wire.fields(0, wire.size):
        if field.number != 1:
            raise wire.damaged(field.start, f"there is field {field.number}, which the format lacks")
        yield _value(wire, field)


def _value(wire: Message, outer: Field) -> _Value:
    fields = wire.once(outer, "a value", {1, 2, 3}, others=())
    tag = wire.text(fields.get(1), "its name")
    if 3 in fields:
        raise DataError(f"{wire.path}: {show(tag)} is a MapParameter, a table of hashed keys, which JAX lacks")
    if 2 not in fields:
        raise DataError(f"{wire.path} is damaged: {show(tag)} has no tensor")
    tensor = wire.once(fields[2], f"the tensor {show(tag)}", {2, 3}, others={1})
    dims = tuple(wire.integers(fields[2], 1, MAX_RANK))
    kind = wire.text(tensor.get(2), f"the type of {show(tag)}")
    if 3 not in tensor or tensor[3].kind != LENGTH:
        raise DataError(f"{wire.path} is damaged: {show(tag)} has no content")
    if any(side < 0 for side in dims):
        raise DataError(f"{wire.path} is damaged: {show(tag)} has shape {list(dims)}")
    return _Value(tag, kind, dims, tensor[3].start, tensor[3].stop)


def _from_wire(wire: Message) -> _StrategyFile:
    layouts: dict[str, Any] = {}
    operators: dict[str, Any] = {}
    for outer in wire.fields(0, wire.size):
        if outer.number not in (2, 3):
            continue
        item = wire.once(outer, "an item", {1, 2})
        name = wire.text(item.get(1), "a name")
        if 2 not in item:
            raise wire.damaged(outer.start, f"{show(name)} has no layout")
        if outer.number == 2:
            stage = wire.once(item[2], "an operator", {1}).get(1)
            operators[name] = {"stage": stage.value if stage else 0}
            continue
        if name in layouts:
            raise wire.damaged(outer.start, f"{show(name)} is there twice")
        layouts[name] = _layout(wire, item[2])
    items = {"parallel_layout_item": layouts, "parallel_strategy_item": operators}
    return converted(f"the strategy file {wire.path}", items, _StrategyFile)


_LISTS = {1: "dev_matrix", 2: "tensor_map", 3: "param_split_shape", 4: "indices_offset"}
_NUMBERS = {5: "field", 6: "opt_weight_shard_step", 7: "opt_weight_shard_size"}


def _layout(wire: Message, outer: Field) -> dict[str, Any]:
    fields = wire.once(outer, "a layout", _LISTS.keys() | _NUMBERS.keys())
    if not {1, 2} <= fields.keys():
        raise wire.damaged(outer.start, "a layout has no dev_matrix or no tensor_map")
    record: dict[str, Any] = {}
    for number, field in fields.items():
        if number in _LISTS:
            record[_LISTS[number]] = wire.integers(field, 1, MAX_RANKS)
        elif field.kind != VARINT:
            raise wire.damaged(field.start, f"{_NUMBERS[number]} is no number")
        else:
            record[_NUMBERS[number]] = field.value
    return record
