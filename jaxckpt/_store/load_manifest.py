"""Reads the manifest of a checkpoint, and the states of its processes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

from jaxckpt._model.checks import MAX_PROBLEM_CHARACTERS
from jaxckpt._model.file_names import MANIFEST, is_data_folder, is_sealed
from jaxckpt._model.manifest import decode, decode_state, state_file_name
from jaxckpt._model.records import Manifest
from jaxckpt._store.lost_manifest import find_lost, lost_error, repair_hint
from jaxckpt._store.storage_errors import UNLISTABLE
from jaxckpt._store.store import Store
from jaxckpt.errors import DataError, ManifestError, NotACheckpointError, StorageError


def load_states(store: Store, manifest: Manifest, processes: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The state of each process that saved, or of some of them, in process order. Raises DataError."""
    states: list[dict[str, Any]] = []
    numbers = range(len(manifest.process_states)) if processes is None else processes
    keys = [f"{manifest.data_folder}/{state_file_name(process)}" for process in numbers]
    for process, key, content in zip(numbers, keys, store.read_all(keys), strict=True):
        length, digest = manifest.process_states[process]
        if content is None or len(content) != length or hashlib.sha256(content).hexdigest() != digest:
            problem = "is missing" if content is None else "differs from what was saved"
            raise DataError(f"the state file of process {process}, {store.url}/{key}, {problem}")
        try:
            states.append(decode_state(content))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{store.url}/{key} is malformed: {str(error)[:MAX_PROBLEM_CHARACTERS]}") from error
    return states


def load_manifest(store: Store, sha256: str | None = None) -> tuple[Manifest, bytes]:
    """The manifest of the checkpoint at a store, and its bytes. `sha256` is the expected digest of the bytes, if known.

    Raises NotACheckpointError, ManifestError, which includes a checkpoint that has lost its manifest.
    """
    # Read again before it counts as damaged: a network file system may mix the old and the new content of a file that
    # another host replaces while this one reads it.
    with contextlib.suppress(ManifestError):
        return _load_manifest(store, sha256)
    try:
        return _load_manifest(store, sha256)
    except ManifestError as error:
        content = store.read(MANIFEST)
        if content is None or is_sealed(content) or not _has_copy(store):
            raise
        raise ManifestError(f"{error}. {repair_hint(store)}") from error


def _load_manifest(store: Store, sha256: str | None) -> tuple[Manifest, bytes]:
    content = store.read(MANIFEST)
    if content is None:
        raise _missing_error(store)
    if sha256 is not None and (digest := hashlib.sha256(content).hexdigest()) != sha256.lower():
        raise ManifestError(
            f"{store.url}/{MANIFEST} has the SHA-256 {digest}, expected {sha256.lower()} by manifest_sha256=:"
            " it is a different checkpoint, or the file was changed"
        )
    return decode(content, store.url), content


def _has_copy(store: Store) -> bool:
    """Whether a damaged manifest has a second copy."""
    try:
        return bool(store.published_data())
    except StorageError:  # which must not hide the damage
        return False


def _missing_error(store: Store) -> NotACheckpointError | ManifestError:
    """The error for a path without a manifest: it is not a checkpoint, or has lost the manifest."""
    reason = "it is a file, not a folder"
    if not store.is_file():
        try:
            names = store.names()
            if any(map(is_data_folder, names)) and (lost := find_lost(store)):
                return lost_error(store, lost[-1])
            reason = _missing_reason(store, names)
        except StorageError as error:
            if error.errno not in UNLISTABLE:
                raise
            reason = f"it has no manifest.json ({error})"
    return NotACheckpointError(f"{store.url} is not a checkpoint: {reason}")


def _missing_reason(store: Store, names: Sequence[str]) -> str:
    """The reason why a folder with these names, without a manifest, is not a checkpoint, for the error."""
    if any(map(is_data_folder, names)):
        return "a save to it is in progress or never finished: it has data but no manifest.json"
    inside = [name for name, published in store.folders().items() if published is True]
    if inside:
        return f"it is a folder of checkpoints; open one of them: {', '.join(inside[-5:])}"
    return "it has no manifest.json" if names else "the path does not exist, or the folder is empty"
