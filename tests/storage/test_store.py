"""What is on disk is checked before it is believed: damage is an error that names the leaf, never other data."""

from __future__ import annotations

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
from jaxckpt._format.names import WRITER
from jaxckpt._storage import folder as _folder
from jaxckpt._storage.folder import Folder
from jaxckpt._storage.store_path import store_at


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


def test_urls_of_tensorstore_work_by_the_same_protocol() -> None:
    url = "memory://test_store/ckpt"
    tree = make()
    jaxckpt.save(url, tree, options=SMALL)
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.restore(url), tree)
    with pytest.raises(jaxckpt.CheckpointExistsError):
        jaxckpt.save(url, tree)
    jaxckpt.save(url, {"x": 1}, overwrite=True)
    assert jaxckpt.restore(url) == {"x": 1}
    with pytest.raises(jaxckpt.NotACheckpointError):
        jaxckpt.open("memory://test_store/other")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    jaxckpt.save(f"file://{tmp_path}/ckpt", {"x": 1})
    assert jaxckpt.restore(tmp_path / "ckpt") == {"x": 1}


def test_a_live_writers_data_is_not_swept(tmp_path: Path) -> None:
    writer = Folder("", str(tmp_path / "ckpt")).begin_save(live := uuid.uuid4().hex, None)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert (tmp_path / "ckpt" / f"data-{live}").is_dir()
    os.close(writer.handle or 0)  # as when its process dies
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    assert not (tmp_path / "ckpt" / f"data-{live}").exists()


@pytest.mark.parametrize("note", [b"[1]", b"1", b"[" * 4000])
def test_a_damaged_note_of_a_writer_does_not_stop_a_save(tmp_path: Path, note: bytes) -> None:
    Folder("", str(tmp_path / "ckpt")).begin_save(other := uuid.uuid4().hex, None)
    (tmp_path / "ckpt" / f"data-{other}" / WRITER).write_bytes(note)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert jaxckpt.restore(tmp_path / "ckpt") == {"x": 1}


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_users_own_data_folder_is_not_swept(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run" if place == "local" else f"memory://own-data-{tmp_path.name}"
    store = store_at(path, jaxckpt.Options())
    (tmp_path / "run" / "data-raw").mkdir(parents=True)
    store.put("data-raw/a.csv", b"mine")
    with pytest.raises(jaxckpt.CheckpointExistsError, match="data-raw"):
        jaxckpt.save(path, {"x": 1})
    store.remove("data-raw/a.csv")
    store.delete("data-raw")
    jaxckpt.save(path, {"x": 1})
    (tmp_path / "run" / "data-raw").mkdir(exist_ok=True)
    store.put("data-raw/a.csv", b"mine")
    jaxckpt.save(path, {"x": 2}, overwrite=True)
    assert store.read("data-raw/a.csv") == b"mine"
    assert jaxckpt.restore(path) == {"x": 2}


def test_a_lock_that_is_held_forever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    monkeypatch.setattr(_folder, "_LOCK_SECONDS", 0.2)
    with Folder("", str(tmp_path / "ckpt"))._locked(), pytest.raises(jaxckpt.StorageError, match="held the lock"):
        jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
