"""The comparison of benchmark results finds a slowdown, and ignores a contender that became faster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.child

ROOT = Path(__file__).parents[2]
BEFORE = max((ROOT / "benchmarks/results").glob("quick-*.json"))


def compare(tmp_path: Path, results: Any) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    command = [sys.executable, str(ROOT / "benchmarks/regressions.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def divided(results: Any, factor: float, contenders: set[str]) -> Any:
    """The results, as if these contenders took less time in the saves of the first case."""
    for name, found in results["runs"][0]["spreads"]["save"].items():
        if name in contenders:
            found["times_jaxckpt"] = [ratio / factor for ratio in found["times_jaxckpt"]]
    return results


def test_only_a_slowdown_against_most_contenders_is_a_failure(tmp_path: Path) -> None:
    results = json.loads(BEFORE.read_text())
    contenders = set(results["runs"][0]["contenders"])
    assert compare(tmp_path, results).returncode == 0
    assert compare(tmp_path, divided(json.loads(BEFORE.read_text()), 9, {"safetensors"})).returncode == 0
    slow = compare(tmp_path, divided(results, 9, contenders))
    assert slow.returncode == 1
    assert slow.stdout.count("over the limit") == 1
    assert "factor of 3" in slow.stderr


def test_a_failed_case_and_an_empty_comparison_are_failures(tmp_path: Path) -> None:
    results = json.loads(BEFORE.read_text())
    results["runs"][0]["failed"] = "exit [1]"
    assert "failed: exit [1]" in compare(tmp_path, results).stderr
    assert "no case is in both files" in compare(tmp_path, {**results, "runs": []}).stderr
