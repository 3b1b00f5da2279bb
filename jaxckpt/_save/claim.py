"""Claims a path for a save: checks that it may write there, creates its data folder, and checks that all see it."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from jaxckpt._model.file_names import MANIFEST, WRITER, data_folder_of, is_data_folder
from jaxckpt._model.stacks import Stack
from jaxckpt._run_folder.steps import is_link, is_step, resolve_step
from jaxckpt._store.objects import Objects
from jaxckpt._store.store import DataClaim, Store
from jaxckpt.errors import CheckpointExistsError, CorruptError, PathNotSharedError, StorageError, show_count


@dataclass(frozen=True, slots=True)
class Claim:
    """What a save has claimed at its path: the data folder, and the manifest that it replaces. Only process 0 claims.
    The other processes have no `data_claim`. In a spread save, each process claims its own folder."""

    save_id: str = ""
    data_claim: DataClaim | None = None
    previous: bytes | None = None
    """The manifest that this save replaces."""

    has_leftovers: bool = False
    """Whether there is data whose writer may be alive. After this save is published, that writer cannot publish."""

    is_spread: bool = False
    """Whether the save is spread, and the path belongs to this process. Another process may publish it at any moment,
    so only the next save clears the remains."""

    @property
    def data(self) -> str:
        """Name of the data folder."""
        return f"data-{self.save_id}"

    def release(self, *, keep: bool) -> None:
        """Release the claim. Deletes the old data with `keep`, and the new data otherwise."""
        if self.data_claim is None:
            return
        # The next save sweeps what cannot be deleted now. Such an error must not hide why a save failed.
        with contextlib.suppress(StorageError, CorruptError):
            self.data_claim.release(keep=keep or self.is_spread)
            if not keep or self.is_spread:
                return
            old = None if self.previous is None else data_folder_of(self.previous)
            if old is not None:
                self.data_claim.store.delete(old)
            if self.has_leftovers:
                self.data_claim.store.sweep(self.data_claim.data)


def new_save_id() -> str:
    return uuid.uuid4().hex


def claim(store: Store, stacks: Iterable[Stack], save_id: str, *, overwrite: bool) -> Claim:
    """Sweep the remains of dead saves, and create the data folder with every stack's zarr.json. Process 0.

    Raises CheckpointExistsError, StorageError.
    """
    previous = _previous_manifest(store, overwrite)
    has_leftovers = store.sweep(None if previous is None else data_folder_of(previous))
    return _create_arrays(Claim(save_id, store.begin_save(save_id, previous), previous, has_leftovers), store, stacks)


def claim_own(store: Store, stacks: Iterable[Stack], save_id: str) -> Claim:
    """Create the data folder in this process's folder. Every process. Raises StorageError."""
    previous = store.read(MANIFEST)
    return _create_arrays(Claim(save_id, store.begin_save(save_id, previous), previous, is_spread=True), store, stacks)


def _create_arrays(made: Claim, store: Store, stacks: Iterable[Stack]) -> Claim:
    try:
        for stack in stacks:
            store.create_array(made.data, stack)
    except BaseException:
        made.release(keep=False)
        raise
    return made


_ORBAX_NOTE = "_CHECKPOINT_METADATA"
"""The file that an ocp.Checkpointer may write at any time into the folder of its handler."""


def _previous_manifest(store: Store, overwrite: bool) -> bytes | None:
    """The manifest that this save will replace. Raises CheckpointExistsError if it may not replace it."""
    if store.is_file():
        raise CheckpointExistsError(f"{store.url} is a file; give a new or empty folder")
    names = store.names()
    if MANIFEST in names:
        if not overwrite:
            raise CheckpointExistsError(f"{store.url} already holds a checkpoint; pass overwrite=True to replace it")
        if is_link(store):
            raise CheckpointExistsError(
                f"{store.url} is a symbolic link to {os.path.realpath(store.folder)}, and overwriting it would replace"
                " the checkpoint there: give that path, or delete the link first"
            )
        return store.read(MANIFEST)
    steps = [name for name in names if is_step(name)]
    if steps:
        raise CheckpointExistsError(
            f"{store.url} is the directory of a run, with {show_count(len(steps), 'step')}, and is not overwritten:"
            " save a"
            f" step with Checkpointer.save, replace one with save({store.url + '/' + steps[-1]!r}, …, overwrite=True),"
            " or give another folder"
        )
    if not names and "@" in store.url and resolve_step(store) is not None:
        raise CheckpointExistsError(f"{store.url} names a step of a run, so nothing can be saved there: give a folder")
    foreign = [name for name in names if not is_data_folder(name) and name != _ORBAX_NOTE]
    # A trainer may have created folders for its other files in advance.
    foreign = [name for name in foreign if not store.is_empty_folder(name)]
    if foreign:
        raise CheckpointExistsError(
            f"{store.url} holds other files ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''});"
            " give a new or empty folder"
        )
    return None


def require_shared(store: Objects, data: str, process: int) -> None:
    """Raise PathNotSharedError unless this process sees the data folder that process 0 has created."""
    if store.read(f"{data}/{WRITER}") is None:
        raise PathNotSharedError(
            f"process {process} does not see {store.url}/{data}, which process 0 has just created."
            " All processes must use one shared folder or object store."
        )
