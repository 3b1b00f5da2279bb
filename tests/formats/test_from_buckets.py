"""Checkpoints of other libraries from buckets and over HTTP: the same values as from a folder, in few requests."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import json
import random
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recorded import DATA, REAL, require_same, wanted
from servers import Bucket, Exchange

import jaxckpt
from jaxckpt._cli.listing import list_checkpoints
from jaxckpt._options import Options
from jaxckpt._store.bucket import Bucket as BucketStore
from jaxckpt.errors import DataError, InputError, JaxckptError, NotACheckpointError, StorageError

pytest.importorskip("h5py")  # here, because its import starts a process
pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax raises various warnings

QUICK = jaxckpt.Options(storage={"retry_seconds": 2})


def upload(path: Path, url: str) -> str:
    """Copy a file or a folder to a URL."""
    store = BucketStore.at(url.rpartition("/")[0], Options())
    name = urllib.parse.unquote(url.rpartition("/")[2])
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    keys = [name if path.is_file() else f"{name}/{file.relative_to(path)}" for file in files]
    started = [store._begin_put(key, file.read_bytes(), "") for key, file in zip(keys, files, strict=True)]
    for writing in started:
        writing.result()
    return url


# Every format, in memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_every_librarys_files_are_read_from_a_bucket(name: str) -> None:
    url = upload(DATA / name, f"memory://recorded/{name}")
    require_same(jaxckpt.load_numpy(url), wanted(name))
    assert jaxckpt.verify(url).ok
    local, there = jaxckpt.open(DATA / name), jaxckpt.open(url)
    assert there.path == url or there.path.startswith(f"{url}/")
    assert (there.format, list(there), there.step, there.metadata) == (
        local.format,
        list(local),
        local.step,
        local.metadata,
    )


def written(folder: Path) -> dict[str, Path]:
    """Checkpoints of formats that this test writes."""
    tree = {"params": {"w": jnp.arange(24.0).reshape(4, 6), "b": jnp.ones(3, jnp.bfloat16)}, "n": np.int32(7)}
    jaxckpt.save(folder / "ours", tree)
    for name, format in (("x.safetensors", None), ("x.npz", None), ("x.zarr", None), ("hf", "safetensors")):
        jaxckpt.convert(folder / "ours", folder / name, format=format)
    jaxckpt.convert(folder / "ours", folder / "orbax", format="orbax")
    np.save(folder / "x.npy", np.arange(6).reshape(2, 3))
    with ocp.CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({**tree, "n": step}))
    import torch

    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, folder / "x.pt")
    np.savez_compressed(folder / "deflated.npz", w=np.arange(1000), b=np.ones(3))
    return {path.name: path for path in folder.iterdir() if path.name != "ours"}


@pytest.mark.child
def test_formats_that_are_written_here(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = written(tmp_path)
    assert len(found) == 9
    for name, path in found.items():
        url = upload(path, f"memory://written/{name}")
        np.testing.assert_equal(jaxckpt.load_numpy(url), jaxckpt.load_numpy(path))
        assert jaxckpt.verify(url).ok, name
        assert jaxckpt.diff(url, path).identical, name
    url = "memory://written/run"
    run = jaxckpt.Run(url)
    assert run.steps() == [1, 2]
    assert run.open(1).step == 1
    assert int(jaxckpt.load_numpy(f"{url}@1")["n"]) == int(jaxckpt.load_numpy(run.path(1))["n"]) == 1
    jaxckpt.convert(url, "memory://written/converted")
    assert jaxckpt.Run("memory://written/converted").steps() == [1, 2]
    with pytest.raises(jaxckpt.errors.InputError, match="2 steps of Orbax"):
        jaxckpt.Checkpointer(url)


def test_a_model_is_read_by_its_rules() -> None:
    folder = DATA / "transformers" / "llama"
    url = upload(folder, "memory://models/llama")
    rules, there = jaxckpt.rules.huggingface_rules(folder), jaxckpt.rules.huggingface_rules(url)
    assert there == rules
    np.testing.assert_equal(jaxckpt.load_numpy(url, rename=there), jaxckpt.load_numpy(folder, rename=rules))


def test_a_checkpoint_that_is_a_whole_bucket(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {"w": np.arange(3)})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    root = BucketStore.at("memory://whole", Options())
    for file in (tmp_path / "theirs").rglob("*"):
        if file.is_file():
            root.put(str(file.relative_to(tmp_path / "theirs")), file.read_bytes())
    for url in ("memory://whole", "memory://whole/"):
        assert jaxckpt.load_numpy(url)["w"].tolist() == [0, 1, 2]


def test_names_with_special_characters(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.arange(3))
    url = upload(tmp_path / "a.npz", "memory://special/a%25b%20c/x%7Cy.npz")
    assert jaxckpt.load_numpy(url)["w"].tolist() == [0, 1, 2]
    checkpoint = jaxckpt.open(url)
    assert checkpoint.path == url
    assert jaxckpt.load_numpy(checkpoint.path)["w"].tolist() == [0, 1, 2]


def test_damage_and_missing_files_are_named(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", {"w": np.arange(100_000.0), "b": np.ones(3)})
    jaxckpt.convert(tmp_path / "ours", tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    for count in (0, 5, 100, 70_000, len(content) - 1):
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(content[:count])
        url = upload(path, f"memory://damaged/{path.name}")
        with pytest.raises((DataError, NotACheckpointError)) as local:
            jaxckpt.load_numpy(path)
        with pytest.raises(type(local.value)) as there:
            jaxckpt.load_numpy(url)
        assert str(there.value).replace(url, "it") == str(local.value).replace(str(path), "it")
    (tmp_path / "x.safetensors").write_bytes(content)
    url = upload(tmp_path / "x.safetensors", "memory://damaged/x.safetensors")
    checkpoint = jaxckpt.open(url)
    BucketStore.at("memory://damaged", Options()).remove("x.safetensors")
    with pytest.raises(DataError, match=r"x\.safetensors is missing"):
        checkpoint["w"][:]
    with pytest.raises(NotACheckpointError, match="the path does not exist"):
        jaxckpt.open(url)
    (tmp_path / "model.bin").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(NotACheckpointError, match="is a GGUF file"):
        jaxckpt.open(upload(tmp_path / "model.bin", "memory://damaged/model.bin"))


# Requests and bytes ---------------------------------------------------------------------------------------


def count_bytes(bucket: Bucket) -> Callable[[], int]:
    """A function that returns the bytes that the server has sent since this call."""
    counts: list[int] = []

    def forward(exchange: Exchange) -> None:
        answer = exchange.forward()
        if exchange.path and answer.status < 300:
            counts.append(len(answer.body))
        exchange.send(answer)

    bucket.proxy.clear()
    bucket.proxy.on("(GET|HEAD).*", forward)
    return lambda: sum(counts)


def model() -> dict[str, Any]:
    """16 MiB in matrices, and small leaves."""
    rng = np.random.default_rng(0)
    matrices = {f"layer{n}": {"w": rng.standard_normal((1024, 512), np.float32)} for n in range(8)}
    return {**matrices, "scale": np.ones(64, np.float32)}


def specs(path: str, leaf: Any) -> P:
    return P("x", "y") if len(leaf.shape) == 2 else P()


@pytest.mark.parametrize("kind", ["folder", "orbax", "ocdbt", "written"])
def test_a_restore_onto_a_mesh_reads_each_byte_once(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tree = model()
    saved = {path: NamedSharding(mesh, P("x", "y")) if path != "scale" else NamedSharding(mesh, P()) for path in tree}
    if kind in ("folder", "written"):
        jaxckpt.save(tmp_path / "ours", tree, options=jaxckpt.Options(sync=False))
        jaxckpt.convert(tmp_path / "ours", tmp_path / "it", format="safetensors" if kind == "folder" else "orbax")
    else:
        on_mesh = {
            path: jax.tree.map(lambda x, s=saved[path]: jax.device_put(x, s), leaf) for path, leaf in tree.items()
        }
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt", use_zarr3=kind == "orbax")
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(tmp_path / "it", args=ocp.args.PyTreeSave(on_mesh))
    url = upload(tmp_path / "it", f"{bucket.url}/it")
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    read = count_bytes(bucket)
    state = jaxckpt.restore(url, mesh=mesh, specs=specs, options=QUICK)
    counted, n_bytes = bucket.proxy.counted(), read()
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), state, tree))
    assert state["layer3"]["w"].sharding.spec == P("x", "y")
    print(json.dumps({"kind": kind, "bytes": n_bytes / needed, "requests": counted}))
    assert n_bytes <= 1.05 * needed
    assert sum(counted.values()) <= 120, counted


def test_part_of_a_file_reads_that_part(s3: Bucket, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "ours", model())
    jaxckpt.convert(tmp_path / "ours", tmp_path / "x.safetensors")
    url = upload(tmp_path / "x.safetensors", f"{s3.url}/x.safetensors")
    read = count_bytes(s3)
    checkpoint = jaxckpt.open(url, options=QUICK)
    opened = s3.proxy.counted()
    assert sum(opened.values()) <= 12, opened
    assert checkpoint["layer3/w"][100:110, :5].shape == (10, 5)
    assert read() < 200_000


def test_a_public_bucket_that_cannot_be_listed(s3: Bucket, tmp_path: Path) -> None:
    import servers

    np.savez(tmp_path / "x.npz", w=np.arange(3))
    url = upload(tmp_path / "x.npz", f"{s3.url}/x.npz")
    s3.proxy.on("LIST.*", servers.status(403, "AccessDenied"))
    assert jaxckpt.load_numpy(url, options=QUICK)["w"].tolist() == [0, 1, 2]


# Files of ranks -------------------------------------------------------------------------------------------


def test_the_files_of_ranks_are_combined_by_url(web: str, tmp_path: Path) -> None:
    whole = np.arange(48, dtype=np.float32).reshape(8, 6)
    (tmp_path / "ranks").mkdir()
    for rank in range(4):
        row, column = divmod(rank, 2)
        part = whole[4 * row : 4 * row + 4, 3 * column : 3 * column + 3]
        np.savez(tmp_path / "ranks" / f"{rank}.npz", w=part, step=7)
    split: dict[str, Any] = {"mesh": {"data": 2, "model": 2}, "specs": {"w": P("data", "model")}}
    for folder in (upload(tmp_path / "ranks", "memory://ranks/npz%20files"), f"{web}/ranks"):
        found = jaxckpt.formats.rank_files({rank: f"{folder}/{rank}.npz" for rank in range(4)}, **split)
        assert (found.url, found.files[3]) == (folder, f"{folder}/3.npz")
        np.testing.assert_array_equal(jaxckpt.load_numpy(found)["w"], whole, strict=True)
        assert jaxckpt.verify(found).ok
    mixed = {rank: tmp_path / "ranks" / "0.npz" if rank == 0 else f"{web}/ranks/{rank}.npz" for rank in range(4)}
    np.testing.assert_array_equal(jaxckpt.load_numpy(jaxckpt.formats.rank_files(mixed, **split))["w"], whole)
    with pytest.raises(InputError, match=r"rank 1 is at memory:.*, others at http.*: copy all of them to one place"):
        jaxckpt.formats.rank_files({0: f"{web}/ranks/0.npz", 1: "memory://ranks/npz%20files/1.npz"})
    with pytest.raises(DataError, match=r"9\.npz is missing"):
        jaxckpt.formats.rank_files({0: "memory://ranks/9.npz"})
    one = jaxckpt.formats.npz_file(f"{web}/ranks/0.npz", dtype="float8_e4m3fn")
    assert jaxckpt.load_numpy(one)["step"] == 7


def test_ranks_of_other_libraries_by_url(tmp_path: Path) -> None:
    local = {rank: DATA / "oneflow" / f"rank{rank}" for rank in range(4)}
    there = {rank: upload(path, f"memory://oneflow/{path.name}") for rank, path in local.items()}
    split: dict[str, Any] = {"mesh": {"rank": 4}, "specs": P()}
    for ranks in ({0: local[0]}, {0: there[0]}):
        found = jaxckpt.formats.oneflow_ranks(ranks, **{**split, "mesh": {"rank": 1}})
        np.testing.assert_equal(jaxckpt.load_numpy(found), jaxckpt.load_numpy(local[0]))
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        safetensors.numpy.save_file({"w": np.arange(3) + 3 * rank}, tmp_path / f"rank_{rank}" / "w.safetensors")
    layout = {"dev_matrix": [2], "tensor_map": [0]}
    (tmp_path / "strategy.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
    url = upload(tmp_path, "memory://mindspore/run")
    found = jaxckpt.formats.mindspore_ranks(url, strategy=f"{url}/strategy.json")
    assert jaxckpt.load_numpy(found)["w"].tolist() == [0, 1, 2, 3, 4, 5]


# Damage ---------------------------------------------------------------------------------------------------


def damaged(content: bytes, files: list[Path], chance: random.Random) -> bytes | None:
    """A damaged copy of a file; None if it is lost."""
    match chance.choice(("cut", "cut", "flip", "flip", "grow", "swap", "lost")):
        case "cut":
            return content[: chance.choice((chance.randrange(len(content) + 1), 64 * (len(content) // 128)))]
        case "flip" if content:
            at = chance.randrange(min(len(content), chance.choice((300, len(content)))))
            return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        case "grow":
            return content + bytes(chance.choice((1, 70_000)))
        case "swap":
            return chance.choice(files).read_bytes()
        case _:
            return None


def outcome(path: Any) -> Any:
    """The tree at a path, or the type of the error."""
    try:
        return jaxckpt.load_numpy(path)
    except JaxckptError as error:
        return type(error)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL)
def test_damage_ends_in_a_bucket_as_in_a_folder(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With an error of the same type, or the same bits: some formats have no checksums."""
    chance = random.Random(name)
    copy = tmp_path / Path(name).name
    (shutil.copytree if (DATA / name).is_dir() else shutil.copy)(DATA / name, copy)
    store = BucketStore.at(f"memory://hurt/{name}", Options())
    url = upload(copy, f"{store.url}/{copy.name}")
    files = sorted(path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
    for _ in range(800 if request.config.getoption("campaign") else 8):
        file = chance.choice(files)
        key, whole = str(file.relative_to(tmp_path)), file.read_bytes()
        content = damaged(whole, files, chance)
        if content is None:
            file.unlink()
            store.remove(key)
        else:
            file.write_bytes(content)
            store.put(key, content)
        np.testing.assert_equal(outcome(url), outcome(copy))
        file.write_bytes(whole)
        store.put(key, whole)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
def test_a_file_that_is_replaced_while_it_is_read(s3: Bucket, tmp_path: Path, kind: str) -> None:
    """After each request in turn. The old values, the new ones, or an error; never some of each."""
    path, trees = tmp_path / f"x.{kind}", [{"w": np.full(50_000, value, np.float32)} for value in (1, 2)]
    contents: list[bytes] = []
    for tree in trees:
        if kind == "pt":
            torch = pytest.importorskip("torch")
            torch.save({"w": torch.from_numpy(tree["w"])}, path)
        else:
            np.savez(path, **tree) if kind == "npz" else safetensors.numpy.save_file(tree, path)
        contents.append(path.read_bytes())
    url, store = f"{s3.url}/x.{kind}", BucketStore.at(s3.url, QUICK)
    seen: set[str] = set()
    for last in (*range(1, 12), *range(12, 99, 9)):
        store.put(path.name, contents[0])
        count = itertools.count(1)

        def replace(exchange: Exchange, count: Iterator[int] = count, last: int = last) -> None:
            answer = exchange.forward()
            if next(count) == last:
                s3.write(path.name, contents[1])
            exchange.send(answer)

        s3.proxy.clear()
        s3.proxy.on(".*", replace)
        try:
            w = jaxckpt.load_numpy(url, options=QUICK)["w"]
            assert len({*w.tolist()}) == 1
            seen.add("old" if w[0] == 1 else "new")
        except StorageError as error:
            seen.add("refused" if "was replaced after it was opened: open it again" in str(error) else str(error))
        s3.proxy.clear()
        if next(count) <= last:
            break
    assert seen == {"old", "new", "refused"}


ARRAYS = ["ocdbt", "orbax", "zarr"]
"""Formats whose arrays tensorstore reads."""


def write_arrays(kind: str, path: Path, value: float) -> None:
    """A checkpoint of two arrays with this value, the same names and the same metadata."""
    tree = {name: np.full((64, 64), value, np.float32) for name in ("a", "b")}
    shutil.rmtree(path, ignore_errors=True)
    if kind == "zarr":
        for name, array in tree.items():
            spec = {"driver": "zarr", "kvstore": f"file://{path}/{name}/", "metadata": {"chunks": [16, 64]}}
            ts.open(spec, create=True, dtype="float32", shape=array.shape).result()[...] = array
    else:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=kind == "ocdbt")) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("place", ["folder", "memory"])
def test_arrays_that_are_replaced_after_the_checkpoint_was_opened(kind: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    url = str(path) if place == "folder" else f"memory://replaced/{kind}"
    for value in (1, 2):
        write_arrays(kind, path, value)
        if place == "memory":
            upload(path, url)
        if value == 1:
            checkpoint = jaxckpt.open(url)
            assert checkpoint["a"][0, 0] == 1
            view = jaxckpt.open(
                url, rename=jaxckpt.rules.Rules([jaxckpt.rules.Rule(source="a", target="w")], keep=True)
            )
    for read in (checkpoint.restore, lambda: checkpoint["b"][:], lambda: view["w"][:]):
        with pytest.raises((StorageError, NotACheckpointError), match=r"was replaced (after it was opened|by another)"):
            read()
    assert jaxckpt.load_numpy(url)["b"][0, 0] == 2


def test_a_local_file_beside_those_of_a_bucket_that_is_replaced(tmp_path: Path) -> None:
    for rank in (0, 1):
        np.savez(tmp_path / f"{rank}.npz", w=np.full(4, rank))
    store = BucketStore.at("memory://mixed", jaxckpt.Options())
    store.put("0.npz", (tmp_path / "0.npz").read_bytes())
    files = {0: "memory://mixed/0.npz", 1: tmp_path / "1.npz"}
    opened = jaxckpt.open(jaxckpt.formats.rank_files(files, specs=P("rank")))
    assert opened["w"][...].tolist() == [0] * 4 + [1] * 4
    np.savez(tmp_path / "1.npz", w=np.full(4, 9))
    with pytest.raises(StorageError, match="was replaced after it was opened: open it again"):
        opened["w"][...]


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_that_are_replaced_while_they_are_read(gs: Bucket, tmp_path: Path, kind: str) -> None:
    """After each request in turn."""
    contents: list[dict[str, bytes]] = []
    for value in (1, 2):
        write_arrays(kind, tmp_path / "x", value)
        files = (file for file in (tmp_path / "x").rglob("*") if file.is_file())
        contents.append({str(file.relative_to(tmp_path)): file.read_bytes() for file in files})
    store = BucketStore.at(gs.url, QUICK)
    seen: set[str] = set()
    for last in range(1, 40):
        for key in contents[1].keys() - contents[0].keys():
            store.remove(key)
        for key, content in contents[0].items():
            store.put(key, content)
        count = itertools.count(1)

        def replace(exchange: Exchange, count: Iterator[int] = count, last: int = last) -> None:
            answer = exchange.forward()
            if next(count) == last:
                for key in contents[0].keys() - contents[1].keys():
                    gs.write(key, None)
                for key, content in contents[1].items():
                    gs.write(key, content)
            exchange.send(answer)

        gs.proxy.clear()
        gs.proxy.on(".*", replace)
        try:
            tree = jaxckpt.load_numpy(f"{gs.url}/x", options=QUICK)
            (value,) = {*tree["a"].ravel().tolist(), *tree["b"].ravel().tolist()}
            seen.add("old" if value == 1 else "new")
        except JaxckptError as error:
            seen.add("refused" if "was replaced" in str(error) else str(error))
        gs.proxy.clear()
        if next(count) <= last:
            break
    assert seen == {"old", "new", "refused"}


def test_an_empty_file(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "meta").write_text("shape { dim: 0 } data_type: kFloat")
    (tmp_path / "w" / "out").write_bytes(b"")
    url = upload(tmp_path, f"{bucket.url}/oneflow")
    found = jaxckpt.formats.oneflow_ranks({0: url}, specs=P())
    assert jaxckpt.load_numpy(found)["w"].shape == (0,)
    assert sum(bucket.proxy.counted().values()) < 40


@pytest.mark.parametrize("content", [None, b"x" * 100], ids=["deleted", "shorter"])
def test_a_file_that_changes_while_its_size_is_found(gs: Bucket, content: bytes | None) -> None:
    store = BucketStore.at(gs.url, QUICK)
    for last in (2, 15, 29, 40, 50):
        store.put("x", b"x" * 200_000)
        count = itertools.count(1)

        def replace(exchange: Exchange, count: Iterator[int] = count, last: int = last) -> None:
            if next(count) == last:
                gs.write("x", content)
            exchange.send(exchange.forward())

        gs.proxy.clear()
        gs.proxy.on(".*", replace)
        with contextlib.suppress(StorageError, DataError):
            assert store.size("x") in (200_000, 100)


# Over HTTP ------------------------------------------------------------------------------------------------


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files with byte ranges."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if path.is_file() else None
        start, stop, status = 0, len(content or b""), 200 if content is not None else 404
        if content is not None and (ranged := self.headers.get("Range")):
            first, _, last = ranged.removeprefix("bytes=").partition("-")
            start, stop = (int(first), int(last or stop - 1) + 1) if first else (stop - int(last), stop)
            status = 206 if start < len(content) else 416
        stop = min(stop, len(content or b""))
        body = (content or b"")[start:stop] if status < 300 else b""
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content or b'')}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # otherwise requests at the same time wait for a second
    daemon_threads = True


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(tmp_path))
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_files_over_http(web: str, tmp_path: Path) -> None:
    tree = {name: leaf for name, leaf in model().items() if name in ("layer1", "scale")}
    jaxckpt.save(tmp_path / "ours", tree)
    for name, format in (("x.safetensors", None), ("x.npz", None), ("hf", "safetensors")):
        jaxckpt.convert(tmp_path / "ours", tmp_path / name, format=format)
    for path in ("x.safetensors", "x.npz", "hf/model.safetensors.index.json", "hf"):
        np.testing.assert_equal(jaxckpt.load_numpy(f"{web}/{path}", options=QUICK)["layer1"], tree["layer1"])
    for path in ("missing.npz", "ours/data"):
        with pytest.raises(NotACheckpointError, match="or it is a folder, which HTTP does not list: give"):
            jaxckpt.open(f"{web}/{path}", options=QUICK)
    with pytest.raises(StorageError, match=r"302.*redirects to another URL, as Hugging Face does, download the file"):
        jaxckpt.open(f"{web}/moved/x.safetensors", options=QUICK)
    assert jaxckpt.load_numpy(f"{web}/ours")["scale"].tolist() == [1] * 64
    entries = [entry for path in ("hf", "x.npz", "ours") for entry in list_checkpoints(f"{web}/{path}")]
    assert [(entry.name, entry.format) for entry in entries] == [
        ("hf", "safetensors"),
        ("x.npz", "npz"),
        ("ours", "jaxckpt"),
    ]
    with pytest.raises(NotACheckpointError, match="or it is a folder, which HTTP does not list"):
        list_checkpoints(f"{web}/missing")
    for file in (tmp_path / "hf").glob("*.safetensors"):
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:f492c859ee\nsize 133\n")
    for path in ("hf/model.safetensors.index.json", "hf"):
        with pytest.raises(NotACheckpointError, match=r"Git LFS pointers .* such as model-00001.*: run `git lfs pull`"):
            jaxckpt.open(f"{web}/{path}", options=QUICK)
    with pytest.raises(StorageError, match="read-only"):
        jaxckpt.save(f"{web}/new", {"w": 1}, options=QUICK)
