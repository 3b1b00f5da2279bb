"""Two hosts that save to one path, in any order of their system calls or requests.

In a folder, neither host sees the other's locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from reliability import Fault

import jaxckpt
from jaxckpt._model.file_names import COPY, MANIFEST, SEAL, WRITER, data_folder_of, is_sealed
from jaxckpt._pipeline.watchdog import Watchdog
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._store import folder as _folder
from jaxckpt._store.bucket import Bucket
from jaxckpt._store.folder import Folder
from jaxckpt._store.load_manifest import find_lost, load_manifest, read_copy
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import store_at
from jaxckpt.errors import CorruptError, JaxckptError, ManifestError, NotACheckpointError

CALLS = ("open", "mkdir", "link", "rename", "unlink", "rmdir", "listdir", "lstat", "stat")
"""The system calls before which a host can pause."""


class Crashed(BaseException):
    """The host's process was killed."""


class Host:
    """A thread that pauses before each system call. All hosts have the same host name."""

    def __init__(self, name: str, replaced: set[str], lost: set[str]) -> None:
        self.name = name
        self.replaced = replaced
        """The saves that another one has replaced, or that were deleted."""

        self.lost = lost
        """The published saves that have lost their manifest."""

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

    def _publish_draft(self, data: str, content: bytes, previous: bytes | None) -> None:
        if previous is None and not _here.host.lost:
            super()._publish_draft(data, content, previous)
            return
        with _here.host.atomic():
            super()._publish_draft(data, content, previous)
            note_replaced(previous, content)

    def _withdraw(self, data: str, manifest: bytes, previous: bytes | None) -> None:
        with _here.host.atomic():
            super()._withdraw(data, manifest, previous)


class Requests:
    """The keys of a bucket as a host sees them: it pauses before each request."""

    def __init__(self, keys: ts.KvStore, host: Host) -> None:
        self._keys, self._host = keys, host

    def __add__(self, below: str) -> ts.KvStore:
        return self._keys + below

    def list(self, *args: Any, **named: Any) -> Any:
        self._host.pause("LIST")
        return self._keys.list(*args, **named)

    def write(self, key: str, content: bytes | None, **named: Any) -> Any:
        self._host.pause(f"{'DELETE' if content is None else 'PUT'} {key.rpartition('/')[2]}")
        if key != MANIFEST:
            return self._keys.write(key, content, **named)
        before = self._keys.read(key).result()
        written = self._keys.write(key, content, **named)
        written.result()
        after = self._keys.read(key).result()
        if (before.state, before.value) != (after.state, after.value):
            note_replaced(before.value, after.value)
        return written


class SharedBucket(Bucket):
    """The bucket as a host sees it."""

    @property
    def _keys(self) -> Any:
        host = getattr(_here, "host", None)
        keys = super()._keys
        return keys if host is None else Requests(keys, host)

    def _begin_read(self, key: str, byte_range: slice | None = None) -> Any:
        if (host := getattr(_here, "host", None)) is not None:
            host.pause(f"GET {key.rpartition('/')[2]}")
        return super()._begin_read(key, byte_range)


def note_replaced(previous: bytes | None, content: bytes | None) -> None:
    """Called by a host when it has replaced or deleted a manifest. A manifest that was lost is then replaced too."""
    host = _here.host
    published = id_in(content or b"")
    host.replaced.update({id_in(previous or b""), *host.lost})
    host.replaced.discard(published)
    host.lost.clear()


@pytest.fixture
def calls_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause hosts before each system call, and hide their locks from each other."""

    def paused(call: Callable[..., Any], path: Any, *args: Any, **named: Any) -> Any:
        if host := getattr(_here, "host", None):
            host.pause(f"{call.__name__} {os.path.basename(path) if isinstance(path, str) else path}")
        return call(path, *args, **named)

    def scope(handle: int) -> dict[str, str]:
        return {"boot": f"{_here.host.name}, start {_here.host.starts}", "device": "0:7"}

    @contextlib.contextmanager
    def in_the_worst_order(folder: Any) -> Generator[list[os.DirEntry[str]]]:
        """The note first and the copy last: a folder with a copy and no note seems to have lost its manifest."""
        with scandir(folder) as entries:
            yield sorted(entries, key=lambda entry: (entry.name == COPY, entry.name != WRITER))

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", in_the_worst_order)
    for name in CALLS:
        monkeypatch.setattr(os, name, functools.partial(paused, getattr(os, name)))
    # A host does one thing at a time, so its own locks are free too.
    monkeypatch.setattr(fcntl, "flock", lambda handle, how: None)
    monkeypatch.setattr(_folder, "_lock_scope", scope)


hosts = st.sampled_from([0, 1])
MOMENTS = (
    f"link {MANIFEST}",
    f"rename {MANIFEST}",
    f"unlink {COPY}",
    f"unlink {WRITER}",
    f"lstat {MANIFEST}",
    "unlink array",
    "the end",
)
REQUESTS = (
    f"PUT {COPY}",
    f"PUT {MANIFEST}",
    f"PUT {WRITER}",
    f"DELETE {COPY}",
    f"DELETE {MANIFEST}",
    f"DELETE {WRITER}",
    f"GET {MANIFEST}",
    "DELETE array",
    "the end",
)


class TwoHosts(RuleBasedStateMachine):
    """One path. An acknowledged save exists until another save replaces it, or it is deleted.

    If its manifest is lost, its data stays until the same happens, and every reader sees that. Nothing else ever seems
    to have lost its manifest.
    """

    def __init__(self, fault: Fault, url: str) -> None:
        super().__init__()
        self.fault = fault
        self.plain, self.store = stores_at(url)
        self.replaced, self.lost = set[str](), set[str]()
        self.hosts = [Host(name, self.replaced, self.lost) for name in ("one", "other")]
        self.numbers = itertools.count(1)
        self.acknowledged = set[str]()
        self.crashed_saves = set[str]()
        self.losses = 0

    # What a host does -------------------------------------------------------------------------------------

    @rule(
        number=hosts,
        what=st.sampled_from(["save", "save", "overwrite", "delete", "sweep", "clear", "drop", "repair"]),
    )
    def begin(self, number: int, what: str) -> None:
        save_id = f"{next(self.numbers):032x}"
        work = {
            "delete": self._delete,
            "sweep": self._sweep,
            "clear": self._clear,
            "drop": self._drop,
            "repair": self._repair,
        }
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
        with _here.host.atomic() if isinstance(self.store, Folder) else contextlib.nullcontext():
            content = self.store.read(MANIFEST)
            self.store.unpublish(sync=False)
            note_replaced(content, None)
        self.store.clear()

    def _sweep(self) -> None:
        """As a Checkpointer begins."""
        try:
            manifest, _ = load_manifest(self.store)
        except NotACheckpointError:
            self.store.clear(evict=False)
        except CorruptError:
            pass
        else:
            self.store.sweep(manifest.data_folder)
            self.store.trim(manifest.data_folder, [])

    def _clear(self) -> None:
        """As a Checkpointer deletes an older step that was not published."""
        above = self.store.parent_and_name()
        if above and not above[0].folders(lambda name: name == STEP).get(STEP):
            self.store.clear()

    def _drop(self) -> None:
        """As a Checkpointer drops subtrees of a step: the data stays the same here."""
        with _here.host.atomic() if isinstance(self.store, Folder) else contextlib.nullcontext():
            content = self.store.read(MANIFEST)
            if content and id_in(content) not in self.crashed_saves:
                with contextlib.suppress(JaxckptError):
                    self.store.republish(f"data-{id_in(content)}", content, content, sync=False)

    def _repair(self) -> None:
        try:
            data, content, manifest, damaged = read_copy(self.store)
        except JaxckptError:
            return
        try:
            self.store.publish_copy(data, content, damaged, sync=False)
        except JaxckptError:
            return
        except Crashed:
            self.crashed_saves.add(manifest.save_id)
            raise

    # Its progress -----------------------------------------------------------------------------------------

    @rule(number=hosts, calls=st.integers(1, 10))
    def run(self, number: int, calls: int) -> None:
        self.hosts[number].run(calls)

    @rule(number=hosts, moment=st.integers(0, 100))
    def run_until(self, number: int, moment: int | str) -> None:
        if isinstance(moment, int):
            moments = MOMENTS if isinstance(self.store, Folder) else REQUESTS
            moment = moments[moment % len(moments)]
        self.hosts[number].run_until(moment)

    @rule(number=hosts, restart=st.booleans(), really=st.integers(0, 3))
    def crash(self, number: int, restart: bool, really: int) -> None:
        host = self.hosts[number]
        if really:
            return
        host.crashed = True
        host.run(1)
        host.starts += restart

    # Its manifest is lost ---------------------------------------------------------------------------------

    @rule(content=st.sampled_from([None, b"", b'{"format":']))
    def lose(self, content: bytes | None) -> None:
        """Delete or truncate the manifest, while both hosts are idle or dead, unless its writer was killed just before
        it finished."""
        manifest = self.plain.read(MANIFEST)
        if any(host.thread is not None for host in self.hosts) or not manifest or not is_sealed(manifest):
            return
        if f"data-{id_in(manifest)}" not in self.plain.published_data():
            return
        if content is None:
            self.plain.remove(MANIFEST)
        else:
            self.plain.put(MANIFEST, content)
        self.losses += 1
        self.lost.add(id_in(manifest))
        self.acknowledged.add(id_in(manifest))

    @invariant()
    def an_acknowledged_save_is_complete(self) -> None:
        content = self.plain.read(MANIFEST)
        if content is not None and id_in(content) in self.acknowledged:
            self.require_complete(id_in(content))
        lost = self.acknowledged - self.replaced - self.lost - ({id_in(content)} if content else set())
        assert not lost, f"{lost} was acknowledged, and is gone"

    @invariant()
    def a_lost_manifest_is_seen(self) -> None:
        for save_id in self.lost:
            self.require_complete(save_id)
        assert find_lost(self.plain) == [f"data-{lost}" for lost in self.lost if self.plain.read(MANIFEST) is None]
        if self.lost:
            with pytest.raises(ManifestError, match="jaxckpt repair"):
                load_manifest(self.plain)

    def require_complete(self, save_id: str) -> None:
        assert self.plain.read(f"data-{save_id}/array") == save_id.encode(), f"{save_id} is damaged"

    def teardown(self) -> None:
        for host in self.hosts:
            host.run_until("the end")
            assert host.thread is None
        self.an_acknowledged_save_is_complete()
        self.a_lost_manifest_is_seen()
        if self.losses:
            self.fault.saw("a lost manifest is seen, and its data is complete")
        if self.lost:
            (lost,) = self.lost
            before = self.plain.names()
            for begin in (self._sweep, self._clear, functools.partial(self._save, "e" * 32, False)):
                self.hosts[0].begin(begin)
                self.hosts[0].run_until("the end")
                self.a_lost_manifest_is_seen()
            self.hosts[1].begin(self._repair)
            self.hosts[1].run_until("the end")
            assert not self.lost
            assert id_in(self.plain.read(MANIFEST) or b"") == lost, "it is repaired"
            assert {*self.plain.names()} <= {*before, MANIFEST}
            self.require_complete(lost)
        content = self.plain.read(MANIFEST)
        if content is not None and id_in(content) not in self.crashed_saves:
            self.require_complete(id_in(content))
        self.fault.saw("each acknowledged save is complete")
        self.hosts[0].begin(functools.partial(self._save, "f" * 32, content is not None))
        self.hosts[0].run_until("the end")
        assert id_in(self.plain.read(MANIFEST) or b"") == "f" * 32
        assert self.plain.names() == ["data-" + "f" * 32, MANIFEST], "all remains are swept"
        assert self.plain.child("data-" + "f" * 32).names() == ["array", COPY]


STEP = "00000001"


def stores_at(url: str) -> tuple[Store, Store]:
    """The path as the test sees it, and as the hosts do."""
    plain = store_at(f"{url}/{STEP}", jaxckpt.Options())
    if isinstance(plain, Folder):
        return plain, Shared(plain.url, plain.folder)
    assert isinstance(plain, Bucket)
    above, name = plain.parent_and_name() or (plain, "")
    above.mark(name)
    fields = (getattr(plain, field.name) for field in dataclasses.fields(plain))
    return plain, SharedBucket(*fields)


@functools.cache
def _template() -> bytes:
    store = store_at(f"memory://two-hosts/{uuid.uuid4().hex}", jaxckpt.Options())
    jaxckpt.save(store.url, {"w": np.zeros(3)})
    return store.read(MANIFEST) or b""


def sealed(save_id: str) -> bytes:
    """A manifest."""
    body = _template().rpartition(SEAL)[0]
    body = body.replace(id_in(body).encode(), save_id.encode())
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def id_in(manifest: bytes) -> str:
    return (data_folder_of(manifest) or "").removeprefix("data-")


PROMISE = "an acknowledged save stays complete until it is replaced or deleted"


@pytest.mark.fault(
    13,
    "two hosts with one host name, whose locks do not reach each other, save, delete, sweep and crash in any order",
    PROMISE,
    quick=20,
    full=3000,
)
def test_any_sequence(fault: Fault, tmp_path: Path, calls_pause: None) -> None:
    run_machine(fault, (f"{tmp_path}/{number}" for number in itertools.count()))


@pytest.mark.fault(
    23,
    "two hosts save, delete, sweep, drop and repair in one bucket and crash, in any order of their requests, and"
    " manifests are lost",
    PROMISE,
    quick=20,
    full=3000,
)
def test_any_sequence_of_requests(fault: Fault) -> None:
    run_machine(fault, (f"memory://two-hosts/{uuid.uuid4().hex}/{number}" for number in itertools.count()))


def run_machine(fault: Fault, urls: Iterator[str]) -> None:
    _template()
    settings = hypothesis.settings(
        max_examples=sum(1 for _ in fault.rounds()),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(lambda: TwoHosts(fault, next(urls)), settings=settings)


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
        machine = TwoHosts(fault, f"{tmp_path}/{number}")
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


KILLED = (
    ("save", "clear"),
    ("save", "delete"),
    ("save", "overwrite"),
    ("overwrite", "delete"),
    ("overwrite", "overwrite"),
    ("delete", "overwrite"),
    ("delete", "sweep"),
    ("sweep", "delete"),
    ("drop", "delete"),
    ("lost overwrite", "sweep"),
    ("lost overwrite", "clear"),
    ("lost delete", "sweep"),
    ("lost repair", "delete"),
    ("lost repair", "overwrite"),
    ("lost repair", "sweep"),
)


@pytest.mark.fault(
    13,
    "one host is killed at any system call or request, before or after the other has done something",
    PROMISE,
    quick=120,
    full=None,
)
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_killed_at_any_call(fault: Fault, tmp_path: Path, calls_pause: None, kind: str) -> None:
    top = str(tmp_path) if kind == "folder" else f"memory://two-hosts/{uuid.uuid4().hex}"
    _template()
    cases = [*itertools.product(KILLED, range(CALLS_OF_A_SAVE), (True, False), (True, False))]
    for number, ((operation, other), calls, dies, dies_first) in enumerate(fault.rounds(cases)):
        machine = TwoHosts(fault, f"{top}/{number}")
        lost, _, operation = operation.rpartition(" ")
        if operation != "save":
            machine.begin(1, "save")
            machine.run_until(1, "the end")
        if lost:
            machine.lose(None)
            assert machine.lost
        machine.begin(0, operation)
        machine.run(0, calls)
        if dies and dies_first:
            machine.crash(0, restart=False, really=0)
        machine.begin(1, other)
        machine.run_until(1, "the end")
        machine.a_lost_manifest_is_seen()
        if dies and not dies_first:
            machine.crash(0, restart=False, really=0)
        machine.run_until(0, "the end")
        machine.a_lost_manifest_is_seen()
        machine.teardown()
