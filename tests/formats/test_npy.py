"""Files in NumPy's format: .npz with members that cannot be read, .npy, and Equinox's .eqx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxckpt
from jaxckpt.errors import DataError, InputError, MismatchError

W = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_one_member_does_not_block_the_others(save: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    members = {
        "bfloat16": W.astype(ml_dtypes.bfloat16),
        "big": W.astype(">f4"),
        "big complex": (W + 2j).astype(">c8").T,
        "text": np.array(["a", "b"]),
        "date": np.zeros(2, "M8[s]"),
        "objects": np.array([{"a": 1}], object),
        "void": W.astype("V1"),
        "w": W,
    }
    save(path, **members)
    checkpoint = jaxckpt.open(path)
    assert set(checkpoint.leaves) == set(members)
    assert np.array_equal(checkpoint["big"][1:3, 2:], W[1:3, 2:])
    found = jaxckpt.load_numpy(path, select=lambda name: name not in ("text", "date", "objects", "void"))
    for name, array in found.items():
        assert array.dtype == members[name].dtype.newbyteorder("=")
        assert np.array_equal(array, members[name])
    for name in ("text", "date", "objects", "void"):
        with pytest.raises(DataError, match=r"it (has dtype|holds pickled)"):
            jaxckpt.load_numpy(path, select=name)


def test_a_dtype_that_numpy_does_not_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    array = W.astype(ml_dtypes.float8_e4m3fn)
    np.savez(path, w=array, b=W[0], x=W.astype(ml_dtypes.float8_e5m2))
    found = jaxckpt.load_numpy(jaxckpt.formats.npz_file(path, dtype="float8_e4m3fn"))
    assert found["w"].dtype == array.dtype
    assert found["w"].tobytes() == array.tobytes()
    assert found["b"].dtype == np.float32
    assert found["x"].dtype == np.dtype(ml_dtypes.float8_e5m2)  # NumPy records it, and cannot read that
    assert found["x"].tobytes() == W.astype(ml_dtypes.float8_e5m2).tobytes()
    with pytest.raises(InputError, match="is not one of"):
        jaxckpt.formats.npz_file(path, dtype="V1")
    with pytest.raises(DataError, match=r"has dtype \|V1"):  # of another width
        jaxckpt.load_numpy(jaxckpt.formats.npz_file(path, dtype="bfloat16"))


def test_the_dtype_of_an_npy_file_is_named(tmp_path: Path) -> None:
    array = W.astype(ml_dtypes.float8_e4m3fn)
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(DataError, match=r"open \.npz and \.npy files with jaxckpt\.formats\.npz_file\(path, dtype="):
        jaxckpt.load_numpy(tmp_path / "x.npy")
    found = jaxckpt.load_numpy(jaxckpt.formats.npz_file(tmp_path / "x.npy", dtype="float8_e4m3fn"))
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


def test_an_array_of_objects_is_not_damage(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object))
    report = jaxckpt.verify(tmp_path / "x.npy")
    assert report.ok
    assert "pickled Python objects" in report.unsupported[0].reason


def test_npy_files(tmp_path: Path) -> None:
    for array in (W, W.T, np.array(3), W.astype(ml_dtypes.bfloat16), W.astype(">i8"), np.zeros((0, 3))):
        np.save(tmp_path / "x.npy", array)
        found = jaxckpt.load_numpy(tmp_path / "x.npy")
        assert found.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(found, array)
    data = (tmp_path / "x.npy").read_bytes()
    for end in range(6, len(data)):
        (tmp_path / "x.npy").write_bytes(data[:end])
        with pytest.raises(DataError):
            jaxckpt.open(tmp_path / "x.npy")


@pytest.mark.parametrize("line", [b"", json.dumps({"width": 4}).encode() + b"\n"])
def test_equinox_files(line: bytes, tmp_path: Path) -> None:
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.ones(4, jnp.bfloat16))
    with (tmp_path / "model.eqx").open("wb") as file:
        file.write(line)
        eqx.tree_serialise_leaves(file, model)
    found = jaxckpt.load_numpy(tmp_path / "model.eqx")
    dynamic, static = eqx.partition(model, eqx.is_array_like)
    restored = eqx.combine(jax.tree.unflatten(jax.tree.structure(dynamic), found), static)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(model), strict=True):
        assert not eqx.is_array(wanted) or (leaf.dtype == wanted.dtype and np.array_equal(leaf, wanted))
    data = (tmp_path / "model.eqx").read_bytes()
    (tmp_path / "model.eqx").write_bytes(data[:-1])
    with pytest.raises(DataError, match="but the file has"):
        jaxckpt.open(tmp_path / "model.eqx")


def test_equinox_files_with_a_target(tmp_path: Path) -> None:
    """The file has the leaves in the order of the tree, without names: a module, dicts and numbers."""
    norm = eqx.nn.make_with_state(lambda: eqx.nn.BatchNorm(4, "batch", mode="ema"))()
    numbers = {"f": np.float32(1.5), "c": 1 + 2j, "b": True, "n": 1 << 40, "text": "t", "call": jax.nn.relu}
    trees = {
        "module": eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)),
        "state": norm,  # its axis name is a leaf that Equinox does not store
        "dict": {"b": [jnp.ones(3, jnp.bfloat16), np.arange(3), None, ()], "a": {1: jnp.zeros((0, 2))}} | numbers,
    }
    for name, tree in trees.items():
        path = tmp_path / f"{name}.eqx"
        eqx.tree_serialise_leaves(path, tree)
        found = jaxckpt.formats.eqx_file(path, eqx.filter_eval_shape(lambda tree=tree: tree))
        restored = jaxckpt.restore(found, tree)
        assert eqx.tree_equal(restored, tree)
        assert eqx.tree_equal(restored, eqx.tree_deserialise_leaves(path, tree))
        assert jaxckpt.verify(found).ok
    eight = {"w": jnp.arange(3, dtype=jnp.float8_e4m3fn), "x": jnp.ones(2), "y": jnp.ones(2, jnp.float8_e5m2)}
    eqx.tree_serialise_leaves(tmp_path / "8.eqx", eight)  # Equinox itself cannot read them
    assert eqx.tree_equal(jaxckpt.restore(jaxckpt.formats.eqx_file(tmp_path / "8.eqx", eight), eight), eight)
    eqx.tree_serialise_leaves(tmp_path / "n.eqx", {"rate": 0.1, "z": 1j, "n": float("inf")})
    numbers = {"rate": 0.1, "z": 1j, "n": 1.0}
    for wrong in ({"rate": 0}, {"z": 1.0}, {"n": 1}, {"rate": np.float32(1)}):
        with pytest.raises(MismatchError, match=r"'\w+' is .*, which is not a \w+, as in target"):
            jaxckpt.formats.eqx_file(tmp_path / "n.eqx", numbers | wrong)
    eqx.tree_serialise_leaves(tmp_path / "nan.eqx", {"n": float("nan")})
    assert np.isnan(jaxckpt.load_numpy(jaxckpt.formats.eqx_file(tmp_path / "nan.eqx", {"n": 0.0}))["n"])
    with pytest.raises(MismatchError, match="is nan, which is not a bool"):
        jaxckpt.formats.eqx_file(tmp_path / "nan.eqx", {"n": True})
    with pytest.raises(MismatchError, match=r"'w' .*has dtype \|V1, because NumPy's format does not record dtypes"):
        jaxckpt.formats.eqx_file(tmp_path / "8.eqx", {**eight, "w": jnp.ones(3)})
    with pytest.raises(MismatchError, match=r"eqx_file\(path, target\) opens it with those of the target"):
        jaxckpt.restore(tmp_path / "module.eqx", trees["module"])
    for wrong in (trees["state"], eqx.nn.MLP(2, 3, 5, 1, key=jax.random.key(0))):
        with pytest.raises(MismatchError, match=r"4 arrays, in the order of the tree that was saved, and target has"):
            jaxckpt.formats.eqx_file(tmp_path / "module.eqx", wrong)
    with pytest.raises(MismatchError, match=r"'layers/0/weight' has shape \(5, 2\) in target, and \(4, 2\) in the"):
        jaxckpt.formats.eqx_file(tmp_path / "module.eqx", wrong)
