"""Writes the files of Keras 3.15 in this folder, with h5py 3.16 and the JAX backend, and records what they hold."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from encode import FOLDER, record

inputs = keras.layers.Input((3,))
model = keras.Sequential([inputs, keras.layers.Dense(4, dtype="bfloat16", name="d1"), keras.layers.Dense(2, name="d2")])
model.compile("adam", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
model.save(FOLDER / "model.keras")
model.save_weights(FOLDER / "keras.weights.h5")
model.save(FOLDER / "keras_old.h5")
d1, d2 = ({str(n): np.asarray(value) for n, value in enumerate(layer.weights)} for layer in model.layers)
optimizer = [np.asarray(value) for value in model.optimizer.variables]
new = {
    "layers": {"dense": {"vars": d1}, "dense_1": {"vars": d2}},
    "optimizer": {"vars": {str(number): value for number, value in enumerate(optimizer)}},
}
named = {variable.name: value for variable, value in zip(model.optimizer.variables, optimizer, strict=True)}
old = {
    "model_weights": {
        name: {"sequential": {name: {"kernel": layer["0"], "bias": layer["1"]}}}
        for name, layer in (("d1", d1), ("d2", d2))
    },
    "optimizer_weights": {"adam": named},
}
record({"model.keras": new, "keras.weights.h5": new, "keras_old.h5": old})
