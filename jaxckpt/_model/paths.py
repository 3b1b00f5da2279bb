"""Paths of leaves and containers: how keys are escaped, and which paths are above and below a path."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast


def escape_key(key: object) -> str:
    """A key as one component of a path."""
    return str(key).replace("~", "~0").replace("/", "~1") or "~2"


def unescape_key(component: str) -> str:
    """The str key of a path component."""
    return "" if component == "~2" else component.replace("~1", "/").replace("~0", "~")


def path_of_name(name: str) -> str:
    """The path of the tensor that another library's file calls `name`: each "/" in it separates two keys."""
    return "/".join(map(escape_key, name.split("/")))


def name_of_path(path: str) -> str:
    """The name of a leaf in another library's file: its keys as they are, joined with "/"."""
    return "/".join(map(unescape_key, path.split("/"))) if "~" in path else path


def path_problem(path: str) -> str | None:
    """The reason why no keys have this path, as a predicate; None if some have."""
    if path and "" in path.split("/"):
        return "has an empty component; the empty key is written '~2'"
    spelled = path and "/".join(escape_key(unescape_key(component)) for component in path.split("/"))
    return None if spelled == path else f"must be written {spelled!r}: a '~' in a key is written '~0'"


def escape_keys(keys: Sequence[Any]) -> Iterable[str]:
    """Each key as a path component. Keys that need no escaping are returned unchanged."""
    if isinstance(keys, range):
        return map(str, keys)
    if are_strings(keys):
        texts = cast("Sequence[str]", keys)
        together = "".join(texts)
        if "~" not in together and "/" not in together and "" not in texts:
            return texts
    return list(map(escape_key, keys))


def are_strings(keys: Iterable[Any]) -> bool:
    """Whether all keys are str."""
    try:
        "".join(keys)  # the fastest test
    except TypeError:
        return False
    return True


def closest_hint(path: str, candidates: Iterable[str]) -> str:
    """A hint for a path that was not found."""
    by_lower_case: dict[str, list[str]] = {}
    for candidate in candidates:
        by_lower_case.setdefault(candidate.lower(), []).append(candidate)
    close = difflib.get_close_matches(path.lower(), by_lower_case, n=3, cutoff=0.5)
    near = [candidate for lower in close for candidate in by_lower_case[lower]][:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def path_prefixes(path: str) -> Iterator[str]:
    """A path and the paths of the containers above it, from the longest to the root."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def relative_path(head: str, path: str) -> str | None:
    """The rest of a path after a head; None if the path is neither the head nor below it."""
    if path == head:
        return ""
    if not head:
        return path
    return path[len(head) + 1 :] if path.startswith(f"{head}/") else None


def join_paths(head: str, tail: str) -> str:
    """`head` and `tail` joined to one path; each may be empty."""
    return f"{head}/{tail}" if head and tail else head or tail


def longest_prefix(path: str, prefixes: Mapping[str, Any]) -> str | None:
    """The longest of `prefixes` that is `path` or a container above it."""
    return next((head for head in path_prefixes(path) if head in prefixes), None)
