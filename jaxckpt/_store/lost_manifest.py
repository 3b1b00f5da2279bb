"""Checkpoints that were published and have lost their manifest.

Two other files of a data folder show what happened to its manifest: the second copy of the manifest, and the note of
the writer.

    note    copy    manifest is missing because
    yes     any     the save has not published it, and perhaps never will
    no      no      the checkpoint is being deleted, or was replaced; or a deletion was interrupted
    no      yes     it was lost

A writer creates its note, then the copy, publishes the manifest, and removes the note. Whoever deletes data removes the
copy first. A writer that was killed after the publication has left its note: `Store.published_data` recognizes that.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from jaxckpt._model.file_names import COPY, MANIFEST, WRITER, data_folder_of, is_sealed
from jaxckpt._model.manifest import decode
from jaxckpt._model.records import Manifest
from jaxckpt._store.writer_note import manifest_identity, parse_note
from jaxckpt.errors import CheckpointExistsError, CorruptError, ManifestError, NotACheckpointError, show_count

if TYPE_CHECKING:
    from jaxckpt._store.store import Store


def find_lost(store: Store) -> list[str]:
    """The data folders of a path that were published, if the path has lost its manifest. Raises StorageError."""
    # The order of these reads is the proof. A folder that has its copy and no note was published. If the manifest is
    # missing after that and the copy still exists, nothing has begun to delete the checkpoint.
    published = store.published_data()
    if not published or store.read(MANIFEST) is not None:
        return []
    lost = [data for data in published if _still_has_copy(store, data)]
    newest = _newest(store, lost)
    return [*(data for data in lost if data != newest), *(data for data in lost if data == newest)]


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

    A writer whose data was swept when it was just about to publish may leave a copy alone.
    """
    try:
        content = store.read(f"{data}/{COPY}")
        if content is None:
            return False
        if store.child(data).names() != [COPY]:
            return True
        manifest = decode(content, f"{store.url}/{data}", COPY)
    except CorruptError:  # damaged, or not a plain file
        return True
    return not manifest.stacks and not manifest.process_states


def lost_error(store: Store, data: str) -> ManifestError:
    """The error for a path whose data folder `data` was published, without its manifest."""
    return ManifestError(
        f"{store.url} has lost its {MANIFEST}: {data} was published, and jaxckpt has not deleted it. Unless it is still"
        f" being copied there, {repair_hint(store)}"
    )


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
    candidates = [data for data in store.published_data() if named in (None, data)]
    if not candidates:
        what = f"no {MANIFEST}" if damaged is None else f"a damaged {MANIFEST}"
        raise NotACheckpointError(f"{store.url} has {what}, and no second copy of it that could replace it")
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
