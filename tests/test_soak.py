"""A training loop is killed and resumed many times: no step is lost, no data is left over, and retention rules hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import PROGRAMS, RunPython


def test_killed_many_times(run_python: RunPython, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills = 50 if request.config.getoption("--campaign") else 15
    args = [str(tmp_path / "steps"), str(kills), str(10 * kills), "0"]
    said = run_python(PROGRAMS / "killed_training.py", args=args, timeout=280)
    assert said.startswith(f"killed {kills} times")
