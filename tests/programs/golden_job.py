"""Writes the steps of the golden job: two in its directory, and two in the local folders of its two processes.

args: storage, local
"""

from __future__ import annotations

import golden
from joined import args, process_id

import jaxckpt

with jaxckpt.Checkpointer(args["storage"], every=20, local=jaxckpt.LocalTier(args["local"], every=5)) as run:
    for step in sorted({*golden.JOB_STORED, *golden.JOB_LOCAL}):
        run.save(step, golden.job_tree(step), process_state=golden.job_states(step)[process_id])
        run.wait()

print("all checks passed")
