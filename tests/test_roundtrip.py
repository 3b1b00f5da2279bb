"""The main guarantee: a restore returns exactly the saved bits, on any mesh."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
import strategies
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from strategies import bits, fitting, meshes, raw, shape_of, shardings

import jaxckpt
from jaxckpt._model import manifest as _manifest
from jaxckpt._model import stacks as _plan
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._restore import placement as _destinations
from jaxckpt._restore import wants as _wants
from jaxckpt._save import staging as _staging
from jaxckpt._save import write_plan as _save_plan

QUICK = jaxckpt.Options(sync=False)
OPTIONS = [
    jaxckpt.Options(),
    jaxckpt.Options(chunk_bytes=64, object_bytes=256, sync=False),
    jaxckpt.Options(chunk_bytes=16, object_bytes=1024, host_bytes=512, sync=False),
    jaxckpt.Options(chunk_bytes=128, compression="zstd", sync=False),
    jaxckpt.Options(chunk_bytes=128, compression="blosc", sync=False),
]
SIZES = [
    {},
    {"whole": 0},
    {"whole": 0, "callback": 0},
    {"whole": 0, "pack": 1, "tiny": 1},
    {"pack": 300, "tiny": 40},
    {"passing": 1},
    {"passing": 1, "whole": 0, "pack": 1, "tiny": 1},
    {"stacked": 1},
]
"""Thresholds in bytes at which leaves count as large, so low that small leaves take the code paths of large ones.

With "passing", CPU devices are filled like accelerators: from buffers that are then freed, and large leaves in parts.
With "stacked", a jitted call stacks even a few leaves. With "callback", pieces are placed one by one, as in huge jobs.
"""


@contextlib.contextmanager
def with_sizes(sizes: dict[str, int]) -> Iterator[None]:
    pack = sizes.get("pack", _plan.PACK_BELOW_BYTES)
    with (
        mock.patch.multiple(_plan, PACK_BELOW_BYTES=pack, TINY_BYTES=sizes.get("tiny", _plan.TINY_BYTES)),
        mock.patch.multiple(_save_plan, PACK_BELOW_BYTES=pack, SHARED_BYTES=sizes.get("pack", _save_plan.SHARED_BYTES)),
        mock.patch.multiple(
            _staging,
            STACK_PIECES=sizes.get("stacked", _staging.STACK_PIECES),
            STACK_ROWS=4 if "stacked" in sizes else _staging.STACK_ROWS,
        ),
        mock.patch.multiple(
            _wants,
            WHOLE_BYTES=sizes.get("whole", _wants.WHOLE_BYTES),
            can_keep_buffers=(lambda abstract: not abstract.on_devices)
            if sizes.get("passing")
            else _wants.can_keep_buffers,
        ),
        mock.patch.multiple(_destinations, CALLBACK_DEVICES=sizes.get("callback", _destinations.CALLBACK_DEVICES)),
    ):
        yield


def assert_same(got: Any, expected: Any) -> None:
    assert shape_of(got) == shape_of(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        assert raw(one) == raw(other)


def assert_pieces(array: jax.Array, expected: np.ndarray[Any, Any]) -> None:
    """Check the piece on every device, including replicas, which a comparison of the whole array would not cover."""
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes()


# Any tree, any mesh ---------------------------------------------------------------------------------------


def engines(draw: st.DrawFn) -> tuple[jaxckpt.Options, jaxckpt.Options]:
    """Options of a save and of a restore: each engine reads what the other wrote."""
    options, engine = draw(st.sampled_from(OPTIONS)), st.sampled_from(["auto", "tensorstore"])
    return replace(options, io=draw(engine)), replace(options, io=draw(engine))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Mesh, Any, tuple[jaxckpt.Options, jaxckpt.Options], dict[str, int]]:
    """(tree, another mesh, the tree as a target with other shardings, options, thresholds of large leaves)."""
    on = draw(strategies.mesh_sets())
    tree = draw(strategies.trees(on))
    other = draw(meshes())

    def target(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=draw(shardings(leaf.shape, [other, *on])))

    return tree, other, jax.tree.map(target, tree), engines(draw), draw(st.sampled_from(SIZES))


def on_other_mesh(leaf: jax.Array, other: Mesh) -> NamedSharding:
    """The saved spec on another mesh, without missing axes and without axes that do not divide a dimension."""
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else P()
    entries: list[Any] = []
    for length, entry in zip(leaf.shape, spec, strict=False):
        axes = tuple(axis for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis in other.axis_names)
        entries.append(axes if axes and length % math.prod(other.shape[axis] for axis in axes) == 0 else None)
    return NamedSharding(other, P(*entries))


def shares_no_axis(tree: Any, other: Mesh) -> bool:
    """Whether leaves are split only over axes that the other mesh lacks."""
    on_devices = [leaf.sharding for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    specs = [sharding.spec for sharding in on_devices if isinstance(sharding, NamedSharding)]
    named = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return other.size > 1 and bool(named - {None}) and not named & set(other.axis_names)


@given(cases())
def test_every_tree_comes_back_bit_for_bit(
    case: tuple[Any, Mesh, Any, tuple[jaxckpt.Options, jaxckpt.Options], dict[str, int]],
) -> None:
    tree, other, target, (saving, options), sizes = case
    with tempfile.TemporaryDirectory() as folder, with_sizes(sizes):
        path = Path(folder, "ckpt")
        info = jaxckpt.save(path, tree, options=saving)
        assert info.leaves == len(jax.tree.leaves(tree))

        as_saved = jaxckpt.restore(path, options=options)
        assert_same(as_saved, tree)
        for one, saved in zip(jax.tree.leaves(as_saved), jax.tree.leaves(tree), strict=True):
            if isinstance(saved, jax.Array):
                assert one.sharding == saved.sharding
                assert one.committed == saved.committed

        targeted = jaxckpt.restore(path, target, options=options)
        assert_same(targeted, tree)
        assert jax.tree.structure(targeted) == jax.tree.structure(tree)
        for one, wanted in zip(jax.tree.leaves(targeted), jax.tree.leaves(target), strict=True):
            assert not isinstance(wanted, jax.ShapeDtypeStruct) or one.sharding == wanted.sharding

        carried = jaxckpt.Options(indivisible="replicate", io=options.io)
        if shares_no_axis(tree, other):
            with pytest.raises(jaxckpt.errors.SpecError, match="none of the axes"):
                jaxckpt.restore(path, mesh=other, options=carried)
        else:
            moved = jaxckpt.restore(path, mesh=other, options=carried)
            assert_same(moved, tree)
            for one, saved in zip(jax.tree.leaves(moved), jax.tree.leaves(tree), strict=True):
                if isinstance(saved, jax.Array):
                    assert one.sharding.is_equivalent_to(on_other_mesh(saved, other), saved.ndim)

        on_host = jaxckpt.load_numpy(path, options=options)
        assert shape_of(on_host) == shape_of(tree)
        for one, saved in zip(jax.tree.leaves(on_host), jax.tree.leaves(tree), strict=True):
            assert not isinstance(one, jax.Array)
            key = raw(saved)
            assert one.tobytes() == key[-1] if key[0] == "key" else raw(one) == key


@given(st.data())
def test_any_mesh_to_any_mesh(data: st.DataObject) -> None:
    """One leaf with many chunks and objects, every pair of layouts; the piece of each device is checked."""
    before, after = data.draw(meshes()), data.draw(meshes())
    shape = data.draw(st.sampled_from([(48, 24), (24, 48, 2), (120,), (24, 7, 24), (40, 30)]))
    dtype = DTYPES[data.draw(st.sampled_from(["int32", "bfloat16", "int4", "bool", "complex64", "float8_e5m2"]))]
    array = bits(dtype, shape, data.draw(st.integers(0, 99)))
    saved = jax.device_put(array, NamedSharding(before, fitting(data.draw, before, shape)))
    wanted = NamedSharding(after, fitting(data.draw, after, shape))
    saving, options = engines(data.draw)
    sizes = data.draw(st.sampled_from(SIZES))
    with tempfile.TemporaryDirectory() as folder, with_sizes(sizes):
        jaxckpt.save(f"{folder}/ckpt", saved, options=saving)
        restored = jaxckpt.restore(f"{folder}/ckpt", wanted, options=options)
        assert restored.sharding == wanted
        assert_pieces(restored, array)


@settings(max_examples=20)
@given(st.data())
def test_a_stored_layout_does_not_change_values(data: st.DataObject) -> None:
    on, other = [data.draw(meshes())], data.draw(meshes())
    shapes = data.draw(st.lists(st.sampled_from([(24, 8), (8,), (30, 7), ()]), min_size=1, max_size=4))
    arrays = [bits(np.dtype("float32"), shape, number) for number, shape in enumerate(shapes)]
    tree = [jax.device_put(array, data.draw(shardings(array.shape, on))) for array in arrays]
    specs = [fitting(data.draw, other, shape) for shape in shapes]
    saving, options = engines(data.draw)
    sizes = data.draw(st.sampled_from(SIZES))
    with tempfile.TemporaryDirectory() as folder, with_sizes(sizes):
        jaxckpt.save(f"{folder}/ckpt", tree, mesh=other, specs=specs, options=saving)
        restored = jaxckpt.restore(f"{folder}/ckpt", options=options)
        for one, array, spec in zip(restored, arrays, specs, strict=True):
            assert one.sharding == NamedSharding(other, spec)
            assert_pieces(one, array)
        for one, array in zip(jaxckpt.load_numpy(f"{folder}/ckpt", options=options), arrays, strict=True):
            assert raw(one) == raw(array)


@settings(max_examples=15)
@given(st.data())
def test_64_bits_come_back_if_x64_is_enabled(data: st.DataObject) -> None:
    mesh = data.draw(meshes())
    with jax.enable_x64(True), tempfile.TemporaryDirectory() as folder:
        arrays = {name: bits(DTYPES[name], (24, 5), 3) for name in strategies.WIDE_DTYPES}
        tree = {
            name: jax.device_put(array, data.draw(shardings(array.shape, [mesh]))) for name, array in arrays.items()
        }
        jaxckpt.save(f"{folder}/ckpt", tree, options=QUICK)
        restored = jaxckpt.restore(f"{folder}/ckpt")
        assert_same(restored, tree)
        for name, array in arrays.items():
            assert restored[name].dtype.name == name
            assert_pieces(restored[name], array)
        moved = jaxckpt.restore(f"{folder}/ckpt", mesh=mesh, specs=P())
        assert_same(moved, tree)


@pytest.mark.one_device
@pytest.mark.parametrize("by", [("auto", "auto"), ("auto", "tensorstore"), ("tensorstore", "auto")], ids="-".join)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_pattern_of_every_dtype_comes_back(name: str, by: tuple[Any, Any], tmp_path: Path) -> None:
    saving, options = (replace(QUICK, io=io) for io in by)
    dtype = DTYPES[name]
    if dtype.itemsize == 1 and name.startswith(("float8", "int8", "uint8")):
        array = np.arange(256, dtype=np.uint8).view(dtype)
    elif dtype.itemsize == 2:
        array = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    else:
        array = bits(dtype, (4096,), 1)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    with jax.enable_x64(name in strategies.WIDE_DTYPES):
        tree = {"host": array, "split": jax.device_put(array, NamedSharding(mesh, P("x")))}
        jaxckpt.save(tmp_path / "c", tree, options=saving)
        assert_same(jaxckpt.restore(tmp_path / "c", options=options), tree)
        assert_pieces(jaxckpt.restore(tmp_path / "c", mesh=mesh, options=options)["split"], array)
    assert raw(jaxckpt.load_numpy(tmp_path / "c", options=options)["split"]) == raw(array)


# Large leaves ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F", "reversed", "broadcast", "big-endian", "read-only"])
def test_large_host_arrays_come_back_with_any_strides(order: str, tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((1024, 1500), np.float32)
    given = {
        "C": array,
        "F": np.asfortranarray(array),
        "reversed": array[::-1, ::2],
        "broadcast": np.broadcast_to(array[0], (1024, 1500)),
        "big-endian": array.astype(">f4"),
        "read-only": array.copy(),
    }[order]
    given.flags.writeable = order != "read-only"
    assert given.nbytes >= _plan.PACK_BELOW_BYTES or order == "reversed"
    jaxckpt.save(tmp_path / "c", {"x": given, "small": given[:3, :5]}, options=QUICK)
    restored = jaxckpt.restore(tmp_path / "c")
    np.testing.assert_array_equal(restored["x"], given)
    np.testing.assert_array_equal(restored["small"], given[:3, :5])
    assert restored["x"].dtype == np.float32
    assert restored["x"].flags.writeable


def test_restored_host_arrays_are_independent(tmp_path: Path) -> None:
    """Leaves of one stack share one buffer, but writing to one leaf changes no other."""
    jaxckpt.save(tmp_path / "c", [np.full(100, i) for i in range(5)], options=QUICK)
    restored = jaxckpt.restore(tmp_path / "c")
    restored[2][:] = -1
    assert [set(leaf.tolist()) for leaf in restored] == [{0}, {1}, {-1}, {3}, {4}]
    assert set(jaxckpt.load_numpy(tmp_path / "c")[2].tolist()) == {2}


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model"), P("data", "model")], ids=str)
def test_restored_weights_can_be_donated_to_a_step(spec: P, tmp_path: Path) -> None:
    """JAX adopts buffers without a copy, one for all replicas. A donated buffer must not be overwritten in place."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    value = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    tree = {"w": jax.device_put(value, NamedSharding(mesh, spec)), "small": jnp.ones(3)}
    jaxckpt.save(tmp_path / "c", tree, options=QUICK)
    kept = jaxckpt.restore(tmp_path / "c")
    state = jaxckpt.restore(tmp_path / "c")
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    for _ in range(3):
        state = step(state)
    assert_pieces(state["w"], value + 3)
    assert_pieces(kept["w"], value)
    assert_pieces(jaxckpt.restore(tmp_path / "c")["w"], value)
    assert state["small"].tolist() == [4, 4, 4]


# Placement ------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.mark.one_device
def test_uncommitted_arrays_come_back_uncommitted_and_mix_with_any_device(tmp_path: Path) -> None:
    device = jax.devices()[3 % len(jax.devices())]
    jaxckpt.save(tmp_path / "c", {"free": jnp.ones(3), "bound": jax.device_put(jnp.ones(3), device)})
    restored = jaxckpt.restore(tmp_path / "c")
    assert not restored["free"].committed
    assert restored["bound"].committed
    assert (restored["free"] + restored["bound"]).devices() == {device}


@pytest.mark.parametrize("types", ["Auto", "Explicit", "mixed"])
def test_axis_types_come_back(types: str, tmp_path: Path) -> None:
    kinds = jax.sharding.AxisType
    chosen = {"Auto": (kinds.Auto,) * 2, "Explicit": (kinds.Explicit,) * 2, "mixed": (kinds.Explicit, kinds.Auto)}
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=chosen[types])
    array = jax.device_put(np.ones((4, 8)), NamedSharding(mesh, P("a", None)))
    jaxckpt.save(tmp_path / "c", array)
    restored = jaxckpt.restore(tmp_path / "c")
    assert restored.sharding == array.sharding
    assert restored.sharding.mesh.axis_types == chosen[types]
    assert jax.typeof(restored) == jax.typeof(array)


def test_memory_kinds_come_back(mesh: Mesh, tmp_path: Path) -> None:
    sharding = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    jaxckpt.save(tmp_path / "c", jax.device_put(np.ones((4, 8)), sharding))
    assert jaxckpt.restore(tmp_path / "c").sharding.memory_kind == "pinned_host"


def test_a_deleted_array_can_be_a_target(mesh: Mesh, tmp_path: Path) -> None:
    """The old state can still be a target after a step has donated it."""
    state = {"w": jax.device_put(np.ones((4, 8)), NamedSharding(mesh, P("data"))), "n": jnp.int32(3)}
    jaxckpt.save(tmp_path / "c", state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jax.tree.map(lambda leaf: leaf.delete(), state)
    restored = jaxckpt.restore(tmp_path / "c", state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == shardings
    assert restored["n"] == 3


def test_a_struct_without_a_sharding_uses_the_saved_layout_or_the_mesh(mesh: Mesh, tmp_path: Path) -> None:
    saved = NamedSharding(mesh, P("data", "model"))
    jaxckpt.save(tmp_path / "c", {"w": jax.device_put(np.ones((4, 8)), saved)})
    target = {"w": jax.ShapeDtypeStruct((4, 8), "float32")}
    assert jaxckpt.restore(tmp_path / "c", target)["w"].sharding == saved
    small = Mesh(np.array(jax.devices()[:2]), ("model",))
    assert jaxckpt.restore(tmp_path / "c", target, mesh=small)["w"].sharding == NamedSharding(small, P(None, "model"))
    split = jaxckpt.restore(tmp_path / "c", target, mesh=small, specs={"w": P("model")})["w"]
    assert split.sharding == NamedSharding(small, P("model"))
    free = {"w": jnp.zeros((4, 8))}
    assert not jaxckpt.restore(tmp_path / "c", free)["w"].committed, "an uncommitted array requests no device"
    assert jaxckpt.restore(tmp_path / "c", free, mesh=small)["w"].sharding == NamedSharding(small, P(None, "model"))
    one = {"w": jax.ShapeDtypeStruct((4, 8), "float32", sharding=SingleDeviceSharding(jax.devices()[7]))}
    assert jaxckpt.restore(tmp_path / "c", one, mesh=small)["w"].devices() == {jax.devices()[7]}, "target first"


SAVED_SPECS: list[tuple[Any, dict[str, P]]] = [
    (P("x"), {"layer/w": P("x"), "layer/b": P("x"), "head": P("x")}),
    ({"layer": P("x"), "head": P(None, "x")}, {"layer/w": P("x"), "layer/b": P("x"), "head": P(None, "x")}),
    ({"layer": {"w": P(None, "x")}}, {"layer/w": P(None, "x"), "layer/b": P(), "head": P(None, "x")}),
    (
        lambda path, leaf: P("x") if path.endswith("/w") and leaf.shape == (8, 8) else P(),
        {"layer/w": P("x"), "layer/b": P(), "head": P()},
    ),
    (None, {"layer/w": P(None, None), "layer/b": P(), "head": P(None, "x")}),
]


@pytest.mark.parametrize(("specs", "expected"), SAVED_SPECS)
def test_specs_may_be_one_spec_a_prefix_a_function_or_the_saved_ones(
    specs: Any, expected: dict[str, P], mesh: Mesh, tmp_path: Path
) -> None:
    tree = {
        "layer": {"w": jax.device_put(np.eye(8), NamedSharding(mesh, P("data", "model"))), "b": jnp.ones(8)},
        "head": jax.device_put(np.eye(8), NamedSharding(Mesh(np.array(jax.devices()[4:]), ("x",)), P(None, "x"))),
        "step": 3,
    }
    other = Mesh(np.array(jax.devices()[:2]), ("x",))
    jaxckpt.save(tmp_path / "stored", tree, mesh=other, specs=specs)
    jaxckpt.save(tmp_path / "plain", tree)
    for restored in (
        jaxckpt.restore(tmp_path / "stored"),
        jaxckpt.restore(tmp_path / "plain", mesh=other, specs=specs),
        jaxckpt.restore(tmp_path / "stored", jax.tree.map(abstract, tree)),
    ):
        assert_same(restored, tree)
        leaves = {"layer/w": restored["layer"]["w"], "layer/b": restored["layer"]["b"], "head": restored["head"]}
        for path, leaf in leaves.items():
            assert leaf.sharding.is_equivalent_to(NamedSharding(other, expected[path]), leaf.ndim), path


def abstract(leaf: Any) -> Any:
    """The abstract form of a leaf, without a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def test_indivisible_dimensions_are_replicated_if_requested(mesh: Mesh, tmp_path: Path) -> None:
    whole = jaxckpt.Options(indivisible="replicate")
    tree = {"odd": np.arange(21.0, dtype=np.float32).reshape(7, 3), "even": np.ones((8, 4), np.float32)}
    on_devices = jax.tree.map(jnp.asarray, tree)
    with pytest.raises(jaxckpt.errors.SpecError, match="'odd'"):
        jaxckpt.save(tmp_path / "c", on_devices, mesh=mesh, specs=P("data", "model"))
    jaxckpt.save(tmp_path / "c", on_devices, mesh=mesh, specs=P("data", "model"), options=whole)
    restored = jaxckpt.restore(tmp_path / "c")
    assert restored["odd"].sharding.is_fully_replicated
    assert restored["even"].sharding == NamedSharding(mesh, P("data", "model"))
    split = NamedSharding(Mesh(np.array(jax.devices()[:3]), ("data",)), P("data"))
    for target in (split, {"odd": split, "even": split}):
        with pytest.raises(jaxckpt.errors.SpecError, match="'even'"):
            jaxckpt.restore(tmp_path / "c", target)
        restored = jaxckpt.restore(tmp_path / "c", target, options=whole)
        assert restored["even"].sharding.is_fully_replicated
        assert restored["odd"].sharding.is_fully_replicated
        assert_pieces(restored["odd"], tree["odd"])


# A part of a tree -----------------------------------------------------------------------------------------


@pytest.mark.one_device
def test_selected_leaves_come_back_separately_or_in_the_target(tmp_path: Path) -> None:
    tree = {"params": [{"w": jnp.ones(2), "b": jnp.zeros(2)}, {"w": jnp.ones(3)}], "opt": (jnp.ones(2), 5), "step": 7}
    jaxckpt.save(tmp_path / "c", tree)
    assert_same(jaxckpt.restore(tmp_path / "c", select="step"), {"step": 7})
    assert_same(
        jaxckpt.restore(tmp_path / "c", select=["params/*/w", "opt/1"]),
        {"params": [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}], "opt": (None, 5)},
    )
    assert list(jaxckpt.load_numpy(tmp_path / "c", select="opt")) == ["opt"]
    only_params = jaxckpt.restore(tmp_path / "c", jax.tree.map(abstract, tree), select=lambda path: "params" in path)
    assert_same(only_params["params"], tree["params"])
    assert isinstance(only_params["opt"][0], jax.ShapeDtypeStruct), "unselected leaves are the target's own"
    with pytest.raises(jaxckpt.errors.TreeError, match="matches none of the 6 leaves"):
        jaxckpt.restore(tmp_path / "c", select="param")


@pytest.mark.one_device
@pytest.mark.parametrize(
    "rename",
    [{"params": "model", "params/0/w": "first"}, lambda path: "first" if path == "params/0/w" else path[3:]],
    ids=["mapping", "function"],
)
def test_renamed_leaves_come_back_under_their_new_names(rename: Any, tmp_path: Path) -> None:
    tree = {"params": [{"w": jnp.ones(2), "b": jnp.zeros(2)}]}
    jaxckpt.save(tmp_path / "c", tree)
    restored = jaxckpt.restore(tmp_path / "c", rename=rename)
    np.testing.assert_array_equal(restored.pop("first"), np.ones(2))
    (below,) = restored.values()
    np.testing.assert_array_equal(below["0"]["b"], np.zeros(2))
    target = {"first": jnp.zeros(2), next(iter(restored)): {"0": {"b": jnp.ones(2)}}}
    assert_same(jaxckpt.restore(tmp_path / "c", target, rename=rename), {"first": jnp.ones(2), **restored})


# Training states ------------------------------------------------------------------------------------------


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


def train_state() -> TrainState:
    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


@pytest.mark.one_device
@pytest.mark.parametrize(
    "make", [lambda state: jax.eval_shape(lambda: state), lambda state: state], ids=["abstract", "arrays"]
)
def test_a_flax_training_state_resumes_as_if_uninterrupted(make: Callable[[Any], Any], tmp_path: Path) -> None:
    @jax.jit
    def step(state: TrainState) -> TrainState:
        loss = lambda params: jnp.mean((state.apply_fn({"params": params}, jnp.ones((2, 4))) - 1) ** 2)  # noqa: E731
        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    begun = train_state()
    state = step(begun)
    jaxckpt.save(tmp_path / "c", state)
    restored = jaxckpt.restore(tmp_path / "c", make(state))
    assert jax.tree.structure(restored) == jax.tree.structure(begun)
    assert_equal_leaves(restored, state)
    assert_equal_leaves(step(restored), step(state))
    without = jaxckpt.restore(tmp_path / "c")
    assert set(without) == {"step", "params", "opt_state"}, "the fields of the state, as a dict"
    assert_equal_leaves(without["params"], state.params)


def assert_equal_leaves(got: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert raw(jnp.asarray(one)) == raw(jnp.asarray(other))


METADATA = [None, {}, [], "", 0, -1.5, True, {"a": [1, {"b": None}], "é": "\u2028"}, 10**18, [[[]]]]


@pytest.mark.parametrize("metadata", METADATA, ids=repr)
def test_metadata_comes_back(metadata: Any, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {}, metadata=metadata)
    back = jaxckpt.open(tmp_path / "c").metadata
    assert back == metadata
    assert type(back) is type(metadata)


def test_a_sharding_for_the_whole_tree_does_not_affect_host_values(mesh: Mesh, tmp_path: Path) -> None:
    everywhere: Sharding = NamedSharding(mesh, P())
    tree = {
        "w": jnp.ones((4, 4)),
        "key": jax.random.key(3),
        "host": np.arange(3, dtype=np.int32),
        "n": 7,
        "s": "text",
        "b": b"x" * 9000,
    }
    jaxckpt.save(tmp_path / "c", tree)
    restored = jaxckpt.restore(tmp_path / "c", everywhere)
    assert {name: getattr(leaf, "sharding", type(leaf)) for name, leaf in restored.items()} == {
        "w": everywhere,
        "key": everywhere,
        "host": everywhere,
        "n": int,
        "s": str,
        "b": bytes,
    }
    assert raw(restored["key"]) == raw(tree["key"])
    assert restored["host"].tolist() == [0, 1, 2]
    assert restored["b"] == tree["b"]


# Weak types -----------------------------------------------------------------------------------------------


def weak(values: Any) -> jax.Array:
    """A weakly typed array with these bits."""
    found = jax.device_put(values)
    return type(found)(found.aval.update(weak_type=True), found.sharding, found._arrays, True, True)


@pytest.mark.one_device
def test_weak_types_come_back_and_compute_as_before(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    nan = np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32)  # NaN payloads, one of them signaling
    half = np.array([0x7F81, 0xFFC1], np.uint16).view(DTYPES["bfloat16"])
    tree = {
        "lr": jnp.asarray(0.5),
        "n": jnp.asarray(3),
        "nan": weak(nan),
        "half": weak(half),
        "empty": weak(np.empty((0, 2), np.float32)),
        "whole": jax.device_put(jnp.asarray(0.5), NamedSharding(mesh, P())),
        "split": jax.jit(lambda: jnp.full(8, 0.5), out_shardings=NamedSharding(mesh, P("x")))(),
        "there": jax.device_put(jnp.asarray(0.25), jax.devices()[3 % len(jax.devices())]),
        "strong": jnp.float32(0.5),
        "key": jax.random.key(0),
    }
    assert {name for name, leaf in tree.items() if name != "key" and leaf.weak_type} == {*tree} - {"strong", "key"}
    jaxckpt.save(tmp_path / "c", tree, options=QUICK)
    structs = jax.eval_shape(lambda: tree)
    for sizes in SIZES:
        with with_sizes(sizes):
            for restored in (jaxckpt.restore(tmp_path / "c"), jaxckpt.restore(tmp_path / "c", tree)):
                assert_same(restored, tree)
                assert jax.tree.map(lambda leaf: leaf.aval, restored) == jax.tree.map(lambda leaf: leaf.aval, tree)
                assert {name: leaf.sharding for name, leaf in restored.items()} == {
                    name: leaf.sharding for name, leaf in tree.items()
                }
                assert {name: leaf.committed for name, leaf in restored.items()} == {
                    name: leaf.committed for name, leaf in tree.items()
                }
    restored = jaxckpt.restore(tmp_path / "c", structs, mesh=mesh)
    assert {name for name, leaf in restored.items() if name != "key" and leaf.weak_type} == {*tree} - {"strong", "key"}
    weights = jnp.ones(4, jnp.bfloat16)
    assert jax.jit(lambda lr: lr * weights)(restored["lr"]).dtype == jnp.bfloat16
    carry, _ = jax.lax.scan(lambda lr, _: (lr * 0.5, None), restored["lr"], length=3)
    assert carry.weak_type
    donated = jax.jit(lambda lr: lr + 1, donate_argnums=0)(restored["split"])
    assert donated.sharding == tree["split"].sharding


@pytest.mark.one_device
def test_a_weak_type_follows_the_target(tmp_path: Path) -> None:
    device = SingleDeviceSharding(jax.devices()[1 % len(jax.devices())])
    jaxckpt.save(tmp_path / "c", {"weak": jnp.asarray(0.5), "strong": jnp.float32(0.5), "number": 0.5})

    def restored(target: Any) -> list[bool]:
        found = jaxckpt.restore(tmp_path / "c", dict.fromkeys(("weak", "strong", "number"), target))
        return [leaf.weak_type for leaf in found.values() if isinstance(leaf, jax.Array)]

    assert restored(jax.ShapeDtypeStruct((), "float32")) == [False] * 3
    assert restored(jax.ShapeDtypeStruct((), "float32", weak_type=True, sharding=device)) == [True] * 3
    assert restored(jnp.float32(0)) == [False] * 3
    assert restored(jnp.asarray(0.0)) == [True] * 3
    assert restored(device) == [False, True]  # ordered by name


@pytest.mark.one_device
def test_only_weak_types_are_recorded(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"weak": jnp.asarray(0.5), "strong": jnp.float32(0.5)})
    leaves = json.loads((tmp_path / "c" / "manifest.json").read_text())["leaves"]
    assert [leaf.get("weak") for leaf in leaves] == [None, True]
    jaxckpt.convert(tmp_path / "c", tmp_path / "d")
    assert jaxckpt.restore(tmp_path / "d")["weak"].weak_type


@pytest.mark.one_device
def test_an_invalid_weak_type_is_refused(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"number": 1, "host": np.ones(3), "key": jax.random.key(0)})
    manifest = _manifest.decode((tmp_path / "c" / "manifest.json").read_bytes(), "c")
    for number, leaf in enumerate(manifest.leaves):
        leaves = [*manifest.leaves]
        leaves[number] = msgspec.structs.replace(leaf, weak=True)
        with pytest.raises(
            jaxckpt.errors.InputError, match=f"no reader would accept .*\n.*leaf '{leaf.path}' .*weak type"
        ):
            _manifest.encode(msgspec.structs.replace(manifest, leaves=leaves))


def test_an_object_is_not_smaller_than_a_chunk(tmp_path: Path) -> None:
    """Otherwise each element would be a file."""
    options = jaxckpt.Options(host_bytes=1, sync=False)
    info = jaxckpt.save(tmp_path / "c", {"w": np.arange(3000.0)}, options=options)
    assert info.objects == 1
    assert jaxckpt.restore(tmp_path / "c", options=options)["w"][-1] == 2999
