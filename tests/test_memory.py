"""Host memory of a restore in addition to the returned arrays, and its limit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.stacks import LARGE_CHUNK_BYTES
from jaxckpt._restore import placement as _placing
from jaxckpt._restore import read_plan as _plan
from jaxckpt._restore import wants as _wants
from jaxckpt._sources import source as _source

HOST_BYTES = 32 << 20
SLACK = 24 << 20
"""Memory that the interpreter, the threads and the allocator may take during a restore."""

PROGRAMS = 48 << 20
"""Memory that JAX takes to compile the programs that join parts, one for each device and shape."""

SHAPES = {"a": (1536, 4096), "b": (1536, 4096), "large": (12288, 4096)}
SMALLER = {name: (rows // 4, columns) for name, (rows, columns) in SHAPES.items()}


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("x", "y")[: len(sizes)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """240 MiB: two leaves of 24 MiB and one of 192 MiB."""
    path = tmp_path_factory.mktemp("memory") / "ckpt"
    save(path, SHAPES)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """60 MiB: two leaves of 6 MiB and one of 48 MiB."""
    path = tmp_path_factory.mktemp("memory") / "ckpt"
    save(path, SMALLER)
    yield path
    shutil.rmtree(path)


def save(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    sharding = NamedSharding(mesh_of(2, 4), P("x", "y"))
    tree = {
        name: jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)
        for name, shape in shapes.items()
    }
    jaxckpt.save(path, tree, options=jaxckpt.Options(sync=False))


# Measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["as saved", "3x2", "rows", "one device", "cast", "numpy"])
def test_a_restore_stays_within_its_limit_in_addition_to_the_arrays(
    case: str, saved: Path, run_python: processes.RunPython
) -> None:
    assert taken(run_python, saved, case, accelerators=False) <= HOST_BYTES + SLACK


@pytest.mark.parametrize("case", ["as saved", "3x2", "one device", "cast"])
def test_on_accelerators_it_stays_within_its_limit(case: str, saved: Path, run_python: processes.RunPython) -> None:
    assert taken(run_python, saved, case, accelerators=True) <= HOST_BYTES + SLACK + PROGRAMS


def taken(run_python: processes.RunPython, saved: Path, case: str, *, accelerators: bool) -> int:
    args = json.dumps([str(saved), case, HOST_BYTES, accelerators, SHAPES])
    n_bytes = int(run_python(processes.PROGRAMS / "memory_of_a_restore.py", args=[args]))
    print(f"{case}: {n_bytes / 2**20:.1f} MiB")
    return n_bytes


def test_saves_from_accelerators_return_the_memory_of_their_copies(
    tmp_path: Path, run_python: processes.RunPython
) -> None:
    """Copies of 64 MiB, in parts that malloc would keep."""
    program = processes.PROGRAMS / "memory_of_saves.py"
    assert int(run_python(program, devices=2, args=[str(tmp_path / "c")])) <= 32 << 20  # 100 MiB otherwise


def test_two_processes_restore_pinned_memory_without_more_memory(
    tmp_path: Path, run_processes: processes.RunProcesses
) -> None:
    program, path = processes.PROGRAMS / "mixed_memory.py", str(tmp_path / "c")
    run_processes(program, processes=2, devices_per_process=2, args=[path, False])
    for done in run_processes(program, processes=2, devices_per_process=2, args=[path, True]):
        assert float(done.stdout) <= 1.3


# Counted --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (8,), (1,)], ids=str)
def test_with_little_memory_no_chunk_is_read_twice(
    sizes: tuple[int, ...], passing: bool, smaller: Path, bytes_read: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if passing:
        monkeypatch.setattr(_wants, "can_keep_buffers", lambda abstract: not abstract.on_devices)
    options = jaxckpt.Options(host_bytes=8 << 20)
    mesh = mesh_of(*sizes)
    before = bytes_read()
    tree = jaxckpt.restore(smaller, mesh=mesh, specs=P(*mesh.axis_names), options=options)
    n_bytes = sum(leaf.nbytes for leaf in tree.values())
    assert n_bytes <= bytes_read() - before <= 1.002 * n_bytes
    for name, shape in SMALLER.items():
        assert np.array_equal(tree[name], np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_the_plan_predicts_the_memory_of_a_restore(saved: Path) -> None:
    checkpoint = jaxckpt.open(saved, options=jaxckpt.Options(host_bytes=HOST_BYTES))
    assert checkpoint.plan().peak_host_bytes == HOST_BYTES
    assert checkpoint.plan(mesh={"x": 3, "y": 2}).peak_host_bytes == HOST_BYTES
    assert checkpoint.plan(options=jaxckpt.Options(host_bytes=1 << 40)).peak_host_bytes == 240 << 20
    assert checkpoint.plan(select="a", options=jaxckpt.Options()).peak_host_bytes == 24 << 20
    # For devices with their own memory, both the bytes read and the buffers count.
    accelerators = jaxckpt.Options(host_bytes=1 << 40)
    assert checkpoint.plan(mesh={"x": 2, "y": 4}, options=accelerators).peak_host_bytes == 480 << 20
    one_chunk = checkpoint.plan(options=jaxckpt.Options(host_bytes=1)).peak_host_bytes
    assert 1 < one_chunk <= LARGE_CHUNK_BYTES


# Code paths of accelerators, on CPU devices ---------------------------------------------------------------


@pytest.mark.parametrize("cast", [None, "bfloat16", "float64"])
def test_boxes_larger_than_a_read_are_assembled_on_the_device(
    cast: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wants, "can_keep_buffers", lambda abstract: not abstract.on_devices)
    updates: list[int] = []
    update = _placing._update
    monkeypatch.setattr(_placing, "_update", lambda *args: updates.append(args[1].nbytes) or update(*args))
    bits = np.random.default_rng(0).integers(0, 1 << 32, (96, 64), np.uint32)  # includes NaNs of every kind
    small = bits.view(np.uint16).view(jnp.bfloat16)
    sharding = NamedSharding(mesh_of(4), P("x"))
    tree = {
        "split": jax.device_put(bits.view(np.float32), sharding),
        "small float": jax.device_put(small, sharding),
        "uncommitted": jnp.asarray(bits),
        "key": jax.random.split(jax.random.key(1), 64),
        "host": bits,
    }
    jaxckpt.save(tmp_path / "c", tree, options=jaxckpt.Options(chunk_bytes=512, object_bytes=4096))
    wanted = NamedSharding(mesh_of(3, 2), P("x", "y"))
    with jax.enable_x64(cast == "float64"):
        target: dict[str, Any] = {
            **tree,
            "split": jax.ShapeDtypeStruct((96, 64), cast or "float32", sharding=wanted),
            "small float": jax.ShapeDtypeStruct((96, 128), jnp.bfloat16, sharding=wanted),
        }
        restored = jaxckpt.restore(tmp_path / "c", target, options=jaxckpt.Options(host_bytes=2048, cast="unsafe"))
        assert len(updates) > 100
        assert max(updates) <= (1024 if cast == "float64" else 512), "a chunk in the wanted dtype"
        got = np.asarray(restored["split"])
        assert restored["split"].sharding == wanted
        with np.errstate(all="ignore"):
            expected = bits.view(np.float32).astype(cast or np.float32)
            np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))
        assert cast or got.tobytes() == expected.tobytes()
    assert np.asarray(restored["small float"]).tobytes() == small.tobytes()
    assert np.array_equal(restored["uncommitted"], bits)
    assert not restored["uncommitted"].committed
    assert np.array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(tree["key"]))
    assert np.array_equal(restored["host"], bits)


def test_large_leaves_are_assembled_under_any_mesh_and_checks_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wants, "can_keep_buffers", lambda abstract: not abstract.on_devices)
    value = np.arange(4096, dtype=np.float32).reshape(64, 64)
    value[3, 5] = np.nan
    tree = {"f": jax.device_put(value, NamedSharding(mesh_of(4), P("x"))), "h": jnp.asarray(value, jnp.bfloat16)}
    jaxckpt.save(tmp_path / "c", tree, options=jaxckpt.Options(chunk_bytes=64, object_bytes=512))
    with jax.set_mesh(mesh_of(2, 4)), jax.debug_nans(True), jax.transfer_guard("disallow"):
        restored = jaxckpt.restore(tmp_path / "c", options=jaxckpt.Options(host_bytes=600))
    assert all(np.asarray(restored[name]).tobytes() == np.asarray(tree[name]).tobytes() for name in tree)


def test_transfer_guards_do_not_affect_a_restore(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh_of(4), P("x"))
    sizes = {"in pieces": (512, 512), "whole": (8, 8)}
    tree: dict[str, Any] = {name: jax.device_put(np.ones(shape), sharding) for name, shape in sizes.items()}
    tree |= {"uncommitted": jnp.ones(3), "number": 0.5, "key": jax.random.key(1)}
    jaxckpt.save(tmp_path / "c", tree)
    target = {**tree, "number": jnp.float32(0.5)}
    for guard in ("disallow", "disallow_explicit"):
        with jax.transfer_guard(guard):
            restored = jaxckpt.restore(tmp_path / "c", target)
        assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), restored, target))


@pytest.mark.parametrize("dtype", ["float64", "complex128", ">f4"])
def test_casts_of_host_arrays(dtype: str, tmp_path: Path) -> None:
    saved = np.arange(12.0).reshape(3, 4)
    jaxckpt.save(tmp_path / "c", {"a": saved})
    target = {"a": np.empty((3, 4), dtype)}
    restored = jaxckpt.restore(tmp_path / "c", target, options=jaxckpt.Options(cast="unsafe"))
    assert restored["a"].dtype == dtype
    np.testing.assert_array_equal(restored["a"], saved.astype(dtype))


# Deleted during a read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before its files are checked", "after"])
@pytest.mark.parametrize("fate", ["deleted", "replaced by another"])
def test_a_checkpoint_deleted_during_a_read_is_not_reported_as_corrupt(
    fate: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"w": np.arange(100)})
    check = _source.NativeCheckpoint.require_metadata

    def change() -> None:
        if fate == "deleted":
            shutil.rmtree(path)
        else:
            jaxckpt.save(path, {"w": np.zeros(100)}, overwrite=True)

    def checked(*args: Any) -> None:
        if moment.startswith("before"):
            change()
        check(*args)
        if moment == "after":
            change()

    monkeypatch.setattr(_source.NativeCheckpoint, "require_metadata", checked)
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match=f"was {fate} while it was being read"):
        jaxckpt.load_numpy(path)


def test_missing_data_of_an_existing_checkpoint_is_corruption(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": np.arange(100)})
    (data,) = (tmp_path / "c").glob("data-*")
    shutil.rmtree(data)
    with pytest.raises(jaxckpt.errors.DataError, match="is missing"):
        jaxckpt.load_numpy(tmp_path / "c")


def test_a_read_is_a_quarter_of_host_bytes() -> None:
    assert [_plan.max_read_bytes(n) for n in (1, 8, 256 << 20)] == [1, 2, 64 << 20]
