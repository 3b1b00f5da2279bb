"""The tree of a checkpoint, as `show` draws it, and one leaf of it, as `cat` prints or saves it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np

from jaxckpt._cli.terminal import (
    Column,
    elided,
    elided_middle,
    natural,
    plain_dtype,
    print_table,
    printable,
    show_age,
    show_array,
    show_metrics,
    terminal_width,
)
from jaxckpt._format.grid import show_axes, show_spec, spec_of
from jaxckpt._inspect.leaf import LazyLeaf
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._runtime.errors import InputError, counted
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.progress import show_bytes
from jaxckpt._storage.store import Array

_SHOWN_BYTES = 16 << 20
"""Of an array that `cat` shows."""

_SHOWN_VALUE = 40
"""Characters of a value of Python's in a tree."""


def _is_value(leaf: LazyLeaf) -> bool:
    """Whether it is a value of Python's."""
    return leaf.kind in ("str", "bytes", "int", "float", "bool", "complex")


# The tree -------------------------------------------------------------------------------------------------


def tree_record(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "save_id": checkpoint.save_id or None,
        "created": checkpoint.created or None,
        "libraries": checkpoint.libraries,
        "metadata": checkpoint.metadata,
        "step": checkpoint.step,
        "metrics": checkpoint.metrics,
        "dropped": checkpoint.dropped,
        "bytes": checkpoint.nbytes,
        "leaves": [_leaf_record(path, leaf) for path, leaf in leaves.items()],
    }


def _leaf_record(path: str, leaf: LazyLeaf) -> dict[str, Any]:
    is_value = _is_value(leaf)
    return {
        "path": path,
        "kind": leaf.kind,
        "dtype": None if is_value else leaf.dtype.name,
        "shape": None if is_value else leaf.shape,
        "bytes": leaf.nbytes,
        "spec": spec_of(leaf.spec) if leaf.mesh else None,
        "mesh": leaf.mesh or None,
        "layout": leaf.layout,
        "value": leaf.value if is_value and not leaf.nbytes else None,
    }


def print_tree(
    path: str, checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf], depth: int | None, every: bool
) -> None:
    """What is known of a checkpoint, and the tree of these of its leaves, by itself `every` container of many alike."""
    width = terminal_width()
    click.echo(elided_middle(printable(path), width))
    for line in describe(checkpoint, leaves):
        click.echo(elided(f"  {printable(line)}", width))
    click.echo()
    tree: _Node = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    columns = [
        Column("leaf", least=12, middle=True),
        Column("dtype[shape]", least=12),
        Column("layout", least=10),
        Column("bytes", right=True),
    ]
    one_mesh = len(_meshes(leaves)) == 1
    print_table(columns, list(_rows(tree, 0, depth, every, one_mesh=one_mesh)))


def describe(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> Iterator[str]:
    """Lines about a checkpoint of which these leaves are chosen; the first alone tells what it is."""
    count, size = counted(len(checkpoint), "leaf"), show_bytes(checkpoint.nbytes)
    if len(leaves) < len(checkpoint):
        chosen = show_bytes(sum(leaf.nbytes for leaf in leaves.values()))
        count, size = f"{len(leaves):,} of {count}", f"{chosen} of {size}"
    saved = f", saved {show_age(checkpoint.created)} ago" if checkpoint.created else ""
    yield f"{checkpoint.format}: {count}, {size}{saved}"
    if checkpoint.step is not None:
        metrics = f": {show_metrics(checkpoint.metrics)}" if checkpoint.metrics else ""
        yield f"step {checkpoint.step}{metrics}"
    if checkpoint.dropped:
        yield f"dropped since: {', '.join(checkpoint.dropped)}"
    for axes in _meshes(leaves):
        yield f"mesh {show_axes(dict(axes))}, {counted(math.prod(size for _, size in axes), 'device')}"
    if checkpoint.metadata is not None:
        yield f"metadata {json.dumps(checkpoint.metadata, ensure_ascii=False)}"


def _meshes(leaves: Mapping[str, LazyLeaf]) -> Sequence[tuple[tuple[str, int], ...]]:
    """The axes of each mesh that they were saved on."""
    return list(dict.fromkeys(tuple(leaf.mesh.items()) for leaf in leaves.values() if leaf.mesh))


_Node = dict[str, Any]
"""Children by component of their path: leaves, or nodes."""


def _rows(node: _Node, level: int, depth: int | None, every: bool, *, one_mesh: bool) -> Iterator[list[str]]:
    """The rows of a container's children; several in a row that are alike as one."""
    for names in [[name] for name in node] if every else _runs(node, one_mesh):
        child = node[names[0]]
        label, head = "  " * level + _run_label(names), f"{len(names)} × " if len(names) > 1 else ""
        if isinstance(child, dict):
            below: list[LazyLeaf] = [leaf for name in names for leaf in _below(node[name])]
            count = len(below) // len(names)
            size = show_bytes(sum(leaf.nbytes for leaf in below))
            yield [f"{label}/", f"{head}{count:,} {'leaf' if count == 1 else 'leaves'}", "", size]
            if depth is None or level + 1 < depth:
                yield from _rows(child, level + 1, depth, every, one_mesh=one_mesh)
        else:
            what, layout = _leaf_texts(child, one_mesh)
            size = show_bytes(child.nbytes * len(names)) if child.nbytes or not _is_value(child) else ""
            yield [label or "(the tree itself)", f"{head}{what}", layout, size]


def _below(node: Any) -> Iterator[LazyLeaf]:
    if isinstance(node, dict):
        for child in node.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _below(child)
    else:
        yield node


def _runs(node: _Node, one_mesh: bool) -> list[list[str]]:
    """The names of children, those that follow one another and are alike together, from three of them on."""

    def form(child: Any) -> Any:
        if not isinstance(child, dict):
            return (None,) if _is_value(child) else _leaf_texts(child, one_mesh)
        return tuple((name, form(below)) for name, below in child.items())  # pyright: ignore[reportUnknownVariableType]

    runs: list[list[str]] = []
    previous: Any = None
    for name in node:
        found = form(node[name])
        # Leaves that are named have each something to say; those that are numbered, as layers are, have not.
        if runs and found == previous and found != (None,) and (isinstance(node[name], dict) or name.isdecimal()):
            runs[-1].append(name)
        else:
            runs.append([name])
        previous = found
    return [part for run in runs for part in ([run] if len(run) > 2 else [[name] for name in run])]


def _run_label(names: Sequence[str]) -> str:
    ordered = sorted(names, key=natural)
    return names[0] if len(names) == 1 else f"{ordered[0]} … {ordered[-1]}"


def _leaf_texts(leaf: LazyLeaf, one_mesh: bool) -> tuple[str, str]:
    """(dtype and shape, or kind and value; layout)."""
    if _is_value(leaf):
        return leaf.kind if leaf.nbytes else elided(f"{leaf.kind} {leaf.value!r}", _SHOWN_VALUE), ""
    layout = show_spec(spec_of(leaf.spec)) if leaf.mesh and one_mesh else leaf.layout
    return f"{'key ' if leaf.kind == 'key' else ''}{show_array(leaf.dtype.name, leaf.shape)}", layout


# A leaf ---------------------------------------------------------------------------------------------------


def read_value(leaf: LazyLeaf, index: Any, name: str) -> Any:
    """A value of Python's, or what an index selects of an array; `name` is what the user called it.

    Raises InputError where the index does not fit, or it is more than people read.
    """
    if _is_value(leaf):
        if index is not None:
            raise InputError(f"leaf {leaf.path!r} is a {leaf.kind}, which takes no index")
        return leaf.value
    size = _n_bytes(leaf, index)
    if size > _SHOWN_BYTES:
        raise InputError(f"{name} is {show_bytes(size)}, too much to print: give an index, or --save FILE.npy")
    return np.asarray(leaf[... if index is None else index])


def _n_bytes(leaf: LazyLeaf, index: Any) -> int:
    """Bytes that an index selects. Raises InputError where it does not fit."""
    try:
        return int(np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)[... if index is None else index].nbytes)
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"leaf {leaf.path!r} of shape {leaf.shape}: {error}") from None


def value_record(path: str, leaf: LazyLeaf, value: Any) -> dict[str, Any]:
    dtype, shape = (value.dtype.name, value.shape) if isinstance(value, np.ndarray) else (None, None)
    return {"path": path, "leaf": leaf.path, "kind": leaf.kind, "dtype": dtype, "shape": shape, "value": value}


def print_value(value: Any) -> None:
    if isinstance(value, np.ndarray) and value.ndim:
        click.echo(np.array2string(value, max_line_width=terminal_width() or 80, separator=", "))
    else:
        click.echo(str(value) if isinstance(value, np.ndarray) else repr(value))


def save_npy(leaf: LazyLeaf, index: Any, path: str) -> None:
    """What an index selects, or all, as a .npy file: all goes row by row, so that it may be larger than memory."""
    if leaf.kind in ("str", "bytes"):
        raise InputError(f"leaf {leaf.path!r} is a {leaf.kind}, which is no array")
    parts: Iterable[Array]
    if index is None and leaf.shape:
        shape = leaf.shape
        rows = max(1, Options().host_bytes // max(1, leaf.nbytes // max(1, shape[0])))
        parts = (leaf[row : row + rows] for row in range(0, shape[0], rows))
    else:
        _n_bytes(leaf, index)
        parts = [np.asarray(leaf[... if index is None else index])]
        shape = parts[0].shape
    dtype = plain_dtype(leaf.dtype)
    try:
        with open(f"{path}.part", "wb") as file:
            described = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
            np.lib.format.write_array_header_1_0(file, described)
            for part in parts:
                file.write(np.ascontiguousarray(part, dtype).data)
        os.replace(f"{path}.part", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.part")
        raise
    if dtype != leaf.dtype:
        click.echo(f"{leaf.dtype} is saved as {dtype}, without loss", err=True)
