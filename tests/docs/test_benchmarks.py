"""Benchmarks: the comparison of results finds a slowdown, and the benchmark of phases times functions that exist."""

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


def slower(factor: float, *, cases: int = 1, contender: str = "") -> Any:
    """The stored results, with slower saves in the first cases, compared with one contender or with all of them."""
    results = json.loads(BEFORE.read_text())
    for run in results["runs"][:cases]:
        for name, found in run["spreads"]["save"].items():
            if contender in name:
                found["times_jaxckpt"] = [ratio / factor for ratio in found["times_jaxckpt"]]
    return results


def test_only_a_slowdown_against_most_contenders_is_a_failure(tmp_path: Path) -> None:
    assert compare(tmp_path, slower(1)).returncode == 0
    assert compare(tmp_path, slower(9, contender="safetensors")).returncode == 0
    one_case = compare(tmp_path, slower(9))
    assert (one_case.returncode, one_case.stdout.count("over the limit of 5")) == (1, 1)
    assert "(e) save: slower than on" in one_case.stderr


def test_all_saves_have_a_narrower_limit(tmp_path: Path) -> None:
    assert compare(tmp_path, slower(3)).returncode == 0
    all_cases = compare(tmp_path, slower(3, cases=6))
    assert (all_cases.returncode, all_cases.stdout.count("over the limit")) == (1, 1)
    assert "save, median: slower than on" in all_cases.stderr


def test_a_failed_case_and_an_empty_comparison_are_failures(tmp_path: Path) -> None:
    results = json.loads(BEFORE.read_text())
    results["runs"][0]["failed"] = "exit [1]"
    assert "failed: exit [1]" in compare(tmp_path, results).stderr
    assert "no case is in both files" in compare(tmp_path, {**results, "runs": []}).stderr


def test_every_phase_of_a_restore_is_timed(tmp_path: Path) -> None:
    script, result = str(ROOT / "benchmarks/phases.py"), tmp_path / "phases.json"
    command = [sys.executable, script, *"--quick --workload b --rounds 1 --dir".split(), str(tmp_path)]
    subprocess.run([*command, "--json", str(result)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    phases = json.loads(result.read_text())["median_seconds"]["b"]["restore"]
    assert 0 < sum(seconds for phase, seconds in phases.items() if phase != "total") <= 1.001 * phases["total"]
    assert min(phases.values()) >= 0, "no time is counted twice"
