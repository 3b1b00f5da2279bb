"""The command line: each command asks a public function, and shows what it says as a table or as JSON."""

from __future__ import annotations

import ast
import collections
import contextlib
import datetime
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np
from click.shell_completion import CompletionItem
from jax.sharding import PartitionSpec

from jaxckpt._audit import Checkpoint, LazyLeaf, ProcessPlan, RestorePlan
from jaxckpt._audit import open as open_checkpoint
from jaxckpt._convert import convert as convert_checkpoint
from jaxckpt._convert import integrate as integrate_ranks
from jaxckpt._diff import LeafDelta
from jaxckpt._diff import diff as diff_checkpoints
from jaxckpt._errors import (
    CheckpointExistsError,
    CorruptError,
    InputError,
    JaxckptError,
    NotACheckpointError,
    StorageError,
)
from jaxckpt._grid import show_axes, show_spec, spec_of
from jaxckpt._options import Options
from jaxckpt._place import store_at
from jaxckpt._progress import show_bytes
from jaxckpt._report import report as report_on
from jaxckpt._store import Array, Store, is_data
from jaxckpt._terminal import (
    Column,
    elided,
    elided_middle,
    plain_dtype,
    print_json,
    print_table,
    printable,
    terminal_width,
)
from jaxckpt._tree import Tree, nested, renamer, selector
from jaxckpt._verify import verify as verify_checkpoint

NO, BAD_INPUT, DAMAGED, NOT_THERE, STORAGE, BUG = 1, 2, 3, 4, 5, 70
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

_EXIT_CODES = """\b
Exit codes:
  0    all is well
  1    the answer is no: verify found problems, diff found differences,
       rm was not confirmed
  2    bad arguments, or a destination that is there already
  3    the checkpoint is damaged
  4    there is no checkpoint at the path
  5    the file system or object store refused
  70   a bug of jaxckpt
  130  interrupted (Ctrl-C)
  141  nobody reads the output any more (| head)
"""

_NEWLINE = "\n"

_SHOWN_BYTES = 16 << 20
"""Of an array that `cat` shows."""

_SHOWN_VALUE = 40
"""Characters of a value of Python's in a tree."""

_SHOWN_ROWS = 40
"""Of processes or leaves in a plan: the rest is counted."""


class _Program(click.Group):
    """Turns every error into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        with contextlib.suppress(AttributeError, ValueError):  # a stream that was put in their place may be any
            sys.stdout.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except BrokenPipeError:
            # Whatever is still to be flushed at exit goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None
        except (KeyboardInterrupt, click.Abort) as stop:
            # At a prompt click turns one into the other.
            interrupted = isinstance(stop, KeyboardInterrupt) or isinstance(stop.__context__, KeyboardInterrupt)
            click.echo("" if interrupted else "jaxckpt: not confirmed, nothing was done", err=True)
            raise click.exceptions.Exit(INTERRUPTED if interrupted else NO) from None
        except Exception as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            message, exit_code = _told(error)
            click.echo(f"jaxckpt: {printable(message, keep=_NEWLINE)}", err=True)
            raise click.exceptions.Exit(exit_code) from error
        return result


def _told(error: Exception) -> tuple[str, int]:
    """(message, exit code) of an error."""
    match error:
        case InputError() | CheckpointExistsError():
            return str(error).replace("pass overwrite=True to replace", "--overwrite replaces"), BAD_INPUT
        case CorruptError():
            return str(error), DAMAGED
        case NotACheckpointError():
            return str(error), NOT_THERE
        case JaxckptError() | OSError():
            return str(error), STORAGE
        case _:
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            return f"unexpected {told}\nThis is a bug; --debug shows where.", BUG


# Arguments ------------------------------------------------------------------------------------------------


def _axes(text: str) -> dict[str, int]:
    """data=4,model=2."""
    axes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().rpartition("=")
        if not axis or not size.isdecimal() or int(size) < 1 or axis in axes:
            raise click.BadParameter(f"{text!r}: expected axis sizes such as data=4,model=2")
        axes[axis] = int(size)
    return axes


def _n_bytes(text: str) -> int:
    """65536, 64KiB, 1MiB."""
    found = re.fullmatch(r"(\d+)\s*(|[KMG]iB)", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{text!r}: expected bytes, such as 65536, 64KiB or 1MiB")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2][:1].lower()]


def _rule(text: str) -> tuple[str | None, tuple[Any, ...]]:
    """(glob or None, the entries of the spec) of GLOB=P(…), or P(…) for all leaves."""
    found = re.fullmatch(r"(?:(.+?)=)?\s*((?:P|PartitionSpec)\(.*\))\s*", text, re.DOTALL)
    with contextlib.suppress(ValueError, SyntaxError):
        call = ast.parse(found[2], mode="eval").body if found else None
        if isinstance(call, ast.Call) and not call.keywords:
            entries = tuple(ast.literal_eval(entry) for entry in call.args)
            if all(_is_entry(entry) for entry in entries):
                return found[1] if found else None, entries
    raise click.BadParameter(f"{text!r}: expected a spec such as 'params/*/kernel=P(\"data\", None)'")


def _is_entry(entry: Any) -> bool:
    """Whether it is what a PartitionSpec takes for a dimension."""
    return entry is None or isinstance(entry, str) or (isinstance(entry, tuple) and all(map(_is_name, entry)))  # pyright: ignore[reportUnknownArgumentType]


def _is_name(name: object) -> bool:
    return isinstance(name, str)


def _old_and_new(text: str) -> tuple[str, str]:
    """OLD=NEW."""
    old, separator, new = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r}: expected OLD=NEW, two paths of leaves or containers")
    return old, new


def _complete_leaf(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Paths of leaves of the checkpoint that was named before, one component at a time, as shells complete folders."""

    path = str(ctx.params.get("path") or "")
    if "://" in path:  # nobody waits for a network at each press of a key
        return []
    try:
        leaves = open_checkpoint(path).leaves
    except (JaxckptError, OSError):
        return []
    ends: set[str] = set()
    for leaf in leaves:
        if leaf.startswith(incomplete):
            slash = leaf.find("/", len(incomplete))
            ends.add(leaf if slash < 0 else leaf[: slash + 1])
    return [CompletionItem(end) for end in sorted(ends)]


def _note_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug", False) or value


_MESH = "AXIS=SIZE,…"
_path = click.argument("path", type=click.Path(path_type=str))
_select = click.option("--select", multiple=True, metavar="GLOB", help="Only leaves at or below it; may be repeated.")
_mesh = click.option("--mesh", type=_axes, metavar=_MESH, help="Axis sizes of the mesh: data=4,model=2.")
_specs = click.option(
    "--specs",
    type=_rule,
    multiple=True,
    metavar="[GLOB=]P(…)",
    help="PartitionSpec of the leaves at or below GLOB, by default of all; the first that fits a leaf counts. Leaves"
    " that none fits keep their own, by axis name.",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
_debug = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show the traceback of an error."
)


@click.group(cls=_Program, epilog=_EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxckpt")
@_debug
def main() -> None:
    """Look into jaxckpt checkpoints, check, compare, plan, convert and delete them.

    A PATH is a folder or file, or a URL such as s3://bucket/run1/00000100. Checkpoints of other libraries that jaxckpt
    opens are fine everywhere but in rm.
    """


# ls -------------------------------------------------------------------------------------------------------


@main.command()
@_path
@_json
@_debug
def ls(path: str, as_json: bool) -> None:
    """List the checkpoints in a folder: size, age, metrics.

    Nothing is changed, whatever a killed run has left. Of a checkpoint itself, it lists that alone.
    """
    found = _listed(path)
    if as_json:
        print_json({"path": path, "checkpoints": found})
        return
    with_dropped = any(entry["dropped"] for entry in found)
    columns = [
        Column("name", least=16, middle=True),
        Column("format"),
        Column("leaves", right=True),
        Column("size", right=True),
        Column("age", right=True),
        Column("metrics", least=10),
        *([Column("dropped", least=10)] if with_dropped else []),
    ]
    rows: list[list[str]] = []
    for entry in found:
        if entry["status"] != "ok":
            rows.append([entry["name"], entry["status"], *[""] * (len(columns) - 2)])
            continue
        row = [
            entry["name"],
            entry["format"],
            f"{entry['leaves']:,}",
            show_bytes(entry["bytes"]),
            _age(entry["created"]),
            _named(entry["metrics"]),
        ]
        rows.append([*row, ", ".join(entry["dropped"])] if with_dropped else row)
    print_table(columns, rows)
    for entry in found:
        if entry["problem"]:
            click.echo(printable(f"{entry['name']}: {entry['problem']}"), err=True)


def _listed(path: str) -> list[dict[str, Any]]:
    """The checkpoint at a path, or those in it. Raises NotACheckpointError where there is none."""

    store = store_at(path, Options())
    checkpoint: Checkpoint | None = None
    nothing: NotACheckpointError | None = None
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpointError as error:
        nothing = error
    except CorruptError:
        return [_entry(path)]  # with its problem
    if checkpoint is not None and (checkpoint.format == "jaxckpt" or _stands_alone(path, checkpoint, store)):
        return [_entry(path)]
    # On an object store the first costs a request for each checkpoint, the other one for each thousand objects.
    names = list(store.folders()) or store.names()
    entries = [_entry(store.child(name).url) for name in sorted(names, key=_natural)]
    found = [entry for entry in entries if entry["status"] != "none"]
    if not found and nothing is not None:
        raise nothing
    return found


def _stands_alone(path: str, checkpoint: Checkpoint, store: Store) -> bool:
    """Whether a checkpoint of another library is no folder of others.

    A folder of steps may open as the newest of them, and one with some exported file in it as that.
    """
    return not any(store.folders().values()) and _absolute(path) == _absolute(checkpoint.path)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def _entry(path: str) -> dict[str, Any]:
    """A checkpoint in a list; of status "none" where there is none, not even one that was begun."""

    name = os.path.basename(path.rstrip("/"))
    entry: dict[str, Any] = {
        "name": name,
        "path": path,
        "status": "ok",
        "format": None,
        "step": int(name) if name.isdecimal() else None,
        "leaves": None,
        "bytes": None,
        "created": None,
        "metrics": {},
        "dropped": [],
        "problem": None,
    }
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpointError:
        if not any(map(is_data, store_at(path, Options()).names())):
            return {**entry, "status": "none"}
        return {**entry, "status": "unfinished", "problem": "a save to it is going on, or never finished"}
    except (CorruptError, InputError, StorageError) as error:
        return {
            **entry,
            "status": "damaged" if isinstance(error, CorruptError) else "unreadable",
            "problem": str(error),
        }
    return {
        **entry,
        "format": checkpoint.format,
        "step": entry["step"] if checkpoint.step is None else checkpoint.step,
        "leaves": len(checkpoint),
        "bytes": checkpoint.nbytes,
        "created": checkpoint.created or None,
        "metrics": _metrics(checkpoint),
        "dropped": list(checkpoint.dropped),
    }


def _metrics(checkpoint: Checkpoint) -> dict[str, float | None]:
    """Its metrics; of another library's checkpoint the numbers that its metadata has under that name."""
    found: Any = checkpoint.metadata
    if checkpoint.format == "jaxckpt" or not isinstance(found, dict):
        return dict(checkpoint.metrics)
    found = found.get("metrics")  # pyright: ignore[reportUnknownMemberType]
    return {name: value for name, value in found.items() if isinstance(value, int | float)} if found else {}


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


# show -----------------------------------------------------------------------------------------------------


@main.command()
@_path
@_select
@click.option("--depth", type=click.IntRange(min=1), help="Show containers down to this level only.")
@click.option("--all", "every", is_flag=True, help="Show alike containers, such as layers, each by itself.")
@_json
@_debug
def show(path: str, select: tuple[str, ...], depth: int | None, every: bool, as_json: bool) -> None:
    """Show the tree: shapes, dtypes, specs and bytes. No array is read.

    \b
    jaxckpt show run1/00000100
    jaxckpt show run1/00000100 --select 'params/**/kernel' --depth 2
    """

    checkpoint = open_checkpoint(path)
    leaves = _selected(checkpoint, select)
    if as_json:
        print_json(_described(checkpoint, leaves))
        return
    width = terminal_width()
    click.echo(elided_middle(printable(path), width))
    for line in _facts(checkpoint, leaves):
        click.echo(elided(f"  {printable(line)}", width))
    click.echo()
    meshes = {tuple(leaf.mesh.items()) for leaf in leaves.values() if leaf.mesh}
    rows = list(_tree_rows(_nested(leaves), 0, depth, every, one_mesh=len(meshes) == 1))
    columns = [
        Column("leaf", least=12, middle=True),
        Column("dtype[shape]", least=12),
        Column("layout", least=10),
        Column("bytes", right=True),
    ]
    print_table(columns, rows)


def _selected(checkpoint: Checkpoint, select: Sequence[str]) -> dict[str, LazyLeaf]:

    leaves = checkpoint.leaves
    wanted = selector(select or None)
    chosen = {path: leaf for path, leaf in leaves.items() if wanted(path)}
    if select and not chosen:
        raise InputError(f"--select {' '.join(select)} matches none of the {len(leaves)} leaves")
    return chosen


def _described(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> dict[str, Any]:
    return {
        "path": checkpoint.path,
        "format": checkpoint.format,
        "save_id": checkpoint.save_id or None,
        "created": checkpoint.created or None,
        "libraries": dict(checkpoint.libraries),
        "metadata": checkpoint.metadata,
        "step": checkpoint.step,
        "metrics": dict(checkpoint.metrics),
        "dropped": list(checkpoint.dropped),
        "bytes": checkpoint.nbytes,
        "leaves": [
            {
                "path": path,
                "kind": leaf.kind,
                "dtype": None if _is_value(leaf) else leaf.dtype.name,
                "shape": None if _is_value(leaf) else list(leaf.shape),
                "bytes": leaf.nbytes,
                "spec": [_axes_of(entry) for entry in leaf.spec] if leaf.mesh else None,
                "mesh": dict(leaf.mesh) or None,
                "layout": leaf.layout,
                "value": leaf.value if _is_value(leaf) and not leaf.nbytes else None,
            }
            for path, leaf in leaves.items()
        ],
    }


def _is_value(leaf: LazyLeaf) -> bool:
    return leaf.kind in ("str", "bytes", "int", "float", "bool", "complex")


def _axes_of(entry: Any) -> list[str]:
    return [] if entry is None else [entry] if isinstance(entry, str) else list(entry)


def _facts(checkpoint: Checkpoint, leaves: Mapping[str, LazyLeaf]) -> Iterator[str]:
    count, size = f"{len(checkpoint):,}", show_bytes(checkpoint.nbytes)
    if len(leaves) < len(checkpoint):
        chosen = show_bytes(sum(leaf.nbytes for leaf in leaves.values()))
        count, size = f"{len(leaves):,} of {count}", f"{chosen} of {size}"
    saved = f", saved {_age(checkpoint.created)} ago" if checkpoint.created else ""
    yield f"{checkpoint.format}: {count} leaves, {size}{saved}"
    if checkpoint.step is not None:
        metrics = f": {_named(checkpoint.metrics)}" if checkpoint.metrics else ""
        yield f"step {checkpoint.step}{metrics}"
    if checkpoint.dropped:
        yield f"dropped since: {', '.join(checkpoint.dropped)}"
    for axes in dict.fromkeys(tuple(leaf.mesh.items()) for leaf in leaves.values() if leaf.mesh):
        yield f"mesh {_show_axes(dict(axes))}, {math.prod(size for _, size in axes)} devices"
    if checkpoint.metadata is not None:
        yield f"metadata {json.dumps(checkpoint.metadata, ensure_ascii=False)}"


def _show_axes(axes: Mapping[str, int]) -> str:

    return show_axes(axes)


_Node = dict[str, Any]
"""Children by component of their path: leaves, or nodes."""


def _nested(leaves: Mapping[str, LazyLeaf]) -> _Node:
    root: _Node = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def _tree_rows(node: _Node, level: int, depth: int | None, every: bool, *, one_mesh: bool) -> Iterator[list[str]]:
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
                yield from _tree_rows(child, level + 1, depth, every, one_mesh=one_mesh)
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
    ordered = sorted(names, key=_natural)
    return names[0] if len(names) == 1 else f"{ordered[0]} … {ordered[-1]}"


def _leaf_texts(leaf: LazyLeaf, one_mesh: bool) -> tuple[str, str]:
    """(dtype and shape, or kind and value; layout)."""

    if _is_value(leaf):
        return leaf.kind if leaf.nbytes else elided(f"{leaf.kind} {leaf.value!r}", _SHOWN_VALUE), ""
    layout = show_spec(spec_of(leaf.spec)) if leaf.mesh and one_mesh else leaf.layout
    return f"{'key ' if leaf.kind == 'key' else ''}{_shaped(leaf.dtype.name, leaf.shape)}", layout


def _shaped(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}" if shape else dtype


# cat ------------------------------------------------------------------------------------------------------


@main.command()
@_path
@click.argument("leaf", shell_complete=_complete_leaf)
@click.option("--save", type=click.Path(dir_okay=False, path_type=str), help="Write it to a .npy file instead.")
@_json
@_debug
def cat(path: str, leaf: str, save: str | None, as_json: bool) -> None:
    """Print a leaf, or a part of it. Only the chunks that are touched are read.

    \b
    jaxckpt cat run1/00000100 step
    jaxckpt cat run1/00000100 'params/w[8:16, 0]'
    jaxckpt cat run1/00000100 params/w --save w.npy

    An index is of integers, slices and "...". A .npy file holds bfloat16 and other dtypes that NumPy lacks as float32,
    int4 as int8: no value is lost.
    """

    name, index, found = _indexed(open_checkpoint(path), leaf)
    if save is not None:
        _save_npy(found, index, save)
        if as_json:
            print_json({"path": path, "leaf": name, "saved": save})
        return
    if _is_value(found):
        if index is not None:
            raise InputError(f"leaf {name!r} is a {found.kind}, which takes no index")
        value, dtype, shape = found.value, None, None
    else:
        size = _size_of(found, index)
        if size > _SHOWN_BYTES:
            raise InputError(f"{leaf} is {show_bytes(size)}, too much to print: give an index, or --save FILE.npy")
        value = np.asarray(found[... if index is None else index])
        dtype, shape = value.dtype.name, list(value.shape)
    if as_json:
        print_json({"path": path, "leaf": name, "kind": found.kind, "dtype": dtype, "shape": shape, "value": value})
    elif isinstance(value, np.ndarray) and value.ndim:
        click.echo(np.array2string(value, max_line_width=terminal_width() or 80, separator=", "))
    else:
        click.echo(str(value) if isinstance(value, np.ndarray) else repr(value))


def _indexed(checkpoint: Checkpoint, text: str) -> tuple[str, Any, LazyLeaf]:
    """(path of the leaf, index or None, leaf) of `LEAF` or `LEAF[index]`; a leaf's own name may have brackets."""
    found = None if text in checkpoint else re.fullmatch(r"(.*?)\[([^\[\]]*)\]", text, re.DOTALL)
    name = found[1] if found else text
    try:
        return name, _index(found[2]) if found else None, checkpoint[name]
    except KeyError as error:
        raise InputError(str(error.args[0])) from None


def _index(text: str) -> tuple[Any, ...]:
    try:
        return tuple(_index_entry(entry.strip()) for entry in text.rstrip().removesuffix(",").split(","))
    except ValueError:
        raise InputError(f"index [{text}]: expected integers, slices and ..., such as [8:16, 0]") from None


def _index_entry(text: str) -> Any:
    if text == "...":
        return ...
    parts = [int(part) if part.strip() else None for part in text.split(":")]
    if len(parts) > 1:
        return slice(*parts)
    if parts[0] is None:
        raise ValueError(text)
    return parts[0]


def _size_of(leaf: LazyLeaf, index: Any) -> int:
    """Bytes that an index selects. Raises InputError where it does not fit."""

    try:
        return int(np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)[... if index is None else index].nbytes)
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"leaf {leaf.path!r} of shape {leaf.shape}: {error}") from None


def _save_npy(leaf: LazyLeaf, index: Any, path: str) -> None:
    """Row by row where all is wanted, so that a leaf may be larger than memory."""

    if leaf.kind in ("str", "bytes"):
        raise InputError(f"leaf {leaf.path!r} is a {leaf.kind}, which is no array")
    parts: Iterable[Array]
    if index is None and leaf.shape:
        shape = leaf.shape
        rows = max(1, Options().host_bytes // max(1, leaf.nbytes // max(1, shape[0])))
        parts = (leaf[row : row + rows] for row in range(0, shape[0], rows))
    else:
        _size_of(leaf, index)
        parts = [np.asarray(leaf[... if index is None else index])]
        shape = parts[0].shape
    dtype = plain_dtype(leaf.dtype)
    with open(f"{path}.part", "wb") as file:
        described = {"descr": dtype.str, "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(file, described)
        for part in parts:
            file.write(np.ascontiguousarray(part, dtype).data)
    os.replace(f"{path}.part", path)
    if dtype != leaf.dtype:
        click.echo(f"{leaf.dtype} is saved as {dtype}, without loss", err=True)


# verify, diff ---------------------------------------------------------------------------------------------


@main.command()
@_path
@click.option("--quick", is_flag=True, help="Only whether each file is there and of its length.")
@_json
@_debug
def verify(path: str, quick: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint and check it. Exit code 1 where anything is not as it was saved."""

    report = verify_checkpoint(path, quick=quick, options=_options())
    if as_json:
        problems = [
            {"leaf": found.leaf, "box": found.box, "object": found.object, "reason": found.reason}
            for found in report.problems
        ]
        counts = {"leaves": report.leaves, "objects": report.objects, "checked_bytes": report.checked_bytes}
        print_json({"path": report.path, "ok": report.ok, "quick": quick, **counts, "problems": problems})
    else:
        click.echo(printable(str(report), keep=_NEWLINE))
    if not report.ok:
        raise click.exceptions.Exit(NO)


@main.command()
@click.argument("a", type=click.Path(path_type=str))
@click.argument("b", type=click.Path(path_type=str))
@_select
@_json
@_debug
def diff(a: str, b: str, select: tuple[str, ...], as_json: bool) -> None:
    """Compare two checkpoints leaf by leaf. Meshes and formats do not matter; exit code 1 where they differ."""

    delta = diff_checkpoints(a, b, select=select or None, options=_options())
    if as_json:
        differing = [
            {
                "path": leaf.path,
                "a": leaf.a or None,
                "b": leaf.b or None,
                "size": leaf.size,
                "differing": leaf.differing,
                "max_abs": leaf.max_abs,
                "max_rel": leaf.max_rel,
            }
            for leaf in delta.differing
        ]
        print_json(
            {
                "a": delta.path_a,
                "b": delta.path_b,
                "identical": delta.identical,
                "same_structure": delta.same_structure,
                "leaves": len(delta.leaves),
                "differing": differing,
            }
        )
    elif delta.identical:
        click.echo(f"identical: {len(delta.leaves):,} leaves, bit by bit")
    else:
        structure = "" if delta.same_structure else "; the containers differ too"
        click.echo(f"{len(delta.differing):,} of {len(delta.leaves):,} leaves differ{structure}")
        columns = [
            Column("leaf", least=16, middle=True),
            Column("a", least=10),
            Column("b", least=10),
            Column("elements", right=True),
            Column("max |a−b|", right=True),
            Column("relative", right=True),
        ]
        print_table(columns, [_delta_row(leaf) for leaf in delta.differing])
    if not delta.identical:
        raise click.exceptions.Exit(NO)


def _delta_row(leaf: LeafDelta) -> list[str]:
    same = "same" if leaf.a == leaf.b else leaf.b
    if not leaf.size:
        return [leaf.path, leaf.a or "not there", same or "not there", "", "", ""]
    share = f"{leaf.differing:,} of {leaf.size:,}"
    if not leaf.max_abs:  # texts, or bits that mean one number, such as 0.0 and -0.0
        return [leaf.path, leaf.a, same, share, "", ""]
    return [leaf.path, leaf.a, same, share, f"{leaf.max_abs:.4g}", f"{leaf.max_rel:.3g}"]


# plan -----------------------------------------------------------------------------------------------------


@main.command()
@_path
@click.option("--mesh", type=_axes, metavar=_MESH, required=True, help="Axis sizes of the mesh: data=4,model=2.")
@_specs
@_select
@click.option(
    "--devices-per-process", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of each process."
)
@_json
@_debug
def plan(
    path: str, mesh: Mapping[str, int], specs: Any, select: tuple[str, ...], devices_per_process: int, as_json: bool
) -> None:
    """Tell what a restore onto a mesh would read. Nothing is read, and the mesh need not be here.

    \b
    jaxckpt plan run1/00000100 --mesh data=4,model=2
    jaxckpt plan run1/00000100 --mesh model=8 --specs 'params/**/kernel=P(None, "model")'
    """

    checkpoint = open_checkpoint(path)
    found = checkpoint.plan(
        mesh=mesh,
        specs=_prefix(checkpoint, specs, select, {}),
        select=select or None,
        devices_per_process=devices_per_process,
    )
    if as_json:
        print_json({"path": path, "mesh": mesh, **_planned(found)})
    else:
        _print_plan(found)


def _prefix(
    checkpoint: Checkpoint, rules: Sequence[tuple[str | None, Any]], select: Sequence[str], rename: Mapping[str, str]
) -> Tree:
    """The specs of those leaves that a rule fits, as nested dicts of their new paths; None without rules."""

    if not rules:
        return None
    renamed, chosen = renamer(rename or None), selector(select or None)
    # Of the others, which go to no device, none has a spec.
    paths = [renamed(path) for path, leaf in checkpoint.leaves.items() if leaf.kind in ("jax", "key") and chosen(path)]
    tests = [(glob, selector(glob), PartitionSpec(*entries)) for glob, entries in rules]
    found: dict[str, Any] = {}
    for glob, fits, spec in tests:
        matched = [path for path in paths if fits(path)]
        if not matched:
            raise InputError(f"--specs {glob or spec}: no array is there or below")
        for path in matched:
            found.setdefault(path, spec)
    return nested(found)


def _planned(plan: RestorePlan) -> dict[str, Any]:
    return {
        "needed_bytes": plan.needed_bytes,
        "read_bytes": plan.read_bytes,
        "over_read": plan.over_read,
        "requests": plan.requests,
        "peak_host_bytes": plan.peak_host_bytes,
        "processes": [
            {
                "process": part.process,
                "needed_bytes": part.cost.needed_bytes,
                "read_bytes": part.cost.read_bytes,
                "requests": part.cost.requests,
                "peak_host_bytes": part.cost.peak_host_bytes,
                "device_bytes": {str(device): size for device, size in part.device_bytes.items()},
            }
            for part in plan.processes
        ],
        "leaves": [
            {
                "path": leaf.path,
                "dtype": leaf.dtype,
                "shape": leaf.shape,
                "saved": {"spec": leaf.saved.spec, "on": leaf.saved.on},
                "wanted": {"spec": leaf.wanted.spec, "on": leaf.wanted.on},
            }
            for leaf in plan.leaves
        ],
    }


def _print_plan(plan: RestorePlan) -> None:
    devices = sum(len(part.device_bytes) for part in plan.processes)
    click.echo(
        f"{len(plan.leaves):,} arrays onto {_many(devices, 'device')} of {_many(len(plan.processes), 'process')}"
    )
    click.echo()
    titles = ["process", "needed", "read", "over-read", "requests", "host memory", "each device"]
    rows = [_process_row(part) for part in plan.processes[:_SHOWN_ROWS]]
    if len(plan.processes) > _SHOWN_ROWS:
        rows.append([f"… {len(plan.processes) - _SHOWN_ROWS:,} more", *[""] * (len(titles) - 1)])
    if len(plan.processes) > 1:
        sizes = [show_bytes(plan.needed_bytes), show_bytes(plan.read_bytes), f"{plan.over_read:.3f} ×"]
        rows.append(["all", *sizes, f"{plan.requests:,}", "", ""])
    print_table([Column(title, right=True) for title in titles], rows)
    click.echo()
    moves = collections.Counter((leaf.saved.on, leaf.wanted.on) for leaf in plan.leaves)
    for (before, after), count in moves.most_common():
        click.echo(printable(f"{before} → {after}: {_many(count, 'array')}"))
    groups: dict[Any, list[str]] = {}
    for leaf in plan.leaves:
        before, after = (where.spec or where.on for where in (leaf.saved, leaf.wanted))
        wanted = "same" if before == after else after
        form = (_numberless(leaf.path), _shaped(leaf.dtype, leaf.shape), before, wanted)
        groups.setdefault(form, []).append(leaf.path)
    if not groups:
        return
    click.echo()
    columns = [
        Column("leaf", least=20, middle=True),
        Column("dtype[shape]", least=12),
        Column("saved", least=12),
        Column("wanted", least=12),
    ]
    rows = [
        [pattern, f"{len(paths)} × {what}", before, wanted] if len(paths) > 1 else [paths[0], what, before, wanted]
        for (pattern, what, before, wanted), paths in groups.items()
    ]
    print_table(columns, rows[:_SHOWN_ROWS])
    if len(rows) > _SHOWN_ROWS:
        click.echo(f"… and {len(rows) - _SHOWN_ROWS:,} more; --json has all")


def _numberless(path: str) -> str:
    """A path as the glob of all that differ from it in numbers alone, as layers do."""
    return "/".join("*" if part.isdecimal() else part for part in path.split("/"))


def _process_row(part: ProcessPlan) -> list[str]:
    cost = part.cost
    over_read = cost.read_bytes / cost.needed_bytes if cost.needed_bytes else 1.0
    sizes = sorted(part.device_bytes.values())
    ends = list(dict.fromkeys(show_bytes(size) for size in (sizes[0], sizes[-1]))) if sizes else []
    return [
        str(part.process),
        show_bytes(cost.needed_bytes),
        show_bytes(cost.read_bytes),
        f"{over_read:.3f} ×",
        f"{cost.requests:,}",
        show_bytes(cost.peak_host_bytes),
        " – ".join(ends),
    ]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _require_mesh(mesh: Mapping[str, int] | None, rules: Sequence[Any]) -> None:
    if rules and not mesh:
        raise click.UsageError("--specs needs --mesh, whose axes they name")


# convert, report, rm --------------------------------------------------------------------------------------


@main.command()
@click.argument("source", type=click.Path(path_type=str))
@click.argument("destination", type=click.Path(path_type=str))
@click.option(
    "--format", help="jaxckpt, safetensors, npz, zarr or orbax; by default it follows from DESTINATION's suffix."
)
@_mesh
@_specs
@_select
@click.option(
    "--rename", type=_old_and_new, metavar="OLD=NEW", multiple=True, help="A leaf or container by its old and new path."
)
@click.option("--chunk-bytes", type=_n_bytes, metavar="SIZE", help="Bytes of one chunk, about: 64KiB.")
@click.option("--overwrite", is_flag=True, help="Replace what is at DESTINATION.")
@_json
@_debug
def convert(
    source: str,
    destination: str,
    format: str | None,
    mesh: Mapping[str, int] | None,
    specs: Any,
    select: tuple[str, ...],
    rename: tuple[tuple[str, str], ...],
    chunk_bytes: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write anew in another format or layout, or only some leaves.

    \b
    jaxckpt convert run1/00000100 model.safetensors --select params
    jaxckpt convert run1/00000100 for-serving --mesh model=8 --chunk-bytes 64KiB
    """

    _require_mesh(mesh, specs)
    convert_checkpoint(
        source,
        destination,
        format=format,
        mesh_shape=mesh,
        specs=_prefix(open_checkpoint(source), specs, select, dict(rename)) if specs else None,
        select=select or None,
        rename=dict(rename) or None,
        chunk_bytes=chunk_bytes,
        overwrite=overwrite,
        options=_options(),
    )
    if as_json:
        print_json({"source": source, "destination": destination})
    else:
        click.echo(f"{printable(source)} → {printable(destination)}")


@main.command()
@_path
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=str), required=True, help="The file to write, .html."
)
@_mesh
@_specs
@click.option("--histograms", is_flag=True, help="Also read the arrays, and draw how their values are distributed.")
@_json
@_debug
def report(path: str, output: str, mesh: Mapping[str, int] | None, specs: Any, histograms: bool, as_json: bool) -> None:
    """Draw a checkpoint: one HTML file, which needs no network and no other file.

    With --mesh it also shows what a restore onto that mesh would read.
    """

    _require_mesh(mesh, specs)
    rules = _prefix(open_checkpoint(path), specs, (), {}) if specs else None
    page = report_on(path, mesh=mesh, specs=rules, histograms=histograms, options=_options())
    with open(output, "w", encoding="utf-8") as file:
        file.write(page)
    if as_json:
        print_json({"path": path, "output": output})
    else:
        click.echo(printable(output))


@main.command()
@click.argument("old")
@click.argument("new", type=click.Path(path_type=str))
@click.argument("strategy", type=click.Path(path_type=str))
@click.argument("n", type=click.IntRange(min=1))
@click.option("--overwrite", is_flag=True, help="Replace what is at NEW.")
@_json
@_debug
def integrate(old: str, new: str, strategy: str, n: int, overwrite: bool, as_json: bool) -> None:
    """Merge the files of MindSpore's ranks, as its tutorial's integrate_checkpoint.py does with the same arguments.

    OLD is the name that the files of all ranks have: ./node0/OLD, ./node1/OLD, …; NEW is where the checkpoint goes,
    STRATEGY the strategy file, protobuf or JSON, and N how many ranks there are.
    """

    integrate_ranks(old, new, strategy, n, overwrite=overwrite)
    if as_json:
        print_json({"source": old, "destination": new})
    else:
        click.echo(f"{printable(old)} → {printable(new)}")


@main.command()
@_path
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_json
@_debug
def rm(path: str, yes: bool, as_json: bool) -> None:
    """Delete a jaxckpt checkpoint, such as a step of a run.

    Its manifest goes first: a reader finds the checkpoint whole, or finds that it is not there. Files that are not
    jaxckpt's own are left.
    """

    checkpoint = open_checkpoint(path)
    _require_own(checkpoint)
    if not yes:
        facts = next(_facts(checkpoint, checkpoint.leaves))
        click.confirm(printable(f"delete {path} ({facts})?"), abort=True, err=True)
        again = open_checkpoint(path)
        if again.save_id != checkpoint.save_id:
            raise InputError(f"{path} was saved anew meanwhile, and is not deleted")
    options = Options()
    store = store_at(path, options)
    store.unpublish(sync=options.sync)
    store.clear()
    above, _, name = path.rstrip("/").rpartition("/")
    if "://" in above:  # an object store keeps a list of steps
        store_at(above, options).unmark(name)
    left = store.names()
    if as_json:
        print_json({"path": path, "left": left})
    else:
        click.echo(printable(f"deleted {path}"))
    if left:
        click.echo(printable(f"left there, as not of this checkpoint: {', '.join(left[:5])}"), err=True)


def _require_own(checkpoint: Checkpoint) -> None:
    """Raise InputError unless it is one that `save` wrote: others have files that are not ours to know."""
    if checkpoint.format != "jaxckpt":
        raise InputError(f"{checkpoint.path} is a checkpoint of format {checkpoint.format}; rm deletes jaxckpt's only")


def _named(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name}={'-' if value is None else format(value, '.4g')}" for name, value in metrics.items())


def _age(created: str | None) -> str:
    """How long ago: "5 min"; "-" where it is not known."""
    try:
        then = datetime.datetime.fromisoformat(created or "")
        seconds = (datetime.datetime.now(datetime.UTC) - then).total_seconds()
    except (ValueError, TypeError):
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _options() -> Options:
    """With a bar on a terminal, and nothing where stderr is a file."""

    return Options(progress=sys.stderr.isatty())
