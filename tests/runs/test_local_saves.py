"""The local tier: the folders of real processes, and copies from them to the storage."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import PASSED, PROGRAMS, RunProcesses, run_processes

import jaxckpt
from jaxckpt._model.file_names import COPY, MANIFEST

SAVES = PROGRAMS / "local_saves.py"


CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"tree": "fsdp", "steps": [10], "plain": True},
    "data": {"tree": "data", "steps": [10], "plain": True},
    "mixed": {"tree": "mixed", "steps": [10], "plain": True},
    "two copies": {"tree": "mixed", "steps": [10], "options": {"local": {"copies": 2}}},
    "domains": {"tree": "mixed", "steps": [10], "options": {"local": {"domains": ["left", "left", "right", "right"]}}},
    "no copies": {"tree": "mixed", "steps": [10], "options": {"local": {"copies": 0}}, "plain": True},
    "large": {"tree": "fsdp", "steps": [10], "rows": 1 << 14},
    "four steps": {"tree": "data", "steps": [10, 20, 30, 40]},
    "flushed": {"tree": "mixed", "steps": [90, 100], "plain": True},
    "slow flush": {
        "tree": "fsdp",
        "steps": [40, 50, 60, 70],
        "options": {
            "every": 40,
            "local": {"max_bytes_per_second": 5000},
            "options": {"object_bytes": 4096, "chunk_bytes": 1024},
        },
        "wait": False,
        "rows": 320,
    },
}
"""The saves that one job of four processes makes, one after the other, by name."""


class Saves:
    """The job's saves, and what its processes report of them. No test changes this."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        given = [
            {
                **case,
                "path": str(folder / name / "run"),
                "local": str(folder / name / "local"),
                "options": {"every": 100, **case.get("options", {})},
                **({"plain": str(folder / name / "plain")} if "plain" in case else {}),
            }
            for name, case in CASES.items()
        ]
        done = run_processes(SAVES, processes=4, devices_per_process=2, args=given, timeout=200)
        self._found = [dict(zip(CASES, map(json.loads, one.stdout.splitlines()), strict=True)) for one in done]

    def of(self, case: str) -> tuple[Path, list[dict[str, Any]]]:
        """The folder of a case, and what each process reports of it."""
        found = [one[case] for one in self._found]
        for process, one in enumerate(found):
            assert "error" not in one, f"process {process}: {one['error']}"
        return self._folder / case, found


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"))


def files(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


def union(local: Path, step: int, without: tuple[int, ...], target: Path) -> Path:
    """A checkpoint made from the files in the folders of all processes except some."""
    for process in sorted({0, 1, 2, 3}.difference(without)):
        share = local / f"process-{process}" / f"{step:08d}"
        if share.exists():
            shutil.copytree(share, target, dirs_exist_ok=True)
    return target


def described(path: Path) -> dict[str, Any]:
    """A manifest without the members that differ between two saves of the same tree."""
    manifest = json.loads((path / MANIFEST).read_text())
    return {
        name: manifest[name]
        for name in manifest
        if name not in ("save_id", "created", "sha256", "step", "phase_seconds")
    }


@pytest.mark.child
@pytest.mark.parametrize("tree", ["fsdp", "data", "mixed"])
def test_any_folder_may_be_lost(saves: Saves, tmp_path: Path, tree: str) -> None:
    folder, _ = saves.of(tree)
    plain = folder / "plain"
    for lost in range(4):
        whole = union(folder / "local", 10, (lost,), tmp_path / f"without-{lost}")
        assert described(whole) == described(plain)
        assert jaxckpt.verify(whole).ok
        assert jaxckpt.diff(whole, plain).identical
    manifests = {(folder / f"local/process-{process}/00000010/{MANIFEST}").read_bytes() for process in range(4)}
    assert len(manifests) == 1


@pytest.mark.child
def test_two_copies_are_in_two_other_domains(saves: Saves, tmp_path: Path) -> None:
    folder, _ = saves.of("two copies")
    for lost in itertools.combinations(range(4), 2):
        assert jaxckpt.verify(union(folder / "local", 10, lost, tmp_path / f"without-{lost}")).ok


@pytest.mark.child
def test_copies_are_in_another_domain(saves: Saves, tmp_path: Path) -> None:
    folder, _ = saves.of("domains")
    for lost in ((0, 1), (2, 3)):
        assert jaxckpt.verify(union(folder / "local", 10, lost, tmp_path / f"without-{lost}")).ok


@pytest.mark.child
def test_without_copies_each_object_is_written_once(saves: Saves) -> None:
    folder, found = saves.of("no copies")
    assert sum(one["passed"] for one in found) == 0
    objects = [name for process in range(4) for name in files(folder / f"local/process-{process}") if "/c/" in name]
    assert len(objects) == len(set(objects)) == sum("/c/" in name for name in files(folder / "plain"))


@pytest.mark.child
def test_processes_send_only_data_that_needs_a_copy(saves: Saves) -> None:
    _, found = saves.of("large")
    needed = sum(one["own"] for one in found)
    assert sum(one["sent"] for one in found) == sum(one["copied"] for one in found) == needed
    assert 1.0 <= sum(one["passed"] for one in found) / needed < 1.01


@pytest.mark.child
def test_at_most_two_steps_stay(saves: Saves) -> None:
    folder, _ = saves.of("four steps")
    for process in range(4):
        own = folder / f"local/process-{process}"
        assert sorted(path.name for path in own.iterdir()) == ["00000030", "00000040", "run.json"]
    assert not (folder / "run/00000010").exists()


@pytest.mark.child
def test_a_flushed_step_is_an_ordinary_checkpoint(saves: Saves) -> None:
    folder, _ = saves.of("flushed")
    plain, stored = folder / "plain", folder / "run/00000100"
    assert jaxckpt.verify(stored).ok
    assert described(stored) == described(plain)
    (data,), (expected,) = stored.glob("data-*"), plain.glob("data-*")
    assert {name: path.read_bytes() for name, path in files(data).items() if name != COPY} == {
        name: path.read_bytes() for name, path in files(expected).items() if name != COPY
    }
    assert (data / COPY).read_bytes() == (stored / MANIFEST).read_bytes()
    assert (stored / MANIFEST).read_bytes() == (folder / f"local/process-1/00000100/{MANIFEST}").read_bytes()


@pytest.mark.parametrize(
    ("phase", "victim"),
    [("pass", 2), ("write", 1), ("written", 0), ("written", 3), ("publish", 0), ("published", 0), ("published", 2)],
)
def test_after_any_process_is_killed_the_older_or_the_new_step_is_complete(
    run_processes: RunProcesses, tmp_path: Path, phase: str, victim: int
) -> None:
    """JAX then aborts the others. The folder of the killed process may be lost too."""
    given = {"path": str(tmp_path / "run"), "local": str(tmp_path / "local"), "phase": phase, "victim": victim}
    done = run_processes(PROGRAMS / "local_killed.py", processes=4, devices_per_process=2, args=given, check=False)
    assert done[victim].returncode == -signal.SIGKILL, done[victim]
    for lost in ((), (victim,)):
        found = union(tmp_path / "local", 20, lost, tmp_path / f"new-{lost}")
        if (found / MANIFEST).exists():
            assert jaxckpt.verify(found).ok
            step = 20
        else:
            assert jaxckpt.verify(union(tmp_path / "local", 10, lost, tmp_path / f"old-{lost}")).ok
            step = 10
        assert step == 20 or phase != "published" or lost


@pytest.mark.child
def test_a_third_step_is_not_saved_while_the_first_is_flushed(saves: Saves) -> None:
    folder, found = saves.of("slow flush")
    assert [one["saved"] for one in found] == [[True, True, False, False]] * 4
    assert jaxckpt.verify(folder / "run/00000040").ok
    for process in range(4):
        own = folder / f"local/process-{process}"
        assert sorted(path.name for path in own.iterdir()) == ["00000040", "00000050", "run.json"]


def test_processes_with_other_host_names_may_share_a_folder(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Like pods of one node that mount the same memory. A folder that no process of the job uses is deleted."""
    program = """
import json, os, shutil, socket
import jax.numpy as jnp, jaxckpt
socket.gethostname = lambda: f"pod-{process_id}"
for case in ("kept", "lost"):
    local = f"{args}/{case}/local"
    tier = jaxckpt.LocalTier(local, every=1)
    run = jaxckpt.Checkpointer(f"{args}/{case}/run", every=100, local=tier, on_preemption="ignore")
    for step in (1, 2, 3):
        if step == 2 and process_id == 0:
            shutil.copytree(f"{local}/process-0", f"{local}/process-7")
            with open(f"{local}/process-7/run.json", "r+") as file:
                note = {**json.load(file), "folder": "of an earlier job"}
                file.seek(0)
                json.dump(note, file)
                file.truncate()
        if step == 2 and process_id == 1 and case == "lost":
            shutil.rmtree(f"{local}/process-1")
        run.save(step, {"x": jnp.full(4, step)})
        run.wait()
        print(*(int(name) for name in sorted(os.listdir(f"{local}/process-{process_id}"))[:-1]))
    print(*sorted(os.listdir(local)))
    run.close()
"""
    first, second = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path))
    names = "process-0 process-1"
    assert first.stdout.splitlines() == ["1", "1 2", "2 3", names] * 2
    assert second.stdout.splitlines() == ["1", "1 2", "2 3", names, "1", "2", "2 3", names]


@pytest.mark.parametrize("victim", [0, 3])
def test_a_flush_that_is_killed_publishes_nothing_and_is_swept(
    run_processes: RunProcesses, tmp_path: Path, victim: int
) -> None:
    given = {"path": str(tmp_path / "run"), "local": str(tmp_path / "local"), "victim": victim, "stop": False}
    program = PROGRAMS / "local_flush_killed.py"
    run_processes(program, processes=4, devices_per_process=2, args={**given, "first": True}, check=False)
    stored = tmp_path / "run/00000010"
    assert list(stored.glob("data-*"))
    assert not (stored / MANIFEST).exists()
    assert jaxckpt.verify(union(tmp_path / "local", 10, (victim,), tmp_path / "whole")).ok
    run_processes(program, processes=4, devices_per_process=2, args={**given, "first": False}, word=PASSED)
    assert not stored.exists()
    assert jaxckpt.verify(tmp_path / "run/00000020").ok


def test_on_sigterm_the_local_step_is_saved_then_flushed(run_processes: RunProcesses, tmp_path: Path) -> None:
    given = {"path": str(tmp_path / "run"), "local": str(tmp_path / "local"), "stop": True, "first": False}
    done = run_processes(PROGRAMS / "local_flush_killed.py", processes=4, devices_per_process=2, args=given)
    (last,) = {int(one.stdout.split()[0]) for one in done}
    assert jaxckpt.verify(tmp_path / f"run/{last:08d}").ok
    assert (tmp_path / f"local/process-2/{last:08d}" / MANIFEST).exists()


def test_processes_that_disagree_all_raise(run_processes: RunProcesses, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_processes(
        PROGRAMS / "local_disagreements.py", processes=2, devices_per_process=2, args=str(tmp_path), timeout=200
    )
    expected = {
        "one without": "process 1 created the Checkpointer with local=None, process 0 with local=LocalTier(…)",
        "other copies": "process 1 created the Checkpointer with local.copies=1, process 0 with local.copies=0",
        "other domains": "process 1 created the Checkpointer with local.domains=['a', 'b1'], process 0 with",
        "other every": "process 1 created the Checkpointer with every=11, process 0 with every=10: every process must",
        "one domain": "pass copies=0, or other domains=",
        "one cannot": "Not a directory",
        "diverged": "different bytes of a replicated array, which is 'layers/0'",
        "after": "",
        "one tree is odd": "is of type builtins.object",
        "both, and one tree is odd": "is of type builtins.object",
        "another step": "the processes made different jaxckpt calls",
        "after that": "",
    }
    for one in done:
        found = json.loads(one.stdout)
        assert {
            what for what in expected if expected[what] not in found[what] or (found[what] and not expected[what])
        } == (set()), found
    assert jaxckpt.verify(tmp_path / "run/00000200").ok
