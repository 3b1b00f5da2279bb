"""Publishing: after every process has written its share, process 0 writes the manifest."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import msgspec

from jaxckpt._job.rendezvous import Meeting
from jaxckpt._model import manifest as manifests
from jaxckpt._model.checks import FORMAT, VERSION
from jaxckpt._model.records import Manifest, StackRecord
from jaxckpt._pipeline.events import log_unlinked
from jaxckpt._save.describe import Draft
from jaxckpt._save.prepare import PreparedSave, SaveRequest, require_readable
from jaxckpt._save.write_plan import SavePlan
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import PeersDisagreeError, show_path

StoredObject = tuple[int, str, int, str, str]
"""Stack, grid index, length, digest and content digest of an object. The last is empty if it was not computed."""


class Share(msgspec.Struct, frozen=True):
    """The files that one process has written."""

    objects: list[StoredObject]

    linked_bytes: int
    """Bytes of the objects that are links to an earlier checkpoint."""

    state: tuple[int, str] | None
    """Length and digest of the file for its state."""

    phase_seconds: dict[str, float]
    """Seconds of each phase until the share was written."""

    unlinked: dict[str, int] = {}
    """Bytes of the objects that seem unchanged but were written, by the reason."""


class PublishResult(msgspec.Struct, frozen=True):
    """What process 0 sends to the others after it has published the checkpoint."""

    stored_bytes: int
    """Bytes of all objects."""

    reused_bytes: int
    """Bytes of the objects that were linked."""

    manifest_sha256: str


def publish(
    meeting: Meeting, save: PreparedSave, save_id: str, transaction: Transaction | None, share: Share
) -> PublishResult:
    """Process 0 publishes the manifest after all have written their share."""
    clock, watchdog = save.clock, meeting.group.watchdog
    with clock.timed("barrier"):
        texts = _gather_shares(meeting, share)
    published = PublishResult(0, 0, "")  # replaced by the result of process 0
    if transaction is not None:
        shares = [msgspec.json.decode(text, type=Share) for text in texts]
        manifest = build_manifest(save_id, save.plan, save.draft, save.request, shares)
        if save.options.sync:
            with clock.timed("sync"), watchdog.operation(f"syncing {meeting.group.call.where}"):
                transaction.sync(manifest.decoded_stacks)
        with clock.timed("publish"):
            content = _encode(manifest)
            meeting.group.require_not_cancelled()
            meeting.group.end_cancellation()
            with watchdog.operation(f"publishing {meeting.group.call.where}"):
                transaction.commit(content, sync=save.options.sync)
            reused_bytes = sum(share.linked_bytes for share in shares)
            published = PublishResult(_stored_bytes(manifest), reused_bytes, hashlib.sha256(content).hexdigest())
            unlinked = sum((Counter(share.unlinked) for share in shares), Counter[str]())
            for reason, n_bytes in unlinked.items():
                log_unlinked(save.store.url, n_bytes, reason)
    with clock.timed("barrier"):
        return msgspec.json.decode(meeting.broadcast(msgspec.json.encode(published).decode()), type=PublishResult)


def publish_own(
    meeting: Meeting, save: PreparedSave, save_id: str, transaction: Transaction | None, share: Share
) -> PublishResult:
    """Every process publishes the same manifest in its own folder, after all have written their share. Any one manifest
    then proves that the whole checkpoint was written."""
    assert transaction is not None, "each process has its own"
    clock, watchdog = save.clock, meeting.group.watchdog
    with clock.timed("barrier"):
        texts = _gather_shares(meeting, share)
    content = ""
    if texts:
        meeting.group.require_not_cancelled()
        meeting.group.end_cancellation()
        shares = [msgspec.json.decode(text, type=Share) for text in texts]
        manifest = build_manifest(save_id, save.plan, save.draft, save.request, shares)
        content = base64.b64encode(zlib.compress(_encode(manifest))).decode()
    with clock.timed("barrier"):
        content = zlib.decompress(base64.b64decode(meeting.broadcast(content)))
        meeting.start_next()
    manifest = manifests.decode(content, meeting.group.call.where)
    with clock.timed("publish"), watchdog.operation(f"publishing {meeting.group.call.where}"):
        if save.options.sync:
            transaction.sync(manifest.decoded_stacks)
        transaction.commit(content, sync=save.options.sync)
    with clock.timed("barrier"):
        meeting.barrier()  # until all have published, the loss of one folder could lose the only manifest
    return PublishResult(_stored_bytes(manifest), 0, hashlib.sha256(content).hexdigest())


def _gather_shares(meeting: Meeting, share: Share) -> list[str]:
    """The shares of all processes, in process 0. The others cannot cancel any more, because it may publish then."""
    texts = meeting.gather(msgspec.json.encode(share).decode())
    if meeting.group.index != 0:
        meeting.group.end_cancellation()
    return texts


def _encode(manifest: Manifest) -> bytes:
    content = manifests.encode(manifest)
    require_readable(content, "the manifest")
    return content


def _stored_bytes(manifest: Manifest) -> int:
    return sum(length for record in manifest.stacks for length, _ in record.objects.values())


def build_manifest(
    save_id: str, plan: SavePlan, draft: Draft, request: SaveRequest, shares: Sequence[Share]
) -> Manifest:
    """The manifest of the files of every process. Raises PeersDisagreeError if copies of an object differ."""
    objects: list[dict[str, tuple[int, str]]] = [{} for _ in plan.stacks]
    contents: list[dict[str, str]] = [{} for _ in plan.stacks]
    for process, share in enumerate(shares):
        for stack, place, length, digest, content in share.objects:
            if objects[stack].setdefault(place, (length, digest)) != (length, digest):
                first, *others = [draft.records[leaf].path for leaf in plan.members[stack]]
                like_it = f" or one of {len(others)} others like it" if others else ""
                raise PeersDisagreeError(
                    f"process {process} and another one hold different bytes of a replicated array, which is"
                    f" {show_path(first)}{like_it}: the replicas have diverged, so the training has gone wrong, or a"
                    " device is faulty"
                )
            if content:
                contents[stack][place] = content
    records = list(draft.records)
    for number, members in enumerate(plan.members):
        for row, leaf in enumerate(members):
            records[leaf] = msgspec.structs.replace(records[leaf], stack=number, row=row)
    for leaf, first in draft.ties.items():
        records[leaf] = msgspec.structs.replace(records[leaf], stack=records[first].stack, row=records[first].row)
    return Manifest(
        format=FORMAT,
        version=VERSION,
        save_id=save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries=_libraries(),
        metadata=request.metadata,
        tree=draft.structure,
        leaves=records,
        meshes=draft.table.meshes,
        layouts=draft.table.layouts,
        stacks=[
            StackRecord.of(stack, dict(sorted(found.items())), dict(sorted(compared.items())))
            for stack, found, compared in zip(plan.stacks, objects, contents, strict=True)
        ],
        process_states=[share.state for share in shares if share.state is not None],
        step=request.step,
        phase_seconds={phase: [share.phase_seconds[phase] for share in shares] for phase in shares[0].phase_seconds},
    )


@functools.cache
def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib", "numpy", "tensorstore")}
