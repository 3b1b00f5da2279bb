"""Deletes folders as far as possible."""

from __future__ import annotations

import contextlib
import os

from jaxckpt._pipeline.watchdog import require_not_stalled
from jaxckpt._pipeline.workers import note_progress


def remove_folder(path: str, above: int | None = None) -> None:
    """Delete a folder with everything in it. Anything that cannot be deleted stays. `above` is the open folder that it
    is in, if not given by its path."""
    # Unlike shutil.rmtree, this continues after every error: ESTALE on NFS, where another host may delete the same
    # folder, or an error at close. Working in open folders keeps a link that replaces one from leading elsewhere.
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        try:
            with os.scandir(folder) as scan:
                entries = list(scan)
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        remove_folder(entry.name, folder)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
                require_not_stalled()
                note_progress()  # deleting many files may take long
        finally:
            close_unwritten(folder)
    with contextlib.suppress(OSError):
        os.rmdir(path, dir_fd=above)


def close_unwritten(handle: int) -> None:
    """Close a handle that nothing needs to be written through. The system may report an error, but closes it in any
    case."""
    with contextlib.suppress(OSError):
        os.close(handle)


def remove_if_empty(path: str) -> None:
    """Delete a folder unless something is in it, for example because another process is writing there."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
