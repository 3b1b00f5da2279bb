"""Which steps are saved: by number, by the clock, by a predicate; all processes save the same ones."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, RunProcesses

import jaxckpt
from jaxckpt._runs.saving import SaveSchedule

FAST = jaxckpt.Options(sync=False)


def never() -> Any:
    raise AssertionError("a single process must not synchronize")


def test_seconds_count_from_the_last_save(tmp_path: Path) -> None:
    now = 0.0
    with jaxckpt.Checkpointer(tmp_path, every=100, every_seconds=600, options=FAST) as checkpoints:
        checkpoints._due._clock = lambda: now
        checkpoints._due.record_save()
        saved = list[float]()
        for step in range(1, 151):
            now += 60.0  # a minute for each step
            if checkpoints.save(step, {"x": step}, force=step == 25):
                saved.append(step)
    assert saved == [10, 20, 25, 35, 45, 55, 65, 75, 85, 95, 100, 110, 120, 130, 140, 150]


def test_seconds_may_be_any_real_number(tmp_path: Path) -> None:
    for seconds in (np.int64(10), np.float32(0.5), Fraction(1, 2)):
        with jaxckpt.Checkpointer(tmp_path, every_seconds=seconds, options=FAST) as checkpoints:
            assert not checkpoints.save(1, {"x": 1})


def test_a_predicate_gets_the_recorded_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []

    def rising(step: int, metrics: Any) -> bool:
        seen.append((step, metrics))
        return step > 2 and metrics["loss"] is None

    with jaxckpt.Checkpointer(tmp_path, save_if=rising, options=FAST) as checkpoints:
        losses = [np.float32(1), 2, math.inf, math.nan]
        assert [checkpoints.save(step, {"x": 1}, metrics={"loss": loss}) for step, loss in enumerate(losses)] == [
            False,
            False,
            False,
            True,
        ]
        assert seen == [(0, {"loss": 1.0}), (1, {"loss": 2.0}), (2, {"loss": math.inf}), (3, {"loss": None})]
        with pytest.raises(KeyError):
            checkpoints.save(4, {"x": 1})
        assert not checkpoints.save(1, {"x": 1})
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize("answer", [None, 1, "yes", np.ones(1)])
def test_a_predicate_answers_true_or_false(tmp_path: Path, answer: Any) -> None:
    with jaxckpt.Checkpointer(tmp_path, save_if=lambda step, metrics: answer) as checkpoints:
        with pytest.raises(jaxckpt.errors.InputError, match="what save_if returns for step 7 must be True or False"):
            checkpoints.save(7, {"x": 1})
        assert checkpoints.save(7, {"x": 1}, force=True)


def test_without_any_rule_every_step_is_due_and_with_others_none_by_number() -> None:
    assert SaveSchedule(None, None, None, 1).is_due(7, None, never)
    assert not SaveSchedule(None, 5, None, 1).is_due(7, None, never)
    assert not SaveSchedule(None, None, lambda step, metrics: False, 1).is_due(0, None, never)


@pytest.mark.parametrize("seconds_per_step", [0.001, 0.5, 7.0, 100.0])
def test_the_number_of_rendezvous(seconds_per_step: float) -> None:
    """At most 120 rendezvous between two saves, and at most one per step. A save is late by at most a sixtieth."""
    due = SaveSchedule(None, 600, None, 2)
    now, step, rendezvous, saves = 0.0, 0, 0, list[float]()
    due._clock = lambda: now
    due._saved_at = due._met_at = now
    while len(saves) < 3:
        step += due._steps_to_rendezvous
        now += due._steps_to_rendezvous * seconds_per_step
        rendezvous += 1
        found = due._is_due_locally(step, None)
        due._steps_to_rendezvous = due._plan_next_rendezvous()
        if found:
            saves.append(now)
            due.record_save()
    between = np.diff([0.0, *saves])
    assert (between >= 600).all()
    assert (between <= 610 + seconds_per_step).all()
    assert rendezvous <= min(step, 3 * 2 * 60 + 20)


def test_steps_that_become_slow_after_a_fast_start() -> None:
    """The first steps are fast because they are only queued on the devices."""
    due = SaveSchedule(None, 600, None, 2)
    now = 0.0
    due._clock = lambda: now
    due._saved_at = due._met_at = now
    step = 0
    while not due._is_due_locally(step, None):
        for _ in range(due._steps_to_rendezvous):
            now += 1e-4 if step < 100 else 5.0
            step += 1
        due._steps_to_rendezvous = due._plan_next_rendezvous()
    assert now < 620 + 128 * 5.0


@pytest.mark.parametrize("asks", [False, True])
def test_a_due_step_that_is_skipped_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asks: bool
) -> None:
    """A continuous save with a minimum interval: not before the interval is over, and not while a save runs."""
    caplog.set_level("INFO", "jaxckpt")
    now, may_end = 0.0, threading.Event()
    options = jaxckpt.Options(sync=False, when_busy="skip")
    with jaxckpt.Checkpointer(tmp_path, every_seconds=50, options=options) as checkpoints:
        checkpoints._due._clock = lambda: now
        checkpoints._due.record_save()
        saved = list[int]()
        for step in range(1, 40):
            now += 10.0
            due = not asks or checkpoints.should_save(step)
            if due and checkpoints.save(step, {"x": step}, on_done=lambda info: may_end.wait(30)):
                saved.append(step)
            if step in (12, 22):  # the save of step 5 ends after step 12
                may_end.set()
                checkpoints.wait()
                may_end.clear()
        may_end.set()
    assert saved == [5, 13, 23]
    assert caplog.text.count("is skipped, because an earlier step is still being saved") == 3 + 5 + 12


def test_a_loop_that_waits_is_told_how_to_avoid_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints._saver.warned_wait_seconds = 0.05
        for step in range(1, 7):
            checkpoints.save(step, {"x": step}, on_done=lambda info: time.sleep(0.1))
    warned = [record.args for record in caplog.records if "waited" in record.message]
    (step, seconds, earlier), *others = [args for args in warned if isinstance(args, tuple)]
    assert (step, earlier) == (2, 1)
    assert isinstance(seconds, float)
    assert seconds > 0.05
    assert len(others) <= 1  # only a wait of twice that time is logged again
    assert 'pass Options(when_busy="skip")' in caplog.text


# Asking first ----------------------------------------------------------------------------------------------

Rules = dict[str, Any]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"every": 7},
        {"every_seconds": 50},
        {"save_if": lambda step, metrics: metrics["loss"] == 3},
        {"every": 10, "every_seconds": 35, "save_if": lambda step, metrics: metrics["loss"] == 2},
    ],
    ids=["none", "every", "every_seconds", "save_if", "all"],
)
def test_should_save_decides_as_save_does(tmp_path: Path, rules: Rules) -> None:
    """Two runs by the same clock, of which one asks first. Steps go back and are repeated."""
    now = 0.0
    names = ("plain", "asks")
    plain, asks = (jaxckpt.Checkpointer(tmp_path / name, **rules, background=False, options=FAST) for name in names)
    with plain, asks:
        for checkpoints in (plain, asks):
            checkpoints._due._clock = lambda: now
            checkpoints._due.record_save()
        for step in (*range(1, 50), 20, 21, 70, 71, 60, 61):
            now += 10.0
            metrics = {"loss": step % 6}
            expected = False
            with contextlib.suppress(jaxckpt.errors.CheckpointExistsError):
                expected = plain.save(step, {"x": step}, metrics=metrics, force=step % 13 == 0)
            asked = asks.should_save(step, metrics=metrics)
            now += 1e6 if step == 30 else 0.0  # time passes before the save that was decided
            if step % 13 == 0 and step not in asks.steps():
                assert asks.save(step, {"x": step}, metrics=metrics, force=True)
            elif asked:
                assert asks.save(step, {"x": step}, metrics=metrics)
            now -= 1e6 if step == 30 else 0.0
            if step == 30 and asked:
                asks._due.record_save()
            assert asks.steps() == plain.steps(), (step, expected)


def test_should_save_is_false_for_a_step_that_exists(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, every=2, options=FAST) as checkpoints:
        assert [checkpoints.should_save(step) for step in (0, 1, 2, 2)] == [True, False, True, True]
        assert checkpoints.save(2, {"x": 1})
        assert not checkpoints.should_save(2), "although the save still runs"
        assert checkpoints.should_save(2, overwrite=True)
        assert not checkpoints.should_save(3, overwrite=True)
        assert checkpoints.save(2, {"x": 2}, overwrite=True)
        with pytest.raises(jaxckpt.errors.CheckpointExistsError):
            checkpoints.save(2, {"x": 3})
    with jaxckpt.Checkpointer(tmp_path, every=2, options=FAST) as checkpoints:
        assert not checkpoints.should_save(2)
        assert checkpoints.should_save(4)
        checkpoints.save(4, {"x": 1})
        checkpoints.delete(2)
        assert checkpoints.should_save(2)
        for wrong in ({"step": -1}, {"step": "4"}, {"step": 6, "overwrite": 1}):
            with pytest.raises(jaxckpt.errors.InputError):
                checkpoints.should_save(**wrong)


def test_should_save_raises_what_save_would(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "a", save_if=lambda step, metrics: metrics["loss"] < 1) as checkpoints:
        with pytest.raises(KeyError):
            checkpoints.should_save(1)
        with pytest.raises(jaxckpt.errors.InputError, match="must be a number"):
            checkpoints.should_save(1, metrics={"loss": "low"})
        assert checkpoints.should_save(1, metrics={"loss": 0})
    with jaxckpt.Checkpointer(tmp_path / "c", every=10) as checkpoints:
        for wrong in ({"a": "x"}, {"a": None}, {1: 2}, [1]):
            for overwrite in (False, True):
                with pytest.raises(jaxckpt.errors.InputError, match="metric"):
                    checkpoints.should_save(30, metrics=wrong, overwrite=overwrite)  # type: ignore[arg-type]
        assert checkpoints.should_save(30, metrics={"a": 1})
        checkpoints.save(30, {"x": 1}, metrics={"a": 1})
    checkpoints = jaxckpt.Checkpointer(tmp_path / "b", every=2, fail_fast=True)
    checkpoints.save(2, {"x": 1}, on_done=lambda info: 1 / 0)
    while not checkpoints.pending.done:  # pyright: ignore[reportOptionalMemberAccess]
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        checkpoints.should_save(3)
    checkpoints.close()


def test_a_preempted_job_is_asked_to_save_and_then_stops(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, every=100) as checkpoints:
        assert not checkpoints.should_save(1)
        assert not checkpoints.should_save(2)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted):  # the decision was made before the notice
            checkpoints.save(2, {"x": 2})
        assert checkpoints.steps() == [2]
        assert not checkpoints.should_save(3)
    with jaxckpt.Checkpointer(tmp_path, every=100, on_preemption="continue") as checkpoints:
        assert not checkpoints.should_save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.should_save(2), "save must be called, although the step exists"


def test_processes_whose_clocks_and_metrics_differ_agree(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        PROGRAMS / "asks_first.py", processes=3, devices_per_process=1, args=str(tmp_path), timeout=150
    )
    first, *others = (json.loads(one.stdout) for one in done)
    assert others == [first, first]
    saved = {name: [step for run, step, _, saved in first if run == name and saved] for name, *_ in first}
    assert saved["every"] == [*range(5, 40, 5), 60, 50, 20, 60]  # multiples of 20 are saved without asking, and again
    assert saved["clock"] == [7, 14, 21, 28, 35, 60]
    assert [step % 5 for step in saved["predicate"]] == [2] * len(saved["predicate"])
    assert {*range(2, 40, 5)} <= {*saved["predicate"]}


def test_processes_save_the_same_steps_by_process_0_s_clock_and_metrics(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        PROGRAMS / "due_together.py", processes=3, devices_per_process=1, args=str(tmp_path), timeout=120
    )
    found = [json.loads(one.stdout) for one in done]
    assert found[0] == found[1] == found[2]
    by_clock, by_predicate = found[0]
    assert 3 <= len(by_clock) <= 15
    assert by_predicate == [2, 5, 8]


def test_a_predicate_that_fails_in_process_0_fails_in_all(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
with jaxckpt.Checkpointer(args, save_if=lambda step, metrics: 1 / 0, options=jaxckpt.Options(timeout_seconds=20)) as it:
    try:
        it.save(1, {"x": 1})
    except (ZeroDivisionError, jaxckpt.errors.PeerFailedError) as error:
        print(type(error).__name__, "ZeroDivisionError" in repr(error))
    print(it.save(2, {"x": 1}, force=True))
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout for one in done] == ["ZeroDivisionError True\nTrue\n", "PeerFailedError True\nTrue\n"]


def test_a_call_by_only_one_process_is_an_error(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
options = jaxckpt.Options(timeout_seconds=60)
checkpoints = jaxckpt.Checkpointer(args, every_seconds=60, options=options)
try:
    if process_id == 0:
        print(checkpoints.save(1, {"x": 1}))
    else:
        checkpoints.restore_or_init(lambda: {"x": 1})
except jaxckpt.errors.PeerError as error:
    print(type(error).__name__)
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout for one in done] == ["PeersDisagreeError\n"] * 2


def test_other_arguments_in_another_process_are_an_error_before_anything_is_deleted(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    remains = tmp_path / "s" / "00000009" / f"data-{'0' * 32}"
    remains.mkdir(parents=True)
    program = """
import jaxckpt
cases = [
    [{"every": 2}, {"every": 3}],
    [{"every": 2}, {}],
    [{"every_seconds": 1}, {"every_seconds": 2}],
    [{"save_if": lambda step, metrics: True}, {"every": 1}],
    [{"on_preemption": "exit"}, {"on_preemption": "ignore"}],
    [{"fail_fast": True}, {"fail_fast": False}],
]
for case in cases:
    try:
        jaxckpt.Checkpointer(args, **case[process_id])
    except jaxckpt.errors.PeersDisagreeError as error:
        print("process 1 created the Checkpointer with" in str(error))
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout for one in done] == ["True\n" * 6] * 2
    assert remains.exists()
