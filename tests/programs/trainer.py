"""A training run that keeps only one step: saves steps at random intervals until a file exists.

Arguments: the run's directory, and the path of that file.
"""

from __future__ import annotations

import os
import random
import sys
import time

import numpy as np

import jaxckpt


def main(run: str, stop: str) -> None:
    with jaxckpt.Checkpointer(run, keep_last=1, options=jaxckpt.Options(sync=False)) as checkpoints:
        step = (checkpoints.latest_step() or 0) + 1
        while not os.path.exists(stop):
            checkpoints.save(step, {"first": np.full(1 << 16, step), "last": [np.full(1 << 12, step), step]})
            print(step, flush=True)
            step += 1
            time.sleep(random.uniform(0.02, 0.3))


main(*sys.argv[1:])
