"""`Options.non_finite`: NaN and infinity in the data that is saved, named by their leaf."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np

from jaxckpt._model.grid import intersection, slices_within
from jaxckpt._model.pieces import Array, Pieces
from jaxckpt._pipeline.lane_log import log as _log
from jaxckpt._save.request import PreparedSave
from jaxckpt._save.staging import StagedObject
from jaxckpt.errors import Problem, TreeError, show_count, show_path

_BLOCK = 1 << 20
"""Elements that are checked at a time."""


def checked(save: PreparedSave, staged: Generator[StagedObject]) -> Generator[StagedObject]:
    """The objects, each of which is checked when its data is in host memory, as `Options.non_finite` says."""
    warned = set[int]()  # the leaves that were named before
    return (replace(one, check=functools.partial(_check, save, one.obj.stack, warned)) for one in staged)


def _check(save: PreparedSave, stack: int, warned: set[int], pieces: Pieces) -> None:
    for row, count in _counts(pieces).items():
        leaf = save.plan.leaves[stack][row]
        path = save.draft.records[leaf].path
        reason = f"has {show_count(count, 'value')} that {'is' if count == 1 else 'are'} NaN or infinite in one object"
        if save.options.non_finite == "error":
            remedy = 'Options(non_finite="warn") saves it nevertheless'
            raise TreeError.of(f"{save.store.url} was not saved", [Problem(path, reason, remedy)])
        if leaf not in warned:
            warned.add(leaf)
            _log.warning("%s: %s %s", save.store.url, show_path(path), reason)


def _counts(pieces: Pieces) -> dict[int, int]:
    """How many values of each row are not finite, for the rows that have any."""
    if not (pieces.dtype.kind in "fc" or "float" in pieces.dtype.name):
        return {}
    counts: dict[int, int] = {}
    for box, array in itertools.chain.from_iterable(pieces.groups):
        common = intersection(box, pieces.box)
        if common is None:
            continue
        values = array[slices_within(common, box)]
        for row, of_row in enumerate(values, common[0][0]):
            if count := _count(of_row, pieces.dtype):
                counts[row] = counts.get(row, 0) + count
    return counts


def _count(values: Array, dtype: np.dtype[Any]) -> int:
    """How many values are not finite, checked in blocks, which stay in the cache."""
    flat = values.reshape(-1)
    return sum(_count_block(flat[start : start + _BLOCK].view(dtype)) for start in range(0, flat.size, _BLOCK))


def _count_block(block: Array) -> int:
    if block.dtype.name == "bfloat16":  # NumPy calls ml_dtypes for each element
        exponents = block.view(np.uint16) & np.uint16(0x7F80)
        return int(np.count_nonzero(exponents == 0x7F80))
    finite = np.isfinite(block)
    return block.size - int(np.count_nonzero(finite))
