"""Which steps are kept, and which subtrees of them: decisions on what is known of the steps, without I/O."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

from jaxckpt._format.records import Manifest, StepRecord
from jaxckpt._runtime.errors import InputError
from jaxckpt._runtime.options import whole_number
from jaxckpt._storage.steps import Mode, best_of


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A published step, as its manifest describes it."""

    number: int
    created: datetime.datetime
    record: StepRecord
    undroppable: tuple[str, ...] = ()
    """Subtrees that cannot be dropped: they do not exist, or share their stacks with other leaves."""

    @classmethod
    def of(cls, number: int, manifest: Manifest, undroppable: Sequence[str] = ()) -> Self:
        created = datetime.datetime.fromisoformat(manifest.created)
        return cls(number, created, manifest.step or StepRecord(number), tuple(undroppable))


@dataclass(frozen=True, slots=True)
class Rules:
    """Which steps, and which subtrees of them, are kept."""

    last: int | None = None
    every: int | None = None
    best: tuple[str, Mode] | None = None
    younger: datetime.timedelta | None = None
    components: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, last: object, every: object, best: object, younger: object, components: object) -> Self:
        """The rules that a caller asks for. Raises InputError."""
        if last is not None:
            last = whole_number(last, "keep_last", least=1)
        if every is not None:
            every = whole_number(every, "keep_every", least=1)
        match best:
            case None | (str(), "min" | "max"):
                pass
            case _:
                raise InputError(f'keep_best must be (metric, "min") or (metric, "max"), found {best!r}')
        if younger is not None and not (isinstance(younger, datetime.timedelta) and younger >= datetime.timedelta(0)):
            raise InputError(f"keep_for must be a datetime.timedelta, and not below zero, found {younger!r}")
        counts: dict[str, int] = {}
        if components is not None and not isinstance(components, Mapping):
            raise InputError(f'components must be a mapping such as {{"opt_state": 1}}, found {components!r}')
        for path, count in cast("Mapping[object, object]", components or {}).items():
            if not isinstance(path, str):
                raise InputError(f"components must have paths of subtrees for keys, found {path!r}")
            counts[path] = whole_number(count, f"components[{path!r}]", least=1)
        return cls(last, every, None if best is None else (best[0], best[1]), younger, counts)

    def outdated(self, steps: Sequence[SavedStep], now: datetime.datetime) -> set[int]:
        """Numbers of the steps that no rule keeps, of all published ones, oldest first."""
        return {step.number for step in steps} - self._kept(steps, now)

    def _kept(self, steps: Sequence[SavedStep], now: datetime.datetime) -> set[int]:
        if (self.last, self.every, self.best, self.younger) == (None,) * 4 or not self.measured(steps):
            return {step.number for step in steps}
        kept = {step.number for step in steps[-(self.last or 1) :]}
        if self.every is not None:
            kept |= {step.number for step in steps if step.number % self.every == 0}
        if (best := self.best_of(steps)) is not None:
            kept.add(best)
        if self.younger is not None:
            kept |= {step.number for step in steps if now - step.created < self.younger}
        return kept

    def measured(self, steps: Sequence[SavedStep]) -> bool:
        """Whether a step has the metric that steps are compared by; until one has, none is deleted."""
        return self.best is None or any(self.best[0] in step.record.metrics for step in steps)

    def best_of(self, steps: Sequence[SavedStep]) -> int | None:
        """The step that `best` names; None if there is no such rule, or no step has the metric."""
        metrics = ((step.number, step.record.metrics) for step in steps)
        return None if self.best is None else best_of(metrics, *self.best)

    def dropped(self, steps: Sequence[SavedStep]) -> dict[int, list[str]]:
        """For each of the kept steps, oldest first, the subtrees that it still has and should not have."""
        found: dict[int, list[str]] = {}
        for path, count in self.components.items():
            for step in steps[:-count]:
                if path not in step.record.dropped and path not in step.undroppable:
                    found.setdefault(step.number, []).append(path)
        return found
