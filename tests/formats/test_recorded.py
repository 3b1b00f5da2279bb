"""Files that other libraries wrote, in tests/data: complete, with lost files, truncated, altered and replaced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import mounts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from recorded import DATA, REAL, require_same, wanted

import jaxckpt
from jaxckpt import JaxckptError
from jaxckpt._cli.listing import list_checkpoints
from jaxckpt.errors import DataError, NotACheckpointError, StorageError

pytest.importorskip("h5py")  # here, because its import starts a process

# OneFlow has its own test. In folders of `everyday`, some files or steps can be spared.
FOLDERS = [name for name in REAL if (DATA / name).is_dir() and not name.startswith(("oneflow", "everyday"))]


def copied(name: str, to: Path) -> Path:
    return Path((shutil.copytree if (DATA / name).is_dir() else shutil.copy)(DATA / name, to))


@pytest.mark.parametrize("name", REAL)
def test_the_librarys_files_come_back(name: str, tmp_path: Path) -> None:
    require_same(jaxckpt.load_numpy(DATA / name), wanted(name))
    assert jaxckpt.verify(DATA / name).ok
    jaxckpt.convert(DATA / name, tmp_path / "ours")
    require_same(jaxckpt.load_numpy(tmp_path / "ours"), wanted(name))


@pytest.mark.parametrize("name", REAL)
def test_short_reads_lose_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may return fewer bytes than requested anywhere, as on some FUSE file systems."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda handle, count, at: pread(handle, min(count, 1 + count // 2), at))
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, at: preadv(handle, [memoryview(buffers[0])[:5]], at))
    require_same(jaxckpt.load_numpy(DATA / name), wanted(name))


@pytest.mark.parametrize("name", FOLDERS)
def test_each_lost_file_is_reported(name: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path / "x")
    for lost in sorted(folder.iterdir()):
        lost.rename(tmp_path / "lost")
        with pytest.raises((DataError, NotACheckpointError)):
            jaxckpt.load_numpy(folder)
        (tmp_path / "lost").rename(lost)
    require_same(jaxckpt.load_numpy(folder), wanted(name))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", REAL)
def test_truncated_and_altered_files_raise_only_our_errors(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    copy = copied(name, tmp_path / Path(name).name)
    files = sorted(path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
    raised = 0
    for _ in range(80):
        file = chance.choice(files)
        whole = file.read_bytes()
        if not whole:
            continue
        altered = bytearray(whole)
        if chance.random() < 0.4:
            del altered[chance.randrange(len(whole)) :]
        else:
            altered[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        file.write_bytes(altered)
        try:
            jaxckpt.load_numpy(copy)
        except JaxckptError:
            raised += 1
        finally:
            file.write_bytes(whole)
    assert raised > 10
    assert os.path.exists(copy)


# Damage at each place -------------------------------------------------------------------------------------


def _orbax(path: Path, tree: dict[str, Any], *, ocdbt: bool) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def _zarr(path: Path, tree: dict[str, Any], *, version: Any) -> None:
    group = pytest.importorskip("zarr").open_group(path, mode="w", zarr_format=version)
    for name, array in tree.items():
        group.create_array(name, data=array)


def _pickled(path: Path, tree: dict[str, Any]) -> None:
    path.write_bytes(pickle.dumps(tree))


def _hdf5(path: Path, tree: dict[str, Any]) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file.update(tree)


def _torch(path: Path, tree: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    torch.save({name: torch.from_numpy(array) for name, array in tree.items()}, path)


WRITERS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "x.safetensors": lambda path, tree: safetensors.numpy.save_file(tree, path),
    "x.npz": lambda path, tree: np.savez(path, **tree),
    "deflated.npz": lambda path, tree: np.savez_compressed(path, **tree),
    "x.npy": lambda path, tree: np.save(path, tree["a"]),
    "x.msgpack": lambda path, tree: path.write_bytes(flax.serialization.to_bytes(tree)),
    "x.pkl": _pickled,
    "x.h5": _hdf5,
    "x.pt": _torch,
}


FOLDER_WRITERS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "orbax": functools.partial(_orbax, ocdbt=False),
    "ocdbt": functools.partial(_orbax, ocdbt=True),
    "zarr2": functools.partial(_zarr, version=2),
    "zarr3": functools.partial(_zarr, version=3),
}
EVERY = [*REAL, *WRITERS, *FOLDER_WRITERS]


def put(name: str, path: Path) -> Path:
    """A small checkpoint of another library at a path."""
    path.parent.mkdir(exist_ok=True)
    if name in REAL:
        return copied(name, path)
    writer = (WRITERS | FOLDER_WRITERS)[name]
    writer(path, {"a": np.arange(64, dtype=np.float32), "b": np.arange(6).reshape(2, 3)})
    return path


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Orbax raises various warnings
@pytest.mark.parametrize("name", EVERY)
def test_files_truncated_at_every_64th_byte(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Only folders have files that can be spared. The messages of MindSpore's files have no end mark."""
    path = put(name, tmp_path / Path(name).name)
    whole = jaxckpt.load_numpy(path)
    for file in sorted(file for file in [path, *path.rglob("*")] if file.is_file()):
        content = file.read_bytes()
        cuts = range(0, len(content), 64)
        for count in cuts if request.config.getoption("campaign") else cuts[:: max(1, len(cuts) // 16)]:
            file.write_bytes(content[:count])
            try:
                found = jaxckpt.load_numpy(path)
            except JaxckptError:
                continue
            assert path.is_dir() or name == "mindspore/dtypes.ckpt", count
            if path.is_dir():
                np.testing.assert_equal(found, whole)
        file.write_bytes(content)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_a_checkpoint_that_vanishes_while_it_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Before each system call in turn."""
    source, path = put(name, tmp_path / "kept" / Path(name).name), tmp_path / Path(name).name
    whole, calls = jaxckpt.load_numpy(source), itertools.count()
    system = {name: getattr(os, name) for name in ("open", "pread", "preadv", "stat", "lstat", "listdir")}

    def call(name: str, last: int, *arguments: Any, **options: Any) -> Any:
        if next(calls) == last:
            path.rename(tmp_path / "gone")
        return system[name](*arguments, **options)

    for last in range(0, 10_000, 1 if request.config.getoption("campaign") else 3):
        (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
        calls = itertools.count()
        with monkeypatch.context() as patch:
            for each in system:
                patch.setattr(os, each, functools.partial(call, each, last))
            with contextlib.suppress(JaxckptError):
                np.testing.assert_equal(jaxckpt.load_numpy(path), whole)
        if path.exists():
            break
        gone = tmp_path / "gone"
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert path.exists()


@pytest.mark.filterwarnings("ignore")
def test_symbolic_links_that_form_loops(tmp_path: Path) -> None:
    root = tmp_path / "root"  # `up` leads to a folder without anything else
    root.mkdir()
    for name in FOLDER_WRITERS:
        put(name, root / name)
    for folder in (root, *(root / name for name in FOLDER_WRITERS)):
        for link, target in {"latest": ".", "up": "..", "itself": "itself", "one": "other", "other": "one"}.items():
            (folder / link).symlink_to(target)
    for name in FOLDER_WRITERS:
        assert set(jaxckpt.open(root / name).leaves) == {"a", "b"}
        assert jaxckpt.verify(root / name).ok
        jaxckpt.convert(root / name, root / "ours", overwrite=True)
        assert jaxckpt.diff(root / name, root / "ours").identical
        assert [entry.format for entry in list_checkpoints(str(root / name))] == [jaxckpt.open(root / name).format]
    found = {entry.name: entry.status for entry in list_checkpoints(str(root))}
    assert {name for name, status in found.items() if status == "ok"} == {*FOLDER_WRITERS, "ours"}
    assert {name for name, status in found.items() if status == "unreadable"} == {"itself", "one", "other"}


@pytest.mark.child
def test_a_file_with_a_new_inode_number_is_not_taken_for_another(tmp_path: Path) -> None:
    """FUSE gives a file another number after the kernel has forgotten it."""
    (tmp_path / "served").mkdir()
    safetensors.numpy.save_file({key: np.full(70_000, 1, np.float32) for key in "ab"}, tmp_path / "served" / "x")
    with mounts.sshfs(tmp_path / "served", tmp_path / "mount"):
        path = tmp_path / "mount" / "x"
        checkpoint = jaxckpt.open(path)
        assert checkpoint["a"][0] == 1
        before, end = path.stat().st_ino, time.monotonic() + 30
        while path.stat().st_ino == before and time.monotonic() < end:
            try:
                Path("/proc/sys/vm/drop_caches").write_text("2")
            except OSError:
                pytest.skip("the caches of the kernel cannot be dropped here")
            time.sleep(0.1)
        assert path.stat().st_ino != before
        assert checkpoint["b"][0] == 1
        os.utime(tmp_path / "served" / "x", ns=(0, 0))
        with pytest.raises(StorageError, match="was replaced after it was opened: open it again"):
            checkpoint.restore()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_is_replaced_is_not_read(name: str, in_place: bool, tmp_path: Path) -> None:
    """Its offsets are those of the file that was opened."""
    path, trees = tmp_path / name, [{key: np.full(70_000, n, np.float32) for key in "ab"} for n in (1, 2)]
    WRITERS[name](path, trees[0])
    checkpoint = jaxckpt.open(path)
    (leaf, *_) = checkpoint.leaves.values()
    assert leaf[0] == 1
    if not in_place:
        path.rename(tmp_path / "old")
    WRITERS[name](path, trees[1])
    for read in (checkpoint.restore, lambda: leaf[1:]):
        with pytest.raises(StorageError, match="was replaced after it was opened: open it again"):
            read()
    assert [*jaxckpt.open(path).leaves.values()][-1][0] == 2
