"""Sections that start other processes: the project's own tests on the device, and two processes that share it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from environment import ROOT
from lab import Figure, Lab

MARK = "one_device"
"""The mark of the tests that need one device and use it."""


def tests(lab: Lab) -> Iterator[Figure]:
    """The project's tests that need one device, on this device."""
    platform = jax.default_backend()
    names = "test_ties.py" if lab.sizes.is_dry else "test_*.py"
    files = [str(path) for path in sorted((ROOT / "tests").rglob(names)) if f"mark.{MARK}\n" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", MARK, "--quiet", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--override-ini=timeout=60", "--continue-on-collection-errors", "--color=no"]
    command += [f"--numprocesses={0 if lab.sizes.is_dry else min(4, os.cpu_count() or 1)}", "--dist=worksteal", *files]
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu" if platform == "cpu" else "cuda,cpu",
        "XLA_FLAGS": "",  # one CPU device
        "CI": "true",  # Hypothesis tries the same examples each time
    }
    code = _run(command, variables, lab.out / "pytest.txt", lab.left() - 2)
    lines = (lab.out / "pytest.txt").read_text(errors="replace").splitlines()
    yield "ended", code
    yield "failed", [line[:160] for line in lines if line.startswith(("FAILED", "ERROR"))][:40]
    counts = re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1] if lines else "")
    yield "counts", {what: int(count) for count, what in counts}
    assert code == 0 or platform != "cpu", f"tests failed on a CPU device: see {lab.out / 'pytest.txt'}"


def two_processes(lab: Lab) -> Iterator[Figure]:
    """A job of two processes that share the device. NCCL refuses collectives there before version 2.30."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "XLA_FLAGS": "", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
    program = str(Path(__file__).with_name("shared_device.py"))
    log = lab.out / "two_processes.txt"
    command = [sys.executable, program, str(port), "1", str(lab.memory / "c")]
    with (lab.disk / "second.txt").open("w") as output:
        second = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            command[3] = "0"
            code = _run(command, variables, log, lab.left() - 2)
        finally:
            second.kill()
            second.wait()
    text = log.read_text(errors="replace")
    yield "ended", code
    yield "steps", (steps := re.findall("^two processes: (.*)", text, re.MULTILINE))
    assert "restored onto other layouts" in steps, f"{text[-400:]}\nthe other: {Path(output.name).read_text()[-400:]}"


def _run(command: list[str], variables: dict[str, str], log: Path, seconds: float) -> int | str:
    """The exit status, or that the process took longer. Its children end with this process's group."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"killed after {seconds:.0f} s"
        finally:
            process.kill()
