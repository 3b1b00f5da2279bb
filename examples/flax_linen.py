"""Flax Linen: a TrainState with partitioned parameters, saved on one mesh and resumed on another."""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))


class Network(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        init = nn.initializers.lecun_normal()
        hidden = nn.gelu(nn.Dense(48, kernel_init=nn.with_partitioning(init, ("data", "model")))(x))
        hidden = nn.Dropout(0.1, deterministic=not training)(hidden)
        return nn.Dense(12, kernel_init=nn.with_partitioning(init, ("model", "data")))(hidden)


class TrainState(train_state.TrainState):
    key: jax.Array


model, optimizer = Network(), optax.adamw(1e-2)


def init() -> TrainState:
    params = model.init(jax.random.key(0), jnp.zeros((1, 12)), training=False)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer, key=jax.random.key(1))


def train_step(state: TrainState) -> tuple[TrainState, jax.Array]:
    key = jax.random.fold_in(state.key, state.step)
    x = jax.random.normal(key, (24, 12))

    def loss_of(params: dict) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x, training=True, rngs={"dropout": key}) - jnp.sin(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(state: TrainState, steps: int, label: str) -> TrainState:
    step = jax.jit(train_step, out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), None))
    for _ in range(steps):
        state, loss = step(state)
    print(f"step {state.step}, loss {loss:.6f}: {label}")
    return state


with tempfile.TemporaryDirectory() as folder:
    state = train(jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), mesh))(), 20, "on 2×4, saved")
    jaxckpt.save(f"{folder}/step-20", state)  # apply_fn and tx are static, so they are not saved
    # A TrainState of shapes and shardings on the other mesh, without data:
    abstract = jax.eval_shape(jax.jit(init, out_shardings=nn.get_sharding(jax.eval_shape(init), other)))
    resumed = train(jaxckpt.restore(f"{folder}/step-20", abstract), 20, "on 3×2, restored at step 20")

# The same steps without a checkpoint: the state at step 20 moves to the other mesh in memory.
moved = jax.tree.map(lambda leaf, target: jax.device_put(leaf, target.sharding), state, abstract)
expected = train(moved, 20, "on 3×2, without a checkpoint")
assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, resumed))
print(f"all {len(jax.tree.leaves(expected))} arrays are equal")
