"""Runs examples/training_loop.py in a job, once for each folder in turn.

args: [[folder, steps, stop], …]. Process 1 gets SIGTERM in step `stop`, or never if it is 0. All runs share the jitted
functions of the first run, so that each function is compiled only once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import compiled
import training_loop
from joined import args, process_id

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # the example sets 8 when it is imported
compiled.keep()
stop = 0
jitted: dict[str, Any] = {}
jit = training_loop.jax.jit


def jit_once(function: Any, **options: Any) -> Any:
    own = getattr(function, "__module__", "") == training_loop.__name__
    return jitted.setdefault(function.__name__, jit(function, **options)) if own else jit(function, **options)


class Stopped(training_loop.jaxckpt.Checkpointer):
    def save(self, step: int, *rest: Any, **named: Any) -> Any:
        if step == stop and process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < stop <= step:
            time.sleep(0.1)  # gives JAX's preemption service enough time to forward the signal before the last step
        return super().save(step, *rest, **named)


training_loop.jax.jit = jit_once
training_loop.jaxckpt.Checkpointer = Stopped
for folder, steps, stop in args:  # noqa: B007 (Stopped reads it)
    training_loop.train(Path(folder), steps)
