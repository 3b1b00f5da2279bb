"""What is known of a saved leaf without reading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._format.dtypes import DTYPES, key_dtype
from jaxckpt._format.grid import Spec
from jaxckpt._format.layouts import show_layout
from jaxckpt._format.records import LeafRecord, Manifest, MeshRecord
from jaxckpt._format.stacks import Stack
from jaxckpt._format.values import KINDS, decode_value


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
        """Whether it lies in a row of a stack, not in the manifest."""
        return self.record.stack is not None

    @property
    def on_devices(self) -> bool:
        return KINDS[self.record.kind].on_devices

    @property
    def stack(self) -> Stack:
        """The stack that it is a row of."""
        return self.manifest.arrays[self.manifest.place(self.record)[0]]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of what is stored: of the raw data of a PRNG key; () for a value in the manifest."""
        return self.stack.shape if self.is_array else ()

    @property
    def ndim(self) -> int:
        """How many dimensions it has, as the user knows it: functions of (path, leaf) ask."""
        return len(self.shape)

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype of what is stored: that of the raw data of a PRNG key; NumPy's own for a value in the manifest."""
        return DTYPES[self.stack.dtype] if self.is_array else np.asarray(self.value).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as the user knows it: of PRNG keys, not of their raw data."""
        return self.stored_shape[:-1] if self.record.kind == "key" else self.stored_shape

    @property
    def dtype(self) -> Any:
        """Dtype as the user knows it. Raises ValueError for PRNG keys of an implementation that JAX does not know."""
        return key_dtype(self.record.impl or "") if self.record.kind == "key" else self.stored_dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data; 0 for a value in the manifest."""
        return self.manifest.leaf_bytes(self.record)

    @property
    def value(self) -> Any:
        """The value, if it lies in the manifest."""
        return decode_value(self.record.kind, self.record.value or "")

    @property
    def spec(self) -> Spec:
        """The spec that it was saved with; an empty one if it had none."""
        return self.manifest.leaf_layout(self.record)[1]

    @property
    def mesh(self) -> MeshRecord | None:
        """The mesh that it was saved on, if any."""
        return self.manifest.leaf_layout(self.record)[0]

    @property
    def memory(self) -> str | None:
        """The kind of memory that it was saved from; None for its devices' own."""
        return self.manifest.leaf_layout(self.record)[2].memory

    @property
    def layout(self) -> str:
        """Mesh and spec that it was saved with, in words."""
        return "host" if self.record.layout is None else show_layout(*self.manifest.leaf_layout(self.record))
