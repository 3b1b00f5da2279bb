"""Training on storage that fails in bursts. One line for each round: what is wrong, or "all accounted for".

Arguments: a directory, "full" (ENOSPC, on a small file system) or "refused" (EFBIG), and the rounds as JSON: each has a
policy, a seed, and whether the last burst is long.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import bursts
import numpy as np

import jaxckpt

STEPS, FAILURES = 24, 5
OPTIONS = jaxckpt.Options(sync=False)


def train(folder: Path, policy: str, plan: list[bursts.Burst], refuse: object, background: bool) -> str:
    """Train, and say what has become of the steps."""
    assert callable(refuse)
    shutil.rmtree(folder, ignore_errors=True)
    step = 0
    try:
        with jaxckpt.Checkpointer(
            folder, on_failure=policy, max_failures=FAILURES, keep_last=50, background=background, options=OPTIONS
        ) as checkpoints:
            for step in bursts.Training(plan, refuse).steps(STEPS):
                checkpoints.save(step, {"w": np.full(5000, step), "step": step})
    except jaxckpt.errors.StorageError as error:
        reported = [incident.step for incident in jaxckpt.Run(folder).incidents()]
        notes = " ".join(error.__notes__)
        if "max_failures" not in notes:
            return f"{error}: {notes}"
        if len(reported) < FAILURES or step > reported[-1] + 3:
            return f"stopped at step {step}: {reported}"
        return "stopped"
    if missing := bursts.unaccounted(folder, STEPS):
        return f"neither published nor reported: {missing}"
    for number in jaxckpt.Run(folder).steps():
        saved = jaxckpt.load_numpy(folder / f"{number:08d}")
        if saved["step"] != number or set(saved["w"].tolist()) != {number}:
            return f"step {number} has other values"
    return "all accounted for"


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    with jaxckpt.Checkpointer(folder / "warm", options=OPTIONS) as warm:  # imports everything
        warm.save(1, {"w": np.zeros(3)})
        warm.restore()
    refuse = bursts.fill(folder / "ballast") if kind == "full" else bursts.refuse_files
    for policy, seed, is_long in json.loads(sys.argv[3]):
        plan = bursts.short_bursts(seed, STEPS)
        if is_long:
            plan = [*plan[: len(plan) // 2], (STEPS / 2, bursts.LONG)]
        print(train(folder / "run", policy, plan, refuse, seed % 4 != 3 or is_long), flush=True)
