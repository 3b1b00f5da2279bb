"""In each round, one process fills the shared file system, except for some bytes."""

from __future__ import annotations

import os

from peer import args, attempt, meet, n_data_folders, operate, path, process_id, report, there

operate("save", 0, 60)
ballast = os.path.join(os.path.dirname(path), "ballast")
for number, room in enumerate(args["rounds"], 1):
    meet(f"begun{number}")
    if process_id == 1:
        status = os.statvfs(path)
        with open(ballast, "wb") as file:
            file.write(bytes(max(0, status.f_bavail * status.f_frsize - room)))
    meet(f"ready{number}")
    said, _ = attempt("save", number, 60)
    meet(f"said{number}")
    if process_id == 1:
        os.unlink(ballast)
    now, folders = there(), n_data_folders()
    meet(f"over{number}")
    after, _ = attempt("save", number, 60)
    report(said=said, there=now, after=after, folders=folders)
