"""Orbax v1 with jaxckpt's arrays: its Checkpointer, its functions, and its earlier checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental.v1._src.handlers.registration import global_registry

import jaxckpt
import jaxckpt.orbax

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
    types = {"w": jax.ShapeDtypeStruct, "n": np.ndarray, "step": int, "layers": [jax.Array, {"b": None}]}
    for abstract in (ocp.metadata(tmp_path / "one"), types):
        loaded = ocp.load(tmp_path / "one", abstract)
        assert type(loaded["n"]) is np.ndarray
        assert loaded["n"].dtype == np.int64
        assert same([loaded["w"], loaded["n"], loaded["step"]], [tree["w"], tree["n"], tree["step"]])
        assert loaded["w"].sharding == tree["w"].sharding
    assert loaded["layers"][1]["b"] is None, "it is not requested"
    nothing = jax.tree.map(lambda leaf: None, tree)
    assert ocp.load(tmp_path / "one", nothing) == nothing


def test_earlier_checkpoints_of_orbax_are_loaded(tmp_path: Path, tree: Any, request: pytest.FixtureRequest) -> None:
    ocp.save(tmp_path / "before", tree)
    assert not (tmp_path / "before" / "state" / "manifest.json").exists()
    request.getfixturevalue("registered")
    assert same(ocp.load(tmp_path / "before"), tree)


@pytest.mark.usefixtures("registered")
def test_a_failure_is_raised(tmp_path: Path, tree: Any) -> None:
    ocp.save(tmp_path / "one", tree)
    with pytest.raises(Exception, match=r"target and checkpoint differ|Failed to load") as caught:
        ocp.load(tmp_path / "one", {**tree, "w": jnp.zeros(3)})
    assert isinstance(caught.value, jaxckpt.MismatchError) or isinstance(caught.value.__cause__, jaxckpt.MismatchError)
