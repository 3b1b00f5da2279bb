"""A slow read is not reported as hung while parts of it complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._model import object_index
from jaxckpt._pipeline import lanes
from jaxckpt._pipeline import watchdog as stalls
from jaxckpt._pipeline.lanes import run_watched
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._pipeline.workers import submit


@pytest.fixture
def be_slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that seems to take 200 seconds, and returns after the waiting thread has looked at the clock."""
    ahead, looked = [0.0], threading.Semaphore(0)
    monkeypatch.setattr(stalls, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    monkeypatch.setattr(lanes, "POLL_SECONDS", 0.01)
    stall_error = Watchdog.stall_error

    def look(watchdog: Watchdog) -> Any:
        found = stall_error(watchdog)
        looked.release()
        return found

    monkeypatch.setattr(Watchdog, "stall_error", look)

    def wait() -> None:
        ahead[0] += 200
        while looked.acquire(blocking=False):
            pass
        for _ in range(2):  # the first look may have begun before
            assert looked.acquire(timeout=60)

    return wait


def test_threads_that_move_bytes(be_slow: Callable[[], None]) -> None:
    def read() -> str:
        for _ in range(4):
            submit(be_slow).result()
        return "all"

    assert run_watched("reading", 300, read) == "all"


def test_objects_of_an_object_store(be_slow: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w": np.arange(4096)}
    jaxckpt.save("memory://slow/ckpt", tree, options=jaxckpt.Options(chunk_bytes=1024, object_bytes=8192))
    object_problems, checked = object_index.object_problems, list[int]()

    def slowly(*args: Any) -> Any:
        checked.append(1)
        be_slow()
        return object_problems(*args)

    monkeypatch.setattr(object_index, "object_problems", slowly)
    np.testing.assert_array_equal(jaxckpt.load_numpy("memory://slow/ckpt")["w"], tree["w"])
    assert len(checked) == 4
