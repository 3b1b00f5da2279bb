"""A checkpoint is there whole or not at all, whatever stops the save that makes or replaces it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


def version(number: int) -> dict[str, Any]:
    """The tree that a saver saves as this version."""
    return {
        "version": number,
        "a": np.full((64, 64), number),
        "b": [np.full(999, number), np.full(999, -number)],
    }


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


def saver(path: Path, first: int, count: int, *before: str, program: str = SAVER) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", program, str(path), str(first), str(count)],
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


def injected(path: Path, calls: str, fault: str) -> tuple[str, str, int]:
    """(stdout, stderr, exit status) of a saver of version 2, with a fault in its system calls."""
    trace = ["-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    child = saver(path, 2, 1, STRACE or "", *trace)
    out, err = child.communicate(timeout=60)
    return out, err, child.returncode


def sweep(
    folder: Path, calls: str, fault: str, old: int | None, check: Callable[[Path, str, str], None], start: int = 1
) -> int:
    """Strike at the 1st, 2nd, … (from `start` on) of some calls until a save gets through; how many were struck.

    strace counts the calls of each thread apart, so of tensorstore's threads and the main one the first is struck.
    """
    begun, base = itertools.count(start), folder / "base"
    struck: list[int] = []
    if old:
        jaxckpt.save(base, version(old))

    def strike(nth: int) -> bool:
        path = folder / f"{calls.replace(',', '-')}{nth}"
        if old:
            shutil.copytree(base, path)
        out, err, status = injected(path, calls, fault.format(nth=nth))
        if "saved" in out:
            assert version_at(path) == 2
            return False
        assert status != 0, err
        assert "ready" in out, f"the fault came before the save: {err}"
        struck.append(nth)
        check(path, out, err)
        # Whatever was left, the next save works, and takes it away.
        jaxckpt.save(path, version(3), overwrite=True)
        assert version_at(path) == 3
        assert len(data_folders(path)) == 1, [os.listdir(path / name) for name in data_folders(path)]
        shutil.rmtree(path)
        return True

    with ThreadPoolExecutor(2) as pool:  # each save is a process of its own
        while all(pool.map(strike, itertools.islice(begun, 2))):
            assert len(struck) < 60, "no save gets through"
    return len(struck)


@needs_strace
@pytest.mark.parametrize(
    ("calls", "least", "old"),
    [
        ("rename", 2, 1),
        ("rename", 1, None),  # counted in each thread, and objects are renamed in several at once
        ("fsync", 12, 1),
        ("mkdir", 3, 1),
        ("writev", 1, None),
        ("unlink,unlinkat,rmdir", 6, 1),
    ],
)
def test_killed_at_any_system_call_the_old_or_the_new_is_there(
    tmp_path: Path, calls: str, least: int, old: int | None
) -> None:
    def check(path: Path, out: str, err: str) -> None:
        assert version_at(path) in ((2,) if "unlink" in calls else (old, 2))

    assert sweep(tmp_path, calls, "signal=KILL:when={nth}", old, check) >= least


@needs_strace
def test_killed_at_any_write_the_rest_is_swept(tmp_path: Path) -> None:
    def check(path: Path, out: str, err: str) -> None:
        assert version_at(path) in (1, 2)

    # The first write is "ready" itself.
    assert sweep(tmp_path, "write", "signal=KILL:when={nth}", 1, check, start=2) >= 4


def must_raise(code: int) -> Callable[[Path, str, str], None]:
    def check(path: Path, out: str, err: str) -> None:
        assert f"jaxckpt.StorageError: [Errno {code}]" in err, err
        assert version_at(path) == 1, "it raised, yet it published"
        assert len(data_folders(path)) == 1, "it raised, yet it left data"

    return check


@needs_strace
def test_a_disk_that_no_longer_syncs_is_an_error_and_nothing_is_published(tmp_path: Path) -> None:
    assert sweep(tmp_path, "fsync", "error=EIO:when={nth}+", 1, must_raise(errno.EIO)) >= 12


@needs_strace
def test_one_error_in_the_last_syncs_is_an_error_and_nothing_is_published(tmp_path: Path) -> None:
    last = 9 + len(tmp_path.parents)  # each folder above is synced, then the manifest
    assert sweep(tmp_path, "fsync", "error=EIO:when={nth}", 1, must_raise(errno.EIO), start=last - 4) >= 2


@needs_strace
def test_an_io_error_in_a_rename_is_raised_and_nothing_is_left(tmp_path: Path) -> None:
    assert sweep(tmp_path, "rename", "error=EIO:when={nth}+", 1, must_raise(errno.EIO)) >= 2


@needs_strace
def test_a_disk_that_fills_up_in_an_object_is_named(tmp_path: Path) -> None:
    assert sweep(tmp_path, "writev", "error=ENOSPC:when={nth}+", 1, must_raise(errno.ENOSPC)) >= 1


class Disk:
    """What of a traced program's work would be gone after a power loss: data not synced, names not synced."""

    def __init__(self) -> None:
        self.data: dict[str, int] = {}
        """When each file was last written to, since it was last synced."""
        self.names: dict[str, dict[str, int]] = {}
        """For each folder, the names that came or went since it was last synced, and when."""

    def changed(self, path: str, now: int) -> None:
        self.names.setdefault(os.path.dirname(path), {})[os.path.basename(path)] = now

    def synced(self, path: str, begun: int) -> None:
        if self.data.get(path, begun) < begun:
            del self.data[path]
        self.names[path] = {name: at for name, at in self.names.get(path, {}).items() if at >= begun}

    def renamed(self, old: str, new: str, now: int) -> None:
        for table in (self.data, self.names):
            for path in [path for path in table if path == old or path.startswith(f"{old}/")]:
                table[new + path[len(old) :]] = table.pop(path)  # pyright: ignore
        self.names.get(os.path.dirname(old), {}).pop(os.path.basename(old), None)
        self.changed(new, now)

    def unsafe(self, top: Path) -> set[str]:
        """Whatever below a folder, and of its own name, would be gone."""
        below = {path for path in self.data if path.startswith(f"{top}/")}
        for folder, names in self.names.items():
            paths = [f"{folder}/{name}" for name in names]
            below.update(path for path in paths if f"{path}/".startswith(f"{top}/") or f"{top}/".startswith(f"{path}/"))
        return below


CALL = re.compile(r"^(\d+) +(\w+)\((.*)$")


def replayed(log: str) -> Iterator[tuple[str, list[str], int, int]]:
    """(call, paths, when it began, when it ended) of each system call that succeeded, in the order they ended."""
    begun: dict[str, tuple[str, str, int]] = {}
    for now, line in enumerate(log.splitlines()):
        thread, _, rest = line.partition(" ")
        if found := re.match(r" *<\.\.\. (\w+) resumed>(.*)", rest):
            name, text, since = begun.pop(thread)
            assert name == found[1]
            text += found[2]
        elif found := CALL.match(line):
            name, text, since = found[2], found[3], now
            if "<unfinished ...>" in text:
                begun[thread] = name, text, since
                continue
        else:
            continue
        if " = -1 " not in text:
            opened = name != "openat" or "O_CREAT" in text
            paths = re.findall(r'"(/[^"]*)"' if name in ("rename", "mkdir", "openat") else r"^\d+<([^>]*)>", text)
            if opened and paths:
                yield name, paths, since, now


@needs_strace
@pytest.mark.parametrize("sync", [True, False])
def test_after_a_power_loss_what_was_published_is_whole(tmp_path: Path, sync: bool) -> None:
    path, log = tmp_path / "new" / "deeper" / "ckpt", tmp_path / "log"
    calls = "trace=fsync,fdatasync,rename,openat,mkdir,write,writev,pwrite64,pwritev,ftruncate"
    program = SAVER.replace("jaxckpt.Options(", f"jaxckpt.Options(sync={sync}, ")
    child = saver(path, 1, 1, STRACE or "", "-f", "-qq", "-y", "-e", calls, "-o", str(log), program=program)
    out, err = child.communicate(timeout=60)
    assert "saved 1" in out, err
    (data,) = data_folders(path)
    disk, seen, unsafe = Disk(), set[str](), set[str]()
    for call, paths, since, now in replayed(log.read_text()):
        seen.add(call)
        match call:
            case "fsync" | "fdatasync":
                disk.synced(paths[0], since)
            case "mkdir" | "openat":
                disk.changed(paths[0], now)
            case "rename":
                if paths[1] == str(path / "manifest.json"):
                    assert str(path / data) == os.path.dirname(paths[0])
                    unsafe = disk.unsafe(tmp_path)
                    assert not sync or paths[0] not in disk.data, "the manifest itself is synced before it is published"
                    seen.add("published")
                disk.renamed(paths[0], paths[1], now)
            case _:
                disk.data[paths[0]] = now
    assert {"published", "mkdir", "openat", "rename", "write", "writev"} <= seen
    if not sync:
        stored = {str(file) for file in (path / data).rglob("*")}
        assert stored <= unsafe, "nothing was asked to be synced, and this test would see it"
        return
    # The writer's note and the manifest's first name serve only while the save runs.
    passing = {str(path / data / name) for name in ("writer.json", "manifest.json")}
    assert unsafe <= passing, f"not on disk when it was published: {unsafe - passing}"
    assert disk.unsafe(tmp_path) <= passing, "the published name itself is on disk when save returns"


def test_a_live_writers_data_is_not_swept(tmp_path: Path) -> None:
    from jaxckpt._folder import Folder

    store = Folder("", str(tmp_path / "ckpt"))
    writer = store.begin("live", None)
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
from jaxckpt import _staging
_staging.Staged.data = None  # nothing is copied before the folder is known to be ours
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
