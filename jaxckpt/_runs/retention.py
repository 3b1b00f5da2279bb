"""The retention policy: which steps and subtrees are kept, and why. Pure functions of the steps' properties, no I/O."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

from jaxckpt._model.records import Manifest, StepRecord
from jaxckpt._options import optional, require_bool, require_seconds, require_whole_number
from jaxckpt._run_folder.steps import Mode, best_of
from jaxckpt.errors import InputError

Predicate = Callable[[int, Mapping[str, float | None]], bool]
"""A function of a step's number and metrics."""

BestRule = tuple[str, Mode] | tuple[str, Mode, int]
"""The argument `keep_best`: a metric, which of its values are best, and the number of steps."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The properties of a published step, from its manifest."""

    number: int
    created: datetime.datetime
    record: StepRecord
    save_id: str = ""
    undroppable: tuple[str, ...] = ()
    """Subtrees that cannot be dropped: they do not exist, or share their stacks with other leaves."""

    def with_metrics(self, added: Mapping[str, float | None]) -> Self:
        """The same step with additional metrics."""
        if not added:
            return self
        return replace(self, record=self.record.with_metrics({**self.record.metrics, **added}))

    @classmethod
    def of(cls, number: int, manifest: Manifest, undroppable: Sequence[str] = ()) -> Self:
        return cls(
            number,
            creation_time(manifest.created),
            manifest.step or StepRecord(number),
            manifest.save_id,
            (*undroppable,),
        )


_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
UNDATED = datetime.datetime.max.replace(tzinfo=datetime.UTC)
"""The time of a step whose manifest has no valid time: it always counts as new."""


def creation_time(created: str) -> datetime.datetime:
    """The time at which a step was saved, from its manifest."""
    try:
        created_at = datetime.datetime.fromisoformat(created)
    except ValueError:
        return UNDATED
    return created_at if created_at.tzinfo else created_at.replace(tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of the rules about a published step."""

    step: SavedStep
    kept: bool

    why: str
    """The rules that keep it ("keep_last=3"), or the rules that do not ("not kept by keep_last=3")."""

    dropped_subtrees: tuple[str, ...] = ()
    """Subtrees of a kept step that must be dropped."""


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the steps with the best values of a metric."""

    metric: str
    mode: Mode
    count: int = 1

    @classmethod
    def of(cls, rule: object) -> Self:
        """A rule from the caller's argument. Raises InputError."""
        match rule:
            case (str(metric), ("min" | "max") as mode, *rest) if len(rest) < 2:
                return cls(
                    metric, mode, require_whole_number(rest[0], "the count in keep_best", minimum=1) if rest else 1
                )
            case _:
                raise InputError(
                    'keep_best must be (metric, "min"), (metric, "max", count), or a list of such tuples,'
                    f" found {rule!r}"
                )

    def steps(self, steps: Iterable[SavedStep]) -> list[int]:
        """The steps that it keeps, best first."""
        return best_of(((step.number, step.record.metrics) for step in steps), self.metric, self.mode, self.count)

    def has_metric(self, steps: Iterable[SavedStep]) -> bool:
        """Whether a step has the metric."""
        return any(self.metric in step.record.metrics for step in steps)

    def __str__(self) -> str:
        return f"keep_best={(self.metric, self.mode, self.count)}"


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which steps, and which subtrees of them, are kept."""

    keep_last: int | None = None
    keep_last_seconds: float | None = None
    keep_every: int | None = None
    keep_every_seconds: float | None = None
    keep_best: tuple[KeepBest, ...] = ()
    keep_if: Predicate | None = None
    keep_last_of: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(
        cls,
        *,
        keep_last: object = None,
        keep_last_seconds: object = None,
        keep_every: object = None,
        keep_every_seconds: object = None,
        keep_best: object = None,
        keep_if: object = None,
        keep_last_of: object = None,
    ) -> Self:
        """The policy from the caller's arguments. Raises InputError."""
        numbers = (
            optional(require_whole_number, keep_last, "keep_last", minimum=1),
            optional(require_seconds, keep_last_seconds, "keep_last_seconds"),
            optional(require_whole_number, keep_every, "keep_every", minimum=1),
            optional(require_seconds, keep_every_seconds, "keep_every_seconds"),
        )
        # A list of rules, or one rule, which begins with a name.
        several = isinstance(keep_best, list | tuple) and not any(
            isinstance(entry, str) for entry in cast("list[Any]", keep_best)
        )
        bests = tuple(
            map(KeepBest.of, cast("list[Any]", keep_best) if several else () if keep_best is None else [keep_best])
        )
        counts: dict[str, int] = {}
        if keep_last_of is not None and not isinstance(keep_last_of, Mapping):
            raise InputError(f'keep_last_of must be a mapping such as {{"opt_state": 1}}, found {keep_last_of!r}')
        for path, count in cast("Mapping[object, object]", keep_last_of or {}).items():
            if not isinstance(path, str):
                raise InputError(f"keep_last_of must have paths of subtrees for keys, found {path!r}")
            counts[path] = require_whole_number(count, f"keep_last_of[{path!r}]", minimum=1)
        return cls(*numbers, bests, require_predicate(keep_if, "keep_if"), counts)

    def decide(self, steps: Sequence[SavedStep], now: datetime.datetime) -> list[Decision]:
        """The decision about each published step. Steps are in order, oldest first."""
        rules = self._steps_by_rule(steps, now)
        rules_by_step = {step.number: [rule for rule, kept in rules.items() if step.number in kept] for step in steps}
        if steps and not rules_by_step[steps[-1].number]:
            rules_by_step[steps[-1].number] = ["the newest"]
        drops = self._dropped([step for step in steps if rules_by_step[step.number]])
        unwanted = f"not kept by {', '.join(rules)}"
        return [
            Decision(
                step,
                bool(rules_by_step[step.number]),
                ", ".join(rules_by_step[step.number]) or unwanted,
                drops.get(step.number, ()),
            )
            for step in steps
        ]

    def deciding_steps(self, decisions: Sequence[Decision]) -> set[int]:
        """The steps in whose favor others are deleted or lose subtrees. While these exist, the decisions about the
        others hold, whatever else another process deletes: of fewer steps, each rule keeps all that it keeps of more.
        """
        steps = [decision.step for decision in decisions]
        deciding = set[int]()
        for path, count in self.keep_last_of.items():
            if any(path in decision.dropped_subtrees for decision in decisions):
                deciding.update([decision.step.number for decision in decisions if decision.kept][-count:])
        unwanted = [decision.step for decision in decisions if not decision.kept]
        if not unwanted:
            return deciding
        deciding.update(step.number for step in steps[-(self.keep_last or 1) :])
        for best in self.keep_best:
            with_metric = [step.number for step in steps if best.metric in step.record.metrics]
            deciding.update(best.steps(steps), with_metric[-1:])  # without any such step, the rule keeps everything
        if (every := self.keep_every) is not None:
            deciding.update(_first_beside(unwanted, steps, lambda step: step.number // every))
        if (seconds := self.keep_every_seconds) is not None:
            deciding.update(_first_beside(unwanted, steps, lambda step: _interval(step, seconds)))
        return deciding

    def _steps_by_rule(self, steps: Sequence[SavedStep], now: datetime.datetime) -> dict[str, set[int]]:
        """The steps that each rule keeps, by the text of the rule."""
        everything = {step.number for step in steps}
        for best in self.keep_best:
            if not best.has_metric(steps):
                return {f"{best}, while no step has that metric": everything}
        steps_by_rule: dict[str, set[int]] = {}
        if self.keep_last is not None:
            steps_by_rule[f"keep_last={self.keep_last}"] = {step.number for step in steps[-self.keep_last :]}
        if self.keep_last_seconds is not None:
            steps_by_rule[f"keep_last_seconds={self.keep_last_seconds:.15g}"] = {
                step.number for step in steps if (now - step.created).total_seconds() < self.keep_last_seconds
            }
        if self.keep_every is not None:
            steps_by_rule[f"keep_every={self.keep_every}"] = first_at_multiples(
                [step.number for step in steps], self.keep_every
            )
        if self.keep_every_seconds is not None:
            steps_by_rule[f"keep_every_seconds={self.keep_every_seconds:.15g}"] = first_in_intervals(
                steps, self.keep_every_seconds
            )
        for best in self.keep_best:
            steps_by_rule[str(best)] = {*best.steps(steps)}
        if self.keep_if is not None:
            steps_by_rule["keep_if"] = {
                step.number for step in steps if evaluate_predicate(self.keep_if, "keep_if", step.record)
            }
        return steps_by_rule or {"no rule": everything}

    def _dropped(self, steps: Sequence[SavedStep]) -> dict[int, tuple[str, ...]]:
        """For each kept step, oldest first, the subtrees that must be dropped."""
        dropped: dict[int, tuple[str, ...]] = {}
        for path, count in self.keep_last_of.items():
            for step in steps[:-count]:
                if path not in step.record.dropped and path not in step.undroppable:
                    dropped[step.number] = (*dropped.get(step.number, ()), path)
        return dropped


def first_at_multiples(numbers: Iterable[int], every: int) -> set[int]:
    """For each multiple of `every`, the first of these numbers at or after it. Only 0 itself is one for the multiple 0.

    The numbers are in order. A number stays chosen when others that are not chosen are removed, so that the rule may be
    applied after each save.
    """
    chosen: set[int] = set()
    last_multiple = 0
    for number in numbers:
        if number == 0 or number // every > last_multiple:
            chosen.add(number)
            last_multiple = number // every
    return chosen


def first_in_intervals(steps: Iterable[SavedStep], seconds: float) -> set[int]:
    """Of the steps that were saved in each interval of this length, the first; also all steps without a valid time.

    The intervals are counted from 1970 in UTC, so that they are the same after a restart. "First" is by number, so that
    a host whose clock is behind does not take the place of a step that was chosen before. A step stays chosen when
    others that are not chosen are removed.
    """
    first: dict[float, int] = {}
    undated = set[int]()
    for step in steps:
        if step.created == UNDATED:
            undated.add(step.number)
        else:
            first.setdefault(_interval(step, seconds), step.number)
    return {*first.values()} | undated


def _interval(step: SavedStep, seconds: float) -> float:
    """The number of the interval in which a step was saved."""
    # Times are in whole seconds, so a shorter interval contains the same steps as one second.
    return (step.created - _EPOCH).total_seconds() // max(seconds, 1.0)


def _first_beside(
    unwanted: Iterable[SavedStep], steps: Iterable[SavedStep], interval: Callable[[SavedStep], float]
) -> set[int]:
    """The first of the steps in each interval of an unwanted one."""
    first: dict[float, int] = {}
    for step in steps:
        first.setdefault(interval(step), step.number)
    return {first[interval(step)] for step in unwanted}


def require_predicate(value: object, name: str) -> Predicate | None:
    """A predicate from the caller's argument. Raises InputError."""
    if value is not None and not callable(value):
        raise InputError(f"{name} must be a function of (step, metrics), found {value!r}")
    return cast("Predicate | None", value)


def evaluate_predicate(predicate: Predicate, name: str, record: StepRecord) -> bool:
    """The result of a predicate for a step. Raises InputError unless it is True or False."""
    return require_bool(predicate(record.number, dict(record.metrics)), f"what {name} returns for step {record.number}")
