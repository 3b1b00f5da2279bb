"""The names of leaves in files of other libraries, and their arrays for such a file, read slab by slab."""

from __future__ import annotations

import heapq
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxckpt._model.paths import escape_key, name_of_path, path_of_name
from jaxckpt._model.pieces import Array, as_bits
from jaxckpt._model.tree import Tree, nested_dicts
from jaxckpt._model.values import decode_value
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import Report
from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import note_progress
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.source import Source
from jaxckpt.errors import DataError, TreeError, show_lines, show_path

if TYPE_CHECKING:
    from jaxckpt._job.call import Call  # imports JAX

Data = StoredArray | Array


# Names ----------------------------------------------------------------------------------------------------


def names_of(source: Source) -> dict[str, str]:
    """The path of each leaf by its name in a file of another library: its keys, joined with "/".

    Raises TreeError for leaves that would share a name.
    """
    paths: dict[str, str] = {}
    problems: list[str] = []
    for leaf in source.manifest.leaves:
        name = name_of_path(leaf.path)
        if (other := paths.setdefault(name, leaf.path)) != leaf.path:
            problems.append(f"{show_path(other)} and {show_path(leaf.path)} would both be named {name!r}")
    if problems:
        raise TreeError(
            "the format joins the keys of a leaf with '/', so leaves would share a name; rename one with rename=, or"
            f" leave it out with select=:\n{show_lines(problems)}"
        )
    return paths


def recorded_paths(paths: Mapping[str, str]) -> dict[str, str]:
    """The paths, by name, that a file must record because they do not follow from the names: a key has a "/"."""
    default = _default_paths(paths)
    return {name: path for name, path in paths.items() if path != default[name]}


def tree_of_names(values: Mapping[str, Any], recorded: Mapping[str, str]) -> Tree:
    """The tree of what a file calls by these names: nested dicts, in which each "/" separates two keys unless a
    recorded path says otherwise; or a dict of the names, if one of them would be both a leaf and a container."""
    # A record that does not fit its name does not count: a tool may have kept it when it renamed the tensors.
    fitting = {name: path for name, path in recorded.items() if name in values and name_of_path(path) == name}
    paths = _default_paths(values) | fitting
    try:
        return nested_dicts({paths[name]: value for name, value in values.items()})
    except TreeError:
        return dict(values)


def tree_of_keys(where: str, leaves: Sequence[tuple[tuple[str | int, ...], Any]], depth: int = 0) -> Tree:
    """The tree of dicts and lists, from the keys of each leaf, of which the first `depth` are the same. An int is an
    index of a list. Raises DataError if the keys do not make a tree."""
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    below: dict[str | int, list[tuple[tuple[str | int, ...], Any]]] = {}
    for leaf in leaves:
        if len(leaf[0]) > depth:  # otherwise an entry of Orbax for an empty position that other entries fill
            below.setdefault(leaf[0][depth], []).append(leaf)
    what = f"{where}: the container at {show_path('/'.join(map(escape_key, leaves[0][0][:depth])) if leaves else '')}"
    if len({*map(type, below)}) != 1:
        raise DataError(f"{what} mixes keys and indices")
    if not isinstance(next(iter(below)), int):
        return {key: tree_of_keys(where, inside, depth + 1) for key, inside in below.items()}
    if not all(number in below for number in range(len(below))):
        raise DataError(f"{what} has the indices {str([*below][:20])[1:-1]}; expected 0 to {len(below) - 1}")
    return [tree_of_keys(where, below[number], depth + 1) for number in range(len(below))]


def _default_paths(names: Iterable[str]) -> dict[str, str]:
    """The path of each name in a file that records none. The only tensor of the name "" is the tree itself."""
    paths = {name: path_of_name(name) for name in names}
    return {"": ""} if [*paths] == [""] else paths


# Data -----------------------------------------------------------------------------------------------------


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
    """The leaves as arrays by name. Python numbers become 0-d arrays, or are omitted with `keep_values`.

    Raises TreeError for leaves that cannot be arrays, that share a name, or for which `problem_of(name, dtype)` returns
    a reason why the format cannot hold them.
    """
    arrays: dict[str, Data] = {}
    problems: list[str] = []
    options = halved(options)
    for number, (leaf, name) in enumerate(zip(source.manifest.leaves, names_of(source), strict=True)):
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
            problem = problem_of(name, data.dtype)
        if problem is None:
            arrays[name] = data
        else:
            problems.append(f"{show_path(leaf.path)} {problem}")
    if problems:
        raise TreeError(
            f"the format cannot store {len(problems)} of these leaves; leave them out with select=, or rename them with"
            f" rename=:\n{show_lines(problems)}"
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
    return np.ascontiguousarray(as_bits(array)).reshape(-1).view(np.uint8)


def write_json(path: str, content: Any, indent: int | None = None) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        json.dump(content, file, indent=indent)


def report_of(call: Call) -> Report:
    """What a call that writes files reports its bytes to. It raises if the call is cancelled, or has stalled."""

    def report(moved: int) -> None:
        require_not_stalled()
        call.cancellation.check()
        note_progress()

    return report


# Folders --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of an export, which one process writes."""

    name: str
    n_bytes: int
    """Bytes of its tensors."""

    write: Callable[..., None]
    """Writes it to a path; with `skip`, without the tensors of these names, if the file exists."""

    offsets: Mapping[str, int] = field(default_factory=dict[str, int])
    """Where each tensor begins in the file."""


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """The files of an export. Every process makes the same plan."""

    files: Sequence[FolderFile]
    finish: Callable[[str], None]
    """Writes into the folder what describes the files, after all of them."""

    def of_process(self, process: int, processes: int) -> list[FolderFile]:
        """The files that a process writes."""
        own = {*balanced({file.name: file.n_bytes for file in self.files}, process, processes)}
        return [file for file in self.files if file.name in own]


def balanced(sizes: Mapping[str, int], process: int, processes: int) -> list[str]:
    """The names that belong to a process: the largest first, each to the process with the fewest bytes so far."""
    own: list[str] = []
    loads = [(0, number) for number in range(processes)]  # a heap
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + size, owner))
        if owner == process:
            own.append(name)
    return own


class StepExport(ABC):
    """What a Checkpointer writes from a step when it is published."""

    @abstractmethod
    def write(self, call: Call, checkpoint: str, options: Options) -> None:
        """Write from the checkpoint at a path. Every process, in a lane."""
