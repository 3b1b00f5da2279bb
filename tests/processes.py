"""Child processes for tests: real ones, with simulated devices, and never without a limit of time."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_ROOT = Path(__file__).parent.parent

_JOIN = """
import json as _json, sys as _sys
process_id, args = int(_sys.argv[1]), _json.loads(_sys.argv[4])
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(_sys.argv[3], int(_sys.argv[2]), process_id, initialization_timeout=60)
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """A child process that has ended."""

    returncode: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"exit {self.returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr[-6000:]}"


class RunPython(Protocol):
    def __call__(
        self,
        code: str,
        *,
        devices: int = 8,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        check: bool = True,
    ) -> str: ...


class RunProcesses(Protocol):
    def __call__(
        self,
        code: str,
        *,
        processes: int,
        devices_per_process: int,
        timeout: float = 120,
        args: Any = None,
        check: bool = True,
    ) -> list[Finished]: ...


def environment(devices: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with so many simulated CPU devices and the package importable."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])),
        **(env or {}),
    }


def run_python(
    code: str,
    *,
    devices: int = 8,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    check: bool = True,
) -> str:
    """Run a program in a child process and return what it printed; fails the test if it fails."""
    (done,) = _finish(
        [_start([sys.executable, "-c", textwrap.dedent(code), *args], environment(devices, env))], timeout
    )
    assert not check or done.returncode == 0, str(done)
    return done.stdout


def run_processes(
    code: str, *, processes: int, devices_per_process: int, timeout: float = 120, args: Any = None, check: bool = True
) -> list[Finished]:
    """Run a program in the processes of one jax.distributed job; it finds `process_id` and `args` as globals."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    program = _JOIN + textwrap.dedent(code)
    children = [
        _start(
            [sys.executable, "-c", program, str(number), str(processes), address, json.dumps(args)],
            environment(devices_per_process),
        )
        for number in range(processes)
    ]
    done = _finish(children, timeout)
    if check:
        report = "\n".join(f"=== process {number}: {one}" for number, one in enumerate(done))
        assert all(one.returncode == 0 for one in done), report
    return done


def _start(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    # A session of its own, so that whatever it starts is killed with it.
    return subprocess.Popen(
        command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _finish(children: list[subprocess.Popen[str]], timeout: float) -> list[Finished]:
    deadline = time.monotonic() + timeout
    late = False
    done: list[Finished] = []
    for child in children:
        try:
            out, err = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            for other in children:
                if other.poll() is None:
                    os.killpg(other.pid, signal.SIGKILL)
            out, err = child.communicate()
        done.append(Finished(child.returncode, out, err))
    report = "\n".join(f"=== process {number}: {one}" for number, one in enumerate(done))
    assert not late, f"not finished after {timeout} s: a hang\n{report}"
    return done
