"""HDF5 files: datasets of every layout, links, and damage. tests/data/everyday has files of Keras."""

from __future__ import annotations

import builtins
import errno
import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from recorded import DATA, require_same

import jaxckpt
from jaxckpt._formats.shards import FileData
from jaxckpt._store import foreign_files
from jaxckpt.errors import DataError, InputError, JaxckptError, NotACheckpointError, StorageError

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


def test_stored_types_that_numpy_lacks(tmp_path: Path) -> None:
    """HDF5's bfloat16 and other types that h5py converts, in contiguous datasets, before another one."""
    bfloat16 = h5py.h5t.IEEE_F16LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    enum = h5py.h5t.enum_create(h5py.h5t.STD_I32LE)
    enum.enum_insert(b"FALSE", 0)
    enum.enum_insert(b"TRUE", 1)
    pairs = h5py.h5t.array_create(h5py.h5t.STD_I8LE, (2,))
    numbers = np.array([1, 0, -2, 4], np.float32)
    flags = numbers == 1
    with h5py.File(tmp_path / "x.h5", "w") as file:
        space = h5py.h5s.create_simple((4,))
        for name, stored, values in (
            (b"half", bfloat16, numbers),
            (b"flags", enum, flags.astype(np.int32)),
            (b"pairs", pairs, np.ones((4, 2), np.int8)),
        ):
            dataset = h5py.h5d.create(file.id, name, stored, space)
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=None if values is numbers else stored)
        file["big"] = numbers.astype(">f4")
        file["bool"], file["w"] = flags, W
    found = jaxckpt.load_numpy(tmp_path / "x.h5", select=lambda name: name != "pairs")
    require_same(found, {"half": numbers, "flags": flags, "big": numbers, "bool": flags, "w": W})
    with pytest.raises(DataError, match="dtype"):
        jaxckpt.load_numpy(tmp_path / "x.h5", select="pairs")


def test_a_filter_that_is_not_loaded_is_no_damage(tmp_path: Path) -> None:
    filters = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    filters.set_chunk((4,))
    filters.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)  # Zstandard's
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["w"] = W
        space = h5py.h5s.create_simple((4,))
        packed = h5py.h5d.create(file.id, b"packed", h5py.h5t.IEEE_F32LE, space, filters)
        packed.write_direct_chunk((0,), b"123")
    report = jaxckpt.verify(tmp_path / "x.h5")
    assert report.ok
    assert ["filter 32015" in problem.reason for problem in report.unsupported] == [True]
    require_same(jaxckpt.load_numpy(tmp_path / "x.h5", select="w"), {"w": W})


def test_an_error_of_the_storage_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = foreign_files._LocalFile.read

    def failing(self: Any, count: int, offset: int) -> bytes:
        if offset > 0:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, count, offset)

    monkeypatch.setattr(foreign_files._LocalFile, "read", failing)
    with pytest.raises(StorageError, match="Input/output error"):
        jaxckpt.open(path)


def test_a_file_with_a_user_block(tmp_path: Path) -> None:
    """As MATLAB writes them; not a tar archive whose first file is one of HDF5."""
    with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
        file["w"] = W
        file.create_dataset("packed", data=W, compression="gzip")
    require_same(jaxckpt.load_numpy(tmp_path / "x.mat"), {"packed": W, "w": W})
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x.mat", "x.h5")
        archive.add(tmp_path / "x.mat", "y.h5")
    with pytest.raises(NotACheckpointError, match="tar archive"):
        jaxckpt.open(tmp_path / "x.tar")


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
