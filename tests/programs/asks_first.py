"""Asks `should_save` before some saves, in processes whose clocks and metrics differ. Prints the decisions as JSON."""

from __future__ import annotations

import json
import time

from joined import args, process_id

import jaxckpt

options = jaxckpt.Options(sync=False, timeout_seconds=30)
decisions = list[tuple[str, int, bool, bool]]()


def clock() -> float:
    """10 seconds for each step in process 0. The other clocks stand still, or go back."""
    return (10.0, 0.0, -1e6)[process_id] * step


def train(name: str, **rules: object) -> None:
    global step
    step = 0
    with jaxckpt.Checkpointer(f"{args}/{name}", options=options, **rules) as checkpoints:  # pyright: ignore
        checkpoints._due._clock = clock
        checkpoints._due._saved_at = checkpoints._due._met_at = 0.0
        for step in (*range(1, 40), 3, 4, 60, 50, 51):
            time.sleep(0.002 * (process_id == step % 3))
            metrics = {"loss": float((step + process_id) % 5)}
            asked = step % 4 == 0 or checkpoints.should_save(step, metrics=metrics)
            if step % 7 == 0:
                assert asked in (True, checkpoints.should_save(step)), "the same step, the same answer"
            saved = asked and checkpoints.save(step, {"x": step}, metrics=metrics, overwrite=step % 4 == 0)
            decisions.append((name, step, asked, saved))
            if saved:
                checkpoints.wait()
                assert not checkpoints.should_save(step, metrics=metrics)


train("every", every=5)
train("clock", every_seconds=65)
train("predicate", save_if=lambda step, metrics: metrics.get("loss") == 2)
train("all", every=11, every_seconds=65, save_if=lambda step, metrics: metrics.get("loss") == 3)
train("every", every=5)  # a restart, in which steps exist
print(json.dumps(decisions))
