"""Rules that map one tree to another: they rename, transpose, stack, split and cast leaves.

A checkpoint viewed through rules is another checkpoint. A device's box of a target leaf is traced back to boxes of
source leaves. Each process therefore reads only the data of its own shards, and no leaf is ever complete in host
memory.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxckpt._keywords import explain_keywords, explain_names
from jaxckpt._model.paths import closest_hint, join_paths
from jaxckpt._model.select import parse_select
from jaxckpt._model.tree import nested_dicts
from jaxckpt._options import require_bool
from jaxckpt._rules.apply_rule import SourceLeaves, apply_rule, rank_of
from jaxckpt._rules.axis_layouts import MisfitError
from jaxckpt._rules.rule import Paths, Rule, captures, matching_paths, paths_in, tails_below
from jaxckpt._sources.compose import compose
from jaxckpt._sources.foreign import ForeignArray, ForeignCheckpoint
from jaxckpt._sources.source import Source
from jaxckpt.errors import InputError, MismatchError, Problem, show_count


@explain_names
@dataclass(frozen=True, slots=True)
class Rules:
    """A mapping between two trees: `restore`, `load_numpy`, `open`, `plan`, `diff` and `convert` take it as `rename=`.

    A checkpoint read through rules has only the leaves that the rules make, in nested dicts by path. Every leaf of the
    source must match a rule or `drop`, unless `keep` is set. Data is read only when a value is needed, and only the
    data for that value. If the rules do not fit a checkpoint, these functions raise one MismatchError that lists all
    problems.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> from jaxckpt.rules import Rule, Rules
        >>> tree = {f"h.{i}.w": np.full((2, 3), i) for i in range(4)}
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/rules", tree, overwrite=True)
        >>> rules = Rules([Rule(source="h.{i}.w", target="layers/w", layout="out in -> i in out")])
        >>> jaxckpt.load_numpy("/tmp/jaxckpt-doc/rules", rename=rules)["layers"]["w"].shape
        (4, 3, 2)
    """

    rules: Sequence[Rule]
    """The rules. Each target path is made by exactly one of them."""

    drop: Sequence[str] = ()
    """Patterns of source leaves that the target lacks, as in `select=`: a path with everything below, or a glob. A rule
    for a container ("**") leaves them out."""

    keep: bool = False
    """Whether the other leaves of the source, including PRNG keys and Python values, keep their paths and values."""

    within: str = ""
    """The container whose leaves are the source; all others are left out. `below` sets it."""

    def __post_init__(self) -> None:
        require_bool(self.keep, "Rules.keep")
        if not isinstance(self.rules, Sequence) or not all(isinstance(rule, Rule) for rule in self.rules):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"Rules takes a list of Rule, found {reprlib.repr(self.rules)}")
        drop: Any = self.drop
        if isinstance(drop, str) or not isinstance(drop, Collection) or not all(isinstance(path, str) for path in drop):
            raise InputError(f"Rules.drop must be a list of paths, found {reprlib.repr(drop)}")

    def __repr__(self) -> str:
        return f"<Rules: {show_count(len(self.rules), 'rule')}, {show_count(len(self.drop), 'dropped path')}>"

    def inverse(self, dtype: str | None = None) -> Rules:
        """The rules from target to source, without the dropped leaves.

        Args:
            dtype: The dtype of the source, for rules that cast. None keeps the dtype of the target.
        """
        tied = [name for rule in self.rules if rule.tied for name in paths_in(rule.target)]
        return Rules([rule.inverse(dtype) for rule in self.rules if not rule.tied], tied, self.keep)

    def below(self, *, source: str = "", target: str = "") -> Rules:
        """The rules for a source, a target or both that are a container of a larger tree, such as a training state.

        Args:
            source: The path of the container with the source leaves, such as "params"; leaves outside of it are left
                out.
            target: The path of the container for the target leaves.

        Examples:
            >>> from jaxckpt.rules import Rule, Rules
            >>> Rules([Rule(source="wte", target="embed")]).below(target="params").rules[0].target
            'params/embed'
        """

        def moved(rule: Rule) -> Rule:
            ours = {name: _below(source, getattr(rule, name)) for name in ("source", "scales", "copies")}
            return replace(rule, **ours, target=_below(target, rule.target))

        drop = [join_paths(source, name) for name in self.drop]
        return Rules([*map(moved, self.rules)], drop, self.keep, join_paths(source, self.within))


def _below(container: str, names: Paths) -> Paths:
    joined = tuple(join_paths(container, name) for name in paths_in(names))
    return joined[0] if isinstance(names, str) else joined


@explain_keywords
def stack(layers: str | Sequence[str], *, axis: int = 0) -> Rules:
    """Rules that stack the layers of a tree for `jax.lax.scan`; all other leaves stay. Their `inverse()` unstacks.

    Args:
        layers: The path of one layer, with `{i}` for its number, such as "params/layers/{i}"; or a list of such paths,
            for a training state with several copies of the model. The leaves of all layers are stacked below the path
            without the number, "params/layers".
        axis: The axis of the layers in the stacked leaves.

    Raises:
        InputError: A path has not exactly one `{i}`.

    Examples:
        >>> import numpy as np, jaxckpt
        >>> tree = {"layers": [{"w": np.ones(3)}, {"w": np.zeros(3)}], "step": 4}
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/stack", tree, overwrite=True)
        >>> stacked = jaxckpt.load_numpy("/tmp/jaxckpt-doc/stack", rename=jaxckpt.rules.stack("layers/{i}"))
        >>> stacked["layers"]["w"].shape
        (2, 3)
    """
    paths = layers if isinstance(layers, list | tuple) else [layers]
    return Rules([_stacked(path, axis) for path in paths], keep=True)


def _stacked(layer: object, axis: int) -> Rule:
    """The rule that stacks the layers at the paths of one layer."""
    found = captures(layer) if isinstance(layer, str) else []
    if not isinstance(layer, str) or len(found) != 1:
        raise InputError(f"stack takes the path of a layer with one number, such as 'layers/{{i}}', found {layer!r}")
    components = (re.sub(rf"[_.]?\{{{found[0]}\}}", "", component) for component in layer.split("/"))
    whole = "/".join(filter(None, components))
    return Rule(source=f"{layer}/**", target=join_paths(whole, "**"), axis=axis)


def view_through(rules: Rules, source: Source) -> ForeignCheckpoint:
    """The view of a checkpoint through rules. Raises a MismatchError that lists all problems."""
    leaves = SourceLeaves(source, rules.within)
    targets: dict[str, ForeignArray] = {}
    claimed: dict[str, Rule] = {}
    dropped, problems = _dropped_paths(rules, leaves)
    rules_of_leaves, misfits = _rules_of_leaves(rules.rules, leaves, dropped)
    problems += misfits
    for rule in rules_of_leaves:
        matches = [matching_paths(name, leaves.paths, rule.numbers) for name in paths_in(rule.source)]
        if not any(matches):
            problems.append(Problem(None, f"{rule} matches nothing{_hint(paths_in(rule.source)[0], leaves.paths)}"))
            continue
        scales = [matching_paths(name, leaves.paths, rule.numbers) for name in paths_in(rule.scales)]
        copies = [matching_paths(name, leaves.paths) for name in paths_in(rule.copies)]
        own = [*copies] if rule.tied else [*matches, *scales, *copies]
        paths = [path for matched in own for path in matched.values()]
        problems += [
            Problem(path, f"matches both {claimed[path]} and {rule}")
            for path in paths
            if claimed.setdefault(path, rule) is not rule
        ]
        made, misfits = apply_rule(rule, matches, scales, leaves)
        problems += [Problem(None, f"{rule}: {misfit}") for misfit in misfits]
        problems += [
            Problem(path, f"is made by {rule} and by another rule")
            for path, array in made
            if targets.setdefault(path, array) is not array
        ]
    problems += [
        Problem(path, f"is claimed by {claimed[path]} and dropped") for path in sorted(claimed.keys() & dropped)
    ]
    named = claimed.keys() | dropped
    others = [path for path in leaves.paths if path not in named]
    if rules.keep:
        problems += [Problem(path, "is made by a rule, and also kept") for path in others if path in targets]
        kept = {path: leaves.leaf(path) for path in others}
    else:
        remedy = "list unwanted leaves in Rules.drop, or keep all others with Rules(…, keep=True)"
        problems += [Problem(path, "matches no rule", remedy) for path in others]
        kept = {}
    if problems:
        raise MismatchError.of(f"the rules do not fit {source.url} in {show_count(len(problems), 'place')}", problems)
    manifest = source.manifest
    view = compose(source.url, nested_dicts({**targets, **kept}), manifest.format, metadata=manifest.metadata)
    return replace(view, origins=[source])


def _dropped_paths(rules: Rules, leaves: SourceLeaves) -> tuple[set[str], list[Problem]]:
    """The source leaves that the target lacks, and problems."""
    dropped: set[str] = set()
    problems: list[Problem] = []
    for name in rules.drop:
        matched = [name] if name in leaves.paths else [*filter(parse_select([name]), leaves.paths)]
        dropped.update(matched)
        if not matched:
            problems.append(Problem(None, f"drop {name!r} matches nothing{_hint(name, leaves.paths)}"))
    return dropped, problems


def _rules_of_leaves(
    rules: Iterable[Rule], leaves: SourceLeaves, dropped: Collection[str]
) -> tuple[list[Rule], list[Problem]]:
    """The rules, with a rule for each leaf that is not dropped in place of those for all leaves below a container; and
    problems."""
    made: list[Rule] = []
    problems: list[Problem] = []
    paths = [path for path in leaves.paths if path not in dropped]
    for rule in rules:
        tails = tails_below(str(rule.source), paths) if rule.is_for_container else {}
        if not tails:
            made.append(rule)
        for tail, path in tails.items():
            try:
                made.append(rule.for_leaf(tail, rank_of(leaves.array(path, or_key=rule.takes_keys))))
            except MisfitError as misfit:
                problems.append(Problem(None, f"{rule}: {misfit}"))
    return made, problems


def _hint(name: str, paths: Iterable[str]) -> str:
    """A hint for a name that matches no path: if it has a capture, a similar path with the capture for each number."""
    for capture in captures(name)[:1]:
        paths = dict.fromkeys(re.sub(r"\d+", f"{{{capture}}}", path) for path in paths)
    return closest_hint(name, paths)
