"""Leaves that are one array are stored once, and restored as separate arrays, or as one array if requested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model import manifest as _manifest
from jaxckpt._model.checks import MAX_TIED
from jaxckpt._store.load_manifest import load_manifest
from jaxckpt._store.store_path import store_at


def tied_tree() -> dict[str, Any]:
    mesh = jax.make_mesh((4,), ("x",))
    table = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x")))
    host = np.arange(5)
    return {
        "embed": table,
        "head": table,
        "alike": table + 0,
        "host": [host, host],
        "keys": (key := jax.random.key(3), key),
        "step": 3,
    }


def require_equal(found: Any, expected: Any) -> None:
    def same(a: Any, b: Any) -> None:
        is_key = isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(map(jax.random.key_data, (a, b)) if is_key else (np.asarray(a), np.asarray(b))))

    jax.tree.map(same, found, expected)


def test_tied_leaves_are_stored_once(tmp_path: Path) -> None:
    tree = tied_tree()
    info = jaxckpt.save(tmp_path / "a", tree)
    assert info.total_bytes == 2 * 64 * 4 + 5 * 8 + 8
    apart = jaxckpt.restore(tmp_path / "a")
    require_equal(apart, tree)
    assert apart["embed"] is not apart["head"]
    jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))(apart["embed"], apart["head"])
    apart["host"][0][0] = 7
    assert apart["host"][1][0] == 0
    together = jaxckpt.restore(tmp_path / "a", tied=True)
    require_equal(together, tree)
    assert together["embed"] is together["head"]
    assert together["embed"] is not together["alike"]
    assert together["host"][0] is together["host"][1]
    assert together["keys"][0] is together["keys"][1]
    assert jaxckpt.verify(tmp_path / "a").ok
    assert jaxckpt.open(tmp_path / "a")["head"][1, 2] == 10


def test_tied_leaves_are_one_array_only_if_their_targets_are_equal(tmp_path: Path) -> None:
    tree = tied_tree()
    jaxckpt.save(tmp_path / "a", tree)
    mesh = jax.make_mesh((2,), ("y",))
    target = {"embed": NamedSharding(mesh, P("y")), "head": NamedSharding(mesh, P(None, "y"))}
    found = jaxckpt.restore(tmp_path / "a", target, select=["embed", "head"], tied=True)
    assert [leaf.sharding.spec for leaf in found.values()] == [P("y"), P(None, "y")]
    require_equal(found, {"embed": tree["embed"], "head": tree["head"]})
    found = jaxckpt.restore(tmp_path / "a", {"head": tree["head"]}, select="head", tied=True)
    require_equal(found, {"head": tree["head"]})


def test_every_reader_returns_both(tmp_path: Path) -> None:
    tree = tied_tree()
    del tree["keys"]  # other formats cannot store it
    jaxckpt.save(tmp_path / "a", tree)
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", mesh={"x": 2})
    jaxckpt.convert(tmp_path / "a", tmp_path / "c", select=["head", "alike"])
    jaxckpt.convert(tmp_path / "a", tmp_path / "d.npz", select=["head", "embed"])
    assert jaxckpt.diff(tmp_path / "a", tmp_path / "b").identical
    again = jaxckpt.restore(tmp_path / "b", mesh=jax.make_mesh((2,), ("x",)), tied=True)
    assert again["embed"] is again["head"]
    for other, names in (("c", ["head", "alike"]), ("d.npz", ["head", "embed"])):
        require_equal(jaxckpt.load_numpy(tmp_path / other), {name: tree[name] for name in names})
    plan = jaxckpt.open(tmp_path / "a").plan(mesh={"x": 2})
    assert {leaf.path for leaf in plan.leaves} >= {"embed", "head", "alike"}


@pytest.mark.one_device
def test_damage_is_reported_for_both(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"embed": (w := jnp.arange(9.0)), "head": w})
    (victim,) = (tmp_path / "a").glob("data-*/*/c/0/0")
    victim.write_bytes(bytes(victim.stat().st_size))
    report = jaxckpt.verify(tmp_path / "a")
    assert {problem.leaf for problem in report.problems} == {"embed", "head"}


@pytest.mark.one_device
def test_droppable_subtrees_are_not_tied_to_other_leaves(tmp_path: Path) -> None:
    w = jnp.arange(9.0)
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last_of={"opt": 1}) as run:
        for step in range(2):
            run.save(step, {"params": {"w": w, "v": w}, "opt": {"w": w}})
    found = jaxckpt.load_numpy(tmp_path / "run@0")
    require_equal(found, {"params": {"w": w, "v": w}})
    assert jaxckpt.verify(tmp_path / "run").ok


@pytest.mark.one_device
def test_a_checkpointer_notices_which_leaves_are_one(tmp_path: Path) -> None:
    """Trees with equal shapes share a description, but not if different leaves are one array."""
    a, b = jnp.zeros(4), jnp.ones(4)
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        trees = [{"x": a, "y": b}, {"x": a, "y": a}, {"x": a, "y": b}, {"x": b, "y": b}]
        for step, tree in enumerate(trees):
            run.save(step, tree)
        for step, tree in enumerate(trees):
            require_equal(run.restore(step), tree)


@pytest.mark.one_device
def test_the_number_of_leaves_per_row_is_limited(tmp_path: Path) -> None:
    w = jnp.ones(3)
    jaxckpt.save(tmp_path / "a", [w] * (2 * MAX_TIED + 1))
    manifest, _ = load_manifest(store_at(tmp_path / "a", jaxckpt.Options()))
    assert manifest.stacks[0].rows == 3
    forged = msgspec.structs.replace(
        manifest, leaves=[msgspec.structs.replace(leaf, row=max(1, leaf.row or 0)) for leaf in manifest.leaves]
    )
    with pytest.raises(jaxckpt.errors.InputError, match="shares its row with"):
        _manifest.encode(forged)


@pytest.mark.one_device
def test_tied_leaves_stay_tied_in_a_conversion_of_some_leaves(tmp_path: Path) -> None:
    w = jnp.arange(9.0)
    jaxckpt.save(tmp_path / "a", {"embed": w, "head": w, "other": jnp.ones((2, 2))})
    jaxckpt.convert(tmp_path / "a", tmp_path / "b", select=["embed", "head"])
    assert jaxckpt.open(tmp_path / "b").nbytes == w.nbytes
    found = jaxckpt.restore(tmp_path / "b", tied=True)
    assert found["embed"] is found["head"]
