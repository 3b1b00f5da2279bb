"""Training continues while the storage fails in bursts: `Checkpointer(on_failure=…)`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import bursts
import pytest
import servers
from processes import PROGRAMS, RunProcesses, finish
from reliability import Fault
from servers import Bucket
from test_full_disk import in_a_mount

import jaxckpt

pytestmark = pytest.mark.child

POLICIES = ("retry", "continue")


def count(fault: Fault, said: str, expected: str, which: str) -> None:
    """Count a round, unless the machine was too busy for it."""
    if said == expected:
        fault.saw(said)
    elif said != bursts.TOO_LONG:
        fault.silent(f"{which}: {said}")


def with_failing_calls(folder: Path) -> dict[str, str]:
    """The environment of a program whose system calls can be made to fail."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library, switch = folder / "failing_calls.so", folder / "failing_calls"
    source = PROGRAMS / "failing_calls.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    switch.write_bytes(b"\0")
    return {"LD_PRELOAD": str(library), "FAILING_CALLS": str(switch)}


def require_accounted(fault: Fault, train: Callable[[str], str]) -> None:
    """Train in chunks of rounds, given as JSON. Each round prints a line: short bursts stop nothing, long ones do."""
    rounds = [(POLICIES[number % 2], fault.seed + number, number % 4 == 3) for number in fault.rounds()]
    for start in range(0, len(rounds), 20):
        given = rounds[start : start + 20]
        for (policy, seed, is_long), said in zip(given, train(json.dumps(given)).splitlines(), strict=True):
            expected = "stopped" if is_long else "all accounted for"
            count(fault, said, expected, f"{policy}, {seed}")


def in_a_process(tmp_path: Path, kind: str, rounds: str, env: Mapping[str, str]) -> str:
    done = finish(PROGRAMS / "failing_storage.py", tmp_path, kind, rounds, timeout=280, env=env)
    assert done.returncode == 0, str(done)
    return done.stdout


@pytest.mark.fault(
    27,
    "a file system that is full, refuses writes or breaks (EIO), in bursts shorter than three saves, and longer ones",
    "training continues; each step is published or reported; a longer burst stops it at max_failures",
    quick=4,
    full=260,
)
@pytest.mark.parametrize("kind", ["full", "refused", "broken"])
def test_training_goes_on(fault: Fault, tmp_path: Path, kind: str) -> None:
    def train(rounds: str) -> str:
        if kind == "full":
            return in_a_mount(tmp_path, "size=8m", "failing_storage", kind, rounds)
        return in_a_process(tmp_path, kind, rounds, with_failing_calls(tmp_path) if kind == "broken" else {})

    require_accounted(fault, train)


@pytest.mark.fault(
    27,
    "the storage, or the local folders, of a job with local steps, likewise",
    "training continues; each step is published, saved locally or reported; a longer burst stops it at max_failures",
    quick=2,
    full=160,
)
def test_training_goes_on_with_local_steps(fault: Fault, tmp_path: Path) -> None:
    env = with_failing_calls(tmp_path)
    require_accounted(fault, lambda rounds: in_a_process(tmp_path, "local", rounds, env))


@pytest.mark.fault(
    27,
    "an object store that answers with 503, likewise",
    "training continues; each step is published or reported; a longer burst stops it at max_failures",
    quick=1,
    full=30,
)
def test_training_goes_on_with_a_bucket(fault: Fault, s3: Bucket) -> None:
    is_busy = False

    def refuse(refused: bool) -> None:
        nonlocal is_busy
        is_busy = refused

    def answer(exchange: servers.Exchange) -> None:
        servers.status(503)(exchange) if is_busy else exchange.send(exchange.forward())

    s3.proxy.on(".*", answer)
    options = jaxckpt.Options(storage={"retry_seconds": 0.05})
    for number in map(int, fault.rounds()):
        policy, is_long = POLICIES[number % 2], number % 4 == 3
        said = bursts.train(f"{s3.url}/{number}", policy, fault.seed + number, refuse, options, is_long=is_long)
        expected = "stopped" if is_long else "all accounted for"
        count(fault, said, expected, f"{policy}, {fault.seed + number}")


@pytest.mark.fault(
    27,
    "likewise, of one of 3 processes",
    "training continues in all; each step is published or reported",
    quick=2,
    full=20,
)
@pytest.mark.parametrize("local", [False, True], ids=["stored", "local"])
def test_training_goes_on_in_all_processes(
    fault: Fault, tmp_path: Path, run_processes: RunProcesses, local: bool
) -> None:
    rounds = [(POLICIES[number % 2], fault.seed + number) for number in fault.rounds()]
    args = {"folder": str(tmp_path), "rounds": rounds, "local": local}
    program = PROGRAMS / "failing_job.py"
    for done in run_processes(program, processes=3, devices_per_process=1, args=args, timeout=280):
        outcomes, n_incidents = json.loads(done.stdout.splitlines()[-1])
        assert n_incidents > len(rounds), "the bursts were too short to meet a save"
        for outcome in outcomes:
            fault.saw(outcome) if outcome == "all accounted for" else fault.silent(outcome)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("local", [False, True], ids=["stored", "local"])
def test_process_0_alone_cannot_look_into_the_run(
    tmp_path: Path, run_processes: RunProcesses, local: bool, when_busy: str, policy: str
) -> None:
    args = {"folder": str(tmp_path / "run"), "local": local, "when_busy": when_busy, "policy": policy}
    program = PROGRAMS / "unlisted_run.py"
    outcomes = [
        json.loads(done.stdout) for done in run_processes(program, processes=2, devices_per_process=1, args=args)
    ]
    assert outcomes[0] == outcomes[1]
    # A local step needs no look into the run, and its flush may look again.
    is_saved = local and policy == "retry"
    assert (
        outcomes[0] == ([1, 2, 3, 4] if is_saved else [1, 3, 4])
        if when_busy == "wait"
        else (2 in outcomes[0]) == is_saved
    )
    assert [incident.step for incident in jaxckpt.Run(tmp_path / "run").incidents()] == ([] if is_saved else [2])
