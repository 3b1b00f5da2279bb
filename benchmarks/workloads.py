"""The trees that the benchmarks save and restore: their leaves, layouts on the mesh, and values."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any

ONE = "one device"
COLUMNS = "columns over 8"
_SIDES = {ONE: (1, 1), COLUMNS: (8, 1)} | {f"{a}×{b}": (a, b) for a, b in ((2, 4), (4, 2), (3, 2), (4, 1), (8, 1))}


@dataclass(frozen=True, slots=True)
class Leaf:
    shape: tuple[int, ...]
    dtype: Any
    spec: P


@dataclass(frozen=True, slots=True)
class Workload:
    """A tree, by the paths of its leaves ("params/layer_00/query")."""

    title: str
    leaves: Mapping[str, Leaf]
    one: str
    """The path of the leaf that is read alone."""

    layouts: tuple[str, ...] = ("2×4", "4×1", ONE)
    """The layouts that it is restored to. It is saved in the first."""

    parameters: str = ""
    """The subtree that is read alone, such as the parameters without the moments."""

    scanned: tuple[str, ...] = ()
    """The paths of leaves from which single layers are read, along the first dimension."""

    @property
    def nbytes(self) -> int:
        return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in self.leaves.values())

    def shardings(self, layout: str) -> dict[str, NamedSharding]:
        mesh = _mesh(*_SIDES[layout])
        if layout == COLUMNS:
            return {path: NamedSharding(mesh, _by_columns(leaf)) for path, leaf in self.leaves.items()}
        return {path: NamedSharding(mesh, leaf.spec) for path, leaf in self.leaves.items()}

    def wanted(self, layout: str) -> Tree:
        """The tree with shapes, dtypes and shardings instead of arrays."""
        shardings = self.shardings(layout)
        return nested(
            {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[path])
                for path, leaf in self.leaves.items()
            }
        )

    def value(self, path: str) -> np.ndarray[Any, Any]:
        """A leaf's values: normal random numbers, which codecs barely compress. No two leaves have equal values."""
        leaf, seed = self.leaves[path], zlib.crc32(path.encode())
        numbers = _normal_numbers()[seed % 4093 :][: int(np.prod(leaf.shape))]
        return (numbers * np.float32(1 + seed / 2**32)).astype(leaf.dtype).reshape(leaf.shape)

    def place(self) -> Tree:
        """The tree of JAX arrays, in the layout in which it is saved."""
        shardings = self.shardings(self.layouts[0])
        if jax.process_count() == 1:
            values = {path: self.value(path) for path in self.leaves}
            return jax.block_until_ready(jax.device_put(nested(values), nested(shardings)))
        placed: dict[str, jax.Array] = {}
        for path, leaf in self.leaves.items():
            value = self.value(path)
            placed[path] = jax.make_array_from_callback(leaf.shape, shardings[path], value.__getitem__)
        return jax.block_until_ready(nested(placed))


@functools.cache
def _normal_numbers() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(40 << 20, np.float32)  # more than the largest leaf needs


def workload(key: str, *, quick: bool = False) -> Workload:
    """One of KEYS; `quick` makes a small workload of the same kind."""
    if key == "c":
        return _transformer(layers=2, width=64, words=256) if quick else _transformer(layers=24, width=512, words=32768)
    if key in _SCANNED:
        layers, width, fsdp_alone = _SCANNED[key]
        return _scanned(layers=layers, width=96 if quick else width, words=768 if quick else 32768, alone=fsdp_alone)
    count, side = {"a": (16, 4096), "b": (2_000, 128), "d": (20_000, 32)}[key]
    if quick:
        count, side = min(count, 100), min(side, 256)
    leaves = {f"leaf_{number:05d}": Leaf((side, side), np.float32, P("a", "b")) for number in range(count)}
    size = 4 * side * side
    title = f"{count:,} leaves of {f'{size >> 20} MiB' if size >> 20 else f'{size >> 10} KiB'}"
    return Workload(title, leaves, f"leaf_{count // 2:05d}")


_SCANNED = {
    "e": (12, 768, False),
    "e-small": (12, 384, False),
    "e-wide": (4, 1536, False),
    "f": (12, 768, True),
    "f-small": (12, 384, True),
    "f-wide": (4, 1536, True),
}
"""(number of layers, width, whether the mesh has only an FSDP axis)."""

KEYS = ("a", "b", "c", "d", *_SCANNED)


def _transformer(*, layers: int, width: int, words: int) -> Workload:
    """bfloat16 parameters, and Adam's two moments in float32."""
    layer = {
        **{name: ((width, width), P("a", "b")) for name in ("query", "key", "value")},
        "out": ((width, width), P("b", "a")),
        "up": ((width, 4 * width), P("a", "b")),
        "down": ((4 * width, width), P("b", "a")),
        "attention_norm": ((width,), P()),
        "mlp_norm": ((width,), P()),
    }
    parameters = {f"layer_{number:02d}/{name}": leaf for number in range(layers) for name, leaf in layer.items()}
    parameters |= {
        "embed": ((words, width), P("b", "a")),
        "unembed": ((width, words), P("a", "b")),
        "norm": ((width,), P()),
    }
    one = f"params/layer_{layers // 2:02d}/up"
    title = f"transformer, {layers} layers, with Adam"
    return Workload(title, _with_adam(parameters), one, parameters="params")


def _scanned(*, layers: int, width: int, words: int, alone: bool) -> Workload:
    """The state of a model whose layers are stacked for `scan`, as in MaxText: FSDP × TP on the last two dimensions, or
    FSDP alone."""
    into, out_of = (P(None, "a"), P(None, None, "a")) if alone else (P(None, "a", "b"), P(None, "b", "a"))
    layer = {
        **dict.fromkeys(("query", "key", "value", "gate"), ((layers, width, width), into)),
        "up": ((layers, width, 4 * width), into),
        "out": ((layers, width, width), out_of),
        "down": ((layers, 4 * width, width), out_of),
        "attention_norm": ((layers, width), P(None, "a")),
        "mlp_norm": ((layers, width), P(None, "a")),
    }
    parameters = {f"layers/{name}": leaf for name, leaf in layer.items()} | {
        "embed": ((words, width), P("a") if alone else P("b", "a")),
        "norm": ((width,), P()),
    }
    return Workload(
        f"scanned transformer, {layers} layers of {width}, with Adam, {'FSDP' if alone else 'FSDP × TP'}",
        _with_adam(parameters),
        "params/layers/up",
        ("8×1", "4×1", ONE, COLUMNS) if alone else ("4×2", "2×4", "3×2", "4×1", ONE),
        "params",
        tuple(f"params/layers/{name}" for name, (shape, _) in layer.items() if len(shape) == 3),
    )


def _with_adam(parameters: Mapping[str, tuple[tuple[int, ...], P]]) -> dict[str, Leaf]:
    """bfloat16 parameters, and Adam's two moments in float32."""
    leaves = {"count": Leaf((), np.int32, P())}
    for group, dtype in (("params", jnp.bfloat16), ("adam/mu", np.float32), ("adam/nu", np.float32)):
        leaves |= {f"{group}/{path}": Leaf(shape, dtype, spec) for path, (shape, spec) in parameters.items()}
    return leaves


def _by_columns(leaf: Leaf) -> P:
    """A spec that splits the last dimension instead of the leaf's own."""
    return P(*(None for _ in leaf.shape[1:]), "a") if len(leaf.spec) else P()


def nested(flat: Mapping[str, Any]) -> Tree:
    """Convert {"a/b": 1} to {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Convert {"a": {"b": 1}} to {"a/b": 1}."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _mesh(rows: int, columns: int) -> Mesh:
    # Spread over all processes: with four of eight devices, every process has at least one.
    devices = np.array(jax.devices())[:: len(jax.devices()) // (rows * columns)][: rows * columns]
    return Mesh(devices.reshape(rows, columns), ("a", "b"))
