"""Folders of the processes, as the destination of a local save: each process publishes the manifest in its own folder.

own objects ─▶ own folder
           └─▶ streams ─▶ folders of processes in other failure domains

After all have written their shares, every process publishes the same manifest. Any one manifest then proves that the
whole step was written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import uuid
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from jaxckpt._job.rendezvous import Rendezvous
from jaxckpt._local_tier.copies import (
    CopiedPlan,
    Incoming,
    Outgoing,
    Pair,
    Round,
    RoundCalls,
    plan_local_save,
    plan_rounds,
    round_calls,
)
from jaxckpt._local_tier.flush import Flush
from jaxckpt._local_tier.tier import KeptStep, LocalSteps, pack, unpack
from jaxckpt._model import manifest as manifests
from jaxckpt._model import typed_json
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._model.file_names import data_folder
from jaxckpt._model.grid import extent
from jaxckpt._model.pieces import Bytes
from jaxckpt._model.stacks import Stack
from jaxckpt._options import Options
from jaxckpt._save.consistency import gather_agreed
from jaxckpt._save.request import PreparedSave, SaveRequest
from jaxckpt._save.shared_path import PublishResult, broadcast_start, compose_manifest, gather_shares, stored_bytes
from jaxckpt._save.staging import StagedObject, StagedObjects
from jaxckpt._save.write import OwnShare, WrittenShare
from jaxckpt._save.write_plan import ArrayLeaf, Object
from jaxckpt._store.store import Store
from jaxckpt._store.transaction import Transaction, open_own_transaction


class _SaveAgreement(msgspec.Struct, frozen=True):
    """What process 0 decides for a local save."""

    save_id: str
    kept: KeptStep
    state_bytes: list[int]
    """Length of the state of each process."""

    rounds: list[Round]
    """The rounds that send the copies."""


class ProcessFolders:
    """The folders of a local step, from the view of one process."""

    def __init__(self, tier: LocalSteps, step: int, flush: Flush | None) -> None:
        """`flush` follows the save, if the step is also stored."""
        self.store: Store = tier.child(step)
        self._tier = tier
        self._step = step
        self._flush = flush

    def check(self, request: SaveRequest) -> None:
        if self._flush is not None:
            self._flush.destination.check(request)

    def plan(self, arrays: Iterable[ArrayLeaf], options: Options, process: int, processes: int) -> CopiedPlan:
        return plan_local_save(arrays, options, process, self._tier.domains)

    def save(self, share: OwnShare) -> PublishResult:
        prepared = share.prepared
        call, plan = prepared.call, _plan(prepared)
        staged = None if plan.is_collective else share.staged_objects()
        agreed, transaction = self._begin(prepared, staged if share.holds_data else None)
        with contextlib.closing(transaction):
            with call.rendezvous("saving") as rendezvous:
                rounds = round_calls(plan.channels, agreed.rounds, call.index) if plan.is_collective else None
                with rendezvous.joined_by_all(), rounds or contextlib.nullcontext():
                    if rounds is not None:
                        sending = functools.partial(self._send_copies, prepared, agreed, rounds)
                        staged = share.staged_objects(with_others=sending)
                    assert staged is not None
                    written = share.write(data_folder(agreed.save_id), staged)
                published = self.publish(rendezvous, prepared, agreed.save_id, transaction, written)
            with call.phases.timed("publish"):
                transaction.close()
                self._tier.record_saved(self._step, agreed.save_id)
                if self._flush is not None:
                    self._flush.save_id, self._flush.owned = agreed.save_id, plan.own
        return published

    def _begin(self, prepared: PreparedSave, stage_first: StagedObjects | None) -> tuple[_SaveAgreement, Transaction]:
        """Agree on the save, make room for it, and begin the transaction of this process."""
        call, phases = prepared.call, prepared.call.phases
        with call.rendezvous("preparing to save") as rendezvous:
            if stage_first is not None:
                stage_first.fill()
            sent_bytes = [sum(obj.n_bytes for obj in sent) for sent in _plan(prepared).sent]
            offers = gather_agreed(rendezvous, prepared.fingerprint, [len(prepared.state or b""), *sent_bytes])
            text = ""
            if call.index == 0:
                with phases.timed("plan"):
                    text = msgspec.json.encode(self._decide(prepared, offers)).decode()
            with phases.timed("barrier"):
                agreed = typed_json.decode(rendezvous.broadcast(text), _SaveAgreement)
        with contextlib.ExitStack() as undone, call.rendezvous("looking for the checkpoint's folder") as rendezvous:
            with phases.timed("plan"), call.watchdog.operation(f"preparing {self.store.url}"):
                self._tier.delete_other_steps(agreed.kept)
                transaction = open_own_transaction(self.store, agreed.save_id, prepared.plan.stacks)
                undone.callback(transaction.close)
            with phases.timed("barrier"):
                rendezvous.gather("")
                broadcast_start(rendezvous, prepared)
            undone.pop_all()
        return agreed, transaction

    def _decide(self, prepared: PreparedSave, offers: Sequence[list[int]]) -> _SaveAgreement:
        """Process 0. An offer is the length of a process's state, and the bytes that it sends over each channel."""
        channels = _plan(prepared).channels
        stream_bytes: dict[Pair, int] = {}
        for number, pairs in enumerate(channels):
            for sender, receiver in pairs:
                state_bytes, *sent_bytes = offers[sender]
                stream_bytes[sender, receiver] = state_bytes + sent_bytes[number]
        rounds = plan_rounds(channels, stream_bytes, prepared.options.host_bytes // 8)
        return _SaveAgreement(
            uuid.uuid4().hex, self._tier.choose_kept_step(self._step), [offer[0] for offer in offers], rounds
        )

    def _send_copies(
        self, prepared: PreparedSave, agreed: _SaveAgreement, calls: RoundCalls, own: Generator[StagedObject]
    ) -> Generator[StagedObject]:
        """The own objects, and those that other processes send. Their states are written immediately."""
        process, plan = prepared.call.index, _plan(prepared)
        outgoing: dict[int, Outgoing] = {}
        incoming: dict[int, _IncomingCopies] = {}
        sent: dict[Object, list[Outgoing]] = {}
        for channel, pairs in enumerate(plan.channels):
            for sender, receiver in pairs:
                if sender == process:
                    outgoing[channel] = Outgoing()
                    outgoing[channel].add(np.frombuffer(prepared.state or b"", np.uint8))
                    for obj in plan.sent[channel]:
                        sent.setdefault(obj, []).append(outgoing[channel])
                if receiver == process:
                    has_state = prepared.state is not None
                    incoming[channel] = _IncomingCopies(
                        sender, agreed.state_bytes[sender], plan.received[channel], has_state
                    )
        with contextlib.closing(own):
            for planned in calls:
                stream = outgoing[planned.channel] if process in planned.senders else None
                while (
                    stream is not None
                    and stream.waiting_bytes < planned.n_bytes
                    and (staged := next(own, None)) is not None
                ):
                    for target in sent.get(staged.obj, ()):
                        target.add(replace(staged, groups=[*staged.groups]))
                    yield staged
                received = calls.run_next(None if stream is None else stream.take(planned.n_bytes))
                if received is not None:
                    yield from self._keep(prepared, agreed.save_id, incoming[planned.channel], received)
            yield from own

    def _keep(
        self, prepared: PreparedSave, save_id: str, incoming: _IncomingCopies, received: Bytes
    ) -> Generator[StagedObject]:
        """Write a complete state to this process's data folder. Yields complete objects."""
        for data in incoming.stream.add(received):
            if incoming.has_state:
                incoming.has_state = False
                name = f"{data_folder(save_id)}/{manifests.state_file_name(incoming.sender)}"
                self.store.put(name, data.tobytes(), sync=prepared.options.sync)
            else:
                yield _staged_copy(next(incoming.objects), data, prepared.plan.stacks)

    def publish(
        self, rendezvous: Rendezvous, prepared: PreparedSave, save_id: str, transaction: Transaction, own: WrittenShare
    ) -> PublishResult:
        """Publish the manifest in every process after all have written their shares."""
        call, phases = prepared.call, prepared.call.phases
        with phases.timed("barrier"):
            shares = gather_shares(rendezvous, own)
        packed = ""
        if shares:
            call.cancellation.check()
            call.cancellation.end()
            manifest = compose_manifest(
                save_id, prepared.plan, prepared.draft, shares, prepared.request.metadata, prepared.request.step
            )
            packed = pack(manifests.encode(manifest))
        else:
            call.cancellation.end()  # process 0 may publish from now on
        with phases.timed("barrier"):
            content = unpack(rendezvous.broadcast(packed))
            rendezvous.start_next()
        manifest = manifests.decode(content, call.where)
        with phases.timed("publish"), call.watchdog.operation(f"publishing {call.where}"):
            if prepared.options.sync:
                transaction.store.sync_data(transaction.data, manifest.decoded_stacks)
            transaction.commit(content, sync=prepared.options.sync)
        with phases.timed("barrier"):
            rendezvous.barrier()  # until all have published, the loss of one folder could lose the only manifest
        return PublishResult(save_id, stored_bytes(manifest), 0, hashlib.sha256(content).hexdigest(), manifest.created)


class _IncomingCopies:
    """The copies that a process receives from another one: its state, if states are saved, then objects."""

    def __init__(self, sender: int, state_bytes: int, objects: Sequence[Object], has_state: bool) -> None:
        self.sender = sender
        self.objects = iter(objects)
        self.has_state = has_state
        """Whether the next part is the state."""

        self.stream = Incoming([*[state_bytes] * has_state, *(obj.n_bytes for obj in objects)])


def _plan(prepared: PreparedSave) -> CopiedPlan:
    assert isinstance(prepared.plan, CopiedPlan)
    return prepared.plan


def _staged_copy(obj: Object, data: Bytes, stacks: Sequence[Stack]) -> StagedObject:
    """An object that another process has sent."""
    dtype = np.dtype(DTYPES[stacks[obj.stack].dtype])
    array = data.view(dtype).reshape(extent(obj.box))
    return StagedObject(obj, dtype, extent(obj.box)[0], [[(obj.box, array, ...)]], obj.n_bytes)
