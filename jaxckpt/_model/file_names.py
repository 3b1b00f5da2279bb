"""Names and marks that identify the files of a checkpoint, even if they are damaged."""

from __future__ import annotations

import hashlib
import re

MANIFEST = "manifest.json"

SEAL = b',"sha256":"'

WRITER = "writer.json"

COPY = "manifest-copy.json"
"""A second copy of the manifest, in the data folder. It is written just before the manifest is published, and removed
just before the manifest is deleted."""


def data_folder(save_id: str) -> str:
    """Name of the data folder of a save."""
    return f"data-{save_id}"


def is_data_folder(name: str) -> bool:
    """Whether a save may have created a folder of this name. A user's "data-raw" must not be deleted."""
    return re.fullmatch("data-[0-9a-f]{32}", name) is not None


def is_data_referenced(manifest: bytes | None, data: str) -> bool:
    """Whether a manifest, possibly damaged, names a data folder."""
    return manifest is not None and f'"save_id":"{data.rpartition("data-")[2]}"'.encode() in manifest


def may_reference_data(manifest: bytes | None, data: str) -> bool:
    """Whether a manifest may name a data folder: it does, or it is damaged, perhaps only in transfer."""
    return is_data_referenced(manifest, data) or not (manifest is None or is_sealed(manifest))


def is_sealed(manifest: bytes) -> bool:
    """Whether a manifest ends in the SHA-256 of the bytes before that."""
    body, seal, digest = manifest.rpartition(SEAL)
    return bool(seal) and digest == hashlib.sha256(body).hexdigest().encode() + b'"}'


def data_folder_of(content: bytes) -> str | None:
    """The data folder that a manifest names, if it can be read from a possibly damaged manifest."""
    match = re.search(rb'"save_id":"([0-9A-Za-z_-]{1,200})"', content)
    return f"data-{match.group(1).decode()}" if match else None
