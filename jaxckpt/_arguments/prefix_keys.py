"""The keys of `specs=`, `dtype=` and `Options.cast` are those of the tree: errors for paths, globs and tuples."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from typing import Any, cast

from jaxckpt._model.paths import closest_paths, path_prefixes, unescape_key
from jaxckpt._model.select import parse_select

_WILDCARD = re.compile(r"[*?]|\[.*\]|\{\w+\}")


def key_problem(
    argument: str, prefix: str, value: str, paths: Iterable[str], other: str = ", or a function of (path, leaf)"
) -> str:
    """The message for an entry of a pytree prefix that no leaf is at or below, if one of its keys is a path, a glob or
    a tuple of keys instead of a key of the tree; otherwise empty.

    `value` is the entry's value as the suggestion writes it, `paths` are those of the leaves, and `other` is what else
    the argument may be.
    """
    kinds = {key: kind for component in prefix.split("/") if (kind := _kind(key := unescape_key(component)))}
    heads = dict.fromkeys(head for path in paths for head in path_prefixes(path))
    if not kinds or prefix in heads:
        return ""
    key, kind = next(iter(kinds.items()))
    intended = _intended_path(prefix)
    outer = re.sub(r"(/\*\*?)+$", "", intended)
    near = [outer]
    if outer not in heads:
        near = [] if _WILDCARD.search(outer) else closest_paths(outer, filter(None, heads))
    instead = _nested(near[0], value) if near and near[0] else "nested dicts"
    shown = key if kind == "tuples" else repr(key)
    return (
        f"{argument} has the key {shown}, but the keys of {argument} are the keys of the tree, not {kind}: give"
        f" {instead}{other}"
    )


def pattern_of(prefix: str) -> str:
    """The path or glob that an entry with keys that are hardly those of a tree is; empty for any other entry."""
    kinds = {_kind(unescape_key(component)) for component in prefix.split("/")} - {""}
    return _intended_path(prefix) if kinds and "tuples" not in kinds else ""


def is_meant_for(prefix: str, paths: Iterable[str]) -> bool:
    """Whether an entry would apply to a leaf if its keys were read as paths, globs and tuples of keys."""
    is_other = any(_kind(unescape_key(component)) for component in prefix.split("/"))
    return is_other and any(map(parse_select(_intended_path(prefix)), paths))


def _kind(key: str) -> str:
    """What a key is, if it can hardly be a key of a tree: "paths", "globs" or "tuples"; otherwise empty."""
    if _tuple_of(key):
        return "tuples"
    if _WILDCARD.search(key):
        return "globs"
    return "paths" if "/" in key else ""


def _tuple_of(key: str) -> tuple[Any, ...]:
    """The tuple that a key was; empty for any other key."""
    if not key.startswith("("):
        return ()
    try:
        value = ast.literal_eval(key)
    except (ValueError, SyntaxError):
        return ()
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else ()


def _intended_path(prefix: str) -> str:
    """A prefix with its keys read as paths, globs and tuples of keys."""
    keys = [unescape_key(component) for component in prefix.split("/")]
    return "/".join("/".join(map(str, _tuple_of(key) or (key,))) for key in keys)


def _nested(path: str, value: str) -> str:
    """The expression for a value at a path, such as `{"params": {"w": "float32"}}`."""
    keys = [unescape_key(component) for component in path.split("/")]
    return "".join(f"{{{json.dumps(key, ensure_ascii=False)}: " for key in keys) + value + "}" * len(keys)
