"""Two hosts that save to one folder, in any order of their system calls, although neither sees the other's locks."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from reliability import Fault

from jaxckpt._model.file_names import MANIFEST, SEAL, WRITER, data_folder_of
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._store import folder as _folder
from jaxckpt._store.folder import Folder
from jaxckpt.errors import JaxckptError

CALLS = ("open", "mkdir", "link", "rename", "unlink", "rmdir", "listdir", "lstat", "stat")
"""The system calls before which a host can pause."""


class Crashed(BaseException):
    """The host's process was killed."""


class Host:
    """A thread that pauses before each system call. All hosts have the same host name."""

    def __init__(self, name: str, replaced: set[str]) -> None:
        self.name = name
        self.replaced = replaced
        """The saves that another one has replaced, or that were deleted."""

        self.starts = 0
        """How often its kernel has started."""

        self.crashed = False
        self.thread: threading.Thread | None = None
        self.next_call = ""
        """The system call before which it pauses, and the name of the file."""

        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._atomic = 0

    def begin(self, work: Callable[[], None]) -> None:
        """Run until the first system call of `work`."""
        self.crashed = False
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()
        self._await_pause()

    def _run(self, work: Callable[[], None]) -> None:
        _here.host = self
        try:
            # As a part of one watched operation, stores make their system calls in this thread.
            with contextlib.suppress(Crashed), Watchdog(60).operation("a save"):
                work()
        finally:
            self.thread = None
            self._paused.release()

    def run(self, calls: int) -> None:
        """Make a number of system calls, if that many are left."""
        for _ in range(calls):
            if self.thread is not None:
                self._resumed.release()
                self._await_pause()

    def _await_pause(self) -> None:
        assert self._paused.acquire(timeout=60)

    def run_until(self, call: str) -> None:
        """Run until just before such a system call, or to the end."""
        self.run(1)
        while self.thread is not None and self.next_call != call:
            self.run(1)

    def pause(self, call: str) -> None:
        """Called by its thread before each system call."""
        self.next_call = call
        if not self._atomic and not self.crashed:
            self._paused.release()
            self._resumed.acquire()
        if self.crashed:
            raise Crashed

    @contextlib.contextmanager
    def atomic(self) -> Generator[None]:
        self._atomic += 1
        try:
            yield
        finally:
            self._atomic -= 1


_here = threading.local()


class Shared(Folder):
    """The folder as a host sees it.

    docs/reliability.md excludes that two hosts replace one checkpoint within the same milliseconds. Therefore a host
    does not pause between comparing the manifest and replacing it.
    """

    def _replace_manifest(self, data: str, content: bytes, previous: bytes | None, *, sync: bool) -> None:
        if previous is None:
            super()._replace_manifest(data, content, previous, sync=sync)
            return
        with _here.host.atomic():
            super()._replace_manifest(data, content, previous, sync=sync)
            _here.host.replaced.add(id_in(previous))
            _here.host.replaced.discard(id_in(content))

    def _withdraw(self, data: str, manifest: bytes, previous: bytes | None) -> None:
        with _here.host.atomic():
            super()._withdraw(data, manifest, previous)


@pytest.fixture
def calls_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause hosts before each system call, and hide their locks from each other."""

    def paused(call: Callable[..., Any], path: Any, *args: Any, **named: Any) -> Any:
        if host := getattr(_here, "host", None):
            host.pause(f"{call.__name__} {os.path.basename(path) if isinstance(path, str) else path}")
        return call(path, *args, **named)

    def scope(handle: int) -> dict[str, str]:
        return {"boot": f"{_here.host.name}, start {_here.host.starts}", "device": "0:7"}

    def remove(path: str, ignore_errors: bool) -> None:
        """Delete the manifest last, which is the worst order: a folder without it cannot be published."""
        for name in sorted(os.listdir(path)):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    for name in CALLS:
        monkeypatch.setattr(os, name, functools.partial(paused, getattr(os, name)))
    # A host does one thing at a time, so its own locks are free too.
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    monkeypatch.setattr(_folder, "_lock_scope", scope)


hosts = st.sampled_from([0, 1])
MOMENTS = (
    f"link {MANIFEST}",
    f"rename {MANIFEST}",
    f"unlink {WRITER}",
    f"lstat {MANIFEST}",
    "unlink array",
    "the end",
)


class TwoHosts(RuleBasedStateMachine):
    """One path. An acknowledged save exists until another save replaces it, or it is deleted."""

    def __init__(self, fault: Fault, path: Path) -> None:
        super().__init__()
        self.fault, self.path = fault, path
        self.store = Shared(str(path), str(path))
        self.replaced = set[str]()
        self.hosts = [Host("one", self.replaced), Host("other", self.replaced)]
        self.numbers = itertools.count(1)
        self.acknowledged = set[str]()
        self.crashed_saves = set[str]()

    # What a host does -------------------------------------------------------------------------------------

    @rule(number=hosts, what=st.sampled_from(["save", "save", "overwrite", "delete", "sweep"]))
    def begin(self, number: int, what: str) -> None:
        save_id = f"{next(self.numbers):032x}"
        work = {"delete": self._delete, "sweep": self._sweep}
        if self.hosts[number].thread is None:
            self.hosts[number].begin(work.get(what, functools.partial(self._save, save_id, what == "overwrite")))

    def _save(self, save_id: str, overwrite: bool) -> None:
        try:
            transaction = SharedPath(self.store, overwrite=overwrite).claim([], save_id)
        except JaxckptError:
            return
        except Crashed:
            self.crashed_saves.add(save_id)
            raise
        try:
            self.store.put(f"{transaction.data}/array", save_id.encode())
            transaction.commit(sealed(save_id), sync=False)
        except JaxckptError:
            transaction.close()
            return
        except Crashed:  # a process that dies closes nothing
            self.crashed_saves.add(save_id)
            raise
        self.acknowledged.add(save_id)
        transaction.close()

    def _delete(self) -> None:
        """As a Checkpointer deletes a step."""
        with _here.host.atomic():
            if (content := self.store.read(MANIFEST)) is not None:
                self.replaced.add(id_in(content))
            self.store.unpublish(sync=False)
        self.store.clear()

    def _sweep(self) -> None:
        """As a Checkpointer begins."""
        content = self.store.read(MANIFEST)
        if content is None:
            self.store.clear(evict=False)
        else:
            self.store.sweep(data_folder_of(content))
            self.store.trim(f"data-{id_in(content)}", [])

    # Its progress -----------------------------------------------------------------------------------------

    @rule(number=hosts, calls=st.integers(1, 10))
    def run(self, number: int, calls: int) -> None:
        self.hosts[number].run(calls)

    @rule(number=hosts, moment=st.sampled_from(MOMENTS))
    def run_until(self, number: int, moment: str) -> None:
        self.hosts[number].run_until(moment)

    @rule(number=hosts, restart=st.booleans(), really=st.integers(0, 3))
    def crash(self, number: int, restart: bool, really: int) -> None:
        host = self.hosts[number]
        if really:
            return
        host.crashed = True
        host.run(1)
        host.starts += restart

    @invariant()
    def an_acknowledged_save_is_complete(self) -> None:
        content = read(self.path / MANIFEST)
        if content is not None and id_in(content) in self.acknowledged:
            self.require_complete(id_in(content))
        lost = self.acknowledged - self.replaced - ({id_in(content)} if content else set())
        assert not lost, f"{lost} was acknowledged, and is gone"

    def require_complete(self, save_id: str) -> None:
        assert read(self.path / f"data-{save_id}" / "array") == save_id.encode(), f"{save_id} is damaged"

    def teardown(self) -> None:
        for host in self.hosts:
            host.run_until("the end")
            assert host.thread is None
        self.an_acknowledged_save_is_complete()
        content = read(self.path / MANIFEST)
        if content is not None and id_in(content) not in self.crashed_saves:
            self.require_complete(id_in(content))
        self.fault.saw("each acknowledged save is complete")
        self.hosts[0].begin(functools.partial(self._save, "f" * 32, True))
        self.hosts[0].run_until("the end")
        assert id_in(read(self.path / MANIFEST) or b"") == "f" * 32
        assert sorted(os.listdir(self.path)) == ["data-" + "f" * 32, MANIFEST], "all remains are swept"


def sealed(save_id: str) -> bytes:
    """The smallest content that counts as an undamaged manifest."""
    body = f'{{"save_id":"{save_id}"'.encode()
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def id_in(manifest: bytes) -> str:
    return (data_folder_of(manifest) or "").removeprefix("data-")


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


PROMISE = "an acknowledged save stays complete until it is replaced or deleted"


@pytest.mark.fault(
    13,
    "two hosts with one host name, whose locks do not reach each other, save, delete, sweep and crash in any order",
    PROMISE,
    quick=20,
    full=3000,
)
def test_any_sequence(fault: Fault, tmp_path: Path, calls_pause: None) -> None:
    paths = (tmp_path / str(number) for number in itertools.count())
    settings = hypothesis.settings(
        max_examples=sum(1 for _ in fault.rounds()),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(lambda: TwoHosts(fault, next(paths)), settings=settings)


PAIRS = (("save", "save"), ("save", "delete"), ("save", "sweep"), ("overwrite", "sweep"))
CALLS_OF_A_SAVE = 32


INTERRUPTED = "one host is interrupted by the other, at any system call, and that one by the first"


@pytest.mark.parametrize(
    "misled",
    [
        pytest.param(False, marks=pytest.mark.fault(13, INTERRUPTED, PROMISE, quick=None)),
        pytest.param(True, marks=pytest.mark.fault(13, f"{INTERRUPTED}; every save seems dead", PROMISE, quick=None)),
    ],
)
def test_two_operations(
    fault: Fault, tmp_path: Path, calls_pause: None, monkeypatch: pytest.MonkeyPatch, misled: bool
) -> None:
    if misled:
        monkeypatch.setattr(_folder, "_shows_lock", lambda note, scope: True)
    calls = range(CALLS_OF_A_SAVE)
    orders = [order for pair in PAIRS for order in (pair, pair[::-1])]
    # In `make test`, only interruptions just before the publication.
    cases = (
        [*itertools.product(orders, calls, calls)] if fault.campaign else [*itertools.product(orders[::2], [-1], calls)]
    )
    for number, (operations, first, second) in enumerate(fault.rounds(cases)):
        machine = TwoHosts(fault, tmp_path / str(number))
        if "overwrite" in operations:
            machine.begin(0, "save")
            machine.run_until(0, "the end")
        machine.begin(0, operations[0])
        if first < 0:
            machine.run_until(0, f"link {MANIFEST}")
        machine.run(0, first)
        machine.begin(1, operations[1])
        machine.run(1, second)
        machine.teardown()
