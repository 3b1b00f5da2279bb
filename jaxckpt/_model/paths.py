"""Paths of leaves and containers: how keys are escaped, and which paths are above and below a path."""

from __future__ import annotations

import difflib
import heapq
import itertools
import operator
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
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


_SHORT_LIST = 40
"""The most candidates that are compared letter by letter."""

_NUMBER = re.compile(r"\d+")


def closest_hint(path: str, candidates: Iterable[str]) -> str:
    """A hint for a path that was not found."""
    near = closest_paths(path, candidates)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def closest_paths(path: str, candidates: Iterable[str]) -> list[str]:
    """Up to three candidates that may have been meant by a path, the closest first. Takes linear time.

    They have the same parent or the same last key, and the same numbers, because a leaf of another layer is no typing
    error; only a name without a parent, such as that of a pin, may have other numbers. "a.b" counts as "a/b".
    """
    wanted = _plain(path)
    parent, slash, key = wanted.rpartition("/")
    numbers = _NUMBER.findall(wanted)
    below, ending = parent + slash, f"/{key}"
    equal: list[str] = []
    related: list[tuple[bool, int, str, str]] = []  # whether the numbers agree, the common length, and the candidate
    for candidate in candidates:
        plain = _plain(candidate)
        if plain == wanted:
            equal.append(candidate)
        elif plain == key or plain.endswith(ending) or (plain.startswith(below) and "/" not in plain[len(below) :]):
            agrees = _agree(numbers, _NUMBER.findall(plain))
            if agrees or not slash:
                related.append((agrees, _common_length(wanted, plain), plain, candidate))
    if equal:
        return equal[:3]
    short_list = heapq.nlargest(_SHORT_LIST, related, key=operator.itemgetter(1))
    scored = [(_similarity(wanted, plain) - 0.1 * (not agrees), name) for agrees, _, plain, name in short_list]
    best = max((score for score, _ in scored), default=0.0)
    near = sorted((pair for pair in scored if pair[0] >= max(0.5, best - 0.1)), key=lambda pair: (-pair[0], pair[1]))
    return [candidate for _, candidate in near[:3]]


def _plain(path: str) -> str:
    """A path without differences that are easily overlooked."""
    return path.lower().replace(".", "/")


def _agree(numbers: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the numbers of two paths are the same, or one path has additional ones."""
    shorter, longer = sorted((numbers, others), key=len)
    rest = iter(longer)
    return all(number in rest for number in shorter)


def _common_length(a: str, b: str) -> int:
    """The number of characters that two texts share at their start and at their end."""
    start = len(os.path.commonprefix((a, b)))  # noqa: RUF071 - of characters, not of components
    return start + len(os.path.commonprefix((a[start:][::-1], b[start:][::-1])))  # noqa: RUF071


def _similarity(a: str, b: str) -> float:
    """How much two paths resemble each other, from 0 to 1: only by the components in which they differ, because long
    paths share most of their letters in any case."""
    left, right = a.split("/"), b.split("/")
    while left and right and left[0] == right[0]:
        del left[0], right[0]
    has_same_key = bool(left and right and left[-1] == right[-1])
    while left and right and left[-1] == right[-1]:
        del left[-1], right[-1]
    own = difflib.SequenceMatcher(None, "/".join(left), "/".join(right)).ratio()
    # With the same key at its end, another container is enough to suggest it.
    return max(own, difflib.SequenceMatcher(None, a, b).ratio() - 0.1) if has_same_key else own


def path_prefixes(path: str) -> Iterator[str]:
    """A path and the paths of the containers above it, from the longest to the root."""
    yield path
    while path:
        path = path.rpartition("/")[0]
        yield path


def containers_of(paths: Iterable[str]) -> set[str]:
    """The paths of all containers of these leaves, up to the root."""
    containers = set[str]()
    for path in paths:
        for head in itertools.islice(path_prefixes(path), 1, None):
            if head in containers:
                break
            containers.add(head)
    return containers


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


def longest_prefix(path: str, prefixes: Container[str]) -> str | None:
    """The longest of `prefixes` that is `path` or a container above it."""
    return next((head for head in path_prefixes(path) if head in prefixes), None)


def mask_numbers(path: str) -> str:
    """A path with `*` for each number: the glob of all paths that differ only in numbers, such as those of layers."""
    return "/".join("*" if key.isdecimal() else key for key in path.split("/"))
