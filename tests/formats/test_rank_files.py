"""Custom rank files (.npz, .safetensors), combined by specs or by offsets."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from strategies import damaged

import jaxckpt
from jaxckpt import JaxckptError
from jaxckpt._formats import npz
from jaxckpt._formats.npz import read_npz
from jaxckpt._model.dtypes import DTYPES
from jaxckpt._sources.foreign import ForeignArray
from jaxckpt.errors import DataError, InputError, SpecError

W = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
WRITERS: dict[str, Callable[..., None]] = {
    "savez": np.savez,
    "savez_compressed": np.savez_compressed,
    "safetensors": lambda path, **arrays: safetensors.numpy.save_file(arrays, path),
}


def write(folder: Path, writer: str, ranks: list[dict[str, Any]]) -> dict[int, Path]:
    suffix = ".safetensors" if writer == "safetensors" else ".npz"
    files = {rank: folder / f"{rank}{suffix}" for rank in range(len(ranks))}
    for rank, held in enumerate(ranks):
        WRITERS[writer](files[rank], **{name: np.array(value, order="C") for name, value in held.items()})
    return files


def read(array: ForeignArray | str | bytes, box: Any = None) -> np.ndarray:
    assert isinstance(array, ForeignArray)
    box = tuple((0, side) for side in array.shape) if box is None else box
    target = np.empty([stop - start for start, stop in box], DTYPES[array.dtype])
    array.data.read(box, target)
    return target


# Combining ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_ranks_are_combined_by_specs(tmp_path: Path, writer: str) -> None:
    tiles = [
        {"w": W[4 * a : 4 * a + 4, 3 * b : 3 * b + 3], "b": W[0, 3 * b : 3 * b + 3]} for a in (0, 1) for b in (0, 1)
    ]
    files = write(tmp_path, writer, [held | {"step": np.int64(7)} for held in tiles])
    by_name = {"w": P("data", "model"), "b": P("model")}
    for specs in (by_name, lambda path, leaf: by_name.get(path, P())):
        found = jaxckpt.formats.rank_files(files, mesh={"data": 2, "model": 2}, specs=specs)
        np.testing.assert_array_equal(jaxckpt.load_numpy(found)["w"], W, strict=True)
        np.testing.assert_array_equal(jaxckpt.load_numpy(found)["b"], W[0], strict=True)
        assert jaxckpt.load_numpy(found)["step"] == 7
    abstract = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
    found = jaxckpt.formats.rank_files(files, mesh=abstract, specs=by_name)
    np.testing.assert_array_equal(jaxckpt.load_numpy(found)["w"], W, strict=True)
    mesh = jax.make_mesh((2, 2), ("model", "data"), devices=jax.devices()[:4])
    restored = jaxckpt.restore(found, mesh=mesh, select=["w", "b"], strict=False)
    assert restored["w"].sharding.spec == P("data", "model")
    np.testing.assert_array_equal(np.asarray(restored["w"]), W)


@pytest.mark.parametrize("writer", WRITERS)
def test_ranks_are_combined_by_offsets(tmp_path: Path, writer: str) -> None:
    """Shards of any size, even those that no mesh and spec can describe."""
    starts = [(0, 0), (0, 4), (3, 4), (1, 0)]
    shards = [W[:1, :4], W[:3, 4:], W[3:, 4:], W[1:, :4]]
    files = write(tmp_path, writer, [{"w": shard, "lr": np.float32(0.1)} for shard in shards])
    offsets = {rank: {"w": start} for rank, start in enumerate(starts)}
    found = jaxckpt.load_numpy(jaxckpt.formats.rank_files(files, offsets=offsets, shapes={"w": (8, 6)}))
    np.testing.assert_array_equal(found["w"], W, strict=True)
    np.testing.assert_array_equal(found["lr"], np.float32(0.1))


def test_one_axis_of_ranks_is_the_default(tmp_path: Path) -> None:
    files = write(tmp_path, "savez", [{"w": W[:4]}, {"w": W[4:]}])
    np.testing.assert_array_equal(jaxckpt.load_numpy(jaxckpt.formats.rank_files(files, specs=P("rank")))["w"], W)


def test_names_are_paths_and_strings_come_back(tmp_path: Path) -> None:
    held = {"params/a/w": W, "params/b": W[0], "name": np.array("adam"), "raw": np.array(b"\1\2")}
    files = write(tmp_path, "savez_compressed", [held, held])
    found = jaxckpt.load_numpy(jaxckpt.formats.rank_files(files, specs={"params": {"a": P()}, "params/b": P()}))
    np.testing.assert_array_equal(found["params"]["a"]["w"], W)
    np.testing.assert_array_equal(found["params"]["b"], W[0])
    assert (found["name"], found["raw"]) == ("adam", b"\1\2")
    files = write(tmp_path, "savez", [held, held | {"name": np.array("sgd")}])
    with pytest.raises(DataError, match="'name' differs between ranks"):
        jaxckpt.formats.rank_files(files)
    files = write(tmp_path, "savez", [held, held | {"name": W}])
    with pytest.raises(DataError, match="'name' is an array in some ranks but not in others"):
        jaxckpt.formats.rank_files(files)


def test_converted_checkpoints_are_the_same(tmp_path: Path) -> None:
    files = write(tmp_path, "savez_compressed", [{"w": W[:4]}, {"w": W[4:]}])
    found = jaxckpt.formats.rank_files(files, specs=P("rank"))
    jaxckpt.convert(found, tmp_path / "ours")
    assert jaxckpt.diff(found, tmp_path / "ours").identical
    jaxckpt.convert(found, tmp_path / "one.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "one.npz")["w"], W)
    assert jaxckpt.diff(found, tmp_path / "one.npz").identical


# Coverage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", WRITERS)
def test_shards_that_are_missing_short_or_overlap_are_named(tmp_path: Path, writer: str) -> None:
    files = write(tmp_path, writer, [{"w": W[2 * rank : 2 * rank + 2]} for rank in range(4)])
    offsets = {rank: {"w": (2 * rank, 0)} for rank in range(4)}
    without = {rank: path for rank, path in files.items() if rank != 2}
    with pytest.raises(
        DataError, match=r"'w' do not exactly cover its shape \[8, 6\]:\n.*\[4:6, 0:6\] is not in any shard"
    ):
        jaxckpt.formats.rank_files(without, specs=P("rank"))
    with pytest.raises(
        DataError, match=r"'w' do not exactly cover its shape \[8, 6\]:\n.*\[4:6, 0:6\] is not in any shard"
    ):
        jaxckpt.formats.rank_files(without, offsets=offsets, shapes={"w": (8, 6)})
    with pytest.raises(DataError, match=r"'w'.*\n.*\[1:2, 0:6\] is in 2 shards\n.*\[3:4, 0:6\] is not in any shard"):
        jaxckpt.formats.rank_files(files, offsets=offsets | {1: {"w": (1, 0)}}, shapes={"w": (8, 6)})
    with pytest.raises(DataError, match=r"'w'.*\n.*\[6:8, 0:6\] is outside its shape \[7, 6\]"):
        jaxckpt.formats.rank_files(files, offsets=offsets, shapes={"w": (7, 6)})
    write(tmp_path, writer, [{"w": W[:2]}, {"w": W[2:3]}])
    with pytest.raises(DataError, match=r"'w' is float32\[1, 6\] in rank 1, float32\[2, 6\] in rank 0"):
        jaxckpt.formats.rank_files(files, specs=P("rank"))
    with pytest.raises(DataError, match=r"'w'.*\n.*\[3:4, 0:6\] is not in any shard"):
        jaxckpt.formats.rank_files(files, offsets=offsets, shapes={"w": (8, 6)})
    write(tmp_path, writer, [{"w": W[:2]}, {"w": W[2:4].astype(np.float64)}])
    with pytest.raises(DataError, match=r"'w' is float64\[2, 6\] in rank 1, float32\[2, 6\] in rank 0"):
        jaxckpt.formats.rank_files(files, offsets=offsets, shapes={"w": (8, 6)})
    with pytest.raises(DataError, match=r"'w'.*not the same in rank 0 and rank 2"):
        jaxckpt.load_numpy(jaxckpt.formats.rank_files({0: files[0], 2: files[2]}))


def test_arguments_that_do_not_fit_are_reported(tmp_path: Path) -> None:
    files = write(tmp_path, "savez", [{"weight": W}, {"weight": W}])
    with pytest.raises(InputError, match=r"'wieght'; did you mean 'weight'\?: no rank has it"):
        jaxckpt.formats.rank_files(files, offsets={0: {"wieght": (0, 0)}}, shapes={"wieght": (8, 6)})
    with pytest.raises(InputError, match="'weight' has offsets and no shape"):
        jaxckpt.formats.rank_files(files, offsets={0: {"weight": (0, 0)}})
    with pytest.raises(InputError, match="'weight' has a shape and no offsets"):
        jaxckpt.formats.rank_files(files, shapes={"weight": (8, 6)})
    with pytest.raises(InputError, match=r"'weight' is \[8, 6\] in rank 1, with no offset"):
        jaxckpt.formats.rank_files(files, offsets={0: {"weight": (0, 0)}}, shapes={"weight": (8, 6)})
    with pytest.raises(InputError, match=r"'weight' is \[8, 6\] in rank 0, with offset \(0,\)"):
        jaxckpt.formats.rank_files(
            files, offsets={0: {"weight": (0,)}, 1: {"weight": (0, 0)}}, shapes={"weight": (8, 6)}
        )
    with pytest.raises(InputError, match=r"'weight' is \[8, 6\] in rank 0, with offset 'ab'"):
        jaxckpt.formats.rank_files(
            files, offsets={0: {"weight": "ab"}, 1: {"weight": (0, 0)}}, shapes={"weight": (8, 6)}
        )
    with pytest.raises(InputError, match=r"with offset \(0, 0\) in the shape 8"):
        jaxckpt.formats.rank_files(files, offsets={0: {"weight": (0, 0)}}, shapes={"weight": 8})  # pyright: ignore[reportArgumentType]
    for wrong in ([1], {0: (0, 0)}):
        with pytest.raises(InputError, match=r"offsets(\[0\])? is of type (list|tuple); expected a mapping"):
            jaxckpt.formats.rank_files(files, offsets=wrong, shapes={"weight": (8, 6)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"shapes is of type tuple; expected a mapping"):
        jaxckpt.formats.rank_files(files, offsets={0: {"weight": (0, 0)}}, shapes=(8, 6))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"files is of type list; expected {rank: path}"):
        jaxckpt.formats.rank_files(list(files.values()))
    with pytest.raises(SpecError, match="names mesh axis 'model'; the mesh has"):
        jaxckpt.formats.rank_files(files, mesh={"data": 2}, specs=P("model"))
    with pytest.raises(SpecError, match="'wieght'"):
        jaxckpt.formats.rank_files(files, specs={"wieght": P()})
    with pytest.raises(DataError, match="rank 1 is beyond the mesh"):
        jaxckpt.formats.rank_files(files, mesh={"data": 1}, specs=P("data"))
    with pytest.raises(InputError, match="more than 131072 devices"):
        jaxckpt.formats.rank_files(files, mesh={"data": 1 << 40}, specs=P("data"))
    with pytest.raises(InputError, match="no files are given"):
        jaxckpt.formats.rank_files({})
    for rank in ("0", -1, True, 1 << 40):
        with pytest.raises(InputError, match="has the rank"):
            jaxckpt.formats.rank_files({rank: files[0]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"nowhere\.npz is missing"):
        jaxckpt.formats.rank_files({0: tmp_path / "nowhere.npz"})


# .npz -----------------------------------------------------------------------------------------------------

ARRAYS = hnp.arrays(
    st.sampled_from([np.dtype(name) for name in ("bool", "int8", "uint16", "int32", "float64", "complex128")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


@given(ARRAYS, st.booleans(), st.booleans(), st.sampled_from([1, 3, 7, 64, 1 << 20]), st.data())
@settings(max_examples=200)
def test_any_box_of_any_member_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    array: np.ndarray,
    compressed: bool,
    fortran: bool,
    at_once: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.npz"
    array = np.asfortranarray(array) if fortran else array
    (np.savez_compressed if compressed else np.savez)(path, before=np.arange(5), w=array, after=np.arange(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npz, "READ_BYTES", at_once)
        patch.setattr(npz, "SNAPSHOT_BYTES", 2 * at_once)
        found = read_npz(str(path))["w"]
        for _ in range(3):
            box = tuple(
                tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in array.shape
            )
            expected = array[tuple(slice(*side) for side in box)]
            assert read(found, box).tobytes() == np.ascontiguousarray(expected).tobytes()


def test_reading_a_deflated_member_resumes_at_a_snapshot(
    tmp_path: Path, bytes_inflated: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "READ_BYTES", 1 << 14)
    monkeypatch.setattr(npz, "SNAPSHOT_BYTES", 1 << 16)
    array = np.random.default_rng(0).integers(0, 9, (256, 1024), np.int32)
    np.savez_compressed(tmp_path / "a.npz", w=array)
    found = read_npz(str(tmp_path / "a.npz"))["w"]
    before = bytes_inflated()
    np.testing.assert_array_equal(read(found), array)
    whole = bytes_inflated() - before
    assert whole >= array.nbytes
    for start in range(0, 256, 32):
        before = bytes_inflated()
        np.testing.assert_array_equal(read(found, ((start, start + 2), (0, 1024))), array[start : start + 2])
        assert bytes_inflated() - before <= (1 << 16) + (2 << 14) + 8192


@pytest.fixture
def bytes_inflated(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns the number of bytes inflated from members so far."""
    counts: list[int] = []
    stream = npz.Deflated._inflated  # pyright: ignore[reportPrivateUsage]

    def counted(*arguments: Any) -> Any:
        for position, data in stream(*arguments):
            counts.append(len(data))
            yield position, data

    monkeypatch.setattr(npz.Deflated, "_inflated", counted)
    return lambda: sum(counts)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_that_are_not_numeric_are_reported(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "a.npz"
    for value, message in (
        (np.array([{"a": 1}], object), "'w' cannot be read: it holds pickled Python objects; they could run any code"),
        (W.astype("V1"), r"'w' cannot be read: it has dtype \|V1, because NumPy's .* ranks must be \.safetensors"),
        (np.array(["a", "b"]), "'w' cannot be read: it has dtype <U1, which JAX does not support"),
        (np.zeros(2, "M8[s]"), r"'w' cannot be read: it has dtype <M8\[s\], which JAX does not support"),
        (np.zeros(2, [("a", "i4")]), r"'w' cannot be read: it has dtype \|V4, which JAX does not"),
    ):
        save(path, allow_pickle=True, w=value)
        with pytest.raises(DataError, match=message):
            jaxckpt.formats.rank_files({0: path})


def test_members_of_other_programs_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("w.npy", b"x" * 100)
    with pytest.raises(DataError, match="compressed by a method other than deflate"):
        read_npz(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", b"x" * 100)
    with pytest.raises(DataError, match=r"'notes\.txt' is not a NumPy array"):
        read_npz(str(path))


def test_a_shape_larger_than_the_file_is_an_error(tmp_path: Path) -> None:
    """A few bytes whose header claims a petabyte."""
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(1000, np.uint8))
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        content = archive.read("w.npy")
    for shape in (b"(999999999999999,)", b"(10, 100, 1000)", b"(-10, -100)", b"(0, 9999999999999999999999)"):
        changed = content.replace(b"(1000,), }" + b" " * (len(shape) - 7), shape + b", }")
        assert len(changed) == len(content)
        with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("w.npy", changed)
        with pytest.raises(DataError, match="'w' has"):
            read_npz(str(tmp_path / "b.npz"))


def test_a_deflated_member_is_compared_with_its_checksum(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=W)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        crc = archive.getinfo("w.npy").CRC.to_bytes(4, "little")
    at = bytes(content).rindex(crc)  # in the directory at the end
    content[at] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"w\.npy at byte .* checksum is"):
        read(read_npz(str(tmp_path / "a.npz"))["w"])


@pytest.mark.parametrize("writer", WRITERS)
@given(data=st.data())
@settings(max_examples=300)
def test_a_damaged_file_gives_an_error_or_the_undamaged_part(
    tmp_path_factory: pytest.TempPathFactory, writer: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"damaged-{writer}"
    if not folder.exists():
        folder.mkdir()
    held = {"w": W[:2], "b": np.arange(3)}
    path = write(folder, writer, [held])[0]
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    try:
        found = jaxckpt.load_numpy(jaxckpt.formats.rank_files({0: path}))
    except JaxckptError:
        return
    for name in found.keys() & held.keys():
        if isinstance(found[name], np.ndarray) and found[name].shape == held[name].shape:  # else a name was damaged
            # A header that says F64 in place of I64 is valid: these files have no checksum of their headers.
            assert found[name].dtype == held[name].dtype or writer in ("savez", "safetensors")
            assert (found[name].view(np.uint8) != held[name].view(np.uint8)).sum() <= (writer != "savez_compressed")


@given(st.binary(max_size=100), st.booleans())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes, as_zip: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.write_bytes(b"PK\3\4" * as_zip + content)
    with pytest.raises(JaxckptError):
        jaxckpt.formats.rank_files({0: path})


def test_a_member_with_two_names_is_damage(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", weight=W, ü=W)
    assert set(read_npz(str(tmp_path / "a.npz"))) == {"weight", "ü"}
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.rindex(b"weight.npy")] ^= 0x20  # in the directory at the end only
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"'Weight\.npy' has another name"):
        jaxckpt.load_numpy(tmp_path / "a.npz")


def test_verify_compares_the_checksums_of_plain_members(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=W, order=np.asfortranarray(W), empty=np.zeros(0))
    assert jaxckpt.verify(tmp_path / "a.npz").ok
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.index(W.tobytes()) + 5] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    (problem,) = jaxckpt.verify(tmp_path / "a.npz").problems
    assert problem.leaf == "w"
    assert "checksum" in problem.reason


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (5, "the file of rank 0 must be a non-empty str or PathLike, found 5"),
        ("a\0b", "must be a non-empty str"),
        ("s3://ab/rank0.npz", "names the bucket 'ab', but names of buckets have 3 to 63"),
        (Path("s3://bucket/rank0.npz"), "lost a slash"),
    ],
)
def test_a_value_that_is_not_a_local_path_is_an_input_error(path: Any, reason: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=reason):
        jaxckpt.formats.rank_files({0: path}, specs=P("rank"))
    with pytest.raises(jaxckpt.errors.InputError, match=reason):
        jaxckpt.formats.oneflow_ranks({0: path})
