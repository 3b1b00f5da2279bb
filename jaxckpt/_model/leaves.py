"""The properties of a saved leaf that are known without reading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Spec, show_axes, show_spec
from jaxckpt._model.records import LayoutRecord, LeafRecord, Manifest, MeshRecord
from jaxckpt._model.stacks import Stack
from jaxckpt._model.values import KINDS, decode_value


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
