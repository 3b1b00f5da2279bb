"""Trees, meshes, specs and layouts for property tests, and the equality that restored leaves must have."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.grid import Box, Layout, Spec, divisors, touched_cells
from jaxckpt._model.stacks import Stack
from jaxckpt._save.write_plan import ArrayLeaf

# Boxes and layouts, without devices -----------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A non-empty box inside an array."""
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple((start, draw(st.integers(start + 1, n))) for start, n in zip(starts, shape, strict=True))


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content of a file after a truncation or a change of one byte."""
    at = draw(st.integers(0, len(content) - 1))
    if draw(st.booleans()):
        return content[:at]
    return content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]


def sides(most: int = 3, largest: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes without zeros, with small numbers and primes."""
    return st.lists(st.integers(1, largest), max_size=most).map(tuple)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Any stack that a save could write, and some that only another writer would."""
    shape = draw(sides(2, 12))
    rows = draw(st.integers(1, 9))
    chunk = tuple(draw(st.integers(1, n)) for n in (rows, *shape))
    most = tuple(c * draw(st.integers(1, 3)) for c in chunk)
    return Stack("s", "int32", shape, rows, chunk, most)


def chunks_of(stack: Stack, box: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(*side) for side in touched_cells(box, stack.chunk_sides)))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], processes: int = 4) -> Layout:
    """Any regular grid; any processes may hold a cell."""
    grid = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    holders = st.sets(st.integers(0, processes - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    cells = math.prod(grid)
    return Layout(grid, tuple(draw(st.lists(holders, min_size=cells, max_size=cells))))


def paint(shape: tuple[int, ...], found: list[Box]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The number of boxes that cover each element."""
    canvas = np.zeros(shape, np.int64)
    for box in found:
        canvas[tuple(slice(*side) for side in box)] += 1
    return canvas


@st.composite
def mesh_specs(draw: st.DrawFn, axes: dict[str, int], shape: tuple[int, ...]) -> Spec:
    """A spec with which an array of this shape can be sharded over a mesh with these axes."""
    left = list(draw(st.permutations(list(axes))))
    entries: list[tuple[str, ...]] = []
    for length in shape:
        count = draw(st.integers(0, len(left)))
        while length % math.prod(axes[axis] for axis in left[:count]):
            count -= 1
        entries.append(tuple(left[:count]))
        left = left[count:]
    return tuple(entries)


@st.composite
def array_leaves(draw: st.DrawFn, processes: int = 4) -> list[ArrayLeaf]:
    """Leaves for the planner, some of them equal, so that stacks have several rows."""
    kinds = draw(st.lists(sides(2, 24), min_size=1, max_size=3))
    found: list[ArrayLeaf] = []
    for shape in kinds:
        layout = draw(layouts(shape, processes))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int4", "complex64"]))
        found.extend(ArrayLeaf(0, dtype, shape, layout) for _ in range(draw(st.integers(1, 9))))
    shuffled = draw(st.permutations(found))
    return [ArrayLeaf(number, leaf.dtype, leaf.shape, leaf.layout) for number, leaf in enumerate(shuffled)]


# Meshes and shardings of real devices ---------------------------------------------------------------------

MESHES = [
    ((8,), ("a",)),
    ((2, 4), ("a", "b")),
    ((4, 2), ("b", "a")),
    ((3, 2), ("a", "b")),
    ((1,), ("b",)),
    ((5,), ("c",)),
    ((2, 2, 2), ("a", "b", "c")),
]
WIDE_DTYPES = ["int64", "uint64", "float64", "complex128"]
"""The dtypes that JAX has only with jax_enable_x64."""

DEVICE_DTYPES = [name for name in DTYPES if name not in WIDE_DTYPES]
KEY_IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


class Pair(NamedTuple):
    left: Any
    right: Any


@st.composite
def meshes(draw: st.DrawFn, among: tuple[int, ...] = tuple(range(8))) -> Mesh:
    """A mesh of some of the devices, in any order."""
    shape, names = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh[0]) <= len(among)]))
    order = draw(st.permutations(among))[: math.prod(shape)]
    types = draw(st.sampled_from([jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]))
    devices = np.array([jax.devices()[number] for number in order]).reshape(shape)
    return Mesh(devices, names, axis_types=(types,) * len(names))


@st.composite
def mesh_sets(draw: st.DrawFn) -> list[Mesh]:
    """The meshes of one tree: one mesh, two that may overlap, or two without common devices."""
    if draw(st.booleans()):
        return draw(st.lists(meshes(), min_size=1, max_size=2))
    return [draw(meshes((0, 1, 2, 3, 4))), draw(meshes((5, 6, 7)))]


def fitting(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """A spec that an array of this shape can have on a mesh."""
    spec = draw(mesh_specs(dict(mesh.shape), shape))
    return P(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec))


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], on: list[Mesh]) -> Sharding:
    if draw(st.integers(0, 5)) == 0:
        return SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
    mesh = draw(st.sampled_from(on))
    return NamedSharding(mesh, fitting(draw, mesh, shape))


# Leaves and trees -----------------------------------------------------------------------------------------

shapes = st.one_of(
    st.just(()),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 12, 13, 24]), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(48, 24), (97,), (8, 8), (24, 8, 4)]),
)

python_values = st.one_of(
    st.integers(), st.booleans(), st.floats(), st.text(max_size=9), st.binary(max_size=9), st.complex_numbers(),
    st.sampled_from(["é" * 3000, b"\x00\xff" * 3000, "\ud800", "", b"", 1 << 200, -(1 << 20000), -0.0, 5e-324]),
)  # fmt: skip


def bits(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bits of a dtype, with NaN payloads, subnormals and negative zeros. Bools and narrow types stay valid."""
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
            return strided(draw, bits(DTYPES[draw(st.sampled_from(list(DTYPES)))], shape, seed))
        case "scalar":
            return bits(DTYPES[draw(st.sampled_from(list(DTYPES)))], (), seed)[()]
        case "key":
            shape = draw(st.sampled_from([(), (8,), (2, 4), (0,)]))
            keys = jax.random.split(jax.random.key(seed, impl=draw(st.sampled_from(KEY_IMPLS))), shape)
            return jax.device_put(keys, draw(shardings(shape, on)))
        case "none":
            return None
        case _:
            return draw(python_values)


def strided(draw: st.DrawFn, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself, a view with other strides, or a read-only one."""
    match draw(st.integers(0, 4)):
        case 0:
            return array.T
        case 1 if array.ndim:
            return array[::-2]
        case 2:
            array.flags.writeable = False
            return array
        case 3 if array.ndim:
            return np.broadcast_to(array[:1], (3, *array.shape[1:])) if len(array) else array
        case _:
            return array


names = st.one_of(st.sampled_from(["w", "a/b", "a.b", "~", "~1", "", "..", "/abs", "a\\b", "🙂"]), st.text(max_size=4))


def containers(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers around `below` of every type that is restored unchanged without a target."""
    return st.one_of(
        st.dictionaries(names, below, max_size=4),
        st.dictionaries(st.integers(-3, 9), below, max_size=3),
        st.dictionaries(st.tuples(st.integers(0, 2), st.text(max_size=2)), below, max_size=2),
        st.lists(below, max_size=4),
        st.lists(below, max_size=3).map(tuple),
        st.builds(Pair, below, below),
        st.dictionaries(names, below, max_size=2).map(collections.OrderedDict),
    )


@st.composite
def trees(draw: st.DrawFn, on: list[Mesh]) -> Any:
    return draw(st.recursive(leaves(on), containers, max_leaves=10))


# Bitwise equality -----------------------------------------------------------------------------------------


def raw(leaf: Any) -> tuple[Any, ...]:
    """All properties of a leaf's value that must be equal."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(leaf)), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, (float, complex)):
        return type(leaf).__name__, np.asarray(leaf).tobytes()
    return type(leaf).__name__, leaf


def shape_of(tree: Any) -> Any:
    """A tree's structure, regardless of the class of namedtuples."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree).__name__, {name: shape_of(child) for name, child in zip(tree._fields, tree, strict=True)}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [shape_of(child) for child in tree]
    if isinstance(tree, dict):
        return type(tree).__name__, [(type(key), key, shape_of(child)) for key, child in sorted_items(tree)]
    return None if tree is None else "leaf"


def sorted_items(tree: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """A dict's items in JAX's order; an OrderedDict keeps its own order."""
    return list(tree.items()) if isinstance(tree, collections.OrderedDict) else sorted(tree.items())


def ancestors(path: str) -> list[str]:
    """The paths of all containers of a leaf, then the leaf's own path."""
    return list(itertools.accumulate(path.split("/"), lambda head, part: f"{head}/{part}"))
