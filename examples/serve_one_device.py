"""Serving: train in float32 on 2×4 devices, restore as bfloat16 onto one device, and read without devices."""

import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
optimizer = optax.adam(1e-2)


def predict(params: dict, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def init() -> dict:
    up, down = jax.random.normal(jax.random.key(0), (2, 96, 384)) / 16
    params = {"up": up, "down": down.T}
    return {"params": params, "opt_state": optimizer.init(params)}


@jax.jit
def train_step(state: dict, x: jax.Array) -> dict:
    grads = jax.grad(lambda params: jnp.mean((predict(params, x) - jnp.sin(x)) ** 2))(state["params"])
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


WITHOUT_DEVICES = """
import sys, jaxckpt
weights = jaxckpt.load_numpy(sys.argv[1], select="params")["params"]
row = jaxckpt.open(sys.argv[1])["params/up"][7]  # reads only the chunks that contain this row
assert (row == weights["up"][7]).all()
print(f"read without devices: {sum(leaf.nbytes for leaf in weights.values())} bytes, then one row of {row.nbytes}")
"""

with tempfile.TemporaryDirectory() as folder:
    sharded, replicated = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P())
    shardings = jax.tree.map(lambda leaf: sharded if leaf.ndim == 2 else replicated, jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    for step in range(20):
        state = train_step(state, jax.random.normal(jax.random.key(step), (24, 96)))
    jaxckpt.save(f"{folder}/trained", state)
    print(f"trained in float32 on 2×4: {jaxckpt.open(f'{folder}/trained').nbytes} bytes")

    one = SingleDeviceSharding(devices[0])
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=one), state["params"])
    rounded = jaxckpt.Options(cast="unsafe")  # allow the lossy cast from float32
    served = jaxckpt.restore(f"{folder}/trained", {"params": target}, select="params", options=rounded)["params"]
    print(f"served from one device: {sum(leaf.nbytes for leaf in served.values())} bytes of bfloat16")

    environment = os.environ | {"JAX_PLATFORMS": "none"}  # any use of a JAX device would fail
    command = [sys.executable, "-c", WITHOUT_DEVICES, f"{folder}/trained"]
    subprocess.run(command, env=environment, timeout=60, check=True)

x = np.random.default_rng(0).standard_normal((4, 96), np.float32)
for name, leaf in state["params"].items():
    np.testing.assert_array_equal(served[name], np.asarray(leaf).astype(jnp.bfloat16))
np.testing.assert_allclose(predict(served, x), predict(state["params"], x), atol=0.02)
