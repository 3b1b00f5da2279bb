"""Stores: URLs, writers, locks, and remains of failed saves, on file systems and object stores."""

from __future__ import annotations

import errno
import fcntl
import functools
import inspect
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.file_names import MANIFEST, WRITER
from jaxckpt._store import folder as _folder
from jaxckpt._store import storage_errors
from jaxckpt._store.folder import Folder
from jaxckpt._store.store_path import store_at
from jaxckpt._store.transaction import Transaction


def make(factor: float = 1.0) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    w = jnp.arange(1024.0).reshape(32, 32) * factor + 1
    return {
        "w": jax.device_put(w, NamedSharding(mesh, P("a", "b"))),
        "zeros": jnp.zeros((40, 10)),
        "layers": [jnp.full(64, factor * i) for i in range(5)],
        "n": np.arange(7),
    }


SMALL = jaxckpt.Options(chunk_bytes=256, object_bytes=1024)


# Object stores' protocol ----------------------------------------------------------------------------------


def test_urls_of_tensorstore_use_the_same_protocol() -> None:
    url = "memory://test_store/ckpt"
    tree = make()
    jaxckpt.save(url, tree, options=SMALL)
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.restore(url), tree)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        jaxckpt.save(url, tree)
    jaxckpt.save(url, {"x": 1}, overwrite=True)
    assert jaxckpt.restore(url) == {"x": 1}
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.open("memory://test_store/other")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    jaxckpt.save(f"file://{tmp_path}/ckpt", {"x": 1})
    assert jaxckpt.restore(tmp_path / "ckpt") == {"x": 1}


def test_a_live_writers_data_is_not_swept(tmp_path: Path) -> None:
    writer = Transaction(Folder("", str(tmp_path / "ckpt")), live := uuid.uuid4().hex, None)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert (tmp_path / "ckpt" / f"data-{live}").is_dir()
    os.close(writer.handle or 0)  # like the death of its process
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    assert not (tmp_path / "ckpt" / f"data-{live}").exists()


def test_a_hard_link_to_a_file_that_is_replaced_keeps_its_content(tmp_path: Path) -> None:
    store = Folder("", str(tmp_path))
    store.put("note", b"old")
    (tmp_path / "copy").hardlink_to(tmp_path / "note")
    store.replace("note", b"new")
    assert (store.read("note"), store.read("copy"), store.names()) == (b"new", b"old", ["copy", "note"])


def test_the_target_of_a_link_is_known(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = Folder("", str(tmp_path))
    assert store.child("link").link_target() == os.path.realpath(tmp_path / "real")
    assert store.child("real").link_target() is None


@pytest.mark.parametrize("note", [b"[1]", b"1", b"[" * 4000])
def test_a_damaged_note_of_a_writer_does_not_stop_a_save(tmp_path: Path, note: bytes) -> None:
    Transaction(Folder("", str(tmp_path / "ckpt")), other := uuid.uuid4().hex, None)
    (tmp_path / "ckpt" / f"data-{other}" / WRITER).write_bytes(note)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert jaxckpt.restore(tmp_path / "ckpt") == {"x": 1}


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_users_own_data_folder_is_not_swept(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run" if place == "local" else f"memory://own-data-{tmp_path.name}"
    store = store_at(path, jaxckpt.Options())
    (tmp_path / "run" / "data-raw").mkdir(parents=True)
    store.put("data-raw/a.csv", b"mine")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="data-raw"):
        jaxckpt.save(path, {"x": 1})
    store.remove("data-raw/a.csv")
    store.delete("data-raw")
    jaxckpt.save(path, {"x": 1})
    (tmp_path / "run" / "data-raw").mkdir(exist_ok=True)
    store.put("data-raw/a.csv", b"mine")
    jaxckpt.save(path, {"x": 2}, overwrite=True)
    assert store.read("data-raw/a.csv") == b"mine"
    assert jaxckpt.restore(path) == {"x": 2}


def test_waiting_for_a_lock_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    monkeypatch.setattr(_folder, "_LOCK_SECONDS", 0.5)
    with Folder("", str(tmp_path / "ckpt")).locked():
        for timeout_seconds in (300, 0.2):
            options = jaxckpt.Options(timeout_seconds=timeout_seconds)
            with pytest.raises(jaxckpt.errors.StorageError, match="held the lock"):
                jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True, options=options)
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)


def test_remains_that_cannot_be_deleted_are_reported_as_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxckpt")
    store = Folder("", str(tmp_path / "ckpt"))
    os.close(Transaction(store, uuid.uuid4().hex, None).handle or 0)
    with monkeypatch.context() as patched:
        patched.setattr(_folder, "remove_folder", lambda *_: None)  # as in another user's folder
        assert store.sweep(None)
    assert not caplog.messages
    assert not store.sweep(None)
    assert "left by a save that failed" in caplog.text


# Hosts whose locks do not work across hosts ---------------------------------------------------------------


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks. On NFS, the locks of folders do not reach other hosts."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_of_two_first_saves_at_the_same_moment_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lockless: None
) -> None:
    """The other host publishes after this one has found no manifest."""
    one, other = (Folder("", str(tmp_path / "ckpt")) for _ in range(2))
    data, others = Transaction(one, "0" * 32, None).data, Transaction(other, "1" * 32, None).data
    link = os.link

    def overtaken(*args: Any, **named: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        other.publish(others, b"theirs", None, sync=False)
        link(*args, **named)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="another save published"):
        one.publish(data, b"ours", None, sync=False)
    assert one.read(MANIFEST) == b"theirs"
    assert one.published_data() == [others]


def test_nfs_may_report_that_its_own_new_link_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(*args: Any, **named: Any) -> None:
        link(*args, **named)
        link(*args, **named)

    monkeypatch.setattr(os, "link", twice)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert jaxckpt.restore(tmp_path / "ckpt") == {"x": 1}


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    for number in range(2):
        jaxckpt.save(tmp_path / "ckpt", {"x": number}, overwrite=True)
        assert jaxckpt.restore(tmp_path / "ckpt") == {"x": number}


def test_a_second_name_of_the_manifest_is_not_written_to(tmp_path: Path) -> None:
    """A process was killed after it had linked the manifest. The manifest is then republished without some leaves."""
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    manifest = tmp_path / "ckpt" / MANIFEST
    content = manifest.read_bytes()
    data = f"data-{json.loads(content)['save_id']}"
    os.link(manifest, tmp_path / "ckpt" / data / MANIFEST)
    os.link(manifest, tmp_path / "seen by a reader")
    Folder("", str(tmp_path / "ckpt")).republish(data, b"less", content, sync=True)
    assert manifest.read_bytes() == b"less"
    assert (tmp_path / "seen by a reader").read_bytes() == content
    assert not (tmp_path / "ckpt" / data / MANIFEST).exists()


def test_a_save_works_while_another_host_deletes_old_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, using an open folder fails if another host has deleted it."""
    scandir, raised = os.scandir, list[int]()

    def stale(folder: Any) -> Any:
        if isinstance(folder, int):
            raised.append(folder)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return scandir(folder)

    path = tmp_path / "ckpt"
    jaxckpt.save(path, {"w": np.zeros(3)})
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", stale)
        jaxckpt.save(path, {"w": np.ones(3)}, overwrite=True)
        jaxckpt.convert(path, tmp_path / "copy")
        jaxckpt.convert(path, tmp_path / "copy", overwrite=True)
    assert raised
    for found in (path, tmp_path / "copy"):
        assert jaxckpt.load_numpy(found)["w"].tolist() == [1, 1, 1]
    jaxckpt.save(path, {"w": np.ones(3)}, overwrite=True)
    assert len(list(path.glob("data-*"))) == 1


def test_a_note_that_cannot_be_read_does_not_count_as_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder("", str(tmp_path / "ckpt"))
    data = Transaction(folder, "0" * 32, None).data

    def broken(call: Any, path: Any, **named: Any) -> os.stat_result:
        if str(path).endswith(WRITER):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(path, **named)

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, functools.partial(broken, getattr(os, name)))
    with pytest.raises(jaxckpt.errors.StorageError, match=os.strerror(errno.EIO)):
        folder.publish(data, b"ours", None, sync=False)


def test_every_method_that_uses_storage_is_watched() -> None:
    methods = {name: method for name, method in vars(Folder).items() if inspect.isfunction(method) and name[0] != "_"}
    unwatched = {name for name, method in methods.items() if method.__code__.co_filename != storage_errors.__file__}
    builders = {
        "array_writer",
        "array_reader",
        "range_reader",
        "absolute",
        "child",
        "with_url",
        "parent_and_name",
        "locked",
    }
    assert unwatched == {*builders, "mark", "unmark", "unlock"}, "decorate others with @watched: their storage may hang"
