"""Composes the manifest of a save from what each process has written."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from jaxckpt import __version__
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model import typed_json
from jaxckpt._model.checks import FORMAT, VERSION
from jaxckpt._model.records import Manifest, StackRecord, StepRecord
from jaxckpt._save.describe import Draft
from jaxckpt._save.write_plan import SavePlan
from jaxckpt.errors import PeersDisagreeError, show_path

StoredObject = tuple[int, str, int, str, str]
"""Stack, grid index, length, digest and content digest of an object. The last is empty if it was not computed."""


class WrittenShare(msgspec.Struct, frozen=True):
    """The files that one process has written."""

    objects: list[StoredObject]

    linked_bytes: int
    """Bytes of the objects that are links to an earlier checkpoint."""

    state: tuple[int, str] | None
    """Length and digest of the file for its state."""

    phase_seconds: dict[str, float]
    """Seconds of each phase until the share was written."""

    host: str
    """Name of the process's host."""

    unlinked: dict[str, int] = {}
    """Bytes of the objects that seem unchanged but were written, by the reason."""


class PublishResult(msgspec.Struct, frozen=True):
    """What process 0 sends to the others after it has published the checkpoint."""

    save_id: str

    stored_bytes: int
    """Bytes of all objects."""

    reused_bytes: int
    """Bytes of the objects that were linked."""

    manifest_sha256: str

    created: str
    """The time in the manifest."""


def gather_shares(rendezvous: Rendezvous, share: WrittenShare) -> list[WrittenShare]:
    """The shares of all processes, in process 0. It waits for them even if it is cancelled: they may still write."""
    with rendezvous.call.cancellation.paused():
        texts = rendezvous.gather(msgspec.json.encode(share).decode())
    return [typed_json.decode(text, WrittenShare) for text in texts]


def stored_bytes(manifest: Manifest) -> int:
    return sum(length for record in manifest.stacks for length, _ in record.objects.values())


def compose_manifest(
    save_id: str,
    plan: SavePlan,
    draft: Draft,
    shares: Sequence[WrittenShare],
    metadata: Any = None,
    step: StepRecord | None = None,
) -> Manifest:
    """The manifest of a planned save. Raises PeersDisagreeError if copies of an object differ."""
    objects: list[dict[str, tuple[int, str]]] = [{} for _ in plan.stacks]
    contents: list[dict[str, str]] = [{} for _ in plan.stacks]
    for process, share in enumerate(shares):
        for stack, index_key, length, digest, content in share.objects:
            if objects[stack].setdefault(index_key, (length, digest)) != (length, digest):
                first, *others = [draft.records[leaf].path for leaf in plan.leaves[stack]]
                like_it = f" or one of {len(others)} others like it" if others else ""
                raise PeersDisagreeError(
                    f"process {process} and another one hold different bytes of a replicated array, which is"
                    f" {show_path(first)}{like_it}: the replicas have diverged, so the training has gone wrong, or a"
                    " device is faulty"
                )
            if content:
                contents[stack][index_key] = content
    records = list(draft.records)
    for number, leaves in enumerate(plan.leaves):
        for row, leaf in enumerate(leaves):
            records[leaf] = msgspec.structs.replace(records[leaf], stack=number, row=row)
    for leaf, first in draft.ties.items():
        records[leaf] = msgspec.structs.replace(records[leaf], stack=records[first].stack, row=records[first].row)
    return Manifest(
        format=FORMAT,
        version=VERSION,
        save_id=save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        libraries=_libraries(),
        metadata=metadata,
        tree=draft.structure,
        leaves=records,
        meshes=draft.table.meshes,
        layouts=draft.table.layouts,
        stacks=[
            StackRecord.of(stack, dict(sorted(stack_objects.items())), dict(sorted(compared.items())))
            for stack, stack_objects, compared in zip(plan.stacks, objects, contents, strict=True)
        ],
        process_states=[share.state for share in shares if share.state is not None],
        step=step,
        phase_seconds={phase: [share.phase_seconds[phase] for share in shares] for phase in shares[0].phase_seconds},
        processes=[(share.host, n_bytes) for share, n_bytes in zip(shares, plan.process_bytes, strict=True)],
    )


@functools.cache
def _libraries() -> dict[str, str]:
    return {"jaxckpt": __version__, **{name: version(name) for name in ("jax", "jaxlib", "numpy", "tensorstore")}}
