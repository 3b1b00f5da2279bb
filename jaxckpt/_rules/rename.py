"""The tree that leaves form after `rename=`, and the leaves that `select=` chooses from it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TypeVar

import msgspec

from jaxckpt._model.paths import path_prefixes, relative_path
from jaxckpt._model.records import Manifest
from jaxckpt._model.select import (
    Rename,
    Select,
    Selector,
    new_paths,
    parse_select,
    replaced_leaves,
    require_distinct_paths,
)
from jaxckpt._model.tree import (
    Structure,
    empty_positions,
    nested_dicts,
    numbers_of,
    paths_of,
    prune,
    structure_of,
    user_objects_of,
)
from jaxckpt._rules.rule_set import Rules, view_through
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.source import NativeCheckpoint
from jaxckpt.errors import TreeError, show_path

Renaming = Rename | Rules
"""The argument rename=: new names, or rules."""


_Opened = TypeVar("_Opened", bound=NativeCheckpoint | ForeignCheckpoint)


def renamed_source(
    source: _Opened, rename: Renaming | None, select: Select | None = None
) -> _Opened | ForeignCheckpoint:
    """A checkpoint with renamed leaves, or its view through rules, and only the selected leaves of these.

    Raises MismatchError, TreeError.
    """
    view = view_through(rename, source) if isinstance(rename, Rules) else source
    if select is None and (rename is None or isinstance(rename, Rules)):
        return view
    return replace(view, manifest=_renamed_manifest(view.manifest, rename, select))


def _renamed_manifest(manifest: Manifest, rename: Renaming | None, select: Select | None) -> Manifest:
    """The manifest of only the selected leaves, with their new paths; the data is unchanged. Raises TreeError."""
    selector = None if select is None else parse_select(select)
    structure, new_paths, chosen = renamed_tree(manifest, rename, selector)
    require_single_root(manifest, new_paths, chosen)
    structure = prune(structure, {number: number for number in chosen}, selector)
    paths, numbers = paths_of(structure, len(manifest.leaves), 1 << 62)
    leaves = [
        msgspec.structs.replace(manifest.leaves[number], path=path) for path, number in zip(paths, numbers, strict=True)
    ]
    tree = prune(structure, {old: new for new, old in enumerate(numbers)})
    return msgspec.structs.replace(manifest, tree=tree, leaves=leaves)


def renamed_tree(
    manifest: Manifest, rename: Renaming | None, select: Selector | None
) -> tuple[Structure, dict[str, int], Sequence[int]]:
    """The renamed structure, the number of each leaf by its new path, and the numbers of the selected leaves.

    A renamed structure lacks the leaves that are not selected, because their new paths may clash with those of selected
    leaves; with `select`, it also lacks those that renamed leaves replace. Objects keep all of their leaves. A
    manifest that rules have made has its names already. Raises TreeError.
    """
    where = "the tree that the rules make" if isinstance(rename, Rules) else "the checkpoint"
    if rename is None or isinstance(rename, Rules):
        empty_paths = (path for path, _ in empty_positions(manifest.tree))
        return manifest.tree, manifest.numbers, _selected(manifest, manifest.numbers, empty_paths, select, where)
    empty = {path: node for path, node in user_objects_of(manifest.tree) if next(numbers_of(node), None) is None}
    saved = [*manifest.numbers, *empty]
    paths = new_paths(rename, saved)
    replaced = set[int]() if select is None else replaced_leaves(rename, saved, paths)
    remaining = [number for number in range(len(saved)) if number not in replaced]
    require_distinct_paths(rename, [saved[number] for number in remaining], [paths[number] for number in remaining])
    numbers = {paths[number]: number for number in remaining if number < len(manifest.leaves)}
    units = _structures_by_path(manifest, paths, replaced)
    for number, node in enumerate(empty.values(), len(manifest.leaves)):
        if number not in replaced:
            units[paths[number]] = node
    chosen = _selected(manifest, numbers, paths[len(manifest.leaves) :], select, where)
    among = set(chosen)
    units = {path: unit for path, unit in units.items() if not isinstance(unit, int) or unit in among}
    return structure_of(nested_dicts(units)), numbers, chosen


def _selected(
    manifest: Manifest, numbers: Mapping[str, int], empty_paths: Iterable[str], select: Selector | None, where: str
) -> Sequence[int]:
    """Numbers of the leaves that are selected by their new paths. Raises TreeError if an entry selects neither a leaf
    nor an empty container."""
    if select is None:
        return [*numbers.values()]
    saved = [manifest.leaves[number].path for number in numbers.values()]
    chosen = select.choose(numbers, where, saved=saved, empty_paths=empty_paths)
    return [*itertools.compress(numbers.values(), chosen)]


def require_single_root(manifest: Manifest, numbers: Mapping[str, int], chosen: Sequence[int]) -> None:
    """Raise TreeError if a chosen leaf would be the root of a tree that also has others."""
    root = numbers.get("")
    if root is not None and root in chosen and len(chosen) > 1:
        raise TreeError(
            f"rename= makes leaf {show_path(manifest.leaves[root].path)} the whole tree, but {len(chosen)} leaves are"
            " selected: give it a name, or select only this leaf"
        )


def _structures_by_path(manifest: Manifest, paths: Sequence[str], replaced: Set[int]) -> dict[str, Structure]:
    """Leaf numbers by new path, and objects whose leaves have moved together, by the new path of the object, without
    leaves that are replaced.

    An object that would share its new path with other leaves is left as its leaves.
    """
    kept = [number for number in range(len(manifest.leaves)) if number not in replaced]
    units: dict[str, Structure] = {paths[number]: number for number in kept}
    objects = [*user_objects_of(manifest.tree)]
    if not objects:
        return units
    counts = collections.Counter(head for number in kept for head in path_prefixes(paths[number]))
    for path, node in objects:
        numbers = [*numbers_of(node)]
        if not replaced.isdisjoint(numbers):
            continue
        heads = {
            _strip_tail(paths[number], relative_path(path, manifest.leaves[number].path) or "") for number in numbers
        }
        head = heads.pop() if len(heads) == 1 else None
        if head is not None and counts[head] == len(numbers):
            for number in numbers:
                del units[paths[number]]
            units[head] = node
    return units


def _strip_tail(path: str, tail: str) -> str | None:
    """The part of a path before a tail; None if the path does not end with the tail."""
    if not tail or path == tail:
        return "" if tail else path
    return path.removesuffix(f"/{tail}") if path.endswith(f"/{tail}") else None
