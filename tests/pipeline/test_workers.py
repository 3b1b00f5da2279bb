"""Work in the threads that move bytes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxckpt._pipeline.workers import THREADS, replace_workers, run_shared, submit


def test_work_may_wait_for_work_that_it_submits() -> None:
    works = [submit(lambda number=number: submit(lambda: number).result(30)) for number in range(2 * THREADS)]
    assert [work.result(60) for work in works] == list(range(2 * THREADS))


def test_replaced_threads_end_after_their_work() -> None:
    before, went = threading.active_count(), threading.Event()
    for _ in range(5):
        waiting = submit(functools.partial(went.wait, 30))
        replace_workers()
        assert submit(lambda: 1).result(30) == 1, "a thread that waits holds up no later work"
    went.set()
    assert waiting.result(30)
    until = time.monotonic() + 30
    while threading.active_count() > before + THREADS and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before + THREADS


_HAND_OVER = """
import os, threading
from jaxckpt._pipeline.watchdog import Watchdog, under
from jaxckpt._pipeline.workers import submit

def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def begin_again():
    watchdog.yields_processors = False  # somebody waits
    return submit(niceness).result(30)

watchdog = Watchdog(60)
watchdog.yields_processors = True
before = niceness()
with under(watchdog):
    assert submit(begin_again).result(30) >= before
assert submit(niceness).result(30) == before
"""


@pytest.mark.child
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, no thread has a priority of its own")
def test_threads_do_not_inherit_the_priority_of_a_background_save() -> None:
    # In a new process, whose other threads have not been started.
    subprocess.run([sys.executable, "-c", _HAND_OVER], check=True, timeout=60, env=os.environ)


# Shared work ----------------------------------------------------------------------------------------------


def test_shared_work_is_done_once_and_by_several_threads() -> None:
    done: list[int] = []
    together = threading.Barrier(2)

    def work(number: int) -> None:
        if number < 2:
            together.wait(60)  # two threads do these at the same time
        done.append(number)

    run_shared([functools.partial(work, number) for number in (*range(2, 50), 0, 1)])
    assert sorted(done) == list(range(50))
    run_shared([])


def test_shared_work_does_not_wait_for_busy_threads() -> None:
    released, done = threading.Event(), list[int]()
    busy = [submit(functools.partial(released.wait, 60)) for _ in range(THREADS)]
    try:
        run_shared([functools.partial(done.append, number) for number in range(10)])
        assert sorted(done) == list(range(10))
    finally:
        released.set()
    assert all(task.result() for task in busy)


def test_an_error_of_shared_work_is_raised_after_all_of_it() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_shared([fail, *(functools.partial(done.append, number) for number in range(5)), fail])
    assert sorted(done) == list(range(5))
