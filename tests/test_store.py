"""What is on disk is checked before it is believed: damage is an error that names the leaf, never other data."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt import _folder
from jaxckpt._folder import Folder
from jaxckpt._place import store_at


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    jaxckpt.save(tmp_path / "ckpt", make(), options=SMALL)
    return tmp_path / "ckpt"


def files(path: Path, pattern: str = "**/*") -> list[Path]:
    return sorted(file for file in path.glob(pattern) if file.is_file())


def reads(path: Path) -> list[Callable[[], Any]]:
    mesh = Mesh(np.array(jax.devices()[:3]), ("b",))
    return [
        lambda: jaxckpt.restore(path),
        lambda: jaxckpt.restore(path, options=jaxckpt.Options(mmap=False)),
        lambda: jaxckpt.restore(path, mesh=mesh, specs=P()),
        lambda: jaxckpt.load_numpy(path),
        lambda: [np.asarray(leaf) for leaf in jaxckpt.open(path).leaves.values()],
    ]


def test_zeros_are_stored_so_that_what_is_missing_is_known(path: Path) -> None:
    assert not jaxckpt.load_numpy(path)["zeros"].any()
    (zeros,) = files(path, "data-*/*float32-40x10/c/0/0/0")
    zeros.unlink()
    for read in reads(path):
        with pytest.raises(jaxckpt.DataError, match=r"(?s)40x10/c/0/0/0 is missing.*'zeros'"):
            read()


@pytest.mark.parametrize("damage", ["deleted", "emptied", "truncated", "appended"])
def test_any_damaged_file_is_an_error(path: Path, damage: str, tmp_path: Path) -> None:
    for number, file in enumerate(files(path)):
        copy = tmp_path / f"{number}"
        shutil.copytree(path, copy)
        victim = copy / file.relative_to(path)
        content = victim.read_bytes()
        if damage == "deleted":
            victim.unlink()
        else:
            victim.write_bytes({"emptied": b"", "truncated": content[:-1], "appended": content + b"\0"}[damage])
        expected = (jaxckpt.CorruptError, jaxckpt.NotACheckpointError)
        with pytest.raises(expected) as caught:
            jaxckpt.restore(copy)
        assert file.name == "manifest.json" or file.name in str(caught.value)
        with pytest.raises(expected):
            jaxckpt.load_numpy(copy)
        shutil.rmtree(copy)


def test_no_flipped_bit_passes(path: Path) -> None:
    """Sampled over every kind of byte: data, chunk checksums, index, zarr.json, manifest."""
    draw = random.Random(0)
    whole = jaxckpt.load_numpy(path)
    silent: list[str] = []
    flips = 0
    for file in files(path):
        content = file.read_bytes()
        for place in {0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(12))}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            flips += 1
            for read in (jaxckpt.load_numpy, jaxckpt.restore):
                try:
                    read(path)
                except (jaxckpt.CorruptError, jaxckpt.NotACheckpointError):
                    continue
                silent.append(f"{file.name} byte {place}")
        file.write_bytes(content)
    assert flips > 150
    assert not silent
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.load_numpy(path), whole)


def test_objects_that_changed_places_are_found(path: Path, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "other", make(2.0), options=SMALL)
    one, two, *_ = files(path, "data-*/*float32-32x32/c/0/*/0")
    (other,) = files(tmp_path / "other", "data-*/*float32-32x32/c/0/0/0")
    first, second = one.read_bytes(), two.read_bytes()
    for wrong in (second, other.read_bytes()):
        assert len(wrong) == len(first)
        one.write_bytes(wrong)
        for read in reads(path):
            with pytest.raises(jaxckpt.DataError, match=r"(?s)holds other data.*'w'"):
                read()


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
    writer = Folder("", str(tmp_path / "ckpt")).begin(live := uuid.uuid4().hex, None)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert (tmp_path / "ckpt" / f"data-{live}").is_dir()
    os.close(writer.handle or 0)  # as when its process dies
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    assert not (tmp_path / "ckpt" / f"data-{live}").exists()


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


def test_a_lock_that_is_held_for_ever_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    monkeypatch.setattr(_folder, "_LOCK_SECONDS", 0.2)
    with Folder("", str(tmp_path / "ckpt"))._locked(), pytest.raises(jaxckpt.StorageError, match="held the lock"):
        jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
