"""One process is killed or stopped for good at a phase; the others report their errors, and stay until all have."""

from __future__ import annotations

import contextlib
import os
import signal

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

victim, phase = args["victim"], args["phase"]
for kind in dict.fromkeys(["save", PHASES[phase][0]]):  # connects the processes, if they exchange data
    operate(kind, 1, 60)
meet("ready")
others = sorted(set(range(count)) - {victim})
if process_id == victim:
    stop = sleep_until([f"reported-{process}" for process in others], "KILL")
    at(phase, stop if args["stop"] else lambda: signal_self(signal.SIGKILL))
said, seconds = attempt(PHASES[phase][0], 2, args["timeout"])
report(said=said, seconds=seconds)
note("reported")
with contextlib.suppress(AssertionError):  # if process 0 is the victim, JAX aborts some of the others
    await_notes("reported", others, 15)
os._exit(0)
