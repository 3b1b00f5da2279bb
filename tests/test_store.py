"""What is on disk is checked before it is believed: damage is an error that names the leaf, never other data."""

from __future__ import annotations

import hashlib
import json
import os
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
from jaxckpt._folder import Folder


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


# Manifests that somebody made -----------------------------------------------------------------------------


def edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, and seal it anew as docs/format.md says: what a hostile writer would do."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_bytes())
    del manifest["sha256"]
    edit(manifest)
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    file.write_bytes(body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}')


def deep(levels: int) -> Any:
    node: Any = 0
    for _ in range(levels):
        node = {"type": "list", "children": [node]}
    return node


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda m: m.update(format="zarr"),
    "an unknown member": lambda m: m.update(extra=1),
    "a huge shape": lambda m: m["stacks"][0].update(shape=[1 << 40, 1 << 40]),
    "a negative shape": lambda m: m["stacks"][0].update(shape=[-1]),
    "a shape of text": lambda m: m["stacks"][0].update(shape=["8"]),
    "no rows": lambda m: m["stacks"][0].update(rows=0),
    "rows beyond": lambda m: m["leaves"][0].update(row=99),
    "a stack beyond": lambda m: m["leaves"][0].update(stack=99),
    "a negative stack": lambda m: m["leaves"][0].update(stack=-1),
    "a shared row": lambda m: m["leaves"][1].update(row=0),
    "another dtype": lambda m: m["stacks"][0].update(dtype="int32"),
    "an unknown dtype": lambda m: m["stacks"][0].update(dtype="object"),
    "another chunk": lambda m: m["stacks"][0].update(chunk=[1] * len(m["stacks"][0]["chunk"])),
    "a chunk of nothing": lambda m: m["stacks"][0].update(chunk=[0] * len(m["stacks"][0]["chunk"])),
    "a folder above": lambda m: m["stacks"][0].update(name="../../etc"),
    "an absolute name": lambda m: m["stacks"][0].update(name="/etc"),
    "a save id above": lambda m: m.update(save_id="../x"),
    "objects missing": lambda m: m["stacks"][0]["objects"].popitem(),
    "an object above": lambda m: m["stacks"][0]["objects"].update({"../0": [1, ""]}),
    "an empty object": lambda m: m["stacks"][0]["objects"].update({next(iter(m["stacks"][0]["objects"])): [0, ""]}),
    "another path": lambda m: m["leaves"][0].update(path="elsewhere"),
    "a leaf too few": lambda m: m["leaves"].pop(),
    "a tree of nothing": lambda m: m.update(tree=None),
    "a tree too deep": lambda m: m.update(tree=deep(300)),
    "a tree far too deep": lambda m: m.update(tree=deep(450)),
    "a mesh too small": lambda m: m["meshes"][0].update(devices=[0]),
    "a device twice": lambda m: m["meshes"][0].update(devices=[0] * 8),
    "an axis type unknown": lambda m: m["meshes"][0].update(types=["x", "y"]),
    "a layout beyond": lambda m: m["leaves"][-2].update(layout=99),
    "an axis twice": lambda m: m["layouts"][-1].update(spec=[["a"], ["a"]]),
    "a spec that does not divide": lambda m: m["stacks"][0].update(shape=[3]),
    "a key of floats": lambda m: m["leaves"][0].update(kind="key", impl="threefry2x32"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_hostile_manifest_is_refused_before_anything_is_opened(path: Path, name: str) -> None:
    edited(path, lambda manifest: None)
    jaxckpt.load_numpy(path)  # sealed anew but not changed: fine
    edited(path, EDITS[name])
    with pytest.raises(jaxckpt.ManifestError):
        jaxckpt.open(path)


def test_a_newer_format_says_so(path: Path) -> None:
    edited(path, lambda manifest: manifest.update(version=2, novelty=[1]))
    with pytest.raises(jaxckpt.ManifestError, match="Update jaxckpt"):
        jaxckpt.open(path)


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
    writer = Folder("", str(tmp_path / "ckpt")).begin("live", None)
    jaxckpt.save(tmp_path / "ckpt", {"x": 1})
    assert (tmp_path / "ckpt" / "data-live").is_dir()
    os.close(writer.handle or 0)  # as when its process dies
    jaxckpt.save(tmp_path / "ckpt", {"x": 2}, overwrite=True)
    assert not (tmp_path / "ckpt" / "data-live").exists()
