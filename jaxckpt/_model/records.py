"""The records of manifest.json: everything that is known about a checkpoint without reading its arrays."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jaxckpt._model import zarr
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.file_names import data_folder
from jaxckpt._model.grid import Spec, show_axes, show_spec
from jaxckpt._model.stacks import Stack
from jaxckpt._model.tree import Structure
from jaxckpt._model.values import KINDS, decode_value

MAX_INTEGER = 1 << 62
"""The largest integer, for example of a step or an array's bytes. Larger ones would overflow offsets."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class MeshRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mesh of saved leaves."""

    axes: dict[str, Size]
    """Size of each axis, in order."""

    devices: list[Size]
    """Ids of its devices, in row-major order of the axes."""

    types: list[str]
    """For each axis: "Auto", "Explicit" or "Manual"."""

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of_axes(axes: tuple[tuple[str, int], ...]) -> MeshRecord:
        """A mesh with these axes on devices 0, 1, …: one record for all leaves on such a mesh."""
        return MeshRecord(dict(axes), list(range(math.prod(size for _, size in axes))), ["Auto"] * len(axes))


class LayoutRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The layout of saved leaves: a spec on a mesh, or the one device to which they were committed.

    With neither, they were uncommitted: JAX had put them on its default device and could move them.
    """

    mesh: Size | None = None
    """Index of the mesh."""

    spec: list[list[str]] = []
    """For each leading dimension, the mesh axes that split it."""

    reduced: list[str] = []
    """The reduced mesh axes, sorted: the array is replicated over them, and gradients of it are not yet summed."""

    device: Size | None = None
    """Id of the single device."""

    memory: str | None = None
    """Memory kind, if it was not the device's default."""

    opaque: bool = False
    """Whether it was a sharding over several devices other than a NamedSharding, which cannot be recorded."""


class LeafRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A leaf: an array in a row of a stack, or a small value in the manifest."""

    path: str

    kind: str
    """"jax", "numpy", "numpy_scalar", "key" (a typed PRNG key), "str", "bytes", "int", "float", "bool", "complex"."""

    stack: Size | None = None
    row: Size | None = None

    layout: Size | None = None
    """Index of the layout, for kinds "jax" and "key"."""

    value: str | None = None
    """The value as text, for a leaf that is not in a stack."""

    impl: str | None = None
    """PRNG implementation, for kind "key"; the array holds its raw data with trailing dimensions of its own."""

    weak: bool = False
    """Whether an array of kind "jax" had a weak type, as jnp.asarray(0.5) has."""


class StackRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A Zarr array and its objects."""

    name: str
    dtype: str
    shape: list[Size]
    """Shape of one row."""

    rows: Size
    chunk: list[Size]
    object: list[Size]
    sha256: str
    """SHA-256 of its zarr.json, in hexadecimal digits."""

    objects: dict[str, tuple[Size, str]]
    """For each object, by its grid index ("0/1/0"): its length in bytes and its digest."""

    compression: str | None = None

    contents: dict[str, str] = {}
    """For each object, by grid index: the digest of its content, if recorded."""

    @classmethod
    def of(
        cls, stack: Stack, objects: dict[str, tuple[int, str]], contents: dict[str, str] | None = None
    ) -> StackRecord:
        sides = list(stack.chunk_sides), list(stack.object_sides)
        sha256 = hashlib.sha256(zarr.metadata(stack)).hexdigest()
        head = stack.name, stack.dtype, list(stack.shape), stack.rows
        return cls(*head, *sides, sha256, objects, stack.compression, contents or {})

    def length_and_digest(self, index: tuple[int, ...]) -> tuple[int, str]:
        """Length and digest of the object at a grid index."""
        return self.objects[zarr.index_key(index)]

    def stack(self) -> Stack:
        sides = tuple(self.chunk), tuple(self.object)
        return Stack(self.name, self.dtype, tuple(self.shape), self.rows, *sides, self.compression)


class StepRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a Checkpointer records about a training step."""

    number: Size
    metrics: dict[str, float | None] = {}
    """The metrics by name; None for NaN. JSON has null for infinity too."""

    dropped: list[str] = []
    """Paths of the subtrees that were dropped after the save."""

    infinite: dict[str, Literal[-1, 1]] = {}
    """The sign of each metric that is infinite."""

    def __post_init__(self) -> None:
        for name, sign in self.infinite.items():
            if self.metrics.get(name, 0.0) is None:
                self.metrics[name] = sign * math.inf
        for name, value in self.metrics.items():
            if value is not None and math.isinf(value):
                self.infinite[name] = 1 if value > 0 else -1

    def with_metrics(self, metrics: Mapping[str, float | None]) -> StepRecord:
        """The same step with these metrics."""
        return msgspec.structs.replace(self, metrics=dict(metrics), infinite={})


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """Everything that is known about a checkpoint without reading its arrays."""

    format: str
    version: int
    save_id: str
    created: str
    """The time of the save: UTC, ISO 8601. Informational only."""

    libraries: dict[str, str]
    metadata: Any
    """The user's metadata, any JSON value."""

    tree: Structure
    leaves: list[LeafRecord]
    meshes: list[MeshRecord]
    layouts: list[LayoutRecord]
    stacks: list[StackRecord]

    process_states: list[tuple[Size, str]] = []
    """For each process that saved, length and SHA-256 of its state's file; empty without `process_state`."""

    step: StepRecord | None = None
    """The record of a Checkpointer, if one saved this."""

    phase_seconds: dict[str, list[Seconds]] = {}
    """For each phase of the save, the seconds that each process had spent in it when it had written its share.
    Informational only."""

    processes: list[tuple[str, Size]] = []
    """For each process that saved, the name of its host and the bytes of its objects' data. Informational only."""

    @property
    def data_folder(self) -> str:
        """Name of the folder that holds the arrays."""
        return data_folder(self.save_id)

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Index of each leaf by its path."""
        return dict(zip([leaf.path for leaf in self.leaves], range(len(self.leaves)), strict=True))

    @functools.cached_property
    def decoded_stacks(self) -> list[Stack]:
        """The stacks, as arguments for plans."""
        return [record.stack() for record in self.stacks]

    @functools.cached_property
    def ties(self) -> dict[int, int]:
        """For each leaf that shares its row with an earlier leaf: the index of the first leaf in that row."""
        rows = [(number, (leaf.stack, leaf.row)) for number, leaf in enumerate(self.leaves) if leaf.stack is not None]
        if len({row for _, row in rows}) == len(rows):
            return {}
        first = dict[tuple[int, int | None], int]()
        return {
            number: first_number for number, row in rows if (first_number := first.setdefault(row, number)) != number
        }

    def stack_and_row(self, leaf: LeafRecord) -> tuple[int, int]:
        """(stack, row) of a leaf in a stack."""
        assert leaf.stack is not None, leaf
        assert leaf.row is not None, leaf
        return leaf.stack, leaf.row

    def leaf_shape(self, leaf: LeafRecord) -> tuple[int, ...]:
        """Shape of a leaf in a stack; for a PRNG key, of its raw data."""
        return tuple(self.stacks[self.stack_and_row(leaf)[0]].shape)

    def leaf_bytes(self, leaf: LeafRecord) -> int:
        """Bytes of a leaf's data; 0 for a leaf that is not in a stack."""
        if leaf.stack is None:
            return 0
        return math.prod(self.leaf_shape(leaf)) * DTYPES[self.stacks[leaf.stack].dtype].itemsize

    def leaf_layout(self, leaf: LeafRecord) -> tuple[MeshRecord | None, Spec, LayoutRecord]:
        """(mesh, spec, record) of a leaf's saved layout."""
        record = self.layouts[leaf.layout] if leaf.layout is not None else LayoutRecord()
        mesh = None if record.mesh is None else self.meshes[record.mesh]
        return mesh, tuple(tuple(axes) for axes in record.spec), record


# Saved leaves ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A leaf of a checkpoint, as its manifest describes it."""

    manifest: Manifest
    record: LeafRecord

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def kind(self) -> str:
        return self.record.kind

    @property
    def is_array(self) -> bool:
        """Whether its data is a row of a stack, and not in the manifest."""
        return self.record.stack is not None

    @property
    def on_devices(self) -> bool:
        return KINDS[self.record.kind].on_devices

    @property
    def stack(self) -> Stack:
        """The stack of its row."""
        assert self.record.stack is not None, self.record
        return self.manifest.decoded_stacks[self.record.stack]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored data: of the raw data for a PRNG key; () for a value in the manifest."""
        return self.stack.shape if self.is_array else ()

    @property
    def ndim(self) -> int:
        """Number of dimensions of `shape`, for functions of (path, leaf)."""
        return len(self.shape)

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype of the stored data: of the raw data for a PRNG key; NumPy's default for a value in the manifest."""
        return DTYPES[self.stack.dtype] if self.is_array else np.asarray(self.value).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the user sees: for PRNG keys, not the shape of their raw data."""
        return self.stored_shape[:-1] if self.record.kind == "key" else self.stored_shape

    @property
    def nbytes(self) -> int:
        """Bytes of its data; 0 for a value in the manifest."""
        return self.manifest.leaf_bytes(self.record)

    @property
    def value(self) -> Any:
        """The value, if it is in the manifest."""
        return decode_value(self.record.kind, self.record.value or "")

    @property
    def spec(self) -> Spec:
        """The spec at the time of the save; an empty spec if it had none."""
        return self.manifest.leaf_layout(self.record)[1]

    @property
    def reduced(self) -> list[str]:
        """The reduced mesh axes at the time of the save."""
        return self.manifest.leaf_layout(self.record)[2].reduced

    @property
    def mesh(self) -> MeshRecord | None:
        """The mesh at the time of the save, if any."""
        return self.manifest.leaf_layout(self.record)[0]

    @property
    def memory(self) -> str | None:
        """The memory kind at the time of the save; None for the default of its devices."""
        return self.manifest.leaf_layout(self.record)[2].memory

    @property
    def layout(self) -> str:
        """A description of the mesh and spec at the time of the save."""
        return "host" if self.record.layout is None else show_layout(*self.manifest.leaf_layout(self.record))


def show_layout(mesh: MeshRecord | None, spec: Spec, record: LayoutRecord) -> str:
    """A short description of a saved layout."""
    if mesh is not None:
        reduced = f" reduced over {', '.join(record.reduced)}" if record.reduced else ""
        return f"{show_spec(spec)}{reduced} on {show_axes(mesh.axes)}"
    if record.device is not None:
        return f"device {record.device}"
    return "unrecorded" if record.opaque else "default device"
