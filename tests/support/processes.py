"""Child processes for tests: real processes, with simulated devices, always with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import forks

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
PROGRAMS = ROOT / "tests" / "programs"
PYTHONPATH = os.pathsep.join(
    filter(
        None, [*map(str, (ROOT, SUPPORT, ROOT / "tests" / "faults", ROOT / "examples")), os.environ.get("PYTHONPATH")]
    )
)
"""PYTHONPATH of child processes, so that they can import the same modules as the tests."""

File = IO[bytes] | int
Child = subprocess.Popen[bytes] | forks.Forked

PASSED = "all checks passed"
"""What a program prints after its last check, for `word`."""

_SHOWN = 6000  # characters of each stream's end that a failure shows, because the traceback is there

_JOIN = "from joined import args, jax, process_id\n"  # for programs given as text


@dataclass(frozen=True, slots=True)
class Finished:
    """A child process that has ended."""

    returncode: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"exit {self.returncode}\n--- stdout\n{self.stdout[-_SHOWN:]}\n--- stderr\n{self.stderr[-_SHOWN:]}"


class RunPython(Protocol):
    def __call__(
        self,
        code: str | Path,
        *,
        devices: int = 8,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        check: bool = True,
        word: str | None = None,
    ) -> str: ...


class RunProcesses(Protocol):
    def __call__(
        self,
        code: str | Path,
        *,
        processes: int,
        devices_per_process: int,
        timeout: float = 120,
        args: Any = None,
        check: bool = True,
        word: str | None = None,
    ) -> list[Finished]: ...


def environment(devices: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with this number of simulated CPU devices, and with jaxckpt importable."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": PYTHONPATH,
        "PYTHONFAULTHANDLER": "1",  # a child that hangs gets SIGABRT, and prints the stack of each thread
        **(env or {}),
    }


def run_python(
    code: str | Path,
    *,
    devices: int = 8,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    check: bool = True,
    word: str | None = None,
) -> str:
    """Run a program, given as text or as a file, in a child process; return its output. Raises if it fails, or if the
    last line that it prints is not `word`: an exit code of 0 does not prove that its checks ran."""
    done = finish(code, *args, devices=devices, timeout=timeout, env=env)
    assert not check or done.returncode == 0, str(done)
    assert _has_said(word, done), str(done)
    return done.stdout


def finish(
    code: str | Path,
    *args: object,
    devices: int = 1,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run a program, given as text or as a file, in a child process; return how it ended."""
    (done,) = _run([[*_program(code), *map(str, args)]], environment(devices, env), timeout)
    return done


def run_processes(
    code: str | Path,
    *,
    processes: int,
    devices_per_process: int,
    timeout: float = 120,
    args: Any = None,
    check: bool = True,
    word: str | None = None,
) -> list[Finished]:
    """Run a program in the processes of one jax.distributed job. A file joins the job with `from joined import args,
    process_id`; text finds both, and jax, as globals. For `word`, see `run_python`."""
    address = f"127.0.0.1:{free_port()}"
    program = _program(code if isinstance(code, Path) else _JOIN + textwrap.dedent(code))
    commands = [[*program, str(number), str(processes), address, json.dumps(args)] for number in range(processes)]
    done = _run(commands, environment(devices_per_process), timeout)
    assert not check or all(one.returncode == 0 for one in done), _report(done)
    assert all(_has_said(word, one) for one in done), _report(done)
    return done


def run_together(commands: Sequence[Sequence[str]], *, timeout: float = 120, word: str | None = None) -> None:
    """Run programs concurrently, each in a child process. Raises if any of them fails. For `word`, see `run_python`."""
    done = _run(commands, environment(1), timeout)
    assert all(one.returncode == 0 and _has_said(word, one) for one in done), _report(done)


def _has_said(word: str | None, done: Finished) -> bool:
    return word is None or done.stdout.splitlines()[-1:] == [word]


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    stdout: File | None = None,
    stderr: File | None = None,
    *,
    stdin: File | None = None,
    number: int = 0,
) -> Child:
    """Start a program in a separate session, so that everything it starts can be killed with it. The command is like
    Python's: a file, or "-c" and text, then arguments. By default, streams are empty or those of this process. Each
    process of a job has a `number`."""
    with open(os.devnull, "rb") as nothing:
        streams = (stdin or nothing, stdout or 1, stderr or 2)
        if forks.can_run(env):
            return forks.Forked(number, command, env, streams)
        return subprocess.Popen([sys.executable, *command], -1, None, *streams, env=env, start_new_session=True)


def free_port() -> int:
    # Below the range of ports for outgoing connections, so that the kernel does not assign the port to another
    # connection before the coordinator listens on it.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(commands: Sequence[Sequence[str]], env: Mapping[str, str], timeout: float) -> list[Finished]:
    children: list[Child] = []
    # Output goes to files instead of pipes, so that a child never waits for a reader, and the test never waits for
    # processes that the child leaves behind.
    with tempfile.TemporaryDirectory(prefix="jaxckpt-processes-") as folder:
        outputs = [(Path(folder, f"{number}.out"), Path(folder, f"{number}.err")) for number in range(len(commands))]
        try:
            for number, (command, (out, err)) in enumerate(zip(commands, outputs, strict=True)):
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    children.append(start(command, env, stdout, stderr, number=number))
            _wait(children, timeout)
            hung = [number for number, child in enumerate(children) if child.poll() is None]
            for number in hung:
                children[number].send_signal(signal.SIGABRT)
                children[number].send_signal(signal.SIGCONT)  # a stopped process would not notice
            if hung:
                _wait(children, 10)
        finally:  # also when pytest-timeout or Ctrl-C interrupts the wait
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        done = [
            Finished(child.returncode, out.read_text(errors="replace"), err.read_text(errors="replace"))
            for child, (out, err) in zip(children, outputs, strict=True)
        ]
    who = ", ".join(map(str, hung))
    assert not hung, f"process {who} of {len(children)} not finished after {timeout} s: a hang\n{_report(done)}"
    return done


def _program(code: str | Path) -> list[str]:
    return [str(code)] if isinstance(code, Path) else ["-c", textwrap.dedent(code)]


def _wait(children: Sequence[Child], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0, deadline - time.monotonic()))


def _report(done: Sequence[Finished]) -> str:
    return "\n".join(f"=== process {number}: {one}" for number, one in enumerate(done))
