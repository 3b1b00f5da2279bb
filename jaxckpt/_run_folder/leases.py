"""Leases and pins, which protect steps of a run from deletion.

A reader holds a step with a lease, and a process that deletes steps leaves that step alone. A pin is a name for a step;
the step stays until the pin is removed.

A lease is a small file in the run's `_run` folder. Its holder rewrites it with new content every eighth of its term. A
process that deletes steps treats a lease as expired if it has not changed for half of the term, by that process's own
clock. The clocks of two machines are never compared.

The two sides cannot miss each other. The holder first writes its lease, then checks whether the step is marked for
deletion. The deleting process first marks the step, then checks for leases. If a read sees every write that ended
before it, at least one of the two sees the other and gives way.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Generator, Iterable

from jaxckpt._options import Options, require_seconds
from jaxckpt._pipeline.lanes import finish_at_exit, run_to_the_end
from jaxckpt._pipeline.progress import log as _log
from jaxckpt._pipeline.threads import Latch, start_thread
from jaxckpt._run_folder.steps import RUN, is_published, is_step, step_name
from jaxckpt._store.store import Store
from jaxckpt.errors import InputError, NotACheckpointError, StorageError

TERM_SECONDS = 60.0
"""How long a step stays held, at most, after its reader has died. A process that deletes steps treats the lease as
expired after half of this time without a change."""

_RENEWALS = 8  # per term
_LEASE, _DELETING = "lease-", "deleting-"
_DELETION_SECONDS = 10.0
"""How long to wait for a running deletion, which its mark shows. A mark exists until the pass that deletes its step
ends, or until the next Checkpointer starts to train if the deleting process was killed."""


@contextlib.contextmanager
def hold(run: Store, step: int, term_seconds: float = TERM_SECONDS) -> Generator[None]:
    """Keep a step from being deleted by the rules of a Checkpointer while the block runs.

    Raises NotACheckpointError if the step is deleted or being deleted, StorageError if no lease can be written.
    """
    term_seconds, holder_pid = require_seconds(term_seconds, "term_seconds"), os.getpid()
    name, folder = f"{_LEASE}{step_name(step)}-{uuid.uuid4().hex}", run.child(RUN)
    stop, write_lock, lifetime_token = Latch(), threading.Lock(), Latch()
    release = functools.partial(_release, folder, name, stop, write_lock)
    try:
        try:
            run.create_child(RUN).put(name, _encode_lease(term_seconds, 0))
        except StorageError as error:
            raise StorageError(
                error.errno,
                f"cannot hold step {step} of {run.url}: a lease is a file in {run.url}/{RUN}, and writing it failed"
                f" ({error.strerror}). Get permission to write there, or read without holding the step",
            ) from error
        token_ref = weakref.ref(lifetime_token)
        start_thread(
            functools.partial(_renew, folder, name, term_seconds, stop, write_lock, token_ref), "jaxckpt-lease"
        )
        finish_at_exit(_release_all)  # only now, so that deletions, which respect leases, finish before
        _held[name] = release
        _require_not_deleted(run, folder, step)
        yield
    finally:
        # A forked process does not hold the lease. After the end of the program, nobody does.
        if not stop.is_set and os.getpid() == holder_pid:
            seconds = getattr(folder, "timeout_seconds", _DELETION_SECONDS)
            run_to_the_end(release, seconds)


_held = dict[str, Callable[[], None]]()
"""How to release the leases that this process holds, by their names."""


def _release_all() -> None:
    """At exit: release what a `with` block or a generator that was left open holds."""
    for release in [*_held.values()]:
        with contextlib.suppress(StorageError):  # it expires
            run_to_the_end(release, _DELETION_SECONDS)


os.register_at_fork(after_in_child=_held.clear)


def _renew(
    folder: Store,
    name: str,
    term_seconds: float,
    stop: Latch,
    write_lock: threading.Lock,
    token_ref: weakref.ref[Latch],
) -> None:
    """Renew a lease until it is released. If an interrupt ended its holder before that, release it here."""
    beats = 0
    while not stop.wait(term_seconds / _RENEWALS):
        if token_ref() is None:
            _release(folder, name, stop, write_lock)
            return
        beats += 1
        try:
            with write_lock:
                if not stop.is_set:
                    folder.put(name, _encode_lease(term_seconds, beats))
        except StorageError as error:
            _log.warning("a lease could not be renewed and will expire unless a later attempt succeeds: %s", error)


def _release(folder: Store, name: str, stop: Latch, write_lock: threading.Lock) -> None:
    stop.set()
    _held.pop(name, None)
    taken = write_lock.acquire(timeout=_DELETION_SECONDS)  # otherwise a running write would recreate the file
    with contextlib.suppress(StorageError):  # a lease that cannot be removed expires
        folder.remove(name)
    if taken:
        write_lock.release()


def _encode_lease(term_seconds: float, beats: int) -> bytes:
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "term_seconds": term_seconds, "beats": beats}
    return json.dumps(lease).encode()


def _term(note: bytes) -> float:
    """The term in a lease; the default if a lease is damaged, or read while it is being written."""
    try:
        return require_seconds(json.loads(note)["term_seconds"], "term_seconds")
    except (ValueError, KeyError, TypeError, RecursionError):
        return TERM_SECONDS


def _mark(step: int) -> str:
    """The name of the file that marks a step for deletion."""
    return f"{_DELETING}{step_name(step)}"


def marked_steps(notes: Iterable[str]) -> set[str]:
    """The names of the steps that are marked for deletion, among the notes of a run."""
    return {note.removeprefix(_DELETING) for note in notes if note.startswith(_DELETING)}


def _leased_step_name(name: str) -> str:
    """The name of the step that a lease holds."""
    return name.removeprefix(_LEASE).partition("-")[0]


def _require_not_deleted(run: Store, folder: Store, step: int) -> None:
    """Raise unless a step is published, and any process that deletes it has seen the lease."""
    deadline = time.monotonic() + _DELETION_SECONDS
    while True:
        marked = folder.read(_mark(step)) is not None
        if not is_published(run, step):
            raise NotACheckpointError(f"{run.url} has no step {step}: it was deleted")
        if not marked:
            return
        if time.monotonic() > deadline:
            raise NotACheckpointError(
                f"step {step} of {run.url} is being deleted, or the process that was deleting it was killed; if so, the"
                " next Checkpointer that saves into that directory deletes or keeps it"
            )
        time.sleep(0.02)


class Leases:
    """The leases on the steps of a run, as a process that deletes steps sees them."""

    def __init__(self, run: Store) -> None:
        self._run = run
        self._folder = run.child(RUN)
        self._seen: dict[str, tuple[bytes, float]] = {}
        self.poll_seconds = TERM_SECONDS / _RENEWALS
        """How long to wait before checking the leases again."""

    @contextlib.contextmanager
    def mark_for_deletion(self, steps: Collection[int]) -> Generator[set[int]]:
        """Prevent readers from acquiring steps while the block deletes them. Yields the steps that are already held."""
        if not steps:
            yield set()
            return
        folder = self._run.create_child(RUN)
        with contextlib.ExitStack() as marks:  # removes all, even if it cannot remove one
            for step in steps:
                marks.callback(folder.remove, _mark(step))
                folder.put(_mark(step), b"{}")
            yield self._leased_steps() & {*steps}

    def unmark(self, steps: Collection[int]) -> None:
        """Let readers acquire steps that are not deleted after all."""
        for step in steps:
            self._folder.remove(_mark(step))

    def remove_stale_marks(self) -> None:
        """Remove marks that a process left when it was killed while it deleted steps.

        Raises StorageError."""
        with contextlib.ExitStack() as removals:  # removes all, even if it cannot remove one
            for name in self._folder.names():
                if name.startswith(_DELETING):
                    removals.callback(self._folder.remove, name)

    def _leased_steps(self) -> set[int]:
        """The steps with a lease that has not expired; expired leases are removed."""
        names = [name for name in self._folder.names() if name.startswith(_LEASE) and is_step(_leased_step_name(name))]
        before, self._seen = self._seen, {}
        self.poll_seconds = TERM_SECONDS / _RENEWALS
        leased = set[int]()
        begin = time.monotonic()  # this process may be suspended while it reads, and the lease renewed
        notes = self._folder.read_all(names)
        end = time.monotonic()
        for name, note in zip(names, notes, strict=True):
            if note is None:  # just released
                continue
            content, since = before.get(name, (None, end))
            since = since if content == note else end
            if begin - since >= _term(note) / 2:
                with contextlib.suppress(StorageError):  # it is found expired again by the next pass
                    self._folder.remove(name)
                continue
            self._seen[name] = (note, since)
            self.poll_seconds = min(self.poll_seconds, _term(note) / _RENEWALS)
            leased.add(int(_leased_step_name(name)))
        return leased


# Pins -----------------------------------------------------------------------------------------------------
# _run/pin-00000040-best-so-far

_PIN = "pin-"


def pin_file_name(step: int, name: str) -> str:
    return f"{_PIN}{step_name(step)}-{name}"


def all_pins(run: Store) -> list[tuple[int, str]]:
    """The steps of all pins, each with the pin's name."""
    fields = (name.removeprefix(_PIN).partition("-") for name in run.child(RUN).names() if name.startswith(_PIN))
    return [(int(step), name) for step, _, name in fields if is_step(step)]


def pins(run: Store) -> dict[str, int]:
    """The pinned steps of a run, by name. If two steps have a name, because a program was killed while it moved the
    name, or two programs moved it at the same time, the newer step counts."""
    return {name: step for step, name in sorted(all_pins(run))}


def pinned_steps(run: Store) -> set[int]:
    """The steps that have a pin, none of which is deleted."""
    return {step for step, _ in all_pins(run)}


def require_unpinned(run: Store, step: int) -> None:
    """Raise InputError if a step has a name, which protects it from deletion."""
    names = sorted(name for pinned, name in all_pins(run) if pinned == step)
    if names:
        raise InputError(f"step {step} of {run.url} is pinned as {names[0]!r}, and is not deleted: unpin it first")


def pin_step(run: Store, step: int, name: object, options: Options, *, move: bool) -> None:
    """Name a step. With `move`, the name may be another step's, which loses it when this step is protected.

    Raises InputError, NotACheckpointError, StorageError.
    """
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", name)) or name in ("latest", "best"):
        raise InputError(
            f"name must consist of letters, digits, '_', '-' and '.', start with a letter, and not be 'latest' or"
            f" 'best'; found {name!r}"
        )
    if not move and (other := pins(run).get(name, step)) != step:
        raise InputError(f"{name!r} is the name of step {other} of {run.url}: pass move=True, or unpin({name!r}) first")
    # Listed first, so that of two concurrent moves each leaves the other's pin: both steps stay protected.
    other_steps = [other for other, other_name in all_pins(run) if other_name == name and other != step] if move else []
    with hold(run, step):
        # Empty, so that a full disk leaves no pin after an error.
        run.create_child(RUN).put(pin_file_name(step, name), b"", sync=options.sync)
        if not is_published(run, step):  # deleted by a call that respects no lease, or while this process was suspended
            run.child(RUN).remove(pin_file_name(step, name))
            raise NotACheckpointError(f"{run.url} has no step {step}: it was deleted in the meantime")
        for other in other_steps:
            run.child(RUN).remove(pin_file_name(other, name))
        if options.sync:
            run.sync_data(RUN, ())


def unpin_name(run: Store, name: str) -> None:
    """Remove the name of a step. Raises NotACheckpointError if no step has it, StorageError."""
    steps = [step for step, other_name in all_pins(run) if other_name == name]
    if not steps:
        names = ", ".join(pins(run)) or "none"
        raise NotACheckpointError(f"no step is pinned as {run.url}@{name}; pinned names: {names}")
    for step in steps:
        run.child(RUN).remove(pin_file_name(step, name))
