"""How many objects are written at the same time, and how staged data is copied."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt._pipeline.workers import THREADS
from jaxckpt._save import staging
from jaxckpt._store.files import FileWriter

TREE = {f"w{number}": np.full(1 << 18, number, np.float32) for number in range(8)}  # 1 MiB each
OPTIONS = jaxckpt.Options(host_bytes=4 << 20, object_bytes=1 << 20, sync=False)


@pytest.fixture
def concurrent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many objects were being written when each write began."""
    seen: list[int] = []
    active, lock, write = 0, threading.Lock(), FileWriter._write

    def counted(self: FileWriter, *arguments: Any) -> Any:
        nonlocal active
        with lock:
            active += 1
            seen.append(active)
        time.sleep(0.03)
        try:
            return write(self, *arguments)
        finally:
            with lock:
                active -= 1

    monkeypatch.setattr(FileWriter, "_write", counted)
    return seen


def test_a_save_that_is_awaited_uses_all_threads(tmp_path: Path, concurrent: list[int]) -> None:
    jaxckpt.save(tmp_path / "c", TREE, options=OPTIONS)
    assert max(concurrent) == min(THREADS, 4)


def test_a_save_that_nobody_awaits_leaves_threads_to_training(tmp_path: Path, concurrent: list[int]) -> None:
    pending = jaxckpt.save_async(tmp_path / "c", TREE, options=OPTIONS)
    while not pending.done:
        time.sleep(0.01)
    assert max(concurrent) == 1


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 1 << 21), (1 << 23,), (7, 3, 1 << 18)])
def test_copies_have_the_same_bits(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape, np.float32)
    for given in (array, array.T, array[::-1] if array.ndim else array):
        copied = staging._copy(given, given.dtype)
        assert not np.shares_memory(copied, given)
        assert copied.tobytes() == np.ascontiguousarray(given).tobytes()
    assert staging._copy(array, np.dtype(np.float64)).dtype == np.float64


@pytest.mark.parametrize("options", [jaxckpt.Options(), jaxckpt.Options(compression="zstd")])
@pytest.mark.parametrize("save", [jaxckpt.save, lambda *given, **more: jaxckpt.save_async(*given, **more).wait()])
def test_a_mask_of_other_bytes_than_0_and_1_is_saved_as_bools(
    save: Any, options: jaxckpt.Options, tmp_path: Path
) -> None:
    bits = np.array([[0, 255, 1], [2, 0, 0]], np.uint8)
    masks = {"numpy": bits.view(bool), "strided": bits.T.view(bool)[::-1], "jax": jnp.asarray(bits.view(bool))}
    save(tmp_path / "c", masks, options=options)
    loaded = jaxckpt.load_numpy(tmp_path / "c")
    for name, mask in masks.items():
        np.testing.assert_array_equal(loaded[name].view(np.uint8), np.asarray(mask).view(np.uint8) != 0)
    assert jaxckpt.verify(tmp_path / "c").ok
