"""Restores the positions of Grain's iterators in two processes; prints the next batches."""

from __future__ import annotations

import json

from grain_batches import dataset, loader, some
from joined import args, process_id

import jaxckpt

rows, records = dataset(process_id, 2), loader(process_id, 2)
with jaxckpt.Checkpointer(args) as steps:
    assert steps.restore() == {"step": 4}
    rows.set_state(steps.process_state("dataset"))
    records.set_state(steps.process_state("loader"))
print(json.dumps([some(rows, 3), some(records, 3)]))
