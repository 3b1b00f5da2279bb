"""Publishes versions of a small Llama until it is killed, or until there are enough.

Arguments: the directory, the encoding, the Hugging Face folder, and the number of the last training step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxckpt

directory, encoding, model, last = sys.argv[1:]
rules = jaxckpt.rules.huggingface_rules(model, scan=True)
params = jaxckpt.load_numpy(model, rename=rules)
versions = [int(path.name[8:]) for path in Path(directory).glob("weight_v*")]
with jaxckpt.weights.Publisher(
    directory, anchor_every=25, format=encoding, rules=rules.inverse(), options=jaxckpt.Options(sync=False)
) as publisher:
    for step in range(max(versions, default=0), int(last)):
        scale = 1 + 1e-4 * (step * 7919 % 1009)
        publisher.publish(step, jax.tree.map(lambda leaf, scale=scale: jnp.asarray(leaf * scale), params))
