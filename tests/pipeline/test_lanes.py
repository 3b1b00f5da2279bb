"""Lanes: where the parts of a call run, and what they leave behind."""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import run_python

import jaxckpt
from jaxckpt._pipeline import lanes
from jaxckpt._pipeline.threads import Task
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt.errors import DataError, StorageError

TREE = {"w": np.arange(64.0).reshape(8, 8), "step": 3}


def damage_an_object(path: Path) -> None:
    file = next(file for file in path.glob("data-*/*/c/**/*") if file.is_file())
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def test_work_runs_in_a_lane_with_the_callers_context() -> None:
    variable = contextvars.ContextVar[str]("variable")
    variable.set("the caller's")
    seen = lanes.run(
        lambda: (threading.current_thread().name, variable.get(), lanes.is_watched()), Watchdog(60)
    ).result()
    assert seen == ("jaxckpt-lane", "the caller's", True)
    assert not lanes.is_watched()


def test_a_lane_is_used_again() -> None:
    lanes.run_alone(lambda: None, 60)
    before = threading.active_count()
    idents = {lanes.run_alone(threading.get_ident, 60) for _ in range(20)}
    assert len(idents) <= lanes.MAX_IDLE
    assert threading.active_count() <= before


def test_the_caller_makes_the_calls_that_the_lane_asks_for() -> None:
    called = list[tuple[int, int]]()

    def work() -> str:
        for number in range(3):
            lanes.in_caller(lambda number=number: called.append((number, threading.get_ident())))
        return "done"

    assert lanes.run(work, Watchdog(60)).result() == "done"
    assert called == [(number, threading.get_ident()) for number in range(3)]


def test_a_released_caller_returns_while_the_work_goes_on() -> None:
    goes_on, returned = threading.Event(), list[bool]()

    def work() -> str:
        lanes.release_caller()
        assert goes_on.wait(60)
        lanes.in_caller(lambda: returned.append(threading.current_thread() is threading.main_thread()))
        return "done"

    task = lanes.run(work, Watchdog(60))
    assert not task.done()
    goes_on.set()
    assert task.result() == "done"
    assert returned == [False], "nobody waits any more"


def test_an_interrupt_ends_the_wait_and_abandons_work_that_only_reads() -> None:
    resumed, interrupted, ended = list[object](), threading.Event(), threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(60)
        try:
            lanes.run_watched("reading /somewhere", 60, lambda: None)
        except StorageError as error:
            resumed.append(error)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        lanes.run_alone(work, 60)
    interrupted.set()
    assert ended.wait(60)
    assert len(resumed) == 1, "its next storage operation raises"


def test_a_task_is_done_once() -> None:
    done = list[int]()
    task = Task(lambda: done.append(1))
    threads = [threading.Thread(target=task.run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    task.result(60)
    assert done == [1]


def test_a_lane_that_gets_a_task_while_another_does_it_does_nothing() -> None:
    """`await_end` starts a task again if no lane has begun it, and then two may."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(60)

    task = lanes._LaneTask(work, Watchdog(60))
    first = threading.Thread(target=task.run)
    first.start()
    assert begun.wait(60)
    task.run()
    assert not task.done()
    may_end.set()
    first.join(60)
    assert task.result(60)


def test_profilers_and_debuggers_see_lanes() -> None:
    def work_of_a_lane() -> None: ...

    seen = set[str]()
    threading.setprofile(lambda frame, event, given: seen.add(frame.f_code.co_name))
    try:
        lanes.run_alone(work_of_a_lane, 60)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert "work_of_a_lane" in seen
    assert lanes.run_alone(sys.getprofile, 60) is None


@pytest.mark.one_device
def test_the_callers_settings_of_jax_follow_and_progress_is_called_in_its_thread(tmp_path: Path) -> None:
    threads = set[int]()
    options = jaxckpt.Options(progress=lambda _: threads.add(threading.get_ident()))
    with jax.enable_x64(True):
        jaxckpt.save(tmp_path / "c", {"x": jnp.arange(3), "y": np.arange(4)}, options=options)
        assert jaxckpt.restore(tmp_path / "c", options=options)["x"].dtype == np.int64
    with jax.default_device(jax.devices()[-1]):
        jaxckpt.save(tmp_path / "d", {"x": jnp.arange(3)})
        found = jaxckpt.restore(tmp_path / "d", {"x": jnp.zeros(3, jnp.int32)})
    assert found["x"].devices() == {jax.devices()[-1]}
    jaxckpt.load_numpy(tmp_path / "c", options=options)
    jaxckpt.verify(tmp_path / "c", options=options)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("call", [jaxckpt.restore, jaxckpt.load_numpy])
def test_a_failed_read_keeps_no_memory(tmp_path: Path, call: Any) -> None:
    """Its traceback holds frames, the frames hold buffers, and a cycle would keep all of them until a collection."""
    jaxckpt.save(tmp_path / "c", TREE)
    damage_an_object(tmp_path / "c")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(DataError) as raised:
                call(tmp_path / "c")
            del raised
        ends = time.monotonic() + 10
        while any(issubclass(type(found), DataError) for found in gc.get_objects()):  # the lane may still end its call
            assert time.monotonic() < ends
    finally:
        gc.enable()


def test_the_main_thread_takes_no_lock_of_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`logging` takes its locks in Python code: an interrupt right after that would leave one held."""
    caplog.set_level(logging.INFO)
    jaxckpt.save(tmp_path / "c", TREE)
    jaxckpt.restore(tmp_path / "c")
    threads = {record.thread for record in caplog.records if record.name == "jaxckpt"}
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.child
@pytest.mark.parametrize("waits", [True, False])
def test_a_suspended_process_does_not_blame_its_storage(tmp_path: Path, waits: bool) -> None:
    """As after Ctrl-Z and fg. The storage itself takes 0.9 s of the 1.5 s that it may take."""
    program = f"""
import os, signal, subprocess, threading, time
import numpy as np
import jaxckpt
from jaxckpt._store.files import FileWriter

write, resumed = FileWriter._write, threading.Event()

def suspended(*arguments, **named):
    subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {{os.getpid()}}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(9):
        time.sleep(0.1)
        resumed.set()
    return write(*arguments, **named)

FileWriter._write = suspended
options = jaxckpt.Options(timeout_seconds=1.5)
pending = jaxckpt.save_async({str(tmp_path / "ckpt")!r}, {{"w": np.arange(64)}}, options=options)
if not {waits}:
    resumed.wait()
pending.wait()
"""
    assert run_python(program, timeout=60) == ""
    assert (jaxckpt.load_numpy(tmp_path / "ckpt")["w"] == np.arange(64)).all()
