"""The protocol of object stores, step by step: publishing, deletion, and remains."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.server
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from servers import Bucket, Exchange, flipped, status

import jaxckpt
from jaxckpt._model.file_names import SEAL
from jaxckpt._store import bucket as _bucket
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import anchor_of, store_at
from jaxckpt._store.tensors import ROOT_CONTEXT
from jaxckpt._store.transaction import Transaction

TREE = {"x": np.arange(1000)}


@pytest.fixture
def store() -> Store:
    """A fresh path in memory."""
    return store_at(f"memory://test-bucket/{uuid.uuid4().hex}", jaxckpt.Options())


def manifest_of(save_id: str) -> bytes:
    body = f'{{"save_id":"{save_id}"'.encode()
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}'


def begun(store: Store, previous: bytes | None = None) -> tuple[str, bytes]:
    """A save that has written its data: its folder, and the manifest that it would publish."""
    save_id = uuid.uuid4().hex
    data = Transaction(store, save_id, previous).data
    store.put(f"{data}/0000/c/0", b"data")
    return data, manifest_of(save_id)


def test_clearing_keeps_a_checkpoint_published_meanwhile(store: Store) -> None:
    jaxckpt.save(store.url, TREE)
    store.clear()
    assert np.array_equal(jaxckpt.load_numpy(store.url)["x"], TREE["x"])


def test_clearing_keeps_other_files(store: Store) -> None:
    store.put("eval/result.json", b"mine")
    store.put("data-raw/a.csv", b"mine")
    begun(store)
    store.clear()
    assert store.names() == ["data-raw", "eval"]


def test_clearing_deletes_the_remains_of_a_dead_writer(store: Store) -> None:
    begun(store)
    data, manifest = begun(store)
    store.publish(data, manifest, None, sync=True)  # the writer dies before it removes its note
    store.unpublish(sync=True)
    store.clear()
    assert store.names() == []


def test_a_writer_that_was_swept_cannot_publish(store: Store) -> None:
    data, manifest = begun(store)
    store.clear()
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        store.publish(data, manifest, None, sync=True)
    assert store.names() == []


def test_a_swept_writer_deletes_what_it_wrote_afterwards(store: Store) -> None:
    data, manifest = begun(store)
    store.clear()
    store.put(f"{data}/0000-uint8-1/c/0/0", b"late")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        store.publish(data, manifest, None, sync=True)
    store.discard(data)
    assert store.names() == []


def test_a_swept_writer_deletes_only_its_own_manifest(bucket: Bucket) -> None:
    """A swept writer publishes, and is replaced before it notices."""
    store = store_at(bucket.url, jaxckpt.Options())
    data, manifest = begun(store)

    def replaced(exchange: Exchange) -> None:
        answer = exchange.forward()
        store.delete(data)
        jaxckpt.save(bucket.url, TREE, overwrite=True)
        exchange.send(answer)

    bucket.proxy.on("PUT manifest.json", replaced, times=1)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        store.publish(data, manifest, None, sync=True)
    assert np.array_equal(jaxckpt.load_numpy(bucket.url)["x"], TREE["x"])


def test_a_swept_writer_that_publishes_deletes_its_manifest(bucket: Bucket) -> None:
    store = store_at(bucket.url, jaxckpt.Options())
    data, manifest = begun(store)

    def swept(exchange: Exchange) -> None:
        store.clear()
        exchange.send(exchange.forward())

    bucket.proxy.on("PUT manifest.json", swept, times=1)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        store.publish(data, manifest, None, sync=True)
    assert store.names() == []


def test_a_writer_that_is_swept_while_it_tests_conditions_gets_an_error(bucket: Bucket) -> None:
    """Two requests may then create the same key, before and after its deletion. The server is not to blame."""
    store = store_at(bucket.url, jaxckpt.Options())

    cleared = threading.Event()

    def swept(exchange: Exchange) -> None:
        answer = exchange.forward()
        store.clear()
        cleared.set()
        exchange.send(answer)

    def late(exchange: Exchange) -> None:
        cleared.wait(60)
        exchange.send(exchange.forward())

    bucket.proxy.on("PUT other", swept, times=1)
    bucket.proxy.on("PUT other", late, times=3)
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        begun(store)
    assert store.names() == []


def test_a_folder_created_in_a_console_is_empty(store: Store) -> None:
    store.put("", b"")  # the console of S3 creates a key with the folder's name
    jaxckpt.save(store.url, TREE)
    assert np.array_equal(jaxckpt.load_numpy(store.url)["x"], TREE["x"])


def test_folders_without_files_are_empty(store: Store) -> None:
    for key in ("marked/", "marked/inner/", "used/", "used/inner/file", "file", "file.txt"):
        store.put(key, b"")
    assert [store.is_empty_folder(name) for name in ("marked", "used", "file", "file.txt")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_restore_leaves_nothing_in_memory(store: Store) -> None:
    memory = ts.KvStore.open({"driver": "memory"}, context=ROOT_CONTEXT).result()
    path = store.url.removeprefix("memory://")
    jaxckpt.save(store.url, {"a": np.arange(5000), "b": np.arange(6000)})
    opened = _bucket._open_store.cache_info().currsize
    for _ in range(3):
        jaxckpt.load_numpy(store.url)
    store.child("00000001")
    assert _bucket._open_store.cache_info().currsize == opened, "each call keeps a store"
    key = next(key for key in memory.list().result() if key.startswith(f"{path}/".encode()) and b"6000/c/" in key)
    content = bytearray(memory.read(key).result().value)
    content[0] ^= 1
    memory.write(key, bytes(content)).result()
    left = len(memory.list().result())
    with pytest.raises(jaxckpt.errors.DataError):
        jaxckpt.load_numpy(store.url)
    assert len(memory.list().result()) == left


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_http_is_read_only(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "my run", TREE)
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert np.array_equal(jaxckpt.load_numpy(f"{url}/my%20run")["x"], TREE["x"])
            with pytest.raises(jaxckpt.errors.NotACheckpointError, match="nothing is at this URL, or it is a folder"):
                jaxckpt.load_numpy(f"{url}/other")
            with pytest.raises(jaxckpt.errors.StorageError, match="does not support"):
                jaxckpt.save(f"{url}/other", TREE)
        finally:
            server.shutdown()
            thread.join(30)


def test_the_reason_of_a_failed_save_is_reported_even_if_cleanup_fails(bucket: Bucket) -> None:
    def refused(exchange: Exchange) -> None:
        bucket.proxy.on(".*", status(403, "AccessDenied"))
        status(403, "AccessDenied")(exchange)

    bucket.proxy.on("PUT object", refused)
    with pytest.raises(jaxckpt.errors.StorageError, match=r"cannot write .*/c/"):
        jaxckpt.save(bucket.url, TREE, options=jaxckpt.Options(storage={"retry_seconds": 0.5}))


@pytest.mark.parametrize("place", [0.0, 0.4, 0.6, 1.0])
def test_a_flipped_answer_never_deletes_existing_data(bucket: Bucket, place: float) -> None:
    """Each GET of a replacing save is damaged in turn. Afterward, the old or the new checkpoint exists."""
    options = jaxckpt.Options(storage={"retry_seconds": 1})
    jaxckpt.save(bucket.url, {"x": np.arange(9)}, options=options)
    for number in range(100):
        bucket.proxy.clear()
        bucket.proxy.on("GET .*", flipped(place), skip=number, times=1)
        with contextlib.suppress(jaxckpt.JaxckptError):
            jaxckpt.save(bucket.url, {"x": np.arange(9)}, overwrite=True, options=options)
        spoiled = bucket.proxy.spoiled
        bucket.proxy.clear()
        assert jaxckpt.load_numpy(bucket.url)["x"].tolist() == list(range(9)), number
        if not spoiled:
            break
    assert number > 5, "a save makes several requests"


def test_an_object_store_renames_and_links_nothing(store: Store) -> None:
    store.replace("note", b"old")
    store.replace("note", b"new")
    assert (store.read("note"), store.link_target(), anchor_of(store)) == (b"new", None, None)
    assert (store.can_link, store.can_rename) == (False, False)
    with pytest.raises(jaxckpt.errors.StorageError) as found:
        store.rename("note", "other")
    assert found.value.errno == errno.EOPNOTSUPP
    assert store.names() == ["note"]
