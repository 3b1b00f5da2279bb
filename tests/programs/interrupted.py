"""Interrupts an operation with Ctrl-C at every call that it makes, one call per run.

After each interrupt, it saves again and restores. Prints one line of JSON per operation, with the number of points
tried and the number of interrupts. After a hang, the program prints the stacks of its threads and ends.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interrupting import Interrupt, require_complete

import jaxckpt

HANG_SECONDS = 20

folder, names, first, stride = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])


def state(step: int) -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    w = jax.device_put(np.full((64, 64), step, np.float32), split)
    return {"w": w, "b": jnp.full(7, step), "host": np.full(5, step), "step": step}


def save(path: str) -> None:
    jaxckpt.save(path, STATES[1], overwrite=True)


def save_async(path: str) -> None:
    jaxckpt.save_async(path, STATES[1], overwrite=True)


def wait(path: str) -> None:
    profile = sys.getprofile()
    sys.setprofile(None)
    pending = jaxckpt.save_async(path, STATES[1], overwrite=True)
    sys.setprofile(profile)
    pending.wait()


def restore(path: str) -> None:
    require_complete(jaxckpt.restore(path), {0, 1, 2})


def checkpointer(path: str) -> None:
    with jaxckpt.Checkpointer(path + "-steps", keep_last=1) as steps:
        newest = steps.latest_step() or 0
        steps.save(newest + 1, STATES[1], overwrite=True)
        require_complete(steps.restore(), {1})
        if len(steps.steps()) > 1:
            steps.delete(newest)


def run(operation: Callable[[str], None], path: str, at: int | None) -> tuple[int, bool]:
    """(number of points, whether it was interrupted)."""
    interrupt = Interrupt(at)
    sys.setprofile(interrupt)
    try:
        operation(path)
    except KeyboardInterrupt:
        return interrupt.seen, True
    finally:
        sys.setprofile(None)
    return interrupt.seen, False


def attack(name: str) -> None:
    path = os.path.join(folder, name)
    jaxckpt.save(path, STATES[0])
    for _ in range(2):  # warm-up: compilation and caches
        run(globals()[name], path, None)
        jaxckpt.save(path, STATES[0], overwrite=True)
    interrupted = tried = 0
    at = first
    while True:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        seen, hit = run(globals()[name], path, at)
        if seen < at:
            break
        tried += 1
        interrupted += hit
        # Like a program that catches KeyboardInterrupt and saves once more.
        jaxckpt.save(path, STATES[2], overwrite=True)
        require_complete(jaxckpt.restore(path), {2})
        at += stride
        if tried % 200 == 0:
            gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    assert not errors, errors  # the caller has the interrupt
    print(json.dumps({"operation": name, "tried": tried, "interrupted": interrupted, "open_files": files}), flush=True)


errors: list[str] = []
handler = logging.Handler(logging.ERROR)
handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("jaxckpt").addHandler(handler)
STATES = {step: state(step) for step in range(3)}
jaxckpt.save(os.path.join(folder, "warm"), STATES[0])
require_complete(jaxckpt.restore(os.path.join(folder, "warm")), {0})
for name in names:
    attack(name)
faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)  # the exit must not hang either
