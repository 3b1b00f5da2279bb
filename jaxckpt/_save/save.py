"""Saving: request → prepared → claimed → written → published.

    the caller's thread:   prepare ─▶ stage ─▶ hand over ─────────────────▶ return, or wait
    the thread that writes:              claim the path ─▶ write ─▶ publish

All that may not stop half-way, such as holding a lock or answering the other processes, is done by the thread that
writes: an interrupt (Ctrl-C) reaches the main thread alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from jax.sharding import Mesh

from jaxckpt._format import manifest as manifests
from jaxckpt._format.pieces import Pieces
from jaxckpt._format.records import StepRecord
from jaxckpt._format.specs import Specs
from jaxckpt._format.tree import Tree
from jaxckpt._runtime.clock import Clock
from jaxckpt._runtime.errors import InputError, PeerError
from jaxckpt._runtime.options import Options, flag, given
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._runtime.progress import Report, reporting
from jaxckpt._runtime.threads import Latch, ending
from jaxckpt._save import background as background_saves
from jaxckpt._save.agreement import Agreement, Bucket, agreement, require_agreement
from jaxckpt._save.background import PendingSave, SaveInfo
from jaxckpt._save.claim import Claim, claim, require_shared
from jaxckpt._save.describe import Draft, Recent, describe
from jaxckpt._save.handover import Handover
from jaxckpt._save.plan import WRITE_COPIES, SavePlan, plan_save
from jaxckpt._save.publish import Published, Share, compose, publish
from jaxckpt._save.staging import Staged, stage
from jaxckpt._storage.place import store_at
from jaxckpt._storage.store import ArrayWriter, Pending, Store


def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> SaveInfo:
    """Write a pytree as a checkpoint; every process of the job calls it, with the same arguments.

    Each process writes boxes that its own devices hold, each byte of the tree once in the whole job. The checkpoint
    appears at `path` whole, when all is on disk, or not at all.

    Args:
        path: A local path, or a URL that tensorstore takes ("gs://…", "s3://…", "memory://…", "file://…").
        tree: A pytree. Leaves: jax.Array of any sharding and dtype, typed PRNG keys, NumPy arrays and scalars, int,
            float, complex, bool, str, bytes; None. Leaves on one host (all but jax.Array) are taken from process 0.
        mesh: Store each jax.Array as if it lay on this mesh. Without it each is stored in the layout it has.
        specs: With `mesh`, the PartitionSpec of each leaf: one for all, a pytree prefix of them, or a function of
            (path, leaf). Without it each leaf keeps its own, by axis name.
        metadata: Any JSON value; it comes back as `open(path).metadata`.
        overwrite: Replace the checkpoint at `path`. The old one is deleted only after the new one is published.
        process_state: What this process alone knows, such as its data iterator's position: a mapping of names to
            bytes or any JSON value, of the same names in every process. It comes back as `open(path).process_states`.
        options: Sizes, compression, timeouts, progress; see `Options`.

    Returns:
        What was written, how much by whom, and how long each phase took.

    Raises:
        TreeError: A leaf or key that cannot be stored.
        SpecError: A spec that does not fit its leaf or the mesh.
        CheckpointExistsError: Something is at `path`, and `overwrite` is false or it is no checkpoint.
        StorageError: No space, no permission, an I/O error.
        PeerError: Another process failed, is silent, made another call, was given another tree or other values of it,
            or does not see `path`.
        InputError: It is called by a signal handler or a callback from inside another call of jaxckpt.
        KeyboardInterrupt: Ctrl-C. Nothing is published, and a checkpoint that was at `path` stays, unless a note on the
            error says that the new one was published just before.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    with Group.current(options, Call.of("save", path)) as group:
        request = SaveRequest(path, tree, mesh, specs, metadata, overwrite, process_state)
        return start(request, given(options), group, background=False).wait()


def save_async(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    mesh: Mesh | None = None,
    specs: Specs = None,
    metadata: Any = None,
    overwrite: bool = False,
    process_state: Mapping[str, Any] | None = None,
    options: Options | None = None,
) -> PendingSave:
    """Begin to save a pytree, and return once the caller may donate, delete or overwrite every array of it.

    A thread writes the rest; see `save` for the arguments, and for what every process must do. On CPU devices the
    arrays' own memory is held and not copied: a step that would donate it gets new memory instead. From other devices
    the arrays are copied to host memory, at most `options.staging_bytes` of them ahead of the writing.

    Returns:
        The save under way. While it is, a second `save_async` waits for it or is skipped, as `options.when_busy` says.

    Raises:
        TreeError, SpecError, InputError: As `save`, at once. Whatever else `save` raises is raised by `wait()` of what
            is returned; if that is not called, by the next save; and if there is none, the traceback is printed when
            the interpreter exits, and its exit status is 1.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> pending = jaxckpt.save_async("/tmp/jaxckpt-doc/async", {"w": jnp.ones((8, 4))}, overwrite=True)
        >>> pending.wait().total_bytes
        128
    """
    with Group.current(options, Call.of("save_async", path)) as group:
        request = SaveRequest(path, tree, mesh, specs, metadata, overwrite, process_state)
        return start(request, given(options), group, background=True)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save."""

    path: str | os.PathLike[str]
    tree: Tree = None
    mesh: Mesh | None = None
    specs: Specs = None
    metadata: Any = None
    overwrite: bool = False
    process_state: Mapping[str, Any] | None = None
    draft: Draft | None = None
    """What is saved instead of a tree."""

    step: StepRecord | None = None
    """What a Checkpointer notes; its metrics are taken from process 0."""

    components: tuple[str, ...] = ()
    """Paths of subtrees that are stored apart from all else, so that they can be dropped later."""

    recent: Recent | None = None
    """Where what is found of the tree is remembered."""

    check: Callable[[], None] | None = None
    """What process 0 does before anything else; what it raises, all raise."""

    then: Callable[[], None] | None = None
    """What process 0 does once the checkpoint is published, before the save counts as done."""

    deadline: float | None = None
    """Until when, on the monotonic clock, the caller waits for room for copies; then the save fails."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A save that is planned: all that is needed to carry it out, but the data."""

    request: SaveRequest
    group: Group
    store: Store
    draft: Draft
    plan: SavePlan
    agreement: Agreement
    """What must be the same in every process."""

    values: Sequence[Bucket]
    """The values among that."""

    state: bytes | None
    """This process's own state, as the file that it is stored in."""

    options: Options
    clock: Clock
    claimed: Latch
    """Set when the path is claimed, or is not going to be."""

    threaded: bool
    """Whether a thread writes it; else the caller's does, once all is staged."""


def start(request: SaveRequest, options: Options, group: Group, *, background: bool) -> PendingSave:
    """Save to the end, or until the thread that writes needs the caller no more. Every process."""
    begun = time.perf_counter()
    if background and options.when_busy == "skip" and _is_busy(group):
        skipped = PendingSave(os.fspath(request.path), 0, begun)
        skipped.skip()
        return skipped
    save = _prepare(request, options, group)
    pending = PendingSave(save.store.url, save.plan.process_bytes[group.index], begun)
    background = background and not ending()  # Python at its end would wait for no other thread
    most_bytes = options.staging_bytes if background else options.host_bytes // 2
    handover = Handover(most_bytes if save.threaded else None, request.deadline)
    work = functools.partial(_carry_out, save, handover)
    if background and not background_saves.under_way():
        background_saves.finish_at_exit()
    feeding = time.perf_counter()

    def begin() -> None:
        if not group.passed_on:
            save.clock.add("device_to_host", time.perf_counter() - feeding)
            background_saves.hand_over(pending, work, awaited=not background)
            group.passed_on = True

    try:
        if group.count > 1:
            begin()  # while it stages, however long that takes, the others hear that it is there
        if any(save.plan.moved):
            # Exchanges are collective, so no process may begin them before all have come through their preparations.
            save.claimed.wait()
            if handover.closed:
                pending.wait()  # raises why
        hold = background or not save.threaded
        stack_bytes = options.host_bytes // 2
        with contextlib.closing(stage(save.plan, save.draft, hold=hold, stack_bytes=stack_bytes)) as staged:
            handover.feed(staged, begin)
        save.draft.values.clear()  # all is staged: the leaves themselves are the caller's alone again
        if not background:
            pending.wait()
    except BaseException as error:
        handover.cancel(error)
        group.passed_on = background_saves.give_up(pending)
        save.draft.values.clear()  # the error may be kept for long
        if pending.done and pending.error is None:
            error.add_note(f"jaxckpt: the checkpoint at {pending.path} was published before this took effect")
        raise
    pending.returned()
    return pending


def _is_busy(group: Group) -> bool:
    """Whether process 0 is still writing an earlier save: it decides for all, which may end at different times."""
    busy = any(not pending.done for pending in background_saves.under_way())
    with group.meeting("deciding whether to save") as meeting:
        meeting.gather("")
        return meeting.share("busy" if busy else "free") == "busy"


# In the caller's thread -----------------------------------------------------------------------------------


def _prepare(request: SaveRequest, options: Options, group: Group) -> _Prepared:
    """Check all that can be checked without the others, and plan."""
    clock = Clock()
    background_saves.settle()
    if group.index == 0 and request.check is not None:
        request.check()
    threaded = background_saves.ready()  # if no thread can be started, this is the time to say so
    with clock.timed("plan"):
        store = store_at(request.path, options)
        metadata = manifests.require_json(request.metadata, "metadata")
        state = None if request.process_state is None else manifests.encode_state(request.process_state)
        draft = request.draft or describe(
            request.tree, request.mesh, request.specs, options, request.components, request.recent
        )
        plan = _planned(draft, options, group)
        if any(plan.moved) and not threaded:
            raise InputError("leaves that the processes must exchange cannot be saved while the interpreter ends")
        given, values = Agreement({}, []), list[Bucket]()
        if group.count > 1:
            names = list(request.process_state or ())
            given, values = agreement(draft, plan, request.metadata, names, group.index)
    # What the caller may change, and what should be freed when the caller lets go of it, is not held.
    overwrite = flag(request.overwrite, "overwrite")
    request = replace(request, tree=None, draft=None, metadata=metadata, overwrite=overwrite)
    return _Prepared(request, group, store, draft, plan, given, values, state, options, clock, Latch(), threaded)


def _planned(draft: Draft, options: Options, group: Group) -> SavePlan:
    """The plan of a tree, made only if it is not like the last one."""
    made_for = (options, group.index, group.count)
    if not draft.plans or draft.plans[0][0] != made_for:
        draft.plans[:] = [(made_for, plan_save(draft.arrays, options, group.index, group.count))]
    return draft.plans[0][1]


# In the thread that writes --------------------------------------------------------------------------------


def _carry_out(save: _Prepared, handover: Handover, pending: PendingSave) -> SaveInfo:
    """Claim the path, write the data and publish the manifest."""
    group, clock = save.group, save.clock
    group.check = handover.check
    with (
        group,
        contextlib.closing(handover),
        reporting("save", pending.progress.total_bytes, save.options.progress) as show,
    ):
        try:
            claimed = _claim(save)
        except BaseException:
            handover.close()
            raise
        finally:
            save.claimed.set()
        try:
            with group.meeting("saving") as meeting:
                try:
                    share = _write(save, claimed, handover, _reports(pending, show))
                    handover.check()
                except BaseException:
                    handover.close()
                    if group.index == 0:  # not to delete the data before the others have ended their writing
                        with contextlib.suppress(PeerError):
                            meeting.gather("")
                    raise
                make = functools.partial(compose, claimed.save_id, save.plan, save.draft, save.request)
                published = publish(meeting, save.store, claimed, share, make, sync=save.options.sync, clock=clock)
        except BaseException:
            claimed.release(keep=False)
            raise
        with clock.timed("publish"):
            claimed.release(keep=True)
            if group.index == 0 and save.request.then is not None:
                save.request.then()
        return _info(save, claimed, published)


def _reports(pending: PendingSave, show: Report) -> Report:
    def report(moved: int) -> None:
        pending.moved(moved)
        show(moved)

    return report


def _claim(save: _Prepared) -> Claim:
    """What the processes must settle before the first byte: one tree, a fresh data folder, and that all see it."""
    claimed = Claim()
    group, clock = save.group, save.clock
    try:
        with group.meeting("preparing to save") as meeting:
            with clock.timed("barrier"):
                given = meeting.gather(msgspec.json.encode(save.agreement).decode())
            if len(given) > 1:
                require_agreement([msgspec.json.decode(text, type=Agreement) for text in given], save.values)
            if group.index == 0:
                claimed = claim(save.store, save.plan, overwrite=save.request.overwrite)
            with clock.timed("barrier"):
                save_id = meeting.share(claimed.save_id)
        with group.meeting("looking for the checkpoint's folder") as meeting:
            require_shared(save.store, f"data-{save_id}", group.index)
            with clock.timed("barrier"):
                meeting.barrier()
    except BaseException:
        claimed.release(keep=False)
        raise
    return replace(claimed, save_id=save_id)


def _write(save: _Prepared, claimed: Claim, handover: Handover, report: Report) -> Share:
    """Write this process's objects as their data comes, and its own state."""
    with save.clock.timed("write"):
        written = _write_objects(save, claimed.data, handover, report)
        state = None
        if save.state is not None:
            name = f"{claimed.data}/{manifests.state_name(save.group.index)}"
            save.store.put(name, save.state, sync=save.options.sync)
            state = len(save.state), hashlib.sha256(save.state).hexdigest()
    return Share(written, state, save.clock.reported())


def _write_objects(save: _Prepared, data: str, handover: Handover, report: Report) -> list[tuple[int, str, int, str]]:
    store, stacks, clock = save.store, save.plan.stacks, save.clock
    flights = _Flights(save.options.host_bytes // WRITE_COPIES)
    written: list[tuple[int, str, int, str]] = []
    indices: dict[int, list[tuple[int, ...]]] = {}
    writers: dict[int, ArrayWriter] = {}

    def land(done: Iterable[Landed]) -> None:
        for one, (length, digest) in done:
            handover.landed(one)
            report(one.obj.n_bytes)
            written.append((one.obj.stack, "/".join(map(str, one.obj.index)), length, digest))

    try:
        for one in _timed(handover, clock):
            obj, stack = one.obj, stacks[one.obj.stack]
            if obj.stack not in writers:
                writers[obj.stack] = store.array_writer(data, stack, save.options)
            indices.setdefault(obj.stack, []).append(obj.index)
            land(flights.make_room(obj.n_bytes))
            with clock.timed("device_to_host"):
                source = one.data()
            flights.launch(one, writers[obj.stack].write(obj.index, source), source)
            if handover.starves():
                land(flights.land_all())  # what is under way takes the room that the next one may be waiting for
        land(flights.land_all())
    except BaseException:
        flights.abandon()  # else a late write would make its file again in a folder that is being deleted
        raise
    if save.options.sync:
        with clock.timed("sync"):
            for stack, found in indices.items():
                store.sync_folders(data, stacks[stack], found)
    return written


def _info(save: _Prepared, claimed: Claim, published: Published) -> SaveInfo:
    plan = save.plan
    states = 0 if save.state is None else save.group.count
    return SaveInfo(
        path=save.store.url,
        save_id=claimed.save_id,
        leaves=len(save.draft.records),
        total_bytes=sum(plan.process_bytes),
        process_bytes=plan.process_bytes,
        objects=plan.n_objects,
        files=plan.n_objects + len(plan.stacks) + states + 1,
        stored_bytes=published.stored_bytes,
        manifest_sha256=published.manifest_sha256,
        seconds=0.0,  # these two are known when it is waited for
        blocked_seconds=0.0,
        phase_seconds=save.clock.laps,
    )


# Seconds, and writes under way ----------------------------------------------------------------------------


def _timed(staged: Iterable[Staged], clock: Clock) -> Iterator[Staged]:
    waiting = iter(staged)
    while True:
        with clock.timed("device_to_host"):
            one = next(waiting, None)
        if one is None:
            return
        yield one


Landed = tuple[Staged, tuple[int, str]]
"""What was written, its length and its digest."""


class _Flights:
    """Writes under way, at most so many bytes at once."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._queue: deque[tuple[Staged, Pending, Pieces]] = deque()

    def make_room(self, n_bytes: int) -> Iterator[Landed]:
        """Wait until `n_bytes` more may fly; yields those that are done."""
        while self._queue and (self._bytes + n_bytes > self._most_bytes or self._queue[0][1].done()):
            yield self._land()

    def launch(self, one: Staged, pending: Pending, source: Pieces) -> None:
        """Add a write whose data is `source`, which is kept until it has landed."""
        self._queue.append((one, pending, source))
        self._bytes += one.obj.n_bytes

    def land_all(self) -> Iterator[Landed]:
        while self._queue:
            yield self._land()

    def abandon(self) -> None:
        """Wait until nothing is under way any more, however it ends."""
        for _, pending, _ in self._queue:
            with contextlib.suppress(Exception):
                pending.result()

    def _land(self) -> Landed:
        one, pending, _ = self._queue.popleft()
        written = pending.result()
        self._bytes -= one.obj.n_bytes
        return one, written
