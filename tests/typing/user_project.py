"""A user's project for type checkers. test_typing.py checks it; it never runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxckpt

state: dict[str, jax.Array] = {}
mesh = jax.make_mesh((1,), ("data",))

assert_type(jaxckpt.save("a", state, metadata={"run": 7}, overwrite=True), jaxckpt.SaveInfo)
assert_type(jaxckpt.save(Path("a"), state, mesh=mesh, specs=lambda path, leaf: P("data")).total_bytes, int)
pending = jaxckpt.save_async("b", state, options=jaxckpt.Options(compression="zstd"))
assert_type(pending.wait(timeout_seconds=3), jaxckpt.SaveInfo)
assert_type(pending.done, bool)

restored: dict[str, jax.Array] = jaxckpt.restore("a", state, mesh=mesh, select=["params/**"], rename={"a": "b"})
loaded: Mapping[str, "np.ndarray[Any, Any]"] = jaxckpt.load_numpy("a")

checkpoint = jaxckpt.open("a")
assert_type(checkpoint, jaxckpt.Checkpoint)
assert_type(checkpoint["w"], jaxckpt.LazyLeaf)
assert_type(checkpoint["w"].shape, tuple[int, ...])
assert_type(checkpoint.leaves, dict[str, jaxckpt.LazyLeaf])
assert_type(checkpoint.plan(mesh={"data": 4}).over_read, float)

assert_type(jaxckpt.verify("a").ok, bool)
assert_type(jaxckpt.verify("a").problems, tuple[jaxckpt.errors.Problem, ...])
assert_type(jaxckpt.diff("a", "b").identical, bool)
assert_type(jaxckpt.report("a"), str)
jaxckpt.convert("a", "a.safetensors", select="params", overwrite=True)
jaxckpt.convert(jaxckpt.formats.rank_files({0: "0.npz"}, mesh={"data": 1}, specs={"w": P("data")}), "c")

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
