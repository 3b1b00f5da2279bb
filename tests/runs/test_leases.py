"""Leases: a step is not deleted while it is read, and a dead reader holds a step at most for its term."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._run_folder import leases
from jaxckpt._run_folder.leases import Leases, hold
from jaxckpt._store.folder import Folder
from jaxckpt._store.store_path import store_at

FAST = jaxckpt.Options(sync=False)


def state(step: int) -> Any:
    return {"params": {"w": np.full((4, 4), step)}, "opt_state": np.full(8, step), "step": step}


def until(condition: Any) -> None:
    """Wait until a condition is true."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 60
        time.sleep(0.01)


class Clock:
    """The clock of lease expiry. The test moves it, so that no lease expires because the machine is busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_seconds = 0.0
        now = time.monotonic
        clock = SimpleNamespace(monotonic=lambda: now() + self.ahead_seconds, sleep=time.sleep)
        monkeypatch.setattr(leases, "time", clock)
        monkeypatch.setattr(leases, "_RENEWALS", 600)  # one every 0.1 s of a term of 60 s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def notes(run: str) -> set[bytes | None]:
    """The contents of all lease files."""
    folder = store_at(run, FAST).child("_run")
    return set(folder.read_all([name for name in folder.names() if name.startswith("lease-")]))


def test_a_held_step_is_kept_and_deleted_after_its_release(run: str, clock: Clock) -> None:
    with jaxckpt.Checkpointer(run, keep_last=1, background=False, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
        with jaxckpt.open(run).hold() as checkpoint, jaxckpt.open(f"{run}@1").hold():
            for step in range(2, 5):
                checkpoints.save(step, state(step))
            assert checkpoints.steps() == [1, 4]
            for _ in range(4):  # longer than the term in total
                clock.ahead_seconds += 20
                before = notes(run)
                until(lambda: not notes(run) & before)  # noqa: B023
            assert checkpoints.steps() == [1, 4]
            assert checkpoint["params/w"][0, 0] == 1
        until(lambda: checkpoints.steps() == [4])  # no further save is needed
    assert jaxckpt.Run(run).steps() == [4]


def test_a_held_step_loses_no_subtree(tmp_path: Path, clock: Clock) -> None:
    with jaxckpt.Checkpointer(tmp_path, keep_last_of={"opt_state": 1}, background=False, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
        with jaxckpt.open(tmp_path).hold():
            checkpoints.save(2, state(2))
            assert jaxckpt.load_numpy(checkpoints.path(1))["opt_state"][0] == 1
        until(lambda: "opt_state" not in jaxckpt.open(checkpoints.path(1)))


def test_a_lease_that_is_not_renewed_expires(run: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_renew", lambda *_: None)  # like a dead holder
    with jaxckpt.Checkpointer(run, keep_last=1, background=False, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
        holding = jaxckpt.open(run).hold()
        holding.__enter__()
        checkpoints.save(2, state(2))
        assert checkpoints.steps() == [1, 2]
        clock.ahead_seconds += 31  # half the term
        until(lambda: checkpoints.steps() == [2])


def test_no_lease_expires_because_the_deleting_process_was_suspended_while_it_read(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder may have renewed it since it was read."""
    monkeypatch.setattr(leases, "_renew", lambda *_: None)
    with jaxckpt.Checkpointer(tmp_path, background=False, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
    found = Leases(store_at(str(tmp_path), FAST))
    read_all = Folder.read_all

    def suspended(folder: Folder, names: Any) -> Any:
        read = read_all(folder, names)
        clock.ahead_seconds += 31  # half the term
        return read

    with hold(store_at(str(tmp_path), FAST), 1):
        for reads, held in ((read_all, {1}), (suspended, {1}), (read_all, set[int]())):
            monkeypatch.setattr(Folder, "read_all", reads)
            with found.mark_for_deletion([1]) as leased:
                assert leased == held


def test_a_reader_and_a_deletion_that_start_together_detect_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order, the step is held and stays, or it is deleted and the reader gets an error."""
    outcomes: set[tuple[bool, bool]] = set()
    for round_number in range(60):
        path = tmp_path / str(round_number)
        for step in (1, 2):
            jaxckpt.save(path / f"{step:08d}", {"x": np.arange(3)}, options=FAST)
        store = store_at(path, FAST)
        held = threading.Event()
        gone: list[bool] = []

        def read(store: Any = store, held: threading.Event = held, gone: list[bool] = gone) -> None:
            try:
                with hold(store, 1):
                    held.set()
                    time.sleep(0.02)
                    gone.append(jaxckpt.Run(store.url).steps() != [1, 2])
            except jaxckpt.errors.NotACheckpointError:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.0001 * 2 ** (round_number % 10))  # on a slow machine, the longer delays make both meet
        with Leases(store).mark_for_deletion([1]) as spared:
            if not spared:
                store.child("00000001").unpublish(sync=False)
        reader.join()
        assert held.is_set() == bool(gone)
        assert gone in ([], [False]), "deleted under its reader"
        outcomes.add((held.is_set(), bool(spared)))
    assert (True, True) in outcomes


def test_a_step_that_is_being_deleted_cannot_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        jaxckpt.save(tmp_path / f"{step:08d}", {"x": 1}, options=FAST)
    checkpoint = jaxckpt.open(f"{tmp_path}@1")
    monkeypatch.setattr(leases, "_DELETION_SECONDS", 0.2)
    store = Folder(str(tmp_path), str(tmp_path))
    with Leases(store).mark_for_deletion([1]) as spared:
        assert not spared
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="is being deleted"):
            checkpoint.hold().__enter__()
        store.child("00000001").unpublish(sync=False)
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="it was deleted"):
            checkpoint.hold().__enter__()
    assert list((tmp_path / "_run").iterdir()) == []


def refuse_to_delete(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No file of this name can be deleted, as in a folder that only its owner may write to."""
    unlink = os.unlink

    def refuse(path: Any, **named: Any) -> None:
        if os.path.basename(path) == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **named)

    monkeypatch.setattr(os, "unlink", refuse)


def test_a_mark_that_cannot_be_removed_is_an_error_and_the_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        jaxckpt.save(tmp_path / f"{step:08d}", {"x": 1}, options=FAST)
    with monkeypatch.context() as patched:
        refuse_to_delete(patched, "deleting-00000002")
        with (
            pytest.raises(jaxckpt.errors.StorageError, match=r"cannot delete .*/deleting-00000002: Permission denied"),
            Leases(Folder(str(tmp_path), str(tmp_path))).mark_for_deletion([1, 2, 3]),
        ):
            pass
        assert [path.name for path in (tmp_path / "_run").iterdir()] == ["deleting-00000002"]
        train(tmp_path, 4)  # it can save, although the mark stays
    train(tmp_path, 5)
    assert not list((tmp_path / "_run").glob("deleting-*"))


def test_a_pin_that_cannot_be_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "00000001", {"x": 1}, options=FAST)
    jaxckpt.Run(tmp_path, options=FAST).pin("latest", "paper")
    refuse_to_delete(monkeypatch, "pin-00000001-paper")
    with pytest.raises(jaxckpt.errors.StorageError, match=r"cannot delete .*/pin-00000001-paper: Permission denied"):
        jaxckpt.Run(tmp_path).unpin("paper")
    assert jaxckpt.open(f"{tmp_path}@paper").step is None


def train(path: Path, step: int) -> None:
    with jaxckpt.Checkpointer(path, options=FAST) as checkpointer:
        checkpointer.save(step, {"x": step})


def test_marks_of_a_killed_process_are_removed_by_the_next_checkpointer_that_saves(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "00000001", {"x": 1}, options=FAST)
    (tmp_path / "_run").mkdir()
    (tmp_path / "_run" / "deleting-00000001").write_bytes(b"{}")
    train(tmp_path, 2)
    with jaxckpt.open(tmp_path / "00000001").hold() as checkpoint:
        assert checkpoint["x"].value == 1


def test_a_checkpointer_that_only_reads_leaves_the_marks_of_a_running_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_DELETION_SECONDS", 0.2)
    train(tmp_path, 1)
    with Leases(Folder(str(tmp_path), str(tmp_path))).mark_for_deletion([1]) as held:  # as the training job does
        assert not held
        with jaxckpt.Checkpointer(tmp_path, options=FAST) as reader:
            assert reader.restore() == {"x": 1}
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="is being deleted"):
            jaxckpt.Run(tmp_path).pin(1, "paper")


def test_only_steps_can_be_held(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    with pytest.raises(jaxckpt.errors.InputError, match="is not a step in a run's directory"):
        jaxckpt.open(tmp_path / "ckpt").hold().__enter__()
    jaxckpt.save(tmp_path / "00000001", {"x": 1})
    checkpoint = jaxckpt.open(tmp_path / "00000001")
    for wrong in (0, "60", True):
        with pytest.raises(jaxckpt.errors.InputError, match="term_seconds"):
            checkpoint.hold(term_seconds=wrong).__enter__()  # pyright: ignore
    jaxckpt.save(tmp_path / "00000001", {"x": 2}, overwrite=True)
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced by another since it was opened"):
        checkpoint.hold().__enter__()


@pytest.mark.parametrize("where", ["start_thread", "run_to_the_end"])
def test_a_lease_whose_holder_is_interrupted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C arrives right after the start of the renewing thread, or at the beginning of the release."""
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
    start_thread = leases.start_thread

    def interrupted(*arguments: Any) -> None:
        if where == "start_thread":
            start_thread(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(leases, where, interrupted)
    holding = jaxckpt.open(tmp_path).hold(term_seconds=1)
    with pytest.raises(KeyboardInterrupt), holding:
        pass
    del holding
    gc.collect()
    until(lambda: [path.name for path in (tmp_path / "_run").iterdir()] == ["ended.json"])


LEFT_OPEN = """
import sys, threading, time
import jaxckpt

run = jaxckpt.Run(sys.argv[1])
steps = run.follow()
next(steps)
block = jaxckpt.open(sys.argv[1]).hold()
block.__enter__()

def serve():
    for step in run.follow():
        held.set()
        threading.Event().wait()

held = threading.Event()
threading.Thread(target=serve, daemon=True).start()
held.wait(60)
"""


@pytest.mark.child
def test_a_program_that_ends_leaves_no_lease(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as steps:
        steps.save(1, {"w": np.zeros(3)})
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert not done.stderr
    assert not [*(tmp_path / "run" / "_run").glob("lease-*")]
