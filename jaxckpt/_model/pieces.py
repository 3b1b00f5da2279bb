"""The data of an object: the pieces in host memory that form it, and how arrays are copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._model.grid import Box, contains, extent, intersection, slices_within, volume

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialized memory with 64-byte alignment, which JAX on CPU uses without a copy. Arrays of Python objects are
    NumPy's own."""
    if dtype.hasobject:
        return np.empty(shape, dtype)
    n_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(n_bytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + n_bytes].view(dtype).reshape(shape)


def as_bits(array: Array) -> Array:
    """The same memory, viewed with a dtype that NumPy copies fast. NumPy copies ml_dtypes element by element."""
    return array.view(_BITS[array.dtype.itemsize])


def assign(target: Array, source: Array) -> None:
    """Copy an array bit for bit, or cast it to another dtype. A real dtype takes the real parts of complex numbers."""
    if source.dtype == target.dtype and not source.dtype.hasobject:
        np.copyto(as_bits(target), as_bits(source))
        return
    if not np.can_cast(source.dtype, target.dtype, "unsafe"):  # two dtypes of at most 8 bits, both of ml_dtypes
        source = source.astype(np.int32 if "int" in source.dtype.name else np.float32)
    # The user allowed the loss, so suppress NumPy's warnings.
    with np.errstate(all="ignore"):
        target[...] = np.real(source) if source.dtype.kind == "c" and target.dtype.kind != "c" else source


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arrays that together hold a box of a stack."""

    box: Box
    """The box of the stack that they hold, rows first."""

    dtype: np.dtype[Any]

    group_rows: int

    groups: Sequence[Sequence[tuple[Box, Array]]]
    """For every `group_rows` rows, in order: (box of the stack, array) of each piece. Pieces may exceed the box."""

    def array(self) -> Array:
        """The box as one array: without a copy if it is one piece, otherwise copied."""
        pieces = [piece for group in self.groups for piece in group]
        if len(pieces) == 1:
            return pieces[0][1][slices_within(self.box, pieces[0][0])]
        scratch = np.empty(volume(self.box) * self.dtype.itemsize, np.uint8)
        return self.gather(self.box, scratch).view(self.dtype).reshape(extent(self.box))

    def separate_arrays(self, chunk: Sequence[int]) -> list[tuple[Box, Array]] | None:
        """Each box and its array, if the pieces do not overlap and share no chunk of these sides; otherwise None."""
        arrays: list[tuple[Box, Array]] = []
        for piece, array in itertools.chain.from_iterable(self.groups):
            common = intersection(piece, self.box)
            if common is None:
                continue
            for (start, stop), side, (_, end) in zip(common, chunk, self.box, strict=True):
                if start % side or (stop % side and stop != end):
                    return None
            arrays.append((common, array if common == piece else array[slices_within(common, piece)]))
        return arrays if sum(volume(box) for box, _ in arrays) == volume(self.box) else None

    def gather(self, box: Box, scratch: Bytes) -> Bytes:
        """The bytes of a box in C order, copied into `scratch`. Bytes outside of the pieces become zero."""
        shape = extent(box)
        flat = scratch[: math.prod(shape) * self.dtype.itemsize]
        out = as_bits(flat.view(self.dtype)).reshape(shape)
        region = box
        if not contains(self.box, box):
            flat[:] = 0
            region = intersection(box, self.box) or box
        (start, stop), origin = box[0], self.box[0][0]
        groups = self.groups[(start - origin) // self.group_rows : -(-(stop - origin) // self.group_rows)]
        for piece, array in itertools.chain.from_iterable(groups):  # of the groups that have rows of the box
            common = intersection(piece, region)
            if common is not None:
                np.copyto(out[slices_within(common, box)], as_bits(array)[slices_within(common, piece)])
        return flat
