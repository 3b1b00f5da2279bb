"""Preemption: one last save, of the same step in all processes, and an exit in time."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import PROGRAMS, RunProcesses, RunPython, finish

import jaxckpt
from jaxckpt._runs import preemption
from jaxckpt._runs.saving import RunStep
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder

FAST = jaxckpt.Options(sync=False)


@pytest.fixture(autouse=True)
def no_handler() -> Iterator[None]:
    """A Checkpointer that another test has left open has set a handler of SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("stride", "asks"), [(1, []), (10, []), (10, ["asks"])])
def test_one_of_two_processes_is_notified_and_both_save_the_same_last_step(
    run_processes: RunProcesses, tmp_path: Path, stride: int, asks: list[str]
) -> None:
    done = run_processes(
        PROGRAMS / "preempted_together.py",
        processes=2,
        devices_per_process=2,
        args=[str(tmp_path / "s"), stride, *asks],
        timeout=90,
        check=False,
    )
    assert [one.returncode for one in done] == [143, 143], "\n".join(map(str, done))
    (said,) = {one.stdout for one in done}
    last = int(said.split()[1])
    assert 7 < last // stride < 399
    with jaxckpt.Checkpointer(tmp_path / "s") as checkpoints:
        assert checkpoints.steps() == [last]
    tree = jaxckpt.load_numpy(tmp_path / "s" / f"{last:08d}")
    assert tree["step"] == last
    np.testing.assert_array_equal(tree["x"], np.full((8, 8), last // stride, np.float32))
    assert jaxckpt.open(tmp_path / "s" / f"{last:08d}").process_states == [{"at": last}] * 2


@pytest.mark.parametrize(
    ("handler", "status", "details"),
    [("exits", 1, []), ("exits", 1, ["late"]), ("logs", 143, []), ("logs", 143, ["late", "ignores_interrupts"])],
)
def test_a_handler_that_has_replaced_that_of_jax_does_not_prevent_the_last_step(
    run_processes: RunProcesses, tmp_path: Path, handler: str, status: int, details: list[str]
) -> None:
    done = run_processes(
        PROGRAMS / "preempted_together.py",
        processes=2,
        devices_per_process=2,
        args=[str(tmp_path / "s"), 1, handler, *details],
        timeout=90,
        check=False,
    )
    assert [one.returncode for one in done] == [143, status], "\n".join(map(str, done))
    last = jaxckpt.Run(tmp_path / "s").latest_step()
    assert {one.stdout for one in done} == {f"last {last}\n"}
    expected = "own handler of SIGTERM has raised, SystemExit(1), after step" if handler == "exits" else "notified"
    assert expected in done[1].stderr


@pytest.mark.parametrize("on_preemption", ["exit", "continue"])
def test_what_an_earlier_handler_raises_is_raised_after_the_last_save(
    tmp_path: Path, on_preemption: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        checkpoints = jaxckpt.Checkpointer(tmp_path, every=100, on_preemption=on_preemption)
        with pytest.raises(SystemExit) as stopped, checkpoints:  # noqa: PT012
            for step in range(1, 5):
                if step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                checkpoints.save(step, {"x": step})
        assert (type(stopped.value), stopped.value.code) == (SystemExit, 7)
        assert checkpoints.preempted
        assert checkpoints.steps() == [3]
        assert "the job was preempted: step 3 is saved" in caplog.text
        assert "own handler of SIGTERM has raised, SystemExit(7), after step 3 is saved" in caplog.text
        with pytest.raises(SystemExit):  # a second signal has its usual effect
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("on_preemption", ["exit", "continue"])
def test_what_an_earlier_handler_raises_after_the_last_call_of_save_is_raised_by_close(
    tmp_path: Path, on_preemption: Any
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        checkpoints = jaxckpt.Checkpointer(tmp_path, on_preemption=on_preemption)
        checkpoints.save(1, {"x": np.zeros(1000)})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as stopped:
            checkpoints.close()
        assert stopped.value.code == 7
        assert checkpoints.steps() == [1]
        assert not (tmp_path / "_run" / "ended.json").exists(), "followers wait for the next run"
        checkpoints.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_each_checkpointer_raises_what_an_earlier_handler_has_raised(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        runs = [jaxckpt.Checkpointer(tmp_path / name) for name in "ab"]
        for run in runs:
            run.save(1, {"x": 1})
        os.kill(os.getpid(), signal.SIGTERM)
        for run in runs:
            with pytest.raises(SystemExit) as stopped:
                run.save(2, {"x": 2})
            assert stopped.value.code == 7
            run.close()
            assert run.steps() == [1, 2]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_jax_is_queried_about_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a job of several processes, JAX stops at the number after the largest one that it was asked about.
    monkeypatch.setattr(preemption, "_queries", preemption._Queries(None))
    steps = [100, 110, 110, 95, 96, 10**9, 10**9 + 3]
    asked = [list(preemption._next_numbers(step)) for step in steps]
    assert asked == [[1], [*range(2, 12)], [11], [12], [13], [14], [15, 16, 17]]
    # A process that joins another job, with processes that have just started, begins again.
    monkeypatch.setattr(preemption, "connected_job", object)
    assert list(preemption._next_numbers(7)) == [1]


def test_a_step_beyond_31_bits_is_saved_by_two(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
with jaxckpt.Checkpointer(args) as checkpoints:
    print([checkpoints.save(step, {"x": step}) for step in (1 << 31, 1 << 62)])
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=120)
    assert [one.stdout for one in done] == ["[True, True]\n"] * 2
    assert jaxckpt.Checkpointer(tmp_path / "s").steps() == [1 << 31, 1 << 62]


def test_a_thread_that_cannot_listen_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert said == {"exit": f"7 {saved}", "continue": "7 True continues\n", "chained": f"7 notified {saved}"}[how]
    with jaxckpt.Checkpointer(folder) as checkpoints:
        assert checkpoints.steps() == [7]
        np.testing.assert_array_equal(checkpoints.restore()["x"], np.full(1000, 7))


@pytest.mark.child
@pytest.mark.parametrize("how", ["stuck", "stuck without room", "stuck locally"])
def test_the_deadline_holds_if_storage_hangs(tmp_path: Path, how: str) -> None:
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
            patched.setattr(
                FileWriter, "write", lambda *_: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "no space"))
            )
            with pytest.raises(jaxckpt.errors.StorageError):  # noqa: PT012
                checkpoints.save(2, {"x": np.arange(2)})
                checkpoints.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
            checkpoints.save(2, {"x": np.arange(2)})
    assert checkpoints.steps() == [1, 2]


@pytest.mark.child
def test_a_repeated_signal_is_the_same_notice_and_a_later_one_ends_the_process(tmp_path: Path) -> None:
    """A launcher passes the signal on, although the scheduler has also sent it to Python."""
    program = """
import os, signal, sys, time
import jaxckpt

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)

for name in "ab":
    run = f"{sys.argv[1]}/{name}"
    with jaxckpt.Checkpointer(run, every=100, on_preemption="continue") as checkpoints:
        checkpoints.save(1, {"x": 1})
        terminate()
        terminate()
        checkpoints.save(2, {"x": 2})
        terminate()
        print(checkpoints.steps(), flush=True)
        if name == "b":
            time.sleep(1)
            terminate()
            print("survived")
"""
    done = finish(program, str(tmp_path))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "[2]\n[2]\n"), str(done)


@pytest.mark.child
def test_a_deadline_that_passed_before_the_last_step_is_no_other_failure(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
import numpy as np, jaxckpt

with jaxckpt.Checkpointer(sys.argv[1], every=100, preemption_seconds=0.1) as checkpoints:
    checkpoints.save(1, {"x": np.ones((1024, 1024))})
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    checkpoints.save(2, {"x": np.ones((1024, 1024))})
"""
    done = finish(program, str(tmp_path))
    assert done.returncode == 128 + signal.SIGTERM, str(done)
    assert "Traceback" not in done.stderr, str(done)


def test_a_step_that_is_not_on_disk_by_the_deadline_is_not_reported_as_saved(
    run_python: RunPython, tmp_path: Path
) -> None:
    program = """
import os, signal, sys, time
import numpy as np, jaxckpt
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder
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


def test_the_last_step_is_saved_although_another_save_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"x": 1})
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(
                FileWriter, "write", lambda *_: (_ for _ in ()).throw(jaxckpt.errors.StorageError(28, "no space"))
            )
            other = jaxckpt.save_async(tmp_path / "other", {"x": np.arange(2)})
            assert other._save._ended.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
            checkpoints.save(2, {"x": np.arange(2)})
    assert checkpoints.steps() == [1, 2]
    assert f"an earlier save was not completed: {tmp_path}/other: " in caplog.text
    jaxckpt.save(tmp_path / "next", {"x": 1})  # the error was reported


def test_a_last_step_that_is_saved_replaces_an_earlier_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules: dict[str, Any] = {"on_failure": "continue", "on_preemption": "continue", "options": FAST}
    with jaxckpt.Checkpointer(tmp_path, **rules) as checkpoints:
        checkpoints.save(1, {"x": 1})
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(RunStep, "claim", lambda *_: (_ for _ in ()).throw(jaxckpt.StorageError(28, "no space")))
            checkpoints.save(2, {"x": 1})
            checkpoints._saver.last_save.pending.join()  # pyright: ignore[reportOptionalMemberAccess]
        os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(3, {"x": 1})
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_the_last_step_is_saved_although_another_save_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: Any
) -> None:
    released = threading.Event()
    write = FileWriter.write

    def held(writer: FileWriter, *arguments: Any) -> Any:
        assert "other" not in writer.folder or released.wait(60)
        return write(writer, *arguments)

    monkeypatch.setattr(FileWriter, "write", held)
    options = jaxckpt.Options(when_busy=when_busy)
    with jaxckpt.Checkpointer(tmp_path / "run", preemption_seconds=5, options=options) as checkpoints:
        checkpoints.save(1, {"x": np.arange(2)})
        checkpoints.wait()
        other = jaxckpt.save_async(tmp_path / "other", {"x": np.arange(2)})
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
                checkpoints.save(2, {"x": np.arange(2)})
            assert not other.done
        finally:
            released.set()
    other.wait(60)
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("local", [False, True])
def test_neither_a_rule_nor_a_metric_loses_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, local: bool
) -> None:
    tier = jaxckpt.LocalTier(tmp_path / "local", copies=0) if local else None
    rules: dict[str, Any] = {"keep_last_of": {"opt_stat": 1, "params": 1}, "keep_best": ("loss", "min")}
    tree = {"params": np.ones(3), "opt_state": np.ones(3)}
    with jaxckpt.Checkpointer(tmp_path / "run", every=1000, **rules, local=tier) as checkpoints:
        with pytest.raises(jaxckpt.errors.TreeError, match="opt_stat"):
            checkpoints.save(1, tree)
        assert not checkpoints.save(2, tree, metrics={"loss": "not yet"})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 3 is saved"):
            checkpoints.save(3, tree, metrics={"loss": "not yet"})
    assert "saved without this rule: keep_last_of has 'opt_stat'" in caplog.text
    assert "saved without metrics: metric 'loss' must be a number" in caplog.text
    assert checkpoints.restore(3)["opt_state"].tolist() == [1] * 3


def test_an_earlier_save_is_finished_without_its_rate_limit(tmp_path: Path) -> None:
    options = jaxckpt.Options(max_bytes_per_second=100, object_bytes=1 << 12, chunk_bytes=1 << 10)
    with jaxckpt.Checkpointer(tmp_path, preemption_seconds=60, options=options) as checkpoints:
        checkpoints.save(1, {"x": np.zeros(1 << 16, np.uint8)})  # would take 11 minutes
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
            checkpoints.save(2, {"x": np.zeros(1 << 16, np.uint8)})
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("local", [False, True])
def test_a_save_of_another_checkpointer_is_finished_without_its_rate_limit(tmp_path: Path, local: bool) -> None:
    options = jaxckpt.Options(max_bytes_per_second=100, object_bytes=1 << 12, chunk_bytes=1 << 10)
    tier = jaxckpt.LocalTier(tmp_path / "local", copies=0) if local else None
    with (
        jaxckpt.Checkpointer(tmp_path / "other", options=options, on_preemption="ignore", local=tier) as other,
        jaxckpt.Checkpointer(tmp_path / "run") as checkpoints,
    ):
        checkpoints.save(1, {"x": 1})
        checkpoints.wait()
        other.save(1, {"x": np.zeros(1 << 16, np.uint8)})  # would take 11 minutes
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 1 is saved"):
            checkpoints.save(1, {"x": 1})  # needs no save
    assert other.steps() == [1]


@pytest.mark.parametrize("on_preemption", ["exit", "continue"])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_signal_after_the_last_call_of_save_does_not_end_that_save(
    tmp_path: Path, on_preemption: Any, waiting: bool
) -> None:
    """It ends its limit of bytes per second, and then the program."""
    options = jaxckpt.Options(max_bytes_per_second=100, object_bytes=1 << 12, chunk_bytes=1 << 10)
    preempted = pytest.raises(jaxckpt.Preempted, match="after the last save")
    with preempted if on_preemption == "exit" else contextlib.nullcontext():  # noqa: SIM117
        with jaxckpt.Checkpointer(tmp_path, options=options, on_preemption=on_preemption) as checkpoints:
            checkpoints.save(1, {"x": np.zeros(1 << 16, np.uint8)})  # would take 11 minutes
            if waiting:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            else:
                os.kill(os.getpid(), signal.SIGTERM)
    assert checkpoints.steps() == [1]
    assert (tmp_path / "_run" / "ended.json").exists() == (on_preemption != "exit"), "followers wait for the next run"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    checkpoints.close()


def test_a_signal_before_close_limits_the_wait_for_deletions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, unpublish = threading.Event(), Folder.unpublish

    def hang(*arguments: Any, **named: Any) -> None:
        assert released.wait(60)
        unpublish(*arguments, **named)

    monkeypatch.setattr(Folder, "unpublish", hang)
    checkpoints = jaxckpt.Checkpointer(tmp_path, keep_last=1, preemption_seconds=1)
    for step in (1, 2):
        checkpoints.save(step, {"x": step})
    os.kill(os.getpid(), signal.SIGTERM)
    begun = time.monotonic()
    try:
        with pytest.raises(jaxckpt.Preempted, match="after the last save"):
            checkpoints.close()
        assert time.monotonic() - begun < 30
    finally:
        released.set()
    assert jaxckpt.Run(tmp_path).latest_step() == 2


@pytest.mark.parametrize("last", [1, 2])
def test_the_callback_of_a_published_save_is_not_waited_for(tmp_path: Path, last: int) -> None:
    called, released = threading.Event(), threading.Event()

    def upload(_: jaxckpt.SaveInfo) -> None:
        called.set()
        assert released.wait(60)

    with jaxckpt.Checkpointer(tmp_path, preemption_seconds=20) as checkpoints:
        checkpoints.save(1, {"x": np.arange(2)}, on_done=upload)
        uploading = checkpoints.pending
        assert uploading is not None
        assert called.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            with pytest.raises(jaxckpt.Preempted, match=f"step {last} is saved"):
                checkpoints.save(last, {"x": np.arange(2)})
            assert not uploading.done
        finally:
            released.set()
    uploading.wait(60)
    assert checkpoints.steps() == [*range(1, last + 1)]


def test_a_last_step_that_is_published_in_time_is_reported_as_saved_although_its_callback_is_late(
    tmp_path: Path,
) -> None:
    released = threading.Event()
    with jaxckpt.Checkpointer(tmp_path, preemption_seconds=2) as checkpoints:
        checkpoints.save(1, {"x": np.arange(2)})
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            with pytest.raises(jaxckpt.Preempted, match="step 2 is saved"):
                checkpoints.save(2, {"x": np.arange(2)}, on_done=lambda _: released.wait(60))
        finally:
            released.set()


def test_a_last_step_that_is_to_be_overwritten_is_saved_again(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {"x": "first"})
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 7 is saved"):
            checkpoints.save(7, {"x": "second"}, overwrite=True)
    assert jaxckpt.restore(tmp_path / "00000007") == {"x": "second"}


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("deleted", [5, 7])
def test_a_step_that_was_deleted_is_saved_again(tmp_path: Path, deleted: int, local: bool) -> None:
    tier = jaxckpt.LocalTier(tmp_path / "local", every=100, copies=0) if local else None
    with jaxckpt.Checkpointer(tmp_path / "run", local=tier) as checkpoints:
        for step in (3, 5, 7):
            checkpoints.save(step, {"x": "first"})
            checkpoints.wait()
        checkpoints.delete(deleted)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(jaxckpt.Preempted, match="step 7 is saved"):
            checkpoints.save(7, {"x": "second"})
    assert checkpoints.steps() == ([3, 5, 7] if deleted == 7 else [3, 7])
    assert jaxckpt.restore(checkpoints.path(7)) == {"x": "second" if deleted == 7 else "first"}


def test_an_abandoned_save_that_finishes_does_not_change_the_exit_status(run_python: RunPython, tmp_path: Path) -> None:
    program = """
import os, signal, sys, threading
import numpy as np, jaxckpt
from jaxckpt._save import running_saves as background
from jaxckpt._store.files import FileWriter
from jaxckpt._store.folder import Folder
released, write = threading.Event(), FileWriter.write
FileWriter.write = lambda *arguments: released.wait(60) and write(*arguments)
with jaxckpt.Checkpointer(sys.argv[1], every=100, preemption_seconds=1, on_preemption="continue") as checkpoints:
    checkpoints.save(1, {})  # begins to listen
    os.kill(os.getpid(), signal.SIGTERM)
    checkpoints.save(2, {"x": np.arange(2)})
    (abandoned,) = background._abandoned
    released.set()
    abandoned.wait(60)
print(checkpoints.steps())
"""
    assert run_python(program, args=[str(tmp_path / "s")], devices=1, timeout=60) == "[2]\n"


@pytest.mark.child
@pytest.mark.parametrize("order", ["first first", "last first", "another on top"])
def test_after_all_are_closed_the_signal_has_its_previous_effect(tmp_path: Path, order: str) -> None:
    done = finish(PROGRAMS / "closed_checkpointers.py", tmp_path, order)
    assert (done.stdout, done.returncode) == (f"closed {order != 'another on top'}\n", -signal.SIGTERM), str(done)


def test_an_interrupt_during_registration_leaves_the_signal_handler_unchanged(
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


def test_a_checkpointer_that_saves_again_after_close_is_preempted(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, every=10)
    for step in (10, 20):
        checkpoints.save(step, {"x": step})
        checkpoints.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert (tmp_path / "_run" / "ended.json").exists()
    assert not checkpoints.save(21, {"x": 21})
    assert not (tmp_path / "_run" / "ended.json").exists()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(jaxckpt.Preempted, match="step 22 is saved"):
        checkpoints.save(22, {"x": 22})
    checkpoints.close()
    assert checkpoints.steps() == [10, 20, 22]
    assert not (tmp_path / "_run" / "ended.json").exists(), "the next run resumes"
    assert checkpoints.save(30, {"x": 30})
    checkpoints.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# A handler that a library sets after the first save --------------------------------------------------------


@pytest.fixture
def received() -> Iterator[list[str]]:
    """What handlers of SIGTERM note. The program's handler is set before the first save."""
    notes: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: notes.append("program"))
    yield notes
    signal.signal(signal.SIGTERM, before)


def set_handler(how: str, received: list[str]) -> None:
    """As a library does, which calls the handler that it replaces, or does not."""
    replaced = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: Any) -> None:
        received.append("library")
        if how == "chains":
            assert callable(replaced)
            replaced(number, frame)
        if how == "exits":
            sys.exit(3)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "ignores" else handler)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("replaces", ["library"]), ("chains", ["library", "program"]), ("exits", ["library"]), ("ignores", [])],
)
@pytest.mark.parametrize("again", [False, True])
def test_a_handler_that_is_set_after_the_first_save_does_not_prevent_the_last_step(
    tmp_path: Path, received: list[str], how: str, expected: list[str], again: bool
) -> None:
    with pytest.raises(SystemExit) as stopped, jaxckpt.Checkpointer(tmp_path, every=100) as checkpoints:  # noqa: PT012
        for step in range(1, 8):
            if step == 3 or (again and step in (4, 5)):
                set_handler(how, received)
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.save(step, {"x": step})
    assert stopped.value.code == (3 if how == "exits" else 143)
    assert checkpoints.steps() == [6]
    times = 3 if again and how == "chains" else 1
    assert received == expected[:1] * times + expected[1:]
    received.clear()
    if how in ("replaces", "chains"):  # a second signal has its previous effect
        signal.raise_signal(signal.SIGTERM)
        assert received == expected[:1] * times + expected[1:]


def test_two_checkpointers_find_the_same_handler_of_a_library(tmp_path: Path, received: list[str]) -> None:
    runs = [jaxckpt.Checkpointer(tmp_path / name, every=100, on_preemption="continue") for name in "ab"]
    installed: list[Any] = []
    for step in range(1, 30):
        if step == 2:
            set_handler("chains", received)
        for run in runs:
            run.save(step, {"x": step})
        installed.append(signal.getsignal(signal.SIGTERM))
    assert len({*map(id, installed[2:])}) == 1, "nothing is installed again"
    os.kill(os.getpid(), signal.SIGTERM)
    for run in runs:
        run.save(30, {"x": 30})
        run.close()
        assert (run.steps(), run.preempted) == ([30], True)
    assert received == ["library", "program"]


def test_a_handler_that_a_library_sets_for_a_while(tmp_path: Path, received: list[str]) -> None:
    with jaxckpt.Checkpointer(tmp_path, every=100, on_preemption="continue") as checkpoints:
        for step in range(1, 20):
            replaced = signal.getsignal(signal.SIGTERM)
            set_handler("replaces", received)
            checkpoints.save(2 * step, {"x": step})
            signal.signal(signal.SIGTERM, replaced)
            checkpoints.save(2 * step + 1, {"x": step})
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.save(50, {"x": 50})
    assert received == ["program"]
    received.clear()
    signal.raise_signal(signal.SIGTERM)
    assert received == ["program"]


def test_handlers_that_call_each_other_end(tmp_path: Path, received: list[str]) -> None:
    """A library sets one function at each step, which calls what it has replaced last."""
    replaced: list[Any] = []

    def library(number: int, frame: Any) -> None:
        received.append("library")
        replaced[-1](number, frame)

    with jaxckpt.Checkpointer(tmp_path, every=100, on_preemption="continue") as checkpoints:
        for step in range(1, 10):
            replaced.append(signal.signal(signal.SIGTERM, library))
            checkpoints.save(step, {"x": step})
        signal.raise_signal(signal.SIGTERM)
        assert checkpoints.save(50, {"x": 50})
    assert received
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_outside_the_main_thread_a_replaced_handler_is_reported_once(
    tmp_path: Path, received: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": 1})
        set_handler("replaces", received)
        thread = threading.Thread(target=lambda: [checkpoints.save(step, {"x": step}) for step in (2, 3)])
        thread.start()
        thread.join()
    messages = [record.message for record in caplog.records if "has replaced the handler" in record.message]
    assert messages == ["a library has replaced the handler of SIGTERM: no last step is saved if this job is preempted"]


def test_a_handler_of_other_code_than_python_is_reported_once(
    tmp_path: Path, received: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints, (tmp_path / "stacks").open("w") as stacks:
        checkpoints.save(1, {"x": 1})
        faulthandler.register(signal.SIGTERM, file=stacks)
        try:
            checkpoints.save(2, {"x": 2})
            checkpoints.save(3, {"x": 3})
        finally:
            faulthandler.unregister(signal.SIGTERM)
    messages = [record.message for record in caplog.records if "has replaced the handler" in record.message]
    assert len(messages) == 1
    assert "one that is not Python's: no last step is saved if this job is preempted" in messages[0]


# A preempted job without its last step ---------------------------------------------------------------------


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("every", [1, 10])
def test_a_preempted_job_that_ends_with_an_error_says_what_is_not_saved(
    tmp_path: Path, received: list[str], caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """As if the same signal had ended the workers of a data loader."""
    with pytest.raises(RuntimeError), jaxckpt.Checkpointer(tmp_path, every=every) as checkpoints:  # noqa: PT012
        for step in range(1, 16):
            checkpoints.save(step, {"x": step})
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("a worker was killed")
    lost = "the job was preempted, and ends with RuntimeError without its last step: save was last called for step 15"
    assert errors(caplog) == ([] if every == 1 else [f"{lost}, which is not saved; the last save was of step 10"])


def test_a_preempted_job_whose_last_save_fails_says_so(
    tmp_path: Path, received: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, every=10)
    checkpoints.save(1, {"x": 1})
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(jaxckpt.JaxckptError), checkpoints:
        checkpoints.save(2, {"x": object()})
    assert len(errors(caplog)) == 1
    assert "without its last step: save was last called for step 2, which is not saved" in errors(caplog)[0]


def test_a_preempted_job_that_is_closed_says_what_is_not_saved(
    tmp_path: Path, received: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, every=10)
    for step in range(1, 13):
        checkpoints.save(step, {"x": step})
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(jaxckpt.Preempted, match="step 12, which is not saved; the last save was of step 10"):
        checkpoints.close()
    assert len(errors(caplog)) == 1
    checkpoints.close()
    assert len(errors(caplog)) == 1


@pytest.mark.child
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ignores", "dies"])
def test_workers_of_a_loader_that_ignore_the_signal_let_the_last_step_be_saved(tmp_path: Path, how: str) -> None:
    """The pattern of docs/training-loop.md."""
    pytest.importorskip("torch")
    done = finish(PROGRAMS / "preempted_loader.py", tmp_path / "s", how, env={"PYTHONHASHSEED": "1"})
    if how == "ignores":
        assert (done.returncode, jaxckpt.Run(tmp_path / "s").steps()) == (143, [8]), str(done)
    elif "step 8 is saved" not in done.stderr:  # the next batch had arrived before the workers died
        assert "ends with RuntimeError without its last step: save was last called for step 7" in done.stderr
        assert done.returncode == 1, str(done)


@pytest.mark.child
def test_a_preempted_program_that_ends_without_closing_says_what_is_not_saved(tmp_path: Path) -> None:
    program = """
import os, signal, sys, jaxckpt
signal.signal(signal.SIGTERM, lambda *_: None)
checkpoints = jaxckpt.Checkpointer(sys.argv[1], every=10)
for step in range(1, 13):
    checkpoints.save(step, {"x": step})
os.kill(os.getpid(), signal.SIGTERM)
raise RuntimeError("a worker was killed")
"""
    done = finish(program, tmp_path / "s")
    assert done.returncode == 1, str(done)
    assert "the program ends without its last step: save was last called for step 12, which is not saved" in done.stderr


def test_a_job_of_two_that_ends_with_an_error_after_the_signal_says_what_is_not_saved(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    done = run_processes(
        PROGRAMS / "preempted_together.py",
        processes=2,
        devices_per_process=2,
        args=[str(tmp_path / "s"), 1, "dies"],
        timeout=90,
        check=False,
    )
    lost = "the job was preempted, and ends with RuntimeError without its last step: save was last called for step 6"
    assert all(lost in one.stderr for one in done), "\n".join(map(str, done))
