"""Saving: request → prepared → claimed → written → published.

    the caller's thread:   prepare ─▶ stage ─▶ hand over ─────────────────▶ return, or wait
    the thread that writes:              claim the path ─▶ write ─▶ publish

The thread that writes does everything that must not stop half-way, such as holding a lock or answering the other
processes, because an interrupt (Ctrl-C) reaches only the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._job.rendezvous import Call, Group
from jaxckpt._model import manifest as manifests
from jaxckpt._model.file_names import data_folder
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options, options_or_default
from jaxckpt._pipeline.events import record_event
from jaxckpt._pipeline.progress import Report, display_progress, show_bytes
from jaxckpt._pipeline.rate_limiter import RateLimiter
from jaxckpt._pipeline.threads import POLL_SECONDS, is_shutting_down, run_uninterrupted
from jaxckpt._save import async_saves as background_saves
from jaxckpt._save.async_saves import PendingSave
from jaxckpt._save.claim import claim, claim_own, new_save_id, require_shared
from jaxckpt._save.consistency import Fingerprint, require_agreement
from jaxckpt._save.peers import Round, plan_rounds, stream_bytes, transfer_copies, transfers
from jaxckpt._save.prepare import PreparedSave, SaveRequest, prepare
from jaxckpt._save.publish import PublishResult, publish, publish_own
from jaxckpt._save.save_info import SaveInfo
from jaxckpt._save.staging import StagedObject, exchanges, stage
from jaxckpt._save.staging_queue import Handover
from jaxckpt._save.write import write
from jaxckpt._save.write_plan import Object
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import PeerError, PeerFailedError, show_count


def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    dtype: Dtypes = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> SaveInfo:
    """Write a pytree as a checkpoint. Every process of the job calls this function, with the same arguments.

    Each process writes shards that its own devices hold, and the job writes each byte of the tree once. The checkpoint
    appears at `path` only when it is complete on disk, or not at all.

    Args:
        path: A local path, or a URL that tensorstore accepts ("gs://…", "s3://…", "memory://…", "file://…").
        tree: A pytree. Leaves: jax.Array of any sharding and dtype, typed PRNG keys, NumPy arrays and scalars, int,
            float, complex, bool, str, bytes; None; objects with `state_dict` and `load_state_dict`, or `get_state` and
            `set_state`, whose state is saved; and types that `register_leaf` adds. Host leaves (all but jax.Array) are
            written by process 0; the state of an object must be the same in every process.
        mesh: Store each jax.Array in its layout on this mesh. By default each array is stored in its current layout.
        specs: With `mesh`, the PartitionSpec of each leaf: one for all, a pytree prefix of them, or a function of
            (path, leaf). By default each leaf keeps its own spec, mapped by axis name.
        dtype: Store leaves in another dtype: one for all, a pytree prefix of them, or a function of (path, leaf) that
            returns a dtype or None. A dtype for the tree or for a container applies to the leaves below it of the same
            kind of number, so bfloat16 applies to floats only. A dtype at a leaf's own path, or from a function, always
            applies. Floats may lose precision and range; other lossy casts need `Options(cast="unsafe")`, and so does
            float4_e2m1fn, which has no NaN. Leaves are cast one object at a time.
        metadata: Any JSON value. Read it with `open(path).metadata`.
        overwrite: Replace the checkpoint at `path`. The old one is deleted only after the new one is published.
        process_state: State that differs by process, such as the position of its data iterator: a mapping of names to
            bytes or JSON values, with the same names in every process. Read it with `open(path).process_states`.
        options: Sizes, compression, timeouts, progress; see `Options`.

    Returns:
        What was written, how many bytes by each process, and how long each phase took.

    Raises:
        TreeError: A leaf or key that cannot be stored.
        SpecError: A spec that does not fit its leaf or the mesh.
        CheckpointExistsError: `path` has a checkpoint and `overwrite` is false, or has other files, or is a symbolic
            link to a checkpoint; or another save published there while this one was writing.
        StorageError: No space, no permission, or an I/O error.
        PeerError: Another process failed, did not respond, made a different call, passed a different tree or different
            values, or does not see `path`.
        InputError: Another argument is invalid, such as `metadata` that is not JSON; or a signal handler or a callback
            made the call from inside another jaxckpt call.
        KeyboardInterrupt: Ctrl-C. Nothing is published, and an existing checkpoint at `path` stays, unless a note on
            the error says that the new one had just been published.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    with Group.for_call(options, Call.of("save", path)) as group:
        request = SaveRequest(path, tree, mesh, specs, dtype, metadata, overwrite, process_state)
        return start(request, options_or_default(options), group, background=False).wait()


def save_async(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    dtype: Dtypes = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    on_done: Callable[[SaveInfo], object] | None = None,
    options: Options | None = None,
) -> PendingSave:
    """Start saving a pytree, and return as soon as the caller may donate, delete or overwrite its arrays.

    A background thread writes the data. See `save` for the other arguments; every process makes this call too. On CPU
    devices the arrays' memory is kept alive and not copied: a step that would donate it gets new memory instead. From
    other devices the arrays are copied to host memory, at most `options.staging_bytes` ahead of the writing.

    Args:
        on_done: Called once the checkpoint is published, with the result of `wait()` (its times so far). It runs in
            every process, in the background thread, before `done` is true. It is not called if the save fails or is
            skipped. It may call `open` and `load_numpy`, but neither `wait()` nor a function that every process must
            call. If it raises, `wait()` raises the same error, with a note that the checkpoint was published.

    Returns:
        The running save. A second `save_async` waits for it or is skipped, depending on `options.when_busy`.

    Raises:
        TreeError, SpecError, InputError: As for `save`, immediately. `wait()` raises everything else that `save` would
            raise. If `wait()` is not called, the next save raises it; without a next save, the traceback is printed
            when the interpreter exits, with exit status 1. Functions that were registered with atexit before
            `import jaxckpt` do not run then.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> pending = jaxckpt.save_async("/tmp/jaxckpt-doc/async", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> pending.wait().total_bytes
        128
    """
    with Group.for_call(options, Call.of("save_async", path)) as group:
        request = SaveRequest(path, tree, mesh, specs, dtype, metadata, overwrite, process_state, on_done=on_done)
        return start(request, options_or_default(options), group, background=True)


@jax.transfer_guard("allow")  # the caller has asked for these transfers
def start(request: SaveRequest, options: Options, group: Group, *, background: bool) -> PendingSave:
    """Save completely, or until the thread that writes no longer needs the caller. Every process."""
    start_time = time.perf_counter()
    if background and request.deadline is None and options.when_busy == "skip" and _is_busy(group):
        skipped = PendingSave(os.fspath(request.path), 0, start_time, group.watchdog)
        skipped.skip()
        return skipped
    save = prepare(request, options, group)
    pending = PendingSave(save.store.url, save.written_bytes, start_time, group.watchdog)
    background = background and not is_shutting_down()  # during its shutdown, Python does not wait for other threads
    max_bytes = options.staging_bytes if background else options.host_bytes // 2
    handover = Handover(max_bytes if save.threaded else None, request.deadline, group.watchdog)
    is_limited = background and request.deadline is None and request.spread is None
    pending.rate_limiter = RateLimiter(options.max_bytes_per_second if is_limited else None)
    work = functools.partial(_carry_out, save, handover)
    if request.on_done is not None:
        work = functools.partial(run_and_notify, work, request.on_done)
    if background and not background_saves.unreported_saves():
        background_saves.finish_at_exit()
    feed_start = time.perf_counter()

    def begin() -> None:
        if not group.is_handed_over:
            save.clock.add("device_to_host", time.perf_counter() - feed_start)
            background_saves.submit_save(
                pending, work, awaited=not background, is_last_step=request.deadline is not None
            )
            group.is_handed_over = True

    calls: CollectiveCalls[Any, Any] | None = None
    try:
        if group.count > 1:
            begin()  # sends heartbeats while this process stages
        # Exchanges are collective, so no process may begin them before all have finished their preparations.
        if save.is_collective and not _await_claim(save):
            pending.wait()  # raises the reason
        calls = _collective_calls(save)
        with contextlib.closing(_stage(save, calls, background=background)) as staged:
            handover.feed(staged, begin)
        if save.is_collective:
            calls.join()  # if the thread that writes has failed, it takes no more objects
        save.draft.values.clear()  # everything is staged, so the leaves are released
        if not background:
            pending.wait()
    except BaseException as error:
        handover.cancel(error)
        if save.is_collective and group.is_handed_over and not isinstance(error, PeerFailedError):
            _join_calls(save, calls)
        group.is_handed_over = background_saves.await_cleanup(pending)
        save.draft.values.clear()  # the error may be kept for long
        if pending.done and pending.error is None:
            error.add_note(f"jaxckpt: the checkpoint at {pending.path} was published before this took effect")
        raise
    pending.mark_returned()
    return pending


def _await_claim(save: PreparedSave) -> bool:
    """Wait until all processes have claimed the path. Returns False if they will not."""
    stall_error = save.group.watchdog.stall_error
    while not save.claim_ended.wait(POLL_SECONDS) and not stall_error():
        pass
    return bool(save.transfer.data) and not stall_error()


def _collective_calls(save: PreparedSave) -> CollectiveCalls[Any, Any]:
    """The exchanges between the processes, after all have claimed the path: of leaves that are stored in another layout
    (`mesh=`), or of the copies of a local step, which has no `mesh=`."""
    if save.copies:
        return transfers(save.copies, save.transfer.rounds, save.group.index)
    return exchanges(save.plan, save.draft)


def _join_calls(save: PreparedSave, calls: CollectiveCalls[Any, Any] | None) -> None:
    """Make the remaining exchanges after an error: the other processes begin them as soon as the path is claimed."""

    def join() -> None:
        if _await_claim(save):
            (calls or _collective_calls(save)).join()

    with contextlib.suppress(Exception):  # no error may hide the first one
        run_uninterrupted(join)


def _stage(save: PreparedSave, calls: CollectiveCalls[Any, Any], *, background: bool) -> Generator[StagedObject]:
    """The data that this process writes. Makes the calls of `_collective_calls`."""
    staged = stage(
        save.plan,
        save.draft,
        save.reuse.originals,
        None if save.copies else calls,
        hold=background or not save.threaded,
        stack_bytes=save.options.host_bytes // 2,
        whole_shards=background and save.options.staging_bytes is None,
    )
    if not save.copies:
        return staged
    keep_state = functools.partial(_keep_state, save)
    return transfer_copies(staged, save.plan.stacks, save.copies, calls, save.group.index, save.state, keep_state)


def _is_busy(group: Group) -> bool:
    """Whether process 0 is still writing an earlier save. It decides for all, because they may end at different
    times."""
    busy = any(not pending.done for pending in background_saves.unreported_saves())
    with group.meeting("deciding whether to save") as meeting:
        meeting.gather("")
        return meeting.broadcast("busy" if busy else "free") == "busy"


# In the thread that writes --------------------------------------------------------------------------------


def run_and_notify(
    work: Callable[[PendingSave], SaveInfo], on_done: Callable[[SaveInfo], object], pending: PendingSave
) -> SaveInfo:
    """Save, then call `on_done` outside of the collective call, so that it may call jaxckpt."""
    info = work(pending)
    pending.mark_published()
    try:
        on_done(pending.with_times(info))
    except BaseException as error:
        error.add_note(f"jaxckpt: on_done raised this after the checkpoint at {pending.path} was published")
        raise
    return info


@jax.transfer_guard("allow")
def _carry_out(save: PreparedSave, handover: Handover, pending: PendingSave) -> SaveInfo:
    """Claim the path, write the data and publish the manifest."""
    group, clock = save.group, save.clock
    group.require_not_cancelled = handover.require_not_cancelled
    with (
        group,
        contextlib.closing(handover),
        display_progress("save", pending.progress.total_bytes, save.options.progress) as display,
    ):
        try:
            save_id, transaction = _agree_and_begin(save)
        except BaseException:
            handover.close()
            raise
        finally:
            save.claim_ended.set()
        data = data_folder(save_id)
        with transaction or contextlib.nullcontext():
            with group.meeting("saving") as meeting:
                try:
                    share, written = write(save, data, handover, pending.rate_limiter, _make_report(pending, display))
                    handover.require_not_cancelled()
                except BaseException:
                    handover.close()
                    if group.index == 0:  # so that the data is not deleted while the others still write
                        with contextlib.suppress(PeerError):
                            meeting.gather("")
                    raise
                publish_here = publish_own if save.request.spread else publish
                published = publish_here(meeting, save, save_id, transaction, share)
            save.reuse.keep(data, save.plan.stacks, written)
            with clock.timed("publish"):
                if transaction is not None:
                    transaction.close()
                if save.request.spread is not None:
                    replicas = {*save.copies.replicas} if save.copies else set[Object]()
                    own = [obj for obj in save.plan.objects if obj not in replicas]
                    save.request.spread.on_published(save_id, own)
                if group.index == 0 and save.request.on_published is not None:
                    save.request.on_published()
        info = _info(save, save_id, published)
    seconds = pending.with_times(info).seconds
    record_event(
        "save",
        seconds,
        lambda: (
            f"saved {info.path}: {show_count(info.leaves, 'leaf')}, {show_bytes(info.total_bytes)}, in {seconds:.2f} s"
            + (f"; {show_bytes(info.reused_bytes)} linked" if info.reused_bytes else "")
        ),
        log=group.index == 0,
        bytes=info.total_bytes,
        leaves=info.leaves,
    )
    return info


def _make_report(pending: PendingSave, display: Report) -> Report:
    def report(moved: int) -> None:
        pending.add_done_bytes(moved)
        display(moved)

    return report


class _Decisions(msgspec.Struct, frozen=True):
    """The decisions of process 0."""

    save_id: str

    kept: str = ""
    """For a spread save: the argument of `Spread.clear`, which says which step stays in each process's folder."""

    rounds: list[Round] = []
    """For a spread save: the exchange between the processes."""


def _agree_and_begin(save: PreparedSave) -> tuple[str, Transaction | None]:
    """Before any data is written, check that all processes save the same tree, create the data folder, and check that
    all processes see it. Returns the id of the save, and the transaction of this process, if it has one: process 0
    publishes.

    A save that is spread over folders of the processes has a data folder in each of them. This also plans the exchange
    of data between the processes.
    """
    transaction: Transaction | None = None
    group, clock, spread = save.group, save.clock, save.request.spread
    looking = "preparing each process's folder" if spread else "looking for the checkpoint's folder"
    try:
        with group.meeting("preparing to save") as meeting:
            own, value_groups = save.agreement() if save.agreement else (Fingerprint({}, []), [])
            mine = own, stream_bytes(save.copies, save.state) if save.copies else []
            with clock.timed("barrier"):
                texts = meeting.gather(msgspec.json.encode(mine).decode())
            messages = [msgspec.json.decode(text, type=tuple[Fingerprint, list[int]]) for text in texts]
            if len(messages) > 1:
                require_agreement([fingerprint for fingerprint, _ in messages], value_groups)
            terms = _Decisions(new_save_id())
            if messages and spread and save.copies:
                sizes = [n_bytes for _, n_bytes in messages]
                rounds = plan_rounds(save.copies.channels, sizes, save.options.host_bytes // 8)
                terms = _Decisions(terms.save_id, spread.choose_kept(), rounds)
            elif messages:
                with group.watchdog.operation(f"preparing {save.store.url}"):
                    transaction = claim(save.store, save.plan.stacks, terms.save_id, overwrite=save.request.overwrite)
            with clock.timed("barrier"):
                terms = msgspec.json.decode(meeting.broadcast(msgspec.json.encode(terms).decode()), type=_Decisions)
        with group.meeting(looking) as meeting:
            if spread:
                with group.watchdog.operation(f"preparing {save.store.url}"):
                    spread.clear(terms.kept)
                    transaction = claim_own(save.store, save.plan.stacks, terms.save_id)
            else:
                with group.watchdog.operation(f"looking for {save.store.url}"):
                    require_shared(save.store, data_folder(terms.save_id), group.index)
            with clock.timed("barrier"):
                meeting.gather("")
                require_not_cancelled = group.require_not_cancelled
                if save.is_collective:  # the others begin their exchanges as soon as all have answered
                    group.end_cancellation()
                meeting.broadcast("")
                group.require_not_cancelled = require_not_cancelled
    except BaseException:
        if transaction is not None:
            transaction.close()
        raise
    save.transfer.rounds, save.transfer.data = terms.rounds, data_folder(terms.save_id)
    return terms.save_id, transaction


def _keep_state(save: PreparedSave, process: int, state: bytes) -> None:
    """Write a copy of the state of another process into this process's data folder."""
    save.store.put(f"{save.transfer.data}/{manifests.state_file_name(process)}", state, sync=save.options.sync)


def _info(save: PreparedSave, save_id: str, published: PublishResult) -> SaveInfo:
    plan = save.plan
    states = 0 if save.state is None else save.group.count
    return SaveInfo(
        path=save.store.url,
        save_id=save_id,
        leaves=len(save.draft.records),
        total_bytes=sum(plan.process_bytes),
        process_bytes=plan.process_bytes,
        objects=plan.n_objects,
        files=plan.n_objects + len(plan.stacks) + states + 1,
        stored_bytes=published.stored_bytes,
        reused_bytes=published.reused_bytes,
        manifest_sha256=published.manifest_sha256,
        seconds=0.0,  # `PendingSave.with_times` sets this and the next field
        blocked_seconds=0.0,
        phase_seconds=save.clock.phase_seconds,
    )
