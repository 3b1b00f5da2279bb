"""A training run that keeps one step, and an evaluation that follows it; both are killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest

import jaxckpt

pytestmark = pytest.mark.child
PROGRAMS = Path(__file__).parents[1] / "programs"
TERM_SECONDS = 4.0
START_SECONDS = 120  # a process imports JAX while other tests keep the machine busy


@dataclass
class Child:
    """A program that can be killed and restarted; all its output goes to one file."""

    program: str
    output: Path
    process: processes.Child | None = None

    def start(self, *arguments: object) -> None:
        before = self.said()
        with self.output.open("ab") as file:
            self.process = processes.start(
                [str(PROGRAMS / self.program), *map(str, arguments)], processes.environment(1), file, file
            )
        self.wait_until(lambda: len(self.said()) > len(before))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert self.process is not None
            assert self.process.poll() in (None, 0), f"{self.program} failed:\n{self.output.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"{self.program} hangs:\n{self.output.read_text()[-4000:]}"
            time.sleep(0.01)

    def kill(self) -> float:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.program} ended:\n{self.output.read_text()[-4000:]}"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return time.monotonic()

    def said(self) -> list[list[str]]:
        """The lines that it printed, without a last line that a kill cut off."""
        if not self.output.exists():
            return []
        lines = self.output.read_text().splitlines(keepends=True)
        return [line.split() for line in lines if line.endswith("\n")]


@contextlib.contextmanager
def ending(*children: Child) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            if child.process is not None:
                child.process.kill()
                child.process.wait()


def leases(run: Path) -> list[str]:
    return [name for name in os.listdir(run / "_run") if name.startswith("lease-")] if (run / "_run").exists() else []


def test_no_step_is_deleted_during_a_read_and_no_lease_outlives_its_term(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rounds = 50 if request.config.getoption("--campaign") else 3
    run, stop = tmp_path / "run", tmp_path / "stop"
    trainer, evaluator = (
        Child("trainer.py", tmp_path / "trainer.txt"),
        Child("evaluator.py", tmp_path / "evaluator.txt"),
    )

    def evaluate() -> None:
        numbers = [int(line[0]) for line in evaluator.said()]
        evaluator.start(run, max(numbers, default=0), TERM_SECONDS, 0.3)

    outlived: list[float] = []
    with ending(trainer, evaluator):
        trainer.start(run, stop)
        evaluate()
        for number in range(rounds):
            time.sleep(random.uniform(0, 1))
            if number % 2:
                trainer.kill()
                trainer.start(run, stop)
            else:
                killed = evaluator.kill()
                while leases(run):
                    assert time.monotonic() - killed <= TERM_SECONDS
                    time.sleep(0.01)
                outlived.append(time.monotonic() - killed)
                evaluate()
        stop.touch()
        evaluator.wait_until(lambda: evaluator.said()[-1] == ["ended"])
        assert trainer.process is not None
        assert trainer.process.wait(START_SECONDS) == 0
    lines = evaluator.said()[:-1]
    assert all(len(line) == 2 for line in lines), lines  # only steps: no errors, no warnings
    delays = sorted(float(delay) for _, delay in lines if delay != "-")
    newest = jaxckpt.Run(run).latest_step()
    assert int(lines[-1][0]) == newest == int(trainer.said()[-1][0])
    if not delays:  # on a busy machine, a few rounds may end before the evaluator sees a step being published
        assert rounds == 3
        return
    print(
        f"{rounds} kills, {newest} steps, {len(lines)} read, 0 lost; leases outlived their holders by"
        f" {statistics.median(outlived):.2f} s, {max(outlived):.2f} s at most, of a term of {TERM_SECONDS:g} s;"
        f" publish to yield: {statistics.median(delays):.1f} ms, {delays[int(0.95 * len(delays))]:.1f} ms (95 %),"
        f" {delays[-1]:.1f} ms at most, of {len(delays)}; loop polls every 20 ms"
    )
