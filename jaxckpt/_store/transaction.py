"""Turns data at a path into a checkpoint. All saves publish here.

    with contextlib.closing(open_transaction(store, save_id, previous, stacks)) as transaction:    # in one process
        …                                                       # every process writes to `transaction.data`
        transaction.commit(manifest, sync=True)

If the block ends without a commit, the data is deleted. After a commit, the checkpoint that it replaces is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from jaxckpt._model import zarr
from jaxckpt._model.file_names import COPY, MANIFEST, WRITER, data_folder, data_folder_of, may_reference_data
from jaxckpt._model.stacks import Stack
from jaxckpt._store.store import Store
from jaxckpt.errors import CorruptError, StorageError


class Transaction:
    """A save that has a data folder at a path, with a note of its writer."""

    def __init__(
        self,
        store: Store,
        save_id: str,
        previous: bytes | None,
        *,
        has_leftovers: bool = False,
        is_spread: bool = False,
    ) -> None:
        """Create the data folder. Raises StorageError."""
        self.store = store
        self.data = data_folder(save_id)
        """Name of the data folder."""

        self.previous = previous
        """The manifest that the commit replaces."""

        self.handle, self._has_created_path = store.begin_save(save_id, previous)
        self.has_leftovers = has_leftovers
        """Whether there is data whose writer may be alive. After the commit, that writer cannot publish."""

        self.is_spread = is_spread
        """Whether other processes have parts of this checkpoint in folders of their own, and may publish it at any
        moment. Nothing is deleted then; the next save does that."""

        self._is_committed = False
        self._is_closed = False

    def commit(self, manifest: bytes, *, sync: bool) -> None:
        """Atomically replace the previous manifest by this one, which describes the data."""
        self.store.publish(self.data, manifest, self.previous, sync=sync)
        self._is_committed = True

    def close(self) -> None:
        """End it: delete the data without a commit, or what the commit has replaced. A second call has no effect.

        The next save sweeps what cannot be deleted now. Such an error must not hide why a save failed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_final = self._is_committed and not self.is_spread
        old = None if self.previous is None or not is_final else data_folder_of(self.previous)
        if old is not None:
            # Before the note of this writer, so that the copies never leave open which save was the last.
            with contextlib.suppress(StorageError, CorruptError):
                self.store.remove(f"{old}/{COPY}")
        with contextlib.suppress(StorageError, CorruptError):
            self._release()
            if not is_final:
                return
            if old is not None:
                self.store.delete(old)
            if self.has_leftovers:
                self.store.sweep(self.data)

    def _release(self) -> None:
        store = self.store
        try:
            # An error may come after the manifest was published.
            if self._is_committed or self.is_spread or may_reference_data(store.read(MANIFEST), self.data):
                store.remove(f"{self.data}/{WRITER}")
            else:
                store.discard(self.data)
                if self._has_created_path:
                    store.clear(evict=False)
        finally:
            if self.handle is not None:
                store.unlock(self.handle)


def open_transaction(store: Store, save_id: str, previous: bytes | None, stacks: Iterable[Stack]) -> Transaction:
    """Sweep the remains of dead saves, and create a data folder, with every stack's zarr.json, for a save that will
    replace the manifest `previous`.

    Raises StorageError.
    """
    has_leftovers = store.sweep(None if previous is None else data_folder_of(previous))
    return _create_arrays(Transaction(store, save_id, previous, has_leftovers=has_leftovers), stacks)


def open_own_transaction(store: Store, save_id: str, stacks: Iterable[Stack]) -> Transaction:
    """The same in the folder of one process of several that publish the checkpoint, each in its own folder."""
    return _create_arrays(Transaction(store, save_id, store.read(MANIFEST), is_spread=True), stacks)


def _create_arrays(transaction: Transaction, stacks: Iterable[Stack]) -> Transaction:
    try:
        for stack in stacks:
            folder = transaction.store.create_child(f"{transaction.data}/{stack.name}")
            folder.put("zarr.json", zarr.metadata(stack))
    except BaseException:
        transaction.close()
        raise
    return transaction
