"""`verify` finds all damage, and reports the affected leaf and box."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from processes import PASSED, RunPython

import jaxckpt
from jaxckpt._inspect import verify as _verify
from jaxckpt._store.folder import Folder

SMALL = jaxckpt.Options(chunk_bytes=256, object_bytes=1024)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    tree = {
        "w": jax.device_put(jnp.arange(1024.0).reshape(32, 32), NamedSharding(mesh, P("a", "b"))),
        "layers": [jnp.full(64, float(i)) for i in range(5)],
        "odd": jnp.arange(7 * 11.0).reshape(7, 11),
        "key": jax.random.key(3),
        "n": 3,
    }
    jaxckpt.save(tmp_path / "ckpt", tree, options=SMALL, process_state={"at": 1})
    return tmp_path / "ckpt"


def one(path: Path, pattern: str) -> Path:
    return sorted(path.glob(f"data-*/{pattern}"))[0]


def test_an_undamaged_checkpoint_is_ok(path: Path) -> None:
    report = jaxckpt.verify(path)
    assert report.ok, report
    assert report
    assert report.leaves == 9
    assert report.objects == len(list(path.glob("data-*/*/c/**/*"))) - len(
        [folder for folder in path.glob("data-*/*/c/**/*") if folder.is_dir()]
    )
    assert report.checked_bytes == sum(file.stat().st_size for file in path.glob("data-*/*/c/**/*") if file.is_file())
    assert jaxckpt.verify(path, quick=True).ok
    assert str(report).endswith("ok")


@pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
def test_a_flipped_bit_is_reported_with_its_leaf_and_box(tmp_path: Path, compression: Any) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    w = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    options = jaxckpt.Options(chunk_bytes=128, object_bytes=1024, compression=compression)
    jaxckpt.save(tmp_path / "c", {"w": jax.device_put(w, NamedSharding(mesh, P("a", "b")))}, options=options)
    file = sorted(file for file in (tmp_path / "c").glob("data-*/*/c/**/*") if file.is_file())[-1]
    index = [int(part) for part in file.parts[-2:]]
    (stack,) = json.loads((tmp_path / "c" / "manifest.json").read_bytes())["stacks"]
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    (problem,) = jaxckpt.verify(tmp_path / "c").problems
    assert problem.leaf == "w"
    assert problem.box is not None
    (top, bottom), (left, right) = problem.box
    assert [top // stack["object"][1], left // stack["object"][2]] == index
    assert [bottom - top, right - left] == stack["chunk"][1:]
    assert problem.object == str(file.relative_to(tmp_path / "c"))
    assert "crc32c" in problem.reason
    # The damaged box cannot be read; the rest of the leaf can.
    leaf = jaxckpt.open(tmp_path / "c")["w"]
    with pytest.raises(jaxckpt.errors.DataError):
        leaf[top:bottom, left:right]
    assert top > 0
    np.testing.assert_array_equal(leaf[:top], w[:top])


def test_every_kind_of_file_is_checked(path: Path) -> None:
    for pattern, leaf, reason in (
        ("*float32-64/c/0/0", "layers/0", "is missing"),
        ("*float32-64/zarr.json", None, "is missing"),
        ("process-0.json", None, "is missing"),
        ("*uint32-2/c/0/0", "key", "is missing"),
    ):
        file = one(path, pattern)
        content = file.read_bytes()
        file.unlink()
        for quick in (False, True):
            problems = jaxckpt.verify(path, quick=quick).problems
            assert problems[0].leaf == leaf
            assert {problem.reason for problem in problems} == {reason}
            assert {problem.object for problem in problems} == {str(file.relative_to(path))}
        file.write_bytes(content + b"\0")
        assert not jaxckpt.verify(path, quick=True).ok
        file.write_bytes(content)
    assert jaxckpt.verify(path).ok


def test_a_packed_object_names_all_its_leaves(path: Path) -> None:
    file = one(path, "*float32-64/c/0/0")
    file.write_bytes(file.read_bytes()[:-1])
    report = jaxckpt.verify(path)
    rows = [problem.leaf for problem in report.problems]
    assert rows == [f"layers/{i}" for i in range(len(rows))]
    assert len(rows) > 1
    assert "bytes long, expected" in str(report)


def test_swapped_objects(path: Path) -> None:
    first, second = sorted(path.glob("data-*/*float32-32x32/c/0/*/0"))[:2]
    content = first.read_bytes()
    assert second.stat().st_size == len(content)
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert jaxckpt.verify(path, quick=True).ok, "the lengths are unchanged"
    problems = jaxckpt.verify(path).problems
    assert [problem.leaf for problem in problems] == ["w", "w"]
    assert problems[0].box != problems[1].box
    assert {problem.reason for problem in problems} == {"does not hold the data that was saved there"}


def test_a_damaged_manifest_is_a_problem(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:-5])
    report = jaxckpt.verify(path)
    assert [problem.object for problem in report.problems] == ["manifest.json"]
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.verify(path / "nothing")


def test_a_checkpoint_that_is_deleted_during_verify_is_not_damaged(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")

    def delete(_: jaxckpt.types.Progress) -> None:
        (tmp_path / "copy" / "manifest.json").unlink(missing_ok=True)
        for folder in (tmp_path / "copy").glob("data-*"):
            shutil.rmtree(folder)

    one(tmp_path / "copy", "*float32-64/c/0/0").unlink()
    # In a second, progress is reported.
    slowly = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="deleted while it was being verified"):
        jaxckpt.verify(tmp_path / "copy", options=jaxckpt.Options(progress=delete, max_bytes_per_second=slowly))


@pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
def test_a_chunk_larger_than_one_read(tmp_path: Path, compression: Any) -> None:
    side = 1_299_709  # a prime, so that each of the six pieces of 10 MiB is one chunk
    sharding = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P("x"))
    values = np.random.default_rng(0).normal(size=(3, 2 * side)).astype(np.complex64)
    w = [jax.device_put(row, sharding) for row in values]
    options = jaxckpt.Options(chunk_bytes=16 << 20, object_bytes=64 << 20, compression=compression)
    jaxckpt.save(tmp_path / "c", {"w": w}, options=options)
    assert jaxckpt.verify(tmp_path / "c").ok
    file = sorted(file for file in (tmp_path / "c").glob("data-*/*/c/**/*") if file.is_file())[-1]
    content = bytearray(file.read_bytes())
    row = "w/2"
    size = int(np.frombuffer(content[-20:-4], "<u8")[1])  # the size of the object's last chunk
    end = int(np.frombuffer(content[-20:-4], "<u8").sum())
    for place in (end - size, end - size // 2, end - 5, end - 4, end - 1):
        content[place] ^= 1
        file.write_bytes(content)
        content[place] ^= 1
        first, *_ = jaxckpt.verify(tmp_path / "c").problems
        assert (first.leaf, first.box) == (row, ((side, 2 * side),))
        assert "damaged chunk" in first.reason


def test_leaves_without_elements_and_scalars(tmp_path: Path) -> None:
    tree = {
        "zero": [np.empty((0, 3)), np.empty((2, 0), np.int8)],
        "scalars": [np.float32(i) for i in range(5000)],
        "uint4": np.arange(16).astype(ml_dtypes.uint4),
        "keys": jax.random.split(jax.random.key(0), 3),
    }
    jaxckpt.save(tmp_path / "c", tree)
    assert jaxckpt.verify(tmp_path / "c").ok
    for pattern, leaves, boxes in (
        ("*-float32-scalar/c/*", {f"scalars/{i}" for i in range(5000)}, {()}),
        ("*-uint4-16/c/*/0", {"uint4"}, {((0, 16),)}),
        ("*-uint32-3x2/c/*/0/0", {"keys"}, {((0, 3), (0, 2))}),
    ):
        files = list((tmp_path / "c").glob(f"data-*/{pattern}"))
        kept = [file.read_bytes() for file in files]
        assert files
        for file in files:
            file.write_bytes(b"")
        problems = jaxckpt.verify(tmp_path / "c").problems
        assert {problem.leaf for problem in problems} == leaves
        assert {problem.box for problem in problems} == boxes
        for file, content in zip(files, kept, strict=True):
            file.write_bytes(content)


def test_only_bytes_that_were_read_count_as_checked(path: Path) -> None:
    file = one(path, "*float32-64/c/0/0")
    whole = jaxckpt.verify(path).checked_bytes
    size = file.stat().st_size
    file.unlink()
    seen: list[jaxckpt.types.Progress] = []
    report = jaxckpt.verify(path, options=jaxckpt.Options(progress=seen.append))
    assert report.checked_bytes == seen[-1].done_bytes == seen[-1].total_bytes == whole - size


def test_a_manifest_that_is_not_a_regular_file_is_a_problem(path: Path) -> None:
    (path / "manifest.json").rename(path / "moved.json")
    for make in (lambda file: file.mkdir(), lambda file: file.symlink_to(path / "moved.json")):
        make(path / "manifest.json")
        (problem,) = jaxckpt.verify(path).problems
        assert problem.object == "manifest.json"
        assert "not a regular file" in problem.reason
        with contextlib.suppress(IsADirectoryError):
            (path / "manifest.json").unlink()
        if (path / "manifest.json").exists():
            (path / "manifest.json").rmdir()


def test_progress_moves_while_objects_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a limit of the rate, which delays the start of each object."""
    monkeypatch.setattr(_verify, "_REPORT_SECONDS", 0.001)
    tree = {f"w{n}": np.full(2 << 20, n, np.float32) for n in range(8)}
    jaxckpt.save(tmp_path / "run/00000001", tree, options=jaxckpt.Options(sync=False))
    jaxckpt.save(tmp_path / "run/00000002", {"w": np.zeros(9)})
    seen: list[jaxckpt.types.Progress] = []
    options = jaxckpt.Options(progress=seen.append, max_bytes_per_second=250e6)
    assert jaxckpt.verify(tmp_path / "run", options=options).ok
    first = [one for one in seen if one.step == "00000001"]
    (*_, last) = [one for one in seen if one.step == "00000002"]
    assert str(last).startswith("verify 00000002: ")
    assert last.done_bytes == last.total_bytes
    done = [one.done_bytes for one in first]
    assert done == sorted(done)
    assert done[-1] == first[-1].total_bytes
    assert len(done) >= 8
    early = [one.done_bytes for one in first if one.seconds < first[-1].seconds / 2]
    assert early, "the first half of the time"


def test_progress_moves_within_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "c", np.zeros(6 << 20, np.float32), options=jaxckpt.Options(sync=False))
    steps = threading.Semaphore(0)
    reader = Folder.range_reader

    @contextlib.contextmanager
    def slow(self: Folder, key: str) -> Any:
        with reader(self, key) as read:
            yield lambda start, stop: steps.acquire(timeout=10) and read(start, stop)

    seen: list[int] = []

    def allow(progress: jaxckpt.types.Progress) -> None:
        if not seen or progress.done_bytes > seen[-1]:
            seen.append(progress.done_bytes)
            steps.release()  # the next read waits for the report of the last one

    monkeypatch.setattr(Folder, "range_reader", slow)
    steps.release()
    assert jaxckpt.verify(tmp_path / "c", options=jaxckpt.Options(progress=allow)).ok
    assert len(seen) >= 6, "24 MiB are read 4 MiB at a time"


def test_progress_follows_a_limited_rate(tmp_path: Path) -> None:
    """An object is read at once, but reported over the time that it takes at this rate."""
    jaxckpt.save(tmp_path / "c", np.zeros(10_000), options=jaxckpt.Options(chunk_bytes=8000))
    rate, seen = 100_000, list[jaxckpt.types.Progress]()
    options = jaxckpt.Options(progress=seen.append, max_bytes_per_second=rate)
    assert jaxckpt.verify(tmp_path / "c", options=options).ok
    assert seen[-1].done_bytes == seen[-1].total_bytes > 80_000
    assert all(one.done_bytes <= rate * one.seconds + 1 for one in seen[:-1])
    assert len({one.done_bytes for one in seen}) >= 5


def test_progress_is_reported_while_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "c", np.zeros(10))
    reader, may_read = Folder.range_reader, threading.Event()

    def slow(self: Folder, key: str) -> Any:
        assert may_read.wait(60), "reported while the storage does not answer"
        return reader(self, key)

    monkeypatch.setattr(Folder, "range_reader", slow)
    options = jaxckpt.Options(progress=lambda progress: may_read.set())
    assert jaxckpt.verify(tmp_path / "c", options=options).ok


def test_it_stops_quickly_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many objects, Ctrl-C must not wait for all of them."""
    jaxckpt.save(tmp_path / "c", {"w": np.arange(500 * 16)}, options=jaxckpt.Options(chunk_bytes=128, object_bytes=128))
    read: list[str] = []
    original = Folder.range_reader
    monkeypatch.setattr(Folder, "range_reader", lambda self, key: read.append(key) or original(self, key))

    def interrupt(_: jaxckpt.types.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        jaxckpt.verify(tmp_path / "c", options=jaxckpt.Options(progress=interrupt))
    assert jaxckpt.open(tmp_path / "c")["w"].shape == (8000,)
    assert len(read) < 100


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_without_read_permission(run_python: RunPython) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        jaxckpt.save(f"{folder}/c", {"w": np.arange(10)})
        (stack,) = Path(folder).glob("c/data-*/*int64*")
        stack.chmod(0o700)
        run_python(
            f"""
            import os, jaxckpt
            os.seteuid(65534)
            for read in (jaxckpt.verify, jaxckpt.load_numpy):
                try:
                    read({folder!r} + "/c")
                except jaxckpt.errors.StorageError as error:
                    assert isinstance(error, OSError) and error.errno == 13, error
                else:
                    raise AssertionError("no error")
            print("all checks passed")
            """,
            devices=1,
            word=PASSED,
        )


def test_progress_and_memory(run_python: RunPython, tmp_path: Path) -> None:
    printed = run_python(
        f"""
        import jaxckpt, numpy as np
        path = {str(tmp_path / "big")!r}
        tree = {{f"w{{i}}": np.full((8 << 20,), float(i), np.float32) for i in range(12)}}
        jaxckpt.save(path, tree, options=jaxckpt.Options(sync=False))
        """,
        devices=1,
    )
    printed = run_python(
        f"""
        import jaxckpt, psutil
        path = {str(tmp_path / "big")!r}
        seen = []
        before = psutil.Process().memory_info().rss
        report = jaxckpt.verify(path, options=jaxckpt.Options(progress=seen.append))
        assert report.ok and seen[-1].done_bytes == seen[-1].total_bytes == report.checked_bytes > 384 << 20
        most = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(most * 1024 - before >> 20)  # ru_maxrss would include the parent's memory
        """,
        devices=1,
    )
    assert int(printed) < 128, "MiB of memory, for 384 MiB of data"


@pytest.mark.child
def test_on_a_pipe_it_does_not_hang(path: Path) -> None:
    file = one(path, "*float32-64/c/0/0")
    file.unlink()
    subprocess.run(["mkfifo", file], check=True)
    (first, *_) = jaxckpt.verify(path).problems
    assert "a pipe, a socket or a device" in first.reason
    with pytest.raises(jaxckpt.errors.DataError, match="a pipe"):
        jaxckpt.load_numpy(path)


def test_the_printed_report_has_one_line_per_file(path: Path) -> None:
    one(path, "*float32-64/c/0/0").unlink()
    report = jaxckpt.verify(path)
    assert not report
    lines = str(report).splitlines()
    assert len(lines) == 2
    assert re.search(r"is missing: 'layers/0'\[0:64\], 'layers/1'\[0:64\], .* and \d more$", lines[1]), lines[1]


def test_unfinished_steps_of_a_run_are_counted(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        run.save(3, {"w": np.zeros(4)})
    assert jaxckpt.verify(tmp_path / "run").unfinished_steps == ()
    (tmp_path / f"run/00000004/data-{'0' * 32}").mkdir(parents=True)
    (tmp_path / "run/00000005").mkdir()
    report = jaxckpt.verify(tmp_path / "run")
    assert report.ok
    assert report.unfinished_steps == (4,)
    assert str(report).endswith("read, 1 unfinished step skipped: ok")


@pytest.mark.parametrize("steps", [1, 4])
def test_the_rate_is_bounded_over_all_steps_of_a_run(tmp_path: Path, steps: int) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as run:
        for step in range(steps):
            run.save(step, {"w": np.full(40_000 // steps, step, np.float64)})
    began = time.monotonic()
    report = jaxckpt.verify(tmp_path / "run", options=jaxckpt.Options(max_bytes_per_second=800_000))
    seconds = time.monotonic() - began
    assert report.ok
    assert report.checked_bytes > 320_000
    assert report.checked_bytes / 800_000 <= seconds < 60
