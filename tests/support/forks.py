"""Child processes that start quickly: forks of a Python that has imported JAX and jaxckpt, and has no threads.

Starting Python and importing JAX takes 2.5 s of CPU time, a fork 0.15 s. A server (`serve`) forks a process for each
request; the process then runs the program as `python PROGRAM ARGS` would, up to the interpreter's own end.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PRELOADED = ("jax.experimental.multihost_utils", "jaxckpt", "numpy.testing", "optax", "flax.nnx", "grain")
READ_AT_START = ("JAX", "LD_", "LOCAL_WORLD_", "MALLOC_", "PYTHON", "SLURM_STEP_")
"""Prefixes of environment variables that are read when Python starts, or JAX or jaxckpt is imported."""

_LARGEST_REQUEST = 200_000
_WORD = 8  # size of each number in the pipe that reports a process id, then an exit status


class Forked:
    """A process that runs a program, with the part of subprocess.Popen's interface that the tests need."""

    def __init__(
        self, number: int, command: Sequence[str], env: Mapping[str, str], streams: Sequence[IO[bytes] | int]
    ) -> None:
        """The command is a program's path, or "-c" and its text, then its arguments. The streams are stdin, stdout and
        stderr. An even and an odd `number` use different servers, so that string hashes differ within a job."""
        sys.audit("os.fork")
        request = json.dumps({"command": list(command), "env": dict(env), "cwd": os.getcwd()}).encode()
        assert len(request) <= _LARGEST_REQUEST, "pass large arguments in a file"
        self.returncode: int | None = None
        self._reports, theirs = os.pipe()
        files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        socket.send_fds(_server(number % 2), [request], [*files, theirs])
        os.close(theirs)
        self.pid = self._number()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._number())
            os.close(self._reports)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._reports], [], [], timeout)[0]:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        found = self.poll()
        assert found is not None
        return found

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its end is not reported yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        found = os.read(self._reports, _WORD)
        assert found, "the server of forks has ended"
        return int.from_bytes(found)


def can_run(env: Mapping[str, str]) -> bool:
    """Whether a fork with this environment behaves like a new Python process."""
    return _read_at_start(env) == _read_at_start(_environment())


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


@functools.cache
def _environment() -> dict[str, str]:
    import processes

    return processes.environment(1)


@functools.cache
def _server(_number: int) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import forks; forks.serve({theirs.fileno()})"],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()  # ends the server
        process.wait(60)

    atexit.register(end)
    return ours


# In the server --------------------------------------------------------------------------------------------


def serve(link_file: int) -> None:
    """Fork for each request, until the other end is closed. In a fork this returns when the program has ended."""
    started_with = dict(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    link = socket.socket(fileno=link_file)
    while True:
        request, files, _, _ = socket.recv_fds(link, _LARGEST_REQUEST, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not request:
            return
        if os.fork() == 0:
            link.close()
            if _report(*files):
                _run(**json.loads(request), started_with=started_with)
            return
        for file in files:
            os.close(file)


def _report(stdin: int, stdout: int, stderr: int, reports: int) -> bool:
    """Fork again. Returns True in the process that runs the program; the other one reports its end and exits."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.write(reports, os.getpid().to_bytes(_WORD))
        os.close(reports)
        for target, file in enumerate((stdin, stdout, stderr)):
            os.dup2(file, target)
            os.close(file)
        return True
    for file in (stdin, stdout, stderr):
        os.close(file)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):  # the tests were killed
        os.write(reports, status.to_bytes(_WORD))
    os._exit(0)


def _run(command: Sequence[str], env: dict[str, str], cwd: str, started_with: dict[str, str]) -> None:
    os.chdir(cwd)
    for name in started_with.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    time.tzset()
    sys.modules["numpy"].random.seed()  # Python reseeds its own generator after a fork, but not NumPy's
    importlib.invalidate_caches()
    path, *args = command
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if path == "-c":
        source, name = args.pop(0), "<string>"
        sys.path[0] = ""
    else:
        source, name = Path(path).read_text(), path
        sys.path[0] = os.path.dirname(path)
        main.__file__ = path
    sys.argv = [path, *args]
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)
