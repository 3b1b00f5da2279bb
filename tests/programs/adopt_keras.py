"""docs/keras.md, whose callback is jaxckpt.keras.Checkpoints: a run that resumes equals one that does not stop."""

from __future__ import annotations

import functools
import math
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec as P
from page_blocks import blocks
from processes import PASSED

import jaxckpt

(FIT,) = blocks("keras.md")

batches_per_epoch = 4
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return batches_per_epoch

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        batch = x[index * 16 :][:16]
        return batch, batch[:, :4]


def train(epochs: int, run: str, *shape: int) -> keras.Model:
    """Create a model as a new process would, and run the page's code."""
    keras.utils.clear_session()
    devices = keras.distribution.list_devices()[: math.prod(shape)]
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ("batch", "model"), devices))
    layout["net/hidden/kernel"] = (None, "model")
    layout["net/out/kernel"] = ("model", None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu", name="hidden")
    norm = keras.layers.BatchNormalization(name="norm")
    out = keras.layers.Dense(4, name="out")
    model = keras.Sequential([keras.Input((8,)), hidden, norm, keras.layers.Dropout(0.5), out], name="net")
    model.compile(optimizer=keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), loss="mse")
    # The same batches in each epoch, so that a resumed run sees the same data.
    model.fit = functools.partial(model.fit, shuffle=False, verbose=0)
    names = {"model": model, "epochs": epochs, "data": Batches(), "batches_per_epoch": batches_per_epoch}
    exec(FIT.replace('"keras-run"', f'"{run}"'), names)
    return model


train(3, "run", 2, 4)
assert jaxckpt.Run("run").steps() == [8, 12]
saved = jaxckpt.open("run").leaves
assert saved["trainable_variables/net/hidden/kernel"].spec == P(None, "model")
assert saved["optimizer_variables/adam/net_out_kernel_velocity"].spec == P("model", None)

resumed = train(5, "run", 2, 4)
assert jaxckpt.Run("run").steps() == [16, 20]
assert int(resumed.optimizer.iterations) == 20 // 2  # of accumulated gradients
same = jax.tree.map(np.array_equal, resumed.get_state_tree(), train(5, "whole", 2, 4).get_state_tree())
assert all(jax.tree.leaves(same)), same

other = train(6, "run", 4, 2)
assert int(other.optimizer.iterations) == 24 // 2
assert other.get_layer("hidden").kernel.value.sharding.mesh.shape == {"batch": 4, "model": 2}

# An execution of 3 batches, and at the end of an epoch of one.
keras.distribution.set_distribution(None)
keras.utils.clear_session()
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="net")
model.compile(optimizer="sgd", loss="mse", steps_per_execution=3)
with jaxckpt.Checkpointer("executions") as checkpointer:
    callback = jaxckpt.keras.Checkpoints(checkpointer)
    model.fit(Batches(), epochs=2, callbacks=[callback], verbose=0)
assert checkpointer.steps() == [3, 4, 7, 8]
assert callback.step == 8 == int(model.optimizer.iterations)
try:
    jaxckpt.keras.Checkpoints("executions")
except jaxckpt.errors.InputError as error:
    message = str(error)
assert "takes a jaxckpt.Checkpointer, found a str" in message
print(PASSED)
