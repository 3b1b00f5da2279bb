"""examples/training_loop.py killed, told to stop and started again; a Grain iterator's position among processes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import processes
import pytest
from processes import Finished, RunProcesses, RunPython

import jaxckpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "training_loop.py"
STEPS = 60

# The example as a module, in a child process: it sets the devices itself when it is imported.
IMPORT = f"""
import json, os, signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import training_loop
folder, steps = Path(sys.argv[1]), {STEPS}
"""


def losses_of(printed: str) -> dict[int, str]:
    """The loss of each step, as text, so that nothing is rounded. The first line says where the run began.

    A process that is killed may leave a last line without its end: that step does not count.
    """
    lines = [line for line in printed.splitlines(keepends=True)[1:] if line.endswith("\n")]
    return {int(step): loss for step, loss in map(str.split, lines)}


def newest(folder: Path) -> int:
    return max(int(manifest.parent.name) for manifest in folder.glob("*/manifest.json"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    losses = losses_of(processes.run_python(EXAMPLE, args=[str(folder), "--steps", str(STEPS)]))
    assert list(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS
    return losses


def test_killed_at_any_moment_the_losses_are_the_same(
    run_python: RunPython, tmp_path: Path, expected: dict[int, str]
) -> None:
    # From the first step that this life has saved, until a moment somewhere in the saves and steps that follow.
    dying = (
        IMPORT
        + """
def die():
    before = set(folder.glob("*/manifest.json"))
    while not set(folder.glob("*/manifest.json")) - before:
        time.sleep(0.002)
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=die, daemon=True).start()
training_loop.train(folder, steps)
"""
    )
    seen: dict[int, str] = {}
    for _ in range(2):
        delay = random.uniform(0, 0.2)
        losses = losses_of(run_python(dying, args=[str(tmp_path), str(delay)], check=False))
        assert losses.items() <= expected.items(), delay
        seen |= losses
        assert newest(tmp_path) >= 5
    printed = run_python(EXAMPLE, args=[str(tmp_path), "--steps", str(STEPS)])
    losses = losses_of(printed)
    assert losses.items() <= expected.items()
    assert seen | losses == expected
    assert int(printed.split()[2]) >= 5  # it went on after a saved step, not from the start


def test_told_to_stop_it_saves_the_step_it_is_in(
    run_python: RunPython, tmp_path: Path, expected: dict[int, str]
) -> None:
    told = (
        IMPORT
        + """
status, losses = training_loop.run(folder, steps, signal.SIGTERM, int(sys.argv[2]))
print(json.dumps([status, list(losses.items())]))
"""
    )
    printed = run_python(told, args=[str(tmp_path), str(random.randrange(1, STEPS // 2))])
    status, items = json.loads(printed.splitlines()[-1])
    losses = dict(items)
    assert status == 143
    assert losses.items() <= expected.items()
    assert newest(tmp_path) == max(losses)  # not a step is lost

    again = losses_of(run_python(EXAMPLE, args=[str(tmp_path), "--steps", str(STEPS)]))
    assert min(again) == max(losses) + 1
    assert losses | again == expected


def test_of_two_processes_one_is_told_to_stop(run_processes: RunProcesses, tmp_path: Path) -> None:
    job = f"""
import os, signal, sys, time
from pathlib import Path
devices = os.environ["XLA_FLAGS"]
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import training_loop
os.environ["XLA_FLAGS"] = devices  # half of them in each process

class Told(training_loop.jaxckpt.Checkpointer):
    def save(self, step, *rest, **named):
        if step == args[1] and process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < args[1] <= step:
            time.sleep(0.1)  # JAX's preemption service has seconds to pass it on before the last step
        return super().save(step, *rest, **named)

training_loop.jaxckpt.Checkpointer = Told
training_loop.train(Path(args[0]), {STEPS})
"""

    def train(folder: Path, told: int, status: int) -> dict[int, str]:
        done = run_processes(job, processes=2, devices_per_process=4, args=[str(folder), told], check=False)
        assert [one.returncode for one in done] == [status, status], "\n".join(map(str, done))
        first, second = (losses_of(one.stdout) for one in done)
        assert first == second
        return first

    expected = train(tmp_path / "whole", told=0, status=0)
    losses = train(tmp_path / "told", told=7, status=143)
    assert newest(tmp_path / "told") == max(losses) < STEPS
    again = train(tmp_path / "told", told=0, status=0)
    assert min(again) == max(losses) + 1
    assert losses | again == expected


def test_the_rules_hold_on_disk(run_python: RunPython, tmp_path: Path, expected: dict[int, str]) -> None:
    run_python(EXAMPLE, args=[str(tmp_path), "--steps", "30"])
    best = min(range(5, 31, 5), key=lambda step: float(expected[step]))
    found = {int(folder.name): jaxckpt.open(folder) for folder in sorted(tmp_path.glob("[0-9]*"))}
    assert set(found) == {25, 30, best}
    for step, checkpoint in found.items():
        parts = {path.split("/")[0] for path in checkpoint.leaves}
        assert parts == ({"params", "rngs", "opt_state"} if step == 30 else {"params", "rngs"})


# A Grain iterator in each process -------------------------------------------------------------------------

BATCH = 12
PIPELINES = f"""
import grain, json, jaxckpt, numpy as np

def dataset(process, count):
    shuffled = grain.MapDataset.range(1000).seed(7).shuffle().repeat()
    return iter(shuffled[process::count].batch({BATCH} // count).to_iter_dataset())

def loader(process, count):
    shard = grain.sharding.ShardOptions(process, count, drop_remainder=True)
    sampler = grain.samplers.IndexSampler(1000, shard, shuffle=True, seed=3)
    source = grain.sources.RangeDataSource(0, 1000, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(6)]))

def some(batches, count):
    return [np.asarray(next(batches)).tolist() for _ in range(count)]
"""

# Both kinds of state: Dataset gives a dict, DataLoader gives bytes. `loader` has moved further in process 1.
SAVE = (
    PIPELINES
    + """
d, l = dataset(process_id, 2), loader(process_id, 2)
some(l, process_id)
with jaxckpt.Checkpointer(args, every=2) as steps:
    for step in range(1, 6):
        some(d, 1), some(l, 1)
        steps.save(step, {"step": step}, process_state={"dataset": d.get_state(), "loader": l.get_state()})
        if step == 4:
            then = dataset(process_id, 2), loader(process_id, 2)
            then[0].set_state(d.get_state()), then[1].set_state(l.get_state())
            print(json.dumps([some(one, 3) for one in then]))
"""
)


def printed(done: Finished) -> list[list[list[int]]]:
    """What each iterator gave: [dataset, loader], three batches each."""
    return json.loads(done.stdout.splitlines()[-1])


def test_a_grain_iterator_goes_on_in_two_processes_and_in_one(
    run_processes: RunProcesses, run_python: RunPython, tmp_path: Path
) -> None:
    folder = str(tmp_path / "steps")
    expected = [printed(done) for done in run_processes(SAVE, processes=2, devices_per_process=2, args=folder)]
    assert expected[0] != expected[1]

    two = (
        PIPELINES
        + """
d, l = dataset(process_id, 2), loader(process_id, 2)
with jaxckpt.Checkpointer(args) as steps:
    assert steps.restore() == {"step": 4}
    d.set_state(steps.process_state("dataset")), l.set_state(steps.process_state("loader"))
print(json.dumps([some(d, 3), some(l, 3)]))
"""
    )
    done = run_processes(two, processes=2, devices_per_process=2, args=folder)
    assert [printed(one) for one in done] == expected

    one = (
        PIPELINES
        + """
import sys
asked = []
def resplit(states, count):
    asked.append((states, count))
    return states[:1] * count

d = dataset(0, 1)
with jaxckpt.Checkpointer(sys.argv[1]) as steps:
    try:
        steps.process_state("dataset")
        raise SystemExit("process_state gave one state of two")
    except jaxckpt.InputError as error:
        assert "resplit" in str(error), error
    d.set_state(steps.process_state("dataset", resplit=resplit))
    assert asked == [([{"next_index": 4}] * 2, 1)], asked

    # Positions that differ arrive in the order of the processes.
    first, second = steps.process_state("loader", resplit=lambda states, count: [states])
    assert [json.loads(state)["last_seen_indices"]["0"] for state in (first, second)] == [46, 59]
print(json.dumps(some(d, 3)))
"""
    )
    whole = json.loads(run_python(one, args=[folder], devices=4).splitlines()[-1])
    assert [sorted(batch) for batch in whole] == [
        sorted(left + right) for left, right in zip(expected[0][0], expected[1][0], strict=True)
    ]


def test_as_many_processes_as_saved_need_no_resplit(run_python: RunPython, tmp_path: Path) -> None:
    code = (
        PIPELINES
        + """
import sys
d, l = dataset(0, 1), loader(0, 1)
with jaxckpt.Checkpointer(sys.argv[1], background=False) as steps:
    for step in range(3):
        some(d, 1), some(l, 2)
        steps.save(step, {"step": step}, process_state={"dataset": d.get_state(), "loader": l.get_state()})
    expected = some(d, 3), some(l, 3)
    def refuse(states, count):
        raise SystemExit("called")
    d, l = dataset(0, 1), loader(0, 1)
    d.set_state(steps.process_state("dataset", resplit=refuse)), l.set_state(steps.process_state("loader"))
    assert (some(d, 3), some(l, 3)) == expected
    assert steps.process_state("dataset", 1) == {"next_index": 2}  # a step that is asked for
"""
    )
    run_python(code, args=[str(tmp_path)])
