"""Child processes that save, for tests that kill, trace or fail them; and checks of what they leave.

They are forked from a server that has imported everything and has started no threads. A new process is ready to save
after about 0.1 s; starting Python and importing JAX would take ten times as long.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import functools
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import processes
import pytest

import jaxckpt
from jaxckpt._save import staging as _staging

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed (apt-get install strace)")

OPTIONS = jaxckpt.Options(chunk_bytes=4096, object_bytes=16384)
SECONDS = 60.0
"""The longest time that a test waits for a child process."""

Say = Callable[[Any], None]


# What is saved --------------------------------------------------------------------------------------------


def version(number: int) -> dict[str, Any]:
    """The tree that is saved for this version number: eight objects of one stack, and two leaves of another."""
    values = np.arange(64 * 256).reshape(64, 256) + (number << 20)
    return {"version": number, "a": values, "b": [values[0, :99].copy(), -values[1, :99]]}


def require_version(tree: dict[str, Any]) -> int:
    """The version of a tree, after a comparison of every bit."""
    wanted = version(tree["version"])
    np.testing.assert_array_equal(np.asarray(tree["a"]), wanted["a"])
    for found, expected in zip(tree["b"], wanted["b"], strict=True):
        np.testing.assert_array_equal(np.asarray(found), expected)
    return tree["version"]


def version_at(path: str | os.PathLike[str]) -> int | None:
    """The version at a path, after a comparison of every bit; None if no checkpoint exists."""
    try:
        tree = jaxckpt.load_numpy(path)
    except jaxckpt.errors.NotACheckpointError:
        return None
    return require_version(tree)


def versions_in(folder: Path) -> list[int]:
    """The steps that a Checkpointer lists, each compared bit for bit. Listing sweeps half-deleted steps.

    A process that is stopped before its first save may leave no folder.
    """
    published = sorted(int(found.parent.name) for found in folder.glob("*/manifest.json"))
    assert [version_at(folder / f"{step:08d}") for step in published] == published
    with jaxckpt.Checkpointer(folder) as checkpoints:
        assert checkpoints.steps() == published
    names = {found.name for found in folder.glob("*")} - {"_run", "_trash"}
    assert sorted(names) == [f"{step:08d}" for step in published], "nothing else is left"
    for moved in (folder / "_trash").glob("*"):
        assert version_at(moved) == int(moved.name.partition("-")[0]), "it was moved completely"
    assert all(len(data_folders(folder / f"{step:08d}")) == 1 for step in published)
    return published


def data_folders(path: Path) -> list[str]:
    """The data folders at a path, including those of unfinished saves."""
    return [name for name in os.listdir(path) if "data-" in name] if path.is_dir() else []


# Programs of the child processes --------------------------------------------------------------------------


def replace(say: Say, path: str, first: int, count: int = 1, sync: bool = True) -> None:
    """Save successive versions to one path, and report each one."""
    options = jaxckpt.Options(chunk_bytes=OPTIONS.chunk_bytes, object_bytes=OPTIONS.object_bytes, sync=sync)
    for number in range(first, first + count):
        jaxckpt.save(path, version(number), overwrite=True, options=options)
        say(number)


def keep_steps(say: Say, folder: str, first: int, count: int = 1, keep_last: int | None = 2) -> None:
    """Save successive steps with a Checkpointer, and report each one."""
    with jaxckpt.Checkpointer(folder, keep_last=keep_last, background=False, options=OPTIONS) as checkpoints:
        for number in range(first, first + count):
            checkpoints.save(number, version(number))
            say(number)


def move_steps(say: Say, folder: str, number: int) -> None:
    """Save a step with a Checkpointer that moves older ones to the trash, and report it."""
    with jaxckpt.Checkpointer(folder, keep_last=1, trash=True, options=OPTIONS) as checkpoints:
        checkpoints.save(number, version(number))
    say(number)


def frozen(number: int) -> np.ndarray[Any, Any]:
    """A leaf that does not change from step to step: four objects. It differs between processes."""
    return np.arange(64 * 256, dtype=np.int32).reshape(64, 256) + (number << 20)


def keep_frozen(say: Say, folder: str, first: int, count: int, base: int = 0, overwrite: bool = False) -> None:
    """Save successive steps, or the same step repeatedly, most of whose data is linked; report each one."""
    held = jax.device_put(frozen(base))
    with jaxckpt.Checkpointer(folder, background=False, options=OPTIONS) as checkpoints:
        for number in range(first, first + count):
            step = first if overwrite else number
            try:
                checkpoints.save(step, {**version(number), "base": base, "frozen": held}, overwrite=overwrite)
            except jaxckpt.errors.CheckpointExistsError as error:
                say(str(error))
            else:
                say(number)


def frozen_step(path: str | os.PathLike[str]) -> int:
    """The version of a step of `keep_frozen`, after a comparison of every bit."""
    tree = jaxckpt.load_numpy(path)
    np.testing.assert_array_equal(tree["frozen"], frozen(tree["base"]))
    return require_version(tree)


def delete_step(say: Say, folder: str, number: int) -> None:
    """Delete a step with a Checkpointer."""
    with jaxckpt.Checkpointer(folder) as checkpoints:
        checkpoints.delete(number)
        say(number)


def read(say: Say, path: str, count: int, steps: bool) -> None:
    """Restore repeatedly while others replace or delete; report the number of each outcome."""
    ends = collections.Counter[str]()
    number = 0
    while ends.total() < count:
        number += 1
        try:
            if not steps:
                require_version(jaxckpt.restore(path) if number % 2 else jaxckpt.load_numpy(path))
            elif number % 2:
                with jaxckpt.Checkpointer(path) as checkpoints:
                    require_version(checkpoints.restore())
            else:
                oldest = min(os.listdir(path))
                assert require_version(jaxckpt.load_numpy(f"{path}/{oldest}")) == int(oldest)
        except jaxckpt.errors.NotACheckpointError:
            ends["NotACheckpointError"] += 1
        else:
            ends["bit-exact"] += 1
    say(ends)


def follow(say: Say, folder: str) -> None:
    """Restore each step of a run, and report it; end when no more appear."""
    for step in jaxckpt.Run(folder).follow(timeout_seconds=0.1, poll_seconds=0.01):
        assert require_version(step.restore()) == step.number
        say(step.number)


def list_steps(say: Say, folder: str) -> None:
    """Report the steps of a run."""
    say(jaxckpt.Run(folder).steps())


def keep_steps_by_another_clock(say: Say, folder: str, days: list[int]) -> None:
    """Save a step after each clock change, with all file times changed too; report the existing steps."""
    real, real_time = datetime.datetime, time.time
    for step, off in enumerate(days):

        class Clock(real):
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None, off: int = off) -> Self:
                return super().now(tz) + datetime.timedelta(days=off)

        time.time = lambda off=off: real_time() + off * 86400
        datetime.datetime = Clock
        with jaxckpt.Checkpointer(folder, keep_last=2, keep_every=3, keep_best=("loss", "min")) as checkpoints:
            checkpoints.save(step, version(step), metrics={"loss": (step - 4) ** 2})
            checkpoints.wait()
            newest = require_version(checkpoints.restore())
            steps = checkpoints.steps()
        with open(f"{folder}/{step:08d}/manifest.json") as manifest:
            created = real.fromisoformat(json.load(manifest)["created"])
        assert round((created - real.now(datetime.UTC)).total_seconds() / 86400) == off
        for path in Path(folder).rglob("*"):
            os.utime(path, (time.time(), time.time()))
        say([newest, steps])


def save_where_refused(say: Say, path: str, how: str, user: int | None) -> None:
    """Try to save without permission. The error must come before any copy from a device."""
    tree = {"x": jax.numpy.arange(1000.0), "y": np.arange(10)}
    if how != "save_async":  # save_async copies all arrays before it returns
        _staging.StagedObject.data = None  # pyright: ignore
    if user is not None:
        os.setuid(user)
    match how:
        case "save":
            jaxckpt.save(path, tree, overwrite=True)
        case "save_async":
            jaxckpt.save_async(path, tree, overwrite=True).wait()
        case _:
            with jaxckpt.Checkpointer(path, background=False) as checkpoints:
                checkpoints.save(1, tree)
    say("saved")


def orbax_replace(say: Say, path: str, first: int) -> None:
    """Save successive versions to one path with Orbax's StandardCheckpointer."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        say("imported")
        for number in itertools.count(first):
            checkpointer.save(path, version(number), force=True)
            checkpointer.wait_until_finished()
            say(number)


def orbax_steps(say: Say, folder: str, first: int) -> None:
    """Save successive steps with Orbax's CheckpointManager."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        say("imported")
        for number in itertools.count(first):
            manager.save(number, args=ocp.args.StandardSave(version(number)))
            manager.wait_until_finished()
            say(number)


# Child processes ------------------------------------------------------------------------------------------

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["victims"])


@functools.cache
def _begin_server() -> None:
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's fork server does not inherit sys.path
        patch.setenv("PYTHONPATH", processes.PYTHONPATH)
        multiprocessing.forkserver.ensure_running()


class Saver:
    """A child process that runs a function of this module after `go`."""

    def __init__(self, program: Callable[..., None], *args: Any) -> None:
        _begin_server()
        self._link, theirs = socket.socketpair()
        self._link.settimeout(SECONDS)
        self._lines = self._link.makefile("r")
        self._process = _CONTEXT.Process(target=_run, args=(theirs, program, args), daemon=True)
        self._process.start()
        theirs.close()
        assert self.next_message() == "ready"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def go(self) -> None:
        self._link.sendall(b"go\n")

    def next_message(self) -> Any:
        """The next message; None if no more will come."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:  # killed before it read "go"
            return None
        return json.loads(line) if line.endswith("\n") else None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> list[Any]:
        """Wait until the process has ended; returns the remaining messages."""
        said = list(iter(self.next_message, None))
        self._process.join(SECONDS)
        assert self._process.exitcode is not None, f"not ended after {SECONDS:g} s: a hang"
        return said

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    @property
    def killed(self) -> bool:
        return self._process.exitcode == -signal.SIGKILL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(SECONDS)
        self._lines.close()
        self._link.close()


def _run(link: socket.socket, program: Callable[..., None], args: tuple[Any, ...]) -> None:
    # By default, Linux may allow tracing only by ancestors: PR_SET_PTRACER, PR_SET_PTRACER_ANY.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)

    def say(what: Any) -> None:
        link.sendall(json.dumps(what).encode() + b"\n")  # uses sendto, a call that no test injects faults into

    jaxckpt.save("memory://warm", {"x": np.zeros(3)})  # a first save, so that its imports are not part of the test
    say("ready")
    link.recv(3)
    try:
        program(say, *args)
    except BaseException as error:
        say({"error": type(error).__name__, "errno": getattr(error, "errno", None), "text": str(error)})
    os._exit(0)


# System calls ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def traced(
    saver: Saver, log: Path, calls: str, fault: str | None = None, paths: Iterable[Path] = ()
) -> Generator[None]:
    """Run strace on a process and all its threads, from before `go` until the process ends. If there are `paths`, it
    sees only calls on these.

    A fault such as "error=EIO:when=3" applies to the calls. strace counts calls per thread. Of tensorstore's threads
    and the main thread, the first one to reach the count gets the fault first, and others may get it later.
    """
    inject = [] if fault is None else ["-e", f"inject={calls}:{fault}"]
    only = [f"--trace-path={path}" for path in paths]
    command = [STRACE or "", "-f", "-y", "-s", "64", "-o", str(log), "-e", f"trace={calls}", *inject, *only]
    with subprocess.Popen([*command, "-p", str(saver.pid)], stderr=subprocess.PIPE, text=True) as strace:
        try:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert "attached" in said, said
            yield
            strace.communicate(timeout=SECONDS)  # strace ends when the last thread ends
        finally:
            strace.kill()


def run_traced(
    program: Callable[..., None],
    *args: Any,
    log: Path,
    calls: str,
    fault: str | None = None,
    paths: Iterable[Path] = (),
) -> tuple[list[Any], bool]:
    """Run a program to its end under `traced`; returns its messages, and whether it was killed."""
    with Saver(program, *args) as saver, traced(saver, log, calls, fault, paths):
        saver.go()
        said = saver.end()
        return said, saver.killed


def counts(log: Path) -> dict[str, int]:
    """For each call, the largest number of times that one thread made it."""
    found: dict[tuple[str, str], int] = {}
    for thread, call in re.findall(r"^(\d+) +(\w+)\(", log.read_text(errors="replace"), re.MULTILINE):
        found[thread, call] = found.get((thread, call), 0) + 1
    return {call: max(n for (_, other), n in found.items() if other == call) for _, call in found}


def sweep(calls: tuple[str, ...], log: Path) -> list[tuple[str, int]]:
    """(call, n) for every nth occurrence of each call in a trace."""
    seen = counts(log)
    return [(call, nth) for call in calls for nth in range(1, seen.get(call, 0) + 1)]
