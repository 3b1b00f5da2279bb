"""Reads a checkpoint with Orbax for each input line, and prints the outcome; saves it first if requested."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

warnings.simplefilter("ignore")
path, fresh = sys.argv[1], sys.argv[2] == "True"
draw = np.random.default_rng(0)
tree = {
    "w": jax.numpy.asarray(draw.normal(size=(64, 64)).astype(np.float32)),
    "half": jax.numpy.asarray(draw.normal(size=(20, 30)).astype(ml_dtypes.bfloat16)),
    "small": draw.normal(size=24),
    "step": 3,
}


def bits(tree: Any) -> list[tuple[tuple[int, ...], bytes]]:
    return [(np.asarray(leaf).shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


checkpointers = (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer())
if fresh:
    checkpointers[0].save(path, tree)
    checkpointers[0].wait_until_finished()
print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    try:
        restored = checkpointers[number % 2].restore(path)
        print("correct bits" if bits(restored) == bits(tree) else "other values", flush=True)
    except Exception:
        print("error", flush=True)
