"""Plain JAX: a dict of arrays under jax.jit with shardings, saved on one mesh and resumed on another."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))

SPECS = {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data")}
STATE_SPECS = {"params": SPECS, "momentum": SPECS, "key": P(), "step": P()}


def shardings_on(mesh: Mesh) -> dict:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), STATE_SPECS)


def init() -> dict:
    up, down = jax.random.normal(jax.random.key(0), (2, 12, 48)) / 4
    params = {"up": up, "bias": jnp.zeros(48), "down": down.T}
    momentum = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "momentum": momentum, "key": jax.random.key(1), "step": jnp.int32(0)}


def loss_of(params: dict, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - jnp.sin(x)) ** 2)


def train_step(state: dict) -> tuple[dict, jax.Array]:
    key, next_key = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_of)(state["params"], jax.random.normal(key, (24, 12)))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "key": next_key, "step": state["step"] + 1}, loss


def train(state: dict, mesh: Mesh, steps: int, label: str) -> dict:
    shardings = shardings_on(mesh)
    step = jax.jit(train_step, in_shardings=(shardings,), out_shardings=(shardings, None), donate_argnums=0)
    for _ in range(steps):
        state, loss = step(state)
    print(f"step {state['step']}, loss {loss:.6f}: {label}")
    return state


with tempfile.TemporaryDirectory() as folder:
    state = train(jax.jit(init, out_shardings=shardings_on(mesh))(), mesh, 20, "on 2×4, saved")
    jaxckpt.save(f"{folder}/step-20", state)

    resumed = jaxckpt.restore(f"{folder}/step-20", mesh=other)  # keeps each leaf's PartitionSpec, on six devices
    resumed = train(resumed, other, 20, "on 3×2, restored at step 20")

# The same steps without a checkpoint: the state at step 20 moves to the other mesh in memory.
expected = train(jax.device_put(state, shardings_on(other)), other, 20, "on 3×2, without a checkpoint")
assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, resumed))
print(f"all {len(jax.tree.leaves(expected))} arrays are equal")
