"""What may stand on a command line: the options that commands share, and texts read as meshes, specs and indices."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem
from jax.sharding import PartitionSpec

from jaxckpt._format.select import renamed, selector
from jaxckpt._format.tree import Tree, nested
from jaxckpt._inspect.leaf import LazyLeaf
from jaxckpt._inspect.open import Checkpoint
from jaxckpt._inspect.open import open as open_checkpoint
from jaxckpt._runtime.errors import InputError, JaxckptError
from jaxckpt._storage.place import local_path

Rule = tuple[str | None, PartitionSpec]
"""(glob of the leaves it is for, or None for all; their spec)."""


# Texts ----------------------------------------------------------------------------------------------------


def axis_sizes(text: str) -> dict[str, int]:
    """data=4,model=2."""
    axes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().rpartition("=")
        if not axis or not size.isdecimal() or int(size) < 1 or axis in axes:
            raise click.BadParameter(f"{text!r}: expected axis sizes such as data=4,model=2")
        axes[axis] = int(size)
    return axes


def rule(text: str) -> Rule:
    """GLOB=P(…), or P(…) for all leaves."""
    found = re.fullmatch(r"(?:(.+?)=)?\s*((?:P|PartitionSpec)\(.*\))\s*", text, re.DOTALL)
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # as literal_eval says
        call = ast.parse(found[2], mode="eval").body if found else None
        if isinstance(call, ast.Call) and not call.keywords:
            entries = [ast.literal_eval(entry) for entry in call.args]
            if all(map(_is_entry, entries)):
                return found[1] if found else None, PartitionSpec(*entries)
    raise click.BadParameter(f"{text!r}: expected a spec such as 'params/*/kernel=P(\"data\", None)'")


def _is_entry(entry: object) -> bool:
    """Whether it is what a PartitionSpec takes for a dimension."""
    axes = entry if isinstance(entry, tuple) else (entry,)
    return entry is None or all(isinstance(axis, str) for axis in axes)


def n_bytes(text: str) -> int:
    """65536, 64KiB, 1MiB."""
    found = re.fullmatch(r"(\d+)\s*(|[KMG]iB)", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{text!r}: expected bytes, such as 65536, 64KiB or 1MiB")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[found[2][:1].lower()]


def old_and_new(text: str) -> tuple[str, str]:
    """OLD=NEW."""
    old, separator, new = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r}: expected OLD=NEW, two paths of leaves or containers")
    return old, new


# Texts that need the checkpoint ---------------------------------------------------------------------------


def selected(checkpoint: Checkpoint, select: Sequence[str]) -> dict[str, LazyLeaf]:
    """Its leaves at or below any of some globs, or all. Raises InputError if a glob matches none."""
    leaves = checkpoint.leaves
    chosen = selector(select or None).choose(leaves)
    return dict(itertools.compress(leaves.items(), chosen))


def indexed(checkpoint: Checkpoint, text: str) -> tuple[LazyLeaf, Any]:
    """(leaf, index or None) of `LEAF` or `LEAF[index]`; a leaf's own name may have brackets. Raises InputError."""
    found = None if text in checkpoint else re.fullmatch(r"(.*?)\[([^\[\]]*)\]", text, re.DOTALL)
    index = _index(found[2]) if found else None
    try:
        return checkpoint[found[1] if found else text], index
    except KeyError as error:
        raise InputError(str(error.args[0])) from None


def _index(text: str) -> tuple[Any, ...]:
    try:
        return tuple(_index_entry(entry.strip()) for entry in text.rstrip().removesuffix(",").split(","))
    except (ValueError, TypeError):  # a slice of four entries is a TypeError
        raise InputError(f"index [{text}]: expected integers, slices and ..., such as [8:16, 0]") from None


def _index_entry(text: str) -> Any:
    if text == "...":
        return ...
    if ":" not in text:
        return int(text)
    return slice(*(int(part) if part.strip() else None for part in text.split(":")))


def spec_tree(
    checkpoint: Checkpoint, rules: Sequence[Rule], select: Sequence[str] = (), rename: Mapping[str, str] | None = None
) -> Tree:
    """The specs of those leaves that a rule fits, as nested dicts of their new paths; None without rules."""
    if not rules:
        return None
    leaves, chosen = checkpoint.leaves, selected(checkpoint, select)
    new = zip(renamed(rename or None, leaves), leaves.items(), strict=True)
    # Of the others, which go to no device, none has a spec.
    paths = [path for path, (old, leaf) in new if old in chosen and leaf.kind in ("jax", "key")]
    found: dict[str, Any] = {}
    for glob, spec in rules:
        matched = list(filter(selector(glob), paths))
        if not matched:
            raise InputError(f"--specs {glob or spec}: no array is there or below")
        for path in matched:
            found.setdefault(path, spec)
    return nested(found)


def require_mesh(mesh: Mapping[str, int] | None, rules: Sequence[Rule]) -> None:
    if rules and not mesh:
        raise click.UsageError("--specs needs --mesh, whose axes they name")


def complete_leaf(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Paths of leaves of the checkpoint that was named before, one component at a time, as shells complete folders."""
    path = str(ctx.params.get("path") or "")
    try:
        if local_path(path) is None:  # nobody waits for a network at each press of a key
            return []
        leaves = open_checkpoint(path).leaves
    except (JaxckptError, OSError):
        return []
    ends: set[str] = set()
    for leaf in leaves:
        if leaf.startswith(incomplete):
            slash = leaf.find("/", len(incomplete))
            ends.add(leaf if slash < 0 else leaf[: slash + 1])
    return [CompletionItem(end) for end in sorted(ends)]


# Options that commands share ------------------------------------------------------------------------------


def _note_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = ctx.meta.get("debug", False) or value


location = functools.partial(click.argument, type=click.Path(path_type=str))
"""An argument by its name: where a checkpoint is, or goes."""

select_option = click.option(
    "--select", multiple=True, metavar="GLOB", help="Only leaves at or below it; may be repeated."
)

mesh_option = functools.partial(
    click.option, "--mesh", type=axis_sizes, metavar="AXIS=SIZE,…", help="Axis sizes of the mesh: data=4,model=2."
)

specs_option = click.option(
    "--specs",
    type=rule,
    multiple=True,
    metavar="[GLOB=]P(…)",
    help="PartitionSpec of the leaves at or below GLOB, by default of all; the first that fits a leaf counts. Leaves"
    " that none fits keep their own, by axis name.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")

debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show the traceback of an error."
)
