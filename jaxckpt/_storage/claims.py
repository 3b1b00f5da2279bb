"""Claim and publish: what makes data a checkpoint, and what deletes data that is none. Process 0 calls it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from jaxckpt._format.stacks import Stack
from jaxckpt._runtime.errors import CheckpointExistsError

if TYPE_CHECKING:
    from jaxckpt._storage.store import Writer


class Claims(Protocol):
    """Of a path: at every moment it has the old checkpoint, the new one, or none."""

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


def overtaken(url: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"another save published a checkpoint at {url} while this one was writing; this save was abandoned"
    )
