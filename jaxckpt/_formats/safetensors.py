"""Reads and writes safetensors: one file, or a folder of shards with an index as in Hugging Face's repositories.

8 bytes: length of the header ─▶ the header, JSON: name ─▶ dtype, shape, data_offsets ─▶ the tensors, without gaps
(github.com/huggingface/safetensors)

It is long because it reads and writes, and both need the header and the index.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxckpt._formats.export import (
    Data,
    FolderFile,
    FolderPlan,
    arrays_of,
    n_bytes,
    names_of,
    recorded_paths,
    slabs,
    tree_of_names,
    write_json,
)
from jaxckpt._formats.index_files import (
    STEMS,
    Index,
    complete_series,
    convert_checked,
    from_json,
    index_counts,
    merged,
    preferred,
    read_indexed,
    read_json,
    several_indices_error,
)
from jaxckpt._formats.pickles import unreadable
from jaxckpt._formats.shards import FileData
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.format_registry import Format
from jaxckpt._sources.source import Source
from jaxckpt._store.foreign_files import is_folder, list_names, opened, read_head
from jaxckpt.errors import DataError, NotACheckpointError, show_path

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the format allows."""

MAX_BYTES = (1 << 63) - 1
"""The largest tensor, with sides of 0 counted as 1: NumPy's limit for an array's shape."""

DTYPE_OF = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}

# Bits per element. F4 and F6 are packed, so jaxckpt does not read them. They keep the format's name.
_BITS = {name: 8 * DTYPES[ours].itemsize for name, ours in DTYPE_OF.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def read_header(path: str) -> dict[str, ForeignArray]:
    """The tensors of a .safetensors file, in order of their offsets. Only the header is read.

    Raises DataError if the file is truncated, or its tensors overlap, leave a gap, or do not fit their shapes.
    """
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: str) -> tuple[dict[str, ForeignArray], dict[str, str]]:
    """As `read_header`, with the metadata in the header."""
    with opened(path) as file:
        length = int.from_bytes(start := file.read(8, 0), "little")
        text = file.read(length, 8) if length <= MAX_HEADER_BYTES else b""
        if len(start) < 8 or len(text) < length:
            raise DataError(
                f"{path} is not a .safetensors file, or was truncated: its header would be {length} bytes, the file is"
                f" {file.size}"
            )
        tensors, metadata, size = _parse_header(path, text)
        if not file.has_size(size):
            remedy = ": it was truncated; download or copy it again" if file.size < size else ""
            raise DataError(f"{path} is {file.size} bytes long, expected {size} from its header{remedy}")
    return tensors, metadata


def _parse_header(path: str, text: bytes) -> tuple[dict[str, ForeignArray], dict[str, str], int]:
    """The tensors and the metadata of a header, and the size of its file. Raises DataError."""
    what = f"the header of {path}"
    if not text.startswith(b"{"):
        raise DataError(f"{what} is damaged: it does not start with '{{'")
    record = from_json(what, text, dict[str, Any])
    metadata = record.pop("__metadata__", None)
    metadata = convert_checked(what, {} if metadata is None else metadata, dict[str, str])
    entries = convert_checked(what, record, dict[str, _Entry])
    tensors: dict[str, ForeignArray] = {}
    start, end = 8 + len(text), 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _BITS:
            raise DataError(
                f"{path}: {show_path(name)} has dtype {entry.dtype[:40]!r}, which the format does not define"
            )
        first, last = entry.data_offsets
        if first != end:
            kind = "overlap another tensor" if first < end else "leave a gap before them"
            raise DataError(
                f"{path}: bytes {first} to {last}, those of {show_path(name)}, {kind}: expected to start at {end}"
            )
        bits = _BITS[entry.dtype] * math.prod(entry.shape)
        if bits != 8 * (last - first):
            raise DataError(
                f"{path}: {show_path(name)} has {last - first} bytes, expected {-(-bits // 8)} of"
                f" {entry.dtype}{list(entry.shape)}"
            )
        if _BITS[entry.dtype] * math.prod(side or 1 for side in entry.shape) > 8 * MAX_BYTES:
            raise DataError(f"{path}: {show_path(name)} has shape {list(entry.shape)}, which is too large to address")
        dtype = DTYPE_OF.get(entry.dtype, entry.dtype)
        tensors[name] = ForeignArray(dtype, entry.shape, FileData(path, start + first, dtype, entry.shape))
        end = last
    return tensors, metadata, start + end


# Files and folders as checkpoints --------------------------------------------------------------------------

INDEX = ".safetensors.index.json"
_INDEX = re.compile(r".+\.safetensors\.index(\.[\w-]+)?\.json")
"""An index, also of a variant: "model.safetensors.index.fp16.json"."""

_SUFFIXES = (".safetensors", ".sft")


def recognizes(path: str, names: Collection[str]) -> bool:
    """Whether this is a .safetensors file, an index of such files, or a folder with one of these."""
    if names:
        return any(map(_INDEX.fullmatch, names)) or bool(_tensor_files(names))
    if path.endswith(_SUFFIXES) or _INDEX.fullmatch(path):
        return True
    head = read_head(path, 10)  # a blob in the cache of a hub has no suffix
    return head[8:] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def owned_names(path: str, names: Collection[str]) -> set[str]:
    """The names in the folder `path` that belong to this format."""
    chosen = _chosen(path, names)
    indices = {name for name in names if _INDEX.fullmatch(name)}
    files = chosen if indices.isdisjoint(chosen) else read_json(os.path.join(path, *chosen), Index).weight_map.values()
    return {*indices, *files}


def open_safetensors(path: str) -> ForeignCheckpoint:
    """The tensors in the tree of their names. Raises DataError, InputError, NotACheckpointError."""
    tensors = _tensors(path)
    arrays = {
        name: array if array.dtype in DTYPES else unreadable(f"has dtype {array.dtype}, which jaxckpt cannot read")
        for name, (array, _) in tensors.items()
    }
    recorded = {name: leaf_path for name, (_, leaf_path) in tensors.items() if leaf_path is not None}
    return compose(path, tree_of_names(arrays, recorded), "safetensors")


_Tensor = tuple[ForeignArray, str | None]
"""A tensor, and the path of its leaf if the file records it."""


def _tensors(path: str) -> dict[str, _Tensor]:
    if is_folder(path):
        files = [os.path.join(path, name) for name in _chosen(path, list_names(path))]
        if len(files) > 1:
            return merged({file: _tensors_of_file(file) for file in files})
        (path,) = files
    if _INDEX.fullmatch(path):
        return read_indexed(os.path.dirname(path), path, _tensors_of_file)
    return _tensors_of_file(path)


def _chosen(path: str, names: Collection[str]) -> Sequence[str]:
    """The files in a folder that hold its tensors, or the index of the files that do. Raises DataError, InputError,
    NotACheckpointError."""
    files = sorted(_tensor_files(names))
    indices = sorted(filter(_INDEX.fullmatch, names))
    index = indices[0] if len(indices) == 1 else preferred(indices, INDEX)
    if index is not None:
        single = re.sub(r"\.index(\.[\w-]+)?\.json$", "", index)
        if index.endswith(INDEX) or preferred(files, ".safetensors") is None:
            return [index if index_counts(path, index, single) else single]
    elif indices:
        raise several_indices_error(path, indices)
    if len(files) == 1:
        return files
    if (single := preferred(files, ".safetensors")) is not None:
        return [single]
    if (series := complete_series(files)) is not None:
        return series
    raise NotACheckpointError(
        f"{path} has {len(files)} .safetensors files, but no index (*{INDEX}) that says which of them belong"
        f" together: give the path of one file, such as {os.path.join(path, files[0])}, or add the index"
    )


def _tensors_of_file(path: str) -> dict[str, _Tensor]:
    tensors, metadata = read_header_and_metadata(path)
    paths = from_json(f"{path}: its {_PATHS}", metadata.get(_PATHS, "{}"), dict[str, str])
    return {name: (array, paths.get(name)) for name, array in tensors.items()}


_PATHS = "jaxckpt.paths"
"""The metadata with the paths of leaves that do not follow from the names, in JSON."""


def _tensor_files(names: Collection[str]) -> list[str]:
    # Names that start with "." are remains of a killed conversion.
    return [name for name in names if name.endswith(_SUFFIXES) and not name.startswith(".")]


# Writing --------------------------------------------------------------------------------------------------

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file of a folder, unless a single tensor is larger: Hugging Face's default."""


def write_safetensors(source: Source, path: str, options: Options, report: Report) -> None:
    """Write one file if `path` ends in .safetensors, otherwise a folder of shards with an index, which Hugging Face's
    libraries read. Raises TreeError for leaves that the format cannot hold."""
    if path.endswith(".safetensors"):
        arrays = arrays_of(source, options, report, tensor_problem)
        write_tensors(path, arrays, _metadata(arrays, recorded_paths(names_of(source))))
        return
    plan = plan_safetensors(source, options, report)
    os.mkdir(path)
    for file in plan.files:
        file.write(os.path.join(path, file.name))
    plan.finish(path)


def plan_safetensors(source: Source, options: Options, report: Report) -> FolderPlan:
    """The shards of a folder, and their index. Raises TreeError for leaves that the format cannot hold."""
    arrays = arrays_of(source, options, report, tensor_problem)
    paths = recorded_paths(names_of(source))
    shards: list[dict[str, Data]] = [{}]
    bytes_left = SHARD_BYTES
    for name, data in arrays.items():
        if shards[-1] and n_bytes(data) > bytes_left:
            shards.append({})
            bytes_left = SHARD_BYTES
        shards[-1][name] = data
        bytes_left -= n_bytes(data)
    weight_map: dict[str, str] = {}
    files: list[FolderFile] = []
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        metadata = _metadata(shard, paths)
        write = functools.partial(write_tensors, arrays=shard, metadata=metadata)
        files.append(FolderFile(name, sum(map(n_bytes, shard.values())), write, _head(shard, metadata)[1]))
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(file.n_bytes for file in files)}, "weight_map": weight_map}
    return FolderPlan(files, lambda folder: write_json(os.path.join(folder, f"model{INDEX}"), index, indent=2))


def tensor_problem(name: str, dtype: np.dtype[Any]) -> str | None:
    """The reason why the format cannot hold a tensor; None if it can."""
    if dtype.name not in _NAME_OF:
        return f"is {dtype.name}, which jaxckpt does not write to safetensors"
    return "has a name that safetensors reserves" if name == "__metadata__" else None


_NAME_OF = {ours: theirs for theirs, ours in DTYPE_OF.items()}


def _metadata(arrays: Collection[str], paths: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with these tensors. `paths` are those to record."""
    # transformers before 5 loads no file with "np" here.
    recorded = {name: paths[name] for name in arrays if name in paths}
    return {"format": "pt"} | ({_PATHS: json.dumps(recorded)} if recorded else {})


def write_tensors(
    path: str, arrays: Mapping[str, Data], metadata: Mapping[str, str], skip: Collection[str] = ()
) -> None:
    """Write a .safetensors file with this metadata. The file keeps what it has in place of the tensors to skip."""
    head, offsets = _head(arrays, metadata)
    flags = os.O_WRONLY | os.O_CREAT | (0 if skip else os.O_TRUNC)
    with open(os.open(path, flags, 0o666), "wb") as file:
        file.write(head)
        for name, offset in offsets.items():
            if name not in skip:
                file.seek(offset)
                for slab in slabs(arrays[name]):
                    file.write(slab.data)


def _head(arrays: Mapping[str, Data], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and the offset in it of each tensor, in order."""
    # Largest dtypes first, as in the reference implementation: all tensors are then aligned without gaps.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    end = 0
    for name, data in ordered:
        starts[name], end = end, end + n_bytes(data)
        header[name] = _Entry(_NAME_OF[data.dtype.name], tuple(data.shape), (starts[name], end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def _save_to(*arguments: Any, **named: Any) -> Any:
    from jaxckpt._formats.live_export import ExportedFolder  # imports JAX, which reading does not need

    return ExportedFolder(plan_safetensors, *arguments, **named)


FORMAT = Format(
    "safetensors",
    recognizes,
    open_safetensors,
    owned_names,
    write_safetensors,
    (".safetensors",),
    index_names=tuple(stem + end for stem in STEMS for end in (".safetensors", INDEX)),
    save_to=_save_to,
)
