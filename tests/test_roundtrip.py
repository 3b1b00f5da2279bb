"""The promise: what is restored is what was saved, bit for bit, on whatever mesh."""

from __future__ import annotations

import collections
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._tree import DTYPES

# Trees of every kind --------------------------------------------------------------------------------------

MESHES = [
    ((8,), ("a",)),
    ((2, 4), ("a", "b")),
    ((4, 2), ("b", "a")),
    ((3, 2), ("a", "b")),
    ((1,), ("b",)),
    ((2, 2, 2), ("a", "b", "c")),
]
DEVICE_DTYPES = [name for name in DTYPES if name not in ("int64", "uint64", "float64", "complex128")]
KEY_IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


class Pair(NamedTuple):
    left: Any
    right: Any


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape, names = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(range(8)))[: math.prod(shape)]
    types = draw(st.sampled_from([jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]))
    devices = np.array([jax.devices()[number] for number in order]).reshape(shape)
    return Mesh(devices, names, axis_types=(types,) * len(names))


def fitting(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """Some spec that an array of this shape can have on a mesh."""
    left = list(draw(st.permutations(mesh.axis_names)))
    entries: list[Any] = []
    for length in shape:
        axes = left[: draw(st.integers(0, len(left)))]
        if axes and length % math.prod(mesh.shape[axis] for axis in axes) == 0:
            entries.append(tuple(axes) if len(axes) > 1 else axes[0])
            left = left[len(axes) :]
        else:
            entries.append(None)
    return P(*entries)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], on: list[Mesh]) -> Sharding:
    if draw(st.integers(0, 5)) == 0:
        return SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
    mesh = draw(st.sampled_from(on))
    return NamedSharding(mesh, fitting(draw, mesh, shape))


shapes = st.one_of(
    st.just(()),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 12, 13, 24]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(48, 24), (97,), (8, 8), (24, 8, 4)]),
)


def bits(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bits of a dtype: NaN payloads, subnormals, negative zeros; but valid ones of bool and of narrow types."""
    random = np.random.default_rng(seed)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        low, high = {"int2": (-2, 2), "int4": (-8, 8), "uint2": (0, 4), "uint4": (0, 16)}.get(dtype.name, (-2, 3))
        return random.integers(low, high, shape).astype(dtype)
    raw = np.frombuffer(random.bytes(max(1, math.prod(shape)) * dtype.itemsize), dtype)
    return raw[: math.prod(shape)].reshape(shape).copy()


@st.composite
def leaves(draw: st.DrawFn, on: list[Mesh]) -> Any:
    kind = draw(st.sampled_from(["jax"] * 6 + ["uncommitted", "numpy", "numpy", "scalar", "python", "key", "none"]))
    shape, seed = draw(shapes), draw(st.integers(0, 1 << 30))
    match kind:
        case "jax":
            dtype = DTYPES[draw(st.sampled_from(DEVICE_DTYPES))]
            return jax.device_put(bits(dtype, shape, seed), draw(shardings(shape, on)))
        case "uncommitted":
            return jnp.asarray(bits(np.dtype("float32"), shape, seed))
        case "numpy":
            return bits(DTYPES[draw(st.sampled_from(list(DTYPES)))], shape, seed)
        case "scalar":
            return bits(DTYPES[draw(st.sampled_from(list(DTYPES)))], (), seed)[()]
        case "key":
            shape = draw(st.sampled_from([(), (8,), (2, 4)]))
            keys = jax.random.split(jax.random.key(seed, impl=draw(st.sampled_from(KEY_IMPLS))), shape)
            return jax.device_put(keys, draw(shardings(shape, on)))
        case "none":
            return None
        case _:
            return draw(
                st.one_of(
                    st.integers(), st.booleans(), st.floats(), st.text(max_size=9), st.binary(max_size=9),
                    st.complex_numbers(), st.sampled_from(["é" * 3000, b"\x00\xff" * 3000, "\ud800", 1 << 200, -0.0]),
                )
            )  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, on: list[Mesh]) -> Any:
    keys = st.one_of(st.sampled_from(["w", "a/b", "a.b", "~", "", "..", "/abs"]), st.text(max_size=4))
    return draw(
        st.recursive(
            leaves(on),
            lambda below: st.one_of(
                st.dictionaries(keys, below, max_size=4),
                st.dictionaries(st.integers(-3, 9), below, max_size=3),
                st.dictionaries(st.tuples(st.integers(0, 2), st.text(max_size=2)), below, max_size=2),
                st.lists(below, max_size=4),
                st.lists(below, max_size=3).map(tuple),
                st.builds(Pair, below, below),
                st.dictionaries(keys, below, max_size=2).map(collections.OrderedDict),
            ),
            max_leaves=10,
        )
    )


# Equality to the bit --------------------------------------------------------------------------------------


def raw(leaf: Any) -> tuple[Any, ...]:
    """All that must be equal of a leaf's value."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, (float, complex)):
        return type(leaf).__name__, np.asarray(leaf).tobytes()
    return type(leaf).__name__, leaf


def shape_of(tree: Any) -> Any:
    """A tree's structure without regard for the class that stands for a namedtuple."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree).__name__, {name: shape_of(child) for name, child in zip(tree._fields, tree, strict=True)}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [shape_of(child) for child in tree]
    if isinstance(tree, dict):
        return type(tree).__name__, {key: shape_of(child) for key, child in tree.items()}
    return None if tree is None else "leaf"


def kind(leaf: Any) -> str:
    return "array" if isinstance(leaf, (jax.Array, np.ndarray)) else type(leaf).__name__


def assert_same(got: Any, expected: Any) -> None:
    assert shape_of(got) == shape_of(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
        assert raw(one) == raw(other)


OPTIONS = [
    jaxckpt.Options(),
    jaxckpt.Options(chunk_bytes=64, object_bytes=256),
    jaxckpt.Options(chunk_bytes=16, object_bytes=1024, host_bytes=512, mmap=False),
    jaxckpt.Options(compression="zstd", chunk_bytes=128, sync=False),
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Mesh, Any, jaxckpt.Options]:
    """A tree, another mesh, the tree as a target on other shardings, and options."""
    on = draw(st.lists(meshes(), min_size=1, max_size=2))
    tree = draw(trees(on))
    other = draw(meshes())

    def target(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=draw(shardings(leaf.shape, [other, *on])))

    return tree, other, jax.tree.map(target, tree), draw(st.sampled_from(OPTIONS))


@given(cases())
def test_every_tree_comes_back_bit_for_bit(case: tuple[Any, Mesh, Any, jaxckpt.Options]) -> None:
    tree, other, target, options = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt")
        info = jaxckpt.save(path, tree, options=options)
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

        assert_same(jaxckpt.restore(path, mesh=other, specs=P(), options=options), tree)

        on_host = jaxckpt.load_numpy(path)
        assert shape_of(on_host) == shape_of(tree)
        for one, saved in zip(jax.tree.leaves(on_host), jax.tree.leaves(tree), strict=True):
            assert not isinstance(one, jax.Array)
            key = raw(saved)
            assert one.tobytes() == key[-1] if key[0] == "key" else raw(one) == key


@given(st.data())
def test_any_mesh_to_any_mesh(data: st.DataObject) -> None:
    """One leaf of many chunks and objects, every pair of layouts, and only what is needed is read."""
    before, after = data.draw(meshes()), data.draw(meshes())
    shape = data.draw(st.sampled_from([(48, 24), (24, 48, 2), (96,), (24, 7, 24)]))
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    saved = jax.device_put(array, NamedSharding(before, fitting(data.draw, before, shape)))
    wanted = NamedSharding(after, fitting(data.draw, after, shape))
    options = data.draw(st.sampled_from(OPTIONS))
    with tempfile.TemporaryDirectory() as folder:
        jaxckpt.save(f"{folder}/ckpt", saved, options=options)
        restored = jaxckpt.restore(f"{folder}/ckpt", wanted, options=options)
        assert restored.sharding == wanted
        for shard in restored.addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])
