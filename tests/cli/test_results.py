"""The JSON of `verify`, `diff` and `plan`; their tables are in test_cli."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
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
    silent = (
        run("verify", "run1", "--no-progress", code=1),
        run("diff", "run1@100", "run1@200", "--no-progress", code=1),
        run("convert", "run1@100", "copy.npz", "--select", "params/wte", "--no-progress"),
        run("report", "run1@100", "-o", "page.html", "--histograms", "--no-progress"),
        run("cat", "run1@100", "params/wte", "--save", "wte.npy", "--no-progress"),
    )
    assert {result.stderr for result in silent} == {""}
    assert run("convert", "run1@100", "copy.npz", "--select", "params/wte", "--overwrite").stderr.startswith(
        "jaxckpt: convert: "
    )
    assert run("cat", "run1@100", "params/wte", "--save", "wte.npy", "--overwrite").stderr.startswith(
        "jaxckpt: cat: 4.0 KiB of 4.0 KiB"
    )


def test_only_the_containers_differ(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": [np.zeros(2)], "n": {}})
    jaxckpt.save(tmp_path / "b", {"w": (np.zeros(2),), "n": []})
    compared = run("diff", str(tmp_path / "a"), str(tmp_path / "b"), code=1)
    assert compared.stdout == "1 leaf equal, bit by bit; the containers differ\n"
    assert run("diff", str(tmp_path / "a"), str(tmp_path / "b"), "--leaves-only").stdout == compared.stdout
    delta = jaxckpt.diff(tmp_path / "a", tmp_path / "b")
    assert not delta.identical
    assert delta.differing == ()
    assert str(delta) == f"a = {tmp_path}/a\nb = {tmp_path}/b\n1 leaf equal, bit by bit; the containers differ"
    jaxckpt.save(tmp_path / "c", {"w": [np.ones(2)]})
    assert run("diff", str(tmp_path / "a"), str(tmp_path / "c"), "--leaves-only", code=1).stdout.startswith(
        "1 of 1 leaf"
    )


@pytest.mark.parametrize("width", [40, 60, 80])
def test_layers_stay_distinct_in_narrow_tables(tmp_path: Path, width: int) -> None:
    shapes = (3, 4, 5)  # so that no layers share a row of a plan
    for path, value in (("a", 0.0), ("b", 1.0)):
        layers = {f"transformer_block_{n}": {"norm_scale_parameter": np.full(shapes[n], value)} for n in range(3)}
        jaxckpt.save(tmp_path / path, {"params": {"decoder": layers}})
    a, b = (str(tmp_path / path) for path in "ab")
    planned = run("plan", a, "--mesh", "x=1", width=width).stdout.partition("\nleaf ")[2]
    compared = run("diff", a, b, width=width, code=1).stdout.partition("\nleaf ")[2]
    for table in (planned, compared):
        names = [line.split()[0] for line in table.splitlines()[1:]]
        assert len(set(names)) == 3
        assert all(str(n) in name for n, name in enumerate(names)), names


def test_a_deep_tree_in_a_narrow_terminal(tmp_path: Path) -> None:
    tree: dict[str, object] = {"leaf": np.zeros(2), "other": np.zeros(3)}
    for level in reversed(range(30)):
        tree = {f"level_{level}": tree, "leaf": np.zeros(2)}
    jaxckpt.save(tmp_path / "deep", tree)
    for width in (50, 80):
        shown = run("show", str(tmp_path / "deep"), width=width).stdout.splitlines()
        assert max(map(len, shown)) <= width
        names = [line.split()[0] for line in shown[3:] if re.search(r"\blev|…", line)]
        assert len(set(names)) == len(names) == 30, names


@pytest.mark.child
def test_worker_processes_find_the_same(here: Path, tmp_path: Path) -> None:
    for command in (("verify", "run1"), ("diff", "small", "other")):
        assert run_json(*command, "--workers", "2", code=1) == run_json(*command, code=1)
    run("convert", "small", str(tmp_path / "many"), "--workers", "2")
    assert jaxckpt.diff("small", tmp_path / "many").identical
    refused = run("convert", "small", str(tmp_path / "x.npz"), "--workers", "2", code=2)
    assert refused.stderr.startswith("jaxckpt: --workers has no effect on format 'npz', which one process writes")
