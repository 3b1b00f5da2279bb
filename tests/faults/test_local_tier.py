"""A host is lost at each phase of a local save: jobs of four, three and two processes restore the right bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import PROGRAMS, RunPython

pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.mark.parametrize(
    ("victim", "phase"), [(1, "between the barriers"), (0, "flushing"), (2, "writing"), (3, "sweeping")]
)
def test_a_lost_host(run_python: RunPython, tmp_path: Path, victim: int, phase: str) -> None:
    crashes = [{"victim": victim, "phase": phase, "counts": [4, 3, 2]}]
    printed = run_python(PROGRAMS / "local_lives.py", args=[str(tmp_path / "lives"), json.dumps(crashes)], timeout=280)
    rounds = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(rounds) == 3
    for one in rounds:
        assert one["struck"]
        assert None not in one["found"], one["log"]
        assert all(said["exact"] and said.get("metrics", True) and said.get("states", True) for said in one["found"])
        (restored,) = {said["restored"] for said in one["found"]}
        # With two processes, a second host is missing. copies=1 covers only one, so the storage's step is expected.
        least = one["promised"] if one["count"] > 2 else one["promised"] // 2 * 2
        assert restored >= least, one
