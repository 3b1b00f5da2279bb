"""Flax NNX: a variable is a leaf at its own path, modules are saved and restored, and Orbax's paths are recognized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


PATHS = [f"layers/{number}/{name}" for number in range(2) for name in ("bias", "kernel")]
PATHS = ["dropout/rngs/count", "dropout/rngs/key", *PATHS]


@pytest.fixture
def module() -> Network:
    return Network(nnx.Rngs(0))


def abstract() -> Any:
    return nnx.eval_shape(lambda: Network(nnx.Rngs(1)))


def kernel(found: Any) -> Any:
    return np.asarray(found.layers[1].kernel[...])


@pytest.mark.one_device
def test_a_variable_is_a_leaf_and_a_module_comes_back(tmp_path: Path, module: Network) -> None:
    jaxckpt.save(tmp_path / "module", module)
    jaxckpt.save(tmp_path / "state", nnx.state(module))
    for name in ("module", "state"):
        assert list(jaxckpt.open(tmp_path / name)) == PATHS
        for target in (abstract(), module):
            restored = jaxckpt.restore(tmp_path / name, target)
            assert isinstance(restored, Network)
            np.testing.assert_array_equal(kernel(restored), kernel(module))
            assert restored.dropout.rngs.key[...] == module.dropout.rngs.key[...]
        fresh = Network(nnx.Rngs(2))
        nnx.update(fresh, jaxckpt.restore(tmp_path / name))
        np.testing.assert_array_equal(kernel(fresh), kernel(module))


@pytest.mark.one_device
def test_an_optimizer_has_the_names_of_its_model(tmp_path: Path, module: Network) -> None:
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    jaxckpt.save(tmp_path / "a", {"model": module, "optimizer": optimizer})
    assert "optimizer/opt_state/0/mu/layers/1/kernel" in jaxckpt.open(tmp_path / "a")
    restored = jaxckpt.restore(tmp_path / "a", {"model": abstract()}, strict=False)
    np.testing.assert_array_equal(kernel(restored["model"]), kernel(module))


def test_specs_and_shardings_as_nnx_gives_them(tmp_path: Path, module: Network) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    jaxckpt.save(tmp_path / "a", module)
    specs = jax.tree.map(lambda leaf: P("model") if leaf.ndim == 2 else P(), nnx.state(module))
    restored = jaxckpt.restore(tmp_path / "a", abstract(), mesh=mesh, specs=specs)
    assert restored.layers[0].kernel[...].sharding == NamedSharding(mesh, P("model"))
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[5]), nnx.state(module))
    restored = jaxckpt.restore(tmp_path / "a", shardings)
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(restored)} == {jax.devices()[5]}


@pytest.mark.one_device
def test_orbaxs_extra_level_is_matched_with_a_target(tmp_path: Path, module: Network) -> None:
    with ocp.StandardCheckpointer() as theirs:
        theirs.save(tmp_path / "a", nnx.state(module))
    assert list(jaxckpt.open(tmp_path / "a")) == [f"{path}/value" for path in PATHS]
    for target in (abstract(), nnx.state(abstract()), nnx.state(module)):
        restored = jaxckpt.restore(tmp_path / "a", target)
        assert isinstance(restored, type(target))
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[5 % len(jax.devices())]), nnx.state(module))
    restored = jaxckpt.restore(tmp_path / "a", shardings)
    np.testing.assert_array_equal(kernel(nnx.merge(nnx.graphdef(module), restored)), kernel(module))
    with pytest.raises(jaxckpt.MismatchError, match=r"'layers/1/kernel/value' has shape \(4, 4\)"):
        jaxckpt.restore(
            tmp_path / "a", {"layers": {1: {"kernel": nnx.Param(np.ones(3))}}}, select="layers/1/kernel/value"
        )


@pytest.mark.one_device
def test_a_variable_of_two_modules_is_saved_through_its_state(tmp_path: Path, module: Network) -> None:
    module.layers[1].kernel = module.layers[0].kernel
    with pytest.raises(jaxckpt.errors.TreeError, match="'layers/0/kernel' and 'layers/1/kernel' are the same Variable"):
        jaxckpt.save(tmp_path / "a", module)
    jaxckpt.save(tmp_path / "a", nnx.state(module))
    assert "layers/1/kernel" not in jaxckpt.open(tmp_path / "a")


def test_a_variable_may_hold_nothing_or_a_tree(tmp_path: Path) -> None:
    tree = {"none": nnx.Variable(None), "tree": nnx.Param({"x": np.ones(2)}), "alone": nnx.Param(np.ones(3))}
    jaxckpt.save(tmp_path / "a", tree)
    assert list(jaxckpt.open(tmp_path / "a")) == ["alone", "tree/x"]
    restored = jaxckpt.restore(tmp_path / "a", tree)
    assert restored["none"].get_value() is None
    np.testing.assert_array_equal(restored["tree"].get_value()["x"], np.ones(2))
