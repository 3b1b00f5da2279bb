"""What process 0 knows of the steps in its directory: cost that does not grow with them, and what others change."""

from __future__ import annotations

import datetime
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import strategies as st

import jaxckpt
from jaxckpt._model.records import StepRecord
from jaxckpt._runs.retention import RetentionPolicy, SavedStep
from jaxckpt.errors import InputError

if TYPE_CHECKING:
    from servers import Bucket

LOSSES = {10: 0.1, 11: 0.2, 12: 0.3}


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns how many manifests this process has looked at since its last call."""
    paths: list[str] = []
    stat = os.stat

    def counted(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("manifest.json"):
            paths.append(str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", counted)

    def count() -> int:
        n = len(paths)
        paths.clear()
        return n

    return count


@pytest.mark.parametrize("rules", [{}, {"keep_every": 1, "keep_best": ("loss", "min")}, {"keep_last": 100}])
def test_what_a_method_looks_at_does_not_grow_with_the_kept_steps(
    tmp_path: Path, looked_at: Callable[[], int], rules: dict[str, Any]
) -> None:
    counts: list[list[int]] = []
    for n in (3, 60):
        with jaxckpt.Checkpointer(tmp_path / str(n), options=jaxckpt.Options(sync=False)) as checkpoints:
            for step in range(n):
                checkpoints.save(step, {"x": step}, metrics={"loss": 1 / (step + 1)})
        checkpoints = jaxckpt.Checkpointer(tmp_path / str(n), **rules)
        checkpoints.restore()
        checkpoints.save(n, {"x": n}, metrics={"loss": 0.0})
        checkpoints.wait()
        looked_at()
        seen: list[int] = []
        for method, arguments in (
            ("steps", {}),
            ("latest_step", {}),
            ("save", {"step": n + 1, "tree": {"x": 0}, "metrics": {"loss": 0.0}}),
            ("wait", {}),
            ("restore", {}),
            ("should_save", {"step": n + 2}),
            ("close", {}),
        ):
            getattr(checkpoints, method)(**arguments)
            seen.append(looked_at())
        counts.append(seen)
        assert len(checkpoints.steps()) == n + 2
        looked_at()
    assert counts[0] == counts[1]
    assert sum(counts[1]) < 20


@pytest.mark.slow
def test_the_requests_of_a_save_do_not_grow_with_the_kept_steps(s3: Bucket) -> None:
    counts: list[list[int]] = []
    for n in (2, 12):
        url = f"{s3.url}/{n}"
        with jaxckpt.Checkpointer(url) as checkpoints:
            for step in range(n):
                checkpoints.save(step, {"x": step}, metrics={"loss": 1.0})
        checkpoints = jaxckpt.Checkpointer(url, keep_every=1)
        checkpoints.restore()
        checkpoints.save(n, {"x": 0}, metrics={"loss": 1.0})
        checkpoints.wait()
        seen: list[int] = []
        for step in (n + 1, n + 2):
            s3.proxy.clear()
            checkpoints.save(step, {"x": 0}, metrics={"loss": 1.0})
            checkpoints.wait()
            seen.append(sum(s3.proxy.counted().values()))
        s3.proxy.clear()
        assert checkpoints.steps() == [*range(n + 3)]
        seen.append(sum(s3.proxy.counted().values()))
        checkpoints.close()
        counts.append(seen)
    assert counts[0] == counts[1]


# What another process changes ------------------------------------------------------------------------------


def unpublish(run: Path, step: int) -> None:
    """What the deletion of a step does first. Another process does the rest later."""
    (copy,) = (run / f"{step:08d}").glob("data-*/manifest-copy.json")
    copy.unlink()  # first, so that the manifest does not seem to be lost
    (run / f"{step:08d}" / "manifest.json").unlink()


def training(run: Path, **rules: Any) -> jaxckpt.Checkpointer:
    """A Checkpointer that knows the steps 10, 11 and 12."""
    checkpoints = jaxckpt.Checkpointer(run, options=jaxckpt.Options(sync=False), **rules)
    for step, loss in LOSSES.items():
        checkpoints.save(step, {"w": step, "opt": step}, metrics={"loss": loss})
    checkpoints.wait()
    assert checkpoints.steps() == [10, 11, 12]
    return checkpoints


def test_steps_that_another_process_deletes_or_adds_are_noticed(tmp_path: Path) -> None:
    checkpoints = training(tmp_path)
    shutil.rmtree(tmp_path / "00000010")
    assert checkpoints.steps() == [11, 12]
    jaxckpt.save(tmp_path / "00000010", {"w": 0})
    jaxckpt.save(tmp_path / "00000040", {"w": 40})
    assert checkpoints.steps() == [10, 11, 12, 40]
    assert checkpoints.restore() == {"w": 40}
    with jaxckpt.Checkpointer(tmp_path) as other:
        other.delete(40)
        assert checkpoints.latest_step() == 12
        other.save(13, {"w": 13})
        other.wait()
        assert checkpoints.should_save(13) is False
        with pytest.raises(jaxckpt.errors.CheckpointExistsError):
            checkpoints.save(13, {"w": 0})
    checkpoints.close()


def test_a_newest_step_that_another_process_is_deleting_is_not_restored(tmp_path: Path) -> None:
    checkpoints = training(tmp_path)
    unpublish(tmp_path, 12)
    unpublish(tmp_path, 11)
    assert checkpoints.latest_step() == 10
    assert checkpoints.steps() == [10]
    assert checkpoints.restore()["w"] == 10
    assert checkpoints.restore_or_init(lambda: {"w": 0, "opt": 0})[0] == 10
    assert checkpoints.save(11, {"w": 111, "opt": 0}), "it no longer exists"
    checkpoints.close()
    assert jaxckpt.load_numpy(tmp_path / "00000011")["w"] == 111


def test_a_step_that_another_process_is_deleting_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = training(tmp_path)
    unpublish(tmp_path, 11)
    assert checkpoints.should_save(11)
    assert checkpoints.save(11, {"w": 111})
    checkpoints.close()
    assert checkpoints.steps() == [10, 11, 12]


def test_the_only_step_is_not_deleted_while_another_process_deletes_the_others(tmp_path: Path) -> None:
    checkpoints = training(tmp_path)
    unpublish(tmp_path, 10)
    unpublish(tmp_path, 11)
    with pytest.raises(InputError, match="is the only one"):
        checkpoints.delete(12)
    checkpoints.close()
    assert jaxckpt.load_numpy(tmp_path)["w"] == 12


@pytest.mark.parametrize(
    ("rules", "deleted", "kept"),
    [
        ({"keep_every": 10}, 10, [11, 12, 13, 14]),
        ({"keep_best": ("loss", "min")}, 10, [11, 12, 13, 14]),
        ({"keep_every_seconds": 1e9}, 10, [11, 12, 13, 14]),
        ({}, 11, [10, 12, 13]),
    ],
)
def test_no_step_is_deleted_in_favor_of_one_that_another_process_deletes(
    tmp_path: Path, rules: dict[str, Any], deleted: int, kept: list[int]
) -> None:
    checkpoints = training(tmp_path, keep_last=3, **rules)
    unpublish(tmp_path, deleted)
    for step in range(13, kept[-1] + 1):
        checkpoints.save(step, {"w": step}, metrics={"loss": 0.4})
        checkpoints.wait()
    checkpoints.close()
    assert jaxckpt.Run(tmp_path).steps() == kept


def test_the_best_step_exists(tmp_path: Path) -> None:
    checkpoints = training(tmp_path, keep_best=("loss", "min", 3))
    unpublish(tmp_path, 10)
    assert checkpoints.best_step() == 11
    checkpoints.close()


def test_no_subtree_is_dropped_in_favor_of_a_step_that_another_process_deletes(tmp_path: Path) -> None:
    checkpoints = training(tmp_path, keep_last_of={"opt": 3})
    unpublish(tmp_path, 11)
    checkpoints.save(13, {"w": 13, "opt": 13})
    checkpoints.close()
    assert [len(jaxckpt.open(tmp_path / f"{step:08d}")) for step in (10, 12, 13)] == [2, 2, 2]


def test_a_pin_of_another_process_protects_a_known_step(tmp_path: Path) -> None:
    checkpoints = training(tmp_path, keep_last=3)
    jaxckpt.Run(tmp_path).pin(10, "paper")
    checkpoints.save(13, {"w": 13})
    checkpoints.close()
    assert checkpoints.steps() == [10, 11, 12, 13]


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=300)
def test_decisions_hold_while_the_deciding_steps_exist(rng: random.Random) -> None:
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    values = rng.choice([[None], [None, 0.1, 0.2, 0.3, 0.4]])
    numbers = sorted(rng.sample(range(60), rng.randint(1, 25)))
    steps = [
        SavedStep(
            number,
            start + datetime.timedelta(seconds=number * 10 + rng.randint(-30, 30)),
            StepRecord(number, {"loss": rng.choice(values)} if rng.random() < 0.5 else {}),
        )
        for number in numbers
    ]
    rules: dict[str, Any] = {
        "keep_last": rng.randint(1, 4),
        "keep_every": rng.choice([2, 5, 10]),
        "keep_every_seconds": rng.choice([0.5, 60, 200]),
        "keep_best": [("loss", rng.choice(["min", "max"]), rng.randint(1, 3))],
        "keep_last_seconds": 100.0,
        "keep_last_of": {"opt": rng.randint(1, 3)},
        "keep_if": lambda step, metrics: step % 7 == 0,
    }
    policy = RetentionPolicy.of(**{name: rules[name] for name in rng.sample([*rules], rng.randint(1, 4))})
    now = start + datetime.timedelta(seconds=650)
    decisions = policy.decide(steps, now)
    deciding = policy.deciding_steps(decisions)
    others = [decision.step for decision in decisions if decision.kept and decision.step.number not in deciding]
    lost = {step.number for step in others if rng.random() < 0.5}
    after = {
        decision.step.number: decision for decision in policy.decide([s for s in steps if s.number not in lost], now)
    }
    for decision in decisions:
        number = decision.step.number
        if number in lost:
            continue
        assert not (not decision.kept and after[number].kept), (number, policy)
        assert {*decision.dropped_subtrees} <= {*after[number].dropped_subtrees}, (number, policy)


def test_the_only_step_with_the_metric_of_keep_best_decides() -> None:
    """Without it, the rule keeps everything."""
    policy = RetentionPolicy.of(keep_last=1, keep_every=2, keep_best=("loss", "min"))
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    steps = [
        SavedStep(number, now, StepRecord(number, {"loss": None} if number == 2 else {})) for number in (2, 4, 5, 6)
    ]
    assert policy.deciding_steps(policy.decide(steps, now)) == {2, 4, 6}


# Durability -------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], set[str]]:
    """A function that returns the folders that were synced since its last call, relative to tmp_path."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("finds out which files are synced in /proc")
    paths: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: paths.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))

    def take() -> set[str]:
        taken = {os.path.relpath(path, tmp_path) for path in paths if os.path.isdir(path)}
        paths.clear()
        return {path for path in taken if "data-" not in path}

    return take


def test_a_save_syncs_only_the_folders_that_it_creates_and_the_one_above(
    tmp_path: Path, synced: Callable[[], set[str]]
) -> None:
    jaxckpt.save(tmp_path / "a/b/c", {"x": 1})
    assert synced() == {"a/b/c", "a/b", "a", "."}
    jaxckpt.save(tmp_path / "a/b/c", {"x": 2}, overwrite=True)
    assert synced() == {"a/b/c", "a/b"}
    jaxckpt.save(tmp_path / "a/b/d", {"x": 2})
    assert synced() == {"a/b/d", "a/b"}


def test_the_folders_that_a_checkpointer_creates_for_its_notes_are_synced_by_its_first_save(
    tmp_path: Path, synced: Callable[[], set[str]]
) -> None:
    with jaxckpt.Checkpointer(tmp_path / "a/run", metadata={"lr": 1}) as checkpoints:
        synced()
        checkpoints.save(1, {"x": 1})
        checkpoints.wait()
        assert synced() == {"a/run/00000001", "a/run", "a", "."}
        checkpoints.save(2, {"x": 1})
        checkpoints.wait()
        assert synced() == {"a/run/00000002", "a/run"}
        checkpoints.pin(2, "paper")
        assert synced() == {"a/run/_run", "a/run", "a"}
        checkpoints.add_metrics(2, {"loss": 1.0})
        assert synced() == {"a/run/_run", "a/run", "a"}


def test_after_a_save_that_failed_its_folders_are_synced_by_the_next(
    tmp_path: Path, synced: Callable[[], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(jaxckpt.errors.StorageError):
            jaxckpt.save(tmp_path / "a/b/c", {"x": 1}, options=jaxckpt.Options(sync=False))
    assert synced() == set()
    jaxckpt.save(tmp_path / "a/b/c", {"x": 1})
    assert synced() == {"a/b/c", "a/b", "a", "."}
