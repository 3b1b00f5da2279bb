"""Preemption: one last save, of the same step in all processes, and an exit in time."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, RunProcesses, RunPython, finish

import jaxckpt
from jaxckpt._storage.files import FileWriter


def test_one_of_two_processes_is_notified_and_both_save_the_same_last_step(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        PROGRAMS / "preempted_together.py",
        processes=2,
        devices_per_process=2,
        args=str(tmp_path / "s"),
        timeout=90,
        check=False,
    )
    assert [one.returncode for one in done] == [143, 143], "\n".join(map(str, done))
    (said,) = {one.stdout for one in done}
    last = int(said.split()[1])
    assert 7 < last < 399
    with jaxckpt.Checkpointer(tmp_path / "s") as checkpoints:
        assert checkpoints.steps() == [last]
    tree = jaxckpt.load_numpy(tmp_path / "s" / f"{last:08d}")
    assert tree["step"] == last
    np.testing.assert_array_equal(tree["x"], np.full((8, 8), last, np.float32))
    assert jaxckpt.open(tmp_path / "s" / f"{last:08d}").process_states == [{"at": last}] * 2


def test_a_step_beyond_31_bits_is_saved_by_two(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
with jaxckpt.Checkpointer(args) as checkpoints:
    print([checkpoints.save(step, {"x": step}) for step in (1 << 31, 1 << 62)])
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=120)
    assert [one.stdout for one in done] == ["[True, True]\n"] * 2
    assert jaxckpt.Checkpointer(tmp_path / "s").steps() == [1 << 31, 1 << 62]


def test_a_thread_that_cannot_listen_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        thread = threading.Thread(target=lambda: [checkpoints.save(step, {"x": step}) for step in (1, 2)])
        thread.start()
        thread.join()
    assert [record.message for record in caplog.records if "cannot listen for SIGTERM" in record.message][1:] == []
    assert "cannot listen for SIGTERM" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


def test_it_may_be_closed_in_another_thread(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        checkpoints = jaxckpt.Checkpointer(tmp_path)
        checkpoints.save(1, {"x": 1})
        thread = threading.Thread(target=checkpoints.close)
        thread.start()
        thread.join()
        assert checkpoints.steps() == [1]
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", ["exit", "continue", "chained"])
def test_the_step_at_which_it_is_notified_is_saved(run_python: RunPython, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "s"
    said = run_python(PROGRAMS / "preempted_alone.py", args=[str(folder), how], check=False, devices=1)
    saved = f"the job was preempted: step 7 is saved in {folder}\n"
    assert said == {"exit": f"7 {saved}", "continue": "7 True goes on\n", "chained": f"7 told {saved}"}[how]
    with jaxckpt.Checkpointer(folder) as checkpoints:
        assert checkpoints.steps() == [7]
        np.testing.assert_array_equal(checkpoints.restore()["x"], np.full(1000, 7))


@pytest.mark.child
@pytest.mark.parametrize("how", ["stuck", "stuck without room", "stuck locally"])
def test_the_deadline_holds_where_storage_hangs(tmp_path: Path, how: str) -> None:
    # Its writes sleep for 1,000 s. The program can only end if it does not wait for them.
    done = finish(PROGRAMS / "preempted_alone.py", tmp_path / "s", how, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM, str(done)
    assert "step 7 was not saved within the deadline" in done.stdout
    with jaxckpt.Checkpointer(tmp_path / "s") as checkpoints:
        assert checkpoints.steps() == []
    assert [path.name for path in (tmp_path / "s").iterdir() if path.name != "_run"] == []


@pytest.mark.parametrize("background", [True, False])
def test_a_step_whose_save_failed_is_not_reported_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    with jaxckpt.Checkpointer(tmp_path, background=background) as checkpoints:
        checkpoints.save(1, {"x": 1})
        with monkeypatch.context() as patched:
            patched.setattr(FileWriter, "write", lambda *_: (_ for _ in ()).throw(jaxckpt.StorageError(28, "no space")))
            with pytest.raises(jaxckpt.StorageError):  # noqa: PT012
                checkpoints.save(2, {"x": np.arange(2)})
                checkpoints.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
            checkpoints.save(2, {"x": np.arange(2)})
    assert checkpoints.steps() == [1, 2]


def test_a_step_that_is_not_on_disk_by_the_deadline_is_not_reported_as_saved(
    run_python: RunPython, tmp_path: Path
) -> None:
    program = """
import os, signal, sys, time
import numpy as np, jaxckpt
from jaxckpt._storage.files import FileWriter
FileWriter.write = lambda *_: time.sleep(1000)
with jaxckpt.Checkpointer(sys.argv[1], preemption_seconds=1) as checkpoints:
    checkpoints.save(0, {"x": np.arange(2)})
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(0, {"x": np.arange(2)})
    except jaxckpt.Preempted as stop:
        print(stop)
"""
    said = run_python(program, args=[str(tmp_path / "s")], check=False, devices=1, timeout=60)
    assert "step 0 was not saved within the deadline" in said


@pytest.mark.child
@pytest.mark.parametrize("order", ["first first", "last first", "another on top"])
def test_once_all_are_closed_the_signal_does_what_it_did_before(tmp_path: Path, order: str) -> None:
    done = finish(PROGRAMS / "closed_checkpointers.py", tmp_path, order)
    assert (done.stdout, done.returncode) == (f"closed {order != 'another on top'}\n", -signal.SIGTERM), str(done)


def test_an_interrupt_as_it_begins_to_listen_leaves_the_signal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def interrupted(*arguments: Any) -> None:
        install(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    options = jaxckpt.Options(sync=False)
    with jaxckpt.Checkpointer(tmp_path / "a", options=options) as checkpoints:
        monkeypatch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(1, {"w": 1})
        checkpoints.save(1, {"w": 1})
        with jaxckpt.Checkpointer(tmp_path / "b", options=options) as another:
            another.save(1, {"w": 1})
    assert signal.getsignal(signal.SIGTERM) == before
    with jaxckpt.Checkpointer(tmp_path / "c", options=options) as checkpoints:
        monkeypatch.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(1, {"w": 1})
    assert signal.getsignal(signal.SIGTERM) == before
