"""Deletes folders as far as possible."""

from __future__ import annotations

import contextlib
import os
import shutil


def remove_folder(path: str) -> None:
    """Delete a folder with everything in it. Anything that cannot be deleted stays."""
    # rmtree does not ignore errors of fstat, such as ESTALE on NFS, where another host may delete the same folder.
    with contextlib.suppress(OSError):
        shutil.rmtree(path, ignore_errors=True)


def remove_if_empty(path: str) -> None:
    """Delete a folder unless something is in it, for example because another process is writing there."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
