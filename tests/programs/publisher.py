"""Publishes weights endlessly; every value is the step's number modulo 256. Argument: the directory."""

from __future__ import annotations

import itertools
import sys
import time

import jax.numpy as jnp

import jaxckpt

with jaxckpt.weights.Publisher(sys.argv[1], anchor_every=5, options=jaxckpt.Options(sync=False)) as publisher:
    for step in itertools.count():
        value = jnp.float32(step % 256)
        publisher.publish(step, {"w": jnp.full((300, 70), value), "step": value})
        time.sleep(0.05)  # a follower reads a step in this time: without a pause it would hardly keep up
