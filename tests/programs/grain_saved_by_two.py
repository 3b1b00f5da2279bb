"""Saves the positions of Grain's iterators in two processes; process 1's loader is further ahead.

Prints the batches that follow step 4.
"""

from __future__ import annotations

import json

from grain_batches import dataset, loader, some
from joined import args, process_id

import jaxckpt

rows, records = dataset(process_id, 2), loader(process_id, 2)
some(records, process_id)
with jaxckpt.Checkpointer(args, every=2) as steps:
    for step in range(1, 6):
        some(rows, 1)
        some(records, 1)
        state = {"dataset": rows.get_state(), "loader": records.get_state()}
        steps.save(step, {"step": step}, process_state=state)
        if step == 4:
            then = dataset(process_id, 2), loader(process_id, 2)
            then[0].set_state(rows.get_state())
            then[1].set_state(records.get_state())
            print(json.dumps([some(one, 3) for one in then]))
