"""Orbax v1 with jaxckpt's arrays: its Checkpointer, its functions, and its earlier checkpoints."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental.v1._src.handlers.registration import global_registry
from processes import PROGRAMS, RunProcesses

import jaxckpt
import jaxckpt.orbax
from jaxckpt._store.folder import Folder

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax raises various warnings


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    w = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, P("x", "y")))
    return {"w": w, "n": np.arange(3), "step": 3, "layers": [jnp.ones(2), {"b": jnp.zeros(3)}]}


@pytest.fixture
def registered() -> Iterator[None]:
    entries: Any = global_registry().get_all_entries()
    before = list(entries)
    jaxckpt.orbax.register_v1(jaxckpt.Options(object_bytes=1 << 20))
    yield
    entries[:] = before


def same(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b))


@pytest.mark.usefixtures("registered")
def test_a_checkpointer_saves_and_loads_through_jaxckpt(tmp_path: Path, tree: Any, mesh: Mesh) -> None:
    with ocp.training.Checkpointer(tmp_path / "run") as run:
        assert run.save(1, tree, metrics={"loss": 0.5})
        run.save_async(2, tree).result()
        assert [found.step for found in run.checkpoints] == [1, 2]
        assert (tmp_path / "run" / "2" / "state" / "manifest.json").exists()
        assert same(run.load(2), tree)
        abstract = jax.tree.map(ocp_abstract, tree)
        abstract["w"] = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("y")))
        loaded = run.load(1, abstract)
        assert loaded["w"].sharding.spec == P("y")
        assert same(loaded, tree)
        found = run.metadata(2).metadata
        assert (found["w"].shape, found["w"].sharding, found["step"]) == ((8, 4), tree["w"].sharding, int)
    assert same(jaxckpt.load_numpy(tmp_path / "run" / "1"), tree)
    assert jaxckpt.open(tmp_path / "run" / "1").metadata["metrics"] == {"loss": 0.5}


def ocp_abstract(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.usefixtures("registered")
def test_functions_and_several_items(tmp_path: Path, tree: Any) -> None:
    ocp.save(tmp_path / "one", tree)
    assert same(ocp.load(tmp_path / "one"), tree)
    ocp.save_async(tmp_path / "other", tree).result()
    assert same(jaxckpt.load_numpy(tmp_path / "other"), tree)
    ocp.save_checkpointables(tmp_path / "two", {"pytree": tree, "note": {"a": "text"}})
    loaded = ocp.load_checkpointables(tmp_path / "two", {"pytree": tree})
    assert same(loaded["pytree"], tree)


@pytest.mark.usefixtures("registered")
def test_part_of_a_tree(tmp_path: Path, tree: Any) -> None:
    ocp.save(tmp_path / "one", tree)
    target = {**tree, "w": ...}
    loaded = ocp.load(tmp_path / "one", target)
    assert loaded["w"] is ...
    assert same(loaded["layers"], tree["layers"])
    with ocp.Context(
        pytree_options=ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
    ):
        assert same(ocp.load(tmp_path / "one", {"layers": tree["layers"]}), {"layers": tree["layers"]})


@pytest.mark.usefixtures("registered")
def test_storage_options_cast_what_is_saved(tmp_path: Path, tree: Any) -> None:
    storage = ocp.options.ArrayOptions.Saving.StorageOptions
    context = ocp.Context()
    context.array_options.saving.storage_options.dtype = jnp.bfloat16
    context.array_options.saving.scoped_storage_options_creator = lambda keys, leaf: (
        storage(dtype=np.dtype("float16")) if "layers" in jax.tree_util.keystr(keys) else None
    )
    with context:
        ocp.save(tmp_path / "one", tree)
    found = jaxckpt.open(tmp_path / "one")
    assert {path: leaf.dtype.name for path, leaf in found.items() if path in ("w", "layers/0", "layers/1/b")} == {
        "w": "bfloat16",
        "layers/0": "float16",
        "layers/1/b": "float16",
    }


@pytest.mark.usefixtures("registered")
def test_the_metadata_and_types_are_abstract_trees(tmp_path: Path, tree: Any) -> None:
    ocp.save(tmp_path / "one", tree)
    found = ocp.metadata(tmp_path / "one").metadata
    assert [type(leaf).__name__ for leaf in (found["w"], found["n"])] == ["ArrayMetadata", "NumpyMetadata"]
    assert (found["w"].shape, found["w"].dtype, found["w"].sharding) == ((8, 4), jnp.float32, tree["w"].sharding)
    assert (found["n"].shape, found["n"].dtype) == ((3,), np.int64)
    assert [leaf.storage_metadata.chunk_shape for leaf in (found["w"], found["n"])] == [(8, 4), (3,)]
    assert (found["step"], found["layers"][0].sharding) == (int, tree["layers"][0].sharding)
    types = {"w": jax.ShapeDtypeStruct, "n": np.ndarray, "step": int, "layers": [jax.Array, {"b": None}]}
    types_of_metadata = {**types, "w": type(found["w"]), "n": type(found["n"])}
    for abstract in (ocp.metadata(tmp_path / "one"), types_of_metadata, types):
        loaded = ocp.load(tmp_path / "one", abstract)
        assert type(loaded["n"]) is np.ndarray
        assert loaded["n"].dtype == np.int64
        assert same([loaded["w"], loaded["n"], loaded["step"]], [tree["w"], tree["n"], tree["step"]])
        assert loaded["w"].sharding == tree["w"].sharding
    assert loaded["layers"][1]["b"] is None, "it is not requested"
    nothing = jax.tree.map(lambda leaf: None, tree)
    assert ocp.load(tmp_path / "one", nothing) == nothing


@pytest.mark.usefixtures("registered")
def test_the_metadata_of_an_array_with_reduced_mesh_axes(tmp_path: Path, mesh: Mesh) -> None:
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        w = jax.sharding.reshard(jnp.arange(8.0), P("y", reduced={"x"}))
    ocp.save(tmp_path / "one", {"w": w})
    assert ocp.metadata(tmp_path / "one").metadata["w"].sharding == NamedSharding(explicit, P("y"))
    assert ocp.load(tmp_path / "one")["w"].sharding == w.sharding


@pytest.mark.usefixtures("registered")
def test_a_cancelled_save_is_not_published(tmp_path: Path, tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_written, gate = threading.Event(), threading.Event()
    publish = Folder.publish

    def held(*args: Any, **options: Any) -> None:
        is_written.set()
        assert gate.wait(60)
        publish(*args, **options)

    monkeypatch.setattr(Folder, "publish", held)
    with ocp.training.Checkpointer(tmp_path / "run") as run:
        response = run.save_async(1, {"w": np.zeros(3)})
        assert is_written.wait(60)
        run.cancel(1)
        threading.Timer(0.3, gate.set).start()
        response.result()
        assert [found.step for found in run.checkpoints] == []
        assert not (tmp_path / "run/1").exists()
        run.save(1, tree)  # has no error of the cancelled save
        assert [found.step for found in run.checkpoints] == [1]
        assert same(run.load(1), tree)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]


def test_earlier_checkpoints_of_orbax_are_loaded(tmp_path: Path, tree: Any, request: pytest.FixtureRequest) -> None:
    ocp.save(tmp_path / "before", tree)
    assert not (tmp_path / "before" / "state" / "manifest.json").exists()
    described = ocp.metadata(tmp_path / "before").metadata
    request.getfixturevalue("registered")
    assert same(ocp.load(tmp_path / "before"), tree)
    assert ocp.metadata(tmp_path / "before").metadata == described
    assert same(ocp.load(tmp_path / "before", described), tree)


@pytest.mark.usefixtures("registered")
def test_no_load_warns_of_a_malformed_checkpoint(
    tmp_path: Path, tree: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    ocp.save(tmp_path / "one", tree)
    (tmp_path / "two/state").mkdir(parents=True)
    for name in ("one/orbax.checkpoint", "one/_CHECKPOINT_METADATA", "one/state/_METADATA"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("one", "two", 1))
    with caplog.at_level(logging.WARNING, "absl"):
        assert same(ocp.load(tmp_path / "one"), tree)
        assert "malformed" not in caplog.text
        with pytest.raises(jaxckpt.JaxckptError):
            ocp.load(tmp_path / "two")
    assert f"not found in checkpoint path {tmp_path / 'two'}. This may be a sign of a malformed" in caplog.text


@pytest.mark.usefixtures("registered")
def test_a_failure_is_raised(tmp_path: Path, tree: Any) -> None:
    ocp.save(tmp_path / "one", tree)
    with pytest.raises(Exception, match=r"target and checkpoint differ|Failed to load") as caught:
        ocp.load(tmp_path / "one", {**tree, "w": jnp.zeros(3)})
    assert isinstance(caught.value, jaxckpt.MismatchError) or isinstance(caught.value.__cause__, jaxckpt.MismatchError)


def test_several_items_a_step_in_two_processes(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(PROGRAMS / "orbax_v1_several_items.py", processes=2, devices_per_process=2, args=str(tmp_path))
    assert [one.stdout.splitlines() for one in done] == [["TreeError", "all loaded"], ["PeerFailedError", "all loaded"]]
