"""The store of one path: reads and writes bytes, claims and publishes checkpoints, and lists the directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxckpt._model.file_names import MANIFEST, WRITER, may_reference_data
from jaxckpt._store.child_folders import ChildFolders
from jaxckpt._store.claims import Claims
from jaxckpt._store.objects import Objects


class Store(Objects, Claims, ChildFolders, Protocol):
    """The common interface of `Folder` (file systems) and `Bucket` (object stores)."""


@dataclass(frozen=True, slots=True)
class DataClaim:
    """The claim of a save on its data folder."""

    store: Store
    data: str

    handle: int | None = None
    """The file that is locked while the writer is alive."""

    has_created_path: bool = False
    """Whether the checkpoint's folder did not exist before. If the save fails, it is deleted again."""

    def release(self, *, keep: bool) -> None:
        """Release the claim. Without `keep`, also delete the data, unless it may still be published."""
        try:
            if keep or may_reference_data(self.store.read(MANIFEST), self.data):
                self.store.remove(f"{self.data}/{WRITER}")
            else:
                self.store.discard(self.data)
                if self.has_created_path:
                    self.store.clear(evict=False)
        finally:
            if self.handle is not None:
                self.store.unlock(self.handle)
