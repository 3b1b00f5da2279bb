"""Writes the files of Flax 0.8.5, Orbax 0.5.20 and Haiku 0.0.12 in this folder, with JAX 0.4.30, NumPy 1.26 and Python
3.11, and records what they hold:

    python make_flax.py

Not written here: orbax027_pytree and orbax044_agg are by Orbax 0.2.7 and 0.4.4. t5x_tiny is t5x/testdata/tiny_t5 of
github.com/google-research/t5x (Apache-2.0), written by T5X; its Zarr metadata is only in the file `checkpoint`.
"""

from __future__ import annotations

import gzip
import pickle
import shutil
from pathlib import Path
from typing import Any

import flax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from encode import FOLDER, record
from flax import serialization
from flax.training import checkpoints, orbax_utils

params = {"dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}}
found: dict[str, Any] = {}
for name in ("flax", "orbax0520_agg", "orbax0520_manager"):
    shutil.rmtree(FOLDER / name, ignore_errors=True)

# Flax
flax.config.update("flax_use_orbax_checkpointing", False)
state = {
    "params": params,
    "step": 7,
    "complex": 1 + 2j,
    "scalar": np.float32(1.5),
    "tuple": (1, None, "s"),
    "none": None,
    "array": jnp.asarray(2 + 3j),
    "empty": {},
}
for step in (9, 100):
    checkpoints.save_checkpoint(FOLDER / "flax", state | {"step": step}, step, keep=5)
as_dict = state | {"tuple": {"0": 1, "1": None, "2": "s"}}
found["flax"] = found["flax/checkpoint_100"] = as_dict | {"step": 100}
found["flax/checkpoint_9"] = as_dict | {"step": 9}
serialization.MAX_CHUNK_SIZE = 32
tree = {
    "a": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "b": jnp.arange(7, dtype=jnp.bfloat16),
    "ints": {1: {"x": np.int8(4)}, 12: np.float64(2)},
    "numbers": [-1, -200, 70_000, 2**63, -(2**40), 0.25, True, "ü" * 40, b"ab"],
}
(FOLDER / "chunked.msgpack").write_bytes(serialization.msgpack_serialize(tree))
found["chunked.msgpack"] = tree

# Orbax
saved = {
    "params": params,
    "step": 3,
    "rate": 0.5,
    "name": "hello",
    "none": None,
    "array": np.arange(5),
    "list": [jnp.zeros(2), (jnp.ones(1), {})],
    "opt": optax.adam(1e-3).init(params),
}
aggregated = orbax_utils.save_args_from_target(saved)
ocp.PyTreeCheckpointer().save(FOLDER / "orbax0520_agg", saved, save_args=aggregated)
manager = ocp.CheckpointManager(FOLDER / "orbax0520_manager", ocp.PyTreeCheckpointer(), ocp.CheckpointManagerOptions())
for step in (1, 2):
    manager.save(step, saved | {"step": step}, save_kwargs={"save_args": aggregated})
adam = saved["opt"][0]
restored = saved | {
    "list": [jnp.zeros(2), [jnp.ones(1), {}]],
    "opt": [{"count": adam.count, "mu": adam.mu, "nu": adam.nu}, None],
}
found["orbax0520_agg"] = restored
found["orbax0520_manager"] = restored | {"step": 2}
found["orbax0520_manager/1"] = restored | {"step": 1}
older = {
    "params": {"dense": {"kernel": np.arange(64, dtype=np.float32).reshape(8, 8), "bias": jnp.ones(8, jnp.bfloat16)}},
    "opt": [np.zeros(3, np.float32), [np.ones(2, np.float32)]],
    "np": np.arange(4, dtype=np.int32),
    "s0": np.float32(2),
    "empty": {},
    "none": None,
}
found["orbax044_agg"] = older | {"step": 3, "f": 1.5}
found["orbax027_pytree"] = older | {"step": np.int64(3), "f": np.float64(1.5)}


def chunk(folder: str, dtype: str, *shape: int) -> np.ndarray:
    (file,) = (path for path in (FOLDER / "t5x_tiny" / "checkpoint_1" / folder).iterdir())
    return np.frombuffer(gzip.decompress(file.read_bytes()), dtype).reshape(shape)


t5x = {
    "bias": chunk("state.param_states.bias", "f4", 5),
    "kernel": chunk("state.param_states.kernel", "f8", 10, 5),
    "step": chunk("state.param_states.step", "i4"),
}
found["t5x_tiny"] = {"version": 3, "optimizer": {"state": {"param_states": t5x, "step": np.int32(1)}, "target": {}}}

# Pickles
x = jnp.ones((1, 3))
weights = hk.transform(lambda x: hk.nets.MLP([4, 2])(x)).init(jax.random.PRNGKey(0), x)
(FOLDER / "haiku.pkl").write_bytes(pickle.dumps(weights))
found["haiku.pkl"] = dict(weights)


@flax.struct.dataclass
class RunningStatisticsState:  # as in Brax
    mean: Any
    count: Any


RunningStatisticsState.__module__, RunningStatisticsState.__qualname__ = "__main__", "RunningStatisticsState"
normalizer = RunningStatisticsState(np.zeros(3, np.float32), jnp.asarray(4))
brax = (
    normalizer,
    flax.core.FrozenDict(params),
    optax.adam(1e-3).init(params),
    {"large": np.arange(66_000).astype(np.uint8)},
)
(FOLDER / "brax.pkl").write_bytes(pickle.dumps(brax))
(FOLDER / "brax_protocol_2.pkl").write_bytes(pickle.dumps(brax[:3], 2))
opt = ((adam.count, adam.mu, adam.nu), ())
found["brax.pkl"] = ({"mean": normalizer.mean, "count": normalizer.count}, params, opt, brax[3])
found["brax_protocol_2.pkl"] = found["brax.pkl"][:3]
record(found)
assert Path(FOLDER / "expected.json").exists()
