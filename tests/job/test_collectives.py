"""Calls with collectives: all are made, whatever happens in this process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._pipeline import threads
from jaxckpt.errors import PeerFailedError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)  # the main thread raises now


def make_all(calls: CollectiveCalls[int, Any]) -> None:
    with calls:
        for item in calls:
            assert calls.run_next(f"data {item}") == -item


def make_one_and_fail(calls: CollectiveCalls[int, Any], error: Exception) -> None:
    with calls:
        calls.run_next()
        raise error


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_ends_no_call(at: int) -> None:
    made: list[tuple[int, Any]] = []

    def call(item: int, given: Any) -> int:
        if item == at:
            interrupt()
        made.append((item, given))
        return -item

    with pytest.raises(KeyboardInterrupt):
        make_all(CollectiveCalls(range(3), call))
    assert made == [(item, f"data {item}" if item <= at else None) for item in range(3)]


def test_an_interrupt_before_an_agreement_does_not_prevent_its_calls() -> None:
    made: list[int] = []

    def agree() -> list[int]:
        interrupt()
        return [1, 2]

    with pytest.raises(KeyboardInterrupt), CollectiveCalls((), lambda item, _: made.append(item)) as calls:
        calls.extend(agree)
    assert made == [1, 2]


@pytest.mark.parametrize(("error", "remaining"), [(ValueError("own"), [1, 2]), (PeerFailedError("a peer"), [1])])
def test_an_error_of_this_process_does_not_prevent_the_calls(error: Exception, remaining: list[int]) -> None:
    made: list[int] = []
    with pytest.raises(type(error)):
        make_one_and_fail(CollectiveCalls([1, 2], lambda item, _: made.append(item)), error)
    assert made == remaining


def test_the_error_of_a_call_is_raised() -> None:
    def fail(item: int, given: object) -> None:
        raise ValueError(f"call {item}")

    with pytest.raises(ValueError, match="call 1"), CollectiveCalls([1, 2], fail) as calls:
        calls.run_next()


def test_calls_are_made_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: object, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_thread", refuse)
    made: list[int] = []
    with pytest.raises(ValueError, match="own"):
        make_one_and_fail(CollectiveCalls([1, 2], lambda item, _: made.append(item)), ValueError("own"))
    assert made == [1, 2]
