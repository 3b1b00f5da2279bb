"""Containers that moved: an error names the arguments that find their leaves, and these arguments work when pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

adam = optax.adam(1e-3)


def advised_arguments(error: jaxckpt.MismatchError) -> dict[str, Any]:
    """The arguments that the last line of an error names, as a program that pastes them has them."""
    match = re.search(r"are found with (rename=.*?)(?:; strict=False|$)", str(error).splitlines()[-1])
    assert match is not None, error
    return eval(f"dict({match[1]})", {"jaxckpt": jaxckpt})


def follow_advice(path: Path, saved: Any, target: Any) -> Any:
    jaxckpt.save(path, saved, overwrite=True)
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(path, target)
    return jaxckpt.restore(path, target, **advised_arguments(caught.value))


def assert_advises_stack(path: Path, target: Any) -> None:
    with pytest.raises(jaxckpt.MismatchError, match=r"rename=jaxckpt\.rules\.stack\(\['opt/0/mu/") as caught:
        jaxckpt.restore(path, target)
    assert "rules.Rule(" not in str(caught.value)


PARAMS = {"enc/oder": {"w": jnp.ones(3), "b~": jnp.ones(3)}, "//": {"w": jnp.ones(3)}}


def state_of(optimizer: Any, value: float) -> Any:
    def filled(leaf: Any) -> Any:
        return jnp.full_like(leaf, value) if leaf.dtype == jnp.float32 else leaf

    return jax.tree.map(filled, {"params": PARAMS, "opt_state": optimizer.init(PARAMS)})


WRAPPED: dict[str, tuple[Any, Any]] = {
    "MultiSteps": (adam, optax.MultiSteps(adam, 4)),
    "no more MultiSteps": (optax.MultiSteps(adam, 4), adam),
    "clip before": (adam, optax.chain(optax.clip(1.0), adam)),
    "ema after": (adam, optax.chain(adam, optax.ema(0.9))),
    "flat chain": (
        optax.chain(optax.scale_by_adam(), optax.scale(-1.0)),
        optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-1.0)),
    ),
    "a leaf of the same path": (adam, optax.chain(optax.scale_by_schedule(lambda count: 1.0), adam)),
    "inject_hyperparams": (adam, optax.inject_hyperparams(optax.adam)(1e-3)),
    "apply_if_finite": (adam, optax.apply_if_finite(adam, 3)),
    "multi_transform": (adam, optax.multi_transform({"a": adam}, "a")),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_a_wrapped_optimizer_is_found_with_the_advised_arguments(case: str, tmp_path: Path) -> None:
    old, new = WRAPPED[case]
    restored = follow_advice(tmp_path / "c", state_of(old, 5.0), state_of(new, 0.0))
    [(_, moments)] = optax.tree_utils.tree_get_all_with_path(restored["opt_state"], "mu")
    assert all(np.all(np.asarray(leaf) == 5) for leaf in jax.tree.leaves((moments, restored["params"])))


def test_the_state_of_a_wrapped_optimizer_is_found_without_any_leaf_in_common(tmp_path: Path) -> None:
    saved, target = (state_of(optimizer, value)["opt_state"] for optimizer, value in ((adam, 5.0), WRAPPED_TARGET))
    restored = follow_advice(tmp_path / "c", saved, target)
    assert restored.inner_opt_state[0].mu["//"]["w"].tolist() == [5, 5, 5]


WRAPPED_TARGET = (optax.MultiSteps(adam, 4), 0.0)


@pytest.mark.parametrize(("old", "new"), [(optax.sgd(0.1, 0.9), adam), (adam, optax.lion(1e-3))], ids=["sgd", "lion"])
def test_another_optimizer_is_not_taken_for_a_moved_one(old: Any, new: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", state_of(old, 5.0))
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", state_of(new, 0.0))
    assert "found with" not in str(caught.value)


@pytest.mark.parametrize("kind", ["optimizer", "layers"])
def test_selected_leaves_are_found_too(kind: str, tmp_path: Path) -> None:
    select: Any = ["opt_state"]
    old, new = (
        (state_of(adam, 5.0)["opt_state"], state_of(WRAPPED_TARGET[0], 0.0)["opt_state"])
        if kind == "optimizer"
        else (layers(), scanned(0)["layers"])
    )
    jaxckpt.save(tmp_path / "c", {"opt_state": old, "params": {"w": 1}})
    target = {"opt_state": new, "params": {"w": 3}}
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", target, select=select)
    restored = jaxckpt.restore(tmp_path / "c", target, select=select, **advised_arguments(caught.value))
    assert restored["params"] == {"w": 3}
    opt_state = restored["opt_state"]
    values = opt_state.inner_opt_state[0].mu["//"]["w"] if kind == "optimizer" else opt_state["mlp"]["b"][5]
    assert set(values.tolist()) == ({5.0} if kind == "optimizer" else {5.5})


def test_a_checkpointer_resumes_with_the_advised_arguments(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state_of(adam, 5.0))
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(jaxckpt.MismatchError) as caught:
            checkpointer.restore_or_init(lambda: state_of(WRAPPED_TARGET[0], 1.0))
        arguments = advised_arguments(caught.value)
        step, state = checkpointer.restore_or_init(lambda: state_of(WRAPPED_TARGET[0], 1.0), **arguments)
    assert step == 1
    assert state["opt_state"].inner_opt_state[0].nu["//"]["w"].tolist() == [5, 5, 5]
    assert state["opt_state"].acc_grads["//"]["w"].tolist() == [1, 1, 1]


# Layers ---------------------------------------------------------------------------------------------------


def layers() -> list[Any]:
    return [
        {"attn": {"q": jnp.arange(6.0).reshape(2, 3) + 10 * n}, "mlp": {"b": jnp.full(3, n + 0.5)}} for n in range(12)
    ]


SEPARATE: dict[str, Callable[[], Any]] = {
    "layers_{i}": lambda: {f"layers_{n}": layer for n, layer in enumerate(layers())},
    "layers/{i} in a list": lambda: {"layers": layers()},
    "layers/{i} in a dict": lambda: {"layers": dict(enumerate(layers()))},
    "layers{i}": lambda: {f"layers{n}": layer for n, layer in enumerate(layers())},
}


def scanned(axis: int) -> Any:
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *layers())}


def training(params: Any, step: int) -> Any:
    """With leaves that no rule changes."""
    opt_state = jax.tree.map(lambda leaf: leaf + step, adam.init(params))
    return {
        "params": params,
        "opt": opt_state,
        "step": step,
        "key": jax.random.key(step),
        "name": f"n{step}",
        "a//b": 1,
    }


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("direction", ["stack", "unstack"])
@pytest.mark.parametrize("kind", SEPARATE)
def test_stacked_layers_are_found_with_the_advised_rules(kind: str, direction: str, axis: int, tmp_path: Path) -> None:
    old, new = SEPARATE[kind](), scanned(axis)
    if direction == "unstack":
        old, new = new, old
    target = training(jax.tree.map(jnp.zeros_like, new), 0)
    restored = follow_advice(tmp_path / "c", training(old, 7), target)
    assert_advises_stack(tmp_path / "c", target)
    expected = training(new, 7)
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    jax.tree.map(np.testing.assert_array_equal, restored["params"], expected["params"])
    jax.tree.map(np.testing.assert_array_equal, restored["opt"], expected["opt"])
    assert (restored["step"], restored["name"], restored["a//b"]) == (7, "n7", 1)
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


@pytest.mark.parametrize("is_number", [False, True])
def test_stacked_arrays_without_a_container_are_found_too(is_number: bool, tmp_path: Path) -> None:
    separate = [jnp.full(() if is_number else (2, 3), n) for n in range(3)]
    stacked = jnp.stack(separate)
    restored = follow_advice(tmp_path / "c", {"w": separate, "x": 1}, {"w": jnp.zeros_like(stacked), "x": 0})
    np.testing.assert_array_equal(restored["w"], stacked)
    restored = follow_advice(tmp_path / "d", {"w": stacked, "x": 1}, {"w": separate[::-1], "x": 0})
    np.testing.assert_array_equal(np.stack(restored["w"]), stacked)


def test_stacked_layers_are_restored_onto_a_mesh(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    by_layer = NamedSharding(mesh, P("data"))
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_layer), scanned(0))
    restored = follow_advice(tmp_path / "c", SEPARATE["layers_{i}"](), target)
    jax.tree.map(np.testing.assert_array_equal, restored, scanned(0))
    assert all(leaf.sharding == by_layer for leaf in jax.tree.leaves(restored))


def test_layers_of_another_number_are_not_stacked(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {**SEPARATE["layers_{i}"](), "w": 1})
    target = {**jax.tree.map(lambda leaf: leaf[:11], scanned(0)), "w": 0}
    with pytest.raises(jaxckpt.MismatchError) as caught:
        jaxckpt.restore(tmp_path / "c", target)
    assert "found with" not in str(caught.value)
