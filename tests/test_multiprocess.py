"""Real processes under jax.distributed: what each one writes and reads, and what happens if one fails."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from processes import PASSED, PROGRAMS, Finished, RunProcesses, RunPython, free_port, run_together

import jaxckpt


def printed(done: Finished) -> dict[str, object]:
    """The JSON object that a process printed last."""
    return json.loads(done.stdout.splitlines()[-1])


def test_four_save_two_restore_one_reads(run_processes: RunProcesses, run_python: RunPython, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    saved = run_processes(PROGRAMS / "save_from_four.py", processes=4, devices_per_process=2, args=path)
    assert len({done.stdout.splitlines()[-1] for done in saved}) == 1
    info = printed(saved[0])
    each = info["each"]
    assert info["sha256"] == hashlib.sha256(Path(path, "manifest.json").read_bytes()).hexdigest()
    assert isinstance(each, list)
    unique = sum(leaf.nbytes for leaf in jaxckpt.open(path).leaves.values())
    assert info["total"] == sum(each) == unique, "every byte is written once"
    assert max(each) <= 1.05 * sum(each) / 4, "the busiest process writes at most 5 % more than the mean"
    on_disk = sum(file.stat().st_size for file in Path(path).rglob("c/**/*") if file.is_file())
    assert unique <= on_disk <= 1.01 * unique

    for done in run_processes(PROGRAMS / "restore_in_two.py", processes=2, devices_per_process=2, args=path):
        figures = printed(done)
        assert figures["read"] == figures["planned"], "each chunk that a process needs is read once, and no other"

    run_python(PROGRAMS / "read_in_one.py", args=[path], devices=1, word=PASSED)


def test_numbers_become_arrays_without_comparing_the_processes(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "numbers_in_two.py"
    arguments = {"processes": 2, "devices_per_process": 2, "args": str(tmp_path / "c"), "word": PASSED}
    for done in run_processes(program, **arguments):
        assert done.stdout.split()[:2] == ["counts"] * 2


def test_sixty_four_devices_to_fifty_six_and_to_one(run_python: RunPython, tmp_path: Path) -> None:
    program, path = PROGRAMS / "optimizer_state.py", str(tmp_path / "ckpt")
    run_python(program, args=["save", path, "8", "8"], devices=64, word=PASSED)
    run_python(program, args=["restore", path, "7", "8"], devices=56, word=PASSED)
    run_python(program, args=["restore", path, "1", "1"], devices=1, word=PASSED)


def test_a_failure_during_an_exchange_does_not_block_the_others(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "failing_exchange.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path), timeout=60, check=False)
    assert "raised StorageError" in done[0].stdout, str(done[0])
    assert "raised PeerFailedError process 0 failed with StorageError" in done[1].stdout, str(done[1])


def test_an_exchange_that_fails_in_one_and_runs_in_another_names_the_dead(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = PROGRAMS / "half_an_exchange.py"
    done = run_processes(program, processes=4, devices_per_process=1, args=str(tmp_path), timeout=60, check=False)
    for process in (0, 1, 3):
        assert done[process].stdout.startswith("PeerTimeoutError: process 2 of 4 did not respond"), str(done[process])


def test_an_interrupt_during_an_exchange_does_not_block_the_others(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "interrupted_exchange.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path), timeout=100)
    for name in ("exchange", "claim"):
        assert f"{name} raised PeerFailedError process 1 failed with KeyboardInterrupt" in done[0].stdout, str(done[0])
        assert f"{name} raised KeyboardInterrupt" in done[1].stdout, str(done[1])
        assert not (tmp_path / name / "manifest.json").exists()
    assert all("last saved" in one.stdout for one in done), "\n".join(map(str, done))
    for name in ("shared", "agreement"):
        assert f"{name} raised PeerFailedError process 1 failed with KeyboardInterrupt" in done[0].stdout, str(done[0])
        assert f"{name} raised KeyboardInterrupt" in done[1].stdout, str(done[1])
    for name in ("again", "at last"):
        assert all(f"{name} restored" in one.stdout for one in done), "\n".join(map(str, done))
    assert jaxckpt.verify(tmp_path / "last").ok


def test_an_interrupted_process_0_deletes_nothing_that_others_still_write(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = PROGRAMS / "interrupted_by_process_0.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path), timeout=100)
    assert [line.partition(":")[0] for line in done[0].stdout.splitlines()] == ["KeyboardInterrupt"] * 2, str(done[0])
    assert [line.partition(":")[0] for line in done[1].stdout.splitlines()] == ["PeerFailedError"] * 2, str(done[1])
    assert jaxckpt.verify(tmp_path / "interrupted").ok
    assert len(list((tmp_path / "interrupted").iterdir())) == 2, "nothing is left"


def test_an_interrupt_during_an_exchange_of_local_copies_does_not_block_the_others(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = PROGRAMS / "interrupted_local_tier.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path), timeout=100)
    for name in ("interrupted save", "interrupted preparations", "interrupted restore", "interrupted agreement"):
        assert f"{name} raised PeerFailedError process 1 failed with KeyboardInterrupt" in done[0].stdout, str(done[0])
        assert f"{name} raised KeyboardInterrupt" in done[1].stdout, str(done[1])
    assert "failed save raised PeerFailedError process 1 failed with RuntimeError: no memory" in done[0].stdout
    assert "failed save raised RuntimeError" in done[1].stdout, str(done[1])
    for name in ("save", "restore"):
        assert all(f"\n{name} done" in one.stdout for one in done), "\n".join(map(str, done))


def test_a_missed_call_never_mixes_two_steps(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "missed_call.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path), timeout=120, check=False)
    assert [one.returncode for one in done] == [0, 0], "\n".join(map(str, done))
    assert "1 PeerTimeoutError" in done[0].stdout, str(done[0])
    if (tmp_path / "c" / "manifest.json").exists():
        tree = jaxckpt.load_numpy(tmp_path / "c")
        assert len({float(value) for value in tree["w"].ravel()}) == 1, "rows of two steps in one checkpoint"


@pytest.mark.child
def test_calls_before_the_processes_are_connected_and_a_second_job(tmp_path: Path) -> None:
    """JAX connects a second time: one process has already saved, and the other one has just started."""
    address = f"127.0.0.1:{free_port()}"
    program = str(PROGRAMS / "connects_late.py")
    run_together([[program, str(tmp_path), address, role] for role in ("old", "new")], timeout=60, word=PASSED)
    np.testing.assert_array_equal(jaxckpt.load_numpy(tmp_path / "both")["x"], np.arange(1))


# The cases of programs/two_processes.py ---------------------------------------------------------------------


Cases = dict[str, list[list[Any]]]
"""For each case, the list of values that each process reported."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def cases(run_processes: RunProcesses, folder: Path) -> Cases:
    """A single job runs all cases."""
    program = PROGRAMS / "two_processes.py"
    done = run_processes(program, processes=2, devices_per_process=2, args=str(folder), timeout=240)
    noted: Cases = {}
    for process in done:
        for line in process.stdout.splitlines():
            for name, lines in json.loads(line).items():
                noted.setdefault(name, []).append(lines)
    return noted


def kinds(lines: list[str]) -> list[str]:
    """The class of each error, or "fine"."""
    return [line.split(":")[0] for line in lines]


def test_with_a_storage_mesh_of_the_first_process_it_writes_everything(cases: Cases) -> None:
    for (info,) in cases["storage_mesh_of_the_first_process"]:
        assert info["each"] == [info["total"], 0]


def test_a_leaf_only_on_the_devices_of_one_process(cases: Cases) -> None:
    rows, alone = 512 * 512 * 4, 256 * 256 * 4
    assert cases["a_leaf_of_one_process"] == [[[rows // 2, rows // 2 + alone]]] * 2


def test_a_replicated_count_on_the_devices_of_one_process(cases: Cases, folder: Path) -> None:
    """For example, the step count of a pipeline stage."""
    for lines in cases["a_replicated_count_of_one_process"]:
        assert lines[0] == "fine"
        assert lines[1].startswith("PeersDisagreeError: the processes hold different values")
        assert "'all' (0 in process 0): process 1 and process 0 differ" in lines[1]
    assert jaxckpt.load_numpy(folder / "a_replicated_count_of_one_process" / "c") == {"stage": 7, "all": 3}


def test_a_path_that_is_not_shared_is_found_before_data_is_written(cases: Cases, folder: Path) -> None:
    for (line,) in cases["a_path_that_is_not_shared"]:
        assert line.startswith("PathNotSharedError: process 1 does not see")
    assert not [file for file in (folder / "a_path_that_is_not_shared").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("steps", "lacking", "having"),
    [
        ([[], [1, 2], [1, 2]], 0, "processes 1, 2"),
        ([[1, 2], [], [1, 2]], 1, "processes 0, 2"),
        ([[1], [1, 2], [1]], 0, "process 1"),
    ],
)
def test_local_disks_by_mistake_are_found_by_every_restore(
    run_processes: RunProcesses, tmp_path: Path, steps: list[list[int]], lacking: int, having: str
) -> None:
    done = run_processes(
        PROGRAMS / "local_disks.py",
        processes=3,
        devices_per_process=1,
        args={"folder": str(tmp_path), "steps": steps},
        timeout=120,
    )
    for process in done:
        outcomes: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
        assert outcomes.pop("a shared restore") == "fine: True"
        if lacking == 0:  # as if no process saw the step
            assert "NotACheckpointError" in outcomes.pop("process_state of a step")
        for call, outcome in outcomes.items():
            assert "all processes must use one shared folder or object store" in outcome, (call, outcome)
            if not call.startswith("process_state"):
                assert outcome.startswith("PathNotSharedError"), (call, outcome)
                assert re.search(rf"process(es)? {lacking}\b", outcome), (call, outcome)
                assert having in outcome, (call, outcome)


def test_one_processs_failure_is_raised_by_all_and_the_next_save_works(cases: Cases) -> None:
    others, own = cases["one_cannot_save"]
    assert kinds(own) == ["TreeError", "PeersDisagreeError", "StorageError", "fine"]
    assert kinds(others) == ["PeerFailedError", "PeersDisagreeError", "PeerFailedError", "fine"]
    assert all("process 1" in others[n] for n in (0, 2))
    assert "no space left" in others[2]
    assert "process 1 differs from process 0 in the leaves of the tree" in others[1]


def test_all_raise_when_one_cannot_restore_and_the_next_restore_works(cases: Cases) -> None:
    first, second = cases["one_cannot_restore"]
    assert kinds(first) == "PeerFailedError CheckpointExistsError NotACheckpointError PeersDisagreeError fine".split()
    assert kinds(second) == "DataError PeerFailedError NotACheckpointError PeersDisagreeError fine".split()
    assert re.search(r"process 1 failed with DataError: cannot read (leaf|leaves) '.*: this disk is bad", first[0])
    assert "process 0 failed with CheckpointExistsError" in second[1]
    assert re.search("process 0: restore .*nothing.*; process 1: restore", second[3])


def test_a_bad_argument_in_one_process_leaves_the_calls_in_step(cases: Cases) -> None:
    assert list(map(kinds, cases["a_bad_argument_in_one"])) == [["PeerFailedError", "fine"], ["InputError", "fine"]]


def test_an_init_that_fails_in_one_process_leaves_the_calls_in_step(cases: Cases) -> None:
    first, second = cases["an_init_that_fails_in_one"]
    assert first == ["PeerFailedError: process 1 failed with TypeError: no initial state", "fine"]
    assert second == ["TypeError: no initial state", "fine"]


def test_an_error_of_only_one_process_leaves_the_calls_in_step(cases: Cases) -> None:
    first, second = cases["bad_arguments_of_a_checkpointer"]
    assert kinds(second[:-1]) == [
        "InputError", "fine", "InputError", "fine", "PeersDisagreeError", "fine", "InputError",
    ]  # fmt: skip
    assert kinds(first[:-1])[1::2] == ["fine"] * 3
    assert first[-1] == second[-1] == [[1, 2], {"loss": 0.5}]


def test_ctrl_c_while_waiting_for_another_process(cases: Cases) -> None:
    first, second = cases["ctrl_c_while_the_other_is_missing"]
    assert first == ["interrupted", "fine"]
    assert "KeyboardInterrupt" in second[0]
    assert second[1] == "fine"


def test_ctrl_c_after_this_process_has_done_its_part(cases: Cases, folder: Path) -> None:
    """Process 0 publishes the checkpoint, and the interrupted process reports that."""
    first, second = cases["ctrl_c_after_the_share_was_sent"]
    assert first == ["fine", "fine"]
    assert second[0].startswith("interrupted")
    assert "was published" in second[0]
    assert second[1] == "fine"
    assert jaxckpt.verify(folder / "ctrl_c_after_the_share_was_sent" / "c").ok


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_ctrl_c_between_two_meetings(cases: Cases, verb: str) -> None:
    first, second = cases[f"ctrl_c_after_the_first_text_of_a_{verb}"]
    assert "process 1 failed with KeyboardInterrupt" in first[0]
    assert first[1] < 30, "process 0 waited for a process that had been interrupted"
    assert second[0] == "interrupted"
    assert first[2] == second[2] == "fine"


def test_slow_staging_does_not_count_as_silence(cases: Cases) -> None:
    assert cases["one_stages_for_longer_than_the_timeout"] == [["fine"]] * 2


def test_processes_that_were_suspended_together_do_not_blame_each_other(cases: Cases) -> None:
    assert cases["all_are_suspended_together"] == [["fine"], ["fine"]]


@pytest.mark.parametrize(
    ("case", "leaf"), [("a_missed_call_and_a_number", "step"), ("a_missed_call_and_a_string", "name")]
)
def test_python_values_reveal_a_missed_call(cases: Cases, folder: Path, case: str, leaf: str) -> None:
    for lines in cases[case]:
        assert lines[0] == "fine"
        for line in lines[1:]:
            assert line.startswith("PeersDisagreeError: the processes hold different values"), lines
            assert f"{leaf!r} (" in line
            assert "skipped a call" in line
            assert "process 1 and process 0 differ" in line
        assert len(lines) == 3
    assert jaxckpt.verify(folder / case / "c").ok
    tree = jaxckpt.load_numpy(folder / case / "c")
    assert len(np.unique(tree["w"])) == 1


def test_different_calls_are_named(cases: Cases) -> None:
    for lines in cases["different_calls"]:
        assert kinds(lines) == ["fine", "PeersDisagreeError", "PeersDisagreeError", "fine"]
        assert "the processes made different jaxckpt calls. process 0: restore" in lines[1]
        assert re.search(r"process 1: save '.*/c', for the 2nd time", lines[1])
        assert re.search(r"process 0: Checkpointer.save '.*/00000003'.*; process 1: .*/00000004'", lines[2])


def test_the_error_names_the_difference(cases: Cases) -> None:
    for lines in cases["arguments_that_differ"]:
        assert lines[1::2] == ["fine"] * 4
        for line, blamed in zip(
            lines[::2],
            (
                "Options or Checkpointer keep_last_of",
                "metadata",
                "the names in process_state",
                "the shardings of the leaves",
            ),
            strict=True,
        ):
            assert line.startswith(f"PeersDisagreeError: process 1 differs from process 0 in {blamed}"), lines


def test_other_differences_are_errors(cases: Cases) -> None:
    for lines in cases["trees_that_differ"]:
        assert kinds(lines) == ["PeersDisagreeError"] * 4 + ["fine"], lines
        assert "'x' (checksum" in lines[3]


def test_meshes_with_another_order_of_devices_are_found_by_a_restore(
    run_processes: RunProcesses, tmp_path: Path
) -> None:
    program = """
    import jaxckpt, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    own, others = jax.local_devices(), [one for one in jax.devices() if one.process_index != process_id]
    try:
        jaxckpt.restore(args, mesh=Mesh(np.array(own + others), ("data",)), specs=P("data"))
    except jaxckpt.errors.PeersDisagreeError:
        print("found")
    """
    jaxckpt.save(tmp_path / "c", {"w": jnp.arange(8)})
    done = run_processes(program, processes=2, devices_per_process=2, args=str(tmp_path / "c"))
    assert [one.stdout for one in done] == ["found\n"] * 2


def test_an_exchange_after_the_main_thread_has_ended(cases: Cases, folder: Path) -> None:
    lines = cases["after the main thread"]
    if sys.version_info[:2] == (3, 12) and lines != [["fine"]] * 2:
        assert lines == [["RuntimeError: can't create new thread at interpreter shutdown"]] * 2, "as Python 3.12.1 says"
        return
    assert lines == [["fine"]] * 2
    assert jaxckpt.load_numpy(folder / "an_exchange_after_the_main_thread" / "c")["w"].shape == (8, 8)


def test_each_process_links_its_unchanged_objects(run_processes: RunProcesses, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    done = run_processes(PROGRAMS / "reuse_in_two.py", processes=2, devices_per_process=2, args=path)
    first, second, third, fourth, *jitted = json.loads(done[0].stdout.splitlines()[-1])
    assert second < 0.05 * first, "only what changed"
    assert second < third < first, "one process had new arrays"
    assert second < fourth < first, "one process's object was deleted"
    assert jitted == [first, second], "all processes compare by content"
    assert jaxckpt.verify(tmp_path / "run").problems[0].object.startswith("00000002/"), "the damaged step"
    assert {problem.object.partition("/")[0] for problem in jaxckpt.verify(tmp_path / "run").problems} == {"00000002"}
