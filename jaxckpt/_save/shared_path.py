"""A path that all processes see, as the destination of a save: process 0 claims it and publishes the manifest.

The manifest is composed of what each process has written.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from jaxckpt import __version__
from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._model import typed_json
from jaxckpt._model.checks import FORMAT, VERSION
from jaxckpt._model.file_names import MANIFEST, WRITER, data_folder, is_data_folder
from jaxckpt._model.manifest import encode
from jaxckpt._model.records import Manifest, StackRecord, StepRecord
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options, require_bool
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._run_folder.run_paths import resolve_step
from jaxckpt._run_folder.steps import is_step
from jaxckpt._save.consistency import gather_agreed
from jaxckpt._save.describe import Draft
from jaxckpt._save.request import PreparedSave, SaveRequest
from jaxckpt._save.staging import StagedObjects, exchanges
from jaxckpt._save.write import OwnShare, WrittenShare
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan, plan_save
from jaxckpt._store.load_manifest import find_lost, repair_hint
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import Path, require_no_dangling_link, unchecked_store_at
from jaxckpt._store.transaction import Transaction, open_transaction
from jaxckpt.errors import CheckpointExistsError, PathNotSharedError, PeersDisagreeError, show_count, show_path


class SharedPath:
    """A path that all processes see. Process 0 publishes there."""

    def __init__(self, store: Store, *, overwrite: bool) -> None:
        self.store = store
        self.overwrite = require_bool(overwrite, "overwrite")
        """Whether a checkpoint at the path is replaced."""

    @classmethod
    def at(cls, path: Path, options: Options, *, overwrite: bool) -> SharedPath:
        """The destination at a path or URL. Raises InputError, StorageError."""
        return cls(unchecked_store_at(path, options, to_write=True), overwrite=overwrite)

    def check(self, request: SaveRequest) -> None:
        require_no_dangling_link(self.store)

    def plan(self, arrays: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> SavePlan:
        return plan_save(arrays, options, process, processes)

    def save(self, share: OwnShare) -> PublishResult:
        prepared = share.prepared
        call, is_collective = prepared.call, prepared.plan.is_collective
        staged = None if is_collective else share.staged_objects()
        with contextlib.ExitStack() as until_saved:
            save_id, transaction = self.begin(prepared, staged if share.holds_data else None, until_saved)
            folder = data_folder(save_id)
            with call.rendezvous("saving") as rendezvous:
                # Exchanges are collective, so no process may begin them before all are prepared.
                with rendezvous.joined_by_all(), exchanges(prepared.plan, prepared.draft) as calls:
                    written = self.write(share, folder, staged or share.staged_objects(calls))
                published = self.publish(rendezvous, prepared, save_id, transaction, written)
            share.remember(folder)
            with call.phases.timed("publish"):
                if transaction is not None:
                    transaction.close()  # now, because what follows may delete old steps or take long
                self.note_saved()
                self.finish(prepared, published)
        return published

    def note_saved(self) -> None:
        """Every process calls this after the checkpoint was published."""

    def begin(
        self, prepared: PreparedSave, stage_first: StagedObjects | None, until_saved: contextlib.ExitStack
    ) -> tuple[str, Transaction | None]:
        """Before any data is written, check that all processes save the same tree, create the data folder, and check
        that all processes see it. Every process.

        `stage_first` is staged before all that, so that the caller does not wait for the other processes. Returns the
        id of the save, and the transaction of process 0, which is open `until_saved`.
        """
        transaction: Transaction | None = None
        call, phases = prepared.call, prepared.call.phases
        with call.rendezvous("preparing to save") as rendezvous:
            if stage_first is not None:
                stage_first.fill()
            save_id = uuid.uuid4().hex
            gather_agreed(rendezvous, prepared.fingerprint)
            if call.index == 0:
                with phases.timed("plan"), call.watchdog.operation(f"preparing {self.store.url}"):
                    transaction = self.claim(prepared.plan.stacks, save_id)
                    until_saved.enter_context(contextlib.closing(transaction))
            with phases.timed("barrier"):
                save_id = rendezvous.broadcast(save_id)
        with call.rendezvous("looking for the checkpoint's folder") as rendezvous:
            with phases.timed("plan"), call.watchdog.operation(f"looking for {self.store.url}"):
                require_shared(self.store, data_folder(save_id), call.index)
            with phases.timed("barrier"):
                rendezvous.gather("")
                broadcast_start(rendezvous, prepared)
        return save_id, transaction

    def claim(self, stacks: Iterable[Stack], save_id: str) -> Transaction:
        """Check that the path may be written, and begin a transaction there, with every stack's zarr.json. Process 0.
        A step of a run also checks the run's folder.

        Raises CheckpointExistsError, StorageError.
        """
        return open_transaction(self.store, save_id, _previous_manifest(self.store, self.overwrite), stacks)

    def write(self, share: OwnShare, folder: str, staged: StagedObjects) -> WrittenShare:
        """Write the share of this process into a data folder. Every process. A conversion lets other workers write."""
        return share.write(folder, staged)

    def publish(
        self,
        rendezvous: Rendezvous,
        prepared: PreparedSave,
        save_id: str,
        transaction: Transaction | None,
        written: WrittenShare,
    ) -> PublishResult:
        """Publish the manifest after all processes have written their shares. Every process."""
        call, phases, plan, request = prepared.call, prepared.call.phases, prepared.plan, prepared.request
        with phases.timed("barrier"):
            shares = gather_shares(rendezvous, written)
        text = ""
        if transaction is None:
            call.cancellation.end()  # process 0 may publish from now on
        else:
            with phases.timed("publish"):
                manifest = compose_manifest(save_id, plan, prepared.draft, shares, request.metadata, request.step)
                content = encode(manifest)
            self.commit(call, transaction, plan.stacks, content, sync=prepared.options.sync)
            linked_bytes = sum(share.linked_bytes for share in shares)
            digest = hashlib.sha256(content).hexdigest()
            result = PublishResult(save_id, stored_bytes(manifest), linked_bytes, digest, manifest.created)
            text = msgspec.json.encode(result).decode()
            unlinked = sum((Counter(share.unlinked) for share in shares), Counter[str]())
            for reason, n_bytes in unlinked.items():
                _log.info(
                    "%s: wrote %s again that seem unchanged since the last save: %s",
                    self.store.url,
                    show_bytes(n_bytes),
                    reason,
                )
        with phases.timed("barrier"):
            return typed_json.decode(rendezvous.broadcast(text), PublishResult)

    def commit(
        self, call: Call, transaction: Transaction, stacks: Iterable[Stack], manifest: bytes, *, sync: bool
    ) -> None:
        """Make the data durable and publish the manifest. From then on, the call cannot be cancelled. Process 0."""
        if sync:
            with call.phases.timed("sync"), call.watchdog.operation(f"syncing {self.store.url}"):
                transaction.store.sync_data(transaction.data, stacks)
        call.cancellation.check()
        call.cancellation.end()
        with call.phases.timed("publish"), call.watchdog.operation(f"publishing {self.store.url}"):
            transaction.commit(manifest, sync=sync)

    def finish(self, prepared: PreparedSave, published: PublishResult) -> None:
        """Do what follows from the publication, before the save counts as done: a step or a folder of another format is
        exported. Every process."""
        if prepared.call.index == 0:
            self.record_published(prepared.request.step, published.save_id, published.created)

    def record_published(self, step: StepRecord | None, save_id: str, created: str) -> None:
        """Do what follows from the publication, also of a local step that is copied here: for a step of a run
        retention, otherwise nothing. Process 0. `created` is the time in its manifest."""


_ORBAX_NOTE = "_CHECKPOINT_METADATA"
"""The file that an ocp.Checkpointer may write at any time into the folder of its handler."""


def _previous_manifest(store: Store, overwrite: bool) -> bytes | None:
    """The manifest that this save will replace. Raises CheckpointExistsError if it may not replace it."""
    if store.is_file():
        raise CheckpointExistsError(f"{store.url} is a file; give a new or empty folder")
    names = store.names()
    has_lost = MANIFEST not in names and any(map(is_data_folder, names)) and find_lost(store)
    if MANIFEST in names or has_lost:
        if not overwrite:
            lost = f", which has lost its {MANIFEST} ({repair_hint(store)})" if has_lost else ""
            raise CheckpointExistsError(
                f"{store.url} already holds a checkpoint{lost}; pass overwrite=True to replace it"
            )
        if (target := store.link_target()) is not None:
            raise CheckpointExistsError(
                f"{store.url} is a symbolic link to {target}, and overwriting it would replace"
                " the checkpoint there: give that path, or delete the link first"
            )
        return store.read(MANIFEST)
    steps = [name for name in names if is_step(name)]
    if steps:
        raise CheckpointExistsError(
            f"{store.url} is the directory of a run, with {show_count(len(steps), 'step')}, and is not overwritten:"
            " save a"
            f" step with Checkpointer.save, replace one with save({store.url + '/' + steps[-1]!r}, …, overwrite=True),"
            " or give another folder"
        )
    if not names and "@" in store.url and resolve_step(store) is not None:
        raise CheckpointExistsError(f"{store.url} names a step of a run, so nothing can be saved there: give a folder")
    foreign = [name for name in names if not is_data_folder(name) and name != _ORBAX_NOTE]
    # A trainer may have created folders for its other files in advance.
    foreign = [name for name in foreign if not store.is_empty_folder(name)]
    if foreign:
        raise CheckpointExistsError(
            f"{store.url} holds other files ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''});"
            " give a new or empty folder"
        )
    return None


def broadcast_start(rendezvous: Rendezvous, prepared: PreparedSave, text: str = "") -> str:
    """After all processes have gathered, broadcast a text of process 0, after which they may begin their exchanges."""
    with prepared.call.cancellation.paused() if prepared.plan.is_collective else contextlib.nullcontext():
        return rendezvous.broadcast(text)


def require_shared(store: Store, folder: str, process: int) -> None:
    """Raise PathNotSharedError unless this process sees the data folder that process 0 has created."""
    if store.read(f"{folder}/{WRITER}") is None:
        raise PathNotSharedError(
            f"process {process} does not see {store.url}/{folder}, which process 0 has just created."
            " All processes must use one shared folder or object store."
        )


# The manifest ---------------------------------------------------------------------------------------------


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


def gather_shares(rendezvous: Rendezvous, written: WrittenShare) -> list[WrittenShare]:
    """The shares of all processes, in process 0. It waits for them even if it is cancelled: they may still write."""
    with rendezvous.call.cancellation.paused():
        texts = rendezvous.gather(msgspec.json.encode(written).decode())
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
        for stack, index_key, (length, digest, content) in share.objects:
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
