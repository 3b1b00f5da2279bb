"""A training loop killed 50 times, and resumed each time: nothing is lost, nothing is left over, the rules hold."""

from __future__ import annotations

from pathlib import Path

from processes import PROGRAMS, RunPython


def test_killed_50_times(run_python: RunPython, tmp_path: Path) -> None:
    said = run_python(PROGRAMS / "killed_training.py", args=[str(tmp_path / "steps"), "50", "500", "0"], timeout=200)
    assert said.startswith("killed 50 times")
