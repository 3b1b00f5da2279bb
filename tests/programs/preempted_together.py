"""Trains in two processes, and saves every `stride` steps; one of them gets SIGTERM before the seventh save.

With "exits" or "logs" as the third argument, the program has its own handler of SIGTERM; with "late" in addition, it
sets this handler after its first saves; with "ignores_interrupts", it also ignores Ctrl-C, as a program that a shell
has started in the background. With "asks", it calls `save` only if `should_save` returns True. With "dies",
both raise an error after the signal, as if the workers of their data loaders had received it too.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from joined import args, process_id

import jaxckpt

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, P("a", "b"))
x = jax.make_array_from_callback((8, 8), sharding, lambda index: np.zeros((8, 8), np.float32)[index])
add = jax.jit(lambda x: x + 1 + 0 * x.sum(), donate_argnums=0)
folder, stride, *handler = args


def set_handler() -> None:
    if "exits" in handler:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    elif "logs" in handler:
        signal.signal(signal.SIGTERM, lambda *_: print("notified", file=sys.stderr))


if "ignores_interrupts" in handler:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "late" not in handler:
    set_handler()
with jaxckpt.Checkpointer(folder, every=1000 * stride) as checkpoints:
    for step in range(stride, 400 * stride, stride):
        x = add(x)
        if step == 4 * stride and "late" in handler:
            set_handler()
        if step == 7 * stride and process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 7 * stride and handler == ["dies"]:
            # JAX's `PreemptionSyncManager::Shutdown` holds the lock that the thread which it joins needs for choosing
            # the last step: a process that ends before the step is chosen may hang in JAX for ever.
            number = step  # `save` has asked JAX about 1 to 6
            while not reached_preemption_sync_point(number):
                number += 1
                time.sleep(0.01)
            raise RuntimeError("DataLoader worker is killed by signal: Terminated")
        try:
            if handler == ["asks"] and not checkpoints.should_save(step):
                time.sleep(0.02 * (1 + process_id))
                continue
            checkpoints.save(step, {"x": x, "step": step}, process_state={"at": step})
        except SystemExit:
            print("last", step, flush=True)
            raise
        time.sleep(0.02 * (1 + process_id))
