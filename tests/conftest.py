"""Fixtures for all tests, which run on eight simulated devices; checks that tests which start processes are marked."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # shells make background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import processes
import pytest
import stores

if TYPE_CHECKING:  # imports JAX and tensorstore: 3 s in the process that hands out the tests, which waits for it
    import servers

hypothesis.settings.register_profile("default", deadline=None, max_examples=40, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("default"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def run_python() -> processes.RunPython:
    """Runs a program in a child process with its own number of simulated devices; returns its output."""
    return processes.run_python


@pytest.fixture(scope="session")
def run_processes() -> processes.RunProcesses:
    """Runs a program in several real processes of one jax.distributed job."""
    return processes.run_processes


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function that returns the bytes of objects that this process has read from the file system so far."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(*args: Any) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return lambda: sum(counts)


@pytest.fixture(scope="session")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import command_line

    folder = tmp_path_factory.mktemp("cli")
    command_line.fill(folder)
    return folder


@pytest.fixture
def here(_filled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, filled with checkpoints for command lines; no test changes them."""
    monkeypatch.chdir(_filled)
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return _filled


@pytest.fixture(scope="session")
def moto() -> Iterator[stores.Server]:
    """An S3 server that runs during the test session."""
    with stores.moto() as server:
        yield server


@pytest.fixture(scope="session")
def storage_testbench() -> Iterator[stores.Server]:
    """Google's test server for its Cloud Storage; it runs during the test session."""
    with contextlib.ExitStack() as running:
        try:
            server = running.enter_context(stores.storage_testbench())
        except LookupError as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture
def s3(
    moto: stores.Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[servers.Bucket]:
    """A new s3:// path behind a proxy, which counts the requests and can make them fail."""
    import servers

    with servers.bucket(moto, monkeypatch, virtual_hosts=request.config.getoption("--virtual-hosts")) as found:
        yield found


@pytest.fixture
def gs(storage_testbench: stores.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Bucket]:
    """A new gs:// path behind a proxy, as for `s3`."""
    import servers

    with servers.bucket(storage_testbench, monkeypatch) as found:
        yield found


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest) -> servers.Bucket:
    """A new path on each kind of object store in turn."""
    return request.getfixturevalue(request.param)


# The mark `child` -----------------------------------------------------------------------------------------

STARTS_A_CHILD = {"run_python", "run_processes", "moto", "storage_testbench", "bucket", "browser"}
"""Fixtures that start a child process. A test that uses one of them gets the mark `child` automatically."""

_unmarked: str | None = None  # the current test, if it does not have the mark


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--virtual-hosts"):
        items[:] = [item for item in items if isinstance(item, pytest.Function) and _uses_s3(item)]
    for item in items:
        if isinstance(item, pytest.Function) and STARTS_A_CHILD.intersection(item.fixturenames):
            item.add_marker("child")


def _uses_s3(item: pytest.Function) -> bool:
    of_bucket = item.callspec.params.get("bucket") if hasattr(item, "callspec") else None
    return "s3" in item.fixturenames or of_bucket == "s3"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and tests from garbage collection, because they live until the end."""
    importlib.import_module("numpy.testing")  # NumPy 1.26 starts a process when a test imports this first
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _unmarked
    _unmarked = None if item.get_closest_marker("child") else item.nodeid
    try:
        return (yield)
    finally:
        _unmarked = None


def _refuse_a_child(event: str, _: Any) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn") and _unmarked is not None:
        raise AssertionError(f"{_unmarked} starts a process ({event}): mark it with @pytest.mark.child")


sys.addaudithook(_refuse_a_child)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign", action="store_true", help="all rounds of tests/faults, and docs/reliability.md from them"
    )
    parser.addoption(
        "--virtual-hosts", action="store_true", help="only tests of S3, whose server refuses the bucket in the path"
    )
