"""Flax NNX and Optax: the model, its nnx.Optimizer and dropout keys, saved on one mesh and resumed on another."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(12, 48, kernel_init=nnx.with_partitioning(init, ("data", "model")), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(48, 12, kernel_init=nnx.with_partitioning(init, ("model", "data")), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.gelu(self.up(x))))


@nnx.jit
def create() -> dict:
    model = Network(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)}


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def train(training: dict, steps: range, label: str) -> nnx.State:
    for step in steps:
        loss = train_step(**training, x=jax.random.normal(jax.random.key(step), (24, 12)))
    print(f"step {training['optimizer'].step[...]}, loss {loss:.6f}: {label}")
    return nnx.state(training)


with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
    state = train(create(), range(20), "on 2×4, saved")
    jaxckpt.save(f"{folder}/step-20", state)

    with jax.set_mesh(other):
        graph, abstract = nnx.get_abstract_model(create, other)  # shapes and shardings, without data
        resumed = nnx.merge(graph, jaxckpt.restore(f"{folder}/step-20", abstract))
        resumed = train(resumed, range(20, 40), "on 3×2, restored at step 20")

        # The same steps without a checkpoint: the state at step 20 moves to the other mesh in memory.
        moved = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract))
        expected = train(nnx.merge(graph, moved), range(20, 40), "on 3×2, without a checkpoint")

assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, resumed))
print(f"all {len(jax.tree.leaves(expected))} arrays are equal")
