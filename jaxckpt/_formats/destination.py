"""The local destination of a conversion: which existing files it may replace, and how it replaces them atomically."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import uuid
import warnings
from collections.abc import Collection, Generator, Sequence

from jaxckpt._formats.orbax.orbax_records import SAVE_FILES
from jaxckpt._model.file_names import MANIFEST, is_data_folder
from jaxckpt._options import Options
from jaxckpt._sources.foreign import ForeignCheckpoint
from jaxckpt._sources.format_registry import DRAFT_MARK, formats, missing_formats_hint
from jaxckpt._sources.open_source import Location
from jaxckpt._sources.source import Source
from jaxckpt._store.files import remove_folder
from jaxckpt._store.folder import sync_path
from jaxckpt._store.foreign_files import list_names
from jaxckpt._store.load_manifest import find_lost, load_manifest
from jaxckpt._store.storage_errors import translate_os_errors
from jaxckpt._store.store_path import local_path, store_at
from jaxckpt.errors import CheckpointExistsError, JaxckptError


def require_replaceable(path: str, source: Location, overwrite: bool) -> None:
    """Raise CheckpointExistsError unless the existing file or folder at `path` may be replaced."""
    if not overwrite:
        raise CheckpointExistsError(f"{path} already exists; pass overwrite=True to replace it")
    if os.path.islink(path):
        return
    whole = () if isinstance(source, str | os.PathLike) else source.files or [source.url]
    for origin in filter(None, map(local_path, [*whole, *_places(source)])):
        target, data = os.path.realpath(path), os.path.realpath(origin)
        if data.startswith(os.path.join(target, "")) or (origin in whole and data == target):
            raise CheckpointExistsError(f"the source {origin} is in {path}, which would be deleted")
    if os.path.isfile(path):
        return
    if not os.path.isdir(path):
        raise CheckpointExistsError(f"{path} is neither a file nor a folder, and is not replaced; give another path")
    # A mistyped path must not delete the user's home folder.
    if unrelated := _unrelated_names(path, list_names(path)):
        raise CheckpointExistsError(
            f"{path} holds files that are not part of one checkpoint"
            f" ({', '.join(unrelated[:3])}{', …' if len(unrelated) > 3 else ''}):"
            f" overwrite=True does not delete them; give another path{missing_formats_hint()}"
        )


def _places(source: Location | Source) -> Sequence[str | os.PathLike[str]]:
    """The paths and URLs that a source is read from."""
    if isinstance(source, str | os.PathLike):
        return [source]
    if isinstance(source, ForeignCheckpoint) and (source.files or source.origins):
        return source.files or [place for origin in source.origins for place in _places(origin)]
    return [source.url]


def _unrelated_names(path: str, names: Collection[str]) -> list[str]:
    """The names in a local folder that do not belong to one checkpoint or to output of `convert`.

    These are all names if the folder is not a checkpoint, which includes folders that cannot be opened. A folder of
    several steps is also not a checkpoint, because replacing it would delete all steps.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return sorted({*names} - {*_checkpoint_names(path, names)})
    except (JaxckptError, OSError):
        return sorted(names)


def _checkpoint_names(path: str, names: Collection[str]) -> Collection[str]:
    """The names in a folder that belong to the one checkpoint that it holds; none if it is not a checkpoint."""
    if MANIFEST in names:
        load_manifest(store_at(path, Options()))
        # Orbax marks the items that jaxckpt's handler writes.
        return {MANIFEST, *filter(is_data_folder, names), *SAVE_FILES}
    if all(map(is_data_folder, names)):  # a save that never finished, or a checkpoint that has lost its manifest
        return () if find_lost(store_at(path, Options())) else names
    for form in formats():
        if form.recognizes(path, names):
            if form.open is not None:
                form.open(path)
            return form.owned_names(path, names)
    return ()


# Writing and replacing ------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: str) -> Generator[str]:
    """A temporary path to write to. It replaces `path` when everything is on disk, and is deleted on failure."""
    parent, name = os.path.split(path)
    with draft_folder(path) as folder:
        draft = os.path.join(folder, f"new{os.path.splitext(name)[1][:20]}")  # the suffix matters to some writers
        yield draft
        _sync(draft)
        _put_in_place(draft, path)
        sync_path(parent)


@contextlib.contextmanager
def draft_folder(path: str) -> Generator[str]:
    """A hidden folder next to `path` for incomplete output. It is deleted at the end or, if this process is killed, by
    the next one that writes to `path`. Raises StorageError; InputError if a folder above is a broken link."""
    store_at(os.path.dirname(path), Options())
    with translate_os_errors(f"cannot write {path}"), contextlib.ExitStack() as cleanup:
        _create_above(path, cleanup)
        _recover_killed(path)
        yield _locked_folder(path, cleanup)


def _create_above(path: str, cleanup: contextlib.ExitStack) -> None:
    """Create the folders above `path`. Those that are empty when `cleanup` ends are deleted."""
    missing: list[str] = []
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for created in reversed(missing):
        cleanup.callback(_remove_if_empty, created)


def _remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _locked_folder(path: str, cleanup: contextlib.ExitStack) -> str:
    """A hidden folder next to `path` for incomplete output, locked and kept until `cleanup` or this process ends."""
    while True:
        folder = f"{_draft_prefix(path)}{uuid.uuid4().hex}"
        cleanup.callback(_discard, folder, path)
        os.mkdir(folder)
        lock = os.open(folder, os.O_RDONLY)
        cleanup.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.isdir(folder):
                return folder
        except BlockingIOError:
            pass
        except OSError:  # a file system without locks, on which no process deletes remains
            return folder
        # Another process took the folder for remains and deleted it before it was locked.


def _discard(folder: str, path: str) -> None:
    """Delete a folder for incomplete output, unless it holds content of `path` that could not be moved back: the next
    conversion moves it."""
    if os.path.lexists(path) or not os.path.lexists(os.path.join(folder, _OLD)):
        remove_folder(folder)


def _draft_prefix(path: str) -> str:
    parent, name = os.path.split(path)
    # A digest, because the name itself may already be as long as the file system allows.
    return os.path.join(parent, f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}{DRAFT_MARK}")


def _recover_killed(path: str) -> None:
    """Delete the remains of killed conversions to `path`, and move back what they had just moved away."""
    parent, start = os.path.split(_draft_prefix(path))
    for name in os.listdir(parent):
        if not name.startswith(start):
            continue
        folder = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                _move_back(os.path.join(folder, _OLD), path)
                _discard(folder, path)
            finally:
                os.close(lock)


def _put_in_place(draft: str, path: str) -> None:
    """Rename `draft` to `path`, after moving away the existing file or folder. Replaces a symbolic link, not its
    target."""
    if not os.path.lexists(path) or not (os.path.isdir(draft) or (os.path.isdir(path) and not os.path.islink(path))):
        os.replace(draft, path)
        return
    old = os.path.join(os.path.dirname(draft), _OLD)
    try:
        os.rename(path, old)  # first, because os.rename can replace files only by files
        os.rename(draft, path)
    except BaseException:  # an interrupt may come right after either rename
        _move_back(old, path)
        raise


def _move_back(old: str, path: str) -> None:
    """Move the previous content back to the destination, if it was moved away and nothing has replaced it."""
    if os.path.lexists(old) and not os.path.lexists(path):
        os.rename(old, path)


_OLD = ".old"
"""Name, in the folder of a draft, of the previous content of the destination."""


def _sync(path: str) -> None:
    """Make a file, or a folder with all its content, durable."""
    if os.path.isdir(path):
        for name in os.listdir(path):
            _sync(os.path.join(path, name))
    sync_path(path)
