"""A slow read is not reported as hung while parts of it complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
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
from jaxckpt._store.store_path import store_at


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


def test_full_objects_are_read_whole_with_little_memory(tmp_path: Path) -> None:
    """The limits of the objects and of the memory may be equal, and the checksums come on top."""
    url = f"memory://whole/{tmp_path.name}"
    options = jaxckpt.Options(host_bytes=1 << 20, object_bytes=1 << 18, chunk_bytes=1 << 16)
    jaxckpt.save(url, {"w": np.arange(1 << 17)}, options=options)
    store = store_at(url, options)
    keys = sorted(key for key in store.keys_below("data-") if "/c/" in key)
    first, second = (store.read(f"data-{key}") for key in keys[:2])
    store.put(f"data-{keys[0]}", second)
    store.put(f"data-{keys[1]}", first)
    with pytest.raises(jaxckpt.errors.DataError):
        jaxckpt.load_numpy(url, options=options)


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
