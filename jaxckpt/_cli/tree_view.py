"""`show` and `cat`: the tree of a checkpoint, and one leaf of it, printed or saved."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import click
import numpy as np

from jaxckpt._cli.inputs import progress_options, require_writable, resolve_leaf, rules_of, selected
from jaxckpt._cli.listing import metrics_of
from jaxckpt._cli.terminal import (
    Column,
    natural_key,
    number_column,
    pick_attributes,
    print_done,
    print_json,
    print_table,
    printable,
    replacing_file,
    show_age,
    show_array,
    show_leaf,
    show_metrics,
    terminal_width,
)
from jaxckpt._formats.npy_file import write_npy_header
from jaxckpt._inspect.open import Checkpoint, LazyLeaf, saved_spec
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._inspect.short_names import shorten_end, shorten_names
from jaxckpt._model.dtypes import npy_dtype
from jaxckpt._model.grid import show_axes, show_spec
from jaxckpt._options import Options
from jaxckpt._pipeline.progress import display_progress, show_bytes
from jaxckpt.errors import InputError, show_count

_SHOWN_BYTES = 16 << 20
"""The most bytes of an array that `cat` prints."""

_SHOWN_PROCESSES = 40
"""The most processes that `show --details` lists."""

_SHOWN_VALUE = 40
"""The most characters of a Python value in a tree."""


def _is_value(leaf: LazyLeaf) -> bool:
    """Whether it is a Python value."""
    return leaf.kind in ("str", "bytes", "int", "float", "bool", "complex")


# The tree -------------------------------------------------------------------------------------------------


def show(
    path: str,
    select: Sequence[str],
    rules: str | None,
    back_to: str | None,
    depth: int | None,
    every: bool,
    flat: bool,
    details: bool,
    sort: str | None,
    as_json: bool,
) -> None:
    if (as_json or flat) and (depth is not None or every):
        raise click.UsageError(f"{'--json' if as_json else '--flat'} lists all leaves: leave out --depth and --all")
    checkpoint = open_checkpoint(path, rename=rules_of(path, rules, back_to))
    leaves = selected(checkpoint, select)
    if as_json:
        print_json(_tree_record(checkpoint, _sorted_leaves(leaves, sort)))
    else:
        ordered = leaves if sort == "bytes" else _sorted_leaves(leaves, sort)  # rows are sorted by their own bytes
        view = _View(flat=flat, expand_all=every or flat, by_bytes=sort == "bytes", one_mesh=len(_meshes(leaves)) == 1)
        _print_tree(path, checkpoint, ordered, depth, view, details=details)


def _sorted_leaves(leaves: Mapping[str, LazyLeaf], sort: str | None) -> Mapping[str, LazyLeaf]:
    """The leaves in the order of `--sort`."""
    match sort:
        case "name":
            return dict(sorted(leaves.items(), key=lambda item: [*map(natural_key, item[0].split("/"))]))
        case "bytes":
            return dict(sorted(leaves.items(), key=lambda item: -item[1].nbytes))
        case _:
            return leaves


def _tree_record(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "save_id": checkpoint.save_id or None,
        "created": checkpoint.created or None,
        **pick_attributes(checkpoint, "libraries metadata step"),
        "metrics": metrics_of(checkpoint),
        **pick_attributes(checkpoint, "dropped"),
        "processes": [{"host": host, "bytes": n_bytes} for host, n_bytes in checkpoint.processes],
        "phase_seconds": checkpoint.phase_seconds,
        "bytes": checkpoint.nbytes,
        "leaves": [_leaf_record(path, leaf) for path, leaf in leaves.items()],
    }


def _leaf_record(path: str, leaf: LazyLeaf) -> dict[str, Any]:
    is_value, reason = _is_value(leaf), leaf.unreadable
    return {
        "path": path,
        "kind": leaf.kind,
        "dtype": None if is_value or reason else leaf.dtype.name,
        "shape": None if is_value or reason else leaf.shape,
        "bytes": 0 if reason else leaf.nbytes,
        **({"unreadable": reason} if reason else {}),
        "spec": saved_spec(leaf) if leaf.mesh else None,
        "mesh": leaf.mesh or None,
        "layout": leaf.layout,
        "value": leaf.value if is_value and not leaf.nbytes else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """How a tree is shown."""

    flat: bool
    """Whether there are no containers: each leaf has its path."""

    expand_all: bool
    """Whether identical containers are shown one by one."""

    by_bytes: bool
    """Whether the children of a container are sorted by their bytes. Otherwise, they keep their order."""

    one_mesh: bool
    """Whether all leaves have the same mesh, which is then not repeated."""


def _print_tree(
    path: str, checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf], depth: int | None, view: _View, *, details: bool
) -> None:
    """Lines about a checkpoint, and the tree of some of its leaves."""
    lines = [*describe(checkpoint, leaves), *(_details(checkpoint) if details else ())]
    name, about = printable(path), [f"  {printable(line)}" for line in lines]
    if (width := terminal_width()) is not None:
        (name,), about = shorten_names([name], width), [shorten_end(line, width) for line in about]
    click.echo("\n".join([name, *about]))
    click.echo()
    if details and checkpoint.processes:
        _print_processes(checkpoint)
        click.echo()
    tree: _Node = {}
    for name, leaf in leaves.items():
        *parents, last = [name] if view.flat else name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    columns = [
        Column("leaf", 12, is_name=True),
        Column("dtype[shape]", 12),
        Column("layout", 10),
        number_column("bytes"),
    ]
    print_table(columns, list(_rows(tree, 0, depth, view, is_single=True)))


def describe(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> Iterator[str]:
    """Lines about a checkpoint with these selected leaves. The first line identifies it."""
    count, size = show_count(len(checkpoint), "leaf"), show_bytes(checkpoint.nbytes)
    if len(leaves) < len(checkpoint):
        chosen = show_bytes(sum(leaf.nbytes for leaf in leaves.values()))
        count, size = f"{len(leaves):,} of {count}", f"{chosen} of {size}"
    saved = f", saved {show_age(checkpoint.created)} ago" if checkpoint.created else ""
    yield f"{checkpoint.format}: {count}, {size}{saved}"
    if checkpoint.step is not None:
        metrics = metrics_of(checkpoint)
        yield f"step {checkpoint.step}{f': {show_metrics(metrics)}' if metrics else ''}"
    if checkpoint.dropped:
        yield f"dropped since: {', '.join(checkpoint.dropped)}"
    for axes in _meshes(leaves):
        yield f"mesh {show_axes(dict(axes))}, {show_count(math.prod(size for _, size in axes), 'device')}"
    if checkpoint.metadata is not None:
        yield f"metadata {json.dumps(checkpoint.metadata, ensure_ascii=False)}"


def _details(checkpoint: Checkpoint) -> Iterator[str]:
    """Lines about the save of a checkpoint."""
    if checkpoint.created:
        yield f"saved {checkpoint.created}, save id {checkpoint.save_id}"
    if checkpoint.libraries:
        yield f"by {', '.join(f'{name} {version}' for name, version in checkpoint.libraries.items())}"
    if checkpoint.processes:
        hosts = len({host for host, _ in checkpoint.processes})
        yield f"from {show_count(len(checkpoint.processes), 'process')} on {show_count(hosts, 'host')}"


def _print_processes(checkpoint: Checkpoint) -> None:
    """The host, bytes, and seconds of each phase, of each process."""
    processes, phases = checkpoint.processes, checkpoint.phase_seconds
    columns = [number_column("process"), Column("host", 8), number_column("wrote"), Column("seconds", 10)]
    rows = [
        [
            str(process),
            printable(host),
            show_bytes(n_bytes),
            ", ".join(f"{_phase(name)} {times[process]:.3f}" for name, times in phases.items() if process < len(times)),
        ]
        for process, (host, n_bytes) in enumerate(processes[:_SHOWN_PROCESSES])
    ]
    print_table(columns, rows)
    if len(processes) > _SHOWN_PROCESSES:
        click.echo(f"… and {len(processes) - _SHOWN_PROCESSES:,} more; --json has all")


def _phase(name: str) -> str:
    return printable(name.replace("_", " "))


def _meshes(leaves: Mapping[str, LazyLeaf]) -> Sequence[tuple[tuple[str, int], ...]]:
    """The axes of each mesh of these leaves."""
    return list(dict.fromkeys(tuple(leaf.mesh.items()) for leaf in leaves.values() if leaf.mesh))


_Node = dict[str, Any]
"""Children by path component: leaves, or nodes."""


def _rows(node: _Node, level: int, depth: int | None, view: _View, *, is_single: bool) -> Iterator[list[str]]:
    """The rows of a container's children, down to `depth` levels of containers.

    Consecutive identical children share a row, and so does a chain of containers with a single child. `is_single` is
    false for the children of several containers, whose values may differ.
    """
    groups = [[name] for name in node] if view.expand_all else _group_runs(node, view.one_mesh)
    if view.by_bytes:
        groups.sort(key=lambda names: -_bytes_below(node, names))
    for names in groups:
        child, levels_left, alone = node[names[0]], depth, is_single and len(names) == 1
        label, head = "  " * level + _run_label(names), f"{len(names)} × " if len(names) > 1 else ""
        while not view.expand_all and isinstance(child, dict) and len(cast("_Node", child)) == 1 and levels_left != 1:
            ((name, child),) = cast("_Node", child).items()
            label, levels_left = f"{label}/{name}", levels_left and levels_left - 1
        size = show_bytes(_bytes_below(node, names))
        if isinstance(child, dict):
            count = sum(1 for _ in _leaves_below(cast("_Node", child)))
            yield [f"{label}/", f"{head}{show_count(count, 'leaf')}", "", size]
            if levels_left != 1:
                yield from _rows(
                    cast("_Node", child), level + 1, levels_left and levels_left - 1, view, is_single=alone
                )
        else:
            contents, layout = _leaf_texts(child, view.one_mesh) if alone or not _is_value(child) else (child.kind, "")
            yield [
                show_leaf(label),
                f"{head}{contents}",
                layout,
                "" if child.unreadable or (_is_value(child) and not child.nbytes) else size,
            ]


def _bytes_below(node: _Node, names: Sequence[str]) -> int:
    return sum(leaf.nbytes for name in names for leaf in _leaves_below(node[name]))


def _leaves_below(node: Any) -> Iterator[LazyLeaf]:
    if isinstance(node, dict):
        for child in node.values():  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves_below(child)
    else:
        yield node


def _group_runs(node: _Node, one_mesh: bool) -> list[list[str]]:
    """The names of children in groups: three or more consecutive identical children form one group."""

    def form(child: Any) -> Any:
        if not isinstance(child, dict):
            return (None,) if _is_value(child) else _leaf_texts(child, one_mesh)
        return tuple((name, form(below)) for name, below in child.items())  # pyright: ignore[reportUnknownVariableType]

    runs: list[list[str]] = []
    previous: Any = None
    for name in node:
        own = form(node[name])
        # Leaves with different names differ, unless the names are numbers.
        if runs and own == previous and own != (None,) and (isinstance(node[name], dict) or name.isdecimal()):
            runs[-1].append(name)
        else:
            runs.append([name])
        previous = own
    return [group for run in runs for group in ([run] if len(run) > 2 else [[name] for name in run])]


def _run_label(names: Sequence[str]) -> str:
    ordered = sorted(names, key=natural_key)
    return names[0] if len(names) == 1 else f"{ordered[0]} … {ordered[-1]}"


def _leaf_texts(leaf: LazyLeaf, one_mesh: bool) -> tuple[str, str]:
    """(dtype and shape, or kind and value; layout)."""
    if _is_value(leaf):
        return leaf.kind if leaf.nbytes else shorten_end(f"{leaf.kind} {leaf.value!r}", _SHOWN_VALUE), ""
    if leaf.unreadable:
        return "unreadable", shorten_end(leaf.unreadable, _SHOWN_VALUE)
    layout = show_spec(saved_spec(leaf)) if leaf.mesh and one_mesh else leaf.layout
    return f"{'key ' if leaf.kind == 'key' else ''}{show_array(leaf.dtype.name, leaf.shape)}", layout


# A leaf ---------------------------------------------------------------------------------------------------


def cat(path: str, leaf: str, save: str | None, overwrite: bool, progress: bool, as_json: bool) -> None:
    if overwrite and save is None:
        raise click.UsageError("--overwrite is for --save: nothing else is written")
    checkpoint = open_checkpoint(path)
    lazy_leaf, index = resolve_leaf(checkpoint, leaf)
    if save is not None:
        require_writable(save, ".npy", checkpoint.path, overwrite=overwrite)
        dtype, shape = _save_npy(lazy_leaf, index, save, progress_options(progress))
        size = math.prod(shape) * dtype.itemsize
        loss = "" if dtype == lazy_leaf.dtype else f" as {dtype}, without loss"
        record = {"path": path, "leaf": lazy_leaf.path, "saved": save, "dtype": dtype.name, "shape": shape}
        text = f"{show_leaf(leaf)} → {save}: {show_array(lazy_leaf.dtype.name, shape)}{loss}, {show_bytes(size)}"
        print_done(text, {**record, "bytes": size}, as_json, written=save)
        return
    value = _read_value(lazy_leaf, index, show_leaf(leaf))
    is_array = isinstance(value, np.ndarray)
    if as_json:
        dtype, shape = (value.dtype.name, value.shape) if is_array else (None, None)
        named = {"path": path, "leaf": lazy_leaf.path, "kind": lazy_leaf.kind}
        print_json({**named, "dtype": dtype, "shape": shape, "value": value})
    elif is_array and value.ndim:
        click.echo(np.array2string(value, max_line_width=terminal_width() or 80, separator=", "))
    else:
        click.echo(str(value) if is_array else repr(value))


def _read_value(leaf: LazyLeaf, index: Any, name: str) -> Any:
    """A Python value, or the part of an array that an index selects. `name` is the user's name for it.

    Raises InputError if the index does not fit, or selects too many elements to print.
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
    """Bytes that an index selects. Raises InputError if it does not fit."""
    try:
        return int(np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)[... if index is None else index].nbytes)
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"leaf {leaf.path!r} of shape {leaf.shape}: {error}") from None


def _save_npy(leaf: LazyLeaf, index: Any, path: str, options: Options) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Write the part that an index selects, or the whole leaf, as a .npy file; returns its dtype and shape. The whole
    leaf is written in slabs, because it may be larger than memory."""
    if leaf.kind in ("str", "bytes"):
        raise InputError(f"leaf {leaf.path!r} is a {leaf.kind}, which is not an array")
    shape, slabs = leaf.shape, leaf.slabs()
    if index is not None:
        _n_bytes(leaf, index)
        selection = np.asarray(leaf[index])
        shape, slabs = selection.shape, iter([selection])
    dtype = npy_dtype(leaf.dtype)
    total = math.prod(shape) * leaf.dtype.itemsize
    with replacing_file(path) as file, display_progress("cat", total, options.progress) as report:
        write_npy_header(file, dtype, shape)
        for slab in slabs:
            file.write(np.ascontiguousarray(slab, dtype).data)
            report(slab.nbytes)
    return dtype, shape
