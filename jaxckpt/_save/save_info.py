"""The result of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a save wrote."""

    path: str
    """The path or URL of the checkpoint."""

    save_id: str
    """Unique id of the save."""

    leaves: int
    """Leaves of the tree."""

    total_bytes: int
    """Bytes of array data in the checkpoint, each replica counted once."""

    process_bytes: tuple[int, ...]
    """Bytes of array data in the objects of each process."""

    objects: int
    """Objects that hold the array data."""

    files: int
    """Files of the checkpoint: the objects, a zarr.json for each stack, the state of each process if given, the
    manifest, and a copy of it."""

    stored_bytes: int
    """Bytes of the objects, including checksums and indexes."""

    reused_bytes: int
    """Bytes of the objects that are hard links to an earlier checkpoint and were not written; see `Options.reuse`."""

    manifest_sha256: str
    """SHA-256 of manifest.json, in hexadecimal digits, for `restore(path, manifest_sha256=…)`."""

    seconds: float
    """Seconds from the call until this process was notified that the checkpoint is published."""

    blocked_seconds: float
    """How many of these seconds the caller waited; all of them for `save`."""

    phase_seconds: Mapping[str, float]
    """Seconds of each phase in this process: "plan", "device_to_host", "write" (includes the fsync of files), "sync"
    (fsync of folders), "barrier" (waiting for the other processes), "publish"."""
