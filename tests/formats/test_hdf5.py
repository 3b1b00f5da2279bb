"""HDF5 files: datasets of every layout, links, and damage. tests/data/everyday has files of Keras."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from recorded import DATA, require_same

import jaxckpt
from jaxckpt._formats.shards import FileData
from jaxckpt.errors import DataError, InputError, JaxckptError

h5py = pytest.importorskip("h5py")

W = np.arange(240, dtype=np.float32).reshape(12, 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = W
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["group/plain"] = W
        file.create_dataset("group/chunked", data=W, chunks=(5, 7))
        file.create_dataset("group/packed", data=W, chunks=(5, 7), compression="gzip", shuffle=True)
        file["big"] = W.astype(">f4")
        file["scalar"] = np.int64(7)
        file["empty"] = np.zeros((0, 3))
        file["text"] = "abc"
        file["link"] = h5py.SoftLink("/group/plain")
        file["outside"] = h5py.ExternalLink("other.h5", "/secret")
        file["group/loop"] = file["group"]
        file.create_dataset("external", (4,), "u1", external=[(str(tmp_path / "other.h5"), 0, 4)])
        layout = h5py.VirtualLayout((12, 20), "f4")
        layout[...] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", (12, 20))
        file.create_virtual_dataset("virtual", layout)
        del file["group/loop"]
    return tmp_path / "x.h5"


UNREADABLE = {"text": "dtype", "link": "link", "outside": "link", "external": "other files", "virtual": "other files"}


def test_datasets_of_every_layout(path: Path) -> None:
    checkpoint = jaxckpt.open(path)
    assert np.array_equal(checkpoint["group/packed"][3:9, 5:], W[3:9, 5:])
    found = jaxckpt.load_numpy(path, select=lambda name: name not in UNREADABLE)
    group = {"chunked": W, "packed": W, "plain": W}
    require_same(found, {"group": group, "big": W, "scalar": np.array(7), "empty": np.zeros((0, 3))})
    for name, reason in UNREADABLE.items():
        with pytest.raises(DataError, match=reason):
            jaxckpt.load_numpy(path, select=name)


def test_a_group_that_contains_itself(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["group/w"] = W
        file["group/loop"] = file["group"]
    with pytest.raises(DataError, match="nested deeper than"):
        jaxckpt.open(tmp_path / "x.h5")


def test_damaged_files_raise_only_our_errors(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    raised = 0
    for end in range(8, len(data), 64):
        (tmp_path / "y.h5").write_bytes(data[:end])
        with pytest.raises(JaxckptError):
            jaxckpt.load_numpy(tmp_path / "y.h5", select=lambda name: name not in UNREADABLE)
        raised += 1
    assert raised > 50


def test_contiguous_datasets_are_read_in_place(path: Path) -> None:
    for name in ("model.keras", "keras.weights.h5"):
        source: Any = jaxckpt.open(DATA / "everyday" / name)._source
        assert all(isinstance(data.data, FileData) for rows in source.row_data for data in rows)


def test_without_h5py_the_error_names_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "h5py":
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="pip install h5py"):
        jaxckpt.open(path)


def test_a_text_with_a_damaged_length_is_not_read(tmp_path: Path) -> None:
    """HDF5 would allocate that many bytes, up to 4 GiB."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["w"] = W.astype(ml_dtypes.bfloat16)
        file["w"].attrs["dtype"] = "bfloat16"  # as Keras does
    content = path.read_bytes()
    length = (8).to_bytes(4, "little") + content.index(b"GCOL").to_bytes(8, "little")
    assert content.count(length) == 1
    path.write_bytes(content.replace(length, b"\xff\xff\xff\xff" + length[4:]))
    np.testing.assert_array_equal(jaxckpt.load_numpy(path)["w"], W.astype(ml_dtypes.bfloat16))
