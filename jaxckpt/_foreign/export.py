"""Checkpoints as other formats: safetensors, npz, and a plain Zarr group. Arrays pass through memory slab by slab."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

import crc32c
import numpy as np

from jaxckpt._foreign.safetensors import DTYPE_OF, INDEX
from jaxckpt._format import zarr
from jaxckpt._format.chunking import chunk_shape, object_shape
from jaxckpt._format.pieces import Array, Pieces, as_bits
from jaxckpt._format.stacks import Stack
from jaxckpt._format.tree import decode_value, show
from jaxckpt._restore.reading import Stored
from jaxckpt._restore.source import Source
from jaxckpt._runtime.errors import TreeError, listing
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import Report
from jaxckpt._storage.files import FileWriter

_SAFETENSORS_DTYPES = {ours: theirs for theirs, ours in DTYPE_OF.items()}

SHARD_BYTES = 5_000_000_000
"""Bytes of tensors in one file of a folder of safetensors, at most, but for a larger tensor: as Hugging Face does."""


Data = Stored | Array


def write_safetensors(source: Source, path: str, options: Options, report: Report) -> None:
    """One file where `path` ends in .safetensors; else a folder of shards with an index, as Hugging Face reads them.

    The format: 8 bytes of the header's length, the header (JSON), the tensors (github.com/huggingface/safetensors).
    """
    arrays = _arrays(source, options, report)
    _require(source, {name: d.dtype.name in _SAFETENSORS_DTYPES for name, d in arrays.items()}, "safetensors has no")
    _require(source, {name: name != "__metadata__" for name in arrays}, "safetensors keeps that name for itself,")
    if path.endswith(".safetensors"):
        _write_tensors(path, arrays)
        return
    shards: list[dict[str, Data]] = [{}]
    held = 0
    for name, data in arrays.items():
        size = _n_bytes(data)
        if shards[-1] and held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = data
        held += size
    os.mkdir(path)
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    for file, shard in files.items():
        _write_tensors(os.path.join(path, file), shard)
    index = {
        "metadata": {"total_size": sum(map(_n_bytes, arrays.values()))},
        "weight_map": {name: file for file, shard in files.items() for name in shard},
    }
    with open(os.path.join(path, f"model{INDEX}"), "w") as file:
        json.dump(index, file, indent=2)


def _write_tensors(path: str, arrays: Mapping[str, Data]) -> None:
    # Largest items first, as the reference implementation does: all lie aligned without holes.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    offset = 0
    for name, data in ordered:
        end = offset + _n_bytes(data)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[data.dtype.name],
            "shape": list(data.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        _write(file, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
        for _, data in ordered:
            for slab in _slabs(data):
                _write(file, slab)


def write_npz(source: Source, path: str, options: Options, report: Report) -> None:
    """An uncompressed .npz, each leaf a member by its path: numpy.load opens it without pickle."""
    arrays = _arrays(source, options, report)
    _require(source, {name: d.dtype.isbuiltin == 1 for name, d in arrays.items()}, "NumPy's format has no")
    _require(source, {name: "\0" not in name for name in arrays}, "zip files allow no such name,")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                described = {"descr": data.dtype.str, "fortran_order": False, "shape": tuple(data.shape)}
                np.lib.format.write_array_header_1_0(member, described)
                for slab in _slabs(data):
                    member.write(slab.data)


def write_zarr(source: Source, path: str, options: Options, report: Report) -> None:
    """A Zarr v3 group: an array for each leaf at its path, with sharding and crc32c as our own arrays have them.

    bfloat16 and other dtypes that Zarr lacks are stored as unsigned integers of their width; the array's attributes
    name the dtype. The tree's other values are attributes of the group.
    """
    arrays = _arrays(source, options, report, keep_values=True)
    _require(source, {name: all(map(_is_node_name, name.split("/"))) for name in arrays}, "Zarr allows no such name,")
    groups = {"", *(name.rpartition("/")[0] for name in arrays)}
    groups |= {head for name in groups for head in _heads(name)}
    if both := groups & arrays.keys():
        raise TreeError(f"{show(min(both))} is both a leaf and a container of others; give rename=")
    values = {
        leaf.path: {"kind": leaf.kind, "value": leaf.value} for leaf in source.manifest.leaves if leaf.value is not None
    }
    for name in sorted(groups):
        folder = os.path.join(path, name)
        os.makedirs(folder, exist_ok=True)
        attributes = {"jaxckpt": {"values": values}} if not name and values else {}
        node = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        with open(os.path.join(folder, "zarr.json"), "w") as file:
            json.dump(node, file)
    for name, data in arrays.items():
        _write_zarr_array(os.path.join(path, name), data, options)


def _write_zarr_array(folder: str, data: Data, options: Options) -> None:
    """The first dimension stands for a stack's rows."""
    if not data.shape:
        _write_zarr_scalar(folder, data)
        return
    shape, itemsize = data.shape, data.dtype.itemsize
    chunk = chunk_shape(shape, itemsize, options.chunk_bytes, shape)
    sides = object_shape(shape, chunk, itemsize, options.object_bytes, shape)
    stack = Stack("", data.dtype.name, shape[1:], shape[0], chunk, sides)
    os.mkdir(folder)
    with open(os.path.join(folder, "zarr.json"), "wb") as file:
        file.write(zarr.metadata(stack))
    writer = FileWriter(folder, stack, sync=False)  # all is synced at the end
    for index, box in stack.objects() if 0 not in shape else ():
        part = tuple(slice(*side) for side in box)
        writer.write(index, Pieces(box, data.dtype, box[0][1] - box[0][0], [[(box, data[part])]])).result()


def _write_zarr_scalar(folder: str, data: Data) -> None:
    """A 0-d array: one chunk, not cut any further."""
    metadata = json.loads(zarr.metadata(Stack("", data.dtype.name, (), 1, (1,), (1,))))
    metadata["shape"] = metadata["chunk_grid"]["configuration"]["chunk_shape"] = []
    metadata["codecs"] = metadata["codecs"][0]["configuration"]["codecs"]
    content = next(_slabs(data)).tobytes()
    os.mkdir(folder)
    with open(os.path.join(folder, "zarr.json"), "w") as file:
        json.dump(metadata, file)
    with open(os.path.join(folder, "c"), "wb") as file:
        file.write(content + crc32c.crc32c(content).to_bytes(4, "little"))


def _is_node_name(name: str) -> bool:
    """Whether Zarr v3 allows a node of this name, and a file system has nothing against it."""
    return (
        name.strip(".") != ""
        and not name.startswith("__")
        and name != "zarr.json"
        and {"\0", "\\"}.isdisjoint(name)  # readers take a backslash for a slash
        and len(name.encode()) <= 255
    )


def _heads(path: str) -> Iterator[str]:
    """All containers above a path, itself included."""
    while path:
        yield path
        path = path.rpartition("/")[0]


# What is written ------------------------------------------------------------------------------------------


def _arrays(source: Source, options: Options, report: Report, *, keep_values: bool = False) -> dict[str, Data]:
    """The leaves as arrays by path, Python's numbers as 0-d ones unless they are kept elsewhere. Raises TreeError."""
    found: dict[str, Data] = {}
    problems: list[str] = []
    # Two slabs are in memory, one of them on its way.
    options = replace(options, host_bytes=max(1, options.host_bytes // 2))
    for number, leaf in enumerate(source.manifest.leaves):
        if leaf.stack is not None and leaf.kind not in ("str", "bytes"):
            found[leaf.path] = Stored(source, number, options, report)
        elif keep_values and leaf.value is not None:
            continue
        elif (
            leaf.kind in ("bool", "int", "float", "complex")
            and (array := np.asarray(decode_value(leaf.kind, leaf.value or ""))).dtype != object
        ):
            found[leaf.path] = array
        else:
            told = "an int beyond 64 bits" if leaf.kind == "int" else f"a {leaf.kind}"
            problems.append(f"{show(leaf.path)} is {told}")
    if problems:
        raise TreeError(
            f"{len(problems)} leaves cannot be arrays in this format; leave them out with select=:\n{listing(problems)}"
        )
    return found


def _require(source: Source, able: Mapping[str, bool], why: str) -> None:
    """Raise TreeError unless the format can hold every leaf."""
    arrays = {leaf.path: leaf for leaf in source.manifest.leaves}
    problems = [
        f"{show(name)} ({source.manifest.stacks[leaf.stack].dtype if leaf.stack is not None else leaf.kind})"
        for name, fine in able.items()
        if not fine
        for leaf in [arrays[name]]
    ]
    if problems:
        raise TreeError(f"{why} {len(problems)} of these leaves; leave them out with select=:\n{listing(problems)}")


def _n_bytes(data: Data) -> int:
    return int(np.prod(data.shape, dtype=np.int64)) * data.dtype.itemsize


def _slabs(data: Data) -> Iterator[Array]:
    """The bytes of an array in C order."""
    for slab in data.slabs() if isinstance(data, Stored) else [data]:
        yield as_bits(np.ascontiguousarray(slab)).reshape(-1).view(np.uint8)


def _write(file: BinaryIO, data: Array) -> None:
    rest = data.data
    while rest:
        rest = rest[file.write(rest) :]


def sync(path: str, *, deep: bool = True) -> None:
    """Make a file, or a folder with all it holds, durable."""
    if deep and os.path.isdir(path):
        for name in os.listdir(path):
            sync(os.path.join(path, name))
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
