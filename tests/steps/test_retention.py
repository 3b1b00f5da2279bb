"""Which steps are kept: the rules against a model of them, alone and on a real directory with readers and pins."""

from __future__ import annotations

import contextlib
import datetime
import uuid
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxckpt
from jaxckpt._format.records import StepRecord
from jaxckpt._steps.retention import Rules, SavedStep

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
METRICS = st.one_of(st.none(), st.sampled_from([-1.5, 0.0, 2.0]), st.floats(-100, 100))


def kept(losses: dict[int, float | None], last: int | None, every: int | None, mode: str | None) -> set[int]:
    """The steps that the rules keep, decided for each step by itself."""
    known = {step: loss for step, loss in losses.items() if loss is not None}
    best = (min if mode == "min" else max)(known.values()) if mode and known else None
    return {
        step
        for step in losses
        if (last, every, mode) == (None, None, None)
        or sum(other > step for other in losses) < (last or 1)
        or (every is not None and step % every == 0)
        or (best is not None and step == max(n for n in known if known[n] == best))
    }


@given(
    steps=st.dictionaries(st.integers(0, 60), st.tuples(METRICS, st.integers(0, 5)), min_size=1, max_size=20),
    last=st.one_of(st.none(), st.integers(1, 5)),
    every=st.one_of(st.none(), st.integers(1, 10)),
    mode=st.sampled_from([None, "min", "max"]),
    days=st.one_of(st.none(), st.integers(1, 4)),
)
def test_the_rules(
    steps: dict[int, tuple[float | None, int]], last: int | None, every: int | None, mode: Any, days: int | None
) -> None:
    found = [
        SavedStep(step, NOW - datetime.timedelta(days=age), StepRecord(step, {} if loss is None else {"loss": loss}))
        for step, (loss, age) in sorted(steps.items())
    ]
    rules = Rules(last, every, None if mode is None else ("loss", mode), days and datetime.timedelta(days=days))
    losses = {step: loss for step, (loss, _) in steps.items()}
    wanted = kept(losses, last, every, mode)
    if days is not None:
        young = {step for step, (_, age) in steps.items() if age < days}
        newest = {max(steps)}
        wanted = newest | young if (last, every, mode) == (None, None, None) else wanted | young
    if mode and not any(loss is not None for loss in losses.values()):
        wanted = {*steps}  # no step can be compared
    assert {*steps} - rules.outdated(found, NOW) == wanted


@given(ages=st.lists(st.booleans(), min_size=1, max_size=8), count=st.integers(1, 4))
def test_subtrees_are_dropped_once_from_all_but_the_newest(ages: list[bool], count: int) -> None:
    found = [SavedStep(n, NOW, StepRecord(n, dropped=["opt"] if gone else [])) for n, gone in enumerate(ages)]
    wanted = {n: ["opt"] for n, gone in enumerate(ages) if n < len(ages) - count and not gone}
    assert Rules(components={"opt": count}).dropped(found) == wanted


class Run(RuleBasedStateMachine):
    """A Checkpointer, readers that hold steps, and people who pin them."""

    @initialize(
        last=st.integers(1, 3),
        every=st.one_of(st.none(), st.integers(2, 4)),
        mode=st.sampled_from([None, "min", "max"]),
    )
    def start(self, last: int, every: int | None, mode: Any) -> None:
        self.url = f"memory://retention/{uuid.uuid4().hex}"
        self.rules = (last, every, mode)
        best = None if mode is None else ("loss", mode)
        self.checkpoints = jaxckpt.Checkpointer(
            self.url, keep_last=last, keep_every=every, keep_best=best, background=False
        )
        self.losses: dict[int, float | None] = {}
        self.readers: list[tuple[int, contextlib.ExitStack]] = []
        self.pinned: dict[str, int] = {}

    @rule(ahead=st.integers(1, 3), loss=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))
    def save(self, ahead: int, loss: float) -> None:
        step = max(self.losses, default=0) + ahead
        assert self.checkpoints.save(step, {"w": np.full(3, step)}, metrics={"loss": loss})
        self.losses[step] = loss
        spared = {step for step, _ in self.readers} | {*self.pinned.values()}
        wanted = kept(self.losses, *self.rules) | spared
        self.losses = {step: loss for step, loss in self.losses.items() if step in wanted}

    @precondition(lambda self: self.losses)
    @rule(data=st.data())
    def hold(self, data: Any) -> None:
        step = data.draw(st.sampled_from(sorted(self.losses)))
        reader = contextlib.ExitStack()
        reader.enter_context(jaxckpt.open(f"{self.url}@{step}").hold(term_seconds=3600))
        self.readers.append((step, reader))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def let_go(self, data: Any) -> None:
        _, reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        reader.close()

    @precondition(lambda self: self.losses)
    @rule(data=st.data(), name=st.sampled_from(["paper", "demo"]))
    def pin(self, data: Any, name: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.losses)))
        if self.pinned.get(name, step) != step:
            with pytest.raises(jaxckpt.InputError, match=f"'{name}' is the name of step {self.pinned[name]}"):
                jaxckpt.pin(f"{self.url}@{step}", name)
            jaxckpt.unpin(f"{self.url}@{name}")
        assert jaxckpt.pin(f"{self.url}@{step}", name) == step
        self.pinned[name] = step

    @invariant()
    def the_steps_are_those_of_the_model(self) -> None:
        if hasattr(self, "losses"):
            assert jaxckpt.steps(self.url) == sorted(self.losses)
            for name, step in self.pinned.items():
                assert jaxckpt.open(f"{self.url}@{name}").step == step

    def teardown(self) -> None:
        if hasattr(self, "losses"):
            for _, reader in self.readers:
                reader.close()
            self.checkpoints.close()


TestRun = Run.TestCase
TestRun.settings = hypothesis.settings(max_examples=15, stateful_step_count=15, deadline=None)


def test_a_pinned_step_keeps_its_subtrees(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, keep_last=2, components={"opt": 1}, background=False) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"w": np.full(3, step), "opt": np.full(5, step)})
            if step == 1:
                assert jaxckpt.pin(tmp_path, "first") == 1
    assert jaxckpt.steps(tmp_path) == [1, 3, 4]
    assert ["opt" in jaxckpt.open(f"{tmp_path}@{name}") for name in ("first", "3", "latest")] == [True, False, True]
    with pytest.raises(jaxckpt.InputError, match=r"no step named 'frist'.*did you mean 'first'"):
        jaxckpt.open(f"{tmp_path}@frist")
    jaxckpt.unpin(f"{tmp_path}@first")
    with pytest.raises(jaxckpt.NotACheckpointError, match="no step is pinned as"):
        jaxckpt.unpin(f"{tmp_path}@first")
    with jaxckpt.Checkpointer(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.steps() == [3, 4]


@pytest.mark.parametrize("name", ["latest", "best", "40", "", "a/b", "a@b", "-x"])
def test_names_that_no_step_can_have(tmp_path: Path, name: str) -> None:
    jaxckpt.save(tmp_path / "00000001", {"x": 1})
    with pytest.raises(jaxckpt.InputError, match="name must be"):
        jaxckpt.pin(tmp_path, name)
