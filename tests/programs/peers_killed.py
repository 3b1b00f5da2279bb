"""One process is killed or stopped for good at a phase; the others report their errors, and stay until all have.

A `late` one notices what ends its wait only when its lane has ended, as on a busy machine; the others leave before it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from peer import (
    PHASES,
    args,
    at,
    attempt,
    await_notes,
    count,
    meet,
    note,
    operate,
    process_id,
    report,
    signal_self,
    sleep_until,
)

from jaxckpt._pipeline import lanes

victim, phase, late = args["victim"], args["phase"], args.get("late")
for kind in dict.fromkeys(["save", PHASES[phase][0]]):  # connects the processes, if they exchange data
    operate(kind, 1, 60)
meet("ready")
others = sorted(set(range(count)) - {victim, late})
await_lane = lanes._wait


def await_lane_late(task: Any, *arguments: Any) -> None:
    task.wait(40)
    await_lane(task, *arguments)


if process_id == late:
    lanes._wait = await_lane_late
if process_id == victim:
    stop = sleep_until([f"reported-{process}" for process in others], "KILL")
    at(phase, stop if args["stop"] else lambda: signal_self(signal.SIGKILL))
said, seconds = attempt(PHASES[phase][0], 2, args["timeout"])
report(said=said, seconds=seconds)
note("reported")
if late is not None:
    time.sleep(2)  # until the late one has been notified
with contextlib.suppress(AssertionError):  # if process 0 is the victim, JAX aborts some of the others
    await_notes("reported", others, 15)
os._exit(0)
