"""The header of a .safetensors file: which tensors it holds, and where.

8 bytes: length of the header ─▶ the header, JSON: name ─▶ dtype, shape, data_offsets ─▶ the tensors, back to back
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection
from typing import Annotated

import msgspec

from jaxckpt._foreign.shards import FileBlock, distinct, opened, read_json, require_named
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.tree import Tree, nested
from jaxckpt._restore.source import Foreign, ForeignArray, compose
from jaxckpt._runtime.errors import DataError, InputError, TreeError, show

MAX_HEADER_BYTES = 100_000_000
"""What the format allows."""

MAX_BYTES = (1 << 63) - 1
"""Of a tensor, its sides of 0 counted as 1: what NumPy can give a shape to."""

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

# Of an element. What NumPy and JAX lack keeps its own name, under which it is refused.
_BITS = {name: 8 * DTYPES[ours].itemsize for name, ours in DTYPE_OF.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def read_header(path: str) -> dict[str, ForeignArray]:
    """The tensors of a .safetensors file, in order of their offsets. Only the header is read.

    Raises DataError where the file is cut, or its tensors overlap, leave a hole, or do not fit their shapes.
    """
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        _, header = _header(path, handle, size)
        start = 8 + int.from_bytes(os.pread(handle, 8, 0), "little")
    found: dict[str, ForeignArray] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _BITS:
            raise DataError(f"{path}: {show(name)} has dtype {entry.dtype[:40]!r}, which the format lacks")
        first, last = entry.data_offsets
        if first != end:
            kind = "overlap another tensor" if first < end else "leave a hole before them"
            raise DataError(
                f"{path}: bytes {first} to {last}, those of {show(name)}, {kind}: expected to start at {end}"
            )
        bits = _BITS[entry.dtype] * math.prod(entry.shape)
        if bits != 8 * (last - first):
            raise DataError(
                f"{path}: {show(name)} has {last - first} bytes, expected {-(-bits // 8)} of"
                f" {entry.dtype}{list(entry.shape)}"
            )
        if _BITS[entry.dtype] * math.prod(side or 1 for side in entry.shape) > 8 * MAX_BYTES:
            raise DataError(f"{path}: {show(name)} has shape {list(entry.shape)}, beyond what can be addressed")
        dtype = DTYPE_OF.get(entry.dtype, entry.dtype)
        found[name] = ForeignArray(dtype, entry.shape, FileBlock(path, start + first, dtype, entry.shape))
        end = last
    if start + end != size:
        raise DataError(f"{path} is {size} bytes long, expected {start + end} from its header")
    return found


def read_metadata(path: str) -> dict[str, str]:
    """What the header of a .safetensors file says besides. Raises DataError."""
    with opened(path) as handle:
        return _header(path, handle, os.fstat(handle).st_size)[0]


def _header(path: str, handle: int, size: int) -> tuple[dict[str, str], dict[str, _Entry]]:
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise DataError(
            f"{path} is no .safetensors file, or was cut: its header would be {length} bytes, the file is {size}"
        )
    text = os.pread(handle, length, 8)
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not start with '{'")
        record = json.loads(text.decode(), object_pairs_hook=distinct)
        metadata = msgspec.convert(record.pop("__metadata__", None), dict[str, str] | None)
        return metadata or {}, msgspec.convert(record, dict[str, _Entry])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:  # UnicodeDecodeError is a ValueError
        raise DataError(f"the header of {path} is damaged: {str(error)[:200]}") from error


# Files and folders as checkpoints --------------------------------------------------------------------------

INDEX = ".safetensors.index.json"


def recognises(path: str, names: Collection[str]) -> bool:
    """A .safetensors file; a folder with the index of several, or with one alone."""
    if not names:
        return path.endswith(".safetensors")
    return any(name.endswith(INDEX) for name in names) or len(_tensor_files(names)) == 1


def owned(path: str, names: Collection[str]) -> set[str]:
    """The names in its folder that are its own."""
    indices = [name for name in names if name.endswith(INDEX)]
    files = {file for name in indices for file in read_json(os.path.join(path, name), _Index).weight_map.values()}
    return {*indices, *files} if indices else set(_tensor_files(names))


def open_safetensors(path: str) -> Foreign:
    """Tensors by name: nested dicts where names have "/", as ours have, else one flat dict, as Hugging Face's are."""
    return compose(path, _as_tree(_tensors(path)), "safetensors")


def _tensors(path: str) -> dict[str, ForeignArray]:
    if not os.path.isdir(path):
        return read_header(path)
    names = os.listdir(path)
    indices = sorted(name for name in names if name.endswith(INDEX))
    if not indices:
        return read_header(os.path.join(path, _tensor_files(names)[0]))
    if len(indices) > 1:
        raise InputError(f"{path} has several indices ({', '.join(indices[:5])}): give a folder for each")
    index = os.path.join(path, indices[0])
    found: dict[str, ForeignArray] = {}
    files: dict[str, set[str]] = {}
    for name, file in read_json(index, _Index).weight_map.items():
        files.setdefault(file, set()).add(name)
    require_named(path, files, index)
    for file, expected in files.items():
        if os.path.basename(file) != file or file not in names:
            raise DataError(f"{index} names the file {file[:100]!r}, which is not in its folder")
        held = read_header(os.path.join(path, file))
        if odd := sorted(held.keys() ^ expected):
            where = "is there but not in the index" if odd[0] in held else "is in the index but not there"
            raise DataError(f"{os.path.join(path, file)}: the tensor {show(odd[0])} {where} ({indices[0]})")
        found |= held
    return found


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _tensor_files(names: Collection[str]) -> list[str]:
    # What a conversion that was killed has left is hidden.
    return [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def _as_tree(tensors: dict[str, ForeignArray]) -> Tree:
    if any("/" in name for name in tensors):
        try:
            return nested(tensors)
        except TreeError:  # one name is both a leaf and a container of others
            pass
    return tensors
