"""Runs sections one after another in a worker process, which is replaced if it aborts, hangs or is out of time.

This module imports only the standard library: what crashes with JAX does not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from sections import Section, limit_seconds

Figures = dict[str, dict[str, Any]]
"""The figures of each section. "error" says what failed in it, and "not run" why it was left out."""

START_SECONDS = 90.0
"""The longest that a worker may take to import JAX and to find its devices. The first import for CUDA reads much."""

GRACE_SECONDS = 3.0
"""A worker that is out of time ends the section itself, so that its error says where it was. After this time, it is
killed."""

KILL_SECONDS = 10.0
"""A killed worker that does not end in this time hangs in the driver. It is left behind."""


class WorkerError(Exception):
    """A worker died, or did not start."""


class NoAcceleratorError(Exception):
    """JAX has only CPU devices."""


class Worker:
    """A worker process with its children, in its own session."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._messages, theirs = Pipe()
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent), *arguments, "--worker", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `receive` says how it died
            self._messages.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if there is none in this time. Raises WorkerError."""
        try:
            return json.loads(self._messages.recv_bytes()) if self._messages.poll(max(0.0, seconds)) else None
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)
            code = self._process.returncode
            how = "of an unknown cause" if code is None else f"by {_signal_name(-code)}" if code < 0 else f"with {code}"
            raise WorkerError(f"the worker ended {how}; its last lines: {self._last_lines()}") from error

    def _last_lines(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-4:])[-600:]

    def kill(self) -> None:
        """SIGKILL, because a worker may ignore SIGTERM, for its children too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        self._messages.close()


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


class Supervisor:
    """One run of the sections. figures.json is written after each of them."""

    def __init__(self, out: Path, seconds: float, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.figures: Figures = {}
        self.out = out
        self._begun, self._seconds = time.monotonic(), seconds
        self._arguments, self._environment = arguments, environment
        self._worker: Worker | None = None
        self._failed_starts = 0

    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def _left(self) -> float:
        return self._seconds - self.seconds()

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "log.txt").open("a") as log:
            log.write(text + "\n")

    def note(self, name: str, figures: dict[str, Any]) -> None:
        """Add figures to a section, and write figures.json."""
        self.figures.setdefault(name, {}).update(figures)
        new = self.out / "figures.new"
        new.write_text(json.dumps(self.figures, indent=1))
        new.replace(self.out / "figures.json")

    def run(self, sections: Sequence[Section]) -> None:
        """Run all sections for which there is time. Raises NoAcceleratorError."""
        try:
            for number, section in enumerate(sections):
                begun = self.seconds()
                try:
                    figures = self._run(section, list(sections[number + 1 :]))
                except WorkerError as error:
                    self._stop_worker()
                    figures = {"error": str(error)}
                self.note(section.name, {**figures, "section_seconds": round(self.seconds() - begun, 1)})
                problem = "".join(f": {key}: {figures[key]}" for key in ("error", "not run") if key in figures)
                self.say(f"== {section.name}, {self.seconds() - begun:.1f} s{problem}")
        finally:
            self._stop_worker()

    def _run(self, section: Section, later: list[Section]) -> dict[str, Any]:
        """How a section ended. Its figures are noted as they come."""
        if self._left() < max(2.0, section.seconds / 2):
            return {"not run": f"{self._left():.0f} s were left, and it takes {section.seconds:.0f} s"}
        if self._failed_starts > 1:
            return {"not run": "no worker starts"}
        worker = self._ready_worker(section)
        limit = limit_seconds(section, later, self._left())
        with _scratch("/dev/shm") as memory, _scratch(tempfile.gettempdir()) as disk:
            try:
                worker.send(
                    {"function": section.function, "argument": section.argument, "limit_seconds": limit}
                    | {"memory": str(memory), "disk": str(disk)}
                )
                return self._await_end(worker, section, time.monotonic() + limit + GRACE_SECONDS, limit)
            except BaseException:
                self._stop_worker()  # before its folders are deleted
                raise

    def _await_end(self, worker: Worker, section: Section, ends: float, limit: float) -> dict[str, Any]:
        while (message := worker.receive(ends - time.monotonic())) is not None:
            if "figure" in message:
                name, value = message["figure"]
                self.note(section.name, {name: value})
                self.say(f"   {section.name}: {name}: {json.dumps(value)[:600]}")
                continue
            if message["is_out_of_time"]:  # a call that was interrupted may still be running in a thread
                self._stop_worker()
            return message["ended"]
        raise WorkerError(f"took longer than {limit:.0f} s and did not stop; killed")

    def _ready_worker(self, section: Section) -> Worker:
        if section.in_new_worker:
            self._stop_worker()
        if self._worker is not None:
            return self._worker
        self._failed_starts += 1
        self._worker = Worker(self._arguments, self._environment, self.out / "worker.txt")
        limit = min(START_SECONDS, self._left())
        ready = self._worker.receive(limit)
        if ready is None:
            raise WorkerError(f"a worker did not start in {limit:.0f} s; killed")
        if not ready["has_accelerator"]:
            raise NoAcceleratorError
        self._failed_starts = 0
        return self._worker

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


@contextlib.contextmanager
def _scratch(where: str) -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="jaxckpt-gpu-", dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
