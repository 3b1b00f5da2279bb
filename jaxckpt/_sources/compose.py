"""Composes the manifest of a checkpoint of another library from the tree of its arrays.

its index files ─▶ a tree of ForeignArrays ─▶ compose: equal ones become rows of a stack ─▶ ForeignCheckpoint
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np

from jaxckpt._arguments.pytree import flatten, mark_as_leaf
from jaxckpt._keywords import explain_keywords
from jaxckpt._model import typed_json
from jaxckpt._model.dtypes import DTYPES, MAX_RANK, dtype_name
from jaxckpt._model.records import MAX_INTEGER, LayoutRecord, LeafRecord, Manifest, MeshRecord, StackRecord, StepRecord
from jaxckpt._model.tree import Tree
from jaxckpt._model.values import PYTHON_KINDS, array_of, encode_value
from jaxckpt._sources.foreign import ArrayData, ForeignArray, ForeignCheckpoint, InMemoryData, Unreadable
from jaxckpt.errors import Problem, TreeError, show_count, show_lines, show_path

mark_as_leaf(ForeignArray)

READ_UNIT_BYTES = 4 << 20
"""Bytes per read of an array without a unit."""


@explain_keywords
def compose(url: str, tree: Tree, format: str, *, metadata: Any = None, files: Iterable[str] = ()) -> ForeignCheckpoint:
    """A foreign checkpoint from its tree: nested dicts, lists and tuples of ForeignArrays, and of Python values and
    NumPy arrays that were already read.

    Raises TreeError for values that a jaxckpt checkpoint cannot hold.
    """
    leaves, structure = flatten(tree)
    records: list[LeafRecord] = []
    stacks: dict[tuple[Any, ...], list[ArrayData]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    meshes: dict[bytes, int] = {}
    layouts: dict[bytes, int] = {}
    problems: list[Problem] = []
    reasons: list[str] = []
    for leaf in leaves:
        try:
            array = _described(leaf.value)
        except TreeError as error:
            problems.append(Problem(leaf.path, str(error)))
            continue
        if isinstance(array, tuple):
            kind, text = array
            records.append(LeafRecord(leaf.path, kind, value=text))
            continue
        key = (array.dtype, array.shape, array.chunk)
        rows = stacks.setdefault(key, [])
        layout = None
        if array.kind in ("jax", "key") and array.mesh is not None:
            mesh = meshes.setdefault(msgspec.json.encode(array.mesh), len(meshes))
            record = LayoutRecord(mesh, [list(axes) for axes in array.spec])
            layout = layouts.setdefault(msgspec.json.encode(record), len(layouts))
        records.append(
            LeafRecord(leaf.path, array.kind, numbers.setdefault(key, len(numbers)), len(rows), layout, impl=array.impl)
        )
        rows.append(array.data)
        if isinstance(array.data, Unreadable):
            reasons.append(f"{show_path(leaf.path)}: {array.data.reason}")
    if problems:
        raise TreeError.of(
            f"{len(problems)} of the {show_count(len(leaves), 'leaf')} of {url} cannot be read", problems
        )
    manifest = Manifest(
        format=format,
        version=0,
        save_id="",
        created="",
        libraries={},
        metadata=metadata,
        tree=structure,
        leaves=records,
        meshes=[typed_json.decode(text, MeshRecord) for text in meshes],
        layouts=[typed_json.decode(text, LayoutRecord) for text in layouts],
        stacks=[_stack(number, key, len(rows)) for number, (key, rows) in enumerate(stacks.items())],
        step=step_record(metadata),
    )
    all_reasons = show_lines(reasons)
    row_data = [[_with_reasons(data, all_reasons) for data in rows] for rows in stacks.values()]
    return ForeignCheckpoint(url, manifest, row_data, tuple(files))


def _with_reasons(data: ArrayData, reasons: str) -> ArrayData:
    """The data of a row. If it cannot be read, its error names all such leaves, so that all can be left out."""
    return replace(data, all_reasons=reasons) if isinstance(data, Unreadable) else data


def step_record(metadata: Any) -> StepRecord | None:
    """The record of a step of another library's run, from the "step" and "metrics" in its metadata, if any."""
    match metadata:
        case {"step": int(number)} if not isinstance(number, bool) and 0 <= number <= MAX_INTEGER:
            return StepRecord(number, metrics_of_another_library(cast("dict[str, Any]", metadata).get("metrics")))
        case _:
            return None


def metrics_of_another_library(metrics: object) -> dict[str, float | None]:
    """Those metrics that are numbers or infinite, None for those that are NaN or exceed a float."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        name: None if value is None else _metric(value)
        for name, value in cast("Mapping[str, object]", metrics).items()
        if value is None or value in INFINITIES or (isinstance(value, int | float) and not isinstance(value, bool))
    }


INFINITIES = ("Infinity", "-Infinity")
"""What metadata has in place of infinity, which JSON lacks."""


def _metric(value: Any) -> float | None:
    try:
        number = float(value)
        return None if math.isnan(number) else number
    except OverflowError:  # an int of more than 308 digits
        return None


def _described(value: Any) -> ForeignArray | tuple[str, str]:
    """A leaf as an array, or the kind and text of a small Python value. Raises TreeError (a reason, without the
    path)."""
    if isinstance(value, np.ndarray):
        value = ForeignArray(dtype_name(value.dtype), value.shape, InMemoryData(value), "numpy")
    elif isinstance(value, np.generic):
        array = np.asarray(value)
        value = ForeignArray(dtype_name(array.dtype), (), InMemoryData(array), "numpy_scalar")
    elif type(value) in PYTHON_KINDS:
        inline = encode_value(value)
        if inline is not None:
            return inline
        raw = array_of(value)
        return ForeignArray("uint8", raw.shape, InMemoryData(raw), type(value).__name__)  # pyright: ignore[reportArgumentType]
    if not isinstance(value, ForeignArray):
        raise TreeError(f"is of type {type(value).__module__}.{type(value).__qualname__}")
    if value.dtype not in DTYPES:
        raise TreeError(f"has dtype {value.dtype}, which NumPy and JAX do not support")
    if len(value.shape) > MAX_RANK:
        raise TreeError(f"has {len(value.shape)} dimensions; at most {MAX_RANK} can be read")
    if math.prod(side or 1 for side in value.shape) * DTYPES[value.dtype].itemsize >= 1 << 63:
        raise TreeError(f"has shape {list(value.shape)}, which is too large to address")
    return value


def _stack(number: int, key: tuple[str, tuple[int, ...], tuple[int, ...] | None], rows: int) -> StackRecord:
    """A stack for plans. Its chunks are the units of reading."""
    dtype, shape, chunk = key
    itemsize = DTYPES[dtype].itemsize
    if chunk is None:
        chunk = _contiguous_sides(shape, itemsize)
    return StackRecord(f"{number:04d}", dtype, list(shape), rows, [1, *chunk], [1, *chunk], "", {})


def _contiguous_sides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Sides of a box of at most READ_UNIT_BYTES that is contiguous in C order."""
    sides: list[int] = []
    left = READ_UNIT_BYTES // itemsize
    for side in reversed(shape):
        sides.append(max(1, min(side, left)))
        left = left // side if side and left >= side else 0
    return tuple(reversed(sides))
