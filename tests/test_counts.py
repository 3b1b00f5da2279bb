"""Counts: bytes read relative to bytes needed, files, and calls between a public function and the bytes."""

from __future__ import annotations

import collections
import functools
import gc
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._arguments import pytree as _pytree
from jaxckpt._model import manifest as _manifest
from jaxckpt._model import tree as _tree
from jaxckpt._model.records import Manifest
from jaxckpt._restore import match as _target
from jaxckpt._restore import resolve as _resolve
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at

LARGE = 256 << 20
"""Bytes of a large leaf."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory if possible, because these tests only count bytes."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="jaxckpt-counts-", dir=parent) as folder:
        if shutil.disk_usage(folder).free < 4 * LARGE:
            pytest.skip("needs 1 GiB of room in /dev/shm or the temporary folder")
        yield Path(folder)


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes)])
    return Mesh(devices.reshape(sizes), ("x", "y")[: len(sizes)])


def large(shape: tuple[int, ...], mesh: Mesh, spec: P) -> jax.Array:
    """A float32 leaf of about 256 MiB whose elements are all different."""
    assert 0.95 * LARGE < 4 * math.prod(shape) < 1.05 * LARGE
    count = math.prod(shape)
    make = jax.jit(
        lambda: jax.lax.bitcast_convert_type(jnp.arange(count, dtype=jnp.int32), jnp.float32).reshape(shape),
        out_shardings=NamedSharding(mesh, spec),
    )
    return make()


def assert_same_bits(got: Any, expected: Any) -> None:
    assert np.array_equal(np.asarray(got).view(np.uint32), np.asarray(expected).view(np.uint32))


class Counted(Protocol):
    def __call__(self, read: Callable[[], Any]) -> tuple[Any, int]:
        """The result of a read, and the number of bytes read from objects."""
        ...


@pytest.fixture
def counted(bytes_read: Callable[[], int]) -> Counted:
    def count(read: Callable[[], Any]) -> tuple[Any, int]:
        before = bytes_read()
        result = read()
        return result, bytes_read() - before

    return count


# Bytes read -----------------------------------------------------------------------------------------------

Case = tuple[tuple[int, int], tuple[int, ...], P, tuple[int, ...], P, float, float]
CASES: dict[str, Case] = {
    # shape, mesh and spec of the save, mesh and spec of the restore, and the highest ratio of bytes read to bytes
    # needed: for one process with all devices, and for processes with one device each, taken together
    "the same layout": ((8192, 8192), (2, 4), P("x", "y"), (2, 4), P("x", "y"), 1.0002, 1.0002),
    "rows to columns": ((8192, 8192), (8,), P("x"), (8,), P(None, "x"), 1.0005, 1.0005),
    "columns to rows": ((8192, 8192), (8,), P(None, "x"), (8,), P("x"), 1.0005, 1.0005),
    "2x4 to 3x2": ((8184, 8208), (2, 4), P("x", "y"), (3, 2), P("x", "y"), 1.0005, 1.10),
    "2x4 to 2x3": ((8208, 8184), (2, 4), P("x", "y"), (2, 3), P("x", "y"), 1.0005, 1.10),
    # Pieces of 1168 rows, chunks of 511: each chunk at a border is read twice. Chunks of 256 KiB would give 1.0002.
    "8 to 7": ((8176, 8192), (8,), P("x"), (7,), P("x"), 1.0005, 1.40),
    "8 to replicated": ((8192, 8192), (8,), P("x"), (8,), P(), 1.0002, 1.0002),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_restore_reads_what_it_needs(
    name: str, memory: Path, counted: Counted, record_property: Callable[[str, object], None]
) -> None:
    shape, saved_on, saved_as, wanted_on, wanted_as, limit, apart_limit = CASES[name]
    leaf = large(shape, mesh_of(*saved_on), saved_as)
    info = jaxckpt.save(memory / "ckpt", {"w": leaf}, options=jaxckpt.Options(sync=False))
    assert info.total_bytes == leaf.nbytes <= info.stored_bytes <= 1.0001 * leaf.nbytes

    mesh = mesh_of(*wanted_on)
    tree, read = counted(lambda: jaxckpt.restore(memory / "ckpt", mesh=mesh, specs=wanted_as))
    assert tree["w"].sharding == NamedSharding(mesh, wanted_as)
    assert_same_bits(tree["w"], leaf)
    checkpoint = jaxckpt.open(memory / "ckpt")
    plan = checkpoint.plan(mesh=mesh, specs=wanted_as)
    axes = dict(zip(("x", "y"), wanted_on, strict=False))
    apart = checkpoint.plan(mesh=axes, specs=wanted_as, devices_per_process=1)
    record_property("read_over_needed", read / leaf.nbytes)
    record_property("read_over_needed_apart", apart.over_read)
    print(f"{name}: {read / leaf.nbytes:.6f} × in one process, {apart.over_read:.6f} × in {len(apart.processes)}")
    assert plan.needed_bytes == leaf.nbytes
    assert leaf.nbytes <= read <= limit * leaf.nbytes
    assert read <= plan.read_bytes, "the plan does not predict less than is read"
    assert len(apart.processes) == math.prod(wanted_on)
    assert 1 <= apart.over_read <= apart_limit


def test_restoring_one_leaf_of_many_reads_only_that_leaf(memory: Path, counted: Counted) -> None:
    random = np.random.default_rng(0)
    values = {f"layer{i}": random.standard_normal((512, 512), np.float32) for i in range(24)}
    tree = {name: jax.device_put(value, NamedSharding(mesh_of(8), P("x"))) for name, value in values.items()}
    jaxckpt.save(memory / "ckpt", tree)
    one, read = counted(lambda: jaxckpt.load_numpy(memory / "ckpt", select="layer7"))
    assert list(one) == ["layer7"]
    assert_same_bits(one["layer7"], values["layer7"])
    assert values["layer7"].nbytes <= read <= 1.01 * values["layer7"].nbytes


def test_a_plan_for_every_other_leaf_of_an_object_is_exact(memory: Path, counted: Counted) -> None:
    """The leaves are in a few objects with long indexes. Each index is read once, not once per leaf."""
    tree = {f"layer{number}": np.full(1024, number, np.float32) for number in range(1000)}
    jaxckpt.save(memory / "ckpt", tree)
    wanted: dict[str, Any] = {"mesh": mesh_of(8), "select": lambda path: int(path[5:]) % 2 == 1}
    restored, read = counted(lambda: jaxckpt.restore(memory / "ckpt", **wanted))
    assert len(restored) == 500
    plan = jaxckpt.open(memory / "ckpt").plan(**wanted)
    assert plan.read_bytes == read <= 1.01 * plan.needed_bytes


def test_indexing_a_large_leaf_reads_only_that_part(memory: Path, counted: Counted) -> None:
    leaf = large((8192, 8192), mesh_of(2, 4), P("x", "y"))
    jaxckpt.save(memory / "ckpt", {"w": leaf}, options=jaxckpt.Options(sync=False))
    lazy = jaxckpt.open(memory / "ckpt")["w"]
    whole = np.asarray(leaf)
    for index in (np.s_[1024:3072], np.s_[:, 4096:6144], np.s_[1000:5000, 300:8000]):
        part, read = counted(lambda index=index: lazy[index])
        assert_same_bits(part, whole[index])
        print(f"{index}: {read / part.nbytes:.4f} ×")
        assert part.nbytes <= read <= 1.25 * part.nbytes
    corner, read = counted(lambda: lazy[8191, 8191])
    assert corner.view(np.uint32) == whole[8191, 8191].view(np.uint32)
    assert read < 2 << 20, "one element costs one chunk, 1/32 of a piece of 32 MiB, and an index"


def test_replicas_in_one_process_are_read_once(memory: Path, counted: Counted) -> None:
    value = np.random.default_rng(1).standard_normal((2048, 1024), np.float32)
    jaxckpt.save(memory / "ckpt", {"w": jax.device_put(value, NamedSharding(mesh_of(8), P("x")))})
    for spec in (P(), P("x"), P(None, "y"), P(("x", "y"))):
        tree, read = counted(lambda spec=spec: jaxckpt.restore(memory / "ckpt", mesh=mesh_of(4, 2), specs=spec))
        assert_same_bits(tree["w"], value)
        assert value.nbytes <= read <= 1.001 * value.nbytes


# Files and calls ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16384, 4096), (256, 512, 512)])
def test_pieces_are_written_and_read_in_calls_of_megabytes(
    memory: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Each system call releases the GIL, and acquiring it again may take milliseconds."""
    calls = collections.Counter[str]()

    def counted(name: str, call: Callable[..., int], *args: Any) -> int:
        calls[name] += 1
        return call(*args)

    for name in ("writev", "preadv"):
        monkeypatch.setattr(os, name, functools.partial(counted, name, getattr(os, name)))
    sharding = NamedSharding(mesh_of(2, 4), P("x", "y"))
    values = np.random.default_rng(0).random(shape, np.float32)
    tree = jax.device_put(list(values), sharding)
    info = jaxckpt.save(memory / "ckpt", tree, options=jaxckpt.Options(sync=False))
    for restored, leaf in zip(jaxckpt.restore(memory / "ckpt"), tree, strict=True):
        assert_same_bits(restored, leaf)
    most = values.nbytes // (4 << 20) + 2 * info.objects
    print(f"{calls}, at most {most} each")
    assert calls["writev"] <= most
    assert calls["preadv"] <= most


@pytest.mark.slow
def test_two_thousand_small_leaves_make_few_files(memory: Path, counted: Counted) -> None:
    mesh = mesh_of(8)
    specs = (P("x"), P(None, "x"), P())
    shardings = [NamedSharding(mesh, specs[i % len(specs)]) for i in range(2000)]
    hosts = [np.full((128, 128), i, np.float32) for i in range(2000)]
    leaves = jax.device_put(hosts, shardings)
    info = jaxckpt.save(memory / "ckpt", {"leaves": leaves})
    files = [file for file in (memory / "ckpt").rglob("*") if file.is_file()]
    print(f"{len(files)} files, {info.objects} objects for 2,000 leaves")
    assert len(files) == info.files <= 20
    (restored, read) = counted(lambda: jaxckpt.restore(memory / "ckpt", mesh=mesh))
    assert info.total_bytes <= read <= 1.01 * info.total_bytes
    for got, expected in zip(restored["leaves"], leaves, strict=True):
        assert got.sharding == expected.sharding
        assert_same_bits(got, expected)


# Cost per leaf --------------------------------------------------------------------------------------------


def python_calls(act: Callable[[], Any]) -> int:
    """The number of calls of Python functions, comprehensions and generators, without C functions."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def forms(manifest: Manifest, **request: Any) -> Callable[[], Any]:
    return lambda: _resolve.resolve(manifest, _target.RestoreRequest(**request), jaxckpt.Options())


LEAF_COSTS: dict[str, tuple[Callable[[Path, Manifest, Any], Callable[[], Any]], int]] = {
    # the operation, and its highest number of Python calls per leaf
    "opening": (lambda path, manifest, tree: lambda: jaxckpt.open(path), 0),
    "encoding the manifest": (lambda path, manifest, tree: lambda: _manifest.encode(manifest), 0),
    "flattening": (lambda path, manifest, tree: lambda: _pytree.flatten(tree), 0),
    "leaves on the host": (
        lambda path, manifest, tree: lambda: _resolve.host_leaves(manifest, None, jaxckpt.Options()),
        0,
    ),
    "building the tree": (lambda path, manifest, tree: lambda: _tree.unflatten(manifest.tree, range(10_000)), 0),
    "leaves as saved": (lambda path, manifest, tree: forms(manifest), 1),
    "leaves on a mesh": (lambda path, manifest, tree: forms(manifest, mesh=mesh_of(2, 4)), 1),
    "leaves of a target": (
        lambda path, manifest, tree: forms(manifest, target=tree),
        2,
    ),  # one of them is in JAX
}


@pytest.mark.parametrize("what", LEAF_COSTS)
def test_python_calls_per_leaf_are_bounded(tmp_path: Path, what: str) -> None:
    """Opening 20,000 leaves takes 20 ms of CPU time, because shared properties are processed only once."""
    prepare, most = LEAF_COSTS[what]
    counts: list[int] = []
    sharding = NamedSharding(mesh_of(2, 4), P("x", "y"))
    for count in (500, 1500):
        leaves = jax.device_put([np.ones((2, 4), np.float32)] * count, sharding)
        tree = {"a": dict(zip(map(str, range(count)), leaves, strict=True)), "b": list(leaves[:10])}
        path = tmp_path / str(count)
        jaxckpt.save(path, tree, options=jaxckpt.Options())
        manifest, _ = load_manifest(store_at(path, jaxckpt.Options()))
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
        act = prepare(path, manifest, target)
        act()  # fill permanent caches, which are not a cost per leaf
        counts.append(python_calls(act))
    assert counts[1] - counts[0] <= 1000 * most + 50, counts


HAND_OVERS: dict[str, tuple[Callable[[Path, Any], object], int]] = {
    "open": (lambda path, tree: jaxckpt.open(path), 1),
    "load_numpy": (lambda path, tree: jaxckpt.load_numpy(path), 1),
    "restore": (lambda path, tree: jaxckpt.restore(path), 2),  # opens, matches in this thread, and reads
    "save": (lambda path, tree: jaxckpt.save(path, tree, overwrite=True), 2),  # plans, and writes
}


@pytest.mark.parametrize("what", HAND_OVERS)
def test_a_call_hands_its_work_to_another_thread_no_more_often_than_it_must(tmp_path: Path, what: str) -> None:
    """Each hand-over and back takes 0.1 ms, which is a third of what it takes to open a checkpoint."""
    act, most = HAND_OVERS[what]
    tree = {"w": jnp.ones((8, 8)), "step": 3}
    jaxckpt.save(tmp_path / "ckpt", tree)
    act(tmp_path / "ckpt", tree)
    puts = 0

    def note(_: FrameType, event: str, called: Any) -> None:
        nonlocal puts
        puts += event == "c_call" and getattr(called, "__qualname__", "") == "SimpleQueue.put"

    before = sys.getprofile()
    sys.setprofile(note)  # of this thread alone
    try:
        act(tmp_path / "ckpt", tree)
    finally:
        sys.setprofile(before)
    assert 1 <= puts <= most


@pytest.mark.one_device
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_does_not_run_while_arrays_are_created(tmp_path: Path, enabled: bool) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    tree = {str(n): jax.device_put(np.zeros((8, 4), np.float32), NamedSharding(mesh, P("x"))) for n in range(1500)}
    jaxckpt.save(tmp_path / "ckpt", tree)
    (gc.enable if enabled else gc.disable)()
    try:
        alone = collections_while(
            lambda: jax.device_put(jax.device_get(tree), jax.tree.map(lambda a: a.sharding, tree))
        )
        restored = collections_while(lambda: jaxckpt.restore(tmp_path / "ckpt"))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert restored <= (alone // 2 if enabled else 0)


def collections_while(call: Callable[[], object]) -> int:
    before = sum(one["collections"] for one in gc.get_stats())
    call()
    return sum(one["collections"] for one in gc.get_stats()) - before
