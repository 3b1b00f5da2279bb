"""Equinox and Optax: a module with functions and numbers among its leaves, saved on one mesh and resumed on another."""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))
optimizer = optax.adam(1e-2)


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.mlp(self.dropout(x, key=key))


class Training(eqx.Module):
    model: Model
    opt_state: optax.OptState
    key: jax.Array


def create() -> Training:
    mlp = eqx.nn.MLP(12, 12, width_size=48, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))
    model = Model(mlp, eqx.nn.Dropout(0.1))
    return Training(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1))


def place(training: Training, mesh: Mesh) -> Training:
    def sharding_of(leaf: jax.Array) -> NamedSharding:  # splits the hidden layer's width, replicates the rest
        return NamedSharding(mesh, P(*("model" if size == 48 else None for size in leaf.shape)))

    return eqx.filter_shard(training, jax.tree.map(sharding_of, eqx.filter(training, eqx.is_array)))


@eqx.filter_jit
def train_step(training: Training, mesh: Mesh) -> tuple[Training, jax.Array]:
    key, dropout_key, next_key = jax.random.split(training.key, 3)
    x = eqx.filter_shard(jax.random.normal(key, (96, 12)), NamedSharding(mesh, P("data")))
    keys = jax.random.split(dropout_key, len(x))
    loss_of = eqx.filter_value_and_grad(lambda model: jnp.mean((jax.vmap(model)(x, keys) - jnp.sin(x)) ** 2))
    loss, grads = loss_of(training.model)
    updates, opt_state = optimizer.update(grads, training.opt_state)
    return place(Training(eqx.apply_updates(training.model, updates), opt_state, next_key), mesh), loss


def train(training: Training, mesh: Mesh, steps: int, label: str) -> Training:
    for _ in range(steps):
        training, loss = train_step(training, mesh)
    print(f"loss {loss:.6f} {label}")
    return training


with tempfile.TemporaryDirectory() as folder:
    training = train(place(create(), mesh), mesh, 20, "at step 20 on 2×4, saved")
    jaxckpt.save(f"{folder}/step-20", eqx.filter(training, callable, inverse=True))  # everything except functions

    abstract = eqx.filter_eval_shape(create)  # the module with shapes instead of arrays, and its functions
    restored = jaxckpt.restore(f"{folder}/step-20", abstract, mesh=other)  # keeps each leaf's PartitionSpec
    resumed = train(restored, other, 20, "at step 40 on 3×2, restored at step 20")

# The same steps without a checkpoint: all arrays move to the other mesh in memory.
arrays, functions = eqx.partition(training, eqx.is_array)
moved = jax.device_put(arrays, jax.tree.map(lambda leaf: leaf.sharding, eqx.filter(restored, eqx.is_array)))
expected = train(eqx.combine(moved, functions), other, 20, "at step 40 on 3×2, without a checkpoint")
assert eqx.tree_equal(expected, resumed)
print(f"all {len(jax.tree.leaves(arrays))} arrays are equal")
