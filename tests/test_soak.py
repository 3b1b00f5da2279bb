"""A training loop is killed and resumed 50 times: no step is lost, no data is left over, and retention rules hold."""

from __future__ import annotations

from pathlib import Path

from processes import PROGRAMS, RunPython


def test_killed_50_times(run_python: RunPython, tmp_path: Path) -> None:
    said = run_python(PROGRAMS / "killed_training.py", args=[str(tmp_path / "steps"), "50", "500", "0"], timeout=280)
    assert said.startswith("killed 50 times")
