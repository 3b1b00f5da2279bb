"""Saving: tree → leaves → plan → device-to-host copies → store.write → barrier → manifest."""

# The functions here fill in what a PendingSave tells.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import functools
import hashlib
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxckpt import _manifest as manifests
from jaxckpt._coord import Group, Meeting
from jaxckpt._draft import Draft, Recent, describe
from jaxckpt._errors import (
    CheckpointExistsError,
    CorruptError,
    InputError,
    PathNotSharedError,
    PeerError,
    PeersDisagreeError,
    StorageError,
)
from jaxckpt._layout import Specs
from jaxckpt._manifest import Manifest, StackRecord, StepRecord
from jaxckpt._options import Options
from jaxckpt._pieces import Pieces
from jaxckpt._place import store_at
from jaxckpt._plan import WRITE_COPIES
from jaxckpt._progress import Progress, Report, reporting
from jaxckpt._save_plan import SavePlan, plan_save
from jaxckpt._staging import Staged, stage
from jaxckpt._store import MANIFEST, WRITER, ArrayWriter, Pending, Store, Writer, is_data
from jaxckpt._tree import Tree


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What a save wrote."""

    path: str
    save_id: str

    leaves: int

    total_bytes: int
    """Bytes of array data in the checkpoint, replicas once."""

    process_bytes: tuple[int, ...]
    """Bytes of array data that each process wrote."""

    objects: int
    """Objects that hold the array data."""

    files: int
    """Files of the checkpoint: objects, one zarr.json a stack, one for each process's state, and the manifest."""

    stored_bytes: int
    """Bytes of the objects, checksums and indexes included."""

    manifest_sha256: str
    """SHA-256 of manifest.json, in hexadecimal digits, for `Options.manifest_sha256`."""

    seconds: float
    """Seconds from the call until the checkpoint was published and this process knew."""

    blocked_seconds: float
    """Seconds of these that the caller waited: all of them for `save`."""

    phase_seconds: Mapping[str, float]
    """Seconds of each phase in this process: "plan", "device_to_host", "write" (files reach the disk in it), "sync"
    (folders do), "barrier" (waiting for the other processes), "publish"."""


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
        PeerError: Another process failed, is silent, was given another tree, or does not see `path`.

    Examples:
        >>> import jax.numpy as jnp, jaxckpt
        >>> info = jaxckpt.save("/tmp/jaxckpt-doc/save", {"w": jnp.ones((8, 4)), "step": 3}, overwrite=True)
        >>> info.total_bytes
        128
    """
    asked = Asked(path, tree, mesh, specs, metadata, overwrite, process_state)
    return start(asked, options or Options(), background=False).wait()


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
    asked = Asked(path, tree, mesh, specs, metadata, overwrite, process_state)
    return start(asked, options or Options(), background=True)


@dataclass(frozen=True, slots=True)
class Asked:
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


class PendingSave:
    """A save that a thread of its own is writing."""

    def __init__(self, path: str, total_bytes: int, begun: float) -> None:
        self.path = path
        """Where it is being saved."""

        self.skipped = False
        """Whether nothing is saved, because another save was under way and `Options.when_busy` is "skip"."""

        self._begun = begun
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._seconds: float | None = None
        self._finished = threading.Event()
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._blocked = 0.0

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._finished.is_set()

    @property
    def progress(self) -> Progress:
        """Bytes that this process has written, and will have to."""
        seconds = time.perf_counter() - self._begun if self._seconds is None else self._seconds
        return Progress("save", self._done_bytes, self._total_bytes, seconds)

    def wait(self, timeout: float | None = None) -> SaveInfo:
        """Wait until the checkpoint is published.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes.

        Returns:
            What was written. For a skipped save, an InputError is raised: there is nothing to wait for.

        Raises:
            TimeoutError: It is not done yet; it goes on.
            Exception: Whatever the save raised; see `save`.
        """
        if self.skipped:
            raise InputError(f"the save to {self.path} was skipped: another was under way; ask `.skipped` before")
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the save to {self.path} is not done after {timeout:g} s: {self.progress}")
        _unsettled.pop(self, None)
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return replace(self._info, seconds=self._seconds or 0.0, blocked_seconds=self._blocked)

    def abandon(self) -> None:
        """Let nobody wait for it, not even the end of the program."""
        global _abandoned
        _abandoned = True
        _unsettled.pop(self, None)

    def __repr__(self) -> str:
        state = "skipped" if self.skipped else "under way" if not self.done else "failed" if self._error else "done"
        return f"<PendingSave to {self.path}: {state}>"


_abandoned = False
_unsettled = dict[PendingSave, None]()  # a set in order: saves whose end nobody has been told yet


def start(asked: Asked, options: Options, *, background: bool) -> PendingSave:
    """Save in this thread, to the end, or hold the arrays and save in another. Every process."""
    begun = time.perf_counter()
    group = Group.current(options.timeout_seconds)  # first of all: a call that raises counts like any other
    if background and options.when_busy == "skip" and _busy(group):
        pending = PendingSave(os.fspath(asked.path), 0, begun)
        pending.skipped = True
        pending._finished.set()
        return pending
    job = _prepare(asked, options, group, background=background)
    pending = PendingSave(job.store.url, job.plan.process_bytes[group.index], begun)
    with contextlib.closing(stage(job.plan, job.draft, hold=background, stack_bytes=options.host_bytes // 2)) as staged:
        if background:
            _in_background(job, pending, staged)
        else:
            _save(job, None, _ahead(staged, options.host_bytes // 2), pending)
    pending._blocked = time.perf_counter() - begun
    return pending


def _in_background(job: _Job, pending: PendingSave, staged: Iterator[Staged]) -> None:
    """Hold the arrays, and let the thread write them."""
    # Exchanges are collective, so no process may begin them before all have come through their preparations.
    claim = _agree(job) if any(job.plan.moved) else None
    handover = _Handover(job.options.staging_bytes, job.asked.deadline)
    if not _unsettled:
        atexit.unregister(_wait_at_exit)
        atexit.register(_wait_at_exit)  # the last to be registered runs first: before jax.distributed shuts down
    _unsettled[pending] = None

    def work() -> None:
        _save(job, claim, handover, pending)
        if pending._error is not None:  # it may be kept for long: not with the arrays in its frames
            traceback.clear_frames(pending._error.__traceback__)

    try:
        with job.clock.timed("device_to_host"):
            handover.feed(staged, lambda: _worker()[0].put(work))
        job.draft.values.clear()  # all is staged: the leaves themselves are the caller's alone again
    except BaseException:
        pending._finished.wait()
        _unsettled.pop(pending, None)
        raise


def _worker() -> tuple[queue.SimpleQueue[Callable[[], None] | None], threading.Thread]:
    """The thread that writes, and where its work is put; None ends it.

    It stays: starting one takes the caller up to Python's switch interval, 5 ms.
    """
    with _starting:
        return _started()


_starting = threading.Lock()


@functools.cache
def _started() -> tuple[queue.SimpleQueue[Callable[[], None] | None], threading.Thread]:
    todo = queue.SimpleQueue[Callable[[], None] | None]()

    def run() -> None:
        while (work := todo.get()) is not None:
            work()
            del work  # it holds all that was saved

    # Waited for at exit, but not for ever where a deadline says so: a daemon.
    thread = threading.Thread(target=run, name="jaxckpt-save", daemon=True)
    thread.start()
    return todo, thread


def _forget() -> None:
    """In a fork: the thread, and the saves that it was writing, are its parent's."""
    global _starting
    _starting = threading.Lock()
    _started.cache_clear()
    _unsettled.clear()
    atexit.unregister(_wait_at_exit)


os.register_at_fork(after_in_child=_forget)


def _busy(group: Group) -> bool:
    """Whether process 0 is still writing an earlier save: it decides for all, which may end at different times."""
    busy = any(not pending.done for pending in _unsettled)
    with group.meeting("deciding whether to save") as meeting:
        meeting.gather("")
        return meeting.share("busy" if busy else "free") == "busy"


def settle() -> None:
    """Wait for the saves under way. Raises what one of them raised, unless somebody was told."""
    for pending in list(_unsettled):
        try:
            pending.wait()
        except Exception as error:
            error.add_note(f"jaxckpt: this ended the earlier save_async to {pending.path}, whose wait() was not called")
            raise


_exit_status = 0


def _wait_at_exit() -> None:
    """See saves under way to their end, and say what went wrong with those that nobody asked after."""
    global _exit_status
    for pending in list(_unsettled):
        try:
            pending.wait()
        except BaseException:
            print(f"jaxckpt: the save_async to {pending.path} failed, and nobody called wait():", file=sys.stderr)
            traceback.print_exc()
            _exit_status = 1
    if not _abandoned:
        # It may still be letting go of arrays, and a thread that Python stops within JAX's C++ aborts the process.
        todo, thread = _worker()
        todo.put(None)
        thread.join()
        _started.cache_clear()


@atexit.register
def _leave_with_status() -> None:
    # Registered when jaxckpt is imported, so it runs after what was registered later. What raises at exit is printed,
    # but Python still exits with 0.
    # Nor can Python end well while the thread writes on.
    if _exit_status or _abandoned:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status or 128 + signal.SIGTERM)


# From the caller's thread to the one that writes -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """A save that is planned: all that is needed to carry it out, but the data."""

    group: Group
    meeting: Meeting
    """The one that was begun before the preparations; whatever they raised, the others have been told."""

    entered: contextlib.ExitStack
    store: Store
    draft: Draft
    plan: SavePlan
    digest: str
    asked: Asked
    state: bytes | None
    """This process's own state, as the file that it is stored in."""

    options: Options
    clock: _Clock


def _prepare(asked: Asked, options: Options, group: Group, *, background: bool) -> _Job:
    """Check all that can be checked without the others, and plan."""
    clock = _Clock()
    with contextlib.ExitStack() as entered:
        meeting = entered.enter_context(group.meeting("preparing to save"))
        settle()
        if group.index == 0 and asked.check is not None:
            asked.check()
        if background:
            _worker()  # where no thread can be started, it is told now
        with clock.timed("plan"):
            store = store_at(asked.path, options)
            manifests.require_json(asked.metadata, "metadata")
            state = None if asked.process_state is None else manifests.encode_state(asked.process_state)
            draft = asked.draft or describe(
                asked.tree, asked.mesh, asked.specs, options, asked.components, asked.recent
            )
            plan = _planned(draft, options, group)
            digest = _digest_of(draft, plan, asked) if group.count > 1 else ""
        # What the caller may change, and what should be freed when the caller lets go of it, is not held.
        asked = replace(asked, tree=None, draft=None, metadata=copy.deepcopy(asked.metadata))
        return _Job(group, meeting, entered.pop_all(), store, draft, plan, digest, asked, state, options, clock)


def _planned(draft: Draft, options: Options, group: Group) -> SavePlan:
    """The plan of a tree, made anew only where it is not like the last one."""
    made_for = (options, group.index, group.count)
    if not draft.plans or draft.plans[0][0] != made_for:
        draft.plans[:] = [(made_for, plan_save(draft.arrays, options, group.index, group.count))]
    return draft.plans[0][1]


class _Handover:
    """Staged objects on their way to the thread that writes, at most so many bytes of copies at once."""

    def __init__(self, most_bytes: int | None, deadline: float | None) -> None:
        self._most_bytes = most_bytes
        self._deadline = deadline
        self._bytes = 0
        self._queue: deque[Staged] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def feed(self, staged: Iterable[Staged], begin: Callable[[], None]) -> None:
        """Put all in, in the caller's thread; `begin` the other thread as late as can be: it would slow this one."""
        begun = False
        try:
            for one in staged:
                if not begun and not self._fits(one):
                    begin()
                    begun = True
                with self._changed:
                    seconds = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                    if not self._changed.wait_for(lambda one=one: self._fits(one) or self._ended, seconds):
                        self._error = TimeoutError("what was copied by the deadline was not written by then")
                        return
                    if self._ended:
                        return  # the writing thread has failed
                    self._queue.append(one)
                    self._bytes += one.copied_bytes
                    self._changed.notify()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            if not begun:
                begin()

    def _fits(self, one: Staged) -> bool:
        return self._most_bytes is None or not self._bytes or self._bytes + one.copied_bytes <= self._most_bytes

    def __iter__(self) -> Iterator[Staged]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._error is not None:
                    raise self._error
                if not self._queue:
                    return
                one = self._queue.popleft()
            yield one

    def starves(self) -> bool:
        """Whether the caller's thread has nothing ready, perhaps for want of room."""
        with self._changed:
            return not self._queue and not self._ended

    def landed(self, one: Staged) -> None:
        """An object is written, and its copies are gone."""
        with self._changed:
            self._bytes -= one.copied_bytes
            self._changed.notify()

    def close(self) -> None:
        """Nobody takes anything any more."""
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify()


def _ahead(staged: Generator[Staged], most_bytes: int) -> Generator[Staged]:
    """The same objects, the copies of later ones begun while earlier ones are written."""
    waiting: deque[Staged] = deque()
    held = 0
    with contextlib.closing(staged):
        for one in staged:
            waiting.append(one)
            held += one.copied_bytes
            while waiting and (held >= most_bytes or not waiting[0].copied_bytes):
                held -= waiting[0].copied_bytes
                yield waiting.popleft()
        yield from waiting


# Carrying it out -------------------------------------------------------------------------------------------


def _save(job: _Job, claim: _Claim | None, staged: _Handover | Generator[Staged], pending: PendingSave) -> None:
    """Write the data and publish the manifest, in whichever thread this is; `pending` is told how it went."""

    def report(moved: int) -> None:
        pending._done_bytes += moved
        show(moved)

    try:
        with reporting("save", pending._total_bytes, job.options.progress) as show:
            claim = claim or _agree(job)
            try:
                data = f"data-{claim.save_id}"
                with job.group.meeting("saving") as meeting:
                    try:
                        with job.clock.timed("write"):
                            written, state = _write(job, data, staged, report), _put_state(job, data)
                    except Exception:
                        staged.close()
                        if job.group.index == 0:  # not to delete the data before the others have ended their writing
                            with contextlib.suppress(PeerError):
                                meeting.gather("")
                        raise
                    published = _publish(job, claim, _Share(written, state, job.clock.told()), meeting)
            except BaseException:
                claim.release(keep=False)
                raise
        with job.clock.timed("publish"):
            claim.release(keep=True)
            if job.group.index == 0 and job.asked.then is not None:
                job.asked.then()
        pending._info = _info(job, claim.save_id, published)
    except BaseException as error:
        pending._error = error
        staged.close()
    finally:
        pending._seconds = time.perf_counter() - pending._begun
        pending._finished.set()


class _Published(msgspec.Struct, frozen=True):
    """What process 0 tells of the checkpoint that it has published."""

    stored_bytes: int
    """Bytes of all objects."""

    manifest_sha256: str


def _publish(job: _Job, claim: _Claim, share: _Share, meeting: Meeting) -> _Published:
    """Process 0 publishes the manifest once all have written their share."""
    store, plan, clock, sync = job.store, job.plan, job.clock, job.options.sync
    data = f"data-{claim.save_id}"
    with clock.timed("barrier"):
        texts = meeting.gather(msgspec.json.encode(share).decode())
    shares = [msgspec.json.decode(text, type=_Share) for text in texts]
    published = _Published(0, "")  # the others are told
    if job.group.index == 0:
        if sync:
            with clock.timed("sync"):
                store.sync_data(data, plan.stacks)
        with clock.timed("publish"):
            manifest = _compose(claim.save_id, plan, job.draft, job.asked, shares)
            content = manifests.encode(manifest)
            store.publish(data, content, claim.previous, sync=sync)
            stored_bytes = sum(length for share in shares for _, _, length, _ in share.objects)
            published = _Published(stored_bytes, hashlib.sha256(content).hexdigest())
    with clock.timed("barrier"):
        return msgspec.json.decode(meeting.share(msgspec.json.encode(published).decode()), type=_Published)


def _info(job: _Job, save_id: str, published: _Published) -> SaveInfo:
    plan = job.plan
    states = 0 if job.state is None else job.group.count
    return SaveInfo(
        path=job.store.url,
        save_id=save_id,
        leaves=len(job.draft.records),
        total_bytes=sum(plan.process_bytes),
        process_bytes=plan.process_bytes,
        objects=plan.n_objects,
        files=plan.n_objects + len(plan.stacks) + states + 1,
        stored_bytes=published.stored_bytes,
        manifest_sha256=published.manifest_sha256,
        seconds=0.0,  # these two are known when it is waited for
        blocked_seconds=0.0,
        phase_seconds=job.clock.laps,
    )


def _agree(job: _Job) -> _Claim:
    """What the processes must settle before the first byte: one tree, a fresh data folder, and that all see it."""
    claim = _Claim()
    try:
        with job.entered:
            with job.clock.timed("barrier"):
                digests = job.meeting.gather(job.digest)
            if job.group.index == 0:
                _require_one_tree(digests)
                claim = _claim(job.store, job.plan, job.asked.overwrite)
            with job.clock.timed("barrier"):
                save_id = job.meeting.share(claim.save_id)
        with job.group.meeting("looking for the checkpoint's folder") as meeting:
            _require_shared(job.store, f"data-{save_id}", job.group.index)
            with job.clock.timed("barrier"):
                meeting.barrier()
    except BaseException:
        claim.release(keep=False)
        raise
    return replace(claim, save_id=save_id)


class _Share(msgspec.Struct, frozen=True):
    """What one process has written."""

    objects: list[tuple[int, str, int, str]]
    """(stack, place, length, digest) of each object."""

    state: tuple[int, str] | None
    """Length and digest of the file of its own state."""

    phase_seconds: dict[str, float]
    """Seconds of each phase until then."""


def _write(job: _Job, data: str, staged: Iterable[Staged], report: Report) -> list[tuple[int, str, int, str]]:
    """Write this process's objects as their data comes."""
    store, stacks, clock = job.store, job.plan.stacks, job.clock
    flights = _Flights(job.options.host_bytes // WRITE_COPIES)
    written: list[tuple[int, str, int, str]] = []
    indices: dict[int, list[tuple[int, ...]]] = {}
    writers: dict[int, ArrayWriter] = {}

    def land(done: Iterable[tuple[Staged, tuple[int, str]]]) -> None:
        for one, (length, digest) in done:
            obj = one.obj
            if isinstance(staged, _Handover):
                staged.landed(one)
            report(obj.n_bytes)
            written.append((obj.stack, "/".join(map(str, obj.index)), length, digest))

    try:
        for one in _timed(staged, clock):
            obj, stack = one.obj, stacks[one.obj.stack]
            if obj.stack not in writers:
                writers[obj.stack] = store.array_writer(data, stack, job.options)
            indices.setdefault(obj.stack, []).append(obj.index)
            land(flights.make_room(obj.n_bytes))
            with clock.timed("device_to_host"):
                source = one.data()
            flights.launch(one, writers[obj.stack].write(obj.index, source), source)
            if isinstance(staged, _Handover) and staged.starves():
                land(flights.land_all())  # what is under way takes the room that the next one may be waiting for
        land(flights.land_all())
    except BaseException:
        flights.abandon()  # else a late write would make its file anew in a folder that is being deleted
        raise
    if job.options.sync:
        with clock.timed("sync"):
            for stack, found in indices.items():
                store.sync_folders(data, stacks[stack], found)
    return written


def _timed(staged: Iterable[Staged], clock: _Clock) -> Iterator[Staged]:
    waiting = iter(staged)
    while True:
        with clock.timed("device_to_host"):
            one = next(waiting, None)
        if one is None:
            return
        yield one


PHASES: tuple[str, ...] = ("plan", "device_to_host", "write", "sync", "barrier", "publish")


class _Clock:
    """Seconds of each phase; what is timed within another phase does not count for that one."""

    def __init__(self) -> None:
        self.laps = dict.fromkeys(PHASES, 0.0)
        self._within = threading.local()

    def told(self) -> dict[str, float]:
        """Seconds of the phases until now; process 0 alone publishes, and has yet to begin."""
        return {phase: round(seconds, 6) for phase, seconds in self.laps.items() if phase != "publish"}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Generator[None]:
        begun = time.perf_counter()
        outer = getattr(self._within, "seconds", 0.0)
        self._within.seconds = 0.0
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self.laps[phase] += seconds - self._within.seconds
            self._within.seconds = outer + seconds


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


def _put_state(job: _Job, data: str) -> tuple[int, str] | None:
    """Write this process's own state, if there is one."""
    if job.state is None:
        return None
    job.store.put(f"{data}/{manifests.state_name(job.group.index)}", job.state, sync=job.options.sync)
    return len(job.state), hashlib.sha256(job.state).hexdigest()


# What a save needs of the path, and of the other processes ------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Claim:
    """What process 0 holds of a path while it saves there; the other processes hold nothing."""

    save_id: str = ""
    writer: Writer | None = None
    previous: bytes | None = None
    """The manifest that this save replaces."""

    leftovers: bool = False
    """Whether data lies there of which it could not be told that its writer is gone; once this is published, it can."""

    def release(self, *, keep: bool) -> None:
        """Let go: with the new data in place of the old, or without a trace."""
        if self.writer is None:
            return
        # What cannot be tidied up now is swept by the next save; it must not hide why a save has failed.
        with contextlib.suppress(StorageError, CorruptError):
            self.writer.release(keep=keep)
            if not keep:
                return
            old = None if self.previous is None else manifests.data_of(self.previous)
            if old is not None:
                self.writer.store.delete(old)
            if self.leftovers:
                self.writer.store.sweep(self.writer.data)


def _claim(store: Store, plan: SavePlan, overwrite: bool) -> _Claim:
    """Sweep what dead saves left, and make the data folder with every stack's zarr.json."""
    previous = _previous(store, overwrite)
    leftovers = store.sweep(None if previous is None else manifests.data_of(previous))
    claim = _Claim(save_id := uuid.uuid4().hex, store.begin(save_id, previous), previous, leftovers)
    try:
        for stack in plan.stacks:
            store.create_array(f"data-{save_id}", stack)
    except BaseException:
        claim.release(keep=False)
        raise
    return claim


def _digest_of(draft: Draft, plan: SavePlan, asked: Asked) -> str:
    """What must be the same in every process: leaf paths, shapes, dtypes, who writes what, the metadata.

    And the values of replicated integer scalars, such as an optimizer's count: where a process has missed a call,
    they tell the steps apart that would otherwise be saved as one.
    """
    counts = [
        (number, int(value.addressable_data(0)))
        for number, value in draft.values.items()
        if isinstance(value, jax.Array) and _is_replicated_count(value)
    ]
    layouts = {layout: number for number, layout in enumerate(dict.fromkeys(plan.layouts))}
    told = (
        [record.path for record in draft.records],
        (plan.stacks, plan.members, plan.moved),  # from these and the layouts follows who writes what
        [(layout.grid, layout.holders) for layout in layouts],
        [layouts[layout] for layout in plan.layouts],
        json.dumps(asked.metadata),
        sorted(asked.process_state or ()),
        counts,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _is_replicated_count(value: jax.Array) -> bool:
    integer = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
    return integer and value.committed and value.is_fully_replicated and not value.is_fully_addressable


def _require_one_tree(digests: Sequence[str]) -> None:
    others = [process for process, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise PeersDisagreeError(
            f"processes {others} were given a tree of other leaves, shapes or shardings than process 0; every process"
            " must pass the same global tree. An array that each process committed to a device of its own is not"
            " global: replicate it over the mesh, or pass it as NumPy, which process 0 then writes"
        )


def _require_shared(store: Store, data: str, process: int) -> None:
    if store.read(f"{data}/{WRITER}") is None:
        raise PathNotSharedError(
            f"process {process} does not see {store.url}/{data}, which process 0 has just made."
            " All processes must be given one shared folder or object store."
        )


_ORBAX_NOTE = "_CHECKPOINT_METADATA"
"""What an ocp.Checkpointer writes, at any moment, into the folder that it gives its handler."""


def _previous(store: Store, overwrite: bool) -> bytes | None:
    """The manifest that this save is to replace. Raises CheckpointExistsError where it may not."""
    if store.is_file():
        raise CheckpointExistsError(f"{store.url} is a file; give a new or empty folder")
    names = store.names()
    if MANIFEST in names:
        if not overwrite:
            raise CheckpointExistsError(f"a checkpoint is at {store.url}; pass overwrite=True to replace it")
        return store.read(MANIFEST)
    foreign = [name for name in names if not is_data(name) and name != _ORBAX_NOTE]
    if foreign:
        raise CheckpointExistsError(
            f"{store.url} holds other files ({', '.join(foreign[:3])}{', …' if len(foreign) > 3 else ''});"
            " give a new or empty folder"
        )
    return None


# The manifest ---------------------------------------------------------------------------------------------


def _compose(
    save_id: str,
    plan: SavePlan,
    draft: Draft,
    asked: Asked,
    shares: Sequence[_Share],
) -> Manifest:
    """The manifest, once every process has told what it wrote."""
    objects: list[dict[str, tuple[int, str]]] = [{} for _ in plan.stacks]
    for share in shares:
        for stack, place, length, digest in share.objects:
            objects[stack][place] = (length, digest)
    records = list(draft.records)
    for number, members in enumerate(plan.members):
        for row, leaf in enumerate(members):
            records[leaf] = msgspec.structs.replace(records[leaf], stack=number, row=row)
    return Manifest(
        format=manifests.FORMAT,
        version=manifests.VERSION,
        save_id=save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        libraries=_libraries(),
        metadata=asked.metadata,
        tree=draft.structure,
        leaves=records,
        meshes=draft.table.meshes,
        layouts=draft.table.layouts,
        stacks=[
            StackRecord.of(stack, dict(sorted(found.items())))
            for stack, found in zip(plan.stacks, objects, strict=True)
        ],
        process_states=[share.state for share in shares if share.state is not None],
        step=asked.step,
        phase_seconds={phase: [share.phase_seconds[phase] for share in shares] for phase in shares[0].phase_seconds},
    )


@functools.cache
def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "jaxlib", "numpy", "tensorstore")}
