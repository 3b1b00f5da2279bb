"""Which differences between target and checkpoint a restore accepts, and the warning that counts those it accepted."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxckpt._arguments.pytree import flatten, key_problem
from jaxckpt._model.paths import closest_hint, containers_of, longest_prefix, path_prefixes
from jaxckpt._model.tree import Structure, nested_dicts, nodes_of
from jaxckpt._options import require_bool
from jaxckpt.errors import InputError, show_count, show_path

Strict = Any
"""True, False, or a pytree prefix of these."""

_LISTED = 6
"""The most subtrees that the warning names."""


@dataclass(frozen=True, slots=True)
class Strictness:
    """The meaning of a `strict` argument."""

    by_prefix: Mapping[str, bool]

    @classmethod
    def of(cls, strict: Strict) -> Strictness:
        """Raises InputError unless every entry is a bool."""
        if isinstance(strict, bool):
            return cls({"": strict})
        entries = [("", None)] if strict is None else [(entry.path, entry.value) for entry in flatten(strict)[0]]
        return cls(
            {path: require_bool(value, "strict", f" at {show_path(path)}" if path else "") for path, value in entries}
        )

    @property
    def is_loose(self) -> bool:
        """Whether it accepts anything."""
        return not all(self.by_prefix.values())

    def __call__(self, path: str) -> bool:
        """Whether a difference at a path is an error. A path without an entry is strict."""
        head = longest_prefix(path, self.by_prefix)
        return head is None or self.by_prefix[head]

    def require_used(self, *structures: Structure) -> None:
        """Raise InputError for an entry at whose path none of these trees, of target and checkpoint, has anything."""
        entries = {prefix: value for prefix, value in self.by_prefix.items() if prefix}
        paths = {path for structure in structures for path, _ in nodes_of(structure)} if entries else set[str]()
        for prefix, value in entries.items():
            if prefix not in paths:
                problem = key_problem("strict", prefix, repr(value), paths, "")
                nothing = f"strict has {show_path(prefix)}, at which neither target nor checkpoint has anything"
                raise InputError(problem or f"{nothing}{closest_hint(prefix, paths)}")


@dataclass(frozen=True, slots=True)
class AcceptedDifferences:
    """What a restore left out without an error."""

    restored: Sequence[str]
    """Paths of the leaves that come from the checkpoint."""

    missing: Sequence[str]
    """Paths of the target's leaves that the checkpoint lacks."""

    extra: Sequence[str]
    """Paths of the checkpoint's leaves that the target lacks."""

    unselected: Sequence[str]
    """Paths of leaves that the checkpoint has, but that `init` creates, because `select` leaves them out."""

    owner: str
    """What has the values of missing leaves: "target" or "init"."""

    def __str__(self) -> str:
        """A phrase that counts what was restored and what was not, by subtree."""
        texts = [self._restored_text()]
        if self.missing:
            texts.append(f"not in the checkpoint, and as in the {self.owner}: {self._by_subtree(self.missing)}")
        if self.unselected:
            unselected = self._by_subtree(self.unselected)
            texts.append(f"in the checkpoint, but left out by select=, and as in the {self.owner}: {unselected}")
        if self.extra:
            texts.append(f"only in the checkpoint, and left out: {self._by_subtree(self.extra)}")
        return "; ".join(texts)

    def _restored_text(self) -> str:
        """How many of the target's leaves come from the checkpoint: in total, and for each key at its top."""
        restored = collections.Counter(path.partition("/")[0] for path in self.restored)
        left_out = (path.partition("/")[0] for path in (*self.missing, *self.unselected))
        totals = restored + collections.Counter(left_out)
        counts = [f"{restored[key]:,} of {total:,} in {show_path(key)}" for key, total in totals.items()]
        total = show_count(totals.total(), "leaf")
        return f"restored {len(self.restored):,} of the {total} of the {self.owner} ({_listed(counts)})"

    def _by_subtree(self, paths: Iterable[str]) -> str:
        counts = collections.Counter(_outermost_without(paths, self.restored))
        return _listed([show_path(head) if n == 1 else f"{n:,} below {show_path(head)}" for head, n in counts.items()])


def accepting(paths: Collection[str], restored: Iterable[str]) -> str:
    """The argument that accepts differences only at these paths, such as `strict={'opt_state': False}`; empty if there
    are none, or if the argument would be long."""
    heads = dict.fromkeys(_outermost_without(paths, restored)) if paths else {}
    is_short = 0 < len(heads) <= _LISTED and "" not in heads
    return f"strict={nested_dicts(dict.fromkeys(heads, False))}" if is_short else ""


def _outermost_without(paths: Iterable[str], restored: Iterable[str]) -> list[str]:
    """For each path, the path of the outermost container above it below which nothing is restored, or itself."""
    containers = containers_of(restored)
    return [next((head for head in reversed([*path_prefixes(path)]) if head not in containers), path) for path in paths]


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _LISTED
    return ", ".join([*texts[:_LISTED], *([f"and {more:,} more"] if more > 0 else [])])
