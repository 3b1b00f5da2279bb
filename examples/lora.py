"""LoRA in Flax NNX: save the frozen base once and the adapters at each step, restore both, and merge them."""

import functools
import tempfile

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jaxckpt

jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine with fewer than eight accelerators
devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
mesh = Mesh(np.reshape(devices[:8], (2, 4)), ("data", "model"))
other = Mesh(np.reshape(devices[:6], (3, 2)), ("data", "model"))
FROZEN = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


def network(linear: type[nnx.Linear] = nnx.Linear) -> nnx.Sequential:
    init, rngs = nnx.initializers.lecun_normal(), nnx.Rngs(0)
    up = linear(96, 384, kernel_init=nnx.with_partitioning(init, ("data", "model")), rngs=rngs)
    down = linear(384, 96, kernel_init=nnx.with_partitioning(init, ("model", "data")), rngs=rngs)
    return nnx.Sequential(up, nnx.gelu, down)


def adapt() -> dict:
    model = network(functools.partial(nnx.LoRALinear, lora_rank=4))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)}


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> None:
    adapters = nnx.DiffState(0, nnx.LoRAParam)
    optimizer.update(model, nnx.grad(lambda model: ((model(x) - x) ** 2).mean(), argnums=adapters)(model))


def train(tuning: dict, steps: range, save=lambda step, state: None) -> nnx.State:
    for step in steps:
        train_step(**tuning, x=jax.random.normal(jax.random.key(step), (48, 96)))
        save(step, nnx.state(tuning, nnx.Not(FROZEN)))
    return nnx.state(tuning)


with tempfile.TemporaryDirectory() as folder, jaxckpt.Checkpointer(f"{folder}/adapters") as checkpoints:
    with jax.set_mesh(mesh):
        jaxckpt.save(f"{folder}/base", nnx.state({"model": network()}))  # stands for a pretrained model
        tuning = adapt()
        nnx.update(tuning, jaxckpt.restore(f"{folder}/base", nnx.state(tuning, FROZEN)))
        state = train(tuning, range(5), checkpoints.save)

    with jax.set_mesh(other):
        graph, base, adapters = nnx.split(nnx.eval_shape(adapt), FROZEN, ...)  # shapes and specs, without data
        base, adapters = jaxckpt.restore(f"{folder}/base", base), checkpoints.restore(target=adapters, mesh=other)
        tuning = nnx.merge(graph, base, adapters)

        moved = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, nnx.state(tuning)))
        resumed = train(tuning, range(5, 10), checkpoints.save)
        expected = train(nnx.merge(graph, moved), range(5, 10))  # the same steps without a checkpoint
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), expected, resumed))
        print("steps 5 to 9 on 3×2, with and without a checkpoint: all arrays are equal")

        merged = jaxckpt.load_numpy(f"{folder}/base")
        for name, layer in jaxckpt.load_numpy(checkpoints.path(9), select="model")["model"]["layers"].items():
            change = layer["lora"]["lora_a"] @ layer["lora"]["lora_b"]
            merged["model"]["layers"][name]["kernel"] += change
        jaxckpt.save(f"{folder}/merged", merged)

        plain, x = {"model": network()}, jax.random.normal(jax.random.key(10), (48, 96))
        nnx.update(plain, jaxckpt.restore(f"{folder}/merged", nnx.state(plain)))
        np.testing.assert_allclose(plain["model"](x), tuning["model"](x), atol=1e-5)
        base, step = jaxckpt.open(f"{folder}/base"), jaxckpt.open(checkpoints.path(9))
        print(f"merged on the host; the base has {base.nbytes} bytes, a step with its optimizer {step.nbytes} bytes")
