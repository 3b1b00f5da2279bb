"""Inspection: lazy leaves are indexed exactly like NumPy arrays, and plans predict the actual reads."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, PROGRAMS, RunProcesses, RunPython

import jaxckpt
from jaxckpt._store.folder import Folder

SMALL = jaxckpt.Options(chunk_bytes=256, object_bytes=2048, sync=False)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    weights = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    return {
        "params": {
            "w": jax.device_put(weights, NamedSharding(mesh, P("data", "model"))),
            "h": jnp.asarray([1.5, -0.0], jnp.bfloat16),
        },
        "seq": [np.arange(3), (np.float16(2.5), None)],
        "key": jax.random.key(7),
        "long": "é" * 5000,
        "raw": b"\0" * 5000,
        "step": 7,
        "name": "run",
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path, tree: Any) -> Path:
    jaxckpt.save(tmp_path / "ckpt", tree, metadata={"run": 3}, options=SMALL)
    return tmp_path / "ckpt"


# Opening --------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_mapping_of_paths_to_leaves(path: Path) -> None:
    checkpoint = jaxckpt.open(path)
    paths = ["key", "long", "name", "params/h", "params/w", "raw", "seq/0", "seq/1/0", "step"]
    assert list(checkpoint) == list(checkpoint.leaves) == paths
    assert len(checkpoint) == 9
    assert "params/w" in checkpoint
    assert "params" not in checkpoint
    assert checkpoint.metadata == {"run": 3}
    assert checkpoint.path == str(path)
    assert checkpoint.libraries["jax"] == jax.__version__
    assert checkpoint.nbytes == 64 * 48 * 4 + 2 * 2 + 3 * 8 + 2 + 8 + 10000 + 5000
    assert (path / f"data-{checkpoint.save_id}").is_dir()
    assert "9 leaves" in repr(checkpoint)
    assert list(checkpoint.keys()) == paths == checkpoint._ipython_key_completions_()
    assert [(path, leaf.kind) for path, leaf in checkpoint.items()] == [(p, checkpoint[p].kind) for p in paths]
    assert [leaf.path for leaf in checkpoint.values()] == paths
    assert checkpoint.get("step").value == 7
    assert checkpoint.get("params") is None
    assert checkpoint.get("stap", 0) == 0
    assert isinstance(checkpoint, Mapping)
    assert {checkpoint: 1}[checkpoint] == 1
    assert checkpoint != jaxckpt.open(path)


def test_a_leaf_of_one_number_is_that_number(path: Path, tmp_path: Path) -> None:
    checkpoint = jaxckpt.open(path)
    assert (int(checkpoint["step"]), float(checkpoint["step"])) == (7, 7.0)
    assert float(checkpoint["seq/1/0"]) == 2.5
    jaxckpt.save(tmp_path / "one", {"a": jnp.asarray(1.5, jnp.bfloat16), "i": jnp.int32(3), "b": True, "c": 2j})
    checkpoint = jaxckpt.open(tmp_path / "one")
    assert float(checkpoint["a"]) == 1.5
    assert int(checkpoint["i"]) == 3
    assert int(checkpoint["b"]) == 1
    with pytest.raises(TypeError, match="complex"):
        float(checkpoint["c"])
    for leaf in ("params/w", "name", "raw", "key"):
        with pytest.raises(TypeError, match=f"one number, but .{leaf}. is"):
            float(jaxckpt.open(path)[leaf])


def test_leaves_describe_the_saved_values(path: Path) -> None:
    checkpoint = jaxckpt.open(path)
    kinds = {name: leaf.kind for name, leaf in checkpoint.leaves.items()}
    assert kinds == {
        "key": "key",
        "long": "str",
        "name": "str",
        "params/h": "jax",
        "params/w": "jax",
        "raw": "bytes",
        "seq/0": "numpy",
        "seq/1/0": "numpy_scalar",
        "step": "int",
    }
    weights = checkpoint["params/w"]
    assert (weights.shape, weights.dtype, weights.nbytes) == ((64, 48), np.float32, 64 * 48 * 4)
    assert weights.spec == P("data", "model")
    assert weights.layout == "P('data', 'model') on data=2×model=4"
    assert len(weights) == 64
    assert checkpoint["params/h"].dtype == jnp.bfloat16
    assert checkpoint["params/h"].layout == "default device"
    assert checkpoint["seq/0"].layout == "host"
    assert (checkpoint["step"].shape, checkpoint["step"].nbytes) == ((), 0)
    assert repr(weights) == "<leaf 'params/w': float32[64, 48], P('data', 'model') on data=2×model=4>"
    with pytest.raises(TypeError, match="0-d"):
        len(checkpoint["step"])


def test_a_leafs_value_is_the_saved_value(path: Path, tree: Any) -> None:
    checkpoint = jaxckpt.open(path)
    lazy = checkpoint.tree()
    assert strategies.shape_of(lazy) == strategies.shape_of(tree)
    values = jax.tree.map(lambda leaf: leaf.value, lazy)
    assert strategies.raw(values["params"]["w"]) == strategies.raw(tree["params"]["w"])
    assert strategies.raw(values["params"]["h"]) == strategies.raw(tree["params"]["h"])
    assert strategies.raw(values["seq"][1][0]) == strategies.raw(tree["seq"][1][0])
    assert (values["long"], values["raw"], values["step"], values["name"]) == ("é" * 5000, b"\0" * 5000, 7, "run")
    np.testing.assert_array_equal(values["key"], jax.random.key_data(tree["key"]))
    assert np.asarray(checkpoint["params/w"], dtype=np.float64).dtype == np.float64
    assert float(np.mean(checkpoint["params/w"])) == float(np.mean(np.asarray(tree["params"]["w"])))


def test_the_value_of_a_numpy_scalar_is_a_numpy_scalar(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"scalar": np.float32(1.5), "array": np.array(1.5, np.float32)})
    checkpoint = jaxckpt.open(tmp_path / "c")
    assert (type(checkpoint["scalar"].value), checkpoint["scalar"].value) == (np.float32, 1.5)
    assert isinstance(checkpoint["array"].value, np.ndarray)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("params/W", "did you mean 'params/w'"),
        ("params", "leaves below it: params/h, params/w"),
        ("zzz", "no leaf 'zzz' in "),
        ("", "no leaf ''"),
        (3, "no leaf 3"),
    ],
)
def test_a_wrong_path_is_a_key_error_with_a_hint(wrong: Any, hint: str, path: Path) -> None:
    with pytest.raises(KeyError, match=re.escape(hint)):
        jaxckpt.open(path)[wrong]


# Indexing -------------------------------------------------------------------------------------------------


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A valid NumPy index of any kind, with Ellipsis and None anywhere."""
    parts: list[Any] = []
    dim = 0
    stop = draw(st.integers(0, len(shape)))
    ellipsis_at = draw(st.one_of(st.none(), st.integers(0, stop)))
    arrays = draw(st.booleans())
    length = draw(st.integers(0, 4))
    while dim < stop or dim == ellipsis_at:
        n = shape[dim] if dim < len(shape) else 0
        choices = ["slice", "slice", "int"] if n else ["slice"]
        if arrays and n:
            choices += ["array", "list", "mask"]
        if draw(st.integers(0, 6)) == 0:
            parts.append(None)
        if dim == ellipsis_at:
            parts.append(...)
            dim = len(shape) - (stop - dim)
            ellipsis_at, stop = None, len(shape)
            continue
        match draw(st.sampled_from(choices)):
            case "slice":
                parts.append(draw(st.slices(n)))
            case "int":
                number = draw(st.integers(-n, n - 1))
                parts.append(draw(st.sampled_from([number, np.int64(number)])))
            case "array":
                numbers = draw(st.lists(st.integers(-n, n - 1), min_size=length, max_size=length))
                parts.append(
                    np.array(numbers, dtype=np.int32).reshape(-1, 1) if draw(st.booleans()) else np.array(numbers, int)
                )
            case "list":
                parts.append(draw(st.lists(st.integers(-n, n - 1), min_size=length, max_size=length)))
            case _:
                chosen = draw(st.permutations(range(n)))[: min(n, length)]
                parts.append(np.isin(np.arange(n), chosen))
        dim += 1
    return tuple(parts) if len(parts) != 1 or draw(st.booleans()) else parts[0]


ARRAYS = {
    "a": np.arange(5 * 4 * 7, dtype=np.int32).reshape(5, 4, 7),
    "b": np.arange(97, dtype=np.float32),
    "c": np.array(3.5),
    "d": np.zeros((3, 0, 2), np.int8),
    "e": np.arange(20 * 30, dtype=np.uint16).reshape(20, 30),
}


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> jaxckpt.Checkpoint:
    path = tmp_path_factory.mktemp("audit") / "ckpt"
    jaxckpt.save(path, ARRAYS, options=jaxckpt.Options(chunk_bytes=32, object_bytes=256, sync=False))
    return jaxckpt.open(path)


def outcome(array: Any, index: Any) -> Any:
    """The exact bits that indexing returns, or that it raises IndexError."""
    try:
        found = np.asarray(array[index])
    except IndexError:
        return IndexError
    return found.dtype, found.shape, found.tobytes()


@given(st.data())
def test_indexing_matches_numpy(arrays: jaxckpt.Checkpoint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(ARRAYS)))
    index = data.draw(indices(ARRAYS[name].shape))
    assert outcome(arrays[name], index) == outcome(ARRAYS[name], index)


@pytest.mark.parametrize(
    "index",
    [
        np.s_[...], np.s_[()], np.s_[None], np.s_[::-1], np.s_[4:0:-3, ..., None, 2], np.s_[-1, -1, -1], np.s_[1:1],
        np.s_[[0, -1]], np.s_[[]], np.s_[[True, False, True, False, True]], np.s_[:, [3, 0], [[1], [2]]],
        np.s_[0, :, [1, 2]], np.s_[[0, 1], :, [1, 2]], np.s_[np.eye(5, 4) > 0], np.s_[np.zeros((5, 4, 7), bool)],
        np.s_[..., np.arange(7) % 2 == 0], np.s_[np.array(2)], np.s_[np.uint8([4, 0]), 1], np.s_[10**6:],
        # out of bounds, or not an index
        np.s_[5], np.s_[-6], np.s_[[5]], np.s_[[-6]], np.s_[0, 0, 0, 0], np.s_[..., 0, 0, 0, 0], np.s_[[True]],
        np.s_[np.zeros((4, 5), bool)], np.s_[[0, 1], [0, 1, 2]], np.s_[..., ..., 0], np.s_[0, ..., 0, ..., 0, 0],
        # an Ellipsis for zero dimensions still separates index arrays
        np.s_[:, [0, 1], ..., [0, 1]], np.s_[[0, 1], ..., [0, 1], 2], np.s_[:, 0, ..., [1]], np.s_[1, 2, 3, ...],
    ],
    ids=repr,
)  # fmt: skip
def test_selected_indices_match_numpy(arrays: jaxckpt.Checkpoint, index: Any) -> None:
    assert outcome(arrays["a"], index) == outcome(ARRAYS["a"], index)


@pytest.mark.parametrize(
    "index",
    [
        1.5, "x", np.s_[[1.5]], np.s_[np.array([1.0])], np.s_[0, (1, 2)], np.s_[range(2)], True, np.s_[np.True_],
        np.s_[0, False], np.s_[((),)],
    ],
    ids=repr,
)  # fmt: skip
def test_unusual_indices_match_numpy(arrays: jaxckpt.Checkpoint, index: Any) -> None:
    assert outcome(arrays["a"], index) == outcome(ARRAYS["a"], index)


def test_a_slice_step_of_zero_is_refused_like_in_numpy(arrays: jaxckpt.Checkpoint) -> None:
    with pytest.raises(ValueError, match="step"):
        arrays["a"][::0]


def test_values_in_the_manifest_are_indexed_as_0d_arrays(path: Path) -> None:
    step = jaxckpt.open(path)["step"]
    assert step[()] == 7
    assert step[None].tolist() == [7]
    with pytest.raises(IndexError):
        step[0]


@pytest.mark.parametrize(
    ("index", "chunks"),
    [
        (np.s_[0], 1),  # a chunk is two rows
        (np.s_[:, 0], 32),
        (np.s_[-1, -1], 1),
        (np.s_[8:16, 8:16], 4),
        (np.s_[7:9, 7:9], 2),
        (np.s_[5:60:60], 1),
        (np.s_[[0, 7], [0, 7]], 4),
        (np.s_[..., None, 0], 32),
        (np.s_[3:3], 0),
        (np.s_[63:56:-1, 31:23:-2], 4),
        (np.s_[:], 32),
    ],
    ids=repr,
)
def test_only_the_chunks_that_an_index_touches_are_read(
    index: Any, chunks: int, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    array = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    options = jaxckpt.Options(chunk_bytes=256, object_bytes=1 << 20, sync=False)
    jaxckpt.save(tmp_path / "c", {"a": array, "other": np.ones((999, 7))}, options=options)
    leaf = jaxckpt.open(tmp_path / "c", options=options)["a"]
    before = bytes_read()
    np.testing.assert_array_equal(leaf[index], array[index])
    index_bytes = 16 * 32 + 4
    assert bytes_read() - before == (chunks * 260 + index_bytes if chunks else 0)


def test_opening_reads_no_array(path: Path, bytes_read: Callable[[], int]) -> None:
    before = bytes_read()
    checkpoint = jaxckpt.open(path)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.spec, repr(leaf)), checkpoint.tree())
    assert shapes["params"]["w"][0] == (64, 48)
    checkpoint.plan(mesh={"data": 4})
    assert bytes_read() == before


# Plans ----------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path, mesh: Mesh) -> tuple[Path, dict[str, Any]]:
    """Leaves above 1 MiB, of which each device reads only its pieces."""
    value = np.random.default_rng(0).random((1024, 1536), np.float32)
    tree = {
        "w": jax.device_put(value, NamedSharding(mesh, P("data", "model"))),
        "v": jax.device_put(value, NamedSharding(mesh, P(None, "data"))),
        "b": jax.device_put(value[0], NamedSharding(mesh, P())),
    }
    jaxckpt.save(tmp_path / "w", tree, options=jaxckpt.Options(chunk_bytes=64 << 10, sync=False))
    return tmp_path / "w", tree


@pytest.mark.parametrize(
    ("sizes", "specs"),
    [((8,), None), ((4, 2), None), ((2, 3), None), ((8,), P()), ((3,), P(None, "data")), ((1, 8), P("model"))],
    ids=str,
)
def test_a_plan_predicts_what_the_restore_reads(
    sizes: tuple[int, ...], specs: Any, weights: tuple[Path, dict[str, Any]], bytes_read: Callable[[], int]
) -> None:
    path, tree = weights
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, ("data", "model")[: len(sizes)])
    if specs is not None:
        specs = {"w": specs, "v": specs, "b": P()}
    plan = jaxckpt.open(path).plan(mesh=mesh, specs=specs)
    before = bytes_read()
    restored = jaxckpt.restore(path, mesh=mesh, specs=specs)
    read = bytes_read() - before
    needed = sum(leaf.nbytes for leaf in tree.values())
    assert plan.needed_bytes == needed
    assert needed < read <= plan.read_bytes <= 1.02 * read
    assert plan.over_read == plan.read_bytes / needed
    assert len(plan.processes) == 1
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(restored):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    assert plan.processes[0].device_bytes == held
    narrow = jaxckpt.open(path).plan(mesh=mesh, specs=specs, dtype=jnp.bfloat16, options=jaxckpt.Options(cast="unsafe"))
    assert narrow.processes[0].device_bytes == {device: size // 2 for device, size in held.items()}
    assert narrow.needed_bytes == needed


@pytest.fixture
def mixture(tmp_path: Path, mesh: Mesh) -> Path:
    """Leaves that are read in different ways: whole, piece by piece, on the host, and twice because two share data."""
    random = np.random.default_rng(0)
    large = jax.device_put(random.random((512, 1024), np.float32), NamedSharding(mesh, P("data", "model")))
    small = [jax.device_put(random.random((64, 64), np.float32), NamedSharding(mesh, P("data"))) for _ in range(20)]
    tree = {"small": small, "large": large, "tied": large, "step": jnp.arange(4), "host": np.arange(1000), "name": "a"}
    jaxckpt.save(tmp_path / "c", tree, options=jaxckpt.Options(chunk_bytes=64 << 10, sync=False))
    return tmp_path / "c"


def columns(path: str, leaf: Any) -> P | None:
    return None if path == "host" else P(*[None] * (len(leaf.shape) - 1), "model")


@pytest.mark.parametrize(
    "request_of",
    {
        "as saved": lambda mesh: {},
        "replicated": lambda mesh: {"mesh": mesh, "specs": P()},
        "columns": lambda mesh: {"mesh": mesh, "specs": columns},
        "some leaves": lambda mesh: {"select": ["small/1*", "host"]},
        # Whether these values fit a narrower dtype is checked first, so they are read twice.
        "a cast": lambda mesh: {"select": "step", "target": {"step": jax.ShapeDtypeStruct((4,), jnp.int8)}},
    }.items(),
    ids=lambda named: named[0],
)
def test_a_plan_counts_exactly_the_bytes_of_the_restore(
    request_of: tuple[str, Callable[[Mesh], dict[str, Any]]], mixture: Path, mesh: Mesh, bytes_read: Callable[[], int]
) -> None:
    arguments = request_of[1](mesh)
    before = bytes_read()
    jaxckpt.restore(mixture, **arguments)
    read = bytes_read() - before
    assert jaxckpt.open(mixture).plan(**arguments).read_bytes == read > 0


def test_a_plan_of_small_leaves_costs_the_same_on_any_layout(mixture: Path, mesh: Mesh) -> None:
    """The restore reads them whole, and JAX cuts them."""
    checkpoint = jaxckpt.open(mixture)
    plans = [checkpoint.plan(select="small", mesh=mesh, specs=specs) for specs in (P(), P("data"), P("model", "data"))]
    assert plans[0].processes[0].cost == plans[1].processes[0].cost == plans[2].processes[0].cost


def test_a_plan_for_a_target_uses_its_shardings(weights: tuple[Path, dict[str, Any]], mesh: Mesh) -> None:
    path, tree = weights
    checkpoint = jaxckpt.open(path)
    assert checkpoint.plan(tree).needed_bytes == checkpoint.plan().needed_bytes == checkpoint.nbytes
    one = checkpoint.plan(select="w")
    assert one.needed_bytes == tree["w"].nbytes
    assert [leaf.path for leaf in one.leaves] == ["w"]
    with pytest.raises(jaxckpt.MismatchError, match="'x' is not in the checkpoint"):
        checkpoint.plan({"x": tree["w"]})


def test_a_plan_for_512_devices_needs_no_devices(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    tree = {
        "w": jax.device_put(np.ones((512, 512), np.float32), NamedSharding(mesh, P("data", "model"))),
        "rows": jax.device_put(np.ones((512, 16), np.float32), NamedSharding(mesh, P(("data", "model")))),
        "scale": jax.device_put(np.ones(512, np.float32), NamedSharding(mesh, P())),
    }
    jaxckpt.save(tmp_path / "c", tree, options=SMALL)
    checkpoint = jaxckpt.open(tmp_path / "c")
    plan = checkpoint.plan(mesh={"data": 64, "model": 8}, devices_per_process=8)
    assert len(plan.processes) == 64
    assert sum(len(part.device_bytes) for part in plan.processes) == 512
    per_device = tree["w"].nbytes // 512 + tree["rows"].nbytes // 512 + tree["scale"].nbytes
    assert {size for part in plan.processes for size in part.device_bytes.values()} == {per_device}
    # Row-major: a process has one place along "data" and all along "model"; every process has all of "scale".
    per_process = tree["w"].nbytes // 64 + tree["rows"].nbytes // 64 + tree["scale"].nbytes
    assert {part.cost.needed_bytes for part in plan.processes} == {per_process}
    assert plan.needed_bytes == 64 * per_process
    apart = checkpoint.plan(mesh={"data": 64, "model": 8}, devices_per_process=1)
    assert len(apart.processes) == 512
    assert apart.read_bytes > plan.read_bytes, "alone, each process reads chunks that neighbors would share"
    abstract = checkpoint.plan(mesh=AbstractMesh((64, 8), ("data", "model")), devices_per_process=8)
    assert abstract == plan
    text = str(plan)
    assert "3 arrays onto 512 devices of 64 processes" in text
    assert "data=2×model=4 → data=64×model=8" in text


def test_a_plan_refuses_what_the_restore_would_refuse(weights: tuple[Path, dict[str, Any]]) -> None:
    checkpoint = jaxckpt.open(weights[0])
    with pytest.raises(jaxckpt.errors.SpecError, match=r"(?s)'v'.*is not divisible by 5"):
        checkpoint.plan(mesh={"data": 5})
    with pytest.raises(jaxckpt.errors.SpecError, match="none of the axes"):
        checkpoint.plan(mesh={"x": 4})
    for wrong in (0, "8", 1.5, True, 10**30):
        with pytest.raises(jaxckpt.errors.InputError, match="devices_per_process must be a whole number above zero"):
            checkpoint.plan(mesh={"data": 2}, devices_per_process=wrong)  # pyright: ignore[reportArgumentType]
    for wrong in ({"data": 0}, {"data": True}, {1: 8}):
        with pytest.raises(jaxckpt.errors.InputError, match="axis names with sizes"):
            checkpoint.plan(mesh=wrong)  # pyright: ignore[reportArgumentType]
    for wrong in (5, "x=2", ("x", 2), jax.devices()):
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"a mesh must be a jax.sharding.Mesh, an AbstractMesh, or axis"
        ):
            checkpoint.plan(mesh=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(jaxckpt.errors.InputError, match="target is a mesh: pass it as mesh="):
        checkpoint.plan(Mesh(np.array(jax.devices()), ("data",)))
    with pytest.raises(jaxckpt.errors.InputError, match="tied must be"):
        checkpoint.plan(mesh={"data": 2}, tied="yes")  # pyright: ignore[reportArgumentType]
    assert checkpoint.plan(mesh={"data": 2}, tied=True) == checkpoint.plan(mesh={"data": 2})
    plan = checkpoint.plan(mesh={"data": 5}, options=jaxckpt.Options(indivisible="replicate"))
    assert {leaf.path: leaf.wanted.spec for leaf in plan.leaves}["w"] == "P(None, None)"


# Without a backend ----------------------------------------------------------------------------------------


def test_an_open_checkpoint_is_restored_as_it_is_shown(tmp_path: Path, mesh: Mesh) -> None:
    placed = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("data", "model")))
    info = jaxckpt.save(tmp_path / "c", {"params": {"w": placed}, "step": 3})
    checkpoint = jaxckpt.open(tmp_path / "c", manifest_sha256=info.manifest_sha256)
    restored = checkpoint.restore(mesh=mesh)
    assert restored["step"] == 3
    assert restored["params"]["w"].sharding.spec == P("data", "model")
    renamed = jaxckpt.open(tmp_path / "c", rename={"params": "model"})
    tree = renamed.restore({"model": {"w": np.empty((8, 8), np.float16)}}, select="model", dtype=np.float16)
    np.testing.assert_array_equal(tree["model"]["w"], np.asarray(placed, np.float16))
    again = renamed.restore(rename={"model": "net"}, select="net", mesh=mesh)
    np.testing.assert_array_equal(again["net"]["w"], placed)
    with pytest.raises(jaxckpt.errors.TreeError, match="'params' matches none"):
        renamed.restore(select="params")
    with pytest.raises(jaxckpt.errors.InputError, match="options must be"):
        renamed.restore(options={})  # type: ignore[arg-type]
    jaxckpt.save(tmp_path / "c", {"params": {"w": placed + 1}, "step": 4}, overwrite=True)
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced"):
        checkpoint.restore(mesh=mesh)


def test_processes_restore_the_same_open_checkpoint(tmp_path: Path, run_processes: RunProcesses) -> None:
    run_processes(
        PROGRAMS / "opened_in_two.py", processes=2, devices_per_process=1, args=str(tmp_path / "run"), word=PASSED
    )


def test_inspecting_and_loading_start_no_jax_backend(path: Path, run_python: RunPython) -> None:
    out = run_python(
        f"""
        import jax, jaxckpt
        from jax._src import xla_bridge
        checkpoint = jaxckpt.open({str(path)!r})
        assert checkpoint["params/w"][3, 4] == 3 * 48 + 4
        assert checkpoint["key"][...].dtype == "uint32"
        for leaf in checkpoint.leaves.values():
            leaf.value, repr(leaf), leaf.spec
        tree = jaxckpt.load_numpy({str(path)!r})
        assert tree["params"]["w"].sum() == sum(range(64 * 48))
        assert jaxckpt.load_numpy({str(path)!r}, dtype="float64", select="params")["params"]["w"].dtype == "float64"
        print(len(str(checkpoint.plan(mesh={{"data": 64, "model": 8}}, select=["params", "key"],
                                      options=jaxckpt.Options(indivisible="replicate")))) > 100)
        print(sorted(xla_bridge._backends))
        jax.devices()
        print(sorted(xla_bridge._backends))
        """,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert out.splitlines() == ["True", "[]", "['cpu']"]


def test_loading_reads_only_what_is_selected(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    tree = {f"layer{i}": np.random.default_rng(i).random((64, 64 + i)) for i in range(6)}
    jaxckpt.save(tmp_path / "c", tree, options=jaxckpt.Options(sync=False))
    before = bytes_read()
    loaded = jaxckpt.load_numpy(tmp_path / "c", select="layer3")
    assert tree["layer3"].nbytes <= bytes_read() - before <= 1.01 * tree["layer3"].nbytes
    np.testing.assert_array_equal(loaded["layer3"], tree["layer3"])


def test_a_lazy_leaf_of_a_replaced_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Reading from a replaced checkpoint is an error; it never returns the new checkpoint's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c")
        jaxckpt.save(path, {"a": np.zeros(9)})
        leaf = jaxckpt.open(path)["a"]
        jaxckpt.save(path, {"a": np.ones(9)}, overwrite=True)
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced by another while it was being read"):
            leaf[:]


def test_compressed_data_may_be_replaced_while_it_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, open_file = tmp_path / "c", Folder._open_file
    jaxckpt.save(path, {"a": np.zeros(9)}, options=jaxckpt.Options(compression="zstd"))

    @contextlib.contextmanager
    def replace_once_open(self: Folder, key: str) -> Generator[tuple[int, int]]:
        with open_file(self, key) as found:
            if "/c/" in key:
                monkeypatch.undo()
                jaxckpt.save(path, {"a": np.ones(9)}, overwrite=True)
            yield found

    monkeypatch.setattr(Folder, "_open_file", replace_once_open)
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced by another while it was being read"):
        jaxckpt.load_numpy(path)
