"""Saves a step with a slow flush and is killed during it. A second run saves and flushes the next step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import dying
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from joined import args, process_id

import jaxckpt

sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
values = np.arange(8 * 4096, dtype=np.float32).reshape(8, -1)
step, rate = (10, 20_000) if args["first"] else (20, None)
options = jaxckpt.Options(object_bytes=4096, chunk_bytes=1024)
folder = args["local"]
pids = Path(folder).parent / "pids"
dying.register(pids)
with jaxckpt.Checkpointer(
    args["path"],
    every=10,
    local=jaxckpt.LocalTier(folder, max_bytes_per_second=rate),
    options=options,
    on_preemption="continue",
) as steps:
    tree = {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index] + step)}
    if args["stop"] and process_id == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    started = time.monotonic()
    while args["stop"] and not steps.preempted:
        steps.save(step, tree)
        step += 1
        time.sleep(0.1)
    if not args["stop"]:
        steps.save(step, tree)
    while args["first"]:
        time.sleep(0.01)
        if list(Path(args["path"]).glob("00000010/data-*/*/c/*/*")) and process_id == args["victim"]:
            dying.die(pids)
    steps.wait()
    print(step - 1, time.monotonic() - started)

print("all checks passed")
