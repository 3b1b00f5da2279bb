"""A server of several processes: a Hugging Face folder, then the steps of a run, into an NNX model, by its own shards.

The part between the lines is the server, for any NNX model whose attributes have the names of the rules' leaves.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxckpt

CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "dtype": "float32"}
STEPS = 3


class Attention(nnx.Module):
    def __init__(self, config: dict, rngs: nnx.Rngs) -> None:
        m, heads = config["hidden_size"], (config["num_attention_heads"], config["head_dim"])
        self.q, self.k, self.v = (nnx.LinearGeneral(m, heads, use_bias=False, rngs=rngs) for _ in range(3))
        self.o = nnx.LinearGeneral(heads, m, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.o(jax.nn.dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))


class Mlp(nnx.Module):
    def __init__(self, config: dict, rngs: nnx.Rngs) -> None:
        m, f = config["hidden_size"], config["intermediate_size"]
        self.gate, self.up = (nnx.Linear(m, f, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(f, m, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: dict, rngs: nnx.Rngs) -> None:
        self.attn_norm, self.mlp_norm = (nnx.RMSNorm(config["hidden_size"], rngs=rngs) for _ in range(2))
        self.attn, self.mlp = Attention(config, rngs), Mlp(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nnx.Module):
    """A Llama without rotary embeddings, as short as possible."""

    def __init__(self, config: dict, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(config["vocab_size"], config["hidden_size"], rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(config["hidden_size"], rngs=rngs)
        self.head = nnx.Linear(config["hidden_size"], config["vocab_size"], use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


# --------------------------------------------------------------------------------------------------------------


def specs(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Heads, hidden units and the vocabulary over "model"."""
    if path.endswith(("q/kernel", "k/kernel", "v/kernel", "gate/kernel", "up/kernel", "head/kernel")):
        return P(None, "model")
    return P("model") if path.endswith(("o/kernel", "down/kernel", "embedding")) else P()


def load(path: str, mesh: Mesh, rules: jaxckpt.rules.Rules | None = None) -> Model:
    """The model of a Hugging Face folder, with its rules, or of a step. Each process reads its own shards."""
    abstract = nnx.eval_shape(lambda: Model(CONFIG, nnx.Rngs(0)))  # no array is allocated
    if rules is None:  # a training state
        return jaxckpt.restore(path, {"params": abstract}, mesh=mesh, specs=specs, select="params")["params"]
    return jaxckpt.restore(path, abstract, mesh=mesh, specs=specs, rename=rules)


def new_steps(run: jaxckpt.Run) -> Iterator[str]:
    """The path of each new step of a run. Process 0 looks, and holds the step until all processes have read it."""
    steps = run.follow(timeout_seconds=60, poll_seconds=0.1) if jax.process_index() == 0 else None
    while True:
        step = next(steps, None) if steps else None
        number = broadcast_one_to_all(np.int32(step.number if step else -1))
        if number < 0:  # the training has ended
            return
        yield f"{run.directory}@{number}"


def serve(folder: str, run: str) -> Iterator[jax.Array]:
    """The logits of a prompt, by the weights of the folder, then by those of each step of the run."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    apply = nnx.jit(lambda model, tokens: jax.lax.with_sharding_constraint(model(tokens), P()))
    prompt = jnp.arange(8)[None]
    with jax.set_mesh(mesh):
        model = load(folder, mesh, jaxckpt.rules.huggingface_rules(folder))
        yield apply(model, prompt)
        for path in new_steps(jaxckpt.Run(run)):
            del model  # otherwise the devices would hold the weights twice
            model = load(path, mesh)
            yield apply(model, prompt)


# --------------------------------------------------------------------------------------------------------------


def write_checkpoints(folder: str) -> list[np.ndarray]:
    """Write a Hugging Face folder, and a run whose steps each add 0.01. Returns the logits of each."""
    os.mkdir(f"{folder}/hf")
    with open(f"{folder}/hf/config.json", "w") as file:
        json.dump(CONFIG, file)
    model = Model(CONFIG, nnx.Rngs(0))
    back = jaxckpt.rules.huggingface_rules(f"{folder}/hf").inverse()
    jaxckpt.save(f"{folder}/export", model, format="safetensors", rename=back)
    for name in os.listdir(f"{folder}/export"):
        os.rename(f"{folder}/export/{name}", f"{folder}/hf/{name}")
    logits = [np.asarray(model(jnp.arange(8)[None]))]
    with jaxckpt.Checkpointer(f"{folder}/run") as checkpoints:
        for step in range(1, STEPS + 1):
            nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.01, nnx.state(model)))
            checkpoints.save(step, {"params": model, "step": step})
            logits.append(np.asarray(model(jnp.arange(8)[None])))
    return logits


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = write_checkpoints(folder)
        address = f"localhost:{random.randrange(20_000, 32_000)}"  # below the kernel's ephemeral ports
        four_devices = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        commands = [[sys.executable, __file__, folder, address, str(process)] for process in range(2)]
        servers = [subprocess.Popen(command, env=four_devices) for command in commands]
        try:
            assert [server.wait(120) for server in servers] == [0, 0]
        finally:
            for server in servers:
                server.kill()
        served = np.load(f"{folder}/served.npy")
        np.testing.assert_allclose(served, np.stack(expected), rtol=1e-3, atol=1e-4)
        print(f"two processes served the folder and {len(served) - 1} steps of the run, each its own shards")


if len(sys.argv) > 1:  # one of the two servers
    jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]), initialization_timeout=60)
    logits = [np.asarray(found) for found in serve(f"{sys.argv[1]}/hf", f"{sys.argv[1]}/run")]
    if jax.process_index() == 0:
        np.save(f"{sys.argv[1]}/served.npy", np.stack(logits))
else:
    jax.config.update("jax_platforms", "cpu")
    main()
