"""Hard links: an object that another checkpoint has gets a second name, which costs no copy."""

from __future__ import annotations

import os
import stat

from jaxckpt._storage.files import make_folders


def link(old: str, new: str, below: str, length: int, *, sync: bool) -> bool:
    """Give the file `old` of `length` bytes the name `new`, in folders that are created below the folder `below`.

    Returns False, and leaves nothing, if the file is missing or of another length, or the file system has no such
    links: across devices, for files of other users, beyond so many names of a file. With `sync` the file's data is made
    durable first; the folders are synced later, as those of new files are.
    """
    try:
        if sync:
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        _link(old, new, below)
        # Looked at by its new name: whatever becomes of the old one, this is the file that was linked.
        found = os.lstat(new)
        if stat.S_ISREG(found.st_mode) and found.st_size == length:
            return True
        os.unlink(new)
    except OSError:
        pass
    return False


def _link(old: str, new: str, below: str) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except FileNotFoundError:
        make_folders(new, below)
        os.link(old, new, follow_symlinks=False)
    except FileExistsError:  # NFS may carry a call out twice
        if not os.path.samestat(os.lstat(old), os.lstat(new)):
            raise
