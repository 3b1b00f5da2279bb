"""Calls with collectives: all are made, whatever happens in this process."""

from __future__ import annotations

from typing import Any

import pytest

from jaxckpt._devices.interconnect import CollectiveCalls
from jaxckpt.errors import PeerFailedError


def make_all(calls: CollectiveCalls[int, Any]) -> None:
    with calls:
        for item in calls:
            assert calls.run_next(f"data {item}") == -item


def make_one_and_fail(calls: CollectiveCalls[int, Any], error: Exception) -> None:
    with calls:
        calls.run_next()
        raise error


def test_each_call_is_made_with_its_data() -> None:
    made: list[tuple[int, Any]] = []

    def call(item: int, given: Any) -> int:
        made.append((item, given))
        return -item

    make_all(CollectiveCalls(range(3), call))
    assert made == [(item, f"data {item}") for item in range(3)]


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
