"""Joins the job like `joined`, but JAX numbers the processes of the devices otherwise, as libtpu may on TPUs."""

from __future__ import annotations

import sys

import jax
from jax._src import distributed
from joined import process_id

index = (process_id + 1) % int(sys.argv[2])
"""The number of this process: `jax.process_index()`."""

distributed.global_state.process_id = index  # the CPU backend takes it from here when it starts
assert jax.process_index() == index
assert {device.process_index for device in jax.local_devices()} == {index}
distributed.global_state.process_id = process_id
