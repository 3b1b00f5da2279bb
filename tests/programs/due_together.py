"""Saves steps by process 0's clock, then by its metrics, which differ between processes. Prints the saved steps."""

from __future__ import annotations

import json
import time

from joined import args, process_id

import jaxckpt

options = jaxckpt.Options(sync=False, timeout_seconds=30)
by_clock = list[int]()
with jaxckpt.Checkpointer(f"{args}/clock", every_seconds=0.6, options=options) as checkpoints:
    for step in range(1, 301):
        time.sleep(0.01 if process_id == step % 3 else 0.005)
        if checkpoints.save(step, {"x": step}):
            by_clock.append(step)
by_predicate = list[int]()
with jaxckpt.Checkpointer(
    f"{args}/predicate", save_if=lambda step, metrics: metrics["loss"] == 2, options=options
) as it:
    for step in range(9):
        if it.save(step, {"x": step}, metrics={"loss": (step + process_id) % 3}):
            by_predicate.append(step)
print(json.dumps([by_clock, by_predicate]))
