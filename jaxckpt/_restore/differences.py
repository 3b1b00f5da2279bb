"""Differences between target and checkpoint: those that a restore accepts, and arguments that resolve the others.

A container may have moved: an optimizer was wrapped, or layers were stacked for `jax.lax.scan`.

missing and extra leaves ─▶ new names of containers, or rules for layers ─▶ the arguments that find the leaves
"""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxckpt._arguments.pytree import flatten, key_problem
from jaxckpt._model.paths import closest_hint, containers_of, join_paths, longest_prefix, path_prefixes
from jaxckpt._model.select import rename_paths
from jaxckpt._model.tree import Structure, nested_dicts, nodes_of
from jaxckpt._options import require_bool
from jaxckpt.errors import InputError, TreeError, show_count, show_path

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


Shape = tuple[int, ...]

Shapes = Mapping[str, Shape | None]
"""The shape of each leaf by its path; None if it is unknown, or if the leaf is not an array."""

_MOST = 8
"""The most names or rules that an error suggests."""

_AMBIGUOUS = 32
"""The most containers among which one with the same leaf below it is looked for."""

_NUMBERED = re.compile(r"(.*?)([_.]?)(0|[1-9]\d{0,8})")
"""A component that ends with the number of a layer: "3", "layers_3", "block3"."""


def moved_remedy(saved: Shapes, target: Shapes) -> str:
    """The arguments with which a target's leaves are found in a checkpoint, and why; empty if no container moved."""
    missing = {path: shape for path, shape in target.items() if path not in saved}
    extra = {path: shape for path, shape in saved.items() if path not in target}
    if rules := _layer_rules(missing, extra):
        argument = f"rename={_show_rules(rules)}"
        renamed = {*saved}.difference(*(rule.sources for rule in rules)).union(*(rule.targets for rule in rules))
        reason = "layers are stacked in the " + ("target" if rules[0].stacks else "checkpoint")
    elif names := _new_names(saved, target, missing, extra):
        argument = f"rename={names}"
        renamed = set(rename_paths(names, [*saved]))
        reason = "containers have other paths in the checkpoint"
    else:
        return ""
    rest = accepting(sorted(renamed ^ target.keys()), renamed & target.keys())
    n_found = len(renamed & missing.keys())
    arguments = f"{argument}, {rest}" if rest else argument
    return f"{reason}, so {n_found:,} of the missing leaves are found with {arguments}"


# Containers with another path -----------------------------------------------------------------------------


def _new_names(saved: Shapes, target: Shapes, missing: Shapes, extra: Shapes) -> dict[str, str]:
    """The new path of each container of the checkpoint that has another path in the target; empty if there is none."""
    heads_by_tail: dict[str, list[str]] = {}
    for path in missing:
        for head, tail in _splits(path):
            heads_by_tail.setdefault(tail, []).append(head)
    names: dict[str, str] = {}
    for path in extra:
        for head, tail in _splits(path):
            if tail in heads_by_tail:
                candidates = heads_by_tail[tail] if len(heads_by_tail[tail]) <= _AMBIGUOUS else []
                heads = sorted((new for new in candidates if _is_moved(head, new)), key=_depth)
                if heads and (len(heads) == 1 or _depth(heads[0]) < _depth(heads[1])):
                    names.setdefault(head, heads[0])
                break
        if len(names) > _MOST:
            return {}
    try:
        renamed = rename_paths(names, [*saved]) if names else []
    except TreeError:  # two leaves would have the same path
        return {}
    pairs = zip(renamed, saved.values(), strict=False)
    fits = all(_fits(shape, target.get(path)) for path, shape in pairs)
    n_differing = len(target.keys() ^ set(renamed))
    return names if fits and n_differing < len(missing) + len(extra) else {}


def _splits(path: str) -> Iterator[tuple[str, str]]:
    """A path as head and tail, in every way, with the longest tail first."""
    yield "", path
    for match in re.finditer("/", path):
        yield path[: match.start()], path[match.end() :]


def _depth(path: str) -> int:
    return len(path.split("/")) if path else 0


def _is_moved(old: str, new: str) -> bool:
    """Whether one path has more components than the other and otherwise equals it, as in a wrapped optimizer, or one
    number of a path is another, as in a longer chain. Other paths may hold another quantity."""
    olds, news = (path.split("/") if path else [] for path in (old, new))
    if len(olds) == len(news):
        differing = [pair for pair in zip(olds, news, strict=True) if pair[0] != pair[1]]
        return len(differing) == 1 and all(name.isdecimal() for name in differing[0])
    shorter, longer = sorted((olds, news), key=len)
    rest = iter(longer)
    return all(name in rest for name in shorter)


def _fits(shape: Shape | None, other: Shape | None) -> bool:
    return shape is None or other is None or shape == other


# Layers ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LayerRule:
    """A rule that stacks the layers in numbered containers, or the inverse."""

    numbered: str
    """The path of the containers, with `{i}` for the number."""

    whole: str
    """The path of the container with stacked layers."""

    stacks: bool
    """Whether the checkpoint has the numbered containers."""

    shapes: dict[str, dict[int, Shape | None]] = field(default_factory=dict[str, dict[int, "Shape | None"]])
    """The shape of each layer, by the path below a container and the number."""

    axis: int = 0

    @property
    def sources(self) -> list[str]:
        return self._numbered_paths if self.stacks else self._whole_paths

    @property
    def targets(self) -> list[str]:
        return self._whole_paths if self.stacks else self._numbered_paths

    @property
    def _numbered_paths(self) -> list[str]:
        return [
            join_paths(self.numbered.replace("{i}", str(number)), tail)
            for tail, layers in self.shapes.items()
            for number in layers
        ]

    @property
    def _whole_paths(self) -> list[str]:
        return [join_paths(self.whole, tail) for tail in self.shapes]

    def fits(self, whole: Shapes) -> bool:
        """Whether all leaves can be stacked along one axis, which this sets."""
        axes: set[int] | None = None
        for tail, layers in self.shapes.items():
            shape, stacked = layers.get(0), whole[join_paths(self.whole, tail)]
            if shape is None or stacked is None or any(layers.get(n) != shape for n in range(len(layers))):
                return False
            fitting = {a for a in range(len(stacked)) if (*shape[:a], len(layers), *shape[a:]) == stacked}
            axes = fitting if axes is None else axes & fitting
        self.axis = min(axes or {0})
        return bool(axes) and ("" not in self.shapes or len(self.shapes) == 1)

    def __str__(self) -> str:
        tail = "" if "" in self.shapes else "**"
        ends = join_paths(self.numbered, tail), join_paths(self.whole, tail)
        source, target = ends if self.stacks else ends[::-1]
        how = f", axis={self.axis}" if self.axis else ""
        if not tail:  # a rule for leaves names their axes
            layer = [f"d{n}" for n in range(len(self.shapes[""][0] or ()))]
            sides = " ".join(layer), " ".join([*layer[: self.axis], "i", *layer[self.axis :]])
            how = f", layout={' -> '.join(sides if self.stacks else sides[::-1])!r}"
        return f"jaxckpt.rules.Rule(source={source!r}, target={target!r}{how})"


def _show_rules(rules: Sequence[_LayerRule]) -> str:
    """The expression that makes the rules."""
    if len({rule.axis for rule in rules}) == 1 and not any("" in rule.shapes for rule in rules):
        layers = [rule.numbered for rule in rules]
        axis = f", axis={rules[0].axis}" if rules[0].axis else ""
        inverse = "" if rules[0].stacks else ".inverse()"
        return f"jaxckpt.rules.stack({(layers if len(layers) > 1 else layers[0])!r}{axis}){inverse}"
    return f"jaxckpt.rules.Rules([{', '.join(map(str, rules))}], keep=True)"


def _layer_rules(missing: Shapes, extra: Shapes) -> list[_LayerRule]:
    """The rules that stack or unstack layers; empty if this does not explain any leaf."""
    for stacks, numbered, whole in ((True, extra, missing), (False, missing, extra)):
        rules: dict[tuple[str, str], _LayerRule] = {}
        for path, shape in numbered.items():
            for before, component, tail in _containers(path):
                match = _NUMBERED.fullmatch(component)
                if match is None or "{" in path or "*" in path:
                    continue
                container = join_paths(before, match[1])
                if join_paths(container, tail) in whole:
                    name = join_paths(before, f"{match[1]}{match[2]}{{i}}")
                    rule = rules.setdefault((name, container), _LayerRule(name, container, stacks))
                    rule.shapes.setdefault(tail, {})[int(match[3])] = shape
        if 0 < len(rules) <= _MOST and all(rule.fits(whole) for rule in rules.values()):
            return [*rules.values()]
    return []


def _containers(path: str) -> Iterator[tuple[str, str, str]]:
    """For a leaf and each container above it: the path before its name, its name, and the path below it."""
    components = path.split("/")
    for number in range(len(components)):
        yield "/".join(components[:number]), components[number], "/".join(components[number + 1 :])
