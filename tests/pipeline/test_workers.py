"""Work in the threads that move bytes."""

from __future__ import annotations

import functools
import threading

import pytest

from jaxckpt._pipeline.workers import THREADS, run_shared, submit


def test_work_may_wait_for_work_that_it_submits() -> None:
    works = [submit(lambda number=number: submit(lambda: number).result(30)) for number in range(2 * THREADS)]
    assert [work.result(60) for work in works] == list(range(2 * THREADS))


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
