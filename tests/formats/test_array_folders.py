"""Folders of Zarr arrays without another record: those of JAX, Levanter, big_vision and zarr, and our own exports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental.array_serialization import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recorded import require_same

import jaxckpt
from jaxckpt._cli.listing import list_checkpoints
from jaxckpt._formats import destination
from jaxckpt.errors import DataError, NotACheckpointError, StorageError, UnsupportedError

W = np.arange(64, dtype=np.float32).reshape(8, 8)
TREE = {
    "model": {"w": W, "b": np.arange(8).astype(ml_dtypes.bfloat16), "zeros": np.zeros((4, 2), np.int32)},
    "opt": {"count": np.array(3, np.int32)},
}
NAMES = {
    "model/w": W,
    "model/b": TREE["model"]["b"],
    "model/zeros": TREE["model"]["zeros"],
    "opt/count": TREE["opt"]["count"],
}


@pytest.fixture
def sharded() -> dict[str, jax.Array]:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    specs = {"model/w": P("x", "y"), "model/b": P("x")}
    return {name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P()))) for name, array in NAMES.items()}


def serialize(folder: Path, arrays: dict[str, jax.Array], *, ocdbt: bool) -> None:
    specs = [serialization.get_tensorstore_spec(str(folder / name), ocdbt=False) for name in arrays]
    if ocdbt:
        base = {"driver": "file", "path": f"{folder}/"}
        specs = [{"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}} for name in arrays]

    async def write() -> None:
        await asyncio.gather(
            *(serialization.async_serialize(a, s) for a, s in zip(arrays.values(), specs, strict=True))
        )

    asyncio.run(write())


@pytest.mark.parametrize("ocdbt", [False, True])
def test_arrays_of_jax(ocdbt: bool, sharded: dict[str, jax.Array], tmp_path: Path) -> None:
    serialize(tmp_path / "x", sharded, ocdbt=ocdbt)
    require_same(jaxckpt.load_numpy(tmp_path / "x"), TREE)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    restored = jaxckpt.restore(
        tmp_path / "x", mesh=mesh, specs=lambda path, leaf: P("y", "x") if path.endswith("w") else P()
    )
    assert restored["model"]["w"].sharding.spec == P("y", "x")
    require_same(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, TREE))
    assert jaxckpt.verify(tmp_path / "x").ok


@pytest.mark.parametrize("version", [2, 3])
def test_groups_with_an_array_named_like_a_folder_of_chunks(version: int, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "x"), mode="w", zarr_format=version)
    for name in ("c", "a/c", "b/c/d", "w"):
        group.create_array(name, data=W)
    require_same(jaxckpt.load_numpy(tmp_path / "x"), {"a": {"c": W}, "b": {"c": {"d": W}}, "c": W, "w": W})


def chunk_files(kind: str, path: Path) -> list[Path]:
    """Write a group with the arrays "a" and "b" in chunks of 2 x 8, and "s" without dimensions. Returns the files of
    the chunks of "a"."""
    driver, _, separator = kind.partition(" ")
    metadata: dict[str, Any] = {"dimension_separator": separator or "."}
    if driver != "zarr":
        encoding, configuration = ("v2" if "2" in kind else "default"), {"separator": separator[0]} if separator else {}
        metadata = {"chunk_key_encoding": {"name": encoding, "configuration": configuration}}
    for name in "abs":
        shape, chunk = ((), ()) if name == "s" else ((8, 8), (2, 8))
        metadata |= {
            "shape": shape,
            "dtype" if driver == "zarr" else "data_type": "<f4" if driver == "zarr" else "float32",
        }
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        metadata |= {"chunks": chunk} if driver == "zarr" else {"chunk_grid": grid}
        if "sharded" in kind:
            inner = {"chunk_shape": [1] * len(shape), "codecs": [{"name": "bytes"}]}
            metadata["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]
        spec = {"driver": driver, "kvstore": f"file://{path}/{name}/", "metadata": metadata, "create": True}
        array = ts.open(spec).result()
        array[...] = W[array.domain.index_exp] if shape else 7
    files = (file for file in (path / "a").rglob("*") if file.is_file())
    return sorted(file for file in files if file.name not in (".zarray", "zarr.json"))


def rewrite(file: Path) -> None:
    """Write the bytes of a file again, as programs do that do not replace files: the file and its size stay."""
    content = file.read_bytes()
    time.sleep(0.02)  # longer than a tick of the clock of files
    with file.open("r+b") as opened:
        opened.write(content)


@pytest.mark.parametrize("kind", ["zarr", "zarr /", "zarr3", "zarr3 .", "zarr3 .2", "zarr3 /2", "zarr3 /sharded"])
def test_a_chunk_that_is_rewritten(kind: str, tmp_path: Path) -> None:
    first, *_, last = chunk_files(kind, tmp_path)
    checkpoint = jaxckpt.open(tmp_path)
    np.testing.assert_array_equal(checkpoint["a"][:2], W[:2])
    rewrite(last)  # nothing of it was read
    np.testing.assert_array_equal(checkpoint["a"][:], W)
    assert checkpoint["s"][...] == 7
    for file, name in ((first, "a"), (next(f for f in (tmp_path / "s").rglob("*") if f.name in ("0", "c")), "s")):
        rewrite(file)
        with pytest.raises(StorageError, match=f"{re.escape(str(file))} was replaced after it was opened"):
            checkpoint[name][...]
    np.testing.assert_array_equal(checkpoint["b"][:], W)
    require_same(jaxckpt.load_numpy(tmp_path), {"a": W, "b": W, "s": np.array(7, np.float32)})


def test_a_chunk_that_is_rewritten_while_others_are_read(tmp_path: Path) -> None:
    metadata = {"shape": [2_000, 8], "chunks": [1, 8], "dtype": "<f4"}
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/w/", "metadata": metadata, "create": True}
    ts.open(spec).result()[:1_000] = 1  # the other chunks do not exist, and read as zeros
    read = threading.Event()

    def write() -> None:
        while not read.is_set():
            rewrite(tmp_path / "w" / "0.0")

    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(write)
        try:
            with pytest.raises(StorageError, match=r"0\.0 was replaced after it was opened"):
                [jaxckpt.load_numpy(tmp_path) for _ in range(20)]  # the first, unless it is very fast
        finally:
            read.set()
        writing.result()
    assert jaxckpt.load_numpy(tmp_path)["w"].sum() == 8_000


def test_empty_groups(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "x.zarr")
    assert jaxckpt.load_numpy(tmp_path / "x.zarr") == {}


def test_pytrees_of_jax(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    from jax.experimental.array_serialization import pytree_serialization

    tree = {"a": [jnp.asarray(W), None, (jnp.ones(3, jnp.bfloat16),)], "b": {"c": jnp.asarray(2)}}
    pytree_serialization.save(tree, tmp_path / "x")
    require_same(jaxckpt.load_numpy(tmp_path / "x"), jax.tree.map(np.asarray, tree))
    text = (tmp_path / "x" / "pytreedef.json").read_text()
    (tmp_path / "x" / "pytreedef.json").write_text(text.replace('repr": "', 'repr": "AAAA'))
    with pytest.raises(DataError, match="is damaged, or has nodes"):
        jaxckpt.open(tmp_path / "x")


def test_runs_of_levanter(sharded: dict[str, jax.Array], tmp_path: Path) -> None:
    for step in (90, 100, 110):
        serialize(tmp_path / f"step-{step}", sharded, ocdbt=False)
        if step < 110:  # written last
            (tmp_path / f"step-{step}" / "metadata.json").write_text(json.dumps({"step": step}))
    assert jaxckpt.Run(tmp_path).steps() == [90, 100]
    assert jaxckpt.open(tmp_path).metadata == {"step": 100}
    require_same(jaxckpt.load_numpy(f"{tmp_path}@90"), TREE)
    with pytest.raises(NotACheckpointError, match=r"never committed: it has no metadata\.json"):
        jaxckpt.open(tmp_path / "step-110")
    (tmp_path / "step-100" / "manifest.json").write_text(json.dumps({"arrays": []}))  # Levanter's own
    require_same(jaxckpt.load_numpy(tmp_path / "step-100"), TREE)


@pytest.mark.parametrize("version", [2, 3])
def test_groups_of_zarr(version: Any, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "x", mode="w", zarr_format=version)
    for name, array in (("a/w", W), ("a/big", W.astype(">f4")), ("scalar", np.array(2.5)), ("wide", W[:1])):
        chunks = (3, 100) if array.ndim else ()
        group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)[...] = array
    group.create_array("date", shape=(2,), dtype="M8[s]")
    checkpoint = jaxckpt.open(tmp_path / "x")
    assert set(checkpoint.leaves) == {"a/w", "a/big", "scalar", "wide", "date"}
    found = jaxckpt.load_numpy(tmp_path / "x", select=lambda name: name != "date")
    require_same(found, {"a": {"w": W, "big": W}, "scalar": np.array(2.5), "wide": W[:1]})
    with pytest.raises(DataError, match="has the data type"):
        checkpoint["date"][...]


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_with_other_codecs_are_no_damage(version: Any, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "x", mode="w", zarr_format=version)
    group.create_array("w", data=W)
    if version == 2:
        numcodecs = pytest.importorskip("numcodecs")
        group.create_array("lz4", data=W, compressors=numcodecs.LZ4())
        group.create_array("shuffle", data=W, filters=[numcodecs.Shuffle(4)], compressors=numcodecs.Zstd())
        group.create_array("zlib", data=W, filters=[numcodecs.Zlib()], compressors=None)
    else:
        codecs = pytest.importorskip("zarr.codecs.numcodecs")
        group.create_array("lz4", data=W, compressors=[codecs.LZ4()])
        group.create_array("shuffle", data=W, chunks=(2, 8), shards=(4, 8), compressors=[codecs.Shuffle(elementsize=4)])
    report = jaxckpt.verify(tmp_path / "x")
    assert report.ok
    assert {problem.leaf: problem.reason for problem in report.unsupported} == {
        name: f"it is stored with '{'numcodecs.' * (version == 3)}{name}', which tensorstore does not read"
        for name in ("lz4", "shuffle", *(["zlib"] if version == 2 else []))
    }
    require_same(jaxckpt.load_numpy(tmp_path / "x", select="w"), {"w": W})


@pytest.mark.parametrize("version", [2, 3])
def test_links_to_arrays_are_not_left_out_in_silence(version: Any, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    for name in ("x", "other"):
        zarr.open_group(tmp_path / name, mode="w", zarr_format=version).create_array("w", data=W)
    (tmp_path / "x" / "linked").symlink_to(tmp_path / "other" / "w")
    assert set(jaxckpt.open(tmp_path / "x").leaves) == {"w", "linked"}
    with pytest.raises(DataError, match="link to another place"):
        jaxckpt.load_numpy(tmp_path / "x")
    require_same(jaxckpt.load_numpy(tmp_path / "x", select="w"), {"w": W})


@pytest.mark.parametrize("name", ["theirs", "x.zarr"])
def test_a_killed_conversion_is_no_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "ours", TREE)
    with monkeypatch.context() as patch:

        def killed(*_: str) -> None:
            patch.setattr(destination, "remove_folder", lambda _: None)
            raise KeyboardInterrupt

        patch.setattr(destination, "_put_in_place", killed)
        with pytest.raises(KeyboardInterrupt):
            jaxckpt.convert(tmp_path / "ours", tmp_path / "new" / name, format="orbax" if name == "theirs" else None)
    (draft,) = (tmp_path / "new").iterdir()
    with pytest.raises(NotACheckpointError, match=f"format: it holds {re.escape(draft.name)}"):
        jaxckpt.open(tmp_path / "new")
    with pytest.raises(NotACheckpointError):
        list_checkpoints(str(tmp_path / "new"))


def test_our_own_exports_come_back(tmp_path: Path) -> None:
    tree = TREE | {
        "step": 7,
        "name": "x",
        "rate": 0.5,
        "fp8": W.astype(ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 3)),
    }
    jaxckpt.save(tmp_path / "ours", tree)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "x.zarr", select=lambda name: name != "name")
    wanted = {name: child for name, child in tree.items() if name != "name"}
    require_same(jaxckpt.load_numpy(tmp_path / "x.zarr"), wanted)
    assert jaxckpt.verify(tmp_path / "x.zarr").ok
    lost = next(file for file in (tmp_path / "x.zarr" / "fp8" / "c").rglob("*") if file.is_file())
    lost.unlink()
    with pytest.raises(DataError):
        jaxckpt.load_numpy(tmp_path / "x.zarr", select="fp8")


def test_other_folders_do_not_open_as_arrays(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "run" / "00000010", {"w": W})
    (tmp_path / "run" / "00000010" / "manifest.json").unlink()  # as if the save had not finished
    for data in (tmp_path / "run" / "00000010").glob("data-*/manifest*"):
        data.unlink()
    (tmp_path / "orbax" / "8.orbax-checkpoint-tmp" / "default" / "w").mkdir(parents=True)
    (tmp_path / "orbax" / "8.orbax-checkpoint-tmp" / "default" / "w" / ".zarray").write_text("{}")
    (tmp_path / "text" / "notes").mkdir(parents=True)
    for folder in ("run", "run/00000010", "orbax", "orbax/8.orbax-checkpoint-tmp", "text"):
        with pytest.raises((NotACheckpointError, DataError), match=r"not a checkpoint|in progress"):
            jaxckpt.open(tmp_path / folder)


@pytest.mark.parametrize(
    "metadata",
    ["", "{", "{}", "[]", '{"shape": [-1]}', '{"shape": [9223372036854775807, 99], "chunks": [1, 1], "dtype": "<f4"}'],
)
def test_damaged_metadata(metadata: str, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "w")
    (tmp_path / "w" / ".zarray").write_text(metadata)
    with pytest.raises(DataError) as error:
        jaxckpt.load_numpy(tmp_path)
    assert not isinstance(error.value, UnsupportedError)


@pytest.mark.parametrize("attributes", [None, [], "text", {"jaxckpt": 3}, {"jaxckpt": {"dtype": []}}])
def test_attributes_of_others(attributes: Any, tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    zarr.open_group(tmp_path, mode="w").create_array("w", data=W)
    file = tmp_path / "w" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attributes": attributes}))
    if isinstance(attributes, dict):
        require_same(jaxckpt.load_numpy(tmp_path), {"w": W})
    else:
        with pytest.raises(DataError, match="metadata of 'w' is damaged"):
            jaxckpt.load_numpy(tmp_path)


@contextlib.contextmanager
def nested_folders(path: Path, depth: int) -> Iterator[None]:
    """Folders in folders in a block. They are deleted at its end, because pytest cannot."""
    with contextlib.chdir(path):
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        deepest = os.open(".", os.O_RDONLY)
    try:
        yield
    finally:
        with contextlib.chdir(path):
            os.fchdir(deepest)
            for _ in range(depth):
                os.chdir("..")
                os.rmdir("d")
        os.close(deepest)


def test_folders_in_folders(tmp_path: Path) -> None:
    """Loops of symbolic links, and more folders than Python may nest calls."""
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (tmp_path / "latest").symlink_to(".")
    chunk_files("zarr", tmp_path / "w")
    (tmp_path / "w" / "up").symlink_to("..")
    wanted = {"w": {"a": W, "b": W, "s": np.array(7, np.float32)}}
    with nested_folders(tmp_path, 1_500):
        require_same(jaxckpt.load_numpy(tmp_path), wanted)
        assert jaxckpt.verify(tmp_path).ok
        (entry,) = list_checkpoints(str(tmp_path))
        assert (entry.format, entry.leaves) == ("zarr", 3)
        jaxckpt.convert(tmp_path, tmp_path / "x.npz")
    require_same(jaxckpt.load_numpy(tmp_path / "x.npz"), wanted)


def test_a_folder_that_contains_only_itself(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(".")
    for read in (jaxckpt.open, jaxckpt.verify, lambda path: jaxckpt.convert(path, path / "x.npz")):
        with pytest.raises(NotACheckpointError, match="it holds latest"):
            read(tmp_path)
