"""Pipeline stages: four layers on four devices, stored on a mesh of two devices, restored onto the four.

A network of four Linear layers, 16 -> 8 -> 4 -> 2 -> 1, keeps each layer and its Adam state on a separate
device; no mesh contains all four. One function chooses the layout of each leaf in the checkpoint, over a
storage mesh of two devices, independently of the layout for computing. Then the state is restored onto the
four stages. The next step must give the same bits as without a checkpoint.

    python examples/pipeline_stages.py

It simulates four CPU devices, needs jaxckpt, optax and rich, and takes seconds. If any bit differs, the exit
status is 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr
from rich import box
from rich.console import Console
from rich.table import Table

import jaxckpt

WIDTHS = (16, 8, 4, 2, 1)
BATCH = 32

State = dict[str, Any]

optimizer = optax.adam(1e-2)


def init_stage(key: jax.Array, inputs: int, outputs: int) -> State:
    params = {
        "weight": jax.random.normal(key, (outputs, inputs)) * inputs**-0.5,
        "bias": jnp.zeros(outputs),
    }
    return {"params": params, "opt": optimizer.init(params)}


def init(key: jax.Array) -> State:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    stages = [init_stage(*arguments) for arguments in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)]
    return {"step": jnp.zeros((), jnp.int32), "stages": stages}


def compute_layout(places: list[SingleDeviceSharding]) -> State:
    """The layout for training: each stage on its own device, the step counter with the first stage."""
    shapes = jax.eval_shape(init, jax.random.key(0))

    def at(place: SingleDeviceSharding, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)

    stages = [at(place, stage) for place, stage in zip(places, shapes["stages"], strict=True)]
    return {"step": at(places[0], shapes["step"]), "stages": stages}


def storage_layout(path: str, leaf: Any) -> P:
    """The layout in the checkpoint: each leaf in two halves, along a dimension that two divides."""
    if leaf.ndim == 0:
        return P()  # the step, and Adam's count in every stage
    if path.startswith("stages/3/") and path.endswith("/weight"):
        return P(None, "half")  # [1, 2]: only dimension 1 can be halved
    if path.startswith("stages/3/") and path.endswith("/bias"):
        return P()  # [1]: replicated on both devices, but written only once
    return P("half")


def linear(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ params["weight"].T + params["bias"]


def mean_squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((predictions - targets) ** 2)


def train_step(state: State, places: list[SingleDeviceSharding]) -> tuple[State, float]:
    """One step through the pipeline: activations move forward through the devices, gradients move back."""
    # The batch depends only on the step, so a restored run gets the same data as an uninterrupted one.
    random = np.random.default_rng(int(state["step"]))
    inputs = random.standard_normal((BATCH, WIDTHS[0]), np.float32)
    targets = jax.device_put(np.sin(inputs.sum(axis=1, keepdims=True)), places[-1])

    x, pullbacks = jnp.asarray(inputs), []
    for stage, place in zip(state["stages"], places, strict=True):
        x, pullback = jax.vjp(linear, stage["params"], jax.device_put(x, place))
        pullbacks.append(pullback)
    loss, gradient = jax.value_and_grad(mean_squared_error)(x, targets)

    stages: list[State] = []
    for stage, place, pullback in reversed(list(zip(state["stages"], places, pullbacks, strict=True))):
        gradients, gradient = pullback(jax.device_put(gradient, place))
        updates, opt = optimizer.update(gradients, stage["opt"])
        stages.insert(0, {"params": optax.apply_updates(stage["params"], updates), "opt": opt})
    return {"step": state["step"] + 1, "stages": stages}, float(loss)


def layout_table(state: State, checkpoint: jaxckpt.Checkpoint) -> Table:
    """Both layouts of every leaf except Adam's moments, which have the layout of their parameter."""
    table = Table("leaf", "shape", "computed on", "stored as", box=box.SIMPLE_HEAD)
    for path, leaf in jax.tree.leaves_with_path(state):
        name = keystr(path, simple=True, separator="/")
        if "/mu/" not in name and "/nu/" not in name:
            (device,) = leaf.devices()
            table.add_row(name, str(leaf.shape), f"device {device.id}", checkpoint[name].layout)
    return table


def main() -> int:
    # JAX reads both when it first looks for devices, not when it is imported.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    jax.config.update("jax_platforms", "cpu")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)

    places = [SingleDeviceSharding(device) for device in jax.devices()]
    storage = Mesh(jax.devices()[:2], ("half",))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, compute_layout(places))
    state = jax.device_put(init(jax.random.key(0)), shardings)
    state, loss = train_step(state, places)

    with tempfile.TemporaryDirectory(prefix="jaxckpt-pipeline-") as directory:
        path = Path(directory) / "checkpoint"
        info = jaxckpt.save(path, state, mesh=storage, specs=storage_layout)
        console.print(layout_table(state, jaxckpt.open(path)))
        console.print(f"step 1, loss {loss:.7f}: saved {info.total_bytes} bytes in {info.objects} objects")
        state, loss = train_step(state, places)
        console.print(f"step 2, loss {loss:.7f}: continued without the checkpoint")

        # The target describes the new arrays. Nothing else but the path is used.
        restored = jaxckpt.restore(path, compute_layout(places))
        restored, restored_loss = train_step(restored, places)
        console.print(f"step 2, loss {restored_loss:.7f}: restored onto the four stages, then continued")

    def equal_bits(a: jax.Array, b: jax.Array) -> bool:
        return a.sharding == b.sharding and np.asarray(a).tobytes() == np.asarray(b).tobytes()

    equal = loss == restored_loss and jax.tree.all(jax.tree.map(equal_bits, state, restored))
    result = "[green]passed[/]" if equal else "[bold red]FAILED[/]"
    console.print(f"{result}  step 2 gives the same loss and state with and without the checkpoint, bit for bit")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
