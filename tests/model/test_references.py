"""jax.Ref, and Variables of Flax NNX that hold one or that JAX treats as leaves: their value is what is stored."""

from __future__ import annotations

import functools
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._store.files import FileWriter


def values(tree: Any) -> list[Any]:
    """The arrays of every leaf, as NumPy arrays."""
    found: list[Any] = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        if isinstance(leaf, nnx.Variable):
            found += values(leaf.get_value())
            continue
        array = leaf[...] if isinstance(leaf, jax.Ref) else leaf
        is_key = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        found.append(np.array(jax.random.key_data(array) if is_key else array))
    return found


def require_equal(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def references(mesh: Mesh) -> dict[str, Any]:
    return {
        "w": jax.new_ref(jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))),
        "count": jax.new_ref(jnp.int32(3)),
        "key": jax.new_ref(jax.random.key(0)),
        "weak": jax.new_ref(jnp.asarray(0.5)),
        "array": jnp.ones(3),
    }


def test_a_reference_is_stored_as_its_array(tmp_path: Path, mesh: Mesh) -> None:
    tree = references(mesh)
    jaxckpt.save(tmp_path / "a", tree)
    restored = jaxckpt.restore(tmp_path / "a")
    assert all(isinstance(leaf, jax.Array) for leaf in restored.values())
    assert restored["w"].sharding == tree["w"].sharding
    require_equal(values(restored), values(tree))


def test_the_target_decides_whether_a_leaf_is_a_reference(tmp_path: Path, mesh: Mesh) -> None:
    tree = references(mesh)
    arrays = {name: leaf[...] if isinstance(leaf, jax.Ref) else leaf for name, leaf in tree.items()}
    jaxckpt.save(tmp_path / "references", tree)
    jaxckpt.save(tmp_path / "arrays", arrays)
    for name in ("references", "arrays"):
        for target in (tree, arrays):
            restored = jaxckpt.restore(tmp_path / name, target)
            assert jax.tree.map(type, restored) == jax.tree.map(type, target)
            assert restored["w"].sharding == tree["w"].sharding
            assert restored["weak"][...].weak_type
            require_equal(values(restored), values(tree))
    tree["w"][...] = jnp.zeros(8)
    assert values(jaxckpt.restore(tmp_path / "arrays", tree))[-2][5] == 5, "the restored reference is a new one"
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32, is_ref=True)
    found = jaxckpt.restore(tmp_path / "arrays", {"w": abstract}, strict=False)["w"]
    assert isinstance(found, jax.Ref)
    with pytest.raises(jaxckpt.MismatchError, match=r"'count' has shape \(\) in the checkpoint, \(2,\) in the target"):
        jaxckpt.restore(tmp_path / "arrays", tree | {"count": jax.new_ref(jnp.zeros(2))})
    kept = jaxckpt.restore(tmp_path / "arrays", tree | {"more": tree["w"]}, strict=False)
    assert kept["more"] is tree["w"]


@pytest.mark.parametrize("committed", [True, False])
def test_neither_the_callers_mesh_nor_checks_for_nan_matter(tmp_path: Path, mesh: Mesh, committed: bool) -> None:
    array = jnp.array([1.0, jnp.nan, jnp.inf])
    tree = {"w": jax.new_ref(jax.device_put(array, jax.devices()[1]) if committed else array), "other": jnp.ones(3)}
    with jax.set_mesh(mesh), jax.debug_nans(True), jax.debug_infs(True):
        jaxckpt.save(tmp_path / "a", tree)
        restored = jaxckpt.restore(tmp_path / "a", tree)
    assert isinstance(restored["w"], jax.Ref)
    assert repr(jaxckpt.open(tmp_path / "a")["w"]).endswith(f"device {1 if committed else 0}>")
    require_equal(values(restored), values(tree))
    assert restored["w"].sharding == tree["w"].sharding


def test_init_makes_no_reference_that_lives_during_the_restore(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"w": jnp.arange(3.0), "n": jax.new_ref(jnp.int32(4))})
    made: list[weakref.ref[Any]] = []

    def init() -> Any:
        tree = {"w": jax.new_ref(jnp.zeros(3)), "n": jax.new_ref(jnp.int32(0)), "new": jax.new_ref(jnp.ones(2))}
        made.append(weakref.ref(tree["w"]))
        return tree

    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        step, restored = run.restore_or_init(init, strict={"new": False})
        assert step == 1
    assert made[0]() is None
    require_equal(values(restored), [np.int32(4), np.ones(2), np.arange(3)])
    assert all(isinstance(leaf, jax.Ref) for leaf in restored.values())


def test_specs_casts_and_ties_of_references(tmp_path: Path, mesh: Mesh) -> None:
    reference = jax.new_ref(jnp.arange(8.0))
    tree = {"a": reference, "b": reference}
    info = jaxckpt.save(tmp_path / "a", tree, mesh=mesh, specs=P("x"), dtype=jnp.bfloat16)
    assert info.total_bytes == 16, "one array at two paths is stored once"
    restored = jaxckpt.restore(tmp_path / "a", tree, mesh=mesh)
    require_equal(values(restored), [np.arange(8)] * 2)


@pytest.mark.parametrize("reuse", ["auto", "identity", "content"])
def test_save_async_stores_the_value_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> None:
    opened, write = threading.Event(), FileWriter.write
    monkeypatch.setattr(FileWriter, "write", lambda *args: opened.wait(60) and write(*args))
    reference = jax.new_ref(jnp.zeros(100_000))

    @jax.jit
    def step(reference: Any) -> None:
        reference[...] += 1

    with jaxckpt.Checkpointer(tmp_path / "run", options=jaxckpt.Options(reuse=reuse)) as run:
        for number in range(3):
            opened.clear()
            run.save(number, {"w": reference})
            step(reference)
            opened.set()
            run.wait()
    for number in range(3):
        assert (jaxckpt.load_numpy(f"{tmp_path}/run@{number}")["w"] == number).all()


def test_a_freed_reference_is_an_error(tmp_path: Path) -> None:
    reference = jax.new_ref(jnp.zeros(3))
    reference._refs._buf.delete()
    with pytest.raises(jaxckpt.errors.TreeError, match=r"the jax\.Ref at 'w' cannot be read: "):
        jaxckpt.save(tmp_path / "a", {"w": reference})


def test_a_target_inside_shard_map_is_refused(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": jnp.zeros(3)})
    if hasattr(jax.sharding, "ManualAxisType"):
        inside: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=frozenset({"x"}))}
    else:
        inside = {"vma": frozenset({"x"})}
    with pytest.raises(jaxckpt.MismatchError, match=r"an array inside shard_map \(manual mesh axes x\)"):
        jaxckpt.restore(tmp_path / "a", {"w": jax.ShapeDtypeStruct((3,), jnp.float32, **inside)})


# Flax NNX -------------------------------------------------------------------------------------------------


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, holds_trees: bool = True) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        if holds_trees:
            self.tree = nnx.Param({"x": jnp.ones(2), "y": [jnp.zeros(3)]})
            self.none = nnx.Variable(None)


FORMS: list[dict[str, bool]] = [{}, {"ref": True}, {"hijax": True}, {"hijax": True, "ref": True}]


def network(seed: int, form: dict[str, bool]) -> Network:
    with nnx.var_defaults(**{"ref": False, **form}):
        return Network(nnx.Rngs(seed), holds_trees="ref" not in form)  # a reference holds one array


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_variable_of_every_form_is_a_leaf(tmp_path: Path, form: Any) -> None:
    module = network(0, form)
    plain = Network(nnx.Rngs(0), holds_trees="ref" not in form)
    jaxckpt.save(tmp_path / "module", module)
    jaxckpt.save(tmp_path / "state", nnx.state(module))
    jaxckpt.save(tmp_path / "plain", plain)
    for name in ("module", "state", "plain"):
        assert list(jaxckpt.open(tmp_path / name)) == list(jaxckpt.open(tmp_path / "plain"))
        for target in (network(1, form), nnx.state(network(1, form))):
            restored = jaxckpt.restore(tmp_path / name, target)
            assert type(restored) is type(target)
            found, wanted = jax.tree.leaves(restored), jax.tree.leaves(module)
            assert [*map(type, found)] == [*map(type, wanted)]
            require_equal(values(restored), values(module))
    if form != {"hijax": True, "ref": True}:  # which Flax itself cannot update
        fresh = network(2, form)
        nnx.update(fresh, jaxckpt.restore(tmp_path / "module", nnx.state(network(1, form))))
        require_equal(values(fresh), values(module))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_run_starts_and_resumes_with_variables_of_every_form(tmp_path: Path, form: Any) -> None:
    def initial(seed: int) -> Any:
        return nnx.state(network(seed, form))

    for step in range(3):
        with jaxckpt.Checkpointer(tmp_path / "run") as run:
            found, state = run.restore_or_init(functools.partial(initial, step))
            assert found == (step - 1 if step else None)
            run.save(step, state)
    require_equal(values(state), values(network(0, form)))
    with jaxckpt.Checkpointer(tmp_path / "run") as run:  # a state with more leaves than the checkpoint
        _, grown = run.restore_or_init(
            lambda: {"more": nnx.state(network(1, form)), **dict(nnx.state(network(1, form)))}, strict=False
        )
    more = grown.pop("more")
    require_equal(values(more), values(network(1, form)))
    require_equal(values(grown), values(network(0, form)))


def test_a_target_without_data_has_variables_of_hijax(tmp_path: Path) -> None:
    module = network(0, {"hijax": True})
    jaxckpt.save(tmp_path / "a", module)
    restored = jaxckpt.restore(tmp_path / "a", nnx.eval_shape(lambda: network(1, {"hijax": True})))
    require_equal(values(restored), values(module))
    assert restored.layers[0].kernel.hijax
    if hasattr(jax.experimental, "cur_qdd"):
        target = jax.eval_shape(lambda: nnx.state(network(1, {"hijax": True})))
        with pytest.raises(jaxckpt.MismatchError, match=r"(?s)is an AbstractVariable in the target.*nnx\.eval_shape"):
            jaxckpt.restore(tmp_path / "a", target)
