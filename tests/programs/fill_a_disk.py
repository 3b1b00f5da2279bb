"""Saves version 2 over version 1 on a small file system, with various amounts of free space, and prints each outcome.

Arguments: the mount point; the cases in JSON: ["pages" or "inodes", the number that is free, "save" or "save_async"].
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import victims

import jaxckpt

where, cases = sys.argv[1], json.loads(sys.argv[2])
path = f"{where}/ckpt"


def limit(what: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{what}", where], check=True, timeout=60)


def used() -> tuple[int, int]:
    status = os.statvfs(where)
    return status.f_blocks - status.f_bfree, status.f_files - status.f_ffree


for kind, more, how in cases:
    limit("size=64m,nr_inodes=100000")
    if not os.path.exists(path) or victims.version_at(path) != 1:
        jaxckpt.save(path, victims.version(1), overwrite=True, options=victims.OPTIONS)
    pages, inodes = before = used()
    limit(f"size={(pages + more) * 4096}" if kind == "pages" else f"nr_inodes={inodes + more}")
    save = jaxckpt.save if how == "save" else lambda *args, **named: jaxckpt.save_async(*args, **named).wait()
    try:
        save(path, victims.version(2), overwrite=True, options=victims.OPTIONS)
        refused = None
    except jaxckpt.errors.StorageError as error:
        refused = error.errno
    if refused is None:
        assert victims.version_at(path) == 2
        print("there was enough space")
    else:
        assert refused == errno.ENOSPC
        assert victims.version_at(path) == 1
        assert used() == before, (used(), before)
        print("ENOSPC; the old one exists")
