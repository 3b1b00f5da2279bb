"""The header of a .safetensors file: headers of other writers are read, and damaged headers are errors."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxckpt
from jaxckpt._formats.safetensors import read_header, read_header_and_metadata
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt.errors import DataError, JaxckptError


def read(array: ForeignArray) -> np.ndarray:
    target = np.empty(array.shape, DTYPES[array.dtype])
    array.data.read(tuple((0, side) for side in array.shape), target)
    return target


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "name", "bool uint8 int8 int16 uint16 float16 int32 uint32 float32 int64 uint64 float64".split()
)
def test_files_of_the_library_are_read(tmp_path: Path, name: str) -> None:
    data = np.arange(24).reshape(2, 3, 4).astype(name)
    tensors = {"b": data, "a": data[0].copy(), "scalar": np.array(data[0, 0, 0]), "empty": data[:0].copy()}
    safetensors = pytest.importorskip("safetensors.numpy", reason="the library itself writes the file")
    safetensors.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np"})
    found = read_header(str(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(read(found[key]), tensor, strict=True)


def test_transformers_before_5_needs_this_metadata(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.ones(3)})
    jaxckpt.convert(tmp_path / "from", tmp_path / "x.safetensors")
    assert read_header_and_metadata(str(tmp_path / "x.safetensors"))[1] == {"format": "pt"}


def test_tensors_of_unknown_dtypes_can_be_left_out(tmp_path: Path) -> None:
    header = {"packed": entry("F4", [4], 0, 2), "w": entry("F32", [1], 2, 6)}
    (tmp_path / "x.safetensors").write_bytes(raw(header, b"\x00" * 6))
    assert jaxckpt.load_numpy(tmp_path / "x.safetensors", select="w")["w"] == 0
    with pytest.raises(DataError, match=r"(?s)packed.*leave it out with select=:.*dtype F4, which jaxckpt cannot read"):
        jaxckpt.load_numpy(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("BF16", "bfloat16"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E8M0", "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("C64", "complex64"),
    ],
)
def test_every_bit_of_the_other_dtypes_comes_back(tmp_path: Path, stored: str, name: str) -> None:
    bits = np.arange(256, dtype=np.uint8).tobytes()
    count = 256 // DTYPES[name].itemsize
    (tmp_path / "x").write_bytes(raw({"w": entry(stored, [count], 0, 256)}, bits))
    found = read(read_header(str(tmp_path / "x"))["w"])
    assert found.dtype == getattr(ml_dtypes, name, np.complex64)
    assert found.tobytes() == bits


W = entry("F32", [2], 0, 8)
DATA = bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a .safetensors file, or was truncated"),
        (b"1234567", "not a .safetensors file, or was truncated"),
        (raw({"w": W}, DATA, 1 << 60), "its header would be 1152921504606846976 bytes"),
        (raw({"w": W}, DATA, 200), "its header would be 200 bytes"),
        (raw({"w": W}, DATA)[:-1], "bytes long, expected"),
        (raw({"w": W}, DATA + b"x"), "bytes long, expected"),
        (raw(b' {"w": 1}'), "does not start with"),
        (raw(b"\xff{"), "is damaged"),
        (raw(b'{"\xff": 1}'), "is damaged"),
        (raw(b"[" * 100_000), "is damaged"),
        (raw(b'{"a":' * 100_000), "is damaged"),
        (raw(b'{"w": 1, "w": 2}'), "the member 'w' occurs more than once"),
        (raw({"w": 1}), "is damaged"),
        (raw({"w": W | {"more": 1}}, DATA), "is damaged"),
        (raw({"w": W, "__metadata__": {"a": 1}}, DATA), "is damaged"),
        (raw({"w": entry("F32", [2.0], 0, 8)}, DATA), "is damaged"),  # pyright: ignore[reportArgumentType]
        (raw({"w": entry("F32", [-2], 0, 8)}, DATA), "is damaged"),
        (raw({"w": entry("F32", [1 << 70], 0, 8)}, DATA), "is damaged"),
        (raw({"w": entry("F33", [2], 0, 8)}, DATA), "'w' has dtype 'F33', which the format does not define"),
        (raw({"w": entry("F32", [3], 0, 8)}, DATA), r"'w' has 8 bytes, expected 12 of F32\[3\]"),
        (raw({"w": entry("F32", [2], 8, 0)}, DATA), "those of 'w', leave a gap"),
        (raw({"w": entry("F32", [0, 1 << 62, 1 << 62], 0, 0)}), "too large to address"),
        (raw({"v": W, "w": entry("F32", [2], 4, 12)}, DATA + DATA), "those of 'w', overlap .* expected to start at 8"),
        (raw({"v": W, "w": entry("F32", [2], 12, 20)}, DATA * 3), "those of 'w', leave a gap .* start at 8"),
    ],
)
def test_a_damaged_header_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_header(str(tmp_path / "x"))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="x is missing"):
        read_header(str(tmp_path / "x"))


def test_a_folder_that_cannot_be_listed_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing of a model in two files fails once."""
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in enumerate("vw", 1)}
    for name, file in files.items():
        (tmp_path / file).write_bytes(raw({name: entry("F32", [2], 0, 8)}, bytes(8)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found, listdir = Counter[str](), os.listdir

    def broken(path: Any, nth: int, calls: list[Any]) -> list[str]:
        calls.append(path)
        if len(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listdir(path)

    for nth in range(1, 20):
        calls = list[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", functools.partial(broken, nth=nth, calls=calls))
            try:
                tree = jaxckpt.load_numpy(tmp_path)
            except JaxckptError as error:
                found[type(error).__name__] += 1
            else:
                assert {name: array.tolist() for name, array in tree.items()} == {"v": [0, 0], "w": [0, 0]}
        if len(calls) < nth:
            break
    assert len(calls) < nth
    assert found["StorageError"] > 3


WHOLE = raw({"v": W, "__metadata__": {"a": "b"}, "w": entry("BF16", [2, 2], 8, 16)}, bytes(range(16)))


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_a_flipped_or_truncated_file_gives_an_error_or_valid_arrays(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, cut: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :])
    try:
        found = read_header(str(path))
    except JaxckptError:
        return
    assert not cut
    for array in found.values():
        if array.dtype in DTYPES:
            read(array)
