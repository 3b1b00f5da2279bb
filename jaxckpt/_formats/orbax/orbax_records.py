"""The files of Orbax's checkpoints, and the content of those that are JSON.

    <manager>/metadata/_ROOT_METADATA          the user's metadata of the run
    <manager>/<step>/                          one folder per step: "1000", "00001000", "ckpt_1000"
        _CHECKPOINT_METADATA                   which handler wrote each item; when the step was started and committed
        <item>/                                "default": a manager's only item; "state": that of Orbax v1
            _METADATA                          the tree: the keys of each leaf, and what kind of value it was
            manifest.ocdbt, d/, ocdbt.*/       all arrays, in one OCDBT database; else a Zarr array in each <leaf>/
            _strings.json                      leaves that are str
            checkpoint                         before 0.6: leaves in Flax's msgpack; before 0.3: also the tree
            _sharding, array_metadatas/        of jax.Arrays: their shardings; implementations of PRNG keys
        <item>/metadata                        an item that is JSON
        <item>/manifest.json                   an item that jaxckpt.orbax has written

The name of a leaf's array consists of its keys, joined with ".". A folder with a _METADATA may also exist by itself.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jaxckpt._formats.index_files import read_json
from jaxckpt._model.paths import escape_key
from jaxckpt._store.foreign_files import Mark, exists, is_visible_file, marked

MAX_TREE_BYTES = 1 << 30
"""The largest index file, which has an entry for each leaf."""

TEMPORARY = ".orbax-checkpoint-tmp"
"""A part of the name of a folder whose save is in progress or was interrupted."""

STEP_FILE = "_CHECKPOINT_METADATA"
RUN_METADATA = ("metadata/_ROOT_METADATA", "metadata/metadata")
"""The user's metadata of a run, and the same file of older versions of Orbax."""

V1_MARK = "orbax.checkpoint"
"""An empty file that Orbax v1 leaves in a step."""

TREE_FILE = "_METADATA"
DATABASE_FILE = "manifest.ocdbt"
STRINGS_FILE = "_strings.json"
SHARDINGS_FILE = "_sharding"
ARRAYS_FOLDER = "array_metadatas"
COMMITTED_MARK = "commit_success.txt"

METRICS = "metrics"
"""The item with the metrics of a step, and the file in it."""

AGGREGATE_FILE = "checkpoint"
"""Leaves in one file, before Orbax 0.6."""

SAVE_FILES = {COMMITTED_MARK, STEP_FILE}
TREE_DATA_FILES = {DATABASE_FILE, SHARDINGS_FILE, STRINGS_FILE, ARRAYS_FOLDER}

T = TypeVar("T")


def read_optional(path: str, kind: type[T]) -> T | None:
    """A JSON file; None if it does not exist. Raises DataError if it is damaged, StorageError."""
    return read_json(path, kind, MAX_TREE_BYTES) if exists(path) else None


def mark_of(path: str) -> Mark | None:
    """The mark of the arrays of an item that are not in a database; None if they are all that it has."""
    places = (f"{path}/{STEP_FILE}", f"{os.path.dirname(path)}/{STEP_FILE}", f"{path}/{TREE_FILE}")
    return next((marked(place) for place in places if is_visible_file(place)), None)


class StepMetadata(msgspec.Struct, frozen=True):
    item_handlers: dict[str, str | None] | str | None = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None

    def handler(self, item: str) -> str:
        """The class that wrote an item, without its module."""
        return self._name(item).rpartition(".")[2]

    def is_known(self, item: str) -> bool:
        """Whether an item was written as a tree or as JSON: if it cannot be read, it is damaged."""
        return self.handler(item) in HANDLERS or self._name(item) == OUR_HANDLER

    def _name(self, item: str) -> str:
        name = self.item_handlers.get(item) if isinstance(self.item_handlers, dict) else self.item_handlers
        return name or ""


HANDLERS = (
    "ArrayCheckpointHandler JaxRandomKeyCheckpointHandler JsonCheckpointHandler JsonHandler MetricsHandler"
    " NumpyRandomKeyCheckpointHandler PyTreeCheckpointHandler PyTreeHandler StandardCheckpointHandler"
).split()
"""Classes of Orbax whose items are trees or JSON."""

OUR_HANDLER = "jaxckpt.orbax.Handler"


class KeyMetadata(msgspec.Struct, frozen=True):
    key: str
    key_type: Literal[1, 2]
    """1: an index of a list, tuple or custom node; 2: a key of a dict, a field of a namedtuple or custom node."""


class Value(msgspec.Struct, frozen=True):
    value_type: str
    skip_deserialize: bool = False

    write_shape: list[int] | None = None
    """Set only if the arrays of the tree are also recorded in array_metadatas."""


class Entry(msgspec.Struct, frozen=True):
    key_metadata: list[KeyMetadata]
    value_metadata: Value


class TreeRecord(msgspec.Struct, frozen=True):
    tree_metadata: dict[str, Entry]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None

    store_array_data_equal_to_fill_value: bool = False
    """Whether every chunk is stored. Older versions of Orbax omitted chunks of zeros."""

    custom_metadata: Any = msgspec.UNSET
    """Present, possibly as None, since Orbax 0.11.1, the first version in which every save writes a STEP_FILE."""

    value_metadata_tree: str | None = None
    """The tree with its tuples and namedtuples, in Orbax's notation."""

    @property
    def has_array_metadata(self) -> bool:
        return any(entry.value_metadata.write_shape is not None for entry in self.tree_metadata.values())


Keys = tuple[str, ...]
"""The keys of the path to a leaf."""


def path_of(keys: Keys) -> str:
    return "/".join(map(escape_key, keys))


class _ArrayRecord(msgspec.Struct, frozen=True):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _Wrapped(msgspec.Struct, frozen=True):
    array_metadata: _ArrayRecord


class ArrayRecords(msgspec.Struct, frozen=True):
    array_metadatas: list[_Wrapped]


class _DeviceMesh(msgspec.Struct, frozen=True):
    mesh: list[Any]


class ShardingRecord(msgspec.Struct, frozen=True):
    sharding_type: str
    shape: list[Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]] = []
    axis_names: list[str] = []
    axis_types: list[str] | None = None
    partition_spec: list[str | list[str] | None] = []
    device_mesh: _DeviceMesh | None = None
