"""examples/training_loop.py is killed, preempted and restarted; a Grain iterator resumes in several processes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import compiled
import processes
import pytest
from processes import PASSED, PROGRAMS, Finished, RunProcesses, RunPython

import jaxckpt

TRAINING = PROGRAMS / "training.py"
STEPS = 60


def losses_of(printed: str) -> dict[int, str]:
    """The loss of each step, as text, so that nothing is rounded. The first line shows where the run began.

    A killed process may leave an incomplete last line. That step does not count.
    """
    lines = [line for line in printed.splitlines(keepends=True)[1:] if line.endswith("\n")]
    return {int(step): loss for step, loss in map(str.split, lines)}


def newest(folder: Path) -> int:
    return max(int(manifest.parent.name) for manifest in folder.glob("*/manifest.json"))


@pytest.fixture(scope="module", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled.FOLDER, str(tmp_path_factory.mktemp("programs")))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[int, str]:
    """The losses of an uninterrupted run."""
    losses = losses_of(processes.run_python(TRAINING, args=[str(whole), "--steps", str(STEPS)]))
    assert list(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS
    return losses


def test_killed_at_any_moment_the_losses_are_the_same(
    run_python: RunPython, tmp_path: Path, expected: dict[int, str]
) -> None:
    # The kill comes after the first step that this process saves, during the next saves or steps.
    seen: dict[int, str] = {}
    for _ in range(2):
        delay = random.uniform(0, 0.2)
        losses = losses_of(
            run_python(PROGRAMS / "training_that_dies.py", args=[str(tmp_path), str(STEPS), str(delay)], check=False)
        )
        assert losses.items() <= expected.items(), delay
        seen |= losses
        assert newest(tmp_path) >= 5
    printed = run_python(TRAINING, args=[str(tmp_path), "--steps", str(STEPS)])
    losses = losses_of(printed)
    assert losses.items() <= expected.items()
    assert seen | losses == expected
    assert int(printed.split()[2]) >= 5  # it resumed from a saved step, not from the start


def test_on_sigterm_it_saves_the_step_it_is_in(run_python: RunPython, tmp_path: Path, expected: dict[int, str]) -> None:
    args = [str(tmp_path), str(STEPS), str(random.randrange(1, STEPS // 2))]
    printed = run_python(PROGRAMS / "training_that_is_stopped.py", args=args)
    status, items = json.loads(printed.splitlines()[-1])
    losses = dict(items)
    assert status == 143
    assert losses.items() <= expected.items()
    assert newest(tmp_path) == max(losses)  # no step is lost

    again = losses_of(run_python(TRAINING, args=[str(tmp_path), "--steps", str(STEPS)]))
    assert min(again) == max(losses) + 1
    assert losses | again == expected


def test_one_of_two_processes_gets_sigterm(run_processes: RunProcesses, tmp_path: Path) -> None:
    def train(runs: list[tuple[Path, int]], status: int) -> list[dict[int, str]]:
        args = [[str(folder), steps, message] for folder, message in runs]
        job = PROGRAMS / "training_in_two.py"
        done = run_processes(job, processes=2, devices_per_process=4, args=args, timeout=200, check=False)
        assert [one.returncode for one in done] == [status, status], "\n".join(map(str, done))
        first, second = ([losses_of(f"from{run}") for run in one.stdout.split("from")[1:]] for one in done)
        assert first == second
        assert len(first) == len(runs)
        return first

    whole, stopped, steps = tmp_path / "whole", tmp_path / "stopped", 30
    expected, losses = train([(whole, 0), (stopped, 7)], status=143)
    assert list(expected) == list(range(1, steps + 1))
    assert newest(stopped) == max(losses) < steps
    (again,) = train([(stopped, 0)], status=0)
    assert min(again) == max(losses) + 1
    assert losses | again == expected


@pytest.mark.child
def test_the_rules_hold_on_disk(whole: Path, expected: dict[int, str]) -> None:
    best = min(range(5, STEPS + 1, 5), key=lambda step: float(expected[step]))
    found = {int(folder.name): jaxckpt.open(folder) for folder in sorted(whole.glob("[0-9]*"))}
    assert set(found) == {STEPS - 5, STEPS, best}
    for step, checkpoint in found.items():
        parts = {path.split("/")[0] for path in checkpoint.leaves}
        assert parts == ({"params", "rngs", "opt_state"} if step == STEPS else {"params", "rngs"})


# A Grain iterator in each process -------------------------------------------------------------------------


def printed(done: Finished) -> list[list[list[int]]]:
    """The values that each iterator returned: [dataset, loader], three batches each."""
    return json.loads(done.stdout.splitlines()[-1])


def test_a_grain_iterator_resumes_in_two_processes_and_in_one(
    run_processes: RunProcesses, run_python: RunPython, tmp_path: Path
) -> None:
    folder, save = str(tmp_path / "steps"), PROGRAMS / "grain_saved_by_two.py"
    expected = [printed(done) for done in run_processes(save, processes=2, devices_per_process=2, args=folder)]
    assert expected[0] != expected[1]

    done = run_processes(PROGRAMS / "grain_restored_by_two.py", processes=2, devices_per_process=2, args=folder)
    assert [printed(one) for one in done] == expected

    whole = json.loads(run_python(PROGRAMS / "grain_restored_by_one.py", args=[folder], devices=4).splitlines()[-1])
    assert [sorted(batch) for batch in whole] == [
        sorted(left + right) for left, right in zip(expected[0][0], expected[1][0], strict=True)
    ]


def test_the_same_number_of_processes_needs_no_resplit(run_python: RunPython, tmp_path: Path) -> None:
    run_python(PROGRAMS / "grain_in_one.py", args=[str(tmp_path)], word=PASSED)
