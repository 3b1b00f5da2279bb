"""Reads the manifest of a checkpoint, and the states of its processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
from collections.abc import Sequence
from typing import Any

from jaxckpt._model.checks import MAX_PROBLEM_CHARACTERS
from jaxckpt._model.file_names import COPY, MANIFEST, WRITER, data_folder_of, is_data_folder, is_sealed
from jaxckpt._model.manifest import decode, decode_state, state_file_name
from jaxckpt._model.records import Manifest
from jaxckpt._store.storage_errors import UNLISTABLE
from jaxckpt._store.store import Store
from jaxckpt.errors import (
    CheckpointExistsError,
    CorruptError,
    DataError,
    ManifestError,
    NotACheckpointError,
    Problem,
    StorageError,
    show_count,
)


def parse_note(content: bytes | None) -> dict[str, Any]:
    """A note, such as a writer's, as a dict; empty if it is missing or malformed."""
    try:
        note = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def manifest_identity(manifest: bytes | None) -> str | None:
    """What a writer's note says about the manifest that its save will replace. None: there is none."""
    return None if manifest is None else hashlib.sha256(manifest).hexdigest()


def overtaken_error(url: str, *, was_deleted: bool = False) -> CheckpointExistsError:
    """The error of a save that may no longer publish."""
    if was_deleted:
        return CheckpointExistsError(
            f"the checkpoint at {url} was deleted while this save was replacing it; this save was abandoned, save again"
        )
    return CheckpointExistsError(
        f"another save published a checkpoint at {url} while this one was writing; this save was abandoned: to replace"
        " that checkpoint, save again"
    )


# Checkpoints that have lost their manifest ----------------------------------------------------------------
#
# Other files of a data folder show what happened to its manifest: the second copy of the manifest, the note of the
# writer, and the draft that a writer publishes by renaming it.
#
#    copy    note and draft    the manifest is missing because
#    no      any               the save has not published it yet, or the checkpoint is being deleted, or was replaced
#    yes     both              the save has not published it, and perhaps never will
#    yes     one or none       it was lost
#
# A writer creates its note, the draft, then the copy, publishes the draft, and removes the note. Whoever deletes data
# removes the copy first. In a bucket, a state in the note takes the place of the draft.


def find_lost(store: Store) -> list[str]:
    """The data folders of a path that were published, if the path has lost its manifest. Raises StorageError."""
    # The order of these reads is the proof. A folder that has its copy and no note was published. If the manifest is
    # missing after that and the copy still exists, nothing has begun to delete the checkpoint.
    published = store.published_data()
    if not published or store.read(MANIFEST) is not None:
        return []
    lost = [data for data in published if _still_has_copy(store, data)]
    newest = _newest(store, lost)
    return sorted(lost, key=lambda data: data == newest)


def _newest(store: Store, published: list[str]) -> str | None:
    """The data folder that has replaced another one of these, if the note of its writer, which was killed right after
    the publication, shows that."""
    if len(published) < 2:
        return published[0] if published else None
    copies = {manifest_identity(store.read(f"{data}/{COPY}")) for data in published} - {None}
    replaced = {data: parse_note(store.read(f"{data}/{WRITER}")).get("replaces") for data in published}
    return next((data for data in published if replaced[data] in copies), None)


def _still_has_copy(store: Store, data: str) -> bool:
    """Whether the copy still exists, with data that it describes.

    A writer whose data was swept when it was just about to publish may leave a copy, and its draft, alone.
    """
    try:
        content = store.read(f"{data}/{COPY}")
        if content is None:
            return False
        if not {*store.child(data).names()} <= {COPY, MANIFEST}:
            return True
        manifest = decode(content, f"{store.url}/{data}", COPY)
    except CorruptError:  # damaged, or not a plain file
        return True
    return not manifest.stacks and not manifest.process_states


def repair_hint(store: Store) -> str:
    """What to do about a manifest that was lost or damaged, and has a second copy."""
    return f"`jaxckpt repair {shlex.quote(store.url)}` restores the manifest from its second copy"


def read_copy(store: Store) -> tuple[str, bytes, Manifest, bytes | None]:
    """The data folder, the content and the manifest of the second copy that can replace the manifest of a path, and the
    damaged manifest that it replaces, if that exists.

    Raises CheckpointExistsError if the manifest has its checksum, NotACheckpointError, ManifestError, StorageError.
    """
    damaged = store.read(MANIFEST)
    if damaged is not None and is_sealed(damaged):
        raise CheckpointExistsError(f"{store.url}/{MANIFEST} matches its own SHA-256, so it is not replaced")
    named = None if damaged is None else data_folder_of(damaged)
    published = store.published_data()
    if damaged is not None and not published:  # a damaged manifest proves that it was published
        published = list(filter(is_data_folder, store.names()))
    candidates = [data for data in published if named in (None, data) and _still_has_copy(store, data)]
    if not candidates and damaged is not None:
        raise ManifestError(f"{store.url} has a damaged {MANIFEST}, and no second copy of it that could replace it")
    if not candidates:
        raise NotACheckpointError(f"{store.url} has no {MANIFEST}, and no second copy of it that could replace it")
    data = _newest(store, candidates)
    if data is None:
        raise ManifestError(
            f"{store.url} has {show_count(len(candidates), 'data folder')} with a copy of a manifest"
            f" ({', '.join(candidates)}), and it is unknown which one was saved last: look at the member"
            f' "created" in their {COPY}, move the other folders elsewhere, and repair again'
        )
    content = store.read(f"{data}/{COPY}")
    if content is None:
        raise NotACheckpointError(f"{store.url} was deleted in the meantime")
    manifest = decode(content, f"{store.url}/{data}", COPY)
    if manifest.data_folder != data:
        raise ManifestError(f"{store.url}/{data}/{COPY} is the manifest of {manifest.data_folder}")
    return data, content, manifest, damaged


# Reading --------------------------------------------------------------------------------------------------


def load_states(store: Store, manifest: Manifest, processes: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """The state of each process that saved, or of some of them, in process order. Raises DataError."""
    states: list[dict[str, Any]] = []
    numbers = range(len(manifest.process_states)) if processes is None else processes
    keys = [f"{manifest.data_folder}/{state_file_name(process)}" for process in numbers]
    for process, key, content in zip(numbers, keys, store.read_all(keys), strict=True):
        length, digest = manifest.process_states[process]
        if content is None or len(content) != length or hashlib.sha256(content).hexdigest() != digest:
            problem = "is missing" if content is None else "differs from what was saved"
            text = f"the state file of process {process}, {store.url}/{key}, {problem}"
            raise DataError(text, problems=[Problem(None, problem, object=key)])
        try:
            states.append(decode_state(content))
        except (ValueError, RecursionError) as error:
            problem = f"is malformed: {str(error)[:MAX_PROBLEM_CHARACTERS]}"
            raise DataError(f"{store.url}/{key} {problem}", problems=[Problem(None, problem, object=key)]) from error
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
                return ManifestError(
                    f"{store.url} has lost its {MANIFEST}: {lost[-1]} was published, and jaxckpt has not deleted it."
                    f" Unless it is still being copied there, {repair_hint(store)}"
                )
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
