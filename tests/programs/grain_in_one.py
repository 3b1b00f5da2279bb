"""Saves and restores the positions of Grain's iterators in one process, without a call of `resplit`."""

from __future__ import annotations

import sys
from typing import Any

from grain_batches import dataset, loader, some

import jaxckpt


def refuse(states: Any, count: int) -> Any:
    raise SystemExit("called")


rows, records = dataset(0, 1), loader(0, 1)
with jaxckpt.Checkpointer(sys.argv[1], background=False) as steps:
    for step in range(3):
        some(rows, 1)
        some(records, 2)
        state = {"dataset": rows.get_state(), "loader": records.get_state()}
        steps.save(step, {"step": step}, process_state=state)
    expected = some(rows, 3), some(records, 3)
    rows, records = dataset(0, 1), loader(0, 1)
    rows.set_state(steps.process_state("dataset", resplit=refuse))
    records.set_state(steps.process_state("loader"))
    assert (some(rows, 3), some(records, 3)) == expected
    assert steps.process_state("dataset", 1) == {"next_index": 2}  # an explicit step

print("all checks passed")
