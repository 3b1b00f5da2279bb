"""The store of one path: its bytes, claiming and publishing there, and the directory that it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from jaxckpt._format.names import MANIFEST, WRITER, may_name
from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import CheckpointExistsError
from jaxckpt._storage.objects import Objects


class Claims(Protocol):
    """What makes data a checkpoint, and what deletes data that is none. Process 0 calls it.

    At every moment the path has the old checkpoint, the new one, or none.
    """

    def begin(self, save_id: str, previous: bytes | None) -> Writer:
        """Make `data-<save id>` with a note of who writes it, to replace the manifest `previous`."""
        ...

    def create_array(self, data: str, stack: Stack) -> None:
        """Write the `zarr.json` of a stack."""

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        """Make durable the folders above objects that this process wrote. Every process."""

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Make durable each zarr.json, the data folder, and every folder above it."""

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Replace the manifest `previous` atomically by `manifest`, which is of the data folder `data`."""

    def unpublish(self, *, sync: bool) -> None:
        """Delete the manifest: from here on there is no checkpoint."""

    def give_up(self, data: str) -> None:
        """Delete the data of a save that has failed, unless it may yet be published."""

    def sweep(self, current: str | None) -> bool:
        """Delete `data-*` folders of saves that can no longer publish; `current` is the one in use.

        Returns whether some are left that perhaps can.
        """
        ...

    def clear(self, *, evict: bool = True) -> None:
        """Delete what is left if there is no checkpoint. With `evict` a save under way, if its data cannot be told from
        a dead one's, loses its data and learns of that; otherwise such data stays."""

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Delete the folders of stacks that a published manifest no longer names."""


class Folders(Protocol):
    """The folders directly below one path."""

    def anchored(self) -> Self:
        """The same directory, whatever the program changes its working directory to."""
        ...

    def is_file(self) -> bool:
        """Whether a plain file stands in its place."""
        ...

    def names(self) -> list[str]:
        """Names directly in it; empty if it does not exist."""
        ...

    def folders(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, bool]:
        """For each folder directly below whose name is wanted, whether it holds a checkpoint."""
        ...

    def child(self, name: str) -> Self:
        """A folder directly below."""
        ...

    def known_as(self, url: str) -> Self:
        """The same folder, by another path in messages."""
        ...

    def made(self, name: str) -> Self:
        """A folder directly below, which is created if it does not exist."""
        ...

    def above(self) -> tuple[Self, str] | None:
        """The directory that this one is in, and its name there; None at the top."""

    def mark(self, name: str) -> None:
        """Note that a folder directly below may hold a checkpoint, if listing all keys would be the way to know."""

    def unmark(self, name: str) -> None:
        """Take that back."""

    def delete(self, name: str) -> None:
        """Delete a folder directly below with everything in it."""


class Store(Objects, Claims, Folders, Protocol):
    """What `Folder` is on a file system and `Bucket` on an object store. Callers need not know which."""


@dataclass(frozen=True, slots=True)
class Writer:
    """A save's claim on its data folder."""

    store: Store
    data: str

    handle: int | None = None
    """The file that is locked as long as the writer lives."""

    def release(self, *, keep: bool) -> None:
        """Drop the claim, and the data too unless it is published."""
        try:
            if keep or may_name(self.store.read(MANIFEST), self.data):
                self.store.remove(f"{self.data}/{WRITER}")
            else:
                self.store.give_up(self.data)
        finally:
            if self.handle is not None:
                os.close(self.handle)


def overtaken(url: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"another save published a checkpoint at {url} while this one was writing; this save was abandoned"
    )
