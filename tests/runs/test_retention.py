"""Which steps are saved and kept: the rules compared with a model of them, alone and on real directories with readers
and pins."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from known_rules import know_rules

import jaxckpt
from jaxckpt._model.manifest import encode
from jaxckpt._model.records import StepRecord
from jaxckpt._run_folder import leases
from jaxckpt._runs.deletion import Deletion
from jaxckpt._runs.retention import RetentionPolicy, SavedStep, first_at_multiples, first_in_intervals
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
FAST = jaxckpt.Options(sync=False)

Metrics = Mapping[str, float | None]


# The model -------------------------------------------------------------------------------------------------


def odd_or_two(step: int, metrics: Metrics) -> bool:
    """A predicate."""
    return step % 5 == 3 or metrics.get("loss") == 2.0


@dataclass
class Kept:
    """A step that must exist, in the model."""

    metrics: Metrics
    days: int = 0
    """Age of the step in days."""

    whole: bool = True
    """Whether it still has the subtree "opt"."""

    is_new: bool = False
    """Whether it is being saved, so that its age is 0."""

    @property
    def age_seconds(self) -> float:
        return 0.0 if self.is_new else 86400.0 * self.days + 1


def is_first_at_a_multiple(step: int, steps: Iterable[int], every: int) -> bool:
    """Whether no other step is as near to a multiple below it. Of the multiple 0, only step 0 is."""
    multiples = range(every, step + 1, every)
    return step == 0 or any(step == min(other for other in steps if other >= multiple) for multiple in multiples)


def is_first_in_its_interval(step: int, steps: Mapping[int, Kept], seconds: float) -> bool:
    """Whether no step of a lower number was saved in the same interval."""
    interval = {other: (NOW.timestamp() - kept.age_seconds) // seconds for other, kept in steps.items()}
    return step == min(other for other in steps if interval[other] == interval[step])


def wanted(steps: Mapping[int, Kept], rules: Mapping[str, Any]) -> set[int]:
    """The steps that the rules keep, decided for each step separately."""
    given = {name: value for name, value in rules.items() if value is not None and name != "keep_last_of"}
    bests = given.get("keep_best", ())
    if not given or any(all(best[0] not in kept.metrics for kept in steps.values()) for best in bests):
        return {*steps}

    def among_best(step: int, metric: str, mode: str, count: int = 1) -> bool:
        mine = steps[step].metrics.get(metric)
        if mine is None:
            return False
        better = 0
        for other, kept in steps.items():
            value = kept.metrics.get(metric)
            if value is not None and other != step:
                ahead = value < mine if mode == "min" else value > mine
                better += ahead or (value == mine and other > step)
        return better < count

    return {
        step
        for step, kept in steps.items()
        if sum(other > step for other in steps) < given.get("keep_last", 1)
        or ("keep_every" in given and is_first_at_a_multiple(step, steps, given["keep_every"]))
        or any(among_best(step, *best) for best in bests)
        or ("keep_last_seconds" in given and kept.age_seconds < given["keep_last_seconds"])
        or ("keep_every_seconds" in given and is_first_in_its_interval(step, steps, given["keep_every_seconds"]))
        or ("keep_if" in given and given["keep_if"](step, kept.metrics))
    }


VALUES = st.one_of(st.none(), st.sampled_from([-1.5, 0.0, 2.0]))
MODES = st.sampled_from(["min", "max"])
BESTS = st.one_of(
    st.tuples(st.sampled_from(["loss", "accuracy"]), MODES),
    st.tuples(st.sampled_from(["loss", "accuracy"]), MODES, st.integers(1, 3)),
)
RULES = st.fixed_dictionaries(
    {
        "keep_last": st.one_of(st.none(), st.integers(1, 4)),
        "keep_every": st.one_of(st.none(), st.integers(2, 4)),
        "keep_best": st.one_of(st.none(), st.lists(BESTS, min_size=1, max_size=2)),
        "keep_last_seconds": st.one_of(st.none(), st.just(1e-9), st.integers(1, 4).map(lambda days: 86400.0 * days)),
        "keep_every_seconds": st.one_of(st.none(), st.just(1e9)),
        "keep_if": st.one_of(st.none(), st.just(odd_or_two)),
    }
)
METRICS = st.fixed_dictionaries({}, optional={"loss": VALUES, "accuracy": VALUES})


# Policy alone ----------------------------------------------------------------------------------------------


@given(
    steps=st.dictionaries(st.integers(0, 60), st.tuples(METRICS, st.integers(0, 5)), min_size=1, max_size=20),
    rules=RULES,
    keep_every_seconds=st.sampled_from([None, 0.5, 43200.0, 86400.0, 2 * 86400, 1e9]),
)
def test_the_rules(
    steps: dict[int, tuple[dict[str, float | None], int]], rules: dict[str, Any], keep_every_seconds: float | None
) -> None:
    """The ages of the steps are in no order, as if the clocks of the hosts that saved them differed."""
    rules = {**rules, "keep_every_seconds": keep_every_seconds}
    found = [
        SavedStep(step, NOW - datetime.timedelta(days=days, seconds=1), StepRecord(step, metrics))
        for step, (metrics, days) in sorted(steps.items())
    ]
    decisions = RetentionPolicy.of(**rules).decide(found, NOW)
    assert [decision.step for decision in decisions] == found
    expected = wanted({step: Kept(*known) for step, known in steps.items()}, rules)
    assert {decision.step.number for decision in decisions if decision.kept} == expected
    for decision in decisions:
        assert decision.why.startswith("not kept by ") != decision.kept


@given(gaps=st.lists(st.integers(1, 30), min_size=1, max_size=40), first=st.integers(0, 30), every=st.integers(1, 20))
@hypothesis.example(gaps=[3] * 13, first=0, every=7)
def test_each_multiple_keeps_the_first_step_at_or_after_it(gaps: list[int], first: int, every: int) -> None:
    numbers = [*itertools.accumulate(gaps, initial=first)]
    expected = {min(number for number in numbers if number >= m) for m in range(every, numbers[-1] + 1, every)}
    expected |= {0} & {*numbers}
    assert first_at_multiples(numbers, every) == expected
    assert {number for number in numbers if number % every == 0} <= expected, "a multiple that was saved is kept"
    left: list[int] = []
    for number in numbers:  # the rule after each save: what an earlier pass has deleted changes nothing
        left = sorted({*first_at_multiples([*left, number], every), number})
    assert {*left} - {numbers[-1]} == expected - {numbers[-1]}


@given(
    gaps=st.lists(st.integers(-900, 900), min_size=1, max_size=40),
    seconds=st.sampled_from([0.1, 1.0, 60.0, 600.0]),
)
@hypothesis.example(gaps=[50] * 40, seconds=60.0)
def test_each_interval_keeps_its_first_step_whatever_the_clock_does(gaps: list[int], seconds: float) -> None:
    """The clock may go back. A step stays chosen after later saves, also if the others are deleted in the meantime."""
    at = itertools.accumulate(gaps, initial=1_800_000_000)
    saved = [
        SavedStep(step, datetime.datetime.fromtimestamp(when, datetime.UTC), StepRecord(step))
        for step, when in enumerate(at)
    ]
    left: list[SavedStep] = []
    for step in saved:
        chosen = first_in_intervals([*left, step], seconds)
        assert {known.number for known in left} <= chosen
        left = [known for known in (*left, step) if known.number in chosen]
    assert {step.number for step in left} == first_in_intervals(saved, seconds)
    intervals = [step.created.timestamp() // max(seconds, 1) for step in saved]
    assert sorted({*intervals}) == sorted(intervals[step.number] for step in left), "one step for each interval"


def test_the_rules_count_the_time_in_the_manifest_as_a_restart_does(tmp_path: Path) -> None:
    """The save of step 1 begins in one interval and is known as published in the next."""
    with jaxckpt.Checkpointer(tmp_path, keep_every_seconds=3600, background=False, options=FAST) as checkpoints:
        checkpoints.save(1, {"w": 1})
        saved = checkpoints._directory.saved_step(1)
    manifest, _ = load_manifest(store_at(tmp_path / "00000001", jaxckpt.Options()))
    assert saved == SavedStep.of(1, manifest)


def test_steps_that_are_due_by_time_are_kept_near_the_multiples(tmp_path: Path) -> None:
    minutes = 0.0
    with jaxckpt.Checkpointer(
        tmp_path, every_seconds=180, keep_last=1, keep_every=7, background=False, options=FAST
    ) as checkpoints:
        checkpoints._due._clock = lambda: 60 * minutes
        checkpoints._due.record_save()
        saved = []
        for step in range(1, 40):
            minutes += 1
            saved += [step] * checkpoints.save(step, {"w": step})
    assert saved == [*range(3, 40, 3)]
    assert checkpoints.steps() == [9, 15, 21, 30, 36, 39]


def test_orbaxs_policies_as_the_docs_write_them(tmp_path: Path) -> None:
    """docs/coming-from-orbax.md."""
    run = jaxckpt.Run(tmp_path / "a")
    latest = "step % 100 == 0 and step > run.latest_step() - 500"
    page = (Path(__file__).parents[2] / "docs" / "coming-from-orbax.md").read_text()
    assert f"keep_if=lambda step, metrics: {latest}`" in page
    assert 'keep_if=lambda step, metrics: metrics.get("loss") is None`' in page
    keep_if = eval(f"lambda step, metrics: {latest}", {"run": run})
    with jaxckpt.Checkpointer(tmp_path / "a", keep_if=keep_if, background=False, options=FAST) as checkpoints:
        for step in range(0, 1000, 50):
            checkpoints.save(step, {"w": step})
        assert checkpoints.steps() == [500, 600, 700, 800, 900, 950]
    with jaxckpt.Checkpointer(
        tmp_path / "b",
        keep_best=("loss", "min"),
        keep_if=lambda step, metrics: metrics.get("loss") is None,
        background=False,
        options=FAST,
    ) as checkpoints:
        for step, loss in enumerate([3, 1, None, 2, float("nan"), 5, 4]):
            checkpoints.save(step, {"w": step}, metrics=None if loss is None else {"loss": loss})
        assert checkpoints.steps() == [1, 2, 4, 6]


def test_a_decision_gives_its_reason() -> None:
    found = [SavedStep(step, NOW, StepRecord(step, {"loss": float(step)})) for step in range(6)]
    rules = RetentionPolicy.of(
        keep_last=2, keep_every=3, keep_best=[("loss", "min", 2)], keep_if=lambda step, metrics: step == 3
    )
    assert [decision.why for decision in rules.decide(found, NOW)] == [
        "keep_every=3, keep_best=('loss', 'min', 2)",
        "keep_best=('loss', 'min', 2)",
        "not kept by keep_last=2, keep_every=3, keep_best=('loss', 'min', 2), keep_if",
        "keep_every=3, keep_if",
        "keep_last=2",
        "keep_last=2",
    ]
    assert [decision.why for decision in RetentionPolicy.of(keep_every=4).decide(found, NOW)][-2:] == [
        "keep_every=4",
        "the newest",
    ]
    assert {decision.why for decision in RetentionPolicy().decide(found, NOW)} == {"no rule"}
    unmeasured = RetentionPolicy.of(keep_last=1, keep_best=("accuracy", "max")).decide(found, NOW)
    assert {decision.why for decision in unmeasured} == {
        "keep_best=('accuracy', 'max', 1), while no step has that metric"
    }
    assert RetentionPolicy.of(keep_last=1).decide([], NOW) == []


@given(ages=st.lists(st.booleans(), min_size=1, max_size=8), count=st.integers(1, 4))
def test_subtrees_are_dropped_once_from_all_but_the_newest(ages: list[bool], count: int) -> None:
    found = [SavedStep(n, NOW, StepRecord(n, dropped=["opt"] if gone else [])) for n, gone in enumerate(ages)]
    expected = {n for n, gone in enumerate(ages) if n < len(ages) - count and not gone}
    decisions = RetentionPolicy(keep_last_of={"opt": count}).decide(found, NOW)
    assert {
        decision.step.number: decision.dropped_subtrees for decision in decisions if decision.dropped_subtrees
    } == dict.fromkeys(expected, ("opt",))


# On a directory --------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Simulates the end of the process."""


class Run(RuleBasedStateMachine):
    """A Checkpointer, rivals with the same rules, readers that hold steps, a follower, and users who pin steps."""

    @initialize(
        rules=RULES,
        keep_last_of=st.one_of(st.none(), st.integers(1, 2)),
        due=st.fixed_dictionaries(
            {
                "every": st.one_of(st.none(), st.integers(1, 3)),
                "every_seconds": st.one_of(st.none(), st.just(600)),
                "save_if": st.one_of(st.none(), st.just(odd_or_two)),
            }
        ),
        where=st.sampled_from(["bucket", "folder", "folder with trash"]),
        background=st.booleans(),
    )
    def start(
        self, rules: dict[str, Any], keep_last_of: int | None, due: dict[str, Any], where: str, background: bool
    ) -> None:
        leases.TERM_SECONDS = 3600.0  # readers are checked only in the model
        self.folder = tempfile.mkdtemp()
        self.url = f"memory://retention/{uuid.uuid4().hex}" if where == "bucket" else f"{self.folder}/run"
        self.rules = rules
        self.keep_last_of = keep_last_of
        self.due = due
        self.trash = where == "folder with trash"
        self.background = background
        self.steps: dict[int, Kept] = {}
        self.trashed: list[int] = []
        self.readers: list[tuple[int, contextlib.ExitStack]] = []
        self.pinned: dict[str, int] = {}
        self.follower: Generator[jaxckpt.Step] | None = None
        self.followed: int | None = None
        self.yielded: list[tuple[int, Kept]] = []
        self.minutes = self.saved_at = 0.0
        self.checkpoints = self.opened()

    def opened(self) -> jaxckpt.Checkpointer:
        checkpoints = jaxckpt.Checkpointer(
            self.url,
            **self.rules,
            **self.due,
            keep_last_of=None if self.keep_last_of is None else {"opt": self.keep_last_of},
            trash=self.trash,
            background=self.background,
            options=FAST,
        )
        self.saved_at = self.minutes
        checkpoints._due._clock = lambda: 60 * self.minutes
        checkpoints._due.record_save()
        return checkpoints

    def spared(self) -> set[int]:
        return {step for step, _ in self.readers} | {*self.pinned.values(), self.followed} - {None}  # pyright: ignore

    def settle(self) -> None:
        """Apply the rules, here and in the model."""
        self.checkpoints._deletion._request_pass()
        self.checkpoints.wait()
        self.apply()

    def apply(self) -> None:
        kept = wanted(self.steps, self.rules)
        if self.keep_last_of is not None:
            for step in sorted(kept)[: -self.keep_last_of]:
                self.steps[step].whole &= step in self.spared()
        gone = {*self.steps} - kept - self.spared()
        self.trashed += sorted(gone)
        self.steps = {step: known for step, known in self.steps.items() if step not in gone}

    def save(self, step: int, metrics: Metrics, **named: Any) -> bool:
        given = {name: math.nan if value is None else value for name, value in metrics.items()}
        return self.checkpoints.save(step, {"w": np.full(3, step), "opt": np.full(5, step)}, metrics=given, **named)

    def is_kept_if_saved(self, step: int, metrics: Metrics) -> bool:
        return step in wanted({**self.steps, step: Kept(metrics, is_new=True)}, self.rules)

    def count_as_saved(self, step: int, metrics: Metrics) -> None:
        self.saved_at = self.minutes
        self.steps[step] = Kept(metrics)
        self.checkpoints.wait()
        self.apply()

    @rule(
        ahead=st.integers(1, 3),
        metrics=st.fixed_dictionaries({"loss": VALUES, "accuracy": VALUES}),
        force=st.booleans(),
        minutes=st.integers(0, 7),
    )
    def save_the_next(self, ahead: int, metrics: Metrics, force: bool, minutes: int) -> None:
        self.minutes += minutes
        step = max(self.steps, default=0) + ahead
        every, after, save_if = map(self.due.get, ("every", "every_seconds", "save_if"))
        due = (
            force
            or (every is not None and step % every == 0)
            or (after is not None and 60 * (self.minutes - self.saved_at) >= after)
            or (save_if is not None and save_if(step, metrics))
            or (every, after, save_if) == (None, None, None)
        )
        assert self.save(step, metrics, force=force) == due
        if due:
            self.count_as_saved(step, metrics)

    @precondition(lambda self: self.steps)
    @rule(back=st.integers(1, 4), metrics=st.fixed_dictionaries({"loss": VALUES, "accuracy": VALUES}))
    def save_an_older_one(self, back: int, metrics: Metrics) -> None:
        step = max(self.steps) - back
        if step < 0 or step in self.steps:
            return
        if self.is_kept_if_saved(step, metrics):
            assert self.save(step, metrics, force=True)
            self.count_as_saved(step, metrics)
        else:
            with pytest.raises(jaxckpt.errors.InputError, match="deleted immediately: not kept by"):
                self.save(step, metrics, force=True)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), metrics=st.fixed_dictionaries({"loss": VALUES, "accuracy": VALUES}))
    def save_one_again(self, data: Any, metrics: Metrics) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        with pytest.raises(jaxckpt.errors.CheckpointExistsError):
            self.save(step, metrics, force=True)
        if step in self.pinned.values() or self.is_kept_if_saved(step, metrics):
            assert self.save(step, metrics, force=True, overwrite=True)
            self.count_as_saved(step, metrics)
        else:
            with pytest.raises(jaxckpt.errors.InputError, match="deleted immediately: not kept by"):
                self.save(step, metrics, force=True, overwrite=True)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def delete(self, data: Any) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if len(self.steps) == 1:
            with pytest.raises(jaxckpt.errors.InputError, match="the only one"):
                self.checkpoints.delete(step)
            return
        if step in self.pinned.values():
            with pytest.raises(jaxckpt.errors.InputError, match="unpin it first"):
                self.checkpoints.delete(step)
        self.pinned = {name: pinned for name, pinned in self.pinned.items() if pinned != step or self.unpinned(name)}
        self.checkpoints.delete(step)
        del self.steps[step]
        self.trashed.append(step)
        self.readers = [(held, reader) for held, reader in self.readers if held != step or reader.close()]
        self.settle()

    def unpinned(self, name: str) -> bool:
        jaxckpt.Run(self.url).unpin(name)
        return False

    @rule(crash=st.booleans())
    def start_again(self, crash: bool) -> None:
        """Restart after a clean end, or after a kill at the first deletion, whose step is no longer published."""
        if crash:
            self.crash()
        else:
            self.checkpoints.close()
        published = jaxckpt.Run(self.url).steps()
        self.checkpoints = self.opened()
        assert self.checkpoints.steps() == published
        if published:
            self.checkpoints.restore(select="w")
            self.checkpoints.wait()
            self.apply()

    def crash(self) -> None:
        clear = Deletion._delete_remains
        step = max(self.steps, default=0) + 1

        def killed(deletion: Deletion, cleared: int) -> None:
            if deletion is crashed:
                raise Crash
            clear(deletion, cleared)

        crashed = self.checkpoints._deletion
        Deletion._delete_remains = killed
        try:
            self.save(step, {"loss": 0.0, "accuracy": 0.0}, force=True)
            with contextlib.suppress(Crash):
                self.checkpoints._saver.last_save.wait()
                crashed.wait()
        finally:
            Deletion._delete_remains = clear
        self.steps[step] = Kept({"loss": 0.0, "accuracy": 0.0})
        self.apply()

    @rule(restores=st.booleans())
    def a_rival(self, restores: bool) -> None:
        """An evaluation that makes its own Checkpointer. Its rules apply if it restores."""
        minutes = self.saved_at
        rival = self.opened()
        if restores and self.steps:
            assert rival.restore(select="w")["w"][0] == max(self.steps)
            self.apply()
        rival.close()
        self.saved_at = minutes

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        reader = contextlib.ExitStack()
        reader.enter_context(jaxckpt.open(f"{self.url}@{step}").hold(term_seconds=3600))
        self.readers.append((step, reader))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def let_go(self, data: Any) -> None:
        _, reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        reader.close()
        self.settle()

    @precondition(lambda self: self.steps)
    @rule()
    def follow(self) -> None:
        while self.yielded and self.steps.get(self.yielded[-1][0]) is not self.yielded[-1][1]:
            self.yielded.pop()  # deleted or saved again
        last = self.yielded[-1][0] if self.yielded else -1
        if self.follower is None:
            self.follower = jaxckpt.Run(self.url, options=FAST).follow(
                timeout_seconds=1e-3, poll_seconds=1e-3, term_seconds=3600
            )
        following = next((step for step in sorted(self.steps) if step > last), None)
        step = next(self.follower, None)
        assert (None if step is None else step.number) == following
        self.followed = following
        if following is None or step is None:
            self.follower, self.yielded = None, []
        else:
            self.yielded.append((following, self.steps[following]))
            assert step.restore(select="w")["w"][0] == following
        self.settle()

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), name=st.sampled_from(["paper", "demo"]))
    def pin(self, data: Any, name: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if self.pinned.get(name, step) != step:
            with pytest.raises(jaxckpt.errors.InputError, match=f"'{name}' is the name of step {self.pinned[name]}"):
                jaxckpt.Run(self.url).pin(step, name)
            jaxckpt.Run(self.url).unpin(name)
        assert jaxckpt.Run(self.url).pin(step, name) == step
        self.pinned[name] = step
        self.settle()

    @invariant()
    def the_steps_are_those_of_the_model(self) -> None:
        if not hasattr(self, "steps"):
            return
        assert jaxckpt.Run(self.url).steps() == sorted(self.steps)
        for step, known in self.steps.items():
            assert ("opt" in jaxckpt.open(f"{self.url}@{step}")) == known.whole
        for name, step in self.pinned.items():
            assert jaxckpt.open(f"{self.url}@{name}").step == step
        if self.trash:
            found = sorted(os.listdir(f"{self.url}/_trash")) if self.trashed else []
            assert [int(name.partition("-")[0]) for name in found] == sorted(self.trashed)
            for name in found[-2:]:
                assert jaxckpt.load_numpy(f"{self.url}/_trash/{name}")["w"][0] == int(name.partition("-")[0])

    def teardown(self) -> None:
        leases.TERM_SECONDS = 60.0
        if not hasattr(self, "steps"):
            return
        for _, reader in self.readers:
            reader.close()
        if self.follower is not None:
            self.follower.close()
        self.checkpoints.close()
        if not self.url.startswith("memory:") and self.steps:
            left = {*os.listdir(self.url)} - {"_run", "_trash"}
            assert left == {f"{step:08d}" for step in jaxckpt.Run(self.url).steps()}, "nothing else is left"
        shutil.rmtree(self.folder)


TestRun = Run.TestCase
TestRun.settings = hypothesis.settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_a_step_whose_save_is_refused_is_deleted_when_its_reader_has_ended(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, keep_last=1, background=False) as checkpoints:
        checkpoints.save(1, {"w": 1})
        with jaxckpt.open(f"{tmp_path}@1").hold():
            checkpoints.save(2, {"w": 2})
            with pytest.raises(jaxckpt.errors.InputError, match="deleted immediately"):
                checkpoints.save(1, {"w": 3}, overwrite=True)
            assert checkpoints.steps() == [1, 2]
    assert checkpoints.steps() == [2]


# Pins ------------------------------------------------------------------------------------------------------


def test_a_pinned_step_keeps_its_subtrees(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, keep_last=2, keep_last_of={"opt": 1}, background=False) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"w": np.full(3, step), "opt": np.full(5, step)})
            if step == 1:
                assert jaxckpt.Run(tmp_path).pin("latest", "first") == 1
    (pin,) = (tmp_path / "_run").glob("pin-*")
    assert pin.stat().st_size == 0  # on a full disk, a pin with content could exist although `pin` raised an error
    assert jaxckpt.Run(tmp_path).steps() == [1, 3, 4]
    assert ["opt" in jaxckpt.open(f"{tmp_path}@{name}") for name in ("first", "3", "latest")] == [True, False, True]
    with pytest.raises(jaxckpt.errors.InputError, match=r"no step named 'frist'.*did you mean 'first'"):
        jaxckpt.open(f"{tmp_path}@frist")
    jaxckpt.Run(tmp_path).unpin("first")
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="no step is pinned as"):
        jaxckpt.Run(tmp_path).unpin("first")
    know_rules(tmp_path, keep_last=2)
    with jaxckpt.Checkpointer(tmp_path, keep_last=2, background=False) as checkpoints:
        checkpoints.restore()
        assert checkpoints.steps() == [3, 4]
        jaxckpt.Run(tmp_path).pin(3, "third")
        shutil.rmtree(tmp_path / "00000003")
    with pytest.raises(
        jaxckpt.errors.NotACheckpointError, match="no step 3, which was pinned as 'third': it was deleted"
    ):
        jaxckpt.open(f"{tmp_path}@third")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="finds out which files are synced in /proc")
@pytest.mark.parametrize("sync", [True, False])
def test_a_pin_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    jaxckpt.save(tmp_path / "00000001", {"x": 1})
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    jaxckpt.Run(tmp_path, options=jaxckpt.Options(sync=sync)).pin("latest", "paper")
    run = str(tmp_path)
    assert synced[:3] == ([f"{run}/_run/pin-00000001-paper", f"{run}/_run", run] if sync else [])


@pytest.mark.parametrize("name", ["latest", "best", "40", "", "a/b", "a@b", "-x", 3])
def test_names_that_no_step_can_have(tmp_path: Path, name: Any) -> None:
    jaxckpt.save(tmp_path / "00000001", {"x": 1})
    with pytest.raises(jaxckpt.errors.InputError, match="name must consist of"):
        jaxckpt.Run(tmp_path).pin("latest", name)


# Copies, and other writers ---------------------------------------------------------------------------------


def test_a_copy_by_hard_links_has_its_own_best_step(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", keep_best=("loss", "min")) as checkpoints:
        for step, loss, accuracy in ((1, 0.1, 0.1), (2, 0.2, 0.9)):
            checkpoints.save(step, {"w": np.full(3, step)}, metrics={"loss": loss, "accuracy": accuracy}, force=True)
            checkpoints.wait()
            checkpoints.pin(1, "first")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=os.link)
    with jaxckpt.Checkpointer(tmp_path / "copy", keep_best=("accuracy", "max")):
        assert jaxckpt.open(f"{tmp_path}/copy@best").step == 2
    assert jaxckpt.open(f"{tmp_path}/run@best").step == 1
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.parametrize(("created", "kept"), [("", True), ("yesterday", True), ("2020-01-01T00:00:00", False)])
def test_a_step_without_a_date_counts_as_new(tmp_path: Path, created: str, kept: bool) -> None:
    """The format defines the date as informative only."""
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": step})
    manifest, _ = load_manifest(store_at(tmp_path / "00000001", jaxckpt.Options()))
    (tmp_path / "00000001/manifest.json").write_bytes(encode(msgspec.structs.replace(manifest, created=created)))
    know_rules(tmp_path, keep_last_seconds=3600)
    with jaxckpt.Checkpointer(tmp_path, keep_last_seconds=3600, background=False) as checkpoints:
        checkpoints.restore()
        assert checkpoints.steps() == ([1, 2] if kept else [2])


def test_two_steps_without_a_date_are_kept_in_addition_to_the_first_of_the_interval(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {"w": step})
    for step, created in ((1, ""), (2, "2026-01-01T00:00:00"), (3, ""), (4, "2026-01-01T00:59:59+00:00")):
        manifest, _ = load_manifest(store_at(tmp_path / f"0000000{step}", jaxckpt.Options()))
        content = encode(msgspec.structs.replace(manifest, created=created))
        (tmp_path / f"0000000{step}/manifest.json").write_bytes(content)
    know_rules(tmp_path, keep_every_seconds=3600)
    with jaxckpt.Checkpointer(tmp_path, keep_every_seconds=3600, background=False) as checkpoints:
        checkpoints.restore()
        assert checkpoints.steps() == [1, 2, 3, 5]


def test_infinite_metrics_are_compared_and_kept(tmp_path: Path) -> None:
    metrics = {"a": np.inf, "b": -np.inf, "c": np.nan, "d": 1.0}
    with jaxckpt.Checkpointer(tmp_path / "run", keep_best=("a", "max"), background=False) as checkpoints:
        checkpoints.save(1, {"w": 1}, metrics=metrics)
        for step, value in ((2, 1.0), (3, -np.inf), (4, 2.0)):
            checkpoints.save(step, {"w": step}, metrics={"a": value})
        assert checkpoints.steps() == [1, 4]
    run = jaxckpt.Run(tmp_path / "run")
    recorded = {"a": np.inf, "b": -np.inf, "c": None, "d": 1.0}
    assert run.metrics(1) == jaxckpt.open(run.path(1)).metrics == recorded
    run.add_metrics(1, {"a": np.nan, "d": -np.inf, "e": 0.5})
    assert run.metrics(1) == recorded | {"a": None, "d": -np.inf, "e": 0.5}
    assert run.best_step("a", "max") == 4
    jaxckpt.convert(run.directory, tmp_path / "converted")
    assert jaxckpt.Run(tmp_path / "converted").metrics(1) == run.metrics(1)
