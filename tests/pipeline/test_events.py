"""Log lines and events of jax.monitoring."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxckpt


@pytest.fixture
def events() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    received: list[tuple[str, dict[str, Any]]] = []

    def listen(event: str, seconds: float, **counts: Any) -> None:
        if event.startswith("/jaxckpt/"):
            assert seconds > 0
            received.append((event, counts))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield received
    jax.monitoring.unregister_event_duration_listener(listen)


def test_saves_and_restores_are_logged_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, events: list[tuple[str, dict[str, Any]]]
) -> None:
    caplog.set_level(logging.INFO, logger="jaxckpt")
    jaxckpt.save(tmp_path / "a", {"w": jnp.ones(4), "step": 3})
    jaxckpt.restore(tmp_path / "a", select="w")
    saved, restored = caplog.messages
    assert saved.startswith(f"saved {tmp_path}/a: 2 leaves, 16 B, in ")
    assert restored == f"restored 1 of 1 leaf of the tree from {tmp_path}/a, which has 2"
    assert events == [("/jaxckpt/save", {"bytes": 16, "leaves": 2}), ("/jaxckpt/restore", {"leaves": 1})]


def test_linked_and_swept_data_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxckpt")
    frozen = jnp.ones(4)
    with jaxckpt.Checkpointer(tmp_path / "run", background=False) as checkpoints:
        checkpoints.save(1, {"w": frozen})
        checkpoints.save(2, {"w": frozen})
    first, unchanged, second = caplog.messages
    assert second.endswith(" linked")
    assert not first.endswith(" linked")
    assert "step 2" in unchanged
    assert "the same data as step 1" in unchanged
    (tmp_path / "run/00000002" / f"data-{'0' * 32}").mkdir()
    caplog.clear()
    jaxckpt.Checkpointer(tmp_path / "run").close()
    (message,) = caplog.messages
    data = f"{tmp_path}/run/00000002/data-{'0' * 32}"
    assert message == f"deleted {data}, left by a save that failed or was replaced, or by a deletion"


def test_a_failing_listener_does_not_fail_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: str, seconds: float, **counts: Any) -> None:
        if event == "/jaxckpt/save":
            raise ValueError("full")

    jax.monitoring.register_event_duration_secs_listener(fail)
    try:
        jaxckpt.save(tmp_path / "a", {"w": jnp.ones(4)})
    finally:
        jax.monitoring.unregister_event_duration_listener(fail)
    assert "a jax.monitoring listener failed after save: ValueError('full')" in caplog.text
