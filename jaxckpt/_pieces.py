"""The data of an object: pieces in host memory that together make it up, and blocks of it as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxckpt._grid import Box, contains, extent, intersection, within

Array = np.ndarray[Any, np.dtype[Any]]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def as_bits(array: Array) -> Array:
    """The same memory as numbers that NumPy copies fast: it copies dtypes of ml_dtypes element by element."""
    return array.view(_BITS[array.dtype.itemsize])


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arrays that together hold a box of a stack."""

    box: Box
    """What they hold of the stack, rows first."""

    dtype: np.dtype[Any]

    group_rows: int

    groups: Sequence[Sequence[tuple[Box, Array]]]
    """For every `group_rows` rows, in order: (what it holds of the stack, the array) of each piece. Pieces may hold
    more than the box."""

    def array(self) -> Array:
        """All of it as one array: in place where it is one piece, else copied together."""
        pieces = [piece for group in self.groups for piece in group]
        if len(pieces) == 1:
            return pieces[0][1][within(self.box, pieces[0][0])]
        out = np.empty(extent(self.box), self.dtype)
        for held, array in pieces:
            common = intersection(held, self.box)
            if common is not None:
                np.copyto(as_bits(out)[within(common, self.box)], as_bits(array)[within(common, held)])
        return out

    def block(self, box: Box, scratch: Array) -> Array:
        """The bytes of one box in C order: in place where they lie so, else copied into `scratch`.

        What of the box lies outside of these pieces becomes zero.
        """
        (start, stop), (origin, _) = box[0], self.box[0]
        first, last = (start - origin) // self.group_rows, -(-(stop - origin) // self.group_rows)
        found = [piece for group in self.groups[first:last] for piece in group]
        if len(found) > 1:
            found = [piece for piece in found if intersection(piece[0], box)]
        if len(found) == 1 and contains(found[0][0], box) and contains(self.box, box):
            part = found[0][1][within(box, found[0][0])]
            if part.flags.c_contiguous:
                return part.reshape(-1).view(np.uint8)
        shape = extent(box)
        n_bytes = self.dtype.itemsize
        for side in shape:
            n_bytes *= side
        flat = scratch[:n_bytes]
        out = as_bits(flat.view(self.dtype)).reshape(shape)
        wanted = box
        if not contains(self.box, box):
            flat[:] = 0
            wanted = intersection(box, self.box) or box
        for held, array in found:
            common = intersection(held, wanted)
            if common is not None:
                np.copyto(out[within(common, box)], as_bits(array)[within(common, held)])
        return flat
