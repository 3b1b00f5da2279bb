"""In each round, strace makes system calls of one process fail."""

from __future__ import annotations

from peer import args, attempt, meet, n_data_folders, operate, process_id, report, there
from tracing import trace

operate("save", 0, 60)
for number, (call, nth, victim) in enumerate(args["rounds"], 1):
    filters = ["-e", f"trace={call}", "-e", f"inject={call}:error=ENOSPC:when={nth}+"]
    tracer = trace(*filters) if process_id == victim else None
    meet(f"ready{number}")
    said, _ = attempt("save", number, 60)
    if tracer is not None:
        tracer.terminate()
        tracer.wait(30)
    meet(f"over{number}")
    now, folders = there(), n_data_folders()
    after, _ = attempt("save", number, 60)
    report(said=said, there=now, after=after, folders=folders)
