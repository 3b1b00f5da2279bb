"""Claim, publish and sweep: how data becomes a checkpoint, and how abandoned data is deleted.

Process 0 calls these methods. In a save that is spread over folders, every process calls them for its own folder. Every
process always calls `sync_folders`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from jaxckpt._model.stacks import Stack
from jaxckpt.errors import CheckpointExistsError

if TYPE_CHECKING:
    from jaxckpt._store.transaction import Transaction


class Claims(Protocol):
    """Changes the checkpoint of a path. At every moment the path has the old checkpoint, the new one, or none."""

    def begin_save(self, save_id: str, previous: bytes | None) -> Transaction:
        """Create `data-<save id>` with a note of its writer, for a save that will replace the manifest `previous`."""
        ...

    def unlock(self, handle: int) -> None:
        """Close the locked file of a claim. Errors are ignored: what the save has written was checked before."""

    def create_array(self, data: str, stack: Stack) -> None:
        """Write the `zarr.json` of a stack."""

    def sync_folders(self, data: str, stack: Stack, indices: Iterable[tuple[int, ...]]) -> None:
        """Make the folders above the objects of this process durable. Every process calls this."""

    def sync_data(self, data: str, stacks: Iterable[Stack]) -> None:
        """Make each zarr.json, the data folder, and every folder above it durable."""

    def publish(self, data: str, manifest: bytes, previous: bytes | None, *, sync: bool) -> None:
        """Atomically replace the manifest `previous` by `manifest`, which describes the data folder `data`."""

    def unpublish(self, *, sync: bool) -> None:
        """Delete the manifest. After that, the path has no checkpoint."""

    def discard(self, data: str) -> None:
        """Delete the data of a failed save, unless that save may still be published."""

    def sweep(self, current: str | None) -> bool:
        """Delete `data-*` folders of saves that can no longer publish; `current` is the one in use.

        Returns whether it left folders of saves that may still publish.
        """
        ...

    def clear(self, *, evict: bool = True) -> None:
        """Delete the remains of saves if the path has no checkpoint. If a running save cannot be distinguished from a
        dead one, the data of both is deleted with `evict`, so that the running save fails; without `evict`, both stay.
        """

    def trim(self, data: str, stacks: Iterable[Stack]) -> None:
        """Delete the folders of stacks that a published manifest no longer names."""


def parse_note(content: bytes | None) -> dict[str, Any]:
    """A note, such as a writer's, as a dict; empty if it is missing or malformed."""
    try:
        found = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def manifest_identity(manifest: bytes | None) -> str | None:
    """What a writer's note says about the manifest that its save will replace. None: there is none."""
    return None if manifest is None else hashlib.sha256(manifest).hexdigest()


def overtaken_error(url: str, *, was_deleted: bool = False) -> CheckpointExistsError:
    if was_deleted:
        return CheckpointExistsError(
            f"the checkpoint at {url} was deleted while this save was replacing it; this save was abandoned, save again"
        )
    return CheckpointExistsError(
        f"another save published a checkpoint at {url} while this one was writing; this save was abandoned"
    )
