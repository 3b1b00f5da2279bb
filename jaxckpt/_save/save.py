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
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxckpt._arguments.casts import Dtypes
from jaxckpt._arguments.specs import Specs
from jaxckpt._job.call import Call
from jaxckpt._job.collectives import CollectiveCalls
from jaxckpt._keywords import explain_keywords
from jaxckpt._model.tree import Tree
from jaxckpt._options import Options
from jaxckpt._pipeline.events import record_event
from jaxckpt._pipeline.progress import display_progress
from jaxckpt._pipeline.rate_limiter import RateLimiter
from jaxckpt._pipeline.threads import POLL_SECONDS, Task, is_shutting_down, run_uninterrupted
from jaxckpt._pipeline.units import show_bytes
from jaxckpt._save import running_saves
from jaxckpt._save.compose_manifest import PublishResult
from jaxckpt._save.consistency import Fingerprint, require_agreement
from jaxckpt._save.pending_save import PendingSave
from jaxckpt._save.prepare import prepare
from jaxckpt._save.request import Begun, PreparedSave, SaveRequest
from jaxckpt._save.running_saves import RunningSave
from jaxckpt._save.save_info import SaveInfo
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._save.staging import StagedObject, stage
from jaxckpt._save.staging_queue import StagingQueue
from jaxckpt._save.write import write
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import InputError, PeerFailedError, show_count


@explain_keywords
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
    """Save a pytree as a checkpoint. Every process of the job calls this function, with the same arguments.

    Each process writes shards that its own devices hold, and the job writes each byte of the tree once. The checkpoint
    appears at `path` only when it is complete on disk.

    Args:
        path: A local path, or a URL that tensorstore accepts ("gs://…", "s3://…", "memory://…", "file://…").
        tree: A pytree. Leaves: jax.Array of any sharding and dtype, typed PRNG keys, NumPy arrays and scalars, int,
            float, complex, bool, str, bytes; None; jax.Ref, whose array is saved; objects with `state_dict` and
            `load_state_dict`, or `get_state` and `set_state`, whose state is saved; and types that `register_leaf`
            adds. Host leaves (NumPy arrays and Python values) are written by process 0; the state of an object must be
            the same in every process.
        mesh: Store each jax.Array in its layout on this mesh. By default each array keeps its current layout.
        specs: With `mesh`, the PartitionSpec of each leaf: one for all, a pytree prefix of them, or a function of
            (path, leaf). By default each leaf keeps its own spec, mapped by axis name.
        dtype: Store leaves in a different dtype: one for all, a pytree prefix of them, or a function of (path, leaf)
            that returns a dtype or None. The dtype of the tree or of a container applies only to leaves below it of the
            same kind of number, so bfloat16 applies only to floats. A dtype at a leaf's own path, or from a function,
            always applies. Floats may lose precision and range; other lossy casts need `Options(cast="unsafe")`, as
            does float4_e2m1fn, which has no NaN. Leaves are cast one object at a time.
        metadata: Any JSON value. Read it with `open(path).metadata`.
        overwrite: Replace the checkpoint at `path`. The old one is deleted only once the new one is published.
        process_state: State that differs between processes, such as the position of a data iterator: a mapping of names
            to bytes or JSON values, with the same names in every process. Read it with `open(path).process_states`.
        options: Sizes, compression, timeouts, progress; see `Options`.

    Returns:
        What was written, how many bytes by each process, and how long each phase took.

    Raises:
        TreeError: A leaf or key that cannot be stored.
        SpecError: A spec that does not fit its leaf or the mesh.
        CheckpointExistsError: `path` has a checkpoint and `overwrite` is false; it has other files, or is a symbolic
            link to a checkpoint; or another save published there during this one.
        StorageError: No space, no permission, or an I/O error.
        PeerError: Another process failed, did not respond, made a different call, passed a different tree or different
            values, or does not see `path`.
        InputError: Another argument is invalid, such as `metadata` that is not JSON; or a signal handler or a callback
            made the call from inside another jaxckpt call.
        KeyboardInterrupt: Ctrl-C. Nothing is published, and an existing checkpoint at `path` is kept, unless a note on
            the error says that the new one had just been published.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    with Call.of("save", path, options) as call:
        destination = _destination(path, call.options, overwrite=overwrite)
        request = SaveRequest(destination, call.options, tree, mesh, specs, dtype, metadata, process_state)
        return start(request, call, background=False).wait()


@explain_keywords
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
    """Start saving a pytree, and return as soon as it is safe to donate, delete or overwrite its arrays.

    A background thread writes the data. Every process makes this call too; see `save` for the other arguments. On CPU
    devices, the arrays' memory is kept alive and, above 16 KiB, not copied: a step that would donate it gets new memory
    instead, and other libraries that share it must not write to it yet. NumPy arrays are copied, and the data of other
    devices, at most `options.staging_bytes` ahead of the writing.

    Args:
        on_done: Called once the checkpoint is published, with the result of `wait()` (its times so far), in every
            process, in the background thread, before `done` is true. It is not called if the save fails or is skipped.
            It may call `open` and `load_numpy`, but nothing that waits for this save or that every process must call,
            such as `wait()`, a save or a conversion; in a job of one process, a thread that it starts may. If it
            raises, `wait()` raises the same error, with a note that the checkpoint was published.

    Returns:
        The running save. A second `save_async` waits for it or is skipped, depending on `options.when_busy`.

    Raises:
        TreeError, SpecError, InputError: As for `save`, immediately. `wait()` raises everything else that `save` would
            raise. If nothing waits, an error is logged at once, and the next save of the same path raises it; without
            one, the traceback is printed when the interpreter exits, with exit status 1. Functions that were registered
            with atexit before `import jaxckpt` do not run then.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> pending = jaxckpt.save_async("/tmp/jaxckpt-doc/async", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> pending.wait().total_bytes
        128
    """
    with Call.of("save_async", path, options) as call:
        destination = _destination(path, call.options, overwrite=overwrite)
        request = SaveRequest(
            destination, call.options, tree, mesh, specs, dtype, metadata, process_state, on_done=on_done
        )
        return PendingSave(start(request, call, background=True))


_FILE_SUFFIXES = (".safetensors", ".npz", ".npy", ".pt", ".pth", ".h5", ".hdf5")
"""Suffixes of single files of other libraries. A folder with such a name would mislead every other program."""


def _destination(path: Any, options: Options, *, overwrite: bool) -> SharedPath:
    """The destination at a path or URL. Raises InputError, StorageError."""
    destination = SharedPath.at(path, options, overwrite=overwrite)
    suffix = os.path.splitext(destination.store.url)[1]
    if suffix in _FILE_SUFFIXES:
        raise InputError(
            f"path {destination.store.url!r} ends in {suffix}, but save writes a folder in jaxckpt's own format: give a"
            " path without this suffix. jaxckpt.convert then writes a .safetensors or .npz file from the checkpoint"
        )
    return destination


@jax.transfer_guard("allow")  # the caller has asked for these transfers
def start(request: SaveRequest, call: Call, *, background: bool) -> RunningSave:
    """Save completely, or until the thread that writes no longer needs the caller. Every process."""
    start_time, options = time.perf_counter(), request.options
    if background and not request.is_last_step and options.when_busy == "skip" and _is_busy(call):
        skipped = RunningSave(request.destination.store, 0, start_time, call.watchdog)
        skipped.skip()
        return skipped
    save = prepare(request, call)
    background = background and not is_shutting_down()  # during its shutdown, Python does not wait for other threads
    n_bytes = save.plan.written_bytes(call.index)
    pending = RunningSave(save.store, n_bytes, start_time, call.watchdog, request.step_number)
    is_limited = background and not request.is_last_step
    pending.rate_limiter = RateLimiter(options.max_bytes_per_second if is_limited else None, yields=is_limited)
    max_bytes = options.staging_bytes if background else options.host_bytes // 2
    staging_queue = StagingQueue(max_bytes if save.threaded else None, request.deadline, call)
    if background and not running_saves.unreported_saves():
        running_saves.finish_at_exit()
    handover = _Handover(save, pending, staging_queue, background=background)
    try:
        if call.count > 1:
            handover.submit()  # sends heartbeats while this process stages
        if save.plan.is_collective:
            handover.begin_exchanges()
        handover.feed()
        if not background:
            pending.wait()
        pending.mark_returned()
    except BaseException as error:
        handover.cancel(error)
        raise
    return pending


def _is_busy(call: Call) -> bool:
    """Whether process 0 is still writing an earlier save. It decides for all, because they may end at different
    times."""
    busy = any(not pending.done for pending in running_saves.unreported_saves())
    with call.rendezvous("deciding whether to save") as rendezvous:
        return rendezvous.decision(busy)


class _Handover:
    """Hands a prepared save over to the thread that writes, and feeds it with staged data. In the caller's thread."""

    def __init__(
        self, save: PreparedSave, pending: RunningSave, staging_queue: StagingQueue, *, background: bool
    ) -> None:
        self._save = save
        self._pending = pending
        self._staging_queue = staging_queue
        self._background = background
        self._beginning = Task(functools.partial(_begin, save))
        self._begun: Begun | None = None
        self._exchanges: CollectiveCalls[Any, Any] | None = None
        """The exchanges between the processes; None if no leaf is exchanged, or before the path is claimed."""

    def submit(self) -> None:
        """Submit the save to the thread that writes, if this has not been done."""
        call, request = self._save.call, self._save.request
        if call.is_handed_over:
            return
        work = functools.partial(_carry_out, self._save, self._beginning, self._staging_queue)
        if request.on_done is not None:
            work = functools.partial(run_and_notify, work, request.on_done)
        running_saves.submit_save(self._pending, work, awaited=not self._background, is_last_step=request.is_last_step)
        call.is_handed_over = True

    def begin_exchanges(self) -> None:
        """Wait until all processes have claimed the path. Exchanges are collective, so no process may begin them
        before all have finished their preparations."""
        self._begun = self._await_begun()
        if self._begun is None:
            self._pending.wait()  # raises the reason
        else:
            self._exchanges = self._save.destination.exchange(self._save, self._begun)

    def _await_begun(self) -> Begun | None:
        """Wait until all processes have claimed the path. None if they will not."""
        while not self._beginning.wait(POLL_SECONDS):
            if self._save.call.watchdog.stall_error():
                return None
        try:
            return self._beginning.result().begun
        except BaseException:
            return None

    def feed(self) -> None:
        """Stage all data, and release the leaves."""
        start_time = time.perf_counter()
        with self._staging_queue, contextlib.closing(self._staged()) as staged:
            for obj in staged:
                if not self._staging_queue.fits(obj):
                    self._submit_late(start_time)
                if not self._staging_queue.put(obj):
                    break
        self._submit_late(start_time)
        if self._exchanges is not None:
            self._exchanges.join()  # if the thread that writes has failed, it takes no more objects
        self._save.draft.values.clear()

    def _submit_late(self, start_time: float) -> None:
        """Submit the save when staging cannot continue without it: the thread that writes slows down this one."""
        if not self._save.call.is_handed_over:
            self._save.call.phases.add("device_to_host", time.perf_counter() - start_time)
            self.submit()

    def _staged(self) -> Generator[StagedObject]:
        """The data that this process writes."""
        save, options = self._save, self._save.options
        own = stage(
            save.plan,
            save.draft,
            save.reuse.originals,
            self._exchanges,
            hold=self._background or not save.threaded,
            stack_bytes=options.host_bytes // 2,
            whole_shards=self._background and options.staging_bytes is None,
        )
        return save.destination.staged(save, self._begun, own, self._exchanges)

    def cancel(self, error: BaseException) -> None:
        """Cancel the save because of an error of this process, and wait until the thread that writes has cleaned up.

        If the checkpoint is already published, a note on the error says so.
        """
        save, call, pending = self._save, self._save.call, self._pending
        call.cancellation.cancel(error)
        if save.plan.is_collective and call.is_handed_over and not isinstance(error, PeerFailedError):
            with contextlib.suppress(Exception):  # no error may hide the first one
                run_uninterrupted(self._make_remaining_exchanges)
        call.is_handed_over = running_saves.await_cleanup(pending)
        save.draft.values.clear()  # the error may be kept for long
        if pending.done and pending.error is None:
            error.add_note(f"jaxckpt: the checkpoint at {pending.path} was published before this took effect")

    def _make_remaining_exchanges(self) -> None:
        """Make the exchanges that are left: the other processes begin them as soon as the path is claimed."""
        begun = self._await_begun()
        if begun is not None:
            (self._exchanges or self._save.destination.exchange(self._save, begun)).join()


# In the thread that writes --------------------------------------------------------------------------------


def run_and_notify(
    work: Callable[[RunningSave], SaveInfo], on_done: Callable[[SaveInfo], object], pending: RunningSave
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
def _carry_out(
    save: PreparedSave, beginning: Task[_Started], staging_queue: StagingQueue, pending: RunningSave
) -> SaveInfo:
    """Claim the path, write the data and publish the manifest."""
    call, destination = save.call, save.destination
    with (
        call,
        contextlib.closing(staging_queue),
        display_progress("save", pending.progress.total_bytes, save.options.progress) as display,
    ):
        beginning.run()
        started = beginning.result()
        begun, transaction = started.begun, started.transaction
        with transaction or contextlib.nullcontext():
            with call.rendezvous("saving") as rendezvous:
                with rendezvous.joined_by_all(), contextlib.closing(staging_queue):
                    share, written = write(save, begun.data, staging_queue, pending, display)
                    call.cancellation.check()
                published = destination.publish(rendezvous, save, begun, transaction, share)
            save.reuse.keep(begun.data, save.plan.stacks, written)
            with save.call.phases.timed("publish"):
                if transaction is not None:
                    transaction.close()
                destination.finish(save, begun, published)
        info = _info(save, begun.save_id, published)
    seconds = pending.with_times(info).seconds
    record_event(
        "save",
        seconds,
        lambda: (
            f"saved {info.path}: {show_count(info.leaves, 'leaf')}, {show_bytes(info.total_bytes)}, in {seconds:.2f} s"
            + (f"; {show_bytes(info.reused_bytes)} linked" if info.reused_bytes else "")
        ),
        log=call.index == 0,
        bytes=info.total_bytes,
        leaves=info.leaves,
    )
    return info


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What process 0 needs to know from a process before a save begins."""

    fingerprint: Fingerprint
    terms: list[int]


@dataclass(frozen=True, slots=True)
class _Started:
    """A save whose path is claimed."""

    begun: Begun
    transaction: Transaction | None
    """The transaction of this process, if it has one."""


def _begin(save: PreparedSave) -> _Started:
    """Before any data is written, check that all processes save the same tree, create the data folder, and check that
    all processes see it."""
    transaction: Transaction | None = None
    call, phases, destination = save.call, save.call.phases, save.destination
    try:
        with call.rendezvous("preparing to save") as rendezvous:
            own, value_groups = save.fingerprint.complete() if save.fingerprint else (Fingerprint({}, []), [])
            offer = _Offer(own, destination.offer(save))
            with phases.timed("barrier"):
                texts = rendezvous.gather(msgspec.json.encode(offer).decode())
            begun = Begun(uuid.uuid4().hex, "")
            if texts:
                offers = [msgspec.json.decode(text, type=_Offer) for text in texts]
                if len(offers) > 1:
                    require_agreement([offer.fingerprint for offer in offers], value_groups)
                terms, transaction = destination.begin(save, begun.save_id, [offer.terms for offer in offers])
                begun = Begun(begun.save_id, terms)
            with phases.timed("barrier"):
                begun = msgspec.json.decode(rendezvous.broadcast(msgspec.json.encode(begun).decode()), type=Begun)
        with call.rendezvous("looking for the checkpoint's folder") as rendezvous:
            transaction = destination.join(save, begun) or transaction
            with phases.timed("barrier"):
                rendezvous.gather("")
                # The others begin their exchanges as soon as all have answered.
                with call.cancellation.paused() if save.plan.is_collective else contextlib.nullcontext():
                    rendezvous.broadcast("")
    except BaseException:
        if transaction is not None:
            transaction.close()
        raise
    return _Started(begun, transaction)


def _info(save: PreparedSave, save_id: str, published: PublishResult) -> SaveInfo:
    plan = save.plan
    states = 0 if save.state is None else save.call.count
    return SaveInfo(
        path=save.store.url,
        save_id=save_id,
        leaves=len(save.draft.records),
        total_bytes=sum(plan.process_bytes),
        process_bytes=plan.process_bytes,
        objects=plan.n_objects,
        files=plan.n_objects + len(plan.stacks) + states + 2,
        stored_bytes=published.stored_bytes,
        reused_bytes=published.reused_bytes,
        manifest_sha256=published.manifest_sha256,
        seconds=0.0,  # `RunningSave.with_times` sets this and the next field
        blocked_seconds=0.0,
        phase_seconds=save.call.phases.phase_seconds,
    )
