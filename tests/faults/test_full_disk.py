"""File systems that are full or read-only."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import victims
from processes import PROGRAMS, environment
from reliability import Fault
from victims import Saver, version

import jaxckpt

pytestmark = pytest.mark.child


def in_a_mount(folder: Path, options: str, program: str, *args: str) -> str:
    """The output of one of `programs` in a separate mount namespace, with a small file system mounted at a folder."""
    mount = f'mount -t tmpfs -o {options} none "$0"'
    unshare = [shutil.which("unshare") or "false", "-m", "sh", "-c"]
    if subprocess.run([*unshare, mount, str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here (needs root, and unshare)")
    done = subprocess.run(
        [
            *unshare,
            f'{mount} && exec "$@"',
            str(folder),
            sys.executable,
            PROGRAMS / f"{program}.py",
            str(folder),
            *args,
        ],
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.fault(
    5,
    "no space or no inodes left, on small file systems of many sizes",
    "StorageError ENOSPC; the earlier checkpoint intact; space given back",
    quick=16,
)
def test_a_disk_that_fills_up(fault: Fault, tmp_path: Path) -> None:
    cases = [
        (kind, more, how)
        for how in ("save", "save_async")
        for kind, most in (("pages", 64), ("inodes", 40))
        for more in range(1, most)
    ]
    said = in_a_mount(tmp_path, "size=64m", "fill_a_disk", json.dumps(list(fault.rounds(cases)))).splitlines()
    assert {"ENOSPC; the old one exists", "there was enough space"} == set(said)
    for end in said:
        fault.saw(end)


@pytest.mark.fault(6, "a read-only folder or file system", "StorageError before anything is copied", quick=4)
def test_a_read_only_folder(fault: Fault, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to switch to a user without write permission")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    jaxckpt.save(tmp_path / "old" / "ckpt", version(1))
    (tmp_path / "closed").mkdir()
    (tmp_path / "mounted").mkdir()
    hows = ("save", "save_async", "Checkpointer")
    cases = [(kind, how) for how in hows for kind in ("closed", "old", "mounted") if (kind, how) != ("old", hows[2])]
    for kind, how in fault.rounds(cases):
        if kind == "mounted":
            (code,) = in_a_mount(tmp_path / kind, "ro", "save_where_refused", how).splitlines()
            assert int(code) == errno.EROFS
            fault.saw("StorageError EROFS")
            continue
        before = sorted(tmp_path.rglob("*"))
        for path in before:
            path.chmod(path.stat().st_mode & 0o555)
        with Saver(victims.save_where_refused, str(tmp_path / kind / "ckpt"), how, 65534) as saver:
            saver.go()
            (said,) = saver.end()
        assert (said["error"], said["errno"]) == ("StorageError", errno.EACCES), said
        assert sorted(tmp_path.rglob("*")) == before
        fault.saw("StorageError EACCES")
    assert victims.version_at(tmp_path / "old" / "ckpt") == 1
