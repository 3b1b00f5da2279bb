"""The contents of the golden checkpoints, by rules that use only integer arithmetic, NumPy and ml_dtypes.

tests/data/golden/write.py saves these trees, once for each release that changes what is stored. tests/test_golden.py
computes the same trees and compares them with what jaxckpt reads. Do not change a tree that has been written: a new
folder of checkpoints needs trees of its own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import processes
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

FOLDER = Path(__file__).parents[1] / "data" / "golden"

Array = np.ndarray[Any, Any]

# Values ---------------------------------------------------------------------------------------------------

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16"
    " float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
    " float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4"
).split()
"""Every dtype of format version 1."""

X64 = ("int64", "uint64", "float64", "complex128")
"""Dtypes that arrays on devices have only with jax_enable_x64."""

_NARROW: Mapping[str, list[float]] = {
    "int2": [-2, -1, 0, 1],
    "uint2": [0, 1, 2, 3],
    "int4": [*range(-8, 8)],
    "uint4": [*range(16)],
    "float4_e2m1fn": [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
}
"""All values of the dtypes that do not fill their bytes."""


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def words(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Mixed 64-bit integers (SplitMix64). NumPy's own generators may change with its version."""
    state = (np.arange(count, dtype=np.uint64) + np.uint64(1 + 1000 * seed)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def bits(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Any bits of a dtype, among them NaN payloads, subnormals and negative zeros."""
    count, dtype = math.prod(shape), dtype_of(name)
    if name == "bool":
        return (words(count, seed) & np.uint64(1)).astype(bool).reshape(shape)
    if name in _NARROW:
        values = np.array(_NARROW[name], np.float32).astype(dtype)
        return values[(words(count, seed) % np.uint64(len(values))).astype(np.int64)].reshape(shape)
    content = words(count * dtype.itemsize, seed).astype("<u8").tobytes()[: count * dtype.itemsize]
    return np.frombuffer(content, dtype).reshape(shape).copy()


def small(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Integers from -50 to 50, which compress well."""
    numbers = (np.arange(math.prod(shape)) // 5 * 7 + seed * 13) % 101 - 50
    return numbers.astype(dtype_of(name)).reshape(shape)


# Meshes ---------------------------------------------------------------------------------------------------


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], devices: list[int], kind: AxisType = AxisType.Auto) -> Mesh:
    chosen = np.array([jax.devices()[number] for number in devices]).reshape(sizes)
    return Mesh(chosen, names, axis_types=(kind,) * len(names))


def square() -> Mesh:
    """All eight devices."""
    return mesh_of((2, 4), ("data", "model"), [*range(8)])


def smaller() -> Mesh:
    """Four of the devices in another order, with the same axes."""
    return mesh_of((2, 2), ("data", "model"), [6, 1, 4, 3])


def on(mesh: Mesh, value: Any, *spec: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


@contextlib.contextmanager
def x64(enabled: bool = True) -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


# Trees ----------------------------------------------------------------------------------------------------


def dtypes() -> Any:
    mesh = square()
    return {
        "numpy": {name: bits(name, (3, 5), seed) for seed, name in enumerate(DTYPES)},
        "numpy_scalar": {name: bits(name, (2,), 100 + seed)[0] for seed, name in enumerate(DTYPES)},
        "jax": {
            name: on(mesh, bits(name, (8, 3), 200 + seed), "data")
            for seed, name in enumerate(DTYPES)
            if name not in X64
        },
    }


def wide_dtypes() -> Any:
    with x64():
        mesh = square()
        return {name: on(mesh, bits(name, (8, 3), 300 + seed), "model") for seed, name in enumerate(X64)}


class Pair(NamedTuple):
    first: Any
    second: Any


NOTHING = collections.namedtuple("NOTHING", ())


def values() -> Any:
    return {
        "int": [0, -1, 1 << 62, 1 << 63, -(1 << 63), -(1 << 200), 1 << 1000],
        "float": [0.1, -0.0, 5e-324, 1e-07, 1.7976931348623157e308, math.inf, -math.inf, _float(0x7FF8000000000ABC)],
        "complex": [1 + 2j, complex(-0.0, math.inf), complex(_float(0xFFF8000000000001), 0.5)],
        "bool": [True, False],
        "str": ["", "text", 'two\nlines "quoted" \\ \0 é 🙂', "é" * 4097, "lone \ud800 surrogate"],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 17],
        "none": [None, {"inner": None}],
    }


def _float(content: int) -> float:
    """The float with these 64 bits."""
    return struct.unpack("<d", struct.pack("<Q", content))[0]


def containers() -> Any:
    return {
        "dict": {"b": 1, "a": 2, "empty": {}},
        "list": [1, [2, []], ()],
        "tuple": (1, (2,), ()),
        "ordered": collections.OrderedDict([("z", 1), ("a", 2), ("empty", collections.OrderedDict())]),
        "namedtuple": Pair(1, Pair([2], None)),
        "empty namedtuple": NOTHING(),
        "int keys": {3: 1, -1: 2, 10: 3},
        "bool keys": {True: 1, False: 2},
        "float keys": {0.5: 1, -2.0: 2},
        "bytes keys": {b"ab": 1, b"\xff": 2},
        "tuple keys": {(1, "x"): 1, (0, "y"): 2},
        "names": {"a/b": 1, "~": 2, "": 3, "..": 4, "🙂": 5, "a.b": 6, "x" * 300: 7},
        "deep": _nested(60),
    }


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 1


def leaves() -> Any:
    mesh = square()
    data = (words(16, 7) >> np.uint64(32)).astype(np.uint32)
    tied = on(mesh, bits("float32", (8, 4), 1), "data")
    return {
        "key": {
            "threefry2x32": jax.random.wrap_key_data(data[:2], impl="threefry2x32"),
            "many": on(mesh, jax.random.wrap_key_data(data.reshape(4, 2, 2), impl="threefry2x32"), "model"),
            "rbg": jax.random.wrap_key_data(data[:4], impl="rbg"),
            "unsafe_rbg": jax.random.wrap_key_data(data[4:8], impl="unsafe_rbg"),
        },
        "jax": {
            "weak float": jnp.asarray(0.5),
            "weak int": jnp.asarray(3),
            "scalar": jnp.int32(-3),
            "empty": on(mesh, np.zeros((0, 4), np.float32), None, "model"),
            "six dimensions": on(mesh, small("int8", (2, 1, 3, 1, 2, 4), 5), "data", None, None, None, None, "model"),
        },
        "numpy": {
            "0-d": np.array(2.5),
            "big-endian": small("int32", (6,), 3).astype(">i4"),
            "columns first": np.asfortranarray(small("float64", (3, 4), 4)),
            "empty": np.zeros((0, 3), np.float16),
        },
        "tied": {"embed": tied, "head": tied, "host": [host := small("int16", (7,), 2), host]},
    }


def layouts() -> Any:
    mesh = square()
    explicit = mesh_of((4, 2), ("data", "model"), [*range(8)], AxisType.Explicit)
    part = mesh_of((2, 3), ("x", "y"), [7, 6, 5, 4, 3, 2])
    devices = jax.devices()
    value = small("float32", (24, 12), 9)
    return {
        "uncommitted": jnp.asarray(value),
        "committed": jax.device_put(value, SingleDeviceSharding(devices[3])),
        "replicated": on(mesh, value),
        "rows": on(mesh, value, "data"),
        "columns": on(mesh, value, None, "model"),
        "both": on(mesh, value, "data", "model"),
        "two axes": on(mesh, value, ("model", "data")),
        "explicit": on(explicit, value, "data", "model"),
        "part": on(part, value, "y", "x"),
        "one device": on(mesh_of((1,), ("data",), [5]), value, "data"),
    }


def memory() -> Any:
    kind = "pinned_host"
    return {"w": jax.device_put(small("float32", (8, 4), 8), NamedSharding(square(), P("data"), memory_kind=kind))}


def stacks() -> Any:
    """Leaves of equal shape, and leaves in several objects and chunks."""
    mesh = square()
    return {
        "layers": [
            {"scale": on(mesh, small("float32", (128,), n)), "count": small("int32", (6,), n)} for n in range(40)
        ],
        "scalars": [np.float32(n) for n in range(20)],
        "wide": on(mesh, small("float32", (64, 96), 1), "data", "model"),
        "columns": on(mesh, small("bfloat16", (32, 200), 2), None, "model"),
        "odd": on(mesh, small("float16", (37, 53), 3)),
        "random": on(mesh, bits("uint32", (64, 20), 4), "model"),
        "bytes": small("int8", (3000,), 5),
        "wide numbers": small("complex128", (40, 9), 6),
        "zeros": np.zeros((30, 50), np.float64),
    }


# Objects --------------------------------------------------------------------------------------------------


class Cursor:
    """An object with a state of its own, as a data iterator has."""

    def __init__(self, position: int = 0, seen: Array | None = None) -> None:
        self.position, self.seen = position, np.zeros(4, np.int32) if seen is None else seen

    def get_state(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen, "source": collections.OrderedDict([("b", 1), ("a", [])])}

    def set_state(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]


@dataclasses.dataclass(frozen=True)
class Rate:
    """A registered type that is restored without a target."""

    text: str


class Sampler:
    """A registered type whose state is set on the object in the target, and contains another registered type."""

    def __init__(self, seed: int, rate: Rate) -> None:
        self.seed, self.rate = seed, rate


def _set_sampler(sampler: Sampler, state: dict[str, Any]) -> None:
    sampler.seed, sampler.rate = state["seed"], state["rate"]


def register() -> None:
    """Register the types. Without this, their states are restored as plain trees."""
    jaxckpt.register_leaf(Rate, to_state=lambda rate: rate.text, from_state=Rate, name="golden.Rate")
    jaxckpt.register_leaf(
        Sampler,
        to_state=lambda sampler: {"seed": sampler.seed, "rate": sampler.rate},
        set_state=_set_sampler,
        name="golden.Sampler",
    )


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """A registered pytree node."""

    def __init__(self, kernel: Any, bias: Any) -> None:
        self.kernel, self.bias = kernel, bias

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        key = jax.tree_util.GetAttrKey
        return ((key("kernel"), self.kernel), (key("bias"), self.bias)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Layer:
        return cls(*children)


def objects() -> Any:
    register()
    return {
        "cursor": Cursor(12, small("int32", (4,), 1)),
        "rate": Rate("0.10"),
        "sampler": Sampler(7, Rate("0.5")),
        "layer": Layer(small("float32", (3, 2), 2), [small("float32", (2,), 3)]),
    }


def states_of_objects() -> Any:
    """The tree of `objects` for a reader that knows none of the types."""
    source = collections.OrderedDict([("b", 1), ("a", [])])
    return {
        "cursor": {"position": 12, "seen": small("int32", (4,), 1), "source": source},
        "rate": "0.10",
        "sampler": {"seed": 7, "rate": "0.5"},
        "layer": {"kernel": small("float32", (3, 2), 2), "bias": [small("float32", (2,), 3)]},
    }


# Checkpoints ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Golden:
    """A checkpoint that one call of `jaxckpt.save` wrote."""

    contains: str
    tree: Callable[[], Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Further arguments of `save`."""


SMALL_OBJECTS = {"object_bytes": 2048, "chunk_bytes": 500}

METADATA = {"run": 7, "name": "golden é", "nested": [None, True, 0.25, {"big": 10**300, "empty": {}}]}

STATES = [{"position": 5 + index, "raw": bytes([index, 255])} for index in range(2)]
"""The process states of two processes."""

CHECKPOINTS = {
    "dtypes": Golden("every dtype: NumPy arrays, NumPy scalars, and arrays over 8 devices", dtypes),
    "wide-dtypes": Golden("arrays on devices with the dtypes that need jax_enable_x64", wide_dtypes),
    "values": Golden("Python values, short and long, and None", values),
    "containers": Golden("every container, also empty, and every type of key", containers),
    "leaves": Golden("typed PRNG keys, weak types, NumPy layouts, tied arrays", leaves),
    "layouts": Golden("meshes, explicit axes, subsets of devices, single devices", layouts),
    "memory": Golden("an array in pinned host memory", memory),
    "objects": Golden("objects with a state, registered types, a registered pytree node", objects),
    "single-leaf": Golden("a tree that is one leaf", lambda: small("float32", (5,), 1)),
    "empty": Golden("a tree without leaves", dict),
    "metadata": Golden(
        "metadata, and the state of one process",
        lambda: {"step": 3},
        {"metadata": METADATA, "process_state": STATES[0]},
    ),
    "stacks": Golden("stacks of many rows, and arrays in many objects and chunks", stacks, {"options": SMALL_OBJECTS}),
    "stacks-zstd": Golden("the same with zstd", stacks, {"options": {**SMALL_OBJECTS, "compression": "zstd"}}),
    "stacks-blosc": Golden("the same with blosc", stacks, {"options": {**SMALL_OBJECTS, "compression": "blosc"}}),
    "contents": Golden(
        "digests of the contents of objects", stacks, {"options": {**SMALL_OBJECTS, "reuse": "content"}}
    ),
}


def save(name: str, path: Path) -> None:
    """Save the tree of one of CHECKPOINTS."""
    golden = CHECKPOINTS[name]
    arguments = dict(golden.arguments)
    if "options" in arguments:
        arguments["options"] = jaxckpt.Options(**arguments["options"])
    with x64(name == "wide-dtypes"):
        jaxckpt.save(path, golden.tree(), **arguments)


# Runs -----------------------------------------------------------------------------------------------------

RUN_METADATA = {"model": "golden", "layers": 2, "rates": [0.1, None]}

RUN_LOSSES = {10: 4.0, 20: 1.5, 30: math.nan, 40: 2.0, 50: 3.0, 60: 2.5}
RUN_STEPS = [20, 30, 40, 60]
"""20 is the best step, 30 is pinned, 40 is the best by the added metric, and 60 is the newest."""

RUN_DROPPED = {20: ("opt",), 30: (), 40: ("opt",), 60: ()}
"""What each step has lost by keep_last_of. The pin protects all of step 30."""

RUN_PINS = {"paper": 30, "v1.0-final": 60}
RUN_ACCURACY = {30: 0.5, 40: 0.75, 60: 0.25}
"""The metrics that were added to saved steps."""


def run_tree(step: int) -> Any:
    """A base that does not change, and is linked, and leaves that do."""
    mesh = square()
    return {
        "base": {"w": on(mesh, small("float32", (32, 16), 1), "data", "model"), "ids": small("int64", (40,), 2)},
        "adapter": on(mesh, bits("bfloat16", (8, 6), step), "data"),
        "opt": {"mu": on(mesh, bits("float32", (8, 6), step + 1), "data"), "count": step},
        "step": step,
    }


def run_tree_of(step: int) -> Any:
    """The tree of a step as it is now: without the subtrees that were dropped."""
    return {name: value for name, value in run_tree(step).items() if name not in RUN_DROPPED[step]}


JOB_STORED, JOB_LOCAL = [20, 40], [40, 45]
"""The steps of the job of two processes: in its directory, and in its local folders."""


def job_tree(step: int) -> Any:
    """A tree over eight devices: of two processes with four each when it is written, and of one when it is read."""
    line, mesh = mesh_of((8,), ("data",), [*range(8)]), square()

    def place(value: Array, mesh: Mesh, *spec: Any) -> jax.Array:
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P(*spec)), lambda index: value[index])

    return {
        "rows": place(bits("float32", (16, 20), step), line, "data"),
        "both": place(bits("bfloat16", (8, 40), step + 1), mesh, "data", "model"),
        "replicated": place(small("int32", (10, 3), step), line),
        "host": small("uint16", (9,), step),
        "step": step,
    }


def job_states(step: int) -> list[dict[str, Any]]:
    return [{"position": [step, index], "raw": bytes([step, index])} for index in range(2)]


PUBLICATIONS = 5
ANCHOR_EVERY = 3
"""Publications 0 and 3 hold the weights, and 1, 2 and 4 differences."""


def weights(number: int) -> Any:
    """The float32 weights of a publication."""
    shapes = {"kernel": (16, 24), "bias": (24,), "empty": (0, 3)}
    return {
        name: (small("float32", shape, 1) / 64 + np.float32(number * 2.0**-9) * small("float32", shape, 2)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }


def weights_on_devices(number: int) -> Any:
    mesh, tree = square(), weights(number)
    return {
        "kernel": on(mesh, tree["kernel"], "data", "model"),
        "bias": on(mesh, tree["bias"], "model"),
        "empty": on(mesh, tree["empty"]),
    }


def training_step(number: int) -> int:
    """The training step of a publication."""
    return 100 + 10 * number


def write_run(directory: Path) -> None:
    rules = {"keep_last": 1, "keep_best": [("loss", "min"), ("accuracy", "max")], "keep_last_of": {"opt": 1}}
    with jaxckpt.Checkpointer(directory, **rules, metadata=RUN_METADATA, trash=True) as run:
        for step, loss in RUN_LOSSES.items():
            metrics = {"loss": loss, "accuracy": math.nan}
            run.save(step, run_tree(step), metrics=metrics, metadata={"note": f"step {step}"} if step == 30 else None)
            run.wait()
            if step == 30:
                run.pin(30, "paper")
            if step in RUN_ACCURACY:
                run.add_metrics(step, {"accuracy": RUN_ACCURACY[step]})
        run.pin("latest", "v1.0-final")
    base = next((directory / "00000060").glob("data-*/*-float32-32x16/c/0/0/0"))
    assert base.stat().st_nlink == len(RUN_LOSSES), "all steps link to one file, also the trashed ones"


def write_weights(directory: Path) -> None:
    with jaxckpt.weights.Publisher(directory, anchor_every=ANCHOR_EVERY) as publisher:
        for number in range(PUBLICATIONS):
            publisher.publish(training_step(number), weights_on_devices(number))


def write_job(directory: Path) -> None:
    arguments = {"storage": str(directory / "storage"), "local": str(directory / "local")}
    program = processes.PROGRAMS / "golden_job.py"
    processes.run_processes(program, processes=2, devices_per_process=4, args=arguments, word=processes.PASSED)


RUNS: Mapping[str, tuple[str, Callable[[Path], None]]] = {
    "run": (
        "a run: metrics, added metrics, metadata, pins, best step, linked objects, dropped subtrees, trashed steps",
        write_run,
    ),
    "job": (
        "a run of two processes with a local tier: process states, and copies of each object in both local folders",
        write_job,
    ),
    "weights": ("publications of a Publisher: two anchors and three differences", write_weights),
}
"""What each run contains, and the function that writes it."""

# Files ----------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    """The paths of all files below a folder, with "/", sorted by Unicode code points."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def digest(folder: Path) -> str:
    """The SHA-256 of the names, lengths and contents of all files below a folder."""
    total = hashlib.sha256()
    for name in files(folder):
        content = (folder / name).read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
