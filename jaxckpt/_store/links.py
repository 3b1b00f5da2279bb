"""Hard links: give an object of another checkpoint a second name instead of copying it."""

from __future__ import annotations

import errno
import os
import stat

from jaxckpt._store.files import make_folders
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt.errors import StorageError


def link(old: str, new: str, base_folder: str, length: int, *, sync: bool) -> None:
    """Give the file `old` of `length` bytes a second name, `new`. Creates missing folders below the folder
    `base_folder`.

    Raises StorageError, and creates nothing, if the file is missing or has another length (ENOENT), or if the file
    system refuses the link: across devices, for files of other users, or beyond its limit of links. With `sync` the
    file's data is made durable first. The folders are synced later, together with those of new files.
    """
    with translate_os_errors(f"cannot link {old} to {new}"):
        if sync:
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _link(old, new, base_folder)
        # Checked by its new name, because the old name may refer to another file by now.
        found = os.lstat(new)
        if not stat.S_ISREG(found.st_mode) or found.st_size != length:
            os.unlink(new)
            raise StorageError(errno.ENOENT, f"cannot link {old}: it is no longer a file of {length} bytes")


def _link(old: str, new: str, base_folder: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        make_folders(new, base_folder)
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:  # NFS may execute a call twice
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
