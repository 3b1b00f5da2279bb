"""Claims a path for a save: checks that it may write there, creates its data folder, and checks that all see it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from jaxckpt._model.file_names import MANIFEST, WRITER, is_data_folder
from jaxckpt._model.stacks import Stack
from jaxckpt._run_folder.steps import is_link, is_step, resolve_step
from jaxckpt._store.store import Store
from jaxckpt._store.transaction import Transaction, begin
from jaxckpt.errors import CheckpointExistsError, PathNotSharedError, show_count


def new_save_id() -> str:
    return uuid.uuid4().hex


def claim(store: Store, stacks: Iterable[Stack], save_id: str, *, overwrite: bool) -> Transaction:
    """Check that a path may be written, and begin a transaction there, with every stack's zarr.json. Process 0.

    Raises CheckpointExistsError, StorageError.
    """
    return _with_arrays(begin(store, save_id, _previous_manifest(store, overwrite)), stacks)


def claim_own(store: Store, stacks: Iterable[Stack], save_id: str) -> Transaction:
    """Begin a transaction in this process's folder. Every process. Raises StorageError."""
    transaction = store.begin_save(save_id, store.read(MANIFEST))
    transaction.share()
    return _with_arrays(transaction, stacks)


def _with_arrays(transaction: Transaction, stacks: Iterable[Stack]) -> Transaction:
    try:
        transaction.create_arrays(stacks)
    except BaseException:
        transaction.close()
        raise
    return transaction


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
                f"{store.url} is a symbolic link to {store.link_target()}, and overwriting it would replace"
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


def require_shared(store: Store, data: str, process: int) -> None:
    """Raise PathNotSharedError unless this process sees the data folder that process 0 has created."""
    if store.read(f"{data}/{WRITER}") is None:
        raise PathNotSharedError(
            f"process {process} does not see {store.url}/{data}, which process 0 has just created."
            " All processes must use one shared folder or object store."
        )
