"""A program in which Ctrl-C comes at every call of an operation, one after the other.

It prints one line of JSON for each operation: how many points were tried, and at how many of them it was interrupted.
After each it makes the next save and restores it. A hang ends the program with the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxckpt

HANG_SECONDS = 20

folder, names, first, stride = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])


class Interrupt:
    """Sends SIGINT to the main thread at the nth moment at which Python looks for signals: a function of Python begins,
    or one of C returns. It also does so when a loop starts over."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            if self.seen == self.at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)
            self.seen += 1


def state(step: int) -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    w = jax.device_put(np.full((64, 64), step, np.float32), split)
    return {"w": w, "b": jnp.full(7, step), "host": np.full(5, step), "step": step}


def check(tree: Any, steps: set[int]) -> None:
    found = {int(value) for leaf in jax.tree.leaves(tree) for value in np.unique(leaf)}
    assert len(found) == 1, found
    assert found <= steps, (found, steps)


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
    check(jaxckpt.restore(path), {0, 1, 2})


def checkpointer(path: str) -> None:
    with jaxckpt.Checkpointer(path + "-steps", keep_last=1) as steps:
        newest = steps.latest_step() or 0
        steps.save(newest + 1, STATES[1], overwrite=True)
        check(steps.restore(), {1})
        if len(steps.steps()) > 1:
            steps.delete(newest)


def run(operation: Callable[[str], None], path: str, at: int | None) -> tuple[int, bool]:
    """(moments that were seen, whether it was interrupted)."""
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
    for _ in range(2):  # what is compiled or remembered at first
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
        # As a program would that catches KeyboardInterrupt to save once more.
        jaxckpt.save(path, STATES[2], overwrite=True)
        check(jaxckpt.restore(path), {2})
        at += stride
        if tried % 200 == 0:
            gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    print(json.dumps({"operation": name, "tried": tried, "interrupted": interrupted, "open_files": files}), flush=True)


STATES = {step: state(step) for step in range(3)}
jaxckpt.save(os.path.join(folder, "warm"), STATES[0])
check(jaxckpt.restore(os.path.join(folder, "warm")), {0})
for name in names:
    attack(name)
faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)  # the end of the program must not hang either
