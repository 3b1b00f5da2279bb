"""`make gpu` works on CPU devices with small arrays, and survives workers that crash, hang and fail."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxckpt._model.dtypes import DTYPES

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "benchmarks" / "gpu"
HERE = Path(__file__).parent
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""XLA compiles quickly. The other tests use what it compiles by default."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a user who has put the planted sections into PYTHONPATH."""
    unset = ("GPU_WHEELS", "PYTHONPATH")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    return {**own, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE), **variables}


def make_gpu(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env=environment(GPU_OUT=str(out), ARGS=" ".join(arguments), **variables),
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )


def figures_in(out: Path) -> dict[str, dict[str, Any]]:
    return json.loads((out / "figures.json").read_text())


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.child
@pytest.mark.timeout(600)  # 45 s of CPU time, which take three minutes if many other tests run
def test_every_section_runs_on_cpu_devices(tmp_path: Path) -> None:
    done = make_gpu(tmp_path, "--dry", "--seconds", "570", **QUICKLY)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = figures_in(tmp_path)
    for name, section in figures.items():
        assert not {"error", "not run", "left out"} & {*section}, (name, section)
        assert len(section) > 1, name
    assert {name.removeprefix("dtype ") for name in figures if name.startswith("dtype ")} == {*DTYPES}
    for name in ("large in memory", "small in memory"):
        assert figures[name].keys() >= {"jaxckpt", "orbax v0", "orbax v1"}
        assert len(figures[name]["jaxckpt"]["save_s"]) == 2, "all laps are kept"
        assert all(figures[name]["jaxckpt"]["steps"])
    assert figures["tests"]["counts"].keys() == {"passed"}
    assert figures["tests"]["counts"]["passed"] > 3
    assert "restored onto other layouts" in figures["two processes"]["steps"]
    assert (tmp_path / "save_async.trace.json.gz").stat().st_size > 0
    log = (tmp_path / "log.txt").read_text()
    assert log == done.stdout[done.stdout.index("   facts") :]
    for line in (
        "checks that failed or did not run: none",
        "tests: ",
        "two processes: 2 processes, 2 devices; saved; ",
        "floor of a save, GiB/s: save ",
        "save_async returns: the first",
    ):
        assert f"\n{line}" in log


@pytest.mark.child
def test_tests_that_need_one_device_pass_on_one_device() -> None:
    """`make gpu` runs them all on the GPU. Here, a third of their files, to save time."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.one_device\n" in path.read_text()]
    names = [str(path) for path in marked[::3]]
    command = [sys.executable, "-m", "pytest", "-m", "one_device", "-q", "--tb=short", "-p", "no:cacheprovider", *names]
    variables = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "CI": "true"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 50


@pytest.mark.child
def test_crashes_hangs_and_exceptions_are_survived(tmp_path: Path) -> None:
    done = make_gpu(tmp_path, "--dry", "--sections", "planted_sections:SECTIONS")
    assert "Error 1" in done.stderr, done.stdout[-3000:] + done.stderr[-3000:]
    figures = figures_in(tmp_path)
    others = ("first", "after the crash", "after the exception", "after the hang")
    assert all(figures[name]["folders are empty"] for name in others)
    workers = [figures[name]["worker"] for name in others]
    assert workers[1] == workers[2], "an exception needs no new worker"
    assert len({*workers}) == 3
    assert "by SIGSEGV" in figures["crash"]["error"]
    assert figures["exception"]["error"] == "ValueError: planted"
    assert "the section's time is over" in figures["slow"]["error"]
    assert "did not stop; killed" in figures["hang"]["error"]
    assert all(figures[name]["known before"] == 1 for name in ("crash", "exception", "slow"))
    assert not is_running(figures["hang"]["child"]), "its children are killed too"
    assert not Path(figures["hang"]["folder"]).exists()
    assert "checks that failed or did not run: crash, exception\n" in done.stdout
    assert "sections with errors: crash, exception, slow, hang\n" in done.stdout
    tracebacks = (tmp_path / "worker.txt").read_text()
    for where in ('raise ValueError("planted")', "in crash\n", "in slow\n", "in hang\n"):
        assert where in tracebacks


@pytest.mark.child
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_worker(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "--dry", "--sections", "planted_sections:ALONE", "--only", "long hang"]
    section: dict[str, Any] = {}
    with (tmp_path / "output.txt").open("w") as output:
        run = subprocess.Popen(
            [*command, "--out", tmp_path], env=environment(TMPDIR=str(tmp_path)), stdout=output, stderr=output
        )
        try:
            for _ in range(600):
                if (tmp_path / "figures.json").exists() and "folder" in figures_in(tmp_path).get("long hang", {}):
                    break
                time.sleep(0.1)
            section = figures_in(tmp_path)["long hang"]
            assert is_running(section["worker"])
            run.send_signal(number)
            assert run.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
            for _ in range(100):
                if not is_running(section["worker"]):
                    break
                time.sleep(0.1)
            assert not is_running(section["worker"])
            if number != signal.SIGKILL:  # which leaves no time to kill the worker's children
                assert not is_running(section["child"])
                assert not Path(section["folder"]).exists()
        finally:
            run.kill()
            run.wait()
            if section and is_running(section["child"]):
                os.kill(section["child"], signal.SIGKILL)
                shutil.rmtree(section["folder"])


@pytest.mark.child
def test_the_checkout_comes_before_wheels_and_the_callers_packages_stay(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr("jaxckpt/__init__.py", "raise ImportError('from a wheel')")
    out = tmp_path / "out"
    done = make_gpu(out, "--dry", "--sections", "planted_sections:ALONE", "--only", "imports", GPU_WHEELS=str(wheels))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    places = figures_in(out)["imports"]
    assert places["jaxckpt"] == str(ROOT / "jaxckpt" / "__init__.py")
    assert places["carried"].endswith("/carried.py")
    assert places["planted_sections"] == str(HERE / "planted_sections.py")
    # The entry points are those of the checkout, even if another version is installed.
    assert places["metadata"] == "0"
    assert {"npz", "safetensors", "orbax"} <= {*places["formats"]}


@pytest.mark.child
def test_a_worker_that_cannot_start_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('planted')")
    places = f"{HERE}{os.pathsep}{tmp_path}"
    done = make_gpu(tmp_path, "--dry", "--sections", "planted_sections:SECTIONS", PYTHONPATH=places)
    assert "Error 1" in done.stderr
    errors = [section.get("error", section.get("not run")) for section in figures_in(tmp_path).values()][1:]
    assert all("the worker ended with 1; its last lines: " in error for error in errors[:2])
    assert all("ImportError: planted" in error for error in errors[:2])
    assert errors[2:] == ["no worker starts"] * (len(errors) - 2)


@pytest.mark.child
@pytest.mark.parametrize(("exists", "reason"), [(False, "is not a folder"), (True, r"has no wheels \(\*\.whl\)")])
def test_missing_wheels_are_an_error(exists: bool, reason: str, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    if exists:
        wheels.mkdir()
    done = make_gpu(tmp_path / "out", GPU_WHEELS=str(wheels))
    assert done.returncode != 0
    assert re.search(f"GPU_WHEELS={wheels} {reason}: name a folder", done.stderr), done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.child
def test_a_missing_accelerator_is_reported(tmp_path: Path) -> None:
    done = make_gpu(tmp_path)
    assert done.returncode != 0
    assert "no accelerator" in done.stderr
    assert figures_in(tmp_path).keys() == {"run"}


# Parts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the program can be imported."""
    monkeypatch.syspath_prepend(PROGRAM)
    yield
    for name in [name for name, module in sys.modules.items() if str(PROGRAM) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_section_that_hangs_takes_no_time_from_others(program: None) -> None:
    sections = imported("sections")
    for hanging in sections.SECTIONS:
        left = 600.0
        for number, section in enumerate(sections.SECTIONS):
            limit = sections.limit_seconds(section, list(sections.SECTIONS[number + 1 :]), left)
            assert limit > section.seconds - 1e-6, (hanging.name, section.name)
            left -= limit + sections.REPLACE_SECONDS if section is hanging else section.seconds
        assert left > -1e-6, hanging.name


def test_copies_and_steps_at_once_are_measured(program: None) -> None:
    def named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}

    def ran(pid: int, tid: int, name: str, start_ms: float, end_ms: float) -> dict[str, Any]:
        details = {"memcpy_details": "kind_dst:pinned"} if name == "MemcpyD2H" else {}
        times = {"ts": start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "args": details, **times}

    events = [
        named("process_name", 1, "/device:GPU:0"),
        named("process_name", 2, "/host:CPU"),
        *(
            named("thread_name", 1, name, tid)
            for tid, name in ((14, "Stream #14(Compute)"), (20, "Stream #20(MemcpyD2H)"))
        ),
        named("thread_name", 1, "XLA Ops", 30),
        ran(1, 20, "MemcpyD2H", 0, 10),
        ran(1, 20, "MemcpyD2H", 8, 20),
        ran(1, 20, "MemcpyD2H", 30, 31),
        ran(1, 14, "gemm", 5, 9),
        ran(1, 14, "gemm", 15, 25),
        ran(1, 14, "MemcpyD2D", 0, 20),
        ran(1, 30, "gemm", 0, 20),  # a kernel of a stream, shown again
        ran(2, 14, "MemcpyD2H", 0, 90),  # the host's call
    ]
    assert dict(imported("saves").overlapped(events)) == {
        "copies": 3,
        "copy_ms": 21.0,
        "kernel_ms": 14.0,
        "both_ms": 9.0,
        "kinds of copies": ["kind_dst:pinned"],
    }
