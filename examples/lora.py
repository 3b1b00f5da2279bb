"""LoRA in Flax NNX: the frozen base saved once, the adapters at each step; on another mesh both, and merged."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine that has no eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))


class Network(nnx.Module):
    def __init__(self, linear: type[nnx.Linear] = nnx.Linear):
        init, rngs = nnx.initializers.lecun_normal(), nnx.Rngs(0)
        self.up = linear(96, 384, kernel_init=nnx.with_partitioning(init, ("data", "model")), rngs=rngs)
        self.down = linear(384, 96, kernel_init=nnx.with_partitioning(init, ("model", "data")), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


def adapt() -> tuple[Network, nnx.Optimizer]:
    model = Network(functools.partial(nnx.LoRALinear, lora_rank=4))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def trained(model: Network, optimizer: nnx.Optimizer) -> dict:
    return {"adapters": nnx.state(model, nnx.LoRAParam), "optimizer": nnx.state(optimizer)}


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.grad(lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2), argnums=wrt)(model)
    optimizer.update(model, grads)


def batch(step: int) -> jax.Array:
    return jax.random.normal(jax.random.key(step), (48, 96))


with tempfile.TemporaryDirectory() as folder, jaxckpt.Checkpointer(f"{folder}/adapters", keep_last=2) as checkpoints:
    with jax.set_mesh(mesh):
        jaxckpt.save(f"{folder}/base", nnx.state(Network()))
        model, optimizer = adapt()
        frozen = nnx.Not(nnx.LoRAParam)
        nnx.update(model, jaxckpt.restore(f"{folder}/base", nnx.state(model, frozen)))
        for step in range(3):
            train_step(model, optimizer, batch(step))
            checkpoints.save(step, trained(model, optimizer))

    with jax.set_mesh(other):
        model2, optimizer2 = nnx.eval_shape(adapt)
        nnx.update(model2, jaxckpt.restore(f"{folder}/base", nnx.state(model2, frozen), mesh=other))
        last = checkpoints.restore(target=trained(model2, optimizer2), mesh=other)
        nnx.update(model2, last["adapters"])
        nnx.update(optimizer2, last["optimizer"])
        print(nnx.state(model2))
    print(checkpoints.steps(), list(jaxckpt.open(checkpoints.path(2))), jaxckpt.open(f"{folder}/base"))
