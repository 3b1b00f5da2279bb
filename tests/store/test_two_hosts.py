"""Two hosts that save to one folder, over mounts whose locks do not reach each other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mounts
import numpy as np
import processes
import pytest

import jaxckpt
from jaxckpt._model.file_names import MANIFEST, SEAL, WRITER
from jaxckpt._store import folder as _folder
from jaxckpt._store.folder import Folder
from jaxckpt._store.transaction import Transaction

pytestmark = pytest.mark.child


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[tuple[Path, Path]]:
    """One folder, `ckpt`, as two hosts with one host name see it over SFTP."""
    (tmp_path / "shared").mkdir()
    with (
        mounts.sshfs(tmp_path / "shared", tmp_path / "one") as one,
        mounts.sshfs(tmp_path / "shared", tmp_path / "other") as other,
    ):
        yield one.path / "ckpt", other.path / "ckpt"


def sealed(save_id: str) -> bytes:
    """The smallest content that counts as an undamaged manifest."""
    body = f'{{"save_id":"{save_id}"'.encode()
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def test_of_two_first_saves_over_sftp_one_fails(hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP has no error for a name that exists: the link fails as on a file system without hard links."""
    together, link = threading.Barrier(2), os.link

    def linked_together(old: str, new: str, **named: Any) -> None:
        if new.endswith(f"ckpt/{MANIFEST}"):
            together.wait(10)
        link(old, new, **named)

    def save(path: Path, save_id: str) -> str | None:
        folder = Folder(str(path), str(path))
        with contextlib.closing(Transaction(folder, save_id, None)) as transaction:
            try:
                transaction.commit(sealed(save_id), sync=False)
            except jaxckpt.errors.CheckpointExistsError:
                return None
        return save_id

    monkeypatch.setattr(os, "link", linked_together)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in range(12):
            one, other = hosts[0] / f"{number}/ckpt", hosts[1] / f"{number}/ckpt"
            saved = [*pool.map(save, (one, other), (f"{number:032x}", f"{number + 16:032x}"))]
            winners = [save_id for save_id in saved if save_id is not None]
            assert [Folder("", str(path)).read(MANIFEST) for path in (one, other)] == [*map(sealed, winners)] * 2


@pytest.mark.parametrize("cache_mode", ["writes", "full"])
def test_a_file_system_whose_links_fail_with_an_input_error(tmp_path: Path, cache_mode: str) -> None:
    (tmp_path / "shared").mkdir()
    with mounts.rclone(tmp_path / "shared", tmp_path / "mount", cache_mode) as mount:
        path = mount.path / "ckpt"
        for number in range(2):
            jaxckpt.save(path, {"w": np.full(1000, number)}, overwrite=True)
            assert (jaxckpt.load_numpy(path)["w"] == number).all()
        assert len(os.listdir(path)) == 2


def test_a_file_system_that_hides_open_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    with mounts.rclone(tmp_path / "shared", tmp_path / "mount", "off") as mount:
        with pytest.raises(jaxckpt.errors.StorageError, match=r"open for writing.*--vfs-cache-mode writes"):
            jaxckpt.save(mount.path / "ckpt", {"w": np.zeros(10)})
        assert not list((mount.path / "ckpt").glob("data-*"))


def test_a_writer_is_alive_if_its_lock_cannot_be_seen(hosts: tuple[Path, Path]) -> None:
    one, other = (Folder(str(path), str(path)) for path in hosts)
    writer = Transaction(one, mine := "0" * 32, None)
    other.put(f"{writer.data}/object", b"data")
    assert other.sweep(None), "it may still publish"
    other.clear(evict=False)
    writer.commit(sealed(mine), sync=True)
    writer.close()
    assert one.read(f"{writer.data}/object") == b"data"


def test_a_dead_save_of_another_host_is_swept_after_the_next_save(hosts: tuple[Path, Path]) -> None:
    """Before, it may still publish, for all that the other host knows."""
    writer = Transaction(Folder("", str(hosts[0])), "0" * 32, None)
    os.close(writer.handle or 0)  # like the death of its process
    jaxckpt.save(hosts[1], {"w": np.zeros(3)})
    assert not (hosts[1] / writer.data).exists()
    assert jaxckpt.load_numpy(hosts[0])["w"].shape == (3,)


def test_a_save_whose_data_was_taken_for_dead_fails(hosts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in copies of a virtual machine, whose kernels have the same id."""
    monkeypatch.setattr(_folder, "_shows_lock", lambda note, scope: True)
    one, other = (Folder(str(path), str(path)) for path in hosts)
    writer = Transaction(one, mine := "0" * 32, None)
    link = os.link

    def overtaken(old: str, new: str, **named: Any) -> None:
        os.unlink(hosts[1] / writer.data / WRITER)  # by the sweep, which has read the manifest already
        link(old, new, **named)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(jaxckpt.errors.StorageError, match="disappeared while it was being written"):
        one.publish(writer.data, sealed(mine), None, sync=True)
    assert [one.read(MANIFEST), other.read(MANIFEST)] == [None, None]
    os.close(writer.handle or 0)


def test_containers_of_one_kernel_see_each_others_locks(tmp_path: Path) -> None:
    """Whatever their host names are. A dead save is swept at once, and a live one is not."""
    (tmp_path / "shared").mkdir()
    program = (
        "import sys; from jaxckpt._store.folder import Folder; from jaxckpt._store.transaction import Transaction;"
        " print(Transaction(Folder('', sys.argv[1]), '0' * 32, None).data, flush=True); sys.stdin.read()"
    )
    with mounts.sshfs(tmp_path / "shared", tmp_path / "mount") as mount:
        store = Folder("", str(mount.path / "ckpt"))
        command = [*mounts.as_host("container"), sys.executable, "-c", program, store.folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=processes.environment(1)) as writer:
            try:
                data = writer.stdout.readline().decode().strip() if writer.stdout else ""
                assert data
                store.clear()
                assert (tmp_path / "shared/ckpt" / data).exists()
            finally:
                writer.kill()
            writer.wait(30)
        assert not store.sweep(None)
        assert not (tmp_path / "shared/ckpt" / data).exists()
