"""The leaves of a checkpoint as arrays for a file of another format, read slab by slab."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._model.values import decode_value
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.source import Source
from jaxckpt.errors import TreeError, show_lines, show_path

Data = StoredArray | Array


def halved(options: Options) -> Options:
    """Options with half of the memory, because two slabs are in memory: one is read while the other is written."""
    return replace(options, host_bytes=max(1, options.host_bytes // 2))


def arrays_of(
    source: Source,
    options: Options,
    report: Report,
    problem_of: Callable[[str, np.dtype[Any]], str | None],
    *,
    keep_values: bool = False,
) -> dict[str, Data]:
    """The leaves as arrays by path. Python numbers become 0-d arrays, or are omitted with `keep_values`.

    Raises TreeError for leaves that cannot be arrays, or for which `problem_of(path, dtype)` returns a reason why the
    format cannot hold them.
    """
    arrays: dict[str, Data] = {}
    problems: list[str] = []
    options = halved(options)
    for number, leaf in enumerate(source.manifest.leaves):
        if leaf.stack is not None and leaf.kind not in ("str", "bytes"):
            data = StoredArray(source, number, options, report)
        elif leaf.value is not None and keep_values:
            continue
        else:
            is_number = leaf.kind in ("bool", "int", "float", "complex")
            data = np.asarray(decode_value(leaf.kind, leaf.value or "") if is_number else None)
        if data.dtype == object:
            problem = "is an int beyond 64 bits" if leaf.kind == "int" else f"is a {leaf.kind}"
        else:
            problem = problem_of(leaf.path, data.dtype)
        if problem is None:
            arrays[leaf.path] = data
        else:
            problems.append(f"{show_path(leaf.path)} {problem}")
    if problems:
        raise TreeError(
            f"the format cannot store {len(problems)} of these leaves; leave them out with"
            f" select=:\n{show_lines(problems)}"
        )
    return arrays


def n_bytes(data: Data) -> int:
    return math.prod(data.shape) * data.dtype.itemsize


def slabs(data: Data) -> Iterator[Array]:
    """The bytes of an array in C order."""
    for slab in data.slabs() if isinstance(data, StoredArray) else [data]:
        yield raw(slab)


def raw(array: Array) -> Array:
    """The bytes of an array in memory, in C order."""
    return as_bits(np.ascontiguousarray(array)).reshape(-1).view(np.uint8)


def write_json(path: str, content: Any, indent: int | None = None) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(content, file, indent=indent)
