"""`select` chooses leaves by path, and `rename` changes their paths."""

from __future__ import annotations

import fnmatch
import functools
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from jaxckpt._model.paths import (
    closest_hint,
    containers_of,
    join_paths,
    longest_prefix,
    path_of_name,
    path_prefixes,
    path_problem,
    relative_path,
)
from jaxckpt.errors import InputError, TreeError, show_lines, show_path

Select = str | re.Pattern[str] | Callable[[str], bool] | Iterable["str | re.Pattern[str]"]

Rename = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SelectEntry:
    """An entry of a `select` argument."""

    text: str
    """The entry as the user wrote it."""

    test: Callable[[str], bool]
    """Whether it selects a path."""

    exact: str | None = None
    """The path that it selects with everything below, for an entry without wildcards in a list."""


@dataclass(frozen=True, slots=True)
class Selector:
    """The meaning of a `select` argument: a test of leaf paths."""

    entries: tuple[SelectEntry, ...]

    by_path: Mapping[str, SelectEntry]
    """The entries that are exact. They are looked up, because a list may have thousands of them."""

    tests: tuple[SelectEntry, ...]
    """The other entries."""

    @classmethod
    def of(cls, entries: Iterable[SelectEntry]) -> Selector:
        entries = tuple(entries)
        by_path = {entry.exact: entry for entry in entries if entry.exact is not None}
        return cls(entries, by_path, tuple(entry for entry in entries if entry.exact is None))

    def __call__(self, path: str) -> bool:
        return any(entry.test(path) for entry in self.tests) or any(self._exact(path))

    def _exact(self, path: str) -> Iterator[str]:
        """The exact entries that select a path."""
        return (head for head in path_prefixes(path) if head in self.by_path) if self.by_path else iter(())

    def choose(
        self,
        paths: Collection[str],
        where: str = "the checkpoint",
        *,
        saved: Iterable[str] = (),
        empty_paths: Iterable[str] = (),
    ) -> list[bool]:
        """Whether each path is selected. Raises TreeError if an entry selects none of them, nor any of `empty_paths`.

        `saved` are the saved paths in the same order, if the leaves were renamed. `empty_paths` are the paths of empty
        containers.
        """
        if not self.entries:
            raise TreeError("select has no entries, so it selects nothing; omit it to select everything")
        used = set[str]()
        unused = list(self.tests)
        chosen: list[bool] = []
        for path in paths:
            heads = [*self._exact(path)]
            used.update(heads)
            hits = [entry for entry in unused if entry.test(path)]
            for entry in hits:
                unused.remove(entry)
            chosen.append(bool(heads or hits) or any(entry.test(path) for entry in self.tests))
        if unused or len(used) < len(self.by_path):
            empty = [*empty_paths]
            used.update(head for path in empty for head in self._exact(path))
            without_leaves = [entry for entry in unused if not any(map(entry.test, empty))]
            without_leaves += [entry for path, entry in self.by_path.items() if path not in used]
            self._require_used(without_leaves, paths, where, saved)
        return chosen

    def _require_used(
        self, unused: Sequence[SelectEntry], paths: Collection[str], where: str, saved: Iterable[str]
    ) -> None:
        """Raise TreeError if there are entries that select nothing."""
        if not unused:
            return
        renamed = [(old, new) for old, new in zip(saved, paths, strict=False) if old != new]
        old_heads = {head: pair for pair in reversed(renamed) for head in self._exact(pair[0])}
        for entry in unused:
            if entry.exact is None:
                pair = next((pair for pair in renamed if entry.test(pair[0])), None)
            else:
                pair = old_heads.get(entry.exact)
            if pair is not None:
                raise TreeError(
                    f"select: {entry.text} matches the saved leaf {show_path(pair[0])}, which rename= gives the path"
                    f" {show_path(pair[1])}. select= chooses leaves by their new paths"
                )
        unused_entries = {id(entry) for entry in unused}
        texts = [entry.text for entry in self.entries if id(entry) in unused_entries]
        raise TreeError(_unmatched("select", texts, paths, where))


def parse_select(select: Select) -> Selector:
    """A test of leaf paths.

    A glob (`*` within one component, `**` across components, `{i}` for a whole number) or a compiled regular expression
    (`fullmatch`) selects the leaves whose path, or the path of a container above them, it matches. Several patterns
    select the union.

    Raises InputError for anything else. Call this once per argument, because a generator can be read only once.
    """
    if callable(select):
        return Selector.of([SelectEntry(_abbreviate(select), functools.partial(_call_select, select))])
    if isinstance(select, (str, re.Pattern)):
        return Selector.of([_parse_pattern(select)])
    if isinstance(select, Iterable) and not isinstance(select, (bytes, Mapping)):  # pyright: ignore[reportUnnecessaryIsInstance]
        return Selector.of(map(_parse_entry, select))
    raise _invalid_select_error(select)


def _invalid_select_error(value: object) -> InputError:
    return InputError(
        "select must be a glob, a compiled regular expression of str, a list of them, or a function of the path that"
        f" returns a bool, found {_abbreviate(value)}"
    )


def _abbreviate(value: object) -> str:
    return f"re.compile({value.pattern!r})" if isinstance(value, re.Pattern) else reprlib.repr(value)


def _call_select(select: Callable[[str], bool], path: str) -> bool:
    """The result of a `select` function for a path. Raises InputError unless it is a bool."""
    answer = select(path)
    if not isinstance(answer, (bool, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"select returned {reprlib.repr(answer)} for leaf {show_path(path)}; expected True or False")
    return bool(answer)


def _parse_entry(pattern: object) -> SelectEntry:
    """An entry of a list: of a path, if it is a str without wildcards."""
    if not isinstance(pattern, str) or not pattern or _WILDCARD.search(pattern):
        return _parse_pattern(pattern)
    return SelectEntry(repr(pattern), lambda path: relative_path(pattern, path) is not None, str.__str__(pattern))


def _parse_pattern(pattern: object) -> SelectEntry:
    """A glob or a regular expression. Raises InputError for anything else."""
    if isinstance(pattern, str):
        expression = _glob(pattern)
        return SelectEntry(repr(pattern), lambda path: expression.fullmatch(path) is not None)
    if not isinstance(pattern, re.Pattern) or not isinstance(pattern.pattern, str):
        raise _invalid_select_error(pattern)
    expression = cast("re.Pattern[str]", pattern)

    def matches(path: str) -> bool:
        components = path.split("/")
        return any(expression.fullmatch("/".join(components[:end])) for end in range(1, len(components) + 1))

    return SelectEntry(_abbreviate(pattern), matches)


_WILDCARD = re.compile(r"[*?[]|\{[A-Za-z_]\w*\}")


def _glob(pattern: str) -> re.Pattern[str]:
    """A regular expression for the paths that a glob matches, and for all paths below them."""
    # "**" is any number of components, also none at the end.
    pattern = re.sub(r"(?<=.)(/\*\*)+$", "", pattern, flags=re.DOTALL)
    out: list[str] = []
    for token in re.split(r"((?:^|(?<=/))\*\*/|\*\*|\*|\?|\[[^\]]*\]|\{[A-Za-z_]\w*\})", pattern):
        match token:
            case "**/":  # any number of components
                out.append("(?:.*/)?")
            case "**":
                out.append(".*")
            case "*":
                out.append("[^/]*")
            case "?":
                out.append("[^/]")
            case _ if token.startswith("{"):
                out.append("(?:0|[1-9][0-9]*)" if token.endswith("}") else re.escape(token))
            case _ if token.startswith("[") and token.endswith("]"):
                out.append(f"(?!/){fnmatch.translate(token)[4:-3]}")
            case _:
                out.append(re.escape(token))
    body = "".join(out)
    if "[" in pattern or "{" in pattern:  # a pattern with brackets also matches the path that is spelled like it
        body += f"|{re.escape(pattern)}"
    return re.compile(f"(?s:(?:{body})(?:/.*)?)")


def rename_paths(rename: Rename | None, paths: Collection[str]) -> list[str]:
    """Saved paths → new paths. A mapping names leaves or containers; the longest matching name applies.

    Raises InputError for anything else, and TreeError if a name matches no path or two leaves get the same path.
    """
    new = new_paths(rename, paths)
    require_distinct_paths(rename, paths, new)
    return new


def new_paths(rename: Rename | None, paths: Collection[str]) -> list[str]:
    """As `rename_paths`, but several leaves may get the same path."""
    if rename is None:
        return list(paths)
    if callable(rename):
        return [_new_path(rename, path) for path in paths]
    mapping = _require_mapping(rename)
    unused = mapping.keys() - {head for path in paths for head in path_prefixes(path)}
    if unused and paths:
        raise TreeError(_unmatched("rename", map(repr, sorted(unused)), paths, "the checkpoint"))
    return [_rename_path(mapping, path) for path in paths]


def require_distinct_paths(rename: Rename | None, paths: Collection[str], new: Sequence[str]) -> None:
    """Raise TreeError if two leaves get the same path."""
    if len(set(new)) == len(new):
        return
    olds: dict[str, str] = {}
    for old, path in zip(paths, new, strict=True):
        if path in olds:
            both = f"{show_path(olds[path])} and {show_path(old)}"
            raise TreeError(f"rename= gives {both} the same path {path!r}{_distinct_hint(rename, (olds[path], old))}")
        olds[path] = old


def _distinct_hint(rename: Rename | None, olds: tuple[str, str]) -> str:
    """How to give two leaves different paths, if `rename` is a mapping that names only one of them."""
    mapping: Mapping[str, str] = {} if rename is None or callable(rename) else rename
    kept = [old for old in olds if longest_prefix(old, mapping) is None]
    if len(kept) != 1:
        return ""
    (renamed,) = (head for old in olds if (head := longest_prefix(old, mapping)) is not None)
    head = mapping[renamed] or kept[0]
    both = {**mapping, head: f"replaced/{head}"}
    return (
        f": give {show_path(head)} another path too, as in rename={both}, or choose leaves with select=, which leaves"
        " out what the renamed leaves replace"
    )


def replaced_leaves(rename: Rename | None, paths: Sequence[str], new: Sequence[str]) -> set[int]:
    """The numbers of the leaves that renamed containers replace: if a leaf that a mapping names gets the path of one
    that it does not name, all that it does not name in the new container is replaced, so that a container never mixes
    the two."""
    if rename is None or callable(rename) or len(set(new)) == len(new):
        return set()
    named = {number: head for number, path in enumerate(paths) if (head := longest_prefix(path, rename)) is not None}
    others = {path for number, path in enumerate(paths) if number not in named}
    heads = {rename[head] for number, head in named.items() if new[number] in others}
    return {n for n, path in enumerate(paths) if n not in named and longest_prefix(path, heads) is not None}


def _new_path(rename: Callable[[str], str], path: str) -> str:
    """The result of a `rename` function for a path. Raises InputError, TreeError unless it is a valid path."""
    new = rename(path)
    if not isinstance(new, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"rename returned {reprlib.repr(new)} for leaf {show_path(path)}; expected a path, a str")
    _require_path(path, new)
    return str.__str__(new)


def _require_path(old: str, new: str) -> None:
    """Raise TreeError if no keys have the new path."""
    if problem := path_problem(new):
        raise TreeError(f"rename gives {show_path(old)} the path {new!r}, which {problem}")


def _require_mapping(rename: object) -> Mapping[str, str]:
    if not isinstance(rename, Mapping):
        raise InputError(
            "rename must be a mapping of saved paths to wanted paths, or a function of the saved path, found"
            f" {_abbreviate(rename)}"
        )
    mapping = cast("Mapping[object, object]", rename)
    for old, new in mapping.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise InputError(f"rename maps {_abbreviate(old)} to {_abbreviate(new)}; both must be paths, str")
        _require_path(old, new)
    return cast("Mapping[str, str]", mapping)


def _rename_path(mapping: Mapping[str, str], path: str) -> str:
    """A path with its longest head that is in the mapping replaced."""
    head = longest_prefix(path, mapping)
    return path if head is None else join_paths(mapping[head], relative_path(head, path) or "")


def unmatched_hint(pattern: str, paths: Iterable[str]) -> str:
    """A hint for a glob or path that matches none of these paths: the glob with its keys escaped, or for any depth, if
    it matches; otherwise similar paths."""
    paths = list(paths)
    escaped = path_of_name(pattern)
    for other in (escaped, f"**/{pattern}", f"**/{escaped}") if pattern else ():
        if other != pattern and any(map(_glob(other).fullmatch, paths)):
            return f"; did you mean {other!r}?"
    return closest_hint(pattern.removesuffix("/**"), paths)


def _unmatched(what: str, entries: Iterable[str], paths: Collection[str], where: str) -> str:
    """The error for entries of an argument that match nothing, with hints."""
    texts = list(entries)
    candidates = {*paths, *containers_of(paths)}
    # Each hint needs a scan of all paths.
    hints = [unmatched_hint(text.strip("'\""), candidates) if number < 3 else "" for number, text in enumerate(texts)]
    if len(paths) == 1:
        leaves = f"does not match {show_path(*paths)}, the only leaf of {where}"
    elif paths:
        leaves = f"matches none of the {len(paths):,} leaves of {where}"
    else:
        leaves = f"matches nothing in {where}, which has no leaves"
    lines = [f"{text} {leaves}{hint}" for text, hint in zip(texts, hints, strict=True)]
    return f"{what}: {lines[0]}" if len(lines) == 1 else f"{what} has entries that match nothing:\n{show_lines(lines)}"
