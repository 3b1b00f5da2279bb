"""What another host has changed or deleted: real file systems that cache, and ESTALE at system calls."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import mounts
import pytest
import victims
from victims import needs_strace, version, version_at

import jaxckpt
from jaxckpt._model.file_names import MANIFEST
from jaxckpt._options import Options
from jaxckpt._store.store_path import store_at
from jaxckpt._store.transaction import Transaction

pytestmark = pytest.mark.child

Hosts = tuple[Path, Path]
"""The same folder as two hosts see it."""


@pytest.fixture(scope="module")
def gluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    folder = tmp_path_factory.mktemp("gluster")
    with mounts.glusterfs(folder / "brick", folder / "a", folder / "b") as (a, b):
        yield a.path, b.path


@pytest.fixture(scope="module")
def sshfs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    folder = tmp_path_factory.mktemp("sshfs")
    (folder / "files").mkdir()
    with mounts.sshfs(folder / "files", folder / "a") as a, mounts.sshfs(folder / "files", folder / "b") as b:
        yield a.path, b.path


def replace(path: Path, number: int) -> None:
    """Save a version whose manifest has another length than that of the version before."""
    jaxckpt.save(path, version(number), metadata="x" * 100 * number, overwrite=True, options=victims.OPTIONS)


# Real file systems ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gluster", "sshfs"])
def test_reads_see_what_another_host_has_just_published(name: str, request: pytest.FixtureRequest) -> None:
    here, there = request.getfixturevalue(name)
    for number in range(8):
        replace(here / "overwritten", number)
        assert version_at(there / "overwritten") == number
    assert jaxckpt.verify(there / "overwritten").ok


def test_a_host_with_old_content_deletes_nothing(tmp_path: Path) -> None:
    """Manifests of one length, and a mount that keeps the content of files."""
    options = ("-o", "auto_cache,dir_cache=no")
    (tmp_path / "served").mkdir()
    with (
        mounts.sshfs(tmp_path / "served", tmp_path / "a", *options) as one,
        mounts.sshfs(tmp_path / "served", tmp_path / "b", *options) as other,
    ):
        for number in range(4):
            step = one.path / f"run{number}" / "00000001"
            jaxckpt.save(step, version(1), options=victims.OPTIONS)
            assert version_at(other.path / f"run{number}") == 1
            jaxckpt.save(step, version(2), overwrite=True, options=victims.OPTIONS)
            jaxckpt.Checkpointer(other.path / f"run{number}").close()
            assert version_at(tmp_path / "served" / f"run{number}") == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_later_of_two_savers_is_told(gluster: Hosts, overwrite: bool) -> None:
    here, there = (folder / f"savers-{overwrite}" for folder in gluster)
    if overwrite:
        replace(here, 1)
    store = store_at(there, Options())
    previous = store.read(MANIFEST)
    with contextlib.closing(Transaction(store, "1" * 32, previous)) as transaction:
        replace(here, 2)
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="another save published"):
            transaction.commit(b"{}", sync=False)
    assert version_at(there) == version_at(here) == 2


def test_follow_outlives_deletions_by_another_host(gluster: Hosts) -> None:
    here, there = (folder / "run" for folder in gluster)
    seen: list[int] = []
    with jaxckpt.Checkpointer(here, keep_last=1, background=False, options=victims.OPTIONS) as run:
        run.save(0, version(0))
        for step in jaxckpt.Run(there).follow(timeout_seconds=0.2, poll_seconds=0.01):
            assert victims.require_version(step.restore()) == step.number
            seen.append(step.number)
            if step.number < 6:
                for later in range(step.number + 1, step.number + 4):  # deletes the two before it
                    run.save(later, version(later))
    assert seen == [0, 3, 6]


def test_lengths_of_objects_that_another_host_has_written_since(sshfs: Hosts) -> None:
    here, there = (folder / "lengths" for folder in sshfs)
    replace(here, 1)
    (whole,) = here.glob("data-*/0000*/c/0/0/0")
    content = whole.read_bytes()
    for length in (100, len(content)):
        os.truncate(whole, length)
        with whole.open("r+b") as file:
            file.write(content[:length])
        if length == len(content):
            assert version_at(there) == 1
            assert jaxckpt.verify(there).ok
        else:
            assert (there / whole.relative_to(here)).stat().st_size == length
            problems = jaxckpt.verify(there, quick=True).problems
            assert {problem.reason for problem in problems} == {f"is {length} bytes long, expected {len(content)}"}


# ESTALE at system calls -----------------------------------------------------------------------------------

READS = "openat,newfstatat,read,pread64,preadv,getdents64"


@needs_strace
@pytest.mark.parametrize("first", [1, 4])
def test_reads_try_again_after_estale(tmp_path: Path, first: int) -> None:
    replace(tmp_path / "ckpt", 1)
    said, struck = run_stale(victims.read, tmp_path / "ckpt", 4, False, fault=f"when={first}+7")
    assert said == [{"bit-exact": 4}]
    assert struck >= 10


@needs_strace
def test_follow_tries_again_after_estale(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 2)
    said, struck = run_stale(victims.follow, tmp_path / "run", fault="when=2+7")
    assert said == [0, 1]
    assert struck >= 10


@needs_strace
def test_saves_try_again_after_estale(tmp_path: Path) -> None:
    replace(tmp_path / "ckpt", 1)
    log = tmp_path / "log"
    calls = "mkdir,openat,newfstatat,getdents64,unlink"
    said, _ = victims.run_traced(
        victims.replace, str(tmp_path / "ckpt"), 2, log=log, calls=calls, fault="error=ESTALE:when=2+7"
    )
    assert said == [2]
    assert log.read_text(errors="replace").count("INJECTED") >= 5
    assert version_at(tmp_path / "ckpt") == 2


@needs_strace
def test_estale_that_does_not_pass_means_deleted(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 2)
    step = tmp_path / "run" / "00000000"
    (copy,) = step.glob("data-*/manifest-copy.json")
    said, _ = run_stale(victims.follow, tmp_path / "run", fault="when=1+", paths=[step / MANIFEST, copy])
    assert said == [1]
    (lost,), _ = run_stale(victims.follow, tmp_path / "run", fault="when=1+", paths=[step / MANIFEST])
    assert lost["error"] == "ManifestError", "a deletion removes the copy first"


@needs_strace
def test_a_run_that_cannot_be_listed_is_not_a_new_run(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 1)
    (said,), _ = run_stale(victims.list_steps, tmp_path / "run", fault="when=1+", paths=[tmp_path / "run"])
    assert (said["error"], said["errno"]) == ("StorageError", errno.ESTALE)


@needs_strace
def test_a_save_into_a_folder_that_stays_stale_raises_soon(tmp_path: Path) -> None:
    replace(tmp_path / "ckpt", 1)
    (said,), _ = run_stale(victims.replace, tmp_path / "ckpt", 2, fault="when=1+", paths=[tmp_path / "ckpt"])
    assert (said["error"], said["errno"]) == ("StorageError", errno.ESTALE)
    assert version_at(tmp_path / "ckpt") == 1


def save_steps(folder: Path, count: int) -> None:
    with jaxckpt.Checkpointer(folder, background=False, options=victims.OPTIONS) as run:
        for number in range(count):
            run.save(number, version(number))


def run_stale(
    program: Callable[..., None], folder: Path, *args: object, fault: str, paths: Iterable[Path] = ()
) -> tuple[list[Any], int]:
    """Run a program that reads a folder while its system calls on these paths, by default all in the folder, raise
    ESTALE. Returns what it said, and the number of these errors."""
    log = folder.with_name("log")
    said, _ = victims.run_traced(
        program,
        str(folder),
        *args,
        log=log,
        calls=READS,
        fault=f"error=ESTALE:{fault}",
        paths=[*paths] or [folder, *folder.rglob("*")],
    )
    return said, log.read_text(errors="replace").count("INJECTED")
