"""Deletion: interrupted by a kill, concurrent with reads, and with a wrong clock."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import victims
from reliability import Fault
from victims import OPTIONS, Saver, needs_strace, version, version_at, versions_in

import jaxckpt

pytestmark = pytest.mark.child

DELETES = ("unlink", "unlinkat", "rmdir", "fsync", "rename")


def with_steps(folder: Path, steps: tuple[int, ...]) -> None:
    with jaxckpt.Checkpointer(folder, options=OPTIONS) as checkpoints:
        for step in steps:
            checkpoints.save(step, version(step))


@needs_strace
@pytest.mark.fault(
    19,
    "kill -9 at every call of a deletion: of a step, by the rules, of what is overwritten",
    "the step is gone or complete",
    quick=9,
)
def test_killed_while_it_deletes(fault: Fault, tmp_path: Path) -> None:
    with_steps(tmp_path / "steps", (1, 2))
    jaxckpt.save(tmp_path / "one", version(1), options=OPTIONS)
    programs: list[tuple[str, tuple[Any, ...]]] = [
        ("steps", (victims.delete_step, 1)),
        ("steps", (victims.keep_steps, 3)),
        ("steps", (victims.move_steps, 3)),
        ("one", (victims.replace, 2)),
    ]
    path, log = tmp_path / "struck", tmp_path / "log"

    def struck(base: str, program: Any, number: int, calls: str, strike: str | None) -> tuple[list[Any], bool]:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / base, path)
        return victims.run_traced(program, str(path), number, log=log, calls=calls, fault=strike)

    cases: list[tuple[str, Any, int, str, int]] = []
    for base, (program, number) in programs:
        assert struck(base, program, number, ",".join(DELETES), None) == ([number], False)
        cases += [(base, program, number, call, nth) for call, nth in victims.sweep(DELETES, log)]
    for base, program, number, call, nth in fault.rounds(cases):
        said, killed = struck(base, program, number, call, f"signal=KILL:when={nth}")
        if base == "one":
            found = version_at(path)
            assert found in ((1, 2) if not said else (2,))
            gone = found == 2
            jaxckpt.save(path, version(3), overwrite=True)
            assert len(victims.data_folders(path)) == 1
        else:
            steps = versions_in(path)
            assert set(steps) in ({1, 2}, {2}, {1, 2, 3}, {2, 3}, {3})
            gone = 1 not in steps
            assert gone or not said
        fault.saw("deleted before the call occurred" if not killed else "gone" if gone else "complete")


@pytest.mark.fault(
    20, "restore while another process overwrites or deletes", "exact, or NotACheckpointError", quick=20, full=600
)
def test_restored_while_it_is_deleted(fault: Fault, tmp_path: Path) -> None:
    rounds = sum(1 for _ in fault.rounds())
    options = jaxckpt.Options(chunk_bytes=4096, object_bytes=16384, sync=False)  # faster saves and deletions
    with jaxckpt.Checkpointer(tmp_path / "steps", keep_last=1, background=False, options=options) as checkpoints:
        for steps, path in ((False, tmp_path / "one"), (True, tmp_path / "steps")):
            numbers = itertools.count(1)

            def save(numbers: itertools.count[int] = numbers, steps: bool = steps, path: Path = path) -> None:
                number = next(numbers)
                if steps:
                    checkpoints.save(number, version(number))
                else:
                    jaxckpt.save(path, version(number), overwrite=True, options=options)

            save()
            with Saver(victims.read, str(path), rounds // 2, steps) as reader:
                reader.go()
                while not reader.ended:
                    save()
                (ends,) = reader.end()
            assert set(ends) <= {"bit-exact", "NotACheckpointError"}, ends
            for end, count in ends.items():
                for _ in range(count):
                    fault.saw(end)


@needs_strace
def test_a_folder_deleted_just_before_a_save_uses_it(tmp_path: Path) -> None:
    """Another Checkpointer treats the empty folder of a new step as the remains of a killed run, and deletes it."""
    with_steps(tmp_path / "steps", (1,))
    with Saver(victims.keep_steps, str(tmp_path / "steps"), 2) as saver:
        with victims.traced(
            saver, tmp_path / "log", "mkdir", "delay_exit=200000:when=1"
        ):  # microseconds after the folder was created
            saver.go()
            while not saver.ended:
                jaxckpt.Checkpointer(tmp_path / "steps").close()
                time.sleep(0.07)
        assert saver.end() == [2]


@pytest.mark.fault(
    21, "the clock and all file times are off by a day", "order and retention unchanged", quick=2, full=40
)
def test_a_wrong_clock(fault: Fault, tmp_path: Path) -> None:
    def run(folder: Path, days: list[int]) -> list[Any]:
        with Saver(victims.keep_steps_by_another_clock, str(folder), days) as saver:
            saver.go()
            return saver.end()

    wanted = run(tmp_path / "right", [0] * 8)
    assert wanted[-1] == [7, [0, 3, 4, 6, 7]]
    for number in fault.rounds():
        days = [fault.random.choice((-1, 0, 1)) for _ in range(8)]
        assert run(tmp_path / str(number), days) == wanted, f"clocks off by {days} days"
        fault.saw("same as with the correct clock")
