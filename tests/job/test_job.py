"""The job: numbers of processes, and the coordination service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from processes import PASSED, PROGRAMS, RunProcesses, RunPython

import jaxckpt


def test_processes_have_the_numbers_of_their_devices(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = PROGRAMS / "renumbered_job.py"
    done = run_processes(program, processes=4, devices_per_process=2, args=str(tmp_path), timeout=240)
    assert all("the same bits" in one.stdout for one in done)


def test_the_service_may_stop_in_another_process_than_process_0(run_processes: RunProcesses, tmp_path: Path) -> None:
    args = {"path": str(tmp_path / "ckpt"), "folder": str(tmp_path), "timeout": 3.0}
    program = PROGRAMS / "renumbered_stopped.py"
    done = run_processes(program, processes=4, devices_per_process=1, args=args, timeout=120)
    reports: list[dict[str, Any]] = [json.loads(one.stdout.splitlines()[-1].removeprefix("report ")) for one in done]
    assert [one["index"] for one in reports if one["stops"]] == [1]
    for one in reports:
        assert one["stops"] or (one["said"].startswith("Peer") and one["seconds"] < 40), reports
        assert one["there"] in ([0], [1])
        assert one["after"] == "", reports


def test_a_job_whose_processes_are_not_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host of a TPU slice."""
    jax.devices()
    jaxckpt.save(tmp_path / "c", {"w": np.arange(3)})
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for call in (
        lambda: jaxckpt.save(tmp_path / "d", {"w": np.arange(3)}),
        lambda: jaxckpt.restore(tmp_path / "c"),
        lambda: jaxckpt.Checkpointer(tmp_path / "run"),
    ):
        with pytest.raises(
            jaxckpt.errors.InputError, match=r"4 processes, but .* not connected: call jax\.distributed\.init"
        ):
            call()
    assert jaxckpt.load_numpy(tmp_path / "c")["w"].tolist() == [0, 1, 2]


def test_a_job_of_one_process_starts_no_backend(run_python: RunPython, tmp_path: Path) -> None:
    run_python(
        """
        import sys, jaxckpt, numpy
        from jax._src import xla_bridge
        jaxckpt.save(sys.argv[1], {"w": numpy.arange(3), "step": 7})
        assert jaxckpt.restore(sys.argv[1])["step"] == 7
        assert not xla_bridge.backends_are_initialized()
        print("all checks passed")
        """,
        args=[str(tmp_path / "c")],
        word=PASSED,
    )


def test_processes_that_share_no_devices(run_processes: RunProcesses, tmp_path: Path) -> None:
    done = run_processes(
        """
        import jaxckpt, numpy
        jax.process_count = lambda: 1  # each process has a separate backend
        try:
            jaxckpt.save(args, {"w": numpy.arange(3)})
        except jaxckpt.errors.InputError as error:
            print(error)
        """,
        processes=2,
        devices_per_process=1,
        args=str(tmp_path / "c"),
    )
    for one in done:
        assert "connected 2 processes, but JAX's default devices belong to 1" in one.stdout
