"""Work in the threads that move bytes."""

from __future__ import annotations

from jaxckpt._pipeline.workers import THREADS, submit


def test_work_may_wait_for_work_that_it_submits() -> None:
    works = [submit(lambda number=number: submit(lambda: number).result(30)) for number in range(2 * THREADS)]
    assert [work.result(60) for work in works] == list(range(2 * THREADS))
