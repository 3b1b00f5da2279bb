"""Background deletion: it never delays a save, its failures are raised, and closing waits for it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, RunProcesses, RunPython

import jaxckpt
from jaxckpt._run_folder import leases
from jaxckpt._run_folder.leases import Leases
from jaxckpt._runs import deletion
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.folder import Folder

FAST = jaxckpt.Options(sync=False)


def state(step: int) -> Any:
    return {"w": np.full((4, 4), step), "step": step}


def threads() -> int:
    """The number of threads that are deleting."""
    stacks = [traceback.extract_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(call.filename == deletion.__file__ for call in stack) for stack in stacks)


class Gate:
    """Blocks deletions until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[Folder | Bucket]) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        unpublish = kind.unpublish

        def wait(*arguments: Any, **named: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            unpublish(*arguments, **named)

        monkeypatch.setattr(kind, "unpublish", wait)


@pytest.fixture(params=[Folder, Bucket])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[Gate]:
    found = Gate(monkeypatch, request.param)
    yield found
    found.open.set()


def directory(gate: Gate, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    kind = request.node.callspec.params["gate"]
    return str(tmp_path) if kind is Folder else f"memory://deletion-{tmp_path.name}"


def test_no_save_waits_for_a_deletion_and_closing_does(
    gate: Gate, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = threads()  # other tests may have left a Checkpointer open whose steps are held
    with jaxckpt.Checkpointer(directory(gate, tmp_path, request), keep_last=1, options=FAST) as checkpoints:
        for step in range(5):
            assert checkpoints.save(step, state(step))
            assert checkpoints.pending is not None
            checkpoints.pending.wait(60)
        assert gate.reached.wait(60)
        assert checkpoints.steps() == [0, 1, 2, 3, 4]
        assert checkpoints.restore()["step"] == 4
        assert threads() <= before + 2, "one deletes, and one waits for its turn"
        threading.Timer(0.3, gate.open.set).start()
        checkpoints.wait()
        assert gate.open.is_set()
        assert checkpoints.steps() == [4]
        gate.open.clear()
        checkpoints.save(5, state(5))
        threading.Timer(0.3, gate.open.set).start()
    assert gate.open.is_set()
    assert checkpoints.steps() == [5]
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads(), "it ends when nothing is left to do"


@pytest.mark.parametrize("begun", [True, False])
def test_a_step_that_is_saved_again_while_it_is_deleted(
    gate: Gate, tmp_path: Path, request: pytest.FixtureRequest, begun: bool
) -> None:
    """The save waits until the step is deleted. A step whose deletion has not begun is kept."""
    checkpoints = jaxckpt.Checkpointer(
        directory(gate, tmp_path, request), keep_last=2, keep_if=lambda step, metrics: bool(metrics), options=FAST
    )
    for step in range(4):
        checkpoints.save(step, state(step))
    assert gate.reached.wait(60)  # the deletion of step 0
    threading.Timer(0.3, gate.open.set).start()
    again = 0 if begun else 1
    saved = checkpoints.save(again, state(100), metrics={"good": 1}, overwrite=True)
    assert gate.open.is_set() == begun
    assert saved
    checkpoints.close()
    assert checkpoints.steps() == [again, 2, 3]
    assert checkpoints.restore(again)["step"] == 100


def refusing(*_: Any, **__: Any) -> None:
    raise jaxckpt.errors.StorageError(13, "not yours")


@pytest.mark.parametrize("raiser", ["save", "wait", "close"])
def test_a_failure_is_raised_once_and_the_next_pass_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raiser: str
) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, every=2, keep_last=1, options=FAST)
    checkpoints.save(0, state(0))
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "unpublish", refusing)
        checkpoints.save(2, state(2))
        checkpoints._saver.last_save.wait()
        checkpoints._deletion.wait()
    assert checkpoints.steps() == [0, 2]
    assert checkpoints.restore()["step"] == 2, "a restore does not raise the error"
    assert not checkpoints.save(3, state(3)), "a step that is not due does not either"
    call = {"save": lambda: checkpoints.save(4, state(4)), "wait": checkpoints.wait, "close": checkpoints.close}[raiser]
    with pytest.raises(jaxckpt.errors.StorageError, match="not yours") as expected:
        call()
    assert "this ended the deletion of steps in" in expected.value.__notes__[0]
    if raiser in ("save", "wait"):
        assert checkpoints.save(4, state(4))
        checkpoints.close()
        assert checkpoints.steps() == [4]
    else:
        assert (tmp_path / "_run" / "ended.json").exists(), "a follower ends"


def test_a_predicate_that_fails_deletes_nothing(tmp_path: Path) -> None:
    never: Any = lambda step, metrics: None  # noqa: E731
    checkpoints = jaxckpt.Checkpointer(tmp_path, keep_if=never, options=FAST)
    for step in range(3):
        checkpoints.save(step, state(step))
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"what keep_if returns for step 0 must be True or False, found N"
        ):
            checkpoints.wait()
    assert jaxckpt.Run(tmp_path).steps() == [0, 1, 2]


def test_a_step_that_is_pinned_as_its_deletion_begins_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    condemned = Leases.mark_for_deletion

    def pinned_first(self: Leases, steps: Any) -> Any:
        if steps:
            jaxckpt.Run(tmp_path).pin(0, "paper")
        return condemned(self, steps)

    with jaxckpt.Checkpointer(tmp_path, keep_last=1, background=False, options=FAST) as checkpoints:
        checkpoints.save(0, state(0))
        with monkeypatch.context() as patched:
            patched.setattr(Leases, "mark_for_deletion", pinned_first)
            checkpoints.save(1, state(1))
        assert checkpoints.steps() == [0, 1]
    assert jaxckpt.open(f"{tmp_path}@paper").step == 0


def test_a_held_step_can_be_held_again_while_others_are_deleted(
    gate: Gate, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_DELETION_SECONDS", 0.2)
    path = directory(gate, tmp_path, request)
    with jaxckpt.Checkpointer(path, keep_last=1, options=FAST) as checkpoints:
        checkpoints.save(0, state(0))
        checkpoints.wait()
        with jaxckpt.open(f"{path}/00000000").hold():
            for step in (1, 2):
                checkpoints.save(step, state(step))
            assert gate.reached.wait(60)  # the deletion of step 1
            with jaxckpt.open(f"{path}/00000000").hold():
                pass
            assert jaxckpt.Run(path, options=FAST).pin(0, "paper") == 0
            with pytest.raises(jaxckpt.errors.NotACheckpointError, match="is being deleted"):
                jaxckpt.open(f"{path}/00000001").hold().__enter__()
            gate.open.set()
    assert checkpoints.steps() == [0, 2]


def test_deletions_are_logged_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxckpt")
    with jaxckpt.Checkpointer(tmp_path, keep_last=3, keep_every=2, options=FAST) as checkpoints:
        for step in range(5):
            checkpoints.save(step, state(step))
    said = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert [message for message in said if not message.startswith("saved ")] == [
        f"deleted step 1 of {tmp_path}: not kept by keep_last=3, keep_every=2"
    ]


def test_without_a_thread_a_save_does_not_wait_for_a_held_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        with jaxckpt.open(checkpoints.path(1)).hold(), monkeypatch.context() as patched:
            patched.setattr("jaxckpt._pipeline.lanes.start_thread", refused)
            checkpoints.save(2, state(2))
            checkpoints.wait()
            assert checkpoints.steps() == [1, 2]
        checkpoints.save(3, state(3))
    assert jaxckpt.Run(tmp_path).steps() == [3]


# Trash -----------------------------------------------------------------------------------------------------


def test_trash(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with jaxckpt.Checkpointer(run, keep_last=1, trash=True, options=FAST) as checkpoints:
        for step in (0, 1, 2, 2, 3):
            checkpoints.save(step, state(step), overwrite=True)
        checkpoints.wait()
        checkpoints.save(4, state(4))
        checkpoints.wait()
        with pytest.raises(jaxckpt.errors.InputError, match="the only one"):
            checkpoints.delete(4)
        checkpoints.save(5, state(5))
    moved = sorted(os.listdir(run / "_trash"))
    assert [name.partition("-")[0] for name in moved] == [f"{step:08d}" for step in range(5)]
    for step, name in enumerate(moved):
        assert jaxckpt.verify(run / "_trash" / name).ok
        assert jaxckpt.load_numpy(run / "_trash" / name)["step"] == step
    os.rename(run / "_trash" / moved[2], run / "00000002")  # moved back
    assert jaxckpt.Run(run).steps() == [2, 5]
    assert jaxckpt.verify(run).ok
    with jaxckpt.Checkpointer(run, keep_last=1, trash=True, background=False) as checkpoints:
        assert checkpoints.restore()["step"] == 5
        assert checkpoints.steps() == [5]
    assert len(os.listdir(run / "_trash")) == 5


def test_trash_on_another_file_system_is_an_error_that_says_so(tmp_path: Path) -> None:
    run, memory = tmp_path / "run", Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not another file system")
    with tempfile.TemporaryDirectory(dir=memory) as elsewhere:
        run.mkdir()
        (run / "_trash").symlink_to(elsewhere)
        checkpoints = jaxckpt.Checkpointer(run, keep_last=1, trash=True, options=FAST)
        for step in range(2):
            checkpoints.save(step, state(step))
        with pytest.raises(jaxckpt.errors.StorageError, match=r"they are on different file systems.*Nothing was moved"):
            checkpoints.close()
        assert os.listdir(elsewhere) == []
    assert jaxckpt.Run(run).steps() == [0, 1]
    assert jaxckpt.verify(run).ok


def test_no_trash_on_an_object_store() -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="trash=True needs a file system"):
        jaxckpt.Checkpointer("memory://no-trash", trash=True)


# The end of a program --------------------------------------------------------------------------------------


def test_the_last_step_does_not_wait_for_deletions_beyond_the_deadline(
    gate: Gate, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    begun = time.monotonic()
    checkpoints = jaxckpt.Checkpointer(
        directory(gate, tmp_path, request), keep_last=1, preemption_seconds=2, options=FAST
    )
    for step in (0, 1):
        checkpoints.save(step, state(step))
    assert gate.reached.wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
        checkpoints.save(2, state(2))
    checkpoints.close()
    assert time.monotonic() - begun < 20
    assert checkpoints.steps() == [0, 1, 2]
    gate.open.set()
    with jaxckpt.Checkpointer(checkpoints._directory.url, keep_last=1) as again:
        assert again.restore()["step"] == 2
    assert checkpoints.steps() == [2]


@pytest.mark.parametrize("how", ["left open", "held by a reader", "stuck"])
def test_a_program_that_does_not_close_ends_normally(run_python: RunPython, tmp_path: Path, how: str) -> None:
    assert run_python(PROGRAMS / "left_open.py", args=[str(tmp_path / "run"), how], devices=1, timeout=60) == "end\n"
    assert (
        jaxckpt.Run(tmp_path / "run").steps()
        == {"left open": [9], "held by a reader": [0, 9], "stuck": [*range(10)]}[how]
    )


def test_all_processes_raise_a_failure(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
from jaxckpt._store.folder import Folder
def refuse(*_, **__):
    raise jaxckpt.errors.StorageError(13, "not yours")
with jaxckpt.Checkpointer(args, keep_last=1, background=False) as checkpoints:
    checkpoints.save(0, {"x": 0})
    unpublish, Folder.unpublish = Folder.unpublish, refuse
    checkpoints.save(1, {"x": 1})
    Folder.unpublish = unpublish
    try:
        checkpoints.save(2, {"x": 2})
    except (jaxckpt.errors.StorageError, jaxckpt.errors.PeerFailedError) as error:
        print(type(error).__name__, "not yours" in str(error))
    checkpoints.save(3, {"x": 3})
print(jaxckpt.Run(args).steps() if process_id == 0 else "")
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout.split("\n")[:2] for one in done] == [["StorageError True", "[3]"], ["PeerFailedError True", ""]]


@pytest.mark.parametrize("trash", [False, True])
def test_a_step_that_is_a_link_is_unlinked_and_its_target_stays(tmp_path: Path, trash: bool) -> None:
    with jaxckpt.Checkpointer(tmp_path / "theirs", options=FAST) as theirs:
        for step in (1, 2, 3):
            theirs.save(step, {**state(step), "moments": np.ones(3)})
    (tmp_path / "ours").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "ours" / f"{step:08d}").symlink_to(f"../theirs/{step:08d}")
    with jaxckpt.Checkpointer(
        tmp_path / "ours", keep_last=2, keep_last_of={"moments": 1}, trash=trash, options=FAST
    ) as ours:
        ours.delete(2)
        ours.save(4, {**state(4), "moments": np.ones(3)})
        ours.wait()
        assert ours.steps() == [3, 4]
        assert not (tmp_path / "ours" / "00000001").is_symlink()
    for step in (1, 2, 3):
        assert jaxckpt.load_numpy(tmp_path / f"theirs@{step}")["moments"].sum() == 3
    assert jaxckpt.verify(tmp_path / "theirs").ok


def test_a_step_that_is_a_link_is_not_overwritten(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "theirs", options=FAST) as theirs:
        theirs.save(3, state(3))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/00000003").symlink_to("../theirs/00000003")
    with jaxckpt.Checkpointer(tmp_path / "ours", options=FAST) as ours:
        with pytest.raises(jaxckpt.errors.CheckpointExistsError):
            ours.save(3, state(30))
        with pytest.raises(jaxckpt.errors.InputError, match="ours/00000003 is a symbolic link"):
            ours.save(3, state(30), overwrite=True)
        ours.save(4, state(4))
        ours.delete(3)
        ours.save(3, state(30))
        ours.wait()
        assert ours.restore(3)["step"] == 30
    assert jaxckpt.restore(tmp_path / "theirs@3")["step"] == 3
    assert jaxckpt.verify(tmp_path / "theirs").ok


def test_the_remains_of_a_save_behind_a_link_are_not_deleted(tmp_path: Path) -> None:
    """They may belong to a save that is running in another run."""
    remains = tmp_path / "theirs/00000001" / f"data-{'0' * 32}"
    remains.mkdir(parents=True)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/00000001").symlink_to("../theirs/00000001")
    for step in (2, 3):
        with jaxckpt.Checkpointer(tmp_path / "ours", options=FAST) as ours:
            ours.save(step, state(step))
    assert remains.exists()


def test_a_new_step_is_not_saved_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with jaxckpt.Checkpointer(tmp_path / "ours", options=FAST) as ours:
        ours.save(1, state(1))
        ours.wait()
        (tmp_path / "ours/00000002").symlink_to("../theirs")
        with pytest.raises(jaxckpt.errors.InputError, match=r"is a symbolic link.*with delete\(2\)"):
            ours.save(2, state(2))
        ours.delete(2)
        ours.save(2, state(2))
    assert list((tmp_path / "theirs").iterdir()) == []


def test_the_second_name_of_a_manifest_that_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.save(1, {"x": np.arange(3)})
    (data,) = (tmp_path / "00000001").glob("data-*")
    os.link(tmp_path / "00000001" / "manifest.json", data / "manifest.json")  # it is published by this link
    jaxckpt.Checkpointer(tmp_path).close()
    assert not (data / "manifest.json").exists()
    assert jaxckpt.verify(tmp_path).ok
