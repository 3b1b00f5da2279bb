"""`verify`, `diff`, `convert` and `average` by the workers of an executor: as by one process, also if workers die."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import Bucket

import jaxckpt
from jaxckpt._inspect import diff as diffs
from jaxckpt._inspect import executors
from jaxckpt._sources.open_source import source_at

SMALL = jaxckpt.Options(chunk_bytes=4096, object_bytes=16384, sync=False)

pytestmark = pytest.mark.child


def pool(workers: int = 2) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    with pool() as executor:
        yield executor


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (executors, diffs):
        monkeypatch.setattr(module, "UNIT_BYTES", 16384)


def tree(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "w": random.standard_normal((64, 512), np.float32),
        "layers": [random.standard_normal(3000, np.float32) for _ in range(6)],
        "mask": random.random(50) > 0.5,
        "text": "abc",
        "n": 3,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    jaxckpt.save(tmp_path / "a", tree(1), options=SMALL)
    return tmp_path / "a"


def files(folder: Path) -> dict[str, bytes]:
    """The content of the files in a folder by name, without what each save has of its own."""
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {
        name.partition("/")[2] if name.startswith("data-") else name: file.read_bytes()
        for name, file in found.items()
        if file.name not in ("manifest.json", "manifest-copy.json")
    }


class Killing(Executor):
    """An executor that kills one worker of another after a few units were submitted to it."""

    def __init__(self, executor: Executor, pids: Callable[[], list[int]], after: int = 5) -> None:
        self._executor = executor
        self._pids = pids
        self._left = after
        self.killed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._executor.submit(fn, *args, **kwargs)
        self._left -= 1
        if not self._left:
            os.kill(self._pids()[0], signal.SIGKILL)
            self.killed = True
        return future


@contextlib.contextmanager
def killed_pool() -> Generator[Killing]:
    with pool() as executor:
        assert executor.submit(os.getpid).result() > 0
        yield Killing(executor, lambda: [*executor._processes])


# As by one process ----------------------------------------------------------------------------------------


def test_verify_reports_the_same(workers: Executor, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert jaxckpt.verify(path, executor=workers) == jaxckpt.verify(path)
    damaged = sorted(path.glob("data-*/*/c/**/*"))[-1]
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    report = jaxckpt.verify(path, executor=workers)
    assert len(report.problems) == 1
    assert report == jaxckpt.verify(path)
    assert not caplog.records


def test_verify_of_a_run_and_of_another_format(workers: Executor, tmp_path: Path, path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", background=False, options=SMALL) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, tree(step))
    assert jaxckpt.verify(tmp_path / "run", executor=workers) == jaxckpt.verify(tmp_path / "run")
    jaxckpt.convert(path, tmp_path / "f", format="safetensors", select=["w", "layers"])
    (file,) = (tmp_path / "f").glob("*.safetensors")
    assert jaxckpt.verify(file, executor=workers) == jaxckpt.verify(file)


def test_diff_reports_the_same(workers: Executor, tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tree(1)
    other["w"][5, 7], other["w"][63, 511], other["layers"][3][0] = np.nan, 3, np.inf
    other["extra"] = np.zeros(3)
    jaxckpt.save(tmp_path / "b", {"v": other.pop("w"), **other}, options=SMALL)
    rename = {"w": "v"}
    delta = jaxckpt.diff(path, tmp_path / "b", rename=rename, executor=workers)
    assert {leaf.path: leaf.differing for leaf in delta.differing} == {"extra": 0, "layers/3": 1, "v": 2}
    assert delta == jaxckpt.diff(path, tmp_path / "b", rename=rename)
    assert not caplog.records


@pytest.mark.parametrize("options", [SMALL, jaxckpt.Options(compression="zstd", object_bytes=16384, chunk_bytes=4096)])
def test_convert_writes_the_same(
    workers: Executor, tmp_path: Path, path: Path, options: jaxckpt.Options, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"rename": {"layers": "blocks"}, "select": ["w", "blocks", "n"], "options": options}
    jaxckpt.convert(path, tmp_path / "many", executor=workers, **arguments)
    jaxckpt.convert(path, tmp_path / "one", **arguments)
    assert len(files(tmp_path / "one")) > 10
    assert files(tmp_path / "many") == files(tmp_path / "one")
    assert jaxckpt.verify(tmp_path / "many").ok
    assert jaxckpt.diff(tmp_path / "many", tmp_path / "one").identical
    manifests = [source_at(tmp_path / name, SMALL).manifest for name in ("many", "one")]
    assert manifests[0].stacks == manifests[1].stacks
    assert not caplog.records


def test_convert_of_a_run_and_to_safetensors(
    workers: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", background=False, options=SMALL) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, tree(step), metrics={"loss": 1.0 / step})
    jaxckpt.convert(tmp_path / "run", tmp_path / "copy", executor=workers)
    run = jaxckpt.Run(tmp_path / "copy")
    assert run.metrics(2) == {"loss": 0.5}
    np.testing.assert_equal(run.restore(2), tree(2))
    step, select = tmp_path / "copy/00000002", ["w", "layers"]
    monkeypatch.chdir(tmp_path)
    jaxckpt.convert("run@2", "many", format="safetensors", select=select, executor=workers)
    jaxckpt.convert(step, "one", format="safetensors", select=select)
    assert files(tmp_path / "many") == files(tmp_path / "one")
    assert not caplog.records


def test_average_is_computed_by_workers(
    workers: Executor, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jaxckpt.save(tmp_path / "b", tree(2), options=SMALL)
    monkeypatch.chdir(tmp_path)
    both, select = ["a", "b"], ["w", "layers"]
    jaxckpt.convert(jaxckpt.weights.average(both, select=select, executor=workers), "many", options=SMALL)
    jaxckpt.convert(jaxckpt.weights.average(both, select=select), "one", options=SMALL)
    assert files(tmp_path / "many") == files(tmp_path / "one")
    assert not caplog.records


def test_any_executor_is_accepted_and_nothing_else(tmp_path: Path, path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert jaxckpt.verify(path, executor=threads).ok
        with pytest.raises(jaxckpt.errors.InputError, match="has no effect on format 'npz'"):
            jaxckpt.convert(path, tmp_path / "x.npz", executor=threads)
        with pytest.raises(jaxckpt.errors.InputError, match="non_finite"):
            jaxckpt.convert(path, tmp_path / "x", executor=threads, options=jaxckpt.Options(non_finite="warn"))
    with pytest.raises(jaxckpt.errors.InputError, match=r"must be a concurrent\.futures\.Executor.*found a int"):
        jaxckpt.verify(path, executor=8)  # pyright: ignore[reportArgumentType]


def test_what_does_not_pickle_is_done_by_the_caller(
    workers: Executor, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    delta = jaxckpt.diff(path, path, rename=lambda name: name, executor=workers)
    assert delta == jaxckpt.diff(path, path, rename=lambda name: name)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 3
    assert "lost its first 3 units (AttributeError: Can't pickle local object" in caplog.text


def test_an_error_of_a_worker_is_that_of_one_process(workers: Executor, tmp_path: Path, path: Path) -> None:
    damaged = sorted(path.glob("data-*/*/c/**/*"))[-1]
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    with pytest.raises(jaxckpt.CorruptError) as by_one:
        jaxckpt.convert(path, tmp_path / "b")
    with pytest.raises(jaxckpt.CorruptError) as by_many:
        jaxckpt.convert(path, tmp_path / "b", executor=workers)
    assert str(by_many.value) == str(by_one.value)
    assert not (tmp_path / "b").exists()


# Dead workers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["verify", "diff", "convert"])
def test_a_broken_pool_does_not_lose_the_job(
    call: str, tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with killed_pool() as executor:
        match call:
            case "verify":
                assert jaxckpt.verify(path, executor=executor) == jaxckpt.verify(path)
            case "diff":
                jaxckpt.save(tmp_path / "b", tree(2), options=SMALL)
                assert jaxckpt.diff(path, tmp_path / "b", executor=executor) == jaxckpt.diff(path, tmp_path / "b")
            case _:
                jaxckpt.convert(path, tmp_path / "many", executor=executor, options=SMALL)
                jaxckpt.convert(path, tmp_path / "one", options=SMALL)
                assert files(tmp_path / "many") == files(tmp_path / "one")
        assert executor.killed
    (warning,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert "the executor takes no more work (BrokenProcessPool" in warning


def test_a_stopped_worker_does_not_hold_the_call_up(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pool(1) as executor:
        pid = executor.submit(os.getpid).result()
        os.kill(pid, signal.SIGSTOP)
        try:
            assert jaxckpt.verify(path, executor=executor, options=jaxckpt.Options(timeout_seconds=1)).ok
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "has not finished a unit for 1 s" in caplog.text


def test_a_dask_cluster_loses_a_worker(tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    local = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, protocol="tcp")
    with local as cluster, distributed.Client(cluster) as client:
        processes = [worker.pid for worker in cluster.workers.values()]
        executor = Killing(client.get_executor(), lambda: processes)
        jaxckpt.convert(path, tmp_path / "many", executor=executor, options=SMALL)
        assert executor.killed
        assert jaxckpt.verify(path, executor=client.get_executor()) == jaxckpt.verify(path)
    jaxckpt.convert(path, tmp_path / "one", options=SMALL)
    assert files(tmp_path / "many") == files(tmp_path / "one")


@pytest.mark.parametrize("call", ["verify", "convert"])
def test_an_interrupt_ends_the_call(call: str, tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pool(1) as executor:
        pid = executor.submit(os.getpid).result()
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        threading.Timer(1.5, lambda: os.kill(pid, signal.SIGCONT)).start()
        destination = () if call == "verify" else (tmp_path / "b",)
        with pytest.raises(KeyboardInterrupt):
            getattr(jaxckpt, call)(path, *destination, executor=executor)
        assert executor.submit(os.getpid).result() == pid
    assert not (tmp_path / "b").exists()
    assert not caplog.records


class Silent(Executor):
    """A cluster whose workers are all busy."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        return Future()


@pytest.mark.parametrize("format", [None, "safetensors"])
def test_an_interrupt_ends_a_conversion_that_no_worker_begins(format: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a"
    jaxckpt.save(path, {"w": np.ones((64, 64))})
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        jaxckpt.convert(path, tmp_path / "b", format=format, executor=Silent())
    assert time.monotonic() - begun < 60  # timeout_seconds is 300
    assert not (tmp_path / "b").exists()


def test_workers_read_and_write_in_a_bucket(s3: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    jaxckpt.save(f"{s3.url}/a", tree(1), options=SMALL)
    with pool() as executor:
        assert jaxckpt.verify(f"{s3.url}/a", executor=executor) == jaxckpt.verify(f"{s3.url}/a")
        jaxckpt.convert(f"{s3.url}/a", f"{s3.url}/b", executor=executor, options=SMALL)
        assert jaxckpt.diff(f"{s3.url}/a", f"{s3.url}/b", executor=executor).identical
    assert jaxckpt.verify(f"{s3.url}/b").ok
    assert not caplog.records
