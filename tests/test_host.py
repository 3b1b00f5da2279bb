"""Cores and memory of this process's host."""

from __future__ import annotations

import os
from pathlib import Path

import processes
import pytest

from jaxckpt import Options, _options
from jaxckpt.errors import InputError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x16)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,8(x2),1"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8"}, 1),  # a batch script, in which srun has started nothing
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_processes_of_a_host(environment: dict[str, str], processes: int) -> None:
    assert _options.local_processes(environment) == processes


def test_cores_are_shared_or_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert [_options.own_cores(processes) for processes in (1, 8, 100)] == [64, 8, 1]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(12))
    assert _options.own_cores(8) == 12


@pytest.mark.parametrize("limited", ["job_7/step_0/task_0", "job_7", "."])
@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_limit_of_a_batch_job(tmp_path: Path, version: int, limited: str) -> None:
    """Slurm and systemd limit a cgroup below the root."""
    root = tmp_path / "memory" if version == 1 else tmp_path
    (root / "job_7" / "step_0" / "task_0").mkdir(parents=True)
    name = "memory.limit_in_bytes" if version == 1 else "memory.max"
    (root / "job_7" / "step_0" / name).write_text("max\n")
    (root / limited / name).write_text(f"{GIB}\n")
    own = tmp_path / "own"
    own.write_text(f"3:cpu,cpuacct:/\n{'4:memory' if version == 1 else '0:'}:/job_7/step_0/task_0\n")
    assert _options.memory_bytes(tmp_path, own) == GIB


def test_without_cgroups_the_limit_is_the_memory(tmp_path: Path) -> None:
    assert _options.memory_bytes(tmp_path, tmp_path / "none") > GIB


def test_processes_that_a_launcher_started_share_the_default(run_python: processes.RunPython) -> None:
    """In a new process, because the default is determined by the import."""
    shown = "from jaxckpt import Options; from jaxckpt._options import THREADS; print(Options().host_bytes, THREADS)"
    host_bytes, threads = map(int, run_python(shown, env={"LOCAL_WORLD_SIZE": "64"}).split())
    assert (host_bytes, threads) == (256 << 20, 2)


def test_a_size_for_the_host_is_shared(run_python: processes.RunPython) -> None:
    """The processes of a Slurm job whose hosts differ have equal shares, as shared reads require."""
    show = "from jaxckpt import Options as O; print(O.process_share(10 << 30), O.process_share(3), O().host_bytes)"
    for launcher, share, least in (
        ({}, 10 << 30, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,8(x2)"}, (10 << 30) // 8, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, (10 << 30) // 4, 1),
    ):
        one, small, default = map(int, run_python(show, env=launcher).split())
        assert (one, small) == (share, least)
        assert default >= 256 << 20, "the default is already a share"
    with pytest.raises(InputError, match="bytes_per_host must be a whole number above zero, found 0"):
        Options.process_share(0)
    for wrong in (True, 1.5, "1", None):
        with pytest.raises(InputError, match="bytes_per_host must be a whole number"):
            Options.process_share(wrong)  # pyright: ignore[reportArgumentType]
