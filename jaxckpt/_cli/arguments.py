"""The arguments and options that commands share, their parsers, and completion. Imports only light modules."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from jaxckpt._pipeline.progress import parse_bytes

SpecRule = tuple[str | None, tuple[str | tuple[str, ...] | None, ...]]
"""(glob of its leaves, or None for all; the entries of their PartitionSpec)."""

LAYOUTS = ("plain", "scan", "maxtext")
"""Values of `--rules`."""

SORTS = ("name", "bytes")
"""Values of `show --sort`."""

FORMATS = ("jaxckpt", "npz", "orbax", "orbax-v1", "safetensors", "zarr")
"""The formats that `convert` writes without other packages, for completion."""


# Texts ----------------------------------------------------------------------------------------------------


def parse_axis_sizes(text: str) -> dict[str, int]:
    """Axis sizes of a mesh: data=4,model=2."""
    axes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().rpartition("=")
        if not axis or "=" in axis or not size.isdecimal():  # "=" in "data=4 model=2", without the comma
            raise click.BadParameter(f"{text!r}: expected axis sizes such as data=4,model=2")
        if axis in axes:
            raise click.BadParameter(f"{text!r} has the axis {axis!r} twice: give each axis one size")
        if int(size) < 1:
            raise click.BadParameter(f"{text!r} gives the axis {axis!r} the size 0: a mesh axis has at least 1 device")
        axes[axis] = int(size)
    return axes


def parse_spec_rule(text: str) -> SpecRule:
    """A rule for specs: GLOB=P(…), or P(…) for all leaves."""
    match = re.fullmatch(r"(?:(.+?)=)?\s*((?:P|PartitionSpec)\(.*\))\s*", text, re.DOTALL)
    with contextlib.suppress(
        ValueError, TypeError, SyntaxError, MemoryError, RecursionError
    ):  # documented by literal_eval
        call = ast.parse(match[2], mode="eval").body if match else None
        if isinstance(call, ast.Call) and not call.keywords:
            entries = tuple(ast.literal_eval(entry) for entry in call.args)
            if all(map(_is_entry, entries)):
                return match[1] if match else None, entries
    raise click.BadParameter(f"{text!r}: expected a spec such as 'params/*/kernel=P(\"data\", None)'")


def _is_entry(entry: object) -> bool:
    """Whether a PartitionSpec accepts it for a dimension."""
    axes = entry if isinstance(entry, tuple) else (entry,)
    return entry is None or all(isinstance(axis, str) for axis in axes)


def parse_size(text: str) -> int:
    """A number of bytes: 65536, 64KiB, 1MiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse_rate(text: str) -> int:
    """A number of bytes per second. The unit is required, because people measure rates in MiB: 50MiB, 500KiB, 100B."""
    if text.strip().isdecimal():
        raise click.BadParameter(f"{text!r} has no unit: give bytes per second as in {text.strip()}MiB")
    try:
        return parse_bytes(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: expected a whole number of bytes per second, at least 1, with a unit, such as 50MiB, 500KiB"
            " or 100B"
        ) from None


def parse_rename(text: str) -> tuple[str, str]:
    """A pair of paths: OLD=NEW."""
    old, separator, new = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r}: expected OLD=NEW, two paths of leaves or containers")
    return old, new


def renames(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The pairs of `--rename` as a mapping. Raises click.UsageError if one path is renamed twice."""
    mapping: dict[str, str] = {}
    for old, new in pairs:
        if mapping.setdefault(old, new) != new:
            raise click.UsageError(f"--rename gives {old!r} two new paths, {mapping[old]!r} and {new!r}: give one")
    return mapping


def require_mesh_for_specs(mesh: Mapping[str, int] | None, rules: Sequence[SpecRule]) -> None:
    if rules and not mesh:
        raise click.UsageError("--specs needs --mesh, which defines the axes")


# Completion -----------------------------------------------------------------------------------------------


def complete_leaf(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions for a leaf of the checkpoint argument, one path component at a time, as shells complete folders."""
    # After an option that still lacks its value, click leaves the arguments in `ctx.args`.
    before = [*filter(None, map(ctx.params.get, ("path", "source", "a"))), *ctx.args]
    ends: set[str] = set()
    for leaf in _leaf_paths(before[0]) if before else ():
        if leaf.startswith(incomplete):
            slash = leaf.find("/", len(incomplete))
            ends.add(leaf if slash < 0 else leaf[: slash + 1])
    return [CompletionItem(end) for end in sorted(ends)]


def complete_format(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions for the format that `convert` writes."""
    return [CompletionItem(name) for name in FORMATS if name.startswith(incomplete)]


def _leaf_paths(path: str) -> list[str]:
    """The leaves of a local checkpoint; none for a URL, because a key press must not wait for a network."""
    if "://" in path and not path.startswith("file:///"):
        return []
    from jaxckpt._inspect.open import open as open_checkpoint
    from jaxckpt.errors import JaxckptError

    with contextlib.suppress(JaxckptError, OSError):
        return list(open_checkpoint(path).leaves)
    return []


# Paths ----------------------------------------------------------------------------------------------------


def _note_path(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    ctx.meta.setdefault("paths", []).extend([value] if isinstance(value, str) else value)
    return value


def similar_path_hint(path: str) -> str:
    """A hint for a local path that does not exist: the full name of the step, or a similar name."""
    folder, name = os.path.split(path.rstrip("/"))
    if "://" in path or os.path.exists(path):
        return ""
    run = name.rpartition("@")[0]
    if run and os.path.exists(os.path.join(folder, run)):  # RUN@NAME of a run that exists
        return ""
    if folder and not os.path.isdir(folder):
        return similar_path_hint(folder)
    with contextlib.suppress(OSError):
        names = os.listdir(folder or ".")
        if name.isdecimal():
            near = [other for other in names if other.isdecimal() and int(other) == int(name)]
        else:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        if near:
            return f"; did you mean {os.path.join(folder, near[0])}?"
    return ""


# Options that commands share ------------------------------------------------------------------------------


def _note_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug", False) or value


class LocalPath(click.Path):
    """A path in an argument or option. click looks at it, which may hang."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ctx is not None and ctx.resilient_parsing:  # completion imports only light modules
            return super().convert(value, param, ctx)
        from jaxckpt._options import Options
        from jaxckpt._pipeline.lanes import run_watched

        work = functools.partial(super().convert, value, param, ctx)
        return run_watched(f"looking at {value}", Options().timeout_seconds, work)


def location(name: str, *, several: bool = False) -> Any:
    """A named argument: the location of a checkpoint to read or write, or one or more of them."""
    return click.argument(
        name, type=LocalPath(path_type=str), callback=_note_path, nargs=-1 if several else 1, required=True
    )


select_option = click.option(
    "--select",
    multiple=True,
    metavar="GLOB",
    shell_complete=complete_leaf,
    help="Only leaves whose path, or the path of a container above them, matches GLOB: the new path, with --rename or"
    " --rules. May be repeated.",
)


def mesh_option(*, required: bool = False) -> Any:
    text = "Axis sizes of the mesh: data=4,model=2."
    return click.option("--mesh", type=parse_axis_sizes, metavar="AXIS=SIZE,…", required=required, help=text)


specs_option = click.option(
    "--specs",
    type=parse_spec_rule,
    multiple=True,
    metavar="[GLOB=]P(…)",
    help="PartitionSpec of the leaves that match GLOB, or of all leaves. May be repeated: the first match counts."
    " Other leaves keep their own spec, mapped by axis name.",
)

output_option = click.option(
    "-o", "--output", type=LocalPath(dir_okay=False, path_type=str), required=True, help="The .html file to write."
)

rules_option = click.option(
    "--rules",
    type=click.Choice(LAYOUTS),
    help="Map a Hugging Face folder to a nested tree (plain), with stacked layers (scan), or to MaxText's tree.",
)

back_to_option = click.option(
    "--back-to",
    type=LocalPath(file_okay=False, path_type=str),
    metavar="FOLDER",
    help="With --rules: map in the other direction, to the tensors of this Hugging Face folder (config.json is read).",
)

overwrite_option = click.option("--overwrite", is_flag=True, help="Replace an existing destination.")

progress_option = click.option(
    "--no-progress",
    "progress",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Show no progress: neither a bar nor, without a terminal, lines.",
)

workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let N processes read and write. Helps if one does not use all of the storage's speed.",
)

indivisible_option = click.option(
    "--indivisible",
    type=click.Choice(("error", "replicate")),
    default="error",
    show_default=True,
    help="If the mesh does not divide a dimension: an error, or do not split that dimension.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")

debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show a traceback on errors."
)
