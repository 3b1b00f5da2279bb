"""Restores in one process the positions of Grain iterators saved by two processes; prints the next batches."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from grain_batches import dataset, some

import jaxckpt

asked: list[tuple[Any, int]] = []


def resplit(states: Any, count: int) -> Any:
    asked.append((states, count))
    return states[:1] * count


rows = dataset(0, 1)
with jaxckpt.Checkpointer(sys.argv[1]) as steps:
    with pytest.raises(jaxckpt.errors.InputError, match="resplit"):
        steps.process_state("dataset")
    rows.set_state(steps.process_state("dataset", resplit=resplit))
    assert asked == [([{"next_index": 4}] * 2, 1)], asked

    # Different positions are returned in the order of the processes.
    first, second = steps.process_state("loader", resplit=lambda states, count: [states])
    assert [json.loads(state)["last_seen_indices"]["0"] for state in (first, second)] == [46, 59]
print(json.dumps(some(rows, 3)))
