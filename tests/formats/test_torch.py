"""Single files of torch.save, written by torch in a separate process."""

from __future__ import annotations

import importlib.util
import random
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import processes
import pytest

import jaxckpt
from jaxckpt._formats.torch import read_saved, recognizes
from jaxckpt.errors import DataError, NotACheckpointError

pytestmark = [
    pytest.mark.child,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch writes the files"),
]

WRITE = processes.PROGRAMS / "torch_writer.py"
UNREADABLE = {"conjugate", "sparse", "quantized", "half complex", "args", "bomb"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    processes.run_python(WRITE, args=[str(folder)])
    return folder


BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


def readable(path: str) -> bool:
    return path.split("/")[0] not in UNREADABLE


def test_tensors_are_read_from_the_file(folder: Path) -> None:
    tree = jaxckpt.load_numpy(folder / "state.pt", select=readable)
    wanted: dict[str, Any] = {
        "c": BASE,
        "transposed": BASE.T,
        "stepped": BASE[1::2, ::3],
        "last": BASE[3],
        "scalar": np.array(7),
        "bfloat16": BASE.astype(ml_dtypes.bfloat16),
        "fp8": BASE.astype(ml_dtypes.float8_e5m2),
        "uint16": np.ones(3, np.uint16),
        "complex": BASE.astype(np.complex64),
        "empty": np.zeros((0, 3), np.float32),
        "parameter": BASE,
        "expanded": np.broadcast_to(BASE[0], (3, 6)),
        "bits": np.array([0x7F800001, -1 & 0xFFFFFFFF], np.uint32).view(np.float32),
    }
    for name, array in wanted.items():
        assert (tree[name].dtype, tree[name].shape) == (array.dtype, array.shape), name
        assert tree[name].tobytes() == array.tobytes(), name
    assert (tree["step"], tree["names"]) == (3, ["a", ("b", 1.5)])
    assert list(tree["mixed"]) == ["step", 0]
    np.testing.assert_array_equal(tree["mixed"][0], BASE)
    np.testing.assert_array_equal(tree["module"]["bias"], np.full(3, 2.0))


@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_unsupported_tensors_are_named(folder: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"(?s)cannot read leaf '{name}': .*select=:.*'{name}': it "):
        jaxckpt.load_numpy(folder / "state.pt", select=name)


def test_an_archive_within_a_file(folder: Path) -> None:
    size = (folder / "state.pt").stat().st_size
    tree = read_saved(str(folder / "within"), 6, size)
    target = np.empty((6, 4), np.float32)
    tree["transposed"].data.read(((0, 6), (0, 4)), target)
    np.testing.assert_array_equal(target, BASE.T)
    with pytest.raises(DataError, match="no directory at its end"):
        read_saved(str(folder / "within"))


def test_verify_compares_existing_checksums(folder: Path, tmp_path: Path) -> None:
    assert jaxckpt.verify(folder / "no crc.pt").ok
    data = bytearray((folder / "state.pt").read_bytes())
    data[data.index(BASE.tobytes()) + 5] ^= 1
    (tmp_path / "state.pt").write_bytes(data)
    found = {problem.leaf for problem in jaxckpt.verify(tmp_path / "state.pt").problems}
    assert {"c", "transposed"} <= found  # they share the storage
    assert "bfloat16" not in found


def test_an_altered_pickle_is_reported_when_opened(folder: Path, tmp_path: Path) -> None:
    data = (folder / "state.pt").read_bytes().replace(b"stepped", b"skipped")
    (tmp_path / "state.pt").write_bytes(data)
    with pytest.raises(DataError, match=r"data\.pkl.* was altered"):
        jaxckpt.open(tmp_path / "state.pt")


def test_archives_that_torch_does_not_write_are_reported(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(folder / "small.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist() if not name.startswith("archive/.")}

    def written(compression: int = zipfile.ZIP_STORED, **changes: bytes) -> str:
        with zipfile.ZipFile(tmp_path / "x.pt", "w", compression) as archive:
            for name, data in {**members, **changes}.items():
                if data:
                    archive.writestr(name, data)
        return str(tmp_path / "x.pt")

    prefix = next(iter(members)).split("/")[0]
    assert read_saved(written())["c"].shape == (4, 6)
    for path, message in (
        (lambda: written(zipfile.ZIP_DEFLATED), "compressed"),
        (lambda: written(**{f"{prefix}/byteorder": b"big"}), "big-endian"),
        (lambda: written(**{f"{prefix}/data/0": b"1234"}), r"ends 96 bytes into its storage of 4"),
        (lambda: written(**{f"{prefix}/data/0": b""}), "is missing"),
        (lambda: written(**{f"{prefix}/data.pkl": b""}), "no data.pkl"),
    ):
        with pytest.raises(DataError, match=message):
            read_saved(path())


def test_truncated_and_altered_files_raise_only_our_errors(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    data = (folder / "no crc.pt").read_bytes()  # without checksums, because a wrong checksum would be reported first
    message = 0
    for number in range(600):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            changed[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / f"{number % 2}.pt"
        path.write_bytes(changed[: chance.randrange(len(data))] if number % 3 == 0 else changed)
        try:
            read_saved(str(path))
        except DataError:
            message += 1
    assert message > 200


def test_other_files_are_refused(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=BASE)
    assert recognizes(str(folder / "state.pt"), [])
    assert not recognizes(str(tmp_path / "x.npz"), [])


def test_files_of_torch_before_1_6(folder: Path, tmp_path: Path) -> None:
    found, wanted = (jaxckpt.load_numpy(folder / name, select=readable) for name in ("old.pt", "state.pt"))
    assert found.keys() == wanted.keys()
    assert jaxckpt.diff(folder / "old.pt", folder / "state.pt", select=readable).identical
    data = (folder / "old.pt").read_bytes()
    for end in range(0, len(data), 7):
        (tmp_path / "x.pt").write_bytes(data[:end])
        with pytest.raises((DataError, NotACheckpointError)):
            jaxckpt.open(tmp_path / "x.pt")


def test_no_bit_of_the_directory_swaps_tensors(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    every = bool(request.config.getoption("--campaign"))  # otherwise one bit of each byte
    whole = (folder / "several.pt").read_bytes()
    wanted = jaxckpt.load_numpy(folder / "several.pt")
    for at in range(int.from_bytes(whole[-6:-2], "little"), len(whole)):
        for bit in range(8) if every else (at % 8,):
            (tmp_path / "x.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                found = jaxckpt.load_numpy(tmp_path / "x.pt")
            except jaxckpt.JaxckptError:
                continue
            assert repr(found) == repr(wanted), at
