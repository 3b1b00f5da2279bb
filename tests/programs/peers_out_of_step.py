"""Slow peers, peers that make no call, and peers that raise in their own code; all stay alive, in one job."""

from __future__ import annotations

import time

from peer import args, at, attempt, await_notes, count, make, meet, note, operate, path, process_id, report, there
from phases import PHASES

import jaxckpt
from jaxckpt._job.call import Call

# Sleep before the first read: a sleep inside a read would count as hung storage, which is an error.
PHASES["fetching"] = "restore", "_restore.restore.fetch"
operate("save", 0, 60)
for number, (what, victim) in enumerate(args["rounds"], 1):
    meet(f"ready{number}")
    back, said = lambda: None, None
    kind = "restore" if "restore" in what else "save"
    if process_id == victim:
        if what.startswith("slow"):
            back = at("fetching" if kind == "restore" else "writing", lambda: time.sleep(3 * args["timeout"]))
        elif what == "makes no call":
            await_notes(f"reported{number}", set(range(count)) - {victim})
            Call.of("save", path, None)  # like a call that raised
            said = "none"
        else:
            broken = make(number)
            broken["w0"].delete()
            try:
                jaxckpt.save(path, broken, overwrite=True)
                said = ""
            except jaxckpt.errors.TreeError as error:
                said = f"{type(error).__name__}: {error}"
    if said is None:
        said, _ = attempt(kind, number, args["timeout"])
    note(f"reported{number}")
    back()
    meet(f"over{number}")
    now = there()
    after, _ = attempt("save", number, 60)
    report(said=said, there=now, after=after)
