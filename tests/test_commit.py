"""A checkpoint is there whole or not at all, whatever stops the save that makes or replaces it."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from processes import environment

import jaxckpt

STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed (apt-get install strace)")

# Saves version after version to one path; tells which one was acknowledged.
SAVER = """
import sys, numpy as np, jaxckpt
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = jaxckpt.Options(chunk_bytes=4096, object_bytes=16384)
print("ready", flush=True)
for version in range(first, first + count):
    tree = {"version": version, "a": np.full((64, 64), version), "b": [np.full(999, version), np.full(999, -version)]}
    jaxckpt.save(path, tree, overwrite=True, options=options)
    print("saved", version, flush=True)
"""


def version_at(path: Path) -> int | None:
    """The version that the path holds, each of its leaves checked; None where it holds none."""
    try:
        tree = jaxckpt.load_numpy(path)
    except jaxckpt.NotACheckpointError:
        return None
    version = tree["version"]
    assert (tree["a"] == version).all()
    assert (tree["b"][0] == version).all()
    assert (tree["b"][1] == -version).all()
    return version


def saver(path: Path, first: int, count: int, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", SAVER, str(path), str(first), str(count)],
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def acknowledged(out: str) -> int:
    return max((int(found) for found in re.findall(r"saved (\d+)", out)), default=0)


def data_folders(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if "data-" in name]


def test_killed_at_random_the_last_acknowledged_save_is_there(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    draw = random.Random(0)
    last = 0
    for _ in range(8):
        child = saver(path, last + 1, 10_000)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.15))
        child.send_signal(signal.SIGKILL)
        out, _ = child.communicate(timeout=30)
        done = max(last, acknowledged(out))
        found = version_at(path) or 0
        assert found in (done, done + 1), "the last acknowledged save, or the one that was being acknowledged"
        last = found
    jaxckpt.save(path, {"x": 1}, overwrite=True)
    assert len(data_folders(path)) == 1, "what the killed saves left is swept"


@needs_strace
@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir", "unlink,unlinkat,rmdir", "writev"])
def test_killed_at_the_nth_system_call_the_old_or_the_new_is_there(tmp_path: Path, call: str) -> None:
    path = tmp_path / "ckpt"
    jaxckpt.save(path, {"version": 1, "a": np.full((64, 64), 1), "b": [np.full(999, 1), np.full(999, -1)]})
    last, killed = 1, 0
    for nth in (1, 2, 4, 7, 11):
        inject = ["-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={nth}"]
        child = saver(path, last + 1, 2, STRACE or "", *inject)
        out, _ = child.communicate(timeout=60)
        done = max(last, acknowledged(out))
        found = version_at(path)
        assert found in (done, done + 1)
        killed += "ready" in out and child.returncode != 0
        last = found or 0
    assert killed >= 2, "the injection struck"
    jaxckpt.save(path, {"x": 1}, overwrite=True)
    assert len(data_folders(path)) == 1


@needs_strace
@pytest.mark.parametrize(("call", "nth"), [("fsync", 1), ("fsync", 4), ("fsync", 9), ("rename", 1), ("rename", 2)])
def test_an_io_error_is_raised_and_nothing_is_published(tmp_path: Path, call: str, nth: int) -> None:
    path = tmp_path / "ckpt"
    version_one = {"version": 1, "a": np.full((64, 64), 1), "b": [np.full(999, 1), np.full(999, -1)]}
    jaxckpt.save(path, version_one)
    inject = ["-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:error=EIO:when={nth}+"]
    child = saver(path, 2, 1, STRACE or "", *inject)
    out, err = child.communicate(timeout=60)
    assert "saved" not in out
    assert "StorageError" in err
    assert version_at(path) == 1


@needs_strace
def test_everything_is_synced_before_it_is_published(tmp_path: Path) -> None:
    path, log = tmp_path / "new" / "ckpt", tmp_path / "log"
    calls = "trace=fsync,fdatasync,rename,openat,mkdir,write,writev,close"
    child = saver(path, 1, 1, STRACE or "", "-f", "-qq", "-y", "-e", calls, "-o", str(log))
    out, err = child.communicate(timeout=60)
    assert "saved 1" in out, err
    lines = log.read_text().splitlines()
    published = next(i for i, line in enumerate(lines) if "rename(" in line and line.count("manifest.json") == 2)
    (data,) = data_folders(path)

    def synced(until: int, begin: int = 0) -> set[str]:
        # An object is synced under the name that tensorstore gives it until it is whole.
        found = re.findall(r"f(?:data)?sync\(\d+<([^>]*?)(?:_[0-9a-f]+\.__lock)?>", "\n".join(lines[begin:until]))
        return set(found)

    before = synced(published)
    for found in (path / data).rglob("*"):
        assert str(found) in before, f"{found} was not synced before the manifest was published"
    assert {str(path), str(path / data), str(path.parent), str(tmp_path)} <= before
    assert str(path / data / "manifest.json") in before
    assert str(path) in synced(len(lines), published), "the rename itself is synced"


def test_two_savers_on_one_path_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    for round_ in range(10):
        shutil.rmtree(path, ignore_errors=True)
        outcomes: list[str] = []

        def attempt(version: int, outcomes: list[str] = outcomes) -> None:
            tree = {
                "version": version,
                "a": np.full((64, 64), version),
                "b": [np.full(999, version), np.full(999, -version)],
            }
            try:
                jaxckpt.save(path, tree)
                outcomes.append(f"saved {version}")
            except jaxckpt.CheckpointExistsError:
                outcomes.append("refused")

        savers = [threading.Thread(target=attempt, args=(10 * round_ + i + 1,)) for i in range(3)]
        for thread in savers:
            thread.start()
        for thread in savers:
            thread.join(timeout=60)
        assert sorted(outcome.split()[0] for outcome in outcomes) == ["refused", "refused", "saved"]
        assert f"saved {version_at(path)}" in outcomes
        assert len(data_folders(path)) == 1


def test_a_live_writers_data_is_not_swept(tmp_path: Path) -> None:
    from jaxckpt._store import Store

    store = Store.at(tmp_path / "ckpt")
    writer = store.begin("live")
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert (tmp_path / "ckpt" / "data-live").is_dir()
    os.close(writer.handle or 0)  # as when its process dies
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    assert not (tmp_path / "ckpt" / "data-live").exists()


def test_a_full_disk_is_an_error_of_its_own_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import errno, os, numpy as np, jaxckpt
path = {str(tmp_path)!r} + "/small/ckpt"
jaxckpt.save(path, {{"x": np.arange(1000)}})
for megabytes in (1, 2, 3, 4, 9):
    try:
        jaxckpt.save(path, {{"y": np.ones(megabytes << 17)}}, overwrite=True)
    except jaxckpt.StorageError as error:
        assert error.errno == errno.ENOSPC, error
        print("full")
    assert (jaxckpt.load_numpy(path).get("x", np.arange(1000)) == np.arange(1000)).all()
    assert len(os.listdir(path)) == 2, os.listdir(path)
    jaxckpt.save(path, {{"x": np.arange(1000)}}, overwrite=True)
"""
    (tmp_path / "small").mkdir()
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}/small"
    if (
        unshare is None
        or subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("a tmpfs of its own cannot be mounted here (needs root)")
    command = [unshare, "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("full") >= 2


def test_a_folder_that_may_not_be_written_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    program = f"""
import os, numpy as np, jaxckpt
os.setuid(65534)
try:
    jaxckpt.save({str(tmp_path)!r} + "/closed/ckpt", {{"x": np.arange(3)}})
except jaxckpt.StorageError as error:
    print(error.errno, error)
"""
    if os.getuid() != 0:
        pytest.skip("needs root, to become a user who may not write")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=60, check=False)
    if "Error importing" in done.stderr or "PermissionError" in done.stderr or "ModuleNotFound" in done.stderr:
        pytest.skip("another user cannot read this Python's own files")
    assert done.stdout.startswith(f"{errno.EACCES} "), done.stdout + done.stderr
