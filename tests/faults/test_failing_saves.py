"""Training continues while the storage fails in bursts: `Checkpointer(on_failure=…)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import PROGRAMS, RunProcesses, finish
from reliability import Fault
from test_full_disk import in_a_mount

pytestmark = pytest.mark.child

POLICIES = ("retry", "continue")


@pytest.mark.fault(
    27,
    "a file system that is full or refuses writes, in bursts shorter than three saves, and longer ones",
    "training continues; each step is published or reported; a longer burst stops it at max_failures",
    quick=4,
    full=1000,
)
@pytest.mark.parametrize("kind", ["full", "refused"])
def test_training_goes_on(fault: Fault, tmp_path: Path, kind: str) -> None:
    rounds = [(POLICIES[number % 2], fault.seed + number, number % 4 == 3) for number in fault.rounds()]
    for start in range(0, len(rounds), 100):
        given = rounds[start : start + 100]
        if kind == "full":
            printed = in_a_mount(tmp_path, "size=8m", "failing_storage", kind, json.dumps(given))
        else:
            done = finish(PROGRAMS / "failing_storage.py", tmp_path, kind, json.dumps(given), timeout=280)
            assert done.returncode == 0, str(done)
            printed = done.stdout
        for (policy, seed, is_long), said in zip(given, printed.splitlines(), strict=True):
            expected = "stopped" if is_long else "all accounted for"
            if said == expected:
                fault.saw(said)
            else:
                fault.silent(f"{policy}, {seed}: {said}")


@pytest.mark.fault(
    27,
    "likewise, of one of 3 processes",
    "training continues in all; each step is published or reported",
    quick=4,
    full=40,
)
def test_training_goes_on_in_all_processes(fault: Fault, tmp_path: Path, run_processes: RunProcesses) -> None:
    rounds = [(POLICIES[number % 2], fault.seed + number) for number in fault.rounds()]
    args = {"folder": str(tmp_path), "rounds": rounds}
    program = PROGRAMS / "failing_job.py"
    for done in run_processes(program, processes=3, devices_per_process=1, args=args, timeout=280):
        outcomes, n_incidents = json.loads(done.stdout.splitlines()[-1])
        assert n_incidents > len(rounds), "the bursts were too short to meet a save"
        for outcome in outcomes:
            fault.saw(outcome) if outcome == "all accounted for" else fault.silent(outcome)
