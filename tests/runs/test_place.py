"""A run whose folder is unmounted, renamed or replaced while a Checkpointer uses it: nothing is lost silently."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mounts
import numpy as np
import pytest
from processes import RunProcesses

import jaxckpt
from jaxckpt._store.files import FileWriter

FAST = jaxckpt.Options(sync=False)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@pytest.fixture(params=["unmounted", "renamed", "linked elsewhere"])
def change(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Callable[[], None]]:
    """Creates the folder `here`, in which a run can be saved, and returns a function that puts another in its place."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    match request.param:
        case "unmounted":
            elsewhere.mkdir()
            with mounts.bindfs(elsewhere, here):
                yield lambda: _umount(here)
        case "renamed":
            here.mkdir()
            yield lambda: os.rename(here, elsewhere)
        case _:
            elsewhere.mkdir()
            here.symlink_to(elsewhere)
            (tmp_path / "new").mkdir()

            def link_elsewhere() -> None:
                here.unlink()
                here.symlink_to(tmp_path / "new")

            yield link_elsewhere


def _umount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def files_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*")] if folder.exists() else []


@pytest.mark.child
@pytest.mark.parametrize("inside", ["", "below/run"])
def test_nothing_is_saved_listed_or_deleted_in_another_place(
    tmp_path: Path, change: Callable[[], None], inside: str
) -> None:
    run = tmp_path / "here" / inside
    with jaxckpt.Checkpointer(run, options=FAST, keep_last=2) as earlier:
        for step in (1, 2):
            earlier.save(step, {"w": step})
    checkpoints = jaxckpt.Checkpointer(run, options=FAST, keep_last=2)
    assert checkpoints.restore_or_init(lambda: {"w": 0}) == (2, {"w": 2})
    checkpoints.save(3, {"w": 3})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    change()
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoints.save(4, {"w": 4}),
        "wait": checkpoints.wait,
        "steps": checkpoints.steps,
        "latest_step": checkpoints.latest_step,
        "metrics": lambda: checkpoints.metrics(3),
        "restore": checkpoints.restore,
        "restore a step": lambda: checkpoints.restore(3),
        "restore_or_init": lambda: checkpoints.restore_or_init(lambda: {"w": 0}),
        "delete": lambda: checkpoints.delete(2),
        "close": checkpoints.close,
    }
    for name, call in calls.items():
        with pytest.raises(jaxckpt.errors.StorageError, match="is no longer the place of this run") as message:
            call()
        assert "create a new Checkpointer" in str(message.value), name
    assert not files_in(tmp_path / "here")
    assert jaxckpt.Run(tmp_path / "elsewhere" / inside).steps() == [2, 3]


@pytest.mark.child
def test_the_folder_above_counts_while_the_run_has_no_folder(tmp_path: Path, change: Callable[[], None]) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path / "here" / "new" / "run", options=FAST)
    assert checkpoints.steps() == []
    change()
    with pytest.raises(jaxckpt.errors.StorageError, match="is no longer the place of this run"):
        checkpoints.save(1, {"w": 1})
    with pytest.raises(jaxckpt.errors.StorageError, match="is no longer the place of this run"):
        checkpoints.close()
    assert not files_in(tmp_path / "here")


@pytest.mark.child
def test_a_running_save_is_not_published_in_another_place(
    tmp_path: Path, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, changed = threading.Event(), threading.Event()
    write = FileWriter.write

    def held(writer: FileWriter, *arguments: Any) -> Any:
        result = write(writer, *arguments)
        begun.set()
        assert changed.wait(60)
        return result

    monkeypatch.setattr(FileWriter, "write", held)
    checkpoints = jaxckpt.Checkpointer(tmp_path / "here", options=FAST)
    checkpoints.save(1, {"w": np.zeros(4)})
    assert begun.wait(60)
    change()
    changed.set()
    with pytest.raises(jaxckpt.errors.StorageError, match=r"moved or unmounted|No such file"):
        checkpoints.wait()
    with pytest.raises(jaxckpt.errors.StorageError, match="is no longer the place of this run"):
        checkpoints.close()
    assert not files_in(tmp_path / "here")


def test_all_processes_raise(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import os
import jaxckpt
from jax.experimental import multihost_utils
with jaxckpt.Checkpointer(args, options=jaxckpt.Options(timeout_seconds=30)) as checkpoints:
    checkpoints.save(1, {"w": 1})
    checkpoints.wait()
    multihost_utils.sync_global_devices("saved")
    if process_id == 0:
        os.rename(args, args + "-moved")
    multihost_utils.sync_global_devices("moved")
    for call in (
        lambda: checkpoints.save(2, {"w": 2}) and checkpoints.wait(),
        lambda: checkpoints.restore(1),
        lambda: checkpoints.restore(),
        lambda: checkpoints.delete(1),
        lambda: checkpoints.steps(),
    ):
        try:
            print(call())
        except (jaxckpt.errors.StorageError, jaxckpt.errors.PeerFailedError) as error:
            print("is no longer the place of this run" in str(error), end=" ")
    multihost_utils.sync_global_devices("called")
    if process_id == 0:
        os.rename(args + "-moved", args)
    multihost_utils.sync_global_devices("moved back")
    print(checkpoints.save(2, {"w": 2}))
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "run"), timeout=90)
    assert [one.stdout for one in done] == ["True True True True True True\n"] * 2
    assert jaxckpt.Run(tmp_path / "run").steps() == [1, 2]


def test_it_continues_once_the_folder_is_back(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with jaxckpt.Checkpointer(run, options=FAST) as checkpoints:
        checkpoints.save(1, {"w": 1})
        checkpoints.wait()
        os.rename(run, moved)
        with pytest.raises(jaxckpt.errors.StorageError, match="run has disappeared"):
            checkpoints.save(2, {"w": 2})
        run.mkdir()
        with pytest.raises(jaxckpt.errors.StorageError, match="run has become another folder"):
            checkpoints.save(2, {"w": 2})
        run.rmdir()
        os.rename(moved, run)
        assert checkpoints.save(2, {"w": 2})
    assert jaxckpt.Run(run).steps() == [1, 2]


def test_a_rule_deletes_no_step_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ours", "theirs"):
        with jaxckpt.Checkpointer(tmp_path / name, options=FAST) as run:
            for step in (1, 2):
                run.save(step, {"w": step})
    (tmp_path / "link").symlink_to("ours")
    checkpoints = jaxckpt.Checkpointer(tmp_path / "link", options=FAST, keep_last=1)
    run_pass = type(checkpoints._deletion)._run_pass

    def after_the_change(deletion: Any) -> None:
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("theirs")
        run_pass(deletion)

    monkeypatch.setattr(type(checkpoints._deletion), "_run_pass", after_the_change)
    checkpoints.save(3, {"w": 3})
    with pytest.raises(jaxckpt.errors.StorageError, match="is no longer the place of this run"):
        checkpoints.wait()
    assert jaxckpt.Run(tmp_path / "theirs").steps() == [1, 2]


@pytest.mark.child
def test_a_folder_that_gets_another_inode_number_is_the_same(tmp_path: Path) -> None:
    """sshfs numbers a folder again after the kernel has forgotten it."""
    if not os.access(DROP_CACHES, os.W_OK):
        pytest.skip("only root can make the kernel forget folders")
    for name in ("run", "free"):
        (tmp_path / "source" / "above" / name).mkdir(parents=True)
    with mounts.sshfs(tmp_path / "source", tmp_path / "mnt") as mount:
        free = mount.path / "above" / "free"
        with jaxckpt.Checkpointer(mount.path / "above" / "run", options=FAST) as checkpoints:
            before = free.stat().st_ino
            for step in (1, 2):
                DROP_CACHES.write_text("2")
                checkpoints.save(step, {"w": step})
                checkpoints.wait()
                assert checkpoints.steps() == [*range(1, step + 1)]
            assert free.stat().st_ino != before
        subprocess.run(["umount", str(mount.path)], check=True)  # it is no longer in use


def opened_in(folder: Path) -> list[str]:
    """What this process has open in a folder."""
    found = list[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


def test_a_closed_checkpointer_holds_no_folder_open(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.save(1, {"w": 1})
        checkpoints.wait()
        assert opened_in(tmp_path) == [str(tmp_path)]
    assert not opened_in(tmp_path)
