"""save_async returns when every array may be donated: it saves their values at that time."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.pieces import aligned_empty
from jaxckpt._save import staging as _staging


def state() -> Any:
    """Leaves of every layout. The 80 small ones make 640 pieces, enough for stacking by a jitted call."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)

    def put(shape: tuple[int, ...], *spec: Any, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(rng.standard_normal(shape).astype(dtype), NamedSharding(mesh, P(*spec)))

    return {
        "split": put((256, 128), "a", "b"),
        "rows": put((64, 64), ("b", "a")),
        "replicated": put((64, 32)),
        "partly": put((32, 16), "a"),
        "bf16": put((64, 64), "b", dtype=jnp.bfloat16),
        "large": put((2048, 1024), "a", "b"),  # 1 MiB per piece
        "small": [put((16, 16), "a", "b") for _ in range(80)],
        "count": jax.device_put(np.int32(0), NamedSharding(mesh, P())),
        "uncommitted": jnp.arange(5),
        "key": jax.random.key(0),
    }


@functools.partial(jax.jit, donate_argnums=0)
def step(tree: Any) -> Any:
    key = jax.random.split(tree["key"])[0]
    return {**jax.tree.map(lambda leaf: leaf + 1, {**tree, "key": jnp.int32(0)}), "key": key}


def values(tree: Any) -> Any:
    """Independent copies of the data, as NumPy arrays."""

    def value(leaf: Any) -> Any:
        key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if key else leaf)

    return jax.tree.map(value, tree)


def require_equal(path: Path, wanted: Any) -> None:
    got = jaxckpt.load_numpy(path)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.slow
def test_rounds_of_a_step_that_donates(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Runs many races between the step and the copies. The next test blocks the writes, and needs no luck."""
    tree = state()
    options = jaxckpt.Options(sync=False)
    for _ in range(200 if request.config.getoption("--campaign") else 20):
        wanted = values(tree)
        pending = jaxckpt.save_async(tmp_path / "c", tree, overwrite=True, options=options)
        tree = step(tree)
        pending.wait()
        require_equal(tmp_path / "c", wanted)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["host memory", "other devices"])
def test_steps_that_donate_before_anything_is_written(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    if elsewhere:  # take the path of accelerators; CPU devices have pinned memory too
        monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)
    tree = state()
    for number in range(3):
        wanted = values(tree)
        gate.clear()
        pending = jaxckpt.save_async(tmp_path / str(number), tree)
        for _ in range(3):
            tree = jax.block_until_ready(step(tree))
        assert not pending.done
        gate.set()
        pending.wait()
        require_equal(tmp_path / str(number), wanted)


def test_deleted_right_after(tmp_path: Path, gate: threading.Event) -> None:
    tree = state()
    wanted = values(tree)
    pending = jaxckpt.save_async(tmp_path / "c", tree)
    jax.tree.map(lambda leaf: leaf.delete(), {**tree, "key": None})
    gate.set()
    pending.wait()
    require_equal(tmp_path / "c", wanted)


def test_numpy_arrays_overwritten_right_after(tmp_path: Path, gate: threading.Event) -> None:
    tree = {"a": np.arange(1000.0), "many": [np.full(10, n) for n in range(50)], "view": np.arange(64).reshape(8, 8).T}
    wanted = jax.tree.map(np.array, tree)
    pending = jaxckpt.save_async(tmp_path / "c", tree)
    for leaf in jax.tree.leaves(tree):
        leaf[...] = -1
    tree["a"] = tree["many"] = None
    gate.set()
    pending.wait()
    require_equal(tmp_path / "c", wanted)


@pytest.mark.parametrize("n_leaves", [3, 600], ids=["views", "stacked"])
@pytest.mark.parametrize("spec", [None, P("x"), P()], ids=str)
def test_small_arrays_that_share_memory_with_numpy_are_copied(
    tmp_path: Path, gate: threading.Event, n_leaves: int, spec: P | None
) -> None:
    memory = [aligned_empty((4096,), np.dtype(np.float32)) for _ in range(n_leaves)]
    for number, array in enumerate(memory):
        array[...] = number
    sharding = None if spec is None else NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), spec)
    tree = jax.block_until_ready(jax.device_put(memory, sharding))
    pending = jaxckpt.save_async(tmp_path / "c", tree)
    for array in reversed(memory):
        array[...] = -1
    assert float(tree[1].addressable_data(0)[0]) == -1, "JAX shares the memory"
    gate.set()
    pending.wait()
    require_equal(tmp_path / "c", [np.full(4096, number) for number in range(n_leaves)])


def test_small_arrays_that_share_memory_with_numpy_are_cast_at_once(tmp_path: Path) -> None:
    memory = [aligned_empty((4096,), np.dtype(np.float32)) for _ in range(300)]
    for _ in range(10):  # races between XLA's threads and the next lines
        for array in memory:
            array[...] = 1
        tree = jax.block_until_ready(jax.device_put(memory))
        options = jaxckpt.Options(sync=False)
        pending = jaxckpt.save_async(tmp_path / "c", tree, dtype=jnp.bfloat16, overwrite=True, options=options)
        for array in reversed(memory):
            array[...] = -1
        pending.wait()
        require_equal(tmp_path / "c", [np.ones(4096)] * len(memory))


def test_copies_stay_within_staging_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)
    held, most = 0, 0
    pieces, landed = _staging._stage_pieces, jaxckpt._save.staging.StagedObjects.mark_written

    def count(*arguments: Any, **named: Any) -> Any:
        nonlocal held, most
        one = pieces(*arguments, **named)
        held += one.copied_bytes
        most = max(most, held)
        return one

    def uncount(self: Any, one: Any) -> None:
        nonlocal held
        held -= one.copied_bytes
        landed(self, one)

    monkeypatch.setattr(_staging, "_stage_pieces", count)
    monkeypatch.setattr(jaxckpt._save.staging.StagedObjects, "mark_written", uncount)
    mesh = jax.make_mesh((8,), ("a",))
    x = jax.device_put(np.arange(1 << 22, dtype=np.float32).reshape(64, -1), NamedSharding(mesh, P("a")))
    options = jaxckpt.Options(staging_bytes=4 << 20, object_bytes=1 << 20, host_bytes=16 << 20)
    jaxckpt.save_async(tmp_path / "c", {"x": x, "y": x + 1}, options=options).wait()
    assert held == 0
    assert (1 << 20) < most <= (5 << 20)  # a copy that waits for room is already made
    require_equal(tmp_path / "c", {"x": np.asarray(x), "y": np.asarray(x) + 1})


@pytest.mark.parametrize("elsewhere", [False, True], ids=["host memory", "other devices"])
def test_arrays_offloaded_to_host_memory(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    if elsewhere:
        monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(4096.0, dtype=np.float32)
    tree = {"x": jax.device_put(x, NamedSharding(mesh, P("a"), memory_kind="pinned_host"))}
    pending = jaxckpt.save_async(tmp_path / "c", tree)
    tree["x"].delete()
    gate.set()
    pending.wait()
    require_equal(tmp_path / "c", {"x": x})
    assert jaxckpt.restore(tmp_path / "c")["x"].sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("elsewhere", [False, True], ids=["host memory", "other devices"])
def test_saved_arrays_are_released_early(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """The save releases its inputs early, so that a step that does not donate frees them before the save ends."""
    if elsewhere:
        monkeypatch.setattr(_staging, "is_in_host_memory", lambda value: False)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.arange(4096.0, dtype=np.float32), NamedSharding(mesh, P("a")))
    left = weakref.ref(x)
    pending = jaxckpt.save_async(tmp_path / "c", {"x": x, "many": [x + n for n in range(3)]})
    wanted = np.array(x)
    del x
    gc.collect()
    assert left() is None
    assert not pending.done
    gate.set()
    pending.wait()
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "c")["x"], wanted)
