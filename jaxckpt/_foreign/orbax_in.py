"""Checkpoints of Orbax on a local disk, as its writers leave them; Orbax itself is not imported.

    <manager>/<step>/                          one folder a step: "1000", "00001000", "ckpt_1000"
        _CHECKPOINT_METADATA                   which handler wrote each item; when the step was begun and committed
        <item>/                                "default": a manager's only item; "state": that of Orbax v1
            _METADATA                          the tree: the keys of each leaf, and what kind of value it was
            manifest.ocdbt, d/, ocdbt.*/       all arrays, in one OCDBT database; else a Zarr array in each <leaf>/
            _strings.json                      leaves that are str
            _sharding, array_metadatas/        of jax.Arrays: their shardings; implementations of PRNG keys
        <item>/metadata                        an item that is JSON
        <item>/manifest.json                   an item that jaxckpt.orbax has written

The array of a leaf is named by its keys, joined with ".". A folder with a _METADATA may also stand alone.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
import numpy as np

from jaxckpt._foreign.shards import distinct, opened
from jaxckpt._format.dtypes import DTYPES
from jaxckpt._format.grid import Box, Spec, spec_problem
from jaxckpt._format.names import MANIFEST, is_data
from jaxckpt._format.paths import component
from jaxckpt._format.pieces import Array
from jaxckpt._format.records import LeafRecord, Manifest, MeshRecord
from jaxckpt._format.tree import MAX_DEPTH, Container, Tree, keys_of, unflatten
from jaxckpt._format.values import decode_value
from jaxckpt._restore.source import Foreign, ForeignArray, Native, StartedBlock, compose
from jaxckpt._runtime.errors import DataError, NotACheckpointError, listing, show
from jaxckpt._runtime.options import Options
from jaxckpt._storage.manifests import load_manifest
from jaxckpt._storage.place import store_at
from jaxckpt._storage.store import MANIFEST_LIMIT_BYTES, ArrayFolder, ArrayReader, Pending, storage_errors

TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a folder whose save is under way, or died."""

TREE_FILE = "_METADATA"
STEP_FILE = "_CHECKPOINT_METADATA"
_V1_MARK = "orbax.checkpoint"
"""An empty file that Orbax v1 leaves in a step."""

_STEP_MARKS = {STEP_FILE, _V1_MARK}
_STEP_NAME = re.compile(r"(?:.+_)?(\d{1,18})")

_LOOKED_AT = 1000
"""Folders that are looked into, at most, to recognise one that has no mark of its own."""


def recognises(path: str, names: Collection[str]) -> bool:
    return _kind(path, names) is not None


def owned(path: str, names: Collection[str]) -> set[str]:
    """The names in its folder that are its own. None in the folder of a CheckpointManager."""
    kind = _kind(path, names)
    if kind == "item":
        return _owned_by_item(path, names)
    if kind == "manager":
        return set()
    items = {name: _names(f"{path}/{name}") for name in names if os.path.isdir(f"{path}/{name}")}
    whole = {name for name, held in items.items() if held and _owned_by_item(f"{path}/{name}", held).issuperset(held)}
    return whole | {STEP_FILE, _V1_MARK, "_CHECKPOINT_DELETION", "commit_success.txt"}


def _owned_by_item(path: str, names: Collection[str]) -> set[str]:
    record = _decoded(f"{path}/{TREE_FILE}", _TreeRecord)
    if record is None:
        return {*_OF_A_SAVE, MANIFEST, "metadata", *filter(is_data, names)}
    arrays = {".".join(key.key for key in one.key_metadata).split("/")[0] for one in record.tree_metadata.values()}
    databases = filter(re.compile(r"d|ocdbt\.process_\d+").fullmatch, names)
    zarr = {".zarray", "zarr.json", "c", "0"} if "" in arrays else set[str]()  # of a tree that is one leaf
    return {TREE_FILE, *_OF_A_SAVE, *_OF_A_TREE, *databases, *arrays, *zarr}


def has_steps(path: str, names: Collection[str]) -> bool:
    """Whether it is a CheckpointManager's folder."""
    return _kind(path, names) == "manager"


def open_orbax(path: str) -> Native | Foreign:
    """The newest complete step of a CheckpointManager's folder, a step, or one item of it.

    An item that stands for the whole step ("default", or "state" of Orbax v1) is the tree itself, others are below
    their names. "step", "metrics" and "custom_metadata" are in the checkpoint's metadata, as far as there are any.

    Raises NotACheckpointError where no step is complete, DataError, StorageError.
    """
    kind = _kind(path, _names(path))
    found: dict[str, Any] = {}
    if kind == "manager":
        path, found["step"] = _newest_step(path)
        kind = _kind(path, _names(path))
    elif problem := _unfinished(path):
        raise NotACheckpointError(f"{path} {problem}")
    if kind == "step" and _items(path) == ["default"] and _is_ours(f"{path}/default"):
        ours = _native(f"{path}/default")
        found |= {} if ours.manifest.metadata is None else {"custom_metadata": ours.manifest.metadata}
        return replace(ours, manifest=msgspec.structs.replace(ours.manifest, metadata=found or None))
    tree, metadata = _read_item(path) if kind == "item" else _open_step(path)
    return compose(path, tree, "orbax", metadata=found | metadata or None)


# Folders --------------------------------------------------------------------------------------------------


def _kind(path: str, names: Collection[str]) -> Literal["manager", "step", "item"] | None:
    if TREE_FILE in names or _lost_manifest(path, names):
        return "item"
    if not _STEP_MARKS.isdisjoint(names):
        return "step"
    if any(_is_step(f"{path}/{name}") for name in itertools.islice(filter(_STEP_NAME.fullmatch, names), _LOOKED_AT)):
        return "manager"
    # A model in safetensors may have one of Orbax's beside it, in a folder of its own.
    if any(name.endswith(".safetensors") for name in names):
        return None
    return "step" if _has_items(path, names) else None  # of an Orbax that left no other mark


def _is_step(path: str) -> bool:
    names = _names(path)
    if TREE_FILE in names or not _STEP_MARKS.isdisjoint(names) or _has_items(path, names):
        return True
    # A run of ours has folders with a manifest as well: they are named like steps.
    items = (name for name in names if not _STEP_NAME.fullmatch(name))
    return any(_is_ours(f"{path}/{name}") for name in itertools.islice(items, _LOOKED_AT))


def _has_items(path: str, names: Collection[str]) -> bool:
    return any(os.path.isfile(f"{path}/{name}/{TREE_FILE}") for name in itertools.islice(names, _LOOKED_AT))


def _newest_step(path: str) -> tuple[str, int]:
    steps = [(int(match[1]), name) for name in _names(path) if (match := _STEP_NAME.fullmatch(name))]
    for number, name in sorted(steps, reverse=True):
        if _is_step(f"{path}/{name}") and not _unfinished(f"{path}/{name}"):
            return f"{path}/{name}", number
    raise NotACheckpointError(f"{path} has no complete step, but {len(steps)} folders that are named like one")


def _unfinished(path: str) -> str | None:
    """Why a step is not complete: Orbax renames its folder at the end, or, on object stores, marks it."""
    if TEMPORARY in os.path.basename(path):
        return "is the folder of a save that is under way, or died"
    record = _decoded(f"{path}/{STEP_FILE}", _StepRecord) or _StepRecord()
    begun = record.init_timestamp_nsecs is not None and record.commit_timestamp_nsecs is None
    if begun and not os.path.exists(f"{path}/commit_success.txt"):
        return "was never committed: its save is under way, or died"
    return None


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # a file, or gone: what is needed of it is missed later
        return []


_T = TypeVar("_T")


def _decoded(path: str, form: type[_T]) -> _T | None:
    """A JSON file; None where there is none. Raises DataError where it is not of that form, StorageError."""
    if not os.path.lexists(path):
        return None
    with opened(path) as handle:
        size = os.fstat(handle).st_size
        if size > MANIFEST_LIMIT_BYTES:
            raise DataError(f"{path} is {size} bytes long; at most {MANIFEST_LIMIT_BYTES} are read")
        text = os.read(handle, 0) + b"".join(iter(lambda: os.read(handle, 1 << 24), b""))
    return _converted(path, text, form)


def _converted(what: str, text: str | bytes, form: type[_T]) -> _T:
    try:
        # Not msgspec's own decoder: Orbax writes NaN, which JSON lacks.
        return msgspec.convert(json.loads(text, object_pairs_hook=distinct), form)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise DataError(f"{what} is damaged: {str(error)[:200]}") from error


# Steps ----------------------------------------------------------------------------------------------------


class _StepRecord(msgspec.Struct, frozen=True):
    item_handlers: dict[str, str | None] | str | None = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None

    def handler(self, item: str) -> str:
        """The class that wrote an item, without its module."""
        return self._name(item).rpartition(".")[2]

    def is_known(self, item: str) -> bool:
        """Whether an item was written as a tree or as JSON: if it cannot be read, it is damaged."""
        return self.handler(item) in _HANDLERS or self._name(item) == _OUR_HANDLER

    def _name(self, item: str) -> str:
        name = self.item_handlers.get(item) if isinstance(self.item_handlers, dict) else self.item_handlers
        return name or ""


def _open_step(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of a step, and its metadata."""
    record = _decoded(f"{path}/{STEP_FILE}", _StepRecord) or _StepRecord()
    if isinstance(record.item_handlers, str):  # the folder is the only item
        return _required_item(path, record.item_handlers)
    # Orbax v1 notes here which item is being deleted.
    deleted = (_decoded(f"{path}/_CHECKPOINT_DELETION", dict[str, Any]) or {}).get("checkpointable_name")
    found = {name for name in _names(path) if os.path.isdir(f"{path}/{name}") and TEMPORARY not in name} - {deleted}
    if missing := (record.item_handlers or {}).keys() - found - {deleted}:
        raise DataError(f"{path} lacks {', '.join(map(repr, sorted(missing)))}, which {STEP_FILE} names as its items")
    if record.item_handlers is None and _lost_step_file(path, found):
        raise DataError(
            f"{path}/{STEP_FILE} is missing: it names the items of the step, so it is not known whether all of them"
            " are still in the folder; each can be opened by its own path"
        )
    metadata: dict[str, Any] = {}
    items: dict[str, Tree] = {}
    left_out: list[str] = []
    for name in sorted(found):
        folder = f"{path}/{name}"
        try:
            items[name], of_item = _required_item(folder, name) if record.is_known(name) else _read_item(folder)
        except _Unread as error:
            left_out.append(f"{folder} is left out: {error}")
            continue
        if record.handler(name) == "ArrayCheckpointHandler" and isinstance(items[name], dict):
            items[name] = items[name].get("checkpoint", items[name])
        if of_item:
            metadata.setdefault("custom_metadata", {})[name] = of_item["custom_metadata"]
    if "metrics" in items and not isinstance(items["metrics"], ForeignArray):
        metadata["metrics"] = items.pop("metrics")
    if record.custom_metadata:
        metadata["custom_metadata"] = record.custom_metadata
    if not items:
        raise DataError(f"{path} has no item that can be read\n{listing(left_out)}".rstrip())
    for told in left_out:
        warnings.warn(told, stacklevel=2)
    whole = {"default"} if record.handler("state") != "PyTreeHandler" else {"state"}
    return items[min(items)] if set(items) == whole else items, metadata


_HANDLERS = {
    "ArrayCheckpointHandler",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "JsonHandler",
    "MetricsHandler",
    "NumpyRandomKeyCheckpointHandler",
    "PyTreeCheckpointHandler",
    "PyTreeHandler",
    "StandardCheckpointHandler",
}
"""Classes of Orbax whose items are trees or JSON."""

_OUR_HANDLER = "jaxckpt.orbax.Handler"


def _lost_step_file(path: str, items: Iterable[str]) -> bool:
    """Whether a step has no STEP_FILE although the Orbax that wrote it writes one.

    It writes one into each folder that is saved: the step or, if items were saved by themselves, each item.
    """
    if os.path.lexists(f"{path}/{STEP_FILE}"):
        return False
    if os.path.lexists(f"{path}/{_V1_MARK}"):
        return True
    alone = [f"{path}/{item}" for item in items if not os.path.lexists(f"{path}/{item}/{STEP_FILE}")]
    if any(map(_is_ours, alone)):
        return True
    trees = (_decoded(f"{item}/{TREE_FILE}", _TreeRecord) for item in alone)
    return any(tree is not None and tree.custom_metadata is not msgspec.UNSET for tree in trees)


def _items(path: str) -> list[str]:
    """Names of a step's items."""
    return sorted(name for name in _names(path) if TEMPORARY not in name and os.path.isdir(f"{path}/{name}"))


class _Unread(Exception):
    """An item that is none of those that are known."""


def _read_item(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata. Raises _Unread."""
    names = [name for name in _names(path) if name not in _OF_A_SAVE and TEMPORARY not in name]
    if TREE_FILE in names:
        return _open_item(path)
    if not _OF_A_TREE.isdisjoint(names):
        raise DataError(f"{path}/{TREE_FILE} is missing: it records the tree of the arrays in this folder")
    if _is_ours(path):
        return _open_ours(path)
    if any(map(is_data, names)):
        raise DataError(f"{path}/{MANIFEST} is missing: it describes the arrays in this folder")
    if len(names) == 1 and os.path.isfile(f"{path}/{names[0]}"):
        try:
            return _decoded(f"{path}/{names[0]}", cast("type[Any]", Any)), {}
        except DataError:
            raise _Unread(f"its only file, {names[0]}, is no JSON") from None
    if set(names) in ({"jax_random_key", "jax_random_key_metadata"}, {"np_random_key", "np_random_key_metadata"}):
        return _random_key(path), {}
    raise _Unread("it is neither a tree nor JSON")


_OF_A_SAVE = {"commit_success.txt", STEP_FILE}
_OF_A_TREE = {"manifest.ocdbt", "_sharding", "_strings.json", "array_metadatas"}


def _required_item(path: str, name: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item that Orbax's own handler wrote, and its metadata."""
    try:
        return _read_item(path)
    except _Unread as error:
        raise DataError(f"{path}, {name}, is damaged or has lost files: {error}") from None


def _random_key(path: str) -> Tree:
    """What Orbax's handlers of random keys have written."""
    (kind,) = (name for name in _names(path) if name in ("jax_random_key", "np_random_key"))
    tree, _ = _open_item(f"{path}/{kind}")
    match tree, _decoded(f"{path}/{kind}_metadata/metadata", dict[str, bool]) or {}:
        case {"checkpoint": ForeignArray() as raw}, {"typed": typed}:
            # Their implementation is not recorded: Orbax takes JAX's default, which the width of a key tells apart.
            impl = "rbg" if raw.shape[-1:] == (4,) else "threefry2x32"
            return replace(raw, kind="key", impl=impl) if typed else raw
        case list() as state, {"legacy": True}:
            return tuple(state)
        case dict() as state, {"legacy": False}:
            return state
        case _:
            raise DataError(f"{path} is no random key")


# Items of ours --------------------------------------------------------------------------------------------


def _is_ours(path: str) -> bool:
    return os.path.isfile(f"{path}/{MANIFEST}")


def _lost_manifest(path: str, names: Collection[str]) -> bool:
    """Whether it is an item of ours, in a step that Orbax has committed, without its manifest."""
    if MANIFEST in names or not any(map(is_data, names)):
        return False
    step = os.path.dirname(path)
    return STEP_FILE in _names(step) and not _unfinished(path) and not _unfinished(step)


def _native(path: str) -> Native:
    store = store_at(path, Options())
    return Native(store, load_manifest(store)[0])


def _open_ours(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item that jaxckpt has written, as part of a step, and its metadata."""
    source = _native(path)
    manifest = source.manifest
    readers = [source.array_reader(number) for number in range(len(manifest.stacks))]
    tree = unflatten(manifest.tree, [_part(manifest, readers, record) for record in manifest.leaves])
    return tree, {} if manifest.metadata is None else {"custom_metadata": manifest.metadata}


def _part(manifest: Manifest, readers: Sequence[ArrayReader], record: LeafRecord) -> Any:
    if record.stack is None or record.row is None:
        return decode_value(record.kind, record.value or "")
    stack = manifest.arrays[record.stack]
    mesh, spec, _ = manifest.leaf_layout(record)
    dtype = manifest.stacks[record.stack].dtype
    block = _Row(readers[record.stack], record.row)
    kind: Any = record.kind
    return ForeignArray(dtype, stack.shape, block, kind, record.impl, stack.chunk[1:], mesh, spec)


@dataclass(frozen=True, slots=True)
class _Row(StartedBlock):
    """A row of a stack of ours."""

    reader: ArrayReader
    row: int

    def start(self, box: Box, target: Array) -> Pending:
        (pending,) = self.reader.read([(((self.row, self.row + 1), *box), target[None])])
        return pending

    def read(self, box: Box, target: Array) -> None:
        self.start(box, target).result()


# Trees ----------------------------------------------------------------------------------------------------

_Sides = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: Literal[1, 2]
    """1: an index of a list, tuple or custom node; 2: a key of a dict, a field of a namedtuple or custom node."""


class _Value(msgspec.Struct, frozen=True):
    value_type: str
    skip_deserialize: bool = False

    write_shape: list[int] | None = None
    """Only in a tree whose arrays are noted in array_metadatas, too."""


class _Entry(msgspec.Struct, frozen=True):
    key_metadata: list[_Key]
    value_metadata: _Value


class _TreeRecord(msgspec.Struct, frozen=True):
    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None

    store_array_data_equal_to_fill_value: bool = False
    """Whether every chunk is stored: Orbax once left out those that are all zeros."""

    custom_metadata: Any = msgspec.UNSET
    """There, if only as None, since Orbax 0.11.1, which was the first whose every save writes a STEP_FILE."""

    value_metadata_tree: str | None = None
    """The tree with its tuples and namedtuples, in a notation of Orbax's own."""

    @property
    def has_array_metadata(self) -> bool:
        return any(one.value_metadata.write_shape is not None for one in self.tree_metadata.values())


_Keys = tuple[str, ...]

_EMPTY: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": tuple,
}


_STORED = {"jax.Array", "np.ndarray", "scalar", "string"}
"""Values of `value_type` of leaves that have data."""


def _open_item(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata."""
    record = _decoded(f"{path}/{TREE_FILE}", _TreeRecord)
    if record is None:
        raise DataError(f"{path}/{TREE_FILE} is missing")
    entries = {tuple(key.key for key in one.key_metadata): one for one in record.tree_metadata.values()}
    if len(entries) < len(record.tree_metadata):
        raise DataError(f"{path}/{TREE_FILE} is damaged: two of its leaves have the same keys")
    if any(len(keys) > MAX_DEPTH for keys in entries):
        raise DataError(f"{path}: the tree is nested deeper than {MAX_DEPTH} containers")
    values = _values(path, record, {keys: one.value_metadata for keys, one in entries.items()})
    kinds = {keys: tuple(key.key_type for key in one.key_metadata) for keys, one in entries.items()}
    tree = _rich_tree(path, record.value_metadata_tree, values) if record.value_metadata_tree else None
    if tree is None:
        tree = _tree(path, [(keys, kinds[keys], value) for keys, value in values.items()])
    has_metadata = record.custom_metadata is not None and record.custom_metadata is not msgspec.UNSET
    return tree, {"custom_metadata": record.custom_metadata} if has_metadata else {}


def _path(keys: _Keys) -> str:
    return "/".join(map(component, keys))


def _tree(path: str, entries: Sequence[tuple[_Keys, tuple[int, ...], Any]], depth: int = 0) -> Tree:
    """A container, from the keys of what lies below it; or a leaf."""
    if len(entries) == 1 and len(entries[0][0]) == depth:
        return entries[0][2]
    below: dict[str, list[tuple[_Keys, tuple[int, ...], Any]]] = {}
    for entry in entries:
        if len(entry[0]) > depth:  # else a place that was empty once, and was filled by a later part of the save
            below.setdefault(entry[0][depth], []).append(entry)
    where = f"{path}: the container at {show(_path(entries[0][0][:depth]) if entries else '')}"
    if {kinds[depth] for found in below.values() for _, kinds, _ in found} not in ({1}, {2}):
        raise DataError(f"{where} has neither keys alone nor indices alone")
    if entries and next(iter(below.values()))[0][1][depth] == 2:
        return {key: _tree(path, found, depth + 1) for key, found in below.items()}
    if not all(str(number) in below for number in range(len(below))):
        raise DataError(f"{where} has the indices {', '.join(list(below)[:20])}; expected 0 to {len(below) - 1}")
    return [_tree(path, below[str(number)], depth + 1) for number in range(len(below))]


def _rich_tree(path: str, text: str, values: Mapping[_Keys, Any]) -> Tree | None:
    """The tree with its tuples and namedtuples; None where it has other leaves, as Orbax's own bug left it."""
    used: list[_Keys] = []

    def grown(node: Any, keys: _Keys) -> Tree:
        if len(keys) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
        match node:
            case {"category": "custom", "clazz": "ValueMetadataEntry"}:
                used.append(keys)
                return values[keys]
            case {"category": "custom", "clazz": "tuple", "entries": list(children)}:
                return tuple(grown(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", children)))
            case {"category": "namedtuple", "clazz": str(name), "entries": list(children)}:
                found = {str(one["key"]): grown(one["value"], (*keys, str(one["key"]))) for one in children}
                name, numbers = name.rpartition(".")[2], tuple(range(len(found)))
                node = Container(type="namedtuple", name=name, keys=tuple(found), children=numbers)
                keys_of(node)  # raises where they are no names
                return unflatten(node, list(found.values()))
            case dict():
                return {key: grown(child, (*keys, key)) for key, child in cast("dict[str, Any]", node).items()}
            case list():
                return [grown(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", node))]
            case _:
                raise ValueError(f"{str(node)[:80]!r} is no part of a tree")

    try:
        tree = grown(json.loads(text), ())
    except KeyError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}/{TREE_FILE} has a damaged value_metadata_tree: {str(error)[:200]}") from error
    return tree if len(used) == len(values) else None


# Leaves ---------------------------------------------------------------------------------------------------


def _values(path: str, record: _TreeRecord, leaves: Mapping[_Keys, _Value]) -> dict[_Keys, Any]:
    """What each leaf is: a value, or an array that is yet to be read."""
    unknown = [
        f"{show(_path(keys))} ({one.value_type[:80]!r})"
        for keys, one in leaves.items()
        if one.skip_deserialize and one.value_type not in _EMPTY
    ]
    if unknown:
        raise DataError(f"{path} has no data for {len(unknown)} of its leaves:\n{listing(unknown)}")
    strings = _decoded(f"{path}/_strings.json", cast("type[Any]", Any))
    odd = {one.value_type for one in leaves.values()} - _EMPTY.keys() - _STORED
    if odd:
        raise DataError(f"{path}/{TREE_FILE} has the value_type {min(odd)[:80]!r}, which is none of Orbax's")
    values: dict[_Keys, Any] = {}
    arrays: dict[_Keys, str] = {}
    for keys, one in leaves.items():
        if one.value_type in _EMPTY:
            values[keys] = _EMPTY[one.value_type]()
        elif one.value_type == "string":
            values[keys] = _string(path, strings, keys)
        else:
            values[keys] = None  # holds its place
            arrays[keys] = one.value_type
    ocdbt = os.path.exists(f"{path}/manifest.ocdbt") if record.use_ocdbt is None else record.use_ocdbt
    return values | _arrays(path, ArrayFolder(path, ocdbt), record, arrays)


def _string(path: str, strings: Any, keys: _Keys) -> str:
    """A str, by the JSON pointer that Orbax makes of its name."""
    found = strings
    for part in ".".join(keys).split("/"):
        inner = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        found = inner.get(part.replace("~1", "/").replace("~0", "~"))
    if not isinstance(found, str):
        raise DataError(f"{path}/_strings.json lacks the leaf {show(_path(keys))}")
    return found


@dataclass(frozen=True, slots=True)
class _ZarrArray(StartedBlock):
    """An array of an item."""

    folder: ArrayFolder
    name: str
    driver: Literal["zarr", "zarr3"]
    metadata: Any
    strict: bool

    def start(self, box: Box, target: Array) -> Pending:
        reader = self.folder.array_reader(self.name, self.driver, self.metadata, strict=self.strict)
        return reader.read([(box, target)])[0]

    def read(self, box: Box, target: Array) -> None:
        with storage_errors(f"cannot read the array {self.name!r} of {self.folder.path}", reading=True):
            self.start(box, target).result()


def _arrays(path: str, folder: ArrayFolder, record: _TreeRecord, kinds: Mapping[_Keys, str]) -> dict[_Keys, Any]:
    names = {keys: ".".join(keys) for keys in kinds}
    outside = [name for name in names.values() if name and not {"", ".", ".."}.isdisjoint(name.split("/"))]
    if outside and not folder.ocdbt:
        raise DataError(f"{path} has arrays whose names are no folders below it:\n{listing(map(repr, outside))}")
    driver: Literal["zarr", "zarr3"] = "zarr3" if record.use_zarr3 else "zarr"
    last = "zarr.json" if record.use_zarr3 else ".zarray"
    texts = folder.read_all([f"{name}/{last}" if name else last for name in names.values()])
    shardings = _decoded(f"{path}/_sharding", dict[str, str]) or {} if "jax.Array" in kinds.values() else {}
    impls = _key_impls(path) if shardings or "jax.Array" in kinds.values() else {}
    lost_impls = not impls and "jax.Array" in kinds.values() and _lost_array_metadata(path, record)
    layouts = _Layouts(path)
    found: dict[_Keys, Any] = {}
    for (keys, name), text in zip(names.items(), texts, strict=True):
        if text is None:
            raise DataError(f"{path} lacks the array {name!r} of the leaf {show(_path(keys))}")
        what = f"{path}: the Zarr metadata of {show(_path(keys))}"
        metadata = _converted(what, text, dict[str, Any])
        block = _ZarrArray(folder, name, driver, metadata, record.store_array_data_equal_to_fill_value)
        dtype, shape, chunk = (_of_zarr3 if record.use_zarr3 else _of_zarr2)(what, metadata)
        array = ForeignArray(dtype, shape, block, "numpy", chunk=chunk)
        if kinds[keys] == "jax.Array":
            mesh, spec = layouts.of(keys, shape, shardings.get(base64.urlsafe_b64encode(name.encode()).decode()))
            impl = impls.get(name)
            if lost_impls and dtype == "uint32" and shape:
                raise DataError(
                    f"{path}/array_metadatas is missing: it records whether {show(_path(keys))} holds PRNG keys"
                )
            array = replace(array, kind="jax" if impl is None else "key", impl=impl, mesh=mesh, spec=spec)
        elif kinds[keys] == "scalar":
            if shape:
                raise DataError(f"{path}: {show(_path(keys))} is a scalar, but has shape {list(shape)}")
            array = replace(array, kind="numpy_scalar")
        found[keys] = array
    return found | _scalars(found)


def _scalars(arrays: Mapping[_Keys, ForeignArray]) -> dict[_Keys, Any]:
    """Those that Python has a type for, read together."""
    wanted = {
        keys: np.empty((), DTYPES[array.dtype])
        for keys, array in arrays.items()
        if array.kind == "numpy_scalar" and array.dtype in ("bool", "int64", "float64", "complex128")
    }
    pending = {keys: cast("_ZarrArray", arrays[keys].block).start((), target) for keys, target in wanted.items()}
    for keys, begun in pending.items():
        with storage_errors(f"cannot read the leaf {show(_path(keys))}", reading=True):
            begun.result()
    return {keys: target.item() for keys, target in wanted.items()}


def _key_impls(path: str) -> dict[str, str]:
    """The implementation of each array of typed PRNG keys. Every process noted all arrays, Orbax reads one note."""
    notes = sorted(_names(f"{path}/array_metadatas"))
    record = _decoded(f"{path}/array_metadatas/{notes[0]}", _ArrayRecords) if notes else None
    found: dict[str, str] = {}
    for one in record.array_metadatas if record else ():
        impl = (one.array_metadata.ext_metadata or {}).get("random_key_impl")
        if isinstance(impl, str):
            found[one.array_metadata.param_name] = impl
    return found


def _lost_array_metadata(path: str, record: _TreeRecord) -> bool:
    return record.has_array_metadata and not _names(f"{path}/array_metadatas")


class _ArrayRecord(msgspec.Struct, frozen=True):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _Wrapped(msgspec.Struct, frozen=True):
    array_metadata: _ArrayRecord


class _ArrayRecords(msgspec.Struct, frozen=True):
    array_metadatas: list[_Wrapped]


# Zarr metadata --------------------------------------------------------------------------------------------


class _Zarr2(msgspec.Struct, frozen=True):
    shape: _Sides
    chunks: _Sides
    dtype: str


class _Named(msgspec.Struct, frozen=True):
    name: str
    configuration: dict[str, Any] = {}


class _Zarr3(msgspec.Struct, frozen=True):
    shape: _Sides
    chunk_grid: _Named
    data_type: str
    codecs: list[_Named]


def _of_zarr2(what: str, metadata: dict[str, Any]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(dtype, shape, what is read as a unit)."""
    record = _checked(what, metadata, _Zarr2)
    dtype = record.dtype
    if dtype not in DTYPES:
        try:
            dtype = np.dtype(dtype).name
        except TypeError as error:
            raise DataError(f"{what} has dtype {dtype[:40]!r}") from error
    return _fitting(what, dtype, record.shape, record.chunks)


def _of_zarr3(what: str, metadata: dict[str, Any]) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    record = _checked(what, metadata, _Zarr3)
    chunked = [record.chunk_grid, *(codec for codec in record.codecs if codec.name == "sharding_indexed")]
    chunks = [_checked(what, one.configuration.get("chunk_shape"), _Sides) for one in chunked]
    return [_fitting(what, record.data_type, record.shape, chunk) for chunk in chunks][-1]


def _checked(what: str, value: Any, form: type[_T]) -> _T:
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise DataError(f"{what} is damaged: {str(error)[:200]}") from error


def _fitting(
    what: str, dtype: str, shape: Sequence[int], chunk: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1  # others are refused by their name
    if len(chunk) != len(shape) or any(not 1 <= c <= max(1, n) for c, n in zip(chunk, shape, strict=True)):
        raise DataError(f"{what} has chunks of {list(chunk)[:40]}, which do not fit its shape {list(shape)[:40]}")
    if math.prod(side or 1 for side in shape) * itemsize >= 1 << 63:
        raise DataError(f"{what} has shape {list(shape)[:40]}, beyond what can be addressed")
    return dtype, tuple(shape), tuple(chunk)


# Shardings ------------------------------------------------------------------------------------------------


class _DeviceMesh(msgspec.Struct, frozen=True):
    mesh: list[Any]


class _Sharding(msgspec.Struct, frozen=True):
    sharding_type: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]] = []
    axis_names: list[str] = []
    axis_types: list[str] | None = None
    partition_spec: list[str | list[str] | None] = []
    device_mesh: _DeviceMesh | None = None


class _Layouts:
    """Reads shardings; few differ from each other."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._known: dict[str, tuple[MeshRecord | None, Spec]] = {}

    def of(self, keys: _Keys, shape: Sequence[int], text: str | None) -> tuple[MeshRecord | None, Spec]:
        """The mesh of a leaf, None where it lay on one device or it is not known, and its spec."""
        if text is None:
            return None, ()
        what = f"{self._path}/_sharding: the sharding of {show(_path(keys))}"
        if text not in self._known:
            self._known[text] = self._read(what, text)
        mesh, spec = self._known[text]
        problem = mesh and spec_problem(mesh.axes, spec, shape)
        if problem:
            raise DataError(f"{what} does not fit: {problem}")
        return mesh, spec

    def _read(self, what: str, text: str) -> tuple[MeshRecord | None, Spec]:
        record = _converted(what, text, _Sharding)
        if record.sharding_type != "NamedSharding":
            return None, ()
        count = math.prod(record.shape)
        axes = dict(zip(record.axis_names, record.shape, strict=False))
        if not len(axes) == len(record.axis_names) == len(record.shape):
            raise DataError(f"{what} is damaged: axes {record.axis_names[:20]} of sizes {record.shape[:20]}")
        devices = list(range(count)) if record.device_mesh is None else list(_ids(record.device_mesh.mesh))
        if len(set(devices)) != count or len(devices) != count or min(devices, default=0) < 0:
            raise DataError(f"{what} is damaged: {len(devices)} devices on a mesh {axes}")
        types = [name.rpartition(".")[2] for name in record.axis_types or ["Auto"] * len(axes)]
        if len(types) != len(axes) or not {"Auto", "Explicit", "Manual"}.issuperset(types):
            raise DataError(f"{what} is damaged: axis types {types[:20]}")
        spec = [() if one is None else (one,) if isinstance(one, str) else tuple(one) for one in record.partition_spec]
        while spec and not spec[-1]:
            spec.pop()
        return MeshRecord(axes, devices, types), tuple(spec)


def _ids(mesh: list[Any]) -> Iterable[int]:
    """The ids of the devices of a mesh, row by row."""
    nodes: list[Any] = [mesh]
    while nodes:
        match nodes.pop():
            case list() as inner:
                nodes.extend(reversed(cast("list[Any]", inner)))
            case {"id": int(number)} if 0 <= number < 1 << 32:
                yield number
            case _:
                yield -1
