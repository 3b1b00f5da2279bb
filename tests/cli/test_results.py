"""The JSON of `verify`, `diff` and `plan`; their tables are in test_cli."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run, run_json

import jaxckpt
from jaxckpt._cli import inputs


def test_json_of_plan(here: Path) -> None:
    found = run_json(
        "plan", "run1/00000300", "--mesh", "model=8", "--devices-per-process", "4", "--select", "params/wte"
    )
    plan = jaxckpt.open("run1/00000300").plan(mesh={"model": 8}, devices_per_process=4, select="params/wte")
    assert (found["path"], found["mesh"]) == ("run1/00000300", {"model": 8})
    for name in ("needed_bytes", "read_bytes", "over_read", "requests", "peak_host_bytes"):
        assert found[name] == getattr(plan, name)
    assert found["processes"][1]["device_bytes"] == {str(device): 512 for device in range(4, 8)}
    assert found["leaves"] == [
        {
            "path": "params/wte",
            "dtype": "float32",
            "shape": [64, 16],
            "saved": {"spec": "P('model')", "on": "data=2×model=4"},
            "wanted": {"spec": "P('model')", "on": "model=8"},
        }
    ]


def test_json_of_verify_and_diff(here: Path) -> None:
    found = run_json("verify", "small")
    assert (found["ok"], found["quick"], found["problems"], found["leaves"]) == (True, False, [], 4)
    assert found["checked_bytes"] > 0
    (problem,) = run_json("verify", "run1/00000500", "--quick", code=1)["problems"]
    assert (problem["leaf"], problem["box"], problem["object"]) == (None, None, "manifest.json")
    found = run_json("diff", "small", "other", code=1)
    assert (found["a"], found["identical"], found["same_structure"], found["leaves"]) == ("small", False, False, 5)
    i, new, w = found["differing"]
    assert (i["a"], i["b"], new["a"]) == ("int", None, None)
    assert w == {
        "path": "w",
        "a": "numpy float64[2]",
        "b": "numpy float64[2]",
        "size": 2,
        "differing": 1,
        "max_abs": 0.5,
        "max_rel": 1 / 3,
    }
    assert run_json("diff", "small", "other", "--select", "z")["identical"]


def test_a_long_command_prints_lines_in_a_pipe(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("verify", "run1", code=1).stderr == ""
    monkeypatch.setattr(inputs, "LINE_SECONDS", 0.0)
    verified, compared = run("verify", "run1", code=1), run("diff", "run1@100", "run1@200", code=1)
    assert verified.stderr.startswith("jaxckpt: verify 00000100: ")
    assert "jaxckpt: verify 00000300: " in verified.stderr
    assert compared.stderr.startswith("jaxckpt: diff: ")
