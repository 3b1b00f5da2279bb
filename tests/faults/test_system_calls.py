"""A save that is killed, or gets an error from the system, at each of its system calls."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import victims
from reliability import Fault
from victims import needs_strace, version, version_at

import jaxckpt

pytestmark = pytest.mark.child

CHANGES = ("mkdir", "openat", "write", "writev", "fsync", "linkat", "rename", "unlink", "unlinkat", "rmdir")
"""All system calls with which a save changes the disk, found by tracing a save without a filter."""


def every_call(folder: Path, calls: tuple[str, ...]) -> list[tuple[int | None, str, int]]:
    """(existing version, call, n) for every nth call of a first save and of an overwriting save."""
    found: list[tuple[int | None, str, int]] = []
    for old in (None, 1):
        path, log = folder / f"probe-{old}", folder / f"probe-{old}.log"
        prepare(path, old)
        said, _ = victims.run_traced(victims.replace, str(path), 2, log=log, calls=",".join(calls))
        assert said == [2]
        found += [(old, *case) for case in victims.sweep(calls, log)]
    return found


def prepare(path: Path, old: int | None) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if old is not None:
        jaxckpt.save(path, version(old), options=victims.OPTIONS)


def require_swept(path: Path) -> None:
    """Check that the next save works and deletes anything that was left."""
    jaxckpt.save(path, version(3), overwrite=True, options=victims.OPTIONS)
    assert version_at(path) == 3
    assert len(victims.data_folders(path)) == 1, "what the struck save left is swept"


@needs_strace
@pytest.mark.fault(
    2,
    "KILL at every mkdir, openat, write, fsync, rename, unlink of a save",
    "the old or the new checkpoint exists, complete",
    quick=12,
)
def test_killed_at_any_system_call(fault: Fault, tmp_path: Path) -> None:
    path, log = tmp_path / "ckpt", tmp_path / "log"
    for old, call, nth in fault.rounds(every_call(tmp_path, CHANGES)):
        prepare(path, old)
        said, killed = victims.run_traced(
            victims.replace, str(path), 2, log=log, calls=call, fault=f"signal=KILL:when={nth}"
        )
        found = version_at(path)
        if not killed:
            assert said == [2]
            assert found == 2
            fault.saw("saved before the call occurred")
            continue
        assert found in (old, 2), f"{call} {nth}: version {found}"
        assert not said or found == 2, "it was acknowledged"
        fault.saw("the new" if found == 2 else "no checkpoint is listed" if old is None else "the old")
        require_swept(path)


@needs_strace
@pytest.mark.fault(
    3,
    "EIO or ENOSPC at the Nth mkdir, openat, write, fsync, rename, once and every time",
    "the error is raised; nothing is published, nothing is left behind",
    quick=12,
)
def test_refused_at_any_system_call(fault: Fault, tmp_path: Path) -> None:
    path, log = tmp_path / "ckpt", tmp_path / "log"
    refused = ("mkdir", "openat", "write", "writev", "fsync", "linkat", "rename")
    cases = [
        (*case, code, ever)
        for case in every_call(tmp_path, refused)
        for code, ever in ((errno.EIO, ""), (errno.EIO, "+"), (errno.ENOSPC, ""), (errno.ENOSPC, "+"))
    ]
    for old, call, nth, code, ever in fault.rounds(cases):
        prepare(path, old)
        name = errno.errorcode[code]
        (said,), _ = victims.run_traced(
            victims.replace, str(path), 2, log=log, calls=call, fault=f"error={name}:when={nth}{ever}"
        )
        struck = log.read_text(errors="replace").count("INJECTED")
        found, where = version_at(path), f"{name} at {call} {nth}{ever} over version {old}: {said}"
        if said == 2:
            if found != 2:
                fault.silent(f"{where}: reported as saved, but it is not")
            elif not struck:
                fault.saw("saved before the call occurred")
            else:
                fault.saw("saved anyway")
        else:
            assert said["error"] == "StorageError", where
            assert said["errno"] == code, where
            assert found == old, f"{where}: raised, yet published version {found}"
            left = len(victims.data_folders(path)) - (old is not None)
            # A folder that cannot be opened cannot be emptied, and strace fails the call in each thread.
            assert not left or (call == "openat" and struck > 1), f"{where}: left {os.listdir(path)}"
            fault.saw(f"StorageError {name}" + (", the next save sweeps" if left else ""))
        require_swept(path)


@needs_strace
def test_errors_at_close_never_hide_a_published_save(tmp_path: Path) -> None:
    """As a full quota on NFS, which is reported at close."""
    path, log = tmp_path / "ckpt", tmp_path / "log"
    prepare(path, 1)
    victims.run_traced(victims.replace, str(path), 2, log=log, calls="close")
    last = victims.counts(log)["close"]
    outcomes = set[str]()
    for nth in (2, 8, last - 8, last - 6, last - 4, last - 2):
        prepare(path, 1)
        (said,), _ = victims.run_traced(
            victims.replace, str(path), 2, log=log, calls="close", fault=f"error=EDQUOT:when={nth}+"
        )
        assert said == 2 or said["error"] == "StorageError", said
        assert version_at(path) == (2 if said == 2 else 1), f"{nth}: {said}"
        assert said != 2 or len(victims.data_folders(path)) == 1, f"{nth}: the old data stays"
        outcomes.add("saved" if said == 2 else "refused")
        require_swept(path)
    assert outcomes == {"saved", "refused"}
