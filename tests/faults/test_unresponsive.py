"""A real FUSE daemon is stopped or killed: every public call raises a jaxckpt error, and the program goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mounts
import numpy as np
import processes
import pytest
import unresponsive
from victims import needs_strace

import jaxckpt

PROGRAM = Path(unresponsive.__file__)


def outcomes(folder: Path, what: str) -> tuple[processes.Finished, list[dict[str, Any]]]:
    """How every public call ended, after the daemon of their file system was stopped or killed."""
    (folder / "source").mkdir()
    with mounts.bindfs(folder / "source", folder / "mount") as mount:
        done = processes.finish(PROGRAM, mount.path, what, mount.daemon.pid, timeout=120)
    return done, json.loads(done.stdout.splitlines()[-1])


def test_every_public_call_is_tried() -> None:
    tried = {name.partition("(")[0].partition(" to ")[0].partition(" of ")[0] for name in unresponsive.CALLS}
    assert unresponsive.public_calls() <= tried | unresponsive.NO_STORAGE.keys()
    assert not tried & unresponsive.NO_STORAGE.keys()


@pytest.mark.child
def test_stopped_before_every_call(tmp_path: Path) -> None:
    done, (stopped, resumed) = outcomes(tmp_path, "stop")
    for name, (how, seconds, message) in stopped.items():
        assert how == "StorageError", (name, how, message, done.stderr[-20000:])
        assert seconds < 5 * unresponsive.SECONDS, (name, seconds)  # 70 calls at once on a busy machine
        assert "no bytes have moved for 2 s while " in message or "hangs" in message, (name, message)
    assert {name: how for name, (how, _, _) in resumed.items() if how != "done"} == {}
    assert done.returncode == 1, f"it reports the save that was running: {done}"
    assert "no bytes have moved for 2 s while writing to" in done.stderr


@pytest.mark.child
def test_stopped_while_objects_are_verified(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with mounts.bindfs(tmp_path / "served", tmp_path / "mount") as mount:
        sizes = jaxckpt.Options(object_bytes=1 << 18, chunk_bytes=1 << 16)
        jaxckpt.save(tmp_path / "mount" / "c", {"w": np.ones((100, 1 << 16), np.float32)}, options=sizes)
        stop = jaxckpt.Options(
            timeout_seconds=1, progress=lambda progress: mount.stop() if progress.done_bytes else None
        )
        with pytest.raises(jaxckpt.errors.StorageError, match="no bytes have moved for 1 s"):
            jaxckpt.verify(tmp_path / "mount" / "c", options=stop)


@pytest.mark.child
def test_killed_before_every_call(tmp_path: Path) -> None:
    done, (killed,) = outcomes(tmp_path, "kill")
    assert done.returncode == 0
    for name, (how, _, message) in killed.items():
        assert how == "StorageError", (name, how, message)


@needs_strace
@pytest.mark.child
def test_killed_during_every_call(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with mounts.bindfs(tmp_path / "source", tmp_path / "probe"):  # skips without FUSE
        pass
    done = processes.finish(PROGRAM, tmp_path, "strike", 6, 30, timeout=120)
    assert done.returncode == 0, str(done)
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name, number, how, _, message in outcomes:
        assert how in ("StorageError", "done"), (name, number, how, message)
    assert {name for name, _, how, _, _ in outcomes if how == "StorageError"} >= {
        "save",
        "restore",
        "verify",
        "Run.fork",
    }
