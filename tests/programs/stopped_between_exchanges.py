"""Process 0 stops for good while the others, between two exchanges, wait for slow storage; they report their errors."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Any

from peer import args, attempt, await_notes, count, meet, note, operate, process_id, report, sleep_until

from jaxckpt._save import staging

operate("save with an exchange", 1, 60)  # connects the processes
meet("ready")
others = range(1, count)
stop = sleep_until([f"reported-{process}" for process in others], "KILL")
calls, replicate_box = itertools.count(), staging.replicate_box


def replicate_late(*arguments: Any) -> Any:
    if next(calls) == 1:
        time.sleep(3) if process_id else stop()  # a heartbeat is sent, and never answered, before the exchange begins
    return replicate_box(*arguments)


staging.replicate_box = replicate_late
said, seconds = attempt("save with an exchange", 2, args["timeout"])
report(said=said, seconds=seconds)
note("reported")
with contextlib.suppress(AssertionError):  # JAX may abort some of them when process 0 is killed
    await_notes("reported", others, 15)
os._exit(0)
