"""`convert` to other layouts and formats, in bounded memory; and invalid input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import processes
import pytest
from command_line import run_json
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._formats import destination
from jaxckpt._model.dtypes import npy_dtype
from jaxckpt._restore.read_loop import StoredArray
from jaxckpt._sources.format_registry import formats, written_formats
from jaxckpt._store.foreign_files import names_or_empty

DTYPES = (
    *(np.float32, np.float64, np.float16, jnp.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_, np.complex64),
)


def mesh_of(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("data", "model"))


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def bits(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits of a dtype, which include NaNs."""
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return (raw & 1 if dtype is np.bool_ else raw).view(dtype).reshape(shape)


@pytest.fixture
def everything(tmp_path: Path) -> tuple[Path, Any]:
    """A tree of all kinds of leaves and containers, saved from a 2×4 mesh."""
    mesh = mesh_of(2, 4)
    tree = {
        "layers": [
            {"w": jax.device_put(bits(np.float32, (16, 24), n), NamedSharding(mesh, P("data", "model")))}
            for n in range(20)
        ],
        "embed": jax.device_put(bits(jnp.bfloat16, (128, 40)), NamedSharding(mesh, P(("data", "model")))),
        "keys": jax.random.split(jax.random.key(3), 4),
        "empty": jnp.zeros((0, 3)),
        "step": 7,
        "name": "x" * 5000,
        "host": (np.arange(6).reshape(2, 3), np.float32(2.5), None, {}, b"raw", 1 + 2j, True),
    }
    jaxckpt.save(tmp_path / "from", tree, metadata={"note": [1, 2]})
    return tmp_path / "from", tree


# Our own format -------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_bit_by_bit(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    jaxckpt.convert(path, tmp_path / "to")
    assert jaxckpt.diff(path, tmp_path / "to").identical
    assert jaxckpt.verify(tmp_path / "to").ok
    copy, original = jaxckpt.open(tmp_path / "to"), jaxckpt.open(path)
    assert copy.metadata == {"note": [1, 2]}
    assert {name: str(leaf.layout) for name, leaf in copy.leaves.items()} == {
        name: str(leaf.layout) for name, leaf in original.leaves.items()
    }
    restored = jaxckpt.restore(tmp_path / "to")
    assert restored["embed"].sharding.spec == P(("data", "model"))
    assert jax.random.key_impl(restored["keys"]) == jax.random.key_impl(jax.random.key(0))


def test_another_mesh_and_other_specs(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, tree = everything
    jaxckpt.convert(
        path,
        tmp_path / "to",
        mesh={"data": 8},
        specs=lambda path, leaf: P("data") if leaf.shape[:1] == (16,) else P(),
    )
    assert jaxckpt.diff(path, tmp_path / "to").identical
    opened = jaxckpt.open(tmp_path / "to")
    assert opened["layers/3/w"].spec == P("data")
    assert opened["embed"].spec == P()
    restored = jaxckpt.restore(tmp_path / "to", mesh=Mesh(np.array(jax.devices()), ("data",)))
    assert restored["layers"][3]["w"].sharding.spec == P("data")
    assert same(restored["layers"][3]["w"], tree["layers"][3]["w"])


def test_a_mesh_counts_by_its_axis_sizes(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    meshes = {"sizes": {"data": 2, "model": 4}, "abstract": mesh_of(2, 4).abstract_mesh, "devices": mesh_of(2, 4)}
    for name, mesh in meshes.items():
        jaxckpt.convert(path, tmp_path / name, mesh=mesh, specs=P("model"), select="layers")
    layouts = {str(jaxckpt.open(tmp_path / name)["layers/3/w"].layout) for name in meshes}
    assert len(layouts) == 1
    assert "'model'" in layouts.pop()


def test_each_process_of_the_new_mesh_reads_its_own_objects(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": jnp.asarray(bits(np.int32, (1024, 1024)))})
    over_read = []
    for spec, name in ((P(), "whole"), (P(None, "x"), "columns")):
        jaxckpt.convert(tmp_path / "from", tmp_path / name, mesh={"x": 16}, specs=spec)
        plan = jaxckpt.open(tmp_path / name).plan(mesh={"x": 16}, specs=P(None, "x"), devices_per_process=1)
        over_read.append(plan.over_read)
    assert over_read[0] > 3
    assert over_read[1] < 1.01


def test_saved_specs_are_carried_over_by_axis_name(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    jaxckpt.convert(path, tmp_path / "to", mesh={"model": 2})
    assert jaxckpt.open(tmp_path / "to")["layers/0/w"].spec == P(None, "model")


def test_a_mesh_without_any_axis_of_the_source_is_an_error(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    with pytest.raises(
        jaxckpt.errors.SpecError, match=r"(?s)none of the axes.*data, model.*'layers/\*/w' \(\d+ leaves\) has"
    ):
        jaxckpt.convert(path, tmp_path / "to", mesh={"modle": 2})
    assert not (tmp_path / "to").exists()
    jaxckpt.convert(path, tmp_path / "to", mesh={"modle": 2}, specs=P())
    assert jaxckpt.open(tmp_path / "to")["layers/0/w"].spec == P()


def test_from_three_devices_to_five(tmp_path: Path) -> None:
    data = bits(np.float32, (30, 7))
    three = Mesh(np.array(jax.devices()[:3]), ("x",))
    jaxckpt.save(tmp_path / "3", {"w": jax.device_put(data, NamedSharding(three, P("x")))})
    jaxckpt.convert(tmp_path / "3", tmp_path / "5", mesh={"x": 5})
    restored = jaxckpt.restore(tmp_path / "5", mesh=Mesh(np.array(jax.devices()[:5]), ("x",)))["w"]
    assert restored.sharding.spec == P("x")
    assert same(restored, data)


def test_smaller_chunks_for_a_reader_of_small_boxes(tmp_path: Path, bytes_read: Callable[[], int]) -> None:
    jaxckpt.save(tmp_path / "large", {"w": bits(np.float32, (1024, 1024))})
    jaxckpt.convert(tmp_path / "large", tmp_path / "small", chunk_bytes=4096)
    counts = []
    for name in ("large", "small"):
        leaf, before = jaxckpt.open(tmp_path / name)["w"], bytes_read()
        assert leaf[5, 7].shape == ()
        counts.append(bytes_read() - before)
    assert counts[0] > 500_000
    assert counts[1] < 25_000


def test_chunk_bytes_is_refused_for_a_format_without_chunks(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.ones(3)})
    with pytest.raises(jaxckpt.errors.InputError, match="chunk_bytes"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to.npz", chunk_bytes=4096)
    assert not (tmp_path / "to.npz").exists()


def test_selected_and_renamed(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, tree = everything
    jaxckpt.convert(
        path, tmp_path / "to", select=["model/blocks/1*/w", "s"], rename={"layers": "model/blocks", "step": "s"}
    )
    loaded = jaxckpt.load_numpy(tmp_path / "to")
    assert set(loaded) == {"model", "s"}
    assert set(loaded["model"]["blocks"]) == {1, *range(10, 20)} or set(loaded["model"]["blocks"]) == {
        str(n) for n in (1, *range(10, 20))
    }
    found = jaxckpt.open(tmp_path / "to")
    assert same(found["model/blocks/12/w"][...], tree["layers"][12]["w"])
    assert jaxckpt.verify(tmp_path / "to").ok


def test_existing_files_are_kept_unless_overwrite_is_set(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    for name in ("to", "to.safetensors", "to.npz", "to.zarr"):
        select = None if name == "to" else "layers"
        jaxckpt.convert(path, tmp_path / name, select=select)
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="overwrite"):
            jaxckpt.convert(path, tmp_path / name, select=select)
        jaxckpt.convert(path, tmp_path / name, select="layers/0", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["from", "to", "to.npz", "to.safetensors", "to.zarr"]
    assert len(jaxckpt.load_numpy(tmp_path / "to.safetensors")["layers"]) == 1


def test_a_pipe_or_device_is_never_replaced(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"x": 1})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="neither a file nor a folder"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "pipe", format="npz", overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"specs": P("x")}, jaxckpt.errors.InputError, "needs mesh="),
        (
            {"mesh": {"x": 7}, "specs": P("x")},
            jaxckpt.errors.SpecError,
            "(?s)do not fit 22 leaves.*is not divisible",
        ),
        ({"mesh": {"x": 2}, "specs": {"layer": P("x")}}, jaxckpt.errors.SpecError, "did you mean"),
        ({"format": "hdf5"}, jaxckpt.errors.InputError, "expected one of jaxckpt, npz"),
        ({"format": "huggingface"}, jaxckpt.errors.InputError, "did you mean 'safetensors'.*; expected one of jaxckpt"),
        ({"format": 3}, jaxckpt.errors.InputError, "format=3; expected one of jaxckpt, npz"),
        ({"select": "nothing"}, jaxckpt.errors.TreeError, "matches none"),
        ({"format": "zarr", "mesh": {"x": 2}}, jaxckpt.errors.InputError, "has no layout"),
        ({"format": "npz"}, jaxckpt.errors.TreeError, "'name' is a str"),
    ],
)
def test_impossible_conversions_are_reported_and_leave_nothing(
    everything: tuple[Path, Any], tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    path, _ = everything
    with pytest.raises(error, match=message):
        jaxckpt.convert(path, tmp_path / "to", **arguments)
    assert os.listdir(tmp_path) == ["from"]


def test_damage_ends_a_conversion_and_leaves_no_files(everything: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = everything
    (victim,) = path.glob("data-*/*-float32-16x24/c/0/0/0")
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    for name in ("to", "to.safetensors", "to.zarr"):
        with pytest.raises(jaxckpt.errors.DataError, match="layers/"):
            jaxckpt.convert(path, tmp_path / name, select="layers")
    assert [name for name in os.listdir(tmp_path) if name not in ("from", "to")] == []
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.open(tmp_path / "to")


# Other formats --------------------------------------------------------------------------------------------


def arrays_of_all_dtypes() -> dict[str, Any]:
    return {f"a.{np.dtype(dtype).name}": bits(dtype, (5, 3), n) for n, dtype in enumerate(DTYPES)}


def test_safetensors_out_and_in(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    tree = arrays_of_all_dtypes() | {"scalar": np.float32(3), "none": np.zeros((0, 2), np.int8), "n": 3}
    jaxckpt.save(tmp_path / "from", tree)
    jaxckpt.convert(tmp_path / "from", tmp_path / "to.safetensors")
    ours = jaxckpt.load_numpy(tmp_path / "to.safetensors")
    assert ours.keys() == tree.keys()
    assert all(same(ours[name], value) for name, value in tree.items())
    jaxckpt.convert(tmp_path / "from", tmp_path / "fit.safetensors", select=lambda name: "float8" not in name)
    theirs = numpy.load_file(tmp_path / "fit.safetensors")  # its NumPy reader has no float8
    assert theirs.keys() == {name for name in tree if "float8" not in name}
    assert all(same(value, tree[name]) for name, value in theirs.items())
    assert jaxckpt.open(tmp_path / "to.safetensors").format == "safetensors"
    assert jaxckpt.verify(tmp_path / "to.safetensors").ok


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_tree_of_one_leaf_is_still_one_leaf(name: str, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", np.arange(3))
    jaxckpt.convert(tmp_path / "from", tmp_path / name)
    assert same(jaxckpt.load_numpy(tmp_path / name), np.arange(3))


def test_a_safetensors_file_is_restored_onto_a_mesh(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = {f"model.layers.{n}.weight": bits(jnp.bfloat16, (24, 8), n) for n in range(5)}
    numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    restored = jaxckpt.restore(
        tmp_path / "model.safetensors",
        mesh=mesh_of(2, 4),
        specs=P("data", "model"),
        rename=lambda p: p.replace(".", "/"),
    )
    weight = restored["model"]["layers"]["2"]["weight"]
    assert weight.sharding.spec == P("data", "model")
    assert same(weight, tensors["model.layers.2.weight"])
    box = jaxckpt.open(tmp_path / "model.safetensors")["model.layers.1.weight"][3:5, ::2]
    assert same(box, tensors["model.layers.1.weight"][3:5, ::2])


def test_manifest_sha256_refuses_a_format_without_a_manifest(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.zeros(3)})
    jaxckpt.convert(tmp_path / "from", tmp_path / "w.safetensors")
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.open(tmp_path / "w.safetensors", manifest_sha256="0" * 64)
    assert "safetensors>" in repr(jaxckpt.open(tmp_path / "w.safetensors"))


def test_shards_with_their_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    tree = {"model": {"layers": [{"kernel": bits(np.float32, (10, 10), n)} for n in range(7)]}}
    jaxckpt.save(tmp_path / "from", tree)
    monkeypatch.setattr("jaxckpt._formats.safetensors.SHARD_BYTES", 1000)
    jaxckpt.convert(
        tmp_path / "from",
        tmp_path / "to",
        format="safetensors",
        rename=lambda path: path.replace("/", ".").replace("kernel", "weight"),
    )
    index = json.loads((tmp_path / "to/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2800}
    assert len(set(index["weight_map"].values())) == 4
    for name, file in index["weight_map"].items():
        n = int(name.split(".")[2])
        assert same(numpy.load_file(tmp_path / "to" / file)[name], tree["model"]["layers"][n]["kernel"])
    assert same(jaxckpt.load_numpy(tmp_path / "to")["model.layers.6.weight"], tree["model"]["layers"][6]["kernel"])
    assert jaxckpt.verify(tmp_path / "to").ok


def test_an_index_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"a": np.zeros(3), "b": np.ones(2)}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weights, message in (
        ({"a": "1.safetensors"}, "'b' is in the file but not in the index"),
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"}, "'c' is in the index but not in the file"),
        ({"b": "2.safetensors"}, "2.safetensors', which is not in its folder"),
        ({"a": "../1.safetensors"}, "outside its folder"),
        ({"a": "x" * 256}, "a name that no file can have"),
        ({"a": "x/" * 600 + "x"}, "a name that no file can have"),
        ({"a": "\ud800"}, "a name that no file can have"),
    ):
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(jaxckpt.errors.DataError, match=message):
            jaxckpt.open(tmp_path)
    index.write_text("{")
    with pytest.raises(jaxckpt.errors.DataError, match="is damaged"):
        jaxckpt.open(tmp_path)


def test_several_files_without_an_index_are_listed_but_not_opened(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    for name in ("b", "a"):
        jaxckpt.convert(tmp_path / "from", tmp_path / f"to/{name}.safetensors")
    with pytest.raises(
        jaxckpt.errors.NotACheckpointError, match=r"has 2 \.safetensors files, but no index.* as .*/a\.safe"
    ):
        jaxckpt.open(tmp_path / "to")
    with pytest.raises(
        jaxckpt.errors.CheckpointExistsError, match=r"not part of one checkpoint.*a.safetensors, b.safetensors"
    ):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to", format="safetensors", overwrite=True)
    assert [entry["format"] for entry in run_json("ls", str(tmp_path / "to"))["checkpoints"]] == ["safetensors"] * 2


def test_npz_out(tmp_path: Path) -> None:
    """Dtypes that NumPy lacks become larger ones, without loss."""
    tree = {np.dtype(d).name: bits(d, (4, 6), n) for n, d in enumerate(DTYPES)} | {
        "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
        "deep": {"er": np.arange(3)},
        "n": 2.5,
        "zero": np.zeros((3, 0)),
    }
    jaxckpt.save(tmp_path / "from", tree)
    jaxckpt.convert(tmp_path / "from", tmp_path / "to.npz")
    with np.load(tmp_path / "to.npz", allow_pickle=False) as loaded:
        assert same(loaded["deep/er"], tree["deep"]["er"])
        tree.pop("deep")
        assert all(
            same(loaded[name], np.asarray(value, npy_dtype(np.asarray(value).dtype))) for name, value in tree.items()
        )
        assert (loaded["bfloat16"].dtype, loaded["int4"].dtype) == (np.float32, np.int8)


@pytest.mark.parametrize("field", [20, 24, 42])
def test_an_npz_that_lacks_its_zip64_sizes_is_damaged(tmp_path: Path, field: int) -> None:
    np.savez(tmp_path / "a.npz", w=np.arange(5.0))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    entry = content.index(b"PK\x01\x02")
    content[entry + field : entry + field + 4] = b"\xff" * 4
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(jaxckpt.errors.DataError, match="directory is damaged"):
        jaxckpt.load_numpy(tmp_path / "a.npz")


def test_zarr_out(everything: tuple[Path, Any], tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path, tree = everything
    jaxckpt.convert(path, tmp_path / "to.zarr", select=lambda path: path not in ("name", "host/4"))
    group = zarr.open_group(tmp_path / "to.zarr", mode="r")
    assert same(group["layers/3/w"][...], tree["layers"][3]["w"])
    assert same(group["embed"][...], np.asarray(tree["embed"]).view(np.uint16))
    assert group["embed"].attrs["jaxckpt"] == {"dtype": "bfloat16"}
    assert group["empty"].shape == (0, 3)
    assert group.attrs["jaxckpt"]["values"]["step"] == {"kind": "int", "value": "7"}


def test_a_name_that_leaves_the_group_is_refused(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"..": {"x": np.zeros(3)}, "__a": np.zeros(2), "zarr.json": np.ones(1)})
    with pytest.raises(jaxckpt.errors.TreeError, match=r"(?s)3 of these.*'\.\./x'.*'__a'.*'zarr.json'"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to.zarr")
    assert os.listdir(tmp_path) == ["from"]


def test_names_that_a_reader_would_not_find_again_are_refused(tmp_path: Path) -> None:
    names = {
        "to.safetensors": ["__metadata__"],
        "to.npz": ["nul\0"],
        "to.zarr": ["back\\slash", "ü" * 128],
        "to": ["back\\slash"],
    }
    for to, bad in names.items():
        jaxckpt.save(tmp_path / "from", {name: np.ones(2) for name in [*bad, "fine"]}, overwrite=True)
        with pytest.raises(jaxckpt.errors.TreeError, match=f"{len(bad)} of these leaves"):
            jaxckpt.convert(tmp_path / "from", tmp_path / to, format="orbax" if to == "to" else None)
        assert os.listdir(tmp_path) == ["from"]


def test_a_url_is_not_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jaxckpt.save("from", {"w": np.arange(5.0)})
    for to in ("s3://bucket/to.npz", "s3:/bucket/to.safetensors", "gs://bucket/to.zarr", "", "a\0.npz", None):
        with pytest.raises(jaxckpt.errors.InputError, match=r"looks like a URL|must be a non-empty"):
            jaxckpt.convert("from", to, format="npz" if to == "" else None)  # pyright: ignore[reportArgumentType]
    jaxckpt.convert("from", f"file://{tmp_path}/to.npz")
    assert sorted(os.listdir(tmp_path)) == ["from", "to.npz"]


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.h5", "m.ckpt", "m.msgpack", "m.gguf", "m.PT", "m.NPZ"])
def test_the_suffix_of_another_format_is_refused(tmp_path: Path, name: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    for to in (tmp_path / name, f"{(tmp_path / name).as_uri()}", f"memory://nowhere/{name}"):
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"does not write that format.*\.npz, \.safetensors, \.zarr; .*orbax"
        ):
            jaxckpt.convert(tmp_path / "from", to)
    assert os.listdir(tmp_path) == ["from"]
    jaxckpt.convert(tmp_path / "from", tmp_path / name, format="jaxckpt")
    assert jaxckpt.load_numpy(tmp_path / name)["w"][4] == 4


def test_an_int_beyond_64_bits_is_reported(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"large": 1 << 70, "small": 1 << 40})
    with pytest.raises(jaxckpt.errors.TreeError, match=r"(?s)1 of these leaves.*'large' is an int beyond 64 bits"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to.npz")


# An existing destination ----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["to", "to.safetensors", "to.npz", "to.zarr"])
@pytest.mark.parametrize("there", ["file", "link", "dangling", "empty", "checkpoint"])
def test_a_file_a_link_or_a_checkpoint_is_replaced(tmp_path: Path, to: str, there: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").write_text("kept")
    at = tmp_path / to
    if there == "file":
        at.write_text("old")
    elif there == "empty":
        at.mkdir()
    elif there == "checkpoint":
        jaxckpt.save(tmp_path / "old", {"old": np.zeros(3)})
        (tmp_path / "old").rename(at)
    else:
        at.symlink_to(tmp_path / ("kept" if there == "link" else "nowhere"))
    jaxckpt.convert(tmp_path / "from", at, format="orbax" if to == "to" else None, overwrite=True)
    assert not at.is_symlink()
    assert (tmp_path / "kept" / "note").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == sorted(["from", "kept", to])
    if to != "to.zarr":
        assert jaxckpt.load_numpy(at)["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: jaxckpt.save(path, {"w": jnp.ones(3)}, format="safetensors"),
        lambda path: jaxckpt.convert(path.parent.parent / "from", path, format="safetensors"),
        lambda path: jaxckpt.convert(path.parent.parent / "from", f"{path}.npz"),
    ],
)
def test_a_destination_below_a_broken_link_is_an_error(write: Callable[[Path], object], tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(jaxckpt.errors.InputError, match=r"link is a symbolic link to .*gone, which does not exist"):
        write(tmp_path / "link" / "to")
    assert sorted(os.listdir(tmp_path)) == ["from", "link"]


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_while_a_folder_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        jaxckpt.save(tmp_path / name, {"w": np.full(5, value)})
    at = tmp_path / "to"
    jaxckpt.convert(tmp_path / "old", at, format="orbax")
    calls: list[str] = []

    def interrupted(source: str, target: str) -> None:
        rename(source, target)
        calls.append(target)
        if len(calls) == after + 1:
            raise KeyboardInterrupt

    rename = os.rename
    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jaxckpt.convert(tmp_path / "new", at, format="orbax", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "to"]
    assert jaxckpt.load_numpy(at)["w"].tolist() == [1.0 + after] * 5


def test_an_interrupt_while_the_destination_is_locked_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})

    def interrupted(*arguments: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(destination.fcntl, "flock", interrupted)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to.npz")
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == ["from"]


@pytest.mark.parametrize("to", ["to", "to.safetensors", "to.npz", "to.zarr"])
def test_a_folder_with_other_files_is_never_deleted(tmp_path: Path, to: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    format = "orbax" if to == "to" else None
    (tmp_path / to / "precious").mkdir(parents=True)
    (tmp_path / to / "model.safetensors").write_text("another project")
    with pytest.raises(
        jaxckpt.errors.CheckpointExistsError, match=r"not part of one checkpoint.*model.safetensors, precious"
    ):
        jaxckpt.convert(tmp_path / "from", tmp_path / to, format=format, overwrite=True)
    assert sorted(os.listdir(tmp_path / to)) == ["model.safetensors", "precious"]

    with jaxckpt.Checkpointer(tmp_path / "run") as steps:
        steps.save(1, {"w": np.arange(5.0)})
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="holds files that are not part of one checkpoint"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "run", format=format or to[3:], overwrite=True)
    for step in (1, 2):
        jaxckpt.convert(tmp_path / "from", tmp_path / "manager" / str(step) / "default", format="orbax")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="holds files that are not part of one checkpoint"):
        jaxckpt.convert(f"{tmp_path}/manager@2", tmp_path / "manager", format=format or to[3:], overwrite=True)
    step = tmp_path / "manager" / "1"
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="is in"):
        jaxckpt.convert(step / "default", step, format=format or to[3:], overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "manager" / "1")["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("before", ["from", "orbax", "hf", "m.safetensors", "m.npz"])
@pytest.mark.parametrize("format", ["orbax", "safetensors", "npz"])
def test_a_checkpoint_is_converted_in_its_place(tmp_path: Path, before: str, format: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": bits(np.float32, (30, 4)), "b": np.zeros(0)})
    if "." in before and not before.endswith(format):
        pytest.skip("the suffix determines the format of that file")
    if before != "from":
        known = {"orbax": "orbax", "hf": "safetensors"}
        jaxckpt.convert(tmp_path / "from", tmp_path / before, format=known.get(before))
    jaxckpt.convert(tmp_path / before, tmp_path / before, format=format, overwrite=True)
    assert same(jaxckpt.load_numpy(tmp_path / before)["w"], bits(np.float32, (30, 4)))
    assert sorted(os.listdir(tmp_path)) == sorted({"from", before})


def test_an_error_of_the_file_system_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "to").mkdir()
    for to in ("file/to.safetensors", "file/to.npz", "file/to.zarr"):
        with pytest.raises(jaxckpt.errors.StorageError, match="cannot write"):
            jaxckpt.convert(tmp_path / "from", tmp_path / to)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("to.safetensors", "to.npz", "to.zarr"):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(jaxckpt.errors.StorageError, match="No space left"):
                jaxckpt.convert(tmp_path / "from", tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["file", "from", "to"]


def test_the_old_file_is_restored_if_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    jaxckpt.convert(tmp_path / "from", tmp_path / "to", format="orbax")
    rename = os.rename

    def refused(a: str, b: str) -> None:
        if b == str(tmp_path / "to") and not a.endswith("old"):
            raise OSError(5, "Input/output error")
        rename(a, b)

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(jaxckpt.errors.StorageError):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to", format="safetensors", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["from", "to"]
    assert jaxckpt.load_numpy(tmp_path / "to")["w"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.child
@pytest.mark.parametrize("to", ["to", "to.safetensors", "to.npz", "to.zarr"])
@pytest.mark.parametrize("at", ["write", "rename"])
def test_the_next_conversion_deletes_what_a_killed_one_left(tmp_path: Path, to: str, at: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    format = "orbax" if to == "to" else None
    jaxckpt.convert(tmp_path / "from", tmp_path / to, format=format)
    program = processes.PROGRAMS / "killed_conversion.py"
    done = processes.finish(program, tmp_path / "from", tmp_path / to, format or "", at)
    assert done.returncode == -9, str(done)
    assert any("-convert-" in name for name in os.listdir(tmp_path))
    # A conversion that fails restores the previous files.
    jaxckpt.save(tmp_path / "bad", dict.fromkeys(("__metadata__", "nul\0", "back\\slash"), np.ones(2)))
    with pytest.raises(jaxckpt.errors.TreeError):
        jaxckpt.convert(tmp_path / "bad", tmp_path / to, format=format, overwrite=True)
    if to != "to.zarr":
        assert jaxckpt.load_numpy(tmp_path / to)["w"].tolist() == [0, 1, 2, 3, 4]
    jaxckpt.convert(tmp_path / "from", tmp_path / to, format=format, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted(["bad", "from", to])


def test_a_conversion_leaves_the_draft_of_a_running_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    sync, others = destination._sync, []  # pyright: ignore[reportPrivateUsage]

    def write_another_draft(path: str) -> None:
        if not others:
            others.append(path)
            with ThreadPoolExecutor() as rival:
                rival.submit(jaxckpt.convert, tmp_path / "from", tmp_path / "to.npz", overwrite=True).result()
        sync(path)

    monkeypatch.setattr(destination, "_sync", write_another_draft)
    jaxckpt.convert(tmp_path / "from", tmp_path / "to.npz", overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "to.npz")["w"].tolist() == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["from", "to.npz"]


def test_zarr_names_each_dimension_once(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    tree = {"w": np.zeros((2, 3)), "a": {"w": np.zeros((4, 2)), "w:0": np.zeros(5)}, "step": np.float32(1)}
    jaxckpt.save(tmp_path / "from", tree)
    jaxckpt.convert(tmp_path / "from", tmp_path / "to.zarr")
    group = zarr.open_group(tmp_path / "to.zarr", mode="r")
    names = {path: group[path].metadata.dimension_names for path in ("w", "a/w", "a/w:0", "step")}
    assert names == {"w": ("w/0", "w/1"), "a/w": ("a/w/0", "a/w/1"), "a/w:0": ("a/w:0/0",), "step": ()}


def test_zarr_keeps_shapes_without_dimensions(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    tree = {np.dtype(dtype).name: np.asarray(bits(dtype, (1,))[0], dtype) for dtype in DTYPES}
    jaxckpt.save(tmp_path / "from", tree)
    jaxckpt.convert(tmp_path / "from", tmp_path / "to.zarr")
    group = zarr.open_group(tmp_path / "to.zarr", mode="r")
    for name, array in tree.items():
        assert group[name].shape == ()
        assert np.asarray(group[name][()]).tobytes() == array.tobytes()


def test_a_checkpoint_inside_another_does_not_change_its_format(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    jaxckpt.convert(tmp_path / "from", tmp_path / "model", format="safetensors")
    jaxckpt.convert(tmp_path / "model", tmp_path / "model" / "orbax", format="orbax")
    assert jaxckpt.load_numpy(tmp_path / "model")["w"].tolist() == [0, 1, 2, 3, 4]


# Reading in slabs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (33, 5), (3, 4, 5), (2, 3, 70), (1, 1, 200)])
def test_slabs_are_the_whole_array_in_order(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = bits(np.float32, shape)
    options = jaxckpt.Options(chunk_bytes=64, object_bytes=256)
    jaxckpt.save(tmp_path / "from", {"w": data}, options=options)
    source = jaxckpt.open(tmp_path / "from")._source
    for host_bytes in (4, 300, 2000, 1 << 20):
        stored = StoredArray(source, 0, jaxckpt.Options(host_bytes=host_bytes))
        slabs = list(stored.slabs())
        assert b"".join(slab.tobytes() for slab in slabs) == data.tobytes()
        assert all(slab.nbytes <= max(host_bytes // 4, 64) for slab in slabs)


@pytest.mark.parametrize("format", ["jaxckpt", "safetensors", "npz", "zarr"])
def test_memory_is_bounded(tmp_path: Path, run_python: processes.RunPython, format: str) -> None:
    options = jaxckpt.Options(sync=False)
    jaxckpt.save(tmp_path / "small", {"w": np.zeros((512, 512), np.float32)}, options=options)
    jaxckpt.save(tmp_path / "large", {f"w{n}": np.zeros((6144, 2048), np.float32) for n in range(4)}, options=options)
    out = tmp_path / ("out.safetensors" if format == "safetensors" else "out")
    args = [str(tmp_path / "small"), str(tmp_path / "large"), str(out), format]
    limits = json.dumps({"host_bytes": 32 << 20, "object_bytes": 16 << 20, "sync": False})
    printed = run_python(processes.PROGRAMS / "memory_of_a_conversion.py", args=[*args, limits])
    assert int(printed) < 64 << 20  # the arrays have 192 MiB; options.host_bytes is 32 MiB


# Several processes ----------------------------------------------------------------------------------------


def test_each_process_reads_its_shards_of_a_foreign_file_and_one_converts(
    tmp_path: Path, run_processes: processes.RunProcesses
) -> None:
    tree = {f"w{n}": np.arange(n, n + 16 * 32, dtype=np.float32).reshape(16, 32) for n in range(3)}
    jaxckpt.save(tmp_path / "from", {**tree, "text": "x" * 5000})
    jaxckpt.convert(tmp_path / "from", tmp_path / "w.safetensors", select="w*")
    arguments = {name: str(tmp_path / name) for name in ("from", "to")} | {"file": str(tmp_path / "w.safetensors")}
    done = run_processes(processes.PROGRAMS / "convert_in_two.py", processes=2, devices_per_process=4, args=arguments)
    assert done[0].stdout.split() == ["4", "PeerFailedError", "PeerFailedError"]
    assert done[1].stdout.split() == ["4", "NotACheckpointError", "NotACheckpointError"]
    assert jaxckpt.diff(tmp_path / "from", tmp_path / "to", select="w*").leaves[0].differing == 0
    assert jaxckpt.diff(tmp_path / "from", tmp_path / "to-copy").identical
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "to-b"))]


def test_data_with_a_wrong_checksum_does_not_get_a_new_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "from.npz", w=np.arange(1000.0))
    content = bytearray((tmp_path / "from.npz").read_bytes())
    content[4000] ^= 1
    (tmp_path / "from.npz").write_bytes(content)
    for name in ("to", "to.safetensors"):
        with pytest.raises(jaxckpt.errors.DataError, match=r"'w'.*checksum is"):
            jaxckpt.convert(tmp_path / "from.npz", tmp_path / name)
    assert os.listdir(tmp_path) == ["from.npz"]


# What is not deleted ---------------------------------------------------------------------------------------

MARKS = (
    *("model.mlir", "snapshot_done", "pickled_data", "manifest.json", "zarr.json", "_METADATA", "a.distcp"),
    *("x.safetensors", ".metadata", "pytorch_optim.bin.index.json", "_CHECKPOINT_METADATA"),
)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("below", ["thesis.txt", "src/thesis.txt"])
def test_a_project_folder_with_a_file_of_a_known_name_is_kept(tmp_path: Path, mark: str, below: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    at = tmp_path / "project"
    (at / below).parent.mkdir(parents=True)
    (at / mark).write_text("{}")
    (at / below).write_text("precious")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match=below.partition("/")[0]):
        jaxckpt.convert(tmp_path / "from", at, format="orbax", overwrite=True)
    assert (at / below).read_text() == "precious"


@pytest.mark.parametrize("format", ["safetensors", "zarr", "orbax", "jaxckpt"])
def test_a_checkpoint_with_other_files_is_kept_and_they_are_named(tmp_path: Path, format: str) -> None:
    tree = {"w": np.arange(5.0), "deep": {"er": {"b": np.ones((2, 3)), "s": np.float32(1)}}, "n": 1}
    jaxckpt.save(tmp_path / "from", tree)
    at = tmp_path / "to"
    at.mkdir()
    inner = at / "model.safetensors" if format == "safetensors" else at
    jaxckpt.convert(tmp_path / "from", inner, format=format, overwrite=True)
    (at / "train.py").write_text("precious")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match=r"one checkpoint \(train.py\)"):
        jaxckpt.convert(tmp_path / "from", at, format="orbax", overwrite=True)
    (at / "train.py").unlink()
    jaxckpt.convert(tmp_path / "from", at, format="orbax", overwrite=True)
    assert jaxckpt.load_numpy(at)["w"].tolist() == [0, 1, 2, 3, 4]


def test_files_of_ranks_are_not_deleted_by_their_conversion(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"ranks/{rank}").mkdir(parents=True)
        np.savez(tmp_path / f"ranks/{rank}/r.npz", w=np.arange(3) + 3 * rank)
    files = {rank: tmp_path / f"ranks/{rank}/r.npz" for rank in range(2)}
    source = jaxckpt.formats.rank_files(files, specs={"w": P("rank")})
    for at in ("ranks", "ranks/1", "ranks/1/r.npz"):
        with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="is in"):
            jaxckpt.convert(source, tmp_path / at, format=None if at.endswith(".npz") else "orbax", overwrite=True)
    assert jaxckpt.load_numpy(source)["w"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["a.pt/", "a.pt//", "a.pt/."])
def test_a_slash_at_the_end_does_not_hide_a_suffix(tmp_path: Path, name: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    with pytest.raises(jaxckpt.errors.InputError, match=r"ends in .pt"):
        jaxckpt.convert(tmp_path / "from", f"{tmp_path}/{name}")
    jaxckpt.convert(tmp_path / "from", f"{tmp_path}/a.npz/")
    assert (tmp_path / "a.npz").is_file()
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize(
    ("name", "format"), [("a.npz", "safetensors"), ("a.safetensors", "jaxckpt"), ("a.zarr", "npz"), ("a.npz/", "orbax")]
)
def test_a_suffix_of_another_format_is_refused(tmp_path: Path, name: str, format: str) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    expected = rf"ends in \.\w+, which is format '\w+', but format='{format}': leave out format="
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        jaxckpt.convert(tmp_path / "from", f"{tmp_path}/{name}", format=format)
    assert os.listdir(tmp_path) == ["from"]
    jaxckpt.convert(tmp_path / "from", tmp_path / "a.pt", format="jaxckpt")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".h5"])
@pytest.mark.parametrize("save", [jaxckpt.save, jaxckpt.save_async])
def test_save_refuses_the_name_of_a_file_of_another_library(tmp_path: Path, save: Any, suffix: str) -> None:
    with pytest.raises(
        jaxckpt.errors.InputError, match=rf"ends in \{suffix}, but save writes a folder.*jaxckpt\.convert"
    ):
        save(tmp_path / f"model{suffix}", {"w": np.arange(5.0)})
    assert os.listdir(tmp_path) == []


def test_rename_removes_or_adds_a_prefix(tmp_path: Path) -> None:
    """select= chooses leaves by their new paths."""
    params = {"embed": {"kernel": np.ones(3)}, "scale": np.ones(2)}
    jaxckpt.save(tmp_path / "state", {"params": params, "opt": {"mu": params}})
    jaxckpt.convert(tmp_path / "state", tmp_path / "a.npz", rename={"params": ""}, select=["embed", "scale"])
    assert list(jaxckpt.open(tmp_path / "a.npz")) == ["embed/kernel", "scale"]
    jaxckpt.convert(tmp_path / "a.npz", tmp_path / "b", rename={"": "base/model"})
    assert list(jaxckpt.open(tmp_path / "b")) == ["base/model/embed/kernel", "base/model/scale"]


def test_convert_has_no_dtype(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"convert has no argument dtype: convert does not cast: use .*Rule with dtype="
    ):
        jaxckpt.convert("a", "b", dtype=np.float32)  # pyright: ignore[reportCallIssue]


def test_an_unknown_suffix_is_refused_with_a_list_of_known_ones(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    for name, message in (
        ("a.savetensors", r"ends in \.savetensors: .*format= with one of jaxckpt, npz, orbax"),
        ("a.h5", r"knows are \.npz, \.safetensors, \.zarr"),
        ("a.v2", "format="),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=message):
            jaxckpt.convert(tmp_path / "from", tmp_path / name)
        assert not (tmp_path / name).exists()
    jaxckpt.convert(tmp_path / "from", tmp_path / "a.v2", format="jaxckpt")
    jaxckpt.convert(tmp_path / "from", tmp_path / "run-1.5")
    assert jaxckpt.load_numpy(tmp_path / "run-1.5")["w"].tolist() == [0, 1, 2, 3, 4]


def test_each_written_format_is_listed_and_suffixes_are_unique(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(5.0)})
    assert len({form.name for form in formats()}) == len(formats()) == 15
    suffixes = [suffix for form in formats() for suffix in form.suffixes]
    assert len({*suffixes}) == len(suffixes)
    for name in ("jaxckpt", *written_formats()):
        jaxckpt.convert(tmp_path / "from", tmp_path / name, format=name)
        assert (
            any(
                form.name == name and form.recognizes(str(tmp_path / name), names_or_empty(str(tmp_path / name)))
                for form in formats()
            )
            or name in ("jaxckpt", "orbax-v1")  # which is read as "orbax"
        )


def test_an_orbax_tree_of_one_leaf_is_replaced(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", np.arange(5.0))
    for _ in range(2):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to", format="orbax", overwrite=True)
    assert jaxckpt.load_numpy(tmp_path / "to").tolist() == [0, 1, 2, 3, 4]


# Damage ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_bit_of_an_npz_directory_loses_an_array(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    every = bool(request.config.getoption("--campaign"))  # otherwise two bits of each byte
    arrays = {f"p{n}": np.full(5, n) for n in range(4)}
    np.savez(tmp_path / "x.npz", **arrays)
    content = (tmp_path / "x.npz").read_bytes()
    start = int.from_bytes(content[-6:-2], "little")
    refused = read = 0
    for at in range(start, len(content)):
        for bit in range(8) if every else (at % 8, (at + 3) % 8):
            (tmp_path / "x.npz").write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            try:
                found = jaxckpt.load_numpy(tmp_path / "x.npz")
            except jaxckpt.CorruptError:
                refused += 1
                continue
            read += 1
            assert found.keys() == arrays.keys()
            assert all((found[name] == arrays[name]).all() for name in arrays)
    # Both happen: flips of names, sizes and offsets are found, and flips of dates and attributes do not matter.
    assert refused > 100
    assert read > 100
    (tmp_path / "x.npz").write_bytes(content)
    assert jaxckpt.load_numpy(tmp_path / "x.npz").keys() == arrays.keys(), "without a flip"


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_flipped_bit_of_a_stored_array_is_found_if_the_array_is_read(tmp_path: Path, order: Any) -> None:
    array = np.asarray(np.arange(24.0).reshape(4, 6), order=order)
    np.savez(tmp_path / "x.npz", w=array)
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[content.find(np.float64(17).tobytes())] ^= 4
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(jaxckpt.errors.DataError, match="checksum is"):
        jaxckpt.load_numpy(tmp_path / "x.npz")
    assert jaxckpt.open(tmp_path / "x.npz")["w"][0, 0] == 0


def test_a_repeated_key_of_an_index_is_an_error(tmp_path: Path) -> None:
    for n in range(3):
        jaxckpt.save(tmp_path / "from", {f"w{n}": np.arange(3)}, overwrite=True)
        jaxckpt.convert(tmp_path / "from", tmp_path / f"hf/model-0000{n + 1}-of-00003.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    named = {f"w{n}": f"model-0000{n + 1}-of-00003.safetensors" for n in range(3)}
    index.write_text(json.dumps({"weight_map": named}))
    assert sorted(jaxckpt.load_numpy(tmp_path / "hf")) == ["w0", "w1", "w2"]
    index.write_text(json.dumps({"weight_map": named}).replace("w0", "w1"))
    with pytest.raises(jaxckpt.errors.DataError, match="the member 'w1' occurs more than once"):
        jaxckpt.load_numpy(tmp_path / "hf")
    del named["w2"]
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(jaxckpt.errors.DataError, match=r"model-00003-of-00003.safetensors is not named by"):
        jaxckpt.load_numpy(tmp_path / "hf")


def test_specs_for_missing_leaves_are_an_error(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "from", {"w": np.arange(4.0)})
    with pytest.raises(jaxckpt.errors.SpecError, match="specs has 'w'"):
        jaxckpt.convert(tmp_path / "from", tmp_path / "to", mesh={"data": 1}, specs={"w": P("data")})
