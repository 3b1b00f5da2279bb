"""Readers of a run: its steps and the newest one, paths that name a step, and following a run during training."""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import RunProcesses

import jaxckpt
from jaxckpt._cli.listing import list_checkpoints
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._run_folder import leases
from jaxckpt._runs import follow
from jaxckpt._store.folder import Folder
from jaxckpt._store.store_path import store_at

FAST = jaxckpt.Options(sync=False)


def state(step: int) -> Any:
    return {"w": np.full((4, 4), step), "step": step}


def fill(run: str, *numbers: int, **arguments: Any) -> None:
    with jaxckpt.Checkpointer(run, options=FAST, background=False, **arguments) as checkpoints:
        for step in numbers:
            checkpoints.save(step, state(step), metrics={"loss": abs(step - 20)})


# Steps and paths -------------------------------------------------------------------------------------------


def test_steps_are_listed_without_touching_anything(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert jaxckpt.Run(run).steps() == []
    assert jaxckpt.Run(run).latest_step() is None
    assert not os.path.exists(run)
    fill(run, 10, 20, 30)
    (tmp_path / "run" / "00000040" / "data-x").mkdir(parents=True)  # the remains of a killed run
    (tmp_path / "run" / "_run" / "ended.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    assert jaxckpt.Run(run).steps() == [10, 20, 30]
    assert jaxckpt.Run(run).latest_step() == 30
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(jaxckpt.errors.InputError, match="is a checkpoint; give the directory"):
        jaxckpt.Run(f"{run}/00000010").steps()


def test_an_error_of_the_storage_does_not_hide_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(tmp_path / "run")
    fill(run, 10, 20)

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(path: Any, *args: Any, **named: Any) -> Any:
            if str(path) == f"{run}/00000020/manifest.json":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(path, *args, **named)

        return fail

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    for act in (
        lambda: jaxckpt.Run(run).steps(),
        lambda: jaxckpt.Run(run).latest_step(),
        lambda: jaxckpt.restore(run),
        lambda: jaxckpt.open(f"{run}@latest"),
        lambda: jaxckpt.verify(run),
        lambda: next(jaxckpt.Run(run).follow(after=10)),
    ):
        with pytest.raises(jaxckpt.errors.StorageError, match=r"00000020/manifest\.json: Input/output error"):
            act()
    with jaxckpt.open(f"{run}@10").hold() as checkpoint:  # needs nothing of step 20
        assert checkpoint.step == 10
    assert {entry.name: entry.status for entry in list_checkpoints(run)} == {"00000010": "ok", "00000020": "unreadable"}


def test_a_folder_that_is_not_a_step_may_be_unreadable(tmp_path: Path) -> None:
    fill(str(tmp_path), 10)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").symlink_to("manifest.json")  # ELOOP
    fill(str(tmp_path), 20)
    assert jaxckpt.Run(tmp_path).steps() == [10, 20]
    assert jaxckpt.open(tmp_path).step == 20


def test_a_runs_directory_means_its_newest_step(run: str) -> None:
    fill(run, 10, 20, 30, keep_best=("loss", "min"), keep_last=3)
    assert jaxckpt.Run(run).steps() == [10, 20, 30]
    for path, step in ((run, 30), (f"{run}@latest", 30), (f"{run}@best", 20), (f"{run}@10", 10), (f"{run}@0010", 10)):
        assert jaxckpt.restore(path)["step"] == step
        assert jaxckpt.load_numpy(path)["step"] == step
        assert jaxckpt.open(path).step == step
        assert jaxckpt.open(path).path == f"{run}/{step:08d}"
    assert not jaxckpt.diff(f"{run}@10", f"{run}@20").identical
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match=r"has no step 40; the newest steps are 10, 20, 30"):
        jaxckpt.restore(f"{run}@40")
    with pytest.raises(jaxckpt.errors.InputError, match=r"no step named 'lates'.*did you mean 'latest'"):
        jaxckpt.restore(f"{run}@lates")
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.restore(f"{run}-that-does-not-exist@40")


def test_processes_restore_the_step_that_process_0_finds_to_be_the_newest(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    fill(str(tmp_path / "run"), 10, 20)
    program = """
import jaxckpt
from jaxckpt._sources import open_source
if process_id == 1:  # it looked a moment earlier
    newest = open_source.resolve_step
    open_source.resolve_step = lambda store: store.child("00000010") if store.url.endswith("run") else newest(store)
print(jaxckpt.restore(args)["step"])
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "run"), timeout=90)
    assert [one.stdout for one in done] == ["20\n"] * 2


def test_best_needs_a_rule(tmp_path: Path) -> None:
    fill(str(tmp_path), 10)
    with pytest.raises(jaxckpt.errors.InputError, match="does not record which step is the best"):
        jaxckpt.open(f"{tmp_path}@best")
    jaxckpt.Checkpointer(tmp_path, keep_best=("accuracy", "max"))
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match=r"no step in .* has a value of the metric 'accuracy'"):
        jaxckpt.open(f"{tmp_path}@best")
    for content in (b'["accuracy"]', b'["accuracy", "most"]', b"{", b'["\xff", "max"]'):
        (tmp_path / "_run/best.json").write_bytes(content)
        with pytest.raises(jaxckpt.errors.DataError, match=r"best\.json is damaged"):
            jaxckpt.open(f"{tmp_path}@best")


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path: Path) -> None:
    fill(str(tmp_path / "run"), 40)
    jaxckpt.save(tmp_path / "mail@40", {"step": "mine"})
    assert jaxckpt.restore(tmp_path / "mail@40") == {"step": "mine"}
    fill(str(tmp_path / "mail@40run"), 50)
    assert jaxckpt.restore(tmp_path / "mail@40run")["step"] == 50
    assert jaxckpt.restore(f"{tmp_path}/mail@40run@50")["step"] == 50


def test_a_run_is_not_overwritten(run: str) -> None:
    fill(run, 10)
    for overwrite in (False, True):
        with pytest.raises(
            jaxckpt.errors.CheckpointExistsError, match=r"is the directory of a run, with 1 step, .*00000010"
        ):
            jaxckpt.save(run, {"x": 1}, overwrite=overwrite)
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="names a step of a run"):
            jaxckpt.save(f"{run}@10", {"x": 1}, overwrite=overwrite)
    assert jaxckpt.restore(run)["step"] == 10


def test_verify_checks_all_steps(tmp_path: Path) -> None:
    fill(str(tmp_path), 10, 20)
    report = jaxckpt.verify(tmp_path)
    assert report.ok
    assert (report.leaves, report.objects) == (4, 2)
    (victim,) = tmp_path.glob("00000010/data-*/*/c/0/0/0")
    victim.write_bytes(victim.read_bytes()[:-1])
    report = jaxckpt.verify(tmp_path)
    assert [(problem.leaf, problem.object.partition("/")[0]) for problem in report.problems] == [("w", "00000010")]
    assert jaxckpt.verify(f"{tmp_path}@20").ok
    assert not jaxckpt.verify(f"{tmp_path}@10")


# Following -------------------------------------------------------------------------------------------------


def test_each_step_is_yielded_as_it_is_published_until_the_run_ends(run: str) -> None:
    published: dict[int, float] = {}

    def train() -> None:
        with jaxckpt.Checkpointer(run, options=FAST, background=False) as checkpoints:
            for step in range(1, 6):
                checkpoints.save(step, state(step), metrics={"loss": step / 2})
                published[step] = time.monotonic()
                time.sleep(0.3)

    training = threading.Thread(target=train)
    followed = jaxckpt.Run(run, options=FAST).follow(timeout_seconds=60, poll_seconds=0.05)
    training.start()
    seen: list[int] = []
    for step in followed:
        assert time.monotonic() - published.get(step.number, float("inf")) < 30
        assert (step.held, step.metrics) == (True, {"loss": step.number / 2})
        assert step.path == f"{run}/{step.number:08d}"
        assert step.open()["step"].value == step.restore(select="step")["step"] == step.number
        seen.append(step.number)
    training.join()
    assert seen == [1, 2, 3, 4, 5]
    assert [step.number for step in jaxckpt.Run(run).follow(after=3)] == [4, 5]
    assert list(jaxckpt.Run(run).follow(after=5)) == []


def test_a_server_that_starts_late_or_is_slow_gets_the_newest_step(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST, background=False)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    seen: list[int] = []
    for step in jaxckpt.Run(tmp_path).follow(newest=True, poll_seconds=0.01):
        seen.append(step.number)
        if step.number == 3:
            checkpoints.save(4, state(4))
            checkpoints.save(5, state(5))
            checkpoints.close()
    assert seen == [3, 5]
    assert [step.number for step in jaxckpt.Run(tmp_path).follow(newest=True, after=5)] == []


def went_back(checkpoints: jaxckpt.Checkpointer, *deleted: int) -> None:
    """Delete steps, and save them again with other data."""
    for step in deleted:
        checkpoints.delete(step)
    for step in reversed(deleted):
        checkpoints.save(step, state(-step))


def overwritten(checkpoints: jaxckpt.Checkpointer, *steps: int) -> None:
    for step in reversed(steps):
        checkpoints.save(step, state(-step), overwrite=True)


@pytest.mark.parametrize(
    ("change", "newest", "expected"),
    [
        (lambda checkpoints: went_back(checkpoints, 30, 20), False, [10, 20, 30, -20, -30]),
        (lambda checkpoints: overwritten(checkpoints, 30), True, [30, -30]),
        (lambda checkpoints: overwritten(checkpoints, 30, 20), False, [10, 20, 30, -20, -30]),
        (lambda checkpoints: checkpoints.delete(30), True, [30, 20]),
        (lambda checkpoints: checkpoints.delete(30), False, [10, 20, 30]),
        (lambda checkpoints: checkpoints.delete(10), False, [10, 20, 30]),
        (lambda checkpoints: overwritten(checkpoints, 20), True, [30]),
    ],
)
def test_a_follower_goes_back_with_the_training(
    tmp_path: Path, change: Callable[[jaxckpt.Checkpointer], None], newest: bool, expected: list[int]
) -> None:
    assert followed(str(tmp_path), change, newest=newest) == expected


@pytest.mark.parametrize("newest", [True, False])
def test_a_follower_waits_while_the_directory_is_away(tmp_path: Path, newest: bool) -> None:
    """A file system was unmounted, for example. Its steps are not new when it is back."""

    def away(checkpoints: jaxckpt.Checkpointer) -> None:
        checkpoints.close()
        os.rename(tmp_path / "run", tmp_path / "elsewhere")
        threading.Timer(0.3, lambda: os.rename(tmp_path / "elsewhere", tmp_path / "run")).start()

    assert followed(str(tmp_path / "run"), away, newest=newest) == ([30] if newest else [10, 20, 30])


def test_a_follower_of_many_steps_waits_while_the_directory_comes_and_goes(tmp_path: Path) -> None:
    fill(str(tmp_path / "run"), *range(1, 101))
    steps = jaxckpt.Run(tmp_path / "run").follow(poll_seconds=0.001, timeout_seconds=30)
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.wait(0.2):
            os.rename(tmp_path / "run", tmp_path / "elsewhere")
            time.sleep(0.005)
            os.rename(tmp_path / "elsewhere", tmp_path / "run")

    (tmp_path / "run" / "_run" / "ended.json").unlink()
    assert [next(steps).number for _ in range(100)] == [*range(1, 101)]
    moving = threading.Thread(target=come_and_go)
    moving.start()
    repeated = list[int]()
    following = threading.Thread(target=lambda: repeated.extend(step.number for step in steps), daemon=True)
    following.start()
    time.sleep(3)
    ended.set()
    moving.join()
    (tmp_path / "run" / "_run" / "ended.json").write_text("{}")
    following.join(30)
    assert not repeated


def test_a_server_goes_back_with_the_training(run: str) -> None:
    assert followed(run, lambda checkpoints: went_back(checkpoints, 30, 20), newest=True) == [30, -30]


def test_a_server_does_not_go_back_to_a_step_that_the_rules_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the lease, a newer step is published, and the rules delete the newest one listed."""
    run, put, later = tmp_path / "run", Folder.put, [160]
    checkpoints = jaxckpt.Checkpointer(run, options=FAST, background=False, keep_last=1, keep_every=100)

    def put_late(folder: Folder, key: str, content: bytes, *, sync: bool = False) -> None:
        if key.startswith("lease-00000150") and later:
            checkpoints.save(step := later.pop(), state(step))
            checkpoints.close()
        put(folder, key, content, sync=sync)

    monkeypatch.setattr(Folder, "put", put_late)
    for step in (100, 130):
        checkpoints.save(step, state(step))
    seen: list[int] = []
    for step in jaxckpt.Run(run).follow(newest=True, poll_seconds=0.01, timeout_seconds=30):
        seen.append(step.number)
        if seen == [130]:
            checkpoints.save(150, state(150))
            checkpoints.delete(130)
    assert jaxckpt.Run(run).steps() == [100, 160]
    assert seen == [130, 160]


def test_a_step_that_is_being_deleted_does_not_keep_a_server_from_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(leases, "_DELETION_SECONDS", 0.2)
    with jaxckpt.Checkpointer(run, options=FAST, background=False) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(step))
        (run / "_run" / "ended.json").unlink(missing_ok=True)
        steps = jaxckpt.Run(run).follow(newest=True, poll_seconds=0.01, timeout_seconds=1)
        assert next(steps).number == 30
        (run / "_run" / "deleting-00000020").write_bytes(b"{}")  # of a process that was killed
        shutil.rmtree(run / "00000030")
        assert [step.number for step in steps] == [10]


def followed(run: str, change: Callable[[jaxckpt.Checkpointer], None], *, newest: bool) -> list[int]:
    """What a follower of steps 10, 20 and 30 restores, if they change after it has restored step 30."""
    checkpoints = jaxckpt.Checkpointer(run, options=FAST, background=False)
    for step in (10, 20, 30):
        checkpoints.save(step, state(step))
    seen: list[int] = []
    for step in jaxckpt.Run(run).follow(newest=newest, poll_seconds=0.01, timeout_seconds=30):
        seen.append(step.restore()["step"])
        if seen[-1] == 30:
            change(checkpoints)
            checkpoints.close()
    return seen


def test_a_yielded_step_that_loses_its_manifest_does_not_end_the_loop(run: str) -> None:
    fill(run, 10, 20)
    steps = jaxckpt.Run(run).follow(poll_seconds=0.01, timeout_seconds=30)
    assert [next(steps).number, next(steps).number] == [10, 20]
    at = store_at(run, jaxckpt.Options()).child("00000020")
    at.remove(MANIFEST)
    with pytest.raises(jaxckpt.errors.ManifestError):
        jaxckpt.open(f"{run}@20")
    fill(run, 30)
    assert next(steps).number == 30


def test_the_next_checkpointer_that_trains_reopens_the_run(tmp_path: Path) -> None:
    def ended() -> bool:
        return (tmp_path / "_run" / "ended.json").exists()

    fill(str(tmp_path), 1)
    assert ended()
    reader = jaxckpt.Checkpointer(tmp_path, options=FAST)
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        assert ended()
        checkpoints.save(2, state(2))
        assert not ended()
        reader.close()
        assert not ended()
    assert ended()
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:  # only reads
        assert checkpoints.restore()["step"] == 2
        assert ended()
    assert ended()
    with contextlib.suppress(ZeroDivisionError), jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.save(3, state(3))
        raise ZeroDivisionError
    assert not ended()
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.restore()
    assert not ended()
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:  # no step is left to train
        checkpoints.restore_or_init(lambda: state(0))
    assert ended()
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.restore_or_init(lambda: state(0))
        assert not ended()
    opened_before = jaxckpt.Checkpointer(tmp_path, options=FAST)
    fill(str(tmp_path), 4)
    assert ended()
    for step in (5, 6):
        opened_before.save(step, state(step))
        assert not ended()
        opened_before.close()  # and is used again
        assert ended()


def test_a_step_can_be_sent_to_another_process(run: str) -> None:
    fill(run, 10)
    (step,) = jaxckpt.Run(run).follow()
    for copied in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert copied == step
        assert copied.restore()["step"] == 10


def test_a_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (jaxckpt.Run, jaxckpt.weights.subscribe, jaxckpt.Checkpointer):
        with pytest.raises(jaxckpt.errors.InputError, match=r"file is a file; give the directory of a Checkpointer"):
            use(tmp_path / "file")


def test_following_ends_at_the_timeout(run: str) -> None:
    begun = time.monotonic()
    assert list(jaxckpt.Run(run).follow(timeout_seconds=0.3, poll_seconds=10)) == []
    assert 0.3 <= time.monotonic() - begun < 9
    checkpoints = jaxckpt.Checkpointer(run, options=FAST, background=False)  # never closed, as after a kill
    checkpoints.save(1, state(1))
    seen: list[int] = []
    for step in jaxckpt.Run(run).follow(timeout_seconds=0.5, poll_seconds=0.05):
        time.sleep(0.6)  # the loop's body does not count toward the timeout
        seen.append(step.number)
    assert seen == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"after": -1},
        {"after": "1"},
        {"timeout_seconds": 0},
        {"timeout_seconds": "1"},
        {"poll_seconds": 0},
        {"poll_seconds": None},
    ],
)
def test_invalid_arguments(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jaxckpt.errors.InputError):
        jaxckpt.Run(tmp_path).follow(**wrong)


def test_a_reader_without_write_permission_follows_without_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(str(tmp_path), 1, 2)

    def refused(store: Folder, name: str) -> Folder:
        raise jaxckpt.errors.StorageError(13, f"cannot create {store.url}/{name}: Permission denied")

    monkeypatch.setattr(Folder, "create_child", refused)  # root may write anywhere, so simulate this
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert [(step.number, step.held) for step in jaxckpt.Run(tmp_path).follow()] == [(1, False), (2, False)]
    assert caplog.text.count("read without leases") == 1
    with pytest.raises(jaxckpt.errors.StorageError, match=r"cannot hold step 2 of .*Get permission to write there"):
        jaxckpt.open(tmp_path).hold().__enter__()


def test_a_step_that_is_published_while_a_follower_is_suspended_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if suspended just after it has listed the steps, for longer than its timeout."""
    run, listed = str(tmp_path / "run"), follow.step_folders
    fill(run, 1)
    (tmp_path / "run" / "_run" / "ended.json").unlink()

    def suspended(*arguments: Any, **named: Any) -> Any:
        found = listed(*arguments, **named)
        if named["above"] == 1:
            monkeypatch.setattr(follow, "step_folders", listed)
            fill(run, 2)
            (tmp_path / "run" / "_run" / "ended.json").unlink()
            time.sleep(0.4)
        return found

    monkeypatch.setattr(follow, "step_folders", suspended)
    assert [step.number for step in jaxckpt.Run(run).follow(timeout_seconds=0.3, poll_seconds=0.1)] == [1, 2]
