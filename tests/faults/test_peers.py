"""Processes of one job: the errors in the others if one of them dies, stops or cannot write."""

from __future__ import annotations

import collections
import itertools
import json
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from phases import PHASES
from processes import PROGRAMS, Finished, RunProcesses
from reliability import Fault

import jaxckpt

pytestmark = pytest.mark.child

STRACE, UNSHARE = shutil.which("strace"), shutil.which("unshare")
PEERS = 4
TIMEOUT = 2.0


def reports_of(done: Finished) -> list[dict[str, Any]]:
    """The reports of one process, in the order of the rounds."""
    return [json.loads(text) for text in re.findall(r"^report (.*)$", done.stdout, re.M)]


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_begins_with_a_function_that_exists(phase: str) -> None:
    """Only the campaign reaches all phases."""
    assert callable(pkgutil.resolve_name(f"jaxckpt.{PHASES[phase][1]}"))


def by_round(done: list[Finished], rounds: int) -> list[list[dict[str, Any]]]:
    """For each round, the reports of all processes. Every process must have finished all rounds."""
    assert all(len(reports_of(one)) == rounds for one in done), "\n".join(map(str, done))
    return [list(every) for every in zip(*map(reports_of, done), strict=True)]


def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "notes").mkdir(exist_ok=True)
    return {"path": str(tmp_path / "ckpt"), "folder": str(tmp_path / "notes")}


def versions(path: Path) -> list[int]:
    return sorted({int(value) for leaf in jaxckpt.load_numpy(path).values() for value in np.unique(leaf)})


def names(said: str, processes: list[int]) -> bool:
    """Whether an error names these processes."""
    wanted = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
    return bool(re.match(rf"Peer(Timeout|Failed)Error: .*\b{wanted}\b(?!, \d)", said))


@pytest.mark.fault(
    15, "one of 4 processes is killed at each phase", "the others raise in time, naming it", quick=2, full=None
)
def test_one_is_killed(fault: Fault, run_processes: RunProcesses, tmp_path: Path) -> None:
    for number, (victim, phase) in enumerate(fault.rounds(list(itertools.product((0, 2), PHASES)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = {**places(folder), "victim": victim, "phase": phase, "timeout": TIMEOUT, "stop": False}
        done = run_processes(
            PROGRAMS / "peers_killed.py", processes=PEERS, devices_per_process=1, args=args, timeout=90, check=False
        )
        assert done[victim].returncode == -9, str(done[victim])
        others = [one for process, one in enumerate(done) if process != victim]
        there = versions(folder / "ckpt")
        if there not in ([1], [2]):
            fault.silent(f"{phase}, process {victim}: {there}")
        if victim == 0:
            said = [entry["said"] for one in others for entry in reports_of(one)]
            assert all(one.returncode == -6 for one in others if not reports_of(one)), "\n".join(map(str, others))
            if all(names(text, [0]) for text in said):
                fault.saw("process 0: they raise, or JAX aborts them first" if said else "process 0: JAX aborts them")
            elif phase == "publishing" and there == [2]:
                fault.saw("it is published")
            else:
                fault.silent(f"{phase}, process 0: {said}")
            continue
        said = [reports_of(one)[0] for one in others]
        if phase == "publishing" and there == [2] and not any(entry["said"] for entry in said):
            fault.saw("it had done its part: published")
            continue
        wrong = [entry["said"] for entry in said if not names(entry["said"], [victim])]
        if wrong or there != [1]:
            fault.silent(f"{phase}: {wrong}, {there}")
        else:
            # The wait for a peer must not take much longer than the timeout. The margin allows for a busy machine.
            assert max(entry["seconds"] for entry in said) < TIMEOUT + 20
            fault.saw("the others raise, naming it")


@pytest.mark.parametrize("stop", [False, True], ids=["killed", "stopped"])
def test_one_dies_while_jax_moves_data(stop: bool, run_processes: RunProcesses, tmp_path: Path) -> None:
    """Killed, the program fails in some of the others; stopped, it ends in none."""
    args = {**places(tmp_path), "victim": 2, "phase": "exchanging", "timeout": TIMEOUT, "stop": stop}
    done = run_processes(
        PROGRAMS / "peers_killed.py", processes=PEERS, devices_per_process=1, args=args, timeout=60, check=False
    )
    for process in (0, 1, 3):
        (report,) = reports_of(done[process])
        assert re.match(r"PeerTimeoutError: process 2 of 4 did not respond for [12] s while saving", report["said"])
        assert report["seconds"] < TIMEOUT + 20
    assert versions(tmp_path / "ckpt") == [1]


def test_an_exchange_that_fails_because_others_have_left_is_explained(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    """On a busy machine, those that know which process has stopped may leave before another one notices."""
    args = {**places(tmp_path), "victim": 2, "phase": "exchanging", "timeout": TIMEOUT, "stop": True, "late": 3}
    done = run_processes(
        PROGRAMS / "peers_killed.py", processes=PEERS, devices_per_process=1, args=args, timeout=90, check=False
    )
    for process in (0, 1, 3):
        (report,) = reports_of(done[process])
        assert re.match(r"PeerTimeoutError: process 2 of 4 did not respond for [12] s while saving", report["said"])


def test_process_0_stops_between_two_exchanges(run_processes: RunProcesses, tmp_path: Path) -> None:
    """The heartbeat that another process sends before the second exchange is never answered."""
    args = {**places(tmp_path), "timeout": TIMEOUT}
    program = PROGRAMS / "stopped_between_exchanges.py"
    done = run_processes(program, processes=PEERS, devices_per_process=1, args=args, timeout=60, check=False)
    for process in done[1:]:
        (report,) = reports_of(process)
        assert re.match(r"PeerTimeoutError: process 0 of 4 did not respond for [12] s while saving", report["said"])
        assert report["seconds"] < TIMEOUT + 20


@pytest.mark.fault(
    16, "some of 4 processes are stopped at each phase", "one timely error names all of them", quick=4, full=None
)
def test_some_are_stopped(fault: Fault, run_processes: RunProcesses, tmp_path: Path) -> None:
    victims = ([2], [0], [1, 3], [1, 2, 3])
    # In an exchange between processes, JAX ends the job: test_one_dies_while_jax_moves_data.
    phases = [phase for phase, (kind, _) in PHASES.items() if kind not in EXCHANGES]
    cases = [(phase, who) for who in victims for phase in phases if who != [0] or phase != "publishing"]
    rounds = list(fault.rounds(cases))
    args = {**places(tmp_path), "rounds": rounds, "timeout": TIMEOUT}
    done = run_processes(
        PROGRAMS / "peers_stopped.py", processes=PEERS, devices_per_process=1, args=args, timeout=60 + 20 * len(rounds)
    )
    for number, ((phase, who), every) in enumerate(zip(rounds, by_round(done, len(rounds)), strict=True), 1):
        said = [entry["said"] for process, entry in enumerate(every) if process not in who]
        there = every[0]["there"]
        if phase in ("plan agreement", "before the barrier", "opening"):  # elsewhere, the others have removed its files
            for process in filter(None, who):
                assert f"This is process {process}: it was suspended" in every[process]["said"], every
        assert all(entry["after"] == "" for entry in every), every
        if there not in ([number - 1], [number]):
            fault.silent(f"{phase}, {who}: {there}")
        elif phase == "publishing" and said == [""] * len(said) and there == [number]:
            fault.saw("their part was done: published")
        elif phase == "publishing" and there == [number - 1] and all("did not respond" in text for text in said):
            fault.saw("named only those that had not yet reported")
        elif not all(names(text, who) for text in said):
            fault.silent(f"{phase}, {who}: {said}")
        elif there == [number]:
            assert who == [0], every
            fault.saw("all are named; process 0 published when it woke")
        else:
            fault.saw("all are named, the next save works")


@pytest.mark.fault(
    16, "one of 4 processes is stopped; the default timeout", "named before JAX aborts the job at 100 s", full=2
)
def test_one_is_stopped_with_the_default_timeout(fault: Fault, run_processes: RunProcesses, tmp_path: Path) -> None:
    if not fault.campaign:
        pytest.skip("takes a minute a round: only in the campaign")
    for victim in fault.rounds([2, 0]):
        folder = tmp_path / str(victim)
        folder.mkdir()
        timeout = jaxckpt.Options().timeout_seconds
        args = {**places(folder), "victim": victim, "phase": "writing", "timeout": timeout, "stop": True}
        done = run_processes(
            PROGRAMS / "peers_killed.py", processes=PEERS, devices_per_process=1, args=args, timeout=150, check=False
        )
        others = [reports_of(one) for process, one in enumerate(done) if process != victim]
        if all(said and names(said[0]["said"], [victim]) for said in others) and versions(folder / "ckpt") == [1]:
            fault.saw("the others raise, naming it")
        else:
            fault.silent(f"process {victim}: {others}")


@pytest.mark.skipif(STRACE is None, reason="strace is not installed (apt-get install strace)")
@pytest.mark.fault(17, "ENOSPC in one of 4 processes", "all raise, with its cause, naming it", quick=2, full=None)
def test_one_has_no_space(fault: Fault, run_processes: RunProcesses, tmp_path: Path) -> None:
    calls = [("writev", 1), ("mkdir", 1), ("rename", 1), ("fsync", 1), ("fsync", 3)]
    cases = [(call, nth, victim) for victim in (2, 0) for call, nth in calls]
    rounds = list(fault.rounds(cases))
    args = {**places(tmp_path), "rounds": rounds}
    done = run_processes(
        PROGRAMS / "peers_refused.py", processes=PEERS, devices_per_process=1, args=args, timeout=60 + 20 * len(rounds)
    )
    for number, ((call, _, victim), every) in enumerate(zip(rounds, by_round(done, len(rounds)), strict=True), 1):
        count_refusal(fault, f"{call} of process {victim}", number, every, [victim])


@pytest.mark.fault(17, "a file system that fills up under 4 processes", "all raise, with the cause", quick=2, full=12)
def test_the_file_system_fills_up(fault: Fault, tmp_path: Path) -> None:
    rounds = list(fault.rounds([1024 * room for room in range(0, 48, 4)]))
    small = tmp_path / "small"
    small.mkdir()
    args = {**places(tmp_path), "path": str(small / "ckpt"), "rounds": rounds}
    mount = f"mount -t tmpfs -o size=4m none {small}"
    if (
        UNSHARE is None
        or subprocess.run([UNSHARE, "-m", "sh", "-c", mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("no tmpfs can be mounted here (needs root)")
    limit = 60 + 20 * len(rounds)
    ran = subprocess.run(
        [UNSHARE, "-m", "sh", "-c", f'{mount} && exec "$0" "$1"', sys.executable, PROGRAMS / "run_job.py"],
        input=json.dumps(["peers_full", PEERS, args, limit]),
        env=processes.environment(1),
        capture_output=True,
        text=True,
        timeout=limit + 30,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    done = [Finished(*one) for one in json.loads(ran.stdout)]
    for number, (room, every) in enumerate(zip(rounds, by_round(done, len(rounds)), strict=True), 1):
        count_refusal(fault, f"{room} bytes of room", number, every, None)


def count_refusal(fault: Fault, what: str, number: int, every: list[dict[str, Any]], victims: list[int] | None) -> None:
    """Count a round in which a save was refused: all raise, the old checkpoint stays, and the next save works."""
    said, there = [entry["said"] for entry in every], every[0]["there"]
    assert all(entry["after"] == "" and entry["folders"] == 1 for entry in every), every
    if said == [""] * PEERS and there == [number]:
        fault.saw("the call was not made: saved" if victims else "enough room: saved")
        return
    raised = [text.partition(":")[0] for text in said]
    own = [process for process, kind in enumerate(raised) if kind == "StorageError"]
    right = all("No space left" in text or "RESOURCE_EXHAUSTED" in text or "Errno 28" in text for text in said) and all(
        kind in ("StorageError", "PeerFailedError") for kind in raised
    )
    named = all("process" in text for process, text in enumerate(said) if process not in own)
    if victims is not None:
        named = own == victims and all(
            f"process {victims[0]} failed" in text for process, text in enumerate(said) if process not in own
        )
    if right and named and own and there == [number - 1]:
        fault.saw("all raise with the cause; the next save works")
    else:
        fault.silent(f"{what}: {said}, {there}")


@pytest.mark.fault(
    16,
    "a live process of 4 is slow, raises, or makes no call",
    "the others wait if it works; otherwise the error names it",
    quick=3,
    full=None,
)
def test_one_makes_no_call_or_is_slow(fault: Fault, run_processes: RunProcesses, tmp_path: Path) -> None:
    what = ("slow to restore", "raises", "makes no call", "slow to save")
    rounds = list(
        fault.rounds([(one, victim) for victim in (2, 0) for one in what if one != "makes no call" or victim])
    )
    args = {**places(tmp_path), "rounds": rounds, "timeout": 1.5}
    done = run_processes(
        PROGRAMS / "peers_out_of_step.py",
        processes=PEERS,
        devices_per_process=1,
        args=args,
        timeout=60 + 20 * len(rounds),
    )
    for number, ((one, victim), every) in enumerate(zip(rounds, by_round(done, len(rounds)), strict=True), 1):
        others = [entry["said"] for process, entry in enumerate(every) if process != victim]
        there, slow = every[0]["there"], one.startswith("slow")
        assert all(entry["after"] == "" for entry in every), every
        if slow and others == [""] * len(others) and there == [number - (one == "slow to restore")]:
            fault.saw("waited for")
        elif not slow and all(names(text, [victim]) for text in others) and there == [number - 1]:
            fault.saw("the others raise, naming it")
        else:
            fault.silent(f"{one}, process {victim}: {others}, {there}")


STRUCK_TIMEOUT = 30.0
EXCHANGES = {"save with an exchange", "shared restore"}


@pytest.mark.parametrize(
    "n_processes",
    [
        pytest.param(8, marks=pytest.mark.fault(15, "one of 8 processes is killed at a random moment", "", full=10)),
        pytest.param(64, marks=pytest.mark.fault(15, "1 to 8 of 64 are killed at random moments", "", full=3)),
    ],
)
def test_some_are_killed_at_random_moments(
    fault: Fault, n_processes: int, run_processes: RunProcesses, tmp_path: Path
) -> None:
    """The survivors raise in time and name the dead; the checkpoints are complete; a smaller job resumes from them."""
    if not fault.campaign:
        pytest.skip("takes minutes a round: only in the campaign")

    def run(n_processes: int, args: dict[str, Any]) -> list[Finished]:
        program = PROGRAMS / "peers_struck.py"
        return run_processes(program, processes=n_processes, devices_per_process=1, args=args, timeout=600, check=False)

    for number in fault.rounds():
        folder = tmp_path / str(number)
        folder.mkdir()
        victims = fault.random.sample(range(1, n_processes), fault.random.randint(1, n_processes // 8))
        if number % 6 == 5:
            victims[0] = 0
        # All at one moment, as the processes of one host, or each at its own.
        moments = [fault.random.uniform(0, n_processes / 4) for _ in victims]
        moments = moments if number % 2 else moments[:1] * len(victims)
        args = {**places(folder), "run": str(folder / "run"), "rows": 7 * n_processes, "seed": fault.random.random()}
        args |= {"timeout": STRUCK_TIMEOUT, "grace": 5, "first": 0, "deaths": dict(zip(victims, moments, strict=True))}
        done = run(n_processes, args)
        lines = [[json.loads(line) for line in one.stdout.splitlines()] for one in done]
        dead = [process for process, one in enumerate(done) if one.returncode == -9]
        assert dead, "\n".join(map(str, done))
        last = max(float((folder / "notes" / str(process)).read_text()) for process in dead)
        outcomes = list[str]()
        for process in sorted(set(range(n_processes)) - set(dead)):
            end = lines[process][-1]
            # SIGSEGV: Python could not print the stacks of the threads that were still running.
            crashed = (
                done[process].returncode == -signal.SIGSEGV and "Fatal Python error: Aborted" in done[process].stderr
            )
            if end["what"] == "begins" and (crashed or done[process].returncode == -signal.SIGABRT):
                assert 0 in dead or end["kind"] in EXCHANGES, str(done[process])
                outcomes.append("JAX aborts it")
                continue
            assert end["what"] == "raises", str(done[process])
            call = lines[process][-2]
            assert end["ours"], str(done[process])
            assert end["at"] - last < STRUCK_TIMEOUT + 45 * (call["kind"] in EXCHANGES) + 20, end
            named = set(map(int, re.findall(r"\d+", end["error"].partition(" of ")[0])))
            unnamed = end["error"].startswith("PeerFailedError: JAX's coordination service failed") and 0 in dead
            if not unnamed and (not named or not named <= set(dead)):
                fault.silent(f"round {number}: {end['error']}, but {dead} are dead")
            outcomes.append("it raises, naming " + ("some of them" if not unnamed and named < set(dead) else "them"))
            times = f" {call['kind']}: {end['at'] - last:.1f} s"
        print(f"round {number}: {len(dead)} dead {dead}, {collections.Counter(outcomes)}{times}", flush=True)
        kept = {"path": jaxckpt.verify(folder / "ckpt"), "run": jaxckpt.verify(f"{folder}/run@latest")}
        assert all(report.ok for report in kept.values()), kept
        smaller = run(7 * n_processes // 8, {**args, "deaths": {}, "first": 10_000})
        assert all(one.returncode == 0 for one in smaller), "\n".join(map(str, smaller))
        resumed = json.loads(smaller[0].stdout.splitlines()[0])
        for place, is_there in (("path", {"save", "save_async", "save with an exchange"}), ("run", {"step"})):
            made = [(line["what"], line["version"]) for of in lines for line in of if line.get("kind") in is_there]
            acknowledged = max([version for what, version in made if what == "ends"], default=0)
            if resumed[place] not in (acknowledged, max([version for _, version in made], default=0)):
                fault.silent(f"round {number}: {place} has {resumed[place]}, {acknowledged} was acknowledged")
        for outcome in set(outcomes):
            fault.saw(outcome)
        shutil.rmtree(folder)
