"""The tree of an item: its containers, with leaves that are values or arrays that are read later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from jaxckpt._formats.index_files import read_json
from jaxckpt._formats.orbax.orbax_leaves import values_of
from jaxckpt._formats.orbax.orbax_records import MAX_TREE_BYTES, TREE_FILE, Keys, TreeRecord, path_of
from jaxckpt._model.tree import MAX_DEPTH, Container, Tree, keys_of, unflatten
from jaxckpt.errors import DataError, show_path


def read_tree(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata."""
    record = read_json(f"{path}/{TREE_FILE}", TreeRecord, MAX_TREE_BYTES)
    entries = {tuple(key.key for key in entry.key_metadata): entry for entry in record.tree_metadata.values()}
    if len(entries) < len(record.tree_metadata):
        raise DataError(f"{path}/{TREE_FILE} is damaged: two of its leaves have the same keys")
    if any(len(keys) > MAX_DEPTH for keys in entries):
        raise DataError(f"{path}: the tree is nested deeper than {MAX_DEPTH} containers")
    values = values_of(path, record, {keys: entry.value_metadata for keys, entry in entries.items()})
    kinds = {keys: tuple(key.key_type for key in entry.key_metadata) for keys, entry in entries.items()}
    tree = _typed_tree(path, record.value_metadata_tree, values) if record.value_metadata_tree else None
    if tree is None:
        tree = _tree(path, [(keys, kinds[keys], value) for keys, value in values.items()])
    has_metadata = record.custom_metadata is not None and record.custom_metadata is not msgspec.UNSET
    return tree, {"custom_metadata": record.custom_metadata} if has_metadata else {}


def _tree(path: str, entries: Sequence[tuple[Keys, tuple[int, ...], Any]], depth: int = 0) -> Tree:
    """A container, from the keys of its content; or a leaf."""
    if len(entries) == 1 and len(entries[0][0]) == depth:
        return entries[0][2]
    below: dict[str, list[tuple[Keys, tuple[int, ...], Any]]] = {}
    for entry in entries:
        if len(entry[0]) > depth:  # otherwise an entry for an empty position that other entries fill
            below.setdefault(entry[0][depth], []).append(entry)
    where = f"{path}: the container at {show_path(path_of(entries[0][0][:depth]) if entries else '')}"
    if {kinds[depth] for inside in below.values() for _, kinds, _ in inside} not in ({1}, {2}):
        raise DataError(f"{where} mixes keys and indices")
    if entries and next(iter(below.values()))[0][1][depth] == 2:
        return {key: _tree(path, inside, depth + 1) for key, inside in below.items()}
    if not all(str(number) in below for number in range(len(below))):
        raise DataError(f"{where} has the indices {', '.join(list(below)[:20])}; expected 0 to {len(below) - 1}")
    return [_tree(path, below[str(number)], depth + 1) for number in range(len(below))]


def _typed_tree(path: str, text: str, values: Mapping[Keys, Any]) -> Tree | None:
    """The tree with its tuples and namedtuples; None if it has other leaves, because of a bug in Orbax."""
    used: list[Keys] = []

    def build(node: Any, keys: Keys) -> Tree:
        if len(keys) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
        match node:
            case {"category": "custom", "clazz": "ValueMetadataEntry"}:
                used.append(keys)
                return values[keys]
            case {"category": "custom", "clazz": "tuple", "entries": list(children)}:
                return tuple(build(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", children)))
            case {"category": "namedtuple", "clazz": str(name), "entries": list(children)}:
                fields = {str(field["key"]): build(field["value"], (*keys, str(field["key"]))) for field in children}
                name, numbers = name.rpartition(".")[2], tuple(range(len(fields)))
                node = Container(type="namedtuple", name=name, keys=tuple(fields), children=numbers)
                keys_of(node)  # raises if they are not valid names
                return unflatten(node, list(fields.values()))
            case dict():
                return {key: build(child, (*keys, key)) for key, child in cast("dict[str, Any]", node).items()}
            case list():
                return [build(child, (*keys, str(n))) for n, child in enumerate(cast("list[Any]", node))]
            case _:
                raise ValueError(f"{str(node)[:80]!r} is not part of a tree")

    try:
        tree = build(json.loads(text), ())
    except KeyError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}/{TREE_FILE} has a damaged value_metadata_tree: {str(error)[:200]}") from error
    return tree if len(used) == len(values) else None
