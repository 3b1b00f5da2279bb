"""Restores runs whose newest step cannot be read; process 2 has another user. Each process prints what it got."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P(None))
init = jax.jit(lambda: {"w": jnp.zeros((64, 8))}, out_shardings=sharding)
if process_id == 2 and os.getuid() == 0:
    os.seteuid(65534)
outcomes: dict[str, object] = {}
for kind in args["kinds"]:
    checkpoints = jaxckpt.Checkpointer(f"{args['folder']}/{kind}", options=jaxckpt.Options(timeout_seconds=30))
    try:
        checkpoints.restore_or_init(init)
        others: object = "no error"
    except jaxckpt.JaxckptError as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        others = "[10, 20" in notes or f"{type(error).__name__}: {error} {notes}"
    last, state = checkpoints.restore_or_init(init, on_unreadable="previous")
    values = sorted({float(value) for value in np.asarray(state["w"].addressable_data(0)).ravel()})
    assert np.asarray(checkpoints.restore()["w"].addressable_data(0))[0, 0] == 20
    outcomes[kind] = others, last, values
    checkpoints.close()
print(json.dumps(outcomes))
