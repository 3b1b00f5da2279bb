"""Writes checkpoints that Orbax reads: the folder of a tree, see `orbax_records`, with a Zarr v3 array for each leaf.

Each array is written chunk by chunk, with a crc32c. Orbax itself does not write checksums, but its readers check them.

It is long because it writes the folders of both versions of Orbax.
"""

from __future__ import annotations

import base64
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import crc32c
import numpy as np

from jaxckpt._formats.export import Data, halved, n_bytes, raw, write_json
from jaxckpt._formats.orbax.orbax_records import (
    ARRAYS_FOLDER,
    COMMITTED_MARK,
    METRICS,
    RUN_METADATA,
    SHARDINGS_FILE,
    STEP_FILE,
    STRINGS_FILE,
    TREE_FILE,
    path_of,
)
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._model.grid import Box, Spec, extent, pieces_along
from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._model.records import LeafRecord, MeshRecord
from jaxckpt._model.stacks import bounded_shape
from jaxckpt._model.tree import Container, Structure, keys_of, unwrap_object
from jaxckpt._model.values import decode_int, decode_value
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.source import Source
from jaxckpt.errors import TreeError, show_lines, show_path

_RESERVED = {TREE_FILE, STEP_FILE, SHARDINGS_FILE, STRINGS_FILE, ARRAYS_FOLDER, COMMITTED_MARK, MANIFEST}
_UNKNOWN_DTYPES = {"float8_e4m3", "uint2", "uint4"}
"""Dtypes that tensorstore's zarr3 driver, and therefore Orbax, does not support."""

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_METRICS_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_V1_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
_V1_METRICS_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.json_handler.MetricsHandler"


def write_orbax(source: Source, path: str, options: Options, report: Report) -> None:
    """Write a folder that Orbax's StandardCheckpointer, PyTreeCheckpointer and Orbax v1 can restore. As the "default"
    folder of a step, a CheckpointManager can restore it too.

    Orbax does not record all types of containers: without a target, tuples are restored as lists, and namedtuples and
    custom nodes as dicts. jax.Arrays without a mesh are restored onto device 0. Raises TreeError for leaves that Orbax
    cannot hold.
    """
    started = time.time_ns()
    _write_item(source, path, options, report)
    _commit(source, path, _HANDLER, started)


def write_step(source: Source, path: str, options: Options, report: Report) -> None:
    """Write a step that a CheckpointManager can restore, with its metrics. Raises as `write_orbax`."""
    _write_items(source, path, options, report, "default", _HANDLER, _METRICS_HANDLER)


def write_v1(source: Source, path: str, options: Options, report: Report) -> None:
    """Write a checkpoint that Orbax v1 can load, also as a step of its Checkpointer, with its metrics. Raises as
    `write_orbax`."""
    _write_items(source, path, options, report, "state", _V1_HANDLER, _V1_METRICS_HANDLER)


def _write_items(
    source: Source, path: str, options: Options, report: Report, item: str, handler: str, metrics_handler: str
) -> None:
    """Write a folder with an item for the tree, and one for the metrics if the source has them."""
    started = time.time_ns()
    os.mkdir(path)
    _write_item(source, f"{path}/{item}", options, report)
    handlers = {item: handler}
    if source.manifest.step is not None and source.manifest.step.metrics:
        metrics = source.manifest.step.metrics
        # As Orbax does, also with NaN and infinity.
        write_json(f"{path}/{METRICS}/{METRICS}", {name: math.nan if m is None else m for name, m in metrics.items()})
        handlers[METRICS] = metrics_handler
    _commit(source, path, handlers, started)


def _write_item(source: Source, path: str, options: Options, report: Report) -> None:
    """Write the folder of a tree. Raises TreeError."""
    entries = list(_entries(source.manifest.tree, (), ()))
    leaves = {entry: source.manifest.leaves[entry.leaf] for entry in entries if isinstance(entry.leaf, int)}
    _require_storable(source, entries, leaves)
    os.mkdir(path)
    writer = _Writer(source, path, halved(options), report)
    tree = {str(entry.keys): _write_entry(entry, writer) for entry in entries}
    writer.finish()
    item = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": source.manifest.metadata,
    }
    write_json(f"{path}/{TREE_FILE}", item)


def write_run_metadata(path: str, metadata: dict[str, Any]) -> None:
    """Write the metadata of a run, which a CheckpointManager and the Checkpointer of Orbax v1 read."""
    write_json(f"{path}/{RUN_METADATA[0]}", {"internal_metadata": {}, "custom_metadata": metadata})


def _commit(source: Source, path: str, handlers: str | Mapping[str, str], started: int) -> None:
    """Write the files that show that a folder is complete, with the handler that reads it, or those of its items."""
    metadata = source.manifest.metadata
    step = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": metadata if isinstance(metadata, dict) else {},  # Orbax accepts nothing else here
    }
    write_json(f"{path}/{STEP_FILE}", step)
    with open(f"{path}/{COMMITTED_MARK}", "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"Checkpoint commit was successful to {path}")


def _write_entry(entry: _Entry, writer: _Writer) -> dict[str, Any]:
    """Orbax's record of an entry of the tree. Writes the data of a leaf."""
    if isinstance(entry.leaf, str):
        value: dict[str, Any] = {"value_type": entry.leaf, "skip_deserialize": True}
    else:
        value = {"skip_deserialize": False, **writer.write(entry.name, entry.leaf)}
    keys = [{"key": key, "key_type": kind} for key, kind in zip(entry.keys, entry.kinds, strict=True)]
    return {"key_metadata": keys, "value_metadata": value}


# Names ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A position in the tree for which Orbax has an entry."""

    keys: tuple[str, ...]
    kinds: tuple[int, ...]
    """For each key, 1 for an index, 2 for a key or field."""

    leaf: int | str
    """The number of the leaf, or Orbax's name of the empty value."""

    @property
    def name(self) -> str:
        return ".".join(self.keys)


def _entries(node: Structure, keys: tuple[str, ...], kinds: tuple[int, ...]) -> Iterator[_Entry]:
    """The entries of a subtree: its leaves, None, and empty containers."""
    node = unwrap_object(node)
    if not isinstance(node, Container):
        yield _Entry(keys, kinds, "None" if node is None else node)
        return
    if not node.children:
        empty = {"dict": "Dict", "ordered_dict": "Dict", "list": "List", "tuple": "Tuple"}
        yield _Entry(keys, kinds, empty.get(node.type, "None"))
    own = keys_of(node)
    indexed = node.type in ("list", "tuple") or (node.type == "custom" and all(type(key) is int for key in own))
    for key, child in zip(own, node.children, strict=True):
        yield from _entries(child, (*keys, str(key)), (*kinds, 1 if indexed else 2))


def _require_storable(source: Source, entries: Iterable[_Entry], leaves: Mapping[_Entry, LeafRecord]) -> None:
    """Raise TreeError unless Orbax can store every leaf under a unique name."""
    if not leaves:
        raise TreeError("Orbax cannot save a tree without leaves")
    problems: list[str] = []
    paths: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        paths[entry.name].append(show_path(path_of(entry.keys)))
    for name, sharing in paths.items():
        if len(sharing) > 1:
            problems.append(f"{', '.join(sharing)} would all be named {name!r}: Orbax joins keys with '.'")
    arrays = {entry.name for entry, leaf in leaves.items() if leaf.kind != "str"}
    for entry, leaf in leaves.items():
        shown, name = show_path(leaf.path), entry.name
        folders = name.split("/")
        above = next((head for head in ("/".join(folders[:n]) for n in range(1, len(folders))) if head in arrays), None)
        if above is not None:
            problems.append(f"{shown} would be in the folder of {above!r}")
        if entry.keys and (
            not {"", ".", ".."}.isdisjoint(folders) or not {"\0", "\\"}.isdisjoint(name) or folders[0] in _RESERVED
        ):
            problems.append(f"{shown} has a name that Orbax or jaxckpt reserves, or that cannot name a folder")
        elif any(len(folder.encode()) > 255 for folder in folders):
            problems.append(f"{shown} has a name of more than 255 bytes")
        if leaf.kind == "bytes" or (leaf.kind == "str" and "~" in name):
            problems.append(f"{shown} is a {leaf.kind}" + (" with a '~' in its name" if leaf.kind == "str" else ""))
        elif leaf.kind == "int" and not -(1 << 63) <= decode_int(leaf.value or "") < 1 << 63:
            problems.append(f"{shown} is an int beyond 64 bits")
        elif leaf.stack is not None and source.manifest.stacks[leaf.stack].dtype in _UNKNOWN_DTYPES:
            problems.append(f"{shown} has dtype {source.manifest.stacks[leaf.stack].dtype}")
    if problems:
        raise TreeError(
            f"{source.url}: Orbax cannot store {len(problems)} of these leaves; leave them out with select=, or rename"
            " them with rename=:\n"
            f"{show_lines(problems)}"
        )


# Leaves ---------------------------------------------------------------------------------------------------


class _Writer:
    """Writes leaves one by one, and at the end Orbax's common records of all leaves."""

    def __init__(self, source: Source, path: str, options: Options, report: Report) -> None:
        self._source = source
        self._path = path
        self._options = options
        self._report = report
        self._strings: dict[str, Any] = {}
        self._shardings: dict[str, str] = {}
        self._arrays: list[dict[str, Any]] = []

    def write(self, name: str, number: int) -> dict[str, Any]:
        """Write a leaf; returns Orbax's record of its value."""
        leaf = self._source.manifest.leaves[number]
        data = StoredArray(self._source, number, self._options, self._report)
        if leaf.kind == "str":
            self._add_string(name, _text(data) if leaf.value is None else leaf.value)
            return {"value_type": "string"}
        if leaf.stack is None:
            value = np.asarray(decode_value(leaf.kind, leaf.value or ""))
            self._write(name, value, value.shape)
            # A complex number would lose its imaginary part.
            return {"value_type": "np.ndarray" if leaf.kind == "complex" else "scalar"}
        mesh, spec, _ = self._source.manifest.leaf_layout(leaf)
        chunk = _chunk(data, mesh, spec, self._options)
        self._write(name, data, chunk)
        if leaf.kind not in ("jax", "key"):
            return {"value_type": "np.ndarray"}
        self._shardings[base64.urlsafe_b64encode(name.encode()).decode()] = _sharding(mesh, spec)
        record = {
            "param_name": name,
            "write_shape": list(chunk),
            "chunk_shape": list(chunk),
            "ext_metadata": {"random_key_impl": leaf.impl} if leaf.kind == "key" else None,
        }
        self._arrays.append({"array_metadata": record})
        return {"value_type": "jax.Array", "write_shape": list(chunk)}

    def finish(self) -> None:
        if self._strings:
            write_json(f"{self._path}/{STRINGS_FILE}", self._strings)
        if self._arrays:
            write_json(f"{self._path}/{SHARDINGS_FILE}", self._shardings)
            write_json(f"{self._path}/{ARRAYS_FOLDER}/process_0", {"array_metadatas": self._arrays})

    def _add_string(self, name: str, value: str) -> None:
        *above, last = name.split("/")  # Orbax reads the name as a JSON pointer
        node = self._strings
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value

    def _write(self, name: str, data: Data, chunk: tuple[int, ...]) -> None:
        folder = os.path.join(self._path, name) if name else self._path
        write_json(f"{folder}/zarr.json", _zarr_metadata(data.dtype, data.shape, chunk))
        for index in np.ndindex(*(-(-n // c) for n, c in zip(data.shape, chunk, strict=True))):
            file = "/".join([folder, "c", *map(str, index)])
            os.makedirs(os.path.dirname(file), exist_ok=True)
            box = tuple((i * c, min(n, (i + 1) * c)) for i, c, n in zip(index, chunk, data.shape, strict=True))
            content = raw(_padded(data, box, chunk)).data
            with open(file, "wb") as out:
                out.write(content)
                out.write(crc32c.crc32c(content).to_bytes(4, "little"))


def _text(data: StoredArray) -> str:
    return b"".join(slab.tobytes() for slab in data.slabs()).decode("utf-8", "surrogatepass")


def _chunk(data: StoredArray, mesh: MeshRecord | None, spec: Spec, options: Options) -> tuple[int, ...]:
    """The sides of a chunk: the whole array if it is not too large, otherwise a shard of a device or a part of one."""
    cell = list(data.shape)
    if mesh is not None and n_bytes(data) > options.object_bytes:
        cell = [n // count for n, count in zip(cell, pieces_along(mesh.axes, spec, len(cell)), strict=True)]
    return bounded_shape(cell, data.dtype.itemsize, min(options.object_bytes, options.host_bytes), data.shape)


def _padded(data: Data, box: Box, chunk: tuple[int, ...]) -> Array:
    array = np.ascontiguousarray(data[tuple(slice(*side) for side in box)]).reshape(extent(box))
    if array.shape == chunk:
        return array
    whole = np.zeros(chunk, array.dtype)
    as_bits(whole)[tuple(slice(0, side) for side in array.shape)] = as_bits(array)
    return whole


def _zarr_metadata(dtype: np.dtype[Any], shape: tuple[int, ...], chunk: tuple[int, ...]) -> dict[str, Any]:
    zero: dict[str, Any] = {"b": False, "c": [0.0, 0.0], "i": 0, "u": 0}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": 0 if dtype.name in ("int2", "int4") else zero.get(dtype.kind, 0.0),
    }


def _sharding(mesh: MeshRecord | None, spec: Spec) -> str:
    """Orbax's record of a NamedSharding. An array without a mesh is placed on the first device."""
    if mesh is None:
        mesh, spec = MeshRecord({"device": 1}, [0], ["Auto"]), ()
    ids = np.array(mesh.devices).reshape(tuple(mesh.axes.values())).tolist()
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.axes.values()),
            "axis_names": list(mesh.axes),
            "axis_types": [f"AxisType.{name}" for name in mesh.types],
            "partition_spec": [None if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in spec],
            "device_mesh": {"mesh": _devices(ids)},
        }
    )


def _devices(ids: Any) -> Any:
    return [_devices(inner) for inner in ids] if isinstance(ids, list) else {"id": ids}
