"""The tree of an item: its containers, with leaves that are values or arrays that are read later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from jaxckpt._formats.export import tree_of_keys
from jaxckpt._formats.index_files import read_json
from jaxckpt._formats.orbax.orbax_leaves import values_of
from jaxckpt._formats.orbax.orbax_records import MAX_TREE_BYTES, TREE_FILE, KeyMetadata, Keys, TreeRecord
from jaxckpt._model.tree import MAX_DEPTH, Container, Tree, keys_of, unflatten
from jaxckpt.errors import DataError


def read_tree(path: str) -> tuple[Tree, dict[str, Any]]:
    """The tree of an item, and its metadata."""
    record = read_json(f"{path}/{TREE_FILE}", TreeRecord, MAX_TREE_BYTES)
    entries = {tuple(key.key for key in entry.key_metadata): entry for entry in record.tree_metadata.values()}
    if len(entries) < len(record.tree_metadata):
        raise DataError(f"{path}/{TREE_FILE} is damaged: two of its leaves have the same keys")
    if any(len(keys) > MAX_DEPTH for keys in entries):
        raise DataError(f"{path}: the tree is nested deeper than {MAX_DEPTH} containers")
    values = values_of(path, record, {keys: entry.value_metadata for keys, entry in entries.items()})
    tree = _typed_tree(path, record.value_metadata_tree, values) if record.value_metadata_tree else None
    if tree is None:
        typed = {keys: tuple(_key(path, key) for key in entry.key_metadata) for keys, entry in entries.items()}
        tree = tree_of_keys(path, [(typed[keys], value) for keys, value in values.items()])
    has_metadata = record.custom_metadata is not None and record.custom_metadata is not msgspec.UNSET
    return tree, {"custom_metadata": record.custom_metadata} if has_metadata else {}


def _key(path: str, key: KeyMetadata) -> str | int:
    """A key of a dict or an index of a list. Raises DataError."""
    if key.key_type == 2:
        return key.key
    if not re.fullmatch("0|[1-9][0-9]{0,8}", key.key):
        raise DataError(f"{path}/{TREE_FILE} is damaged: {key.key[:80]!r} is not an index")
    return int(key.key)


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
