"""Saves for the first time while the test sends SIGINT, then saves and loads once more."""

import sys

import numpy as np

import jaxckpt

path, tree = sys.argv[1], {"w": np.ones((64, 64), np.float32), "step": 1}
print("started", flush=True)
outcome = "saved"
try:
    try:
        jaxckpt.save(f"{path}/first", tree)
    except KeyboardInterrupt:
        outcome = "interrupted"
    jaxckpt.save(f"{path}/second", tree)
    assert jaxckpt.load_numpy(f"{path}/second")["step"] == 1
except KeyboardInterrupt:
    outcome = "interrupted later"
print(outcome, flush=True)
