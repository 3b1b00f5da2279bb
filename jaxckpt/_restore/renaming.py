"""The leaves that `select=` chooses, and the tree that they form after `rename=`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from jaxckpt._format.records import Manifest
from jaxckpt._format.select import Rename, Select, Selector, parse_select, rename_paths
from jaxckpt._format.tree import Structure, nested_dicts, numbers_of, paths_of, prune, structure_of, user_objects_of
from jaxckpt._restore.objects import structures_by_path
from jaxckpt._restore.pooled import PooledCheckpoint
from jaxckpt._restore.rules import Rules
from jaxckpt._restore.source import ForeignCheckpoint, NativeCheckpoint
from jaxckpt._runtime.errors import TreeError, show_path

Renaming = Rename | Rules
"""The argument rename=: new names, or rules."""


def split_rename(rename: Renaming | None) -> tuple[Rename | None, Rules | None]:
    """(new names, rules) of the argument `rename=`; at most one of the two is set."""
    return (None, rename) if isinstance(rename, Rules) else (rename, None)


_Opened = TypeVar("_Opened", bound=NativeCheckpoint | ForeignCheckpoint | PooledCheckpoint)


def renamed_source(source: _Opened, rename: Renaming | None) -> _Opened | ForeignCheckpoint:
    """A checkpoint with renamed leaves, or its view through rules. Raises MismatchError, TreeError."""
    if isinstance(rename, Rules):
        return rename.over(source)
    return source if rename is None else replace(source, manifest=select_and_rename(source.manifest, None, rename))


def select_and_rename(manifest: Manifest, select: Select | None, rename: Rename | None) -> Manifest:
    """The manifest of only the selected leaves, with their new paths; the data is unchanged. Raises TreeError."""
    chosen = selected_numbers(manifest, None if select is None else parse_select(select))
    structure, new_paths = renamed_tree(manifest, rename, chosen)
    require_single_root(manifest, new_paths, chosen)
    structure = prune(structure, {number: number for number in chosen})
    paths, numbers = paths_of(structure, len(manifest.leaves), 1 << 62)
    leaves = [
        msgspec.structs.replace(manifest.leaves[number], path=path) for path, number in zip(paths, numbers, strict=True)
    ]
    tree = prune(structure, {old: new for new, old in enumerate(numbers)})
    return msgspec.structs.replace(manifest, tree=tree, leaves=leaves)


def selected_numbers(manifest: Manifest, select: Selector | None) -> Sequence[int]:
    """Numbers of the leaves that are selected by their saved paths. Raises TreeError if an entry selects none."""
    numbers = range(len(manifest.leaves))
    return numbers if select is None else [*itertools.compress(numbers, select.choose(manifest.numbers))]


def renamed_tree(manifest: Manifest, rename: Rename | None, chosen: Sequence[int]) -> tuple[Structure, dict[str, int]]:
    """The requested structure, and the number of each leaf by its requested path. Raises TreeError.

    A renamed structure lacks the leaves that are not chosen, because their new paths may clash with those of chosen
    leaves. Objects keep all of their leaves.
    """
    if rename is None:
        return manifest.tree, manifest.numbers
    empty = {path: node for path, node in user_objects_of(manifest.tree) if next(numbers_of(node), None) is None}
    paths = rename_paths(rename, [*manifest.numbers, *empty])
    numbers = {path: number for number, path in enumerate(paths[: len(manifest.leaves)])}
    units = structures_by_path(manifest, [*numbers]) | dict(zip(paths[len(numbers) :], empty.values(), strict=True))
    among = set(chosen)
    units = {path: unit for path, unit in units.items() if not isinstance(unit, int) or unit in among}
    return structure_of(nested_dicts(units)), numbers


def require_single_root(manifest: Manifest, numbers: Mapping[str, int], chosen: Sequence[int]) -> None:
    """Raise TreeError if a chosen leaf would be the root of a tree that also has others."""
    root = numbers.get("")
    if root is not None and root in chosen and len(chosen) > 1:
        raise TreeError(
            f"rename= makes leaf {show_path(manifest.leaves[root].path)} the whole tree, but {len(chosen)} leaves are"
            " selected: give it a name, or select only this leaf"
        )
