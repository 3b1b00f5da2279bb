"""A user's project for type checkers. test_typing.py checks it; it never runs."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxckpt

state: dict[str, jax.Array] = {}
mesh = jax.make_mesh((1,), ("data",))

assert_type(jaxckpt.save("a", state, metadata={"run": 7}, overwrite=True), jaxckpt.types.SaveInfo)
assert_type(jaxckpt.save(Path("a"), state, mesh=mesh, specs=lambda path, leaf: P("data")).total_bytes, int)
pending = jaxckpt.save_async("b", state, options=jaxckpt.Options(compression="zstd"))
assert_type(pending.wait(timeout_seconds=3), jaxckpt.SaveInfo)
assert_type(pending.done, bool)

assert_type(jaxckpt.restore("a", state, mesh=mesh, select=["params/**"], rename={"a": "b"}), dict[str, jax.Array])
shapes = {"w": jax.ShapeDtypeStruct((8,), np.float32)}
described: dict[str, jax.Array] = jaxckpt.restore("a", shapes)
sharded: dict[str, list[jax.Array]] = jaxckpt.restore("a", {"w": [jax.sharding.NamedSharding(mesh, P())]})
saved: dict[str, jax.Array] = jaxckpt.restore("a", mesh=mesh)
loaded: Mapping[str, "np.ndarray[Any, Any]"] = jaxckpt.load_numpy("a")

checkpoint = jaxckpt.open("a")
assert_type(checkpoint, jaxckpt.Checkpoint)
assert_type(checkpoint["w"], jaxckpt.LazyLeaf)
assert_type(checkpoint["w"].shape, tuple[int, ...])
assert_type(checkpoint["w"].value, "np.ndarray[Any, np.dtype[Any]]")
assert_type(checkpoint["w"][:4, 0], "np.ndarray[Any, np.dtype[Any]]")
assert_type(checkpoint.restore(state), dict[str, jax.Array])
assert_type(checkpoint.leaves, dict[str, jaxckpt.LazyLeaf])
assert_type(checkpoint.plan(mesh={"data": 4}).over_read, float)

assert_type(jaxckpt.verify("a").ok, bool)
assert_type(jaxckpt.verify("a").problems, tuple[jaxckpt.errors.Problem, ...])
assert_type(jaxckpt.diff("a", "b").identical, bool)
assert_type(jaxckpt.report("a"), str)
jaxckpt.convert("a", "a.safetensors", select="params", overwrite=True)
jaxckpt.convert(jaxckpt.formats.rank_files({0: "0.npz"}, mesh={"data": 1}, specs={"w": P("data")}), "c")


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, the state of an optimizer, and a key."""

    params: dict[str, jax.Array]
    moments: tuple[dict[str, jax.Array], ...]
    key: jax.Array


class Trainer:
    """Trains from the newest step, and evaluates steps."""

    def __init__(self, run: str, init: Callable[[], TrainState]) -> None:
        tier = jaxckpt.LocalTier("/dev/shm/run", every=10, copies=1)
        self.checkpoints = jaxckpt.Checkpointer(run, every=100, keep_last=2, local=tier)
        last, self.state = self.checkpoints.restore_or_init(init, strict={"moments": False})
        assert_type(last, int | None)
        assert_type(self.state, TrainState)
        self.step = last or 0

    def train(self, update: Callable[[TrainState], TrainState], steps: int) -> None:
        for _ in range(steps):
            self.state = update(self.state)
            self.step += 1
            self.checkpoints.save(self.step, self.state, metrics={"loss": 0.5})

    def best(self) -> TrainState:
        return self.checkpoints.restore("best", self.state, mesh=mesh)

    def norms(self) -> dict[int, float]:
        run = jaxckpt.Run("run")
        assert_type(run.restore(target=self.state), TrainState)
        assert_type(run.restore(3, self.state, dtype="bfloat16"), TrainState)
        return {step.number: float(step.restore(self.state).params["w"].sum()) for step in run.follow()}


with jaxckpt.Checkpointer("run", every=10, keep_last=2) as steps:
    assert_type(steps.steps(), list[int])
    assert_type(steps.latest_step(), int | None)
    assert_type(steps.save(3, state), bool)

try:
    jaxckpt.restore("a")
except jaxckpt.MismatchError as error:
    assert_type(error.problems, tuple[jaxckpt.errors.Problem, ...])
    assert_type(error.paths, tuple[str, ...])
except (jaxckpt.CorruptError, jaxckpt.errors.StorageError):
    raise
