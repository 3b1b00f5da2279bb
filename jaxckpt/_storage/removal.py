"""Deletes folders as far as possible."""

from __future__ import annotations

import contextlib
import os

from jaxckpt._runtime.stalls import require_not_stalled
from jaxckpt._storage.workers import note_progress


def remove_folder(path: str) -> None:
    """Delete a folder with everything in it. Anything that cannot be deleted stays."""
    # Listing may also fail, for example with ESTALE on NFS, where another host may delete the same folder. The handles
    # of the folders keep a link that replaces one of them from leading elsewhere.
    with contextlib.suppress(OSError):
        for _, folders, files, handle in os.fwalk(path, topdown=False):
            for name in files:
                _remove(name, handle)
            for name in folders:
                _remove(name, handle, is_folder=True)
        os.rmdir(path)


def _remove(name: str, folder: int, *, is_folder: bool = False) -> None:
    try:
        (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)
    except OSError as error:
        if is_folder and isinstance(error, NotADirectoryError):  # a link to a folder
            _remove(name, folder)
    require_not_stalled()
    note_progress()  # a folder may have so many files that deleting them takes long
