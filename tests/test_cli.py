"""The command line: what it prints at each width, its JSON, its exit codes, and that it starts no JAX backend."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import mindspore_files
import ml_dtypes
import numpy as np
import processes
import pytest
import servers
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import _manifest as manifests
from jaxckpt._cli import main
from jaxckpt._options import Options
from jaxckpt._place import store_at

ROOT = Path(__file__).parent.parent
SAVED = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
TIMEOUT = 120


def backdate(path: str) -> None:
    """Let a checkpoint have been saved long ago, so that its age has one width."""
    store = store_at(path, Options())
    manifest, content = manifests.load(store)
    dated = manifests.msgspec.structs.replace(manifest, created=SAVED.isoformat())
    store.publish(manifest.data, manifests.encode(dated), content, sync=False)


def state(step: int) -> Any:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(value: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    layers = [
        {"bias": put(jnp.full(8, n, jnp.bfloat16), "model"), "kernel": put(jnp.ones((8, 8)) * n, "data", "model")}
        for n in range(12)
    ]
    embedding = put(jnp.arange(1024, dtype=jnp.float32).reshape(64, 16), "model")
    return {
        "data": np.arange(10),
        "opt_state": {"mu": put(jnp.ones((64, 16)), "model")},
        "params": {
            "a_module_of_a_rather_long_name_for_normalisation": put(jnp.ones(8)),
            "layers": layers,
            "wte": embedding,
        },
        "rng": jax.random.key(7),
        "step": step,
        "text": "x" * 100,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, beside what killed jobs and other libraries leave."""
    folder = tmp_path_factory.mktemp("cli")
    with contextlib.chdir(folder):
        with jaxckpt.Checkpointer("run1", components={"opt_state": 1}, background=False) as steps:
            for step in (100, 200, 300):
                steps.save(step, state(step), metrics={"loss": 1 / step, "accuracy": 0.5 + step / 1000, "bad": np.nan})
        for step in (100, 200, 300):
            backdate(f"run1/{step:08d}")
        jaxckpt.convert("run1/00000300", "run1/exported.safetensors", select="params")
        Path("run1/00000400", f"data-{'0' * 32}").mkdir(parents=True)
        Path("run1/00000500").mkdir()
        Path("run1/00000500/manifest.json").write_text("{}")
        Path("run1/logs").mkdir()
        Path("empty").mkdir()
        jaxckpt.save("small", {"w": np.array([1.0, np.nan]), "z": np.complex64(1 + 2j), "b": b"\x00", "i": 1 << 80})
        jaxckpt.save("other", {"w": np.array([1.5, np.nan]), "z": np.complex64(1 + 2j), "b": b"\x00", "new": 1})
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return made


def run(*args: str, width: int | None = None, code: int = 0, stdin: str | None = None) -> Result:
    result = CliRunner(env={"COLUMNS": str(width) if width else None}).invoke(
        main, args, input=stdin, prog_name="jaxckpt"
    )
    assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}"
    return result


def run_json(*args: str, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code).stdout)


def command(*args: str, **settings: Any) -> subprocess.Popen[str]:
    """A real process, in which no JAX backend can start."""
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent"}
    return subprocess.Popen([sys.executable, "-m", "jaxckpt", *args], env=env, text=True, **settings)


def days() -> str:
    return f"{(datetime.datetime.now(datetime.UTC) - SAVED).days} d"


# Tables ---------------------------------------------------------------------------------------------------

TABLES = {
    "ls": ("ls", "run1"),
    "show": ("show", "run1/00000300"),
    "plan": ("plan", "run1/00000300", "--mesh", "data=4,model=2", "--devices-per-process", "4"),
    "diff": ("diff", "run1/00000100", "run1/00000300"),
}


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_exactly_these(here: Path, name: str, width: int) -> None:
    shown = run(*TABLES[name], width=width, code=name == "diff").stdout
    expected = (ROOT / f"tests/cli_output/{name}-{width}.txt").read_text()
    assert shown.replace(days(), "DAYS d") == expected
    assert max(map(len, shown.splitlines())) <= width


def test_show_at_other_widths(here: Path) -> None:
    narrow = run("show", "run1/00000300", width=50).stdout.splitlines()
    assert max(map(len, narrow)) <= 50
    piped = run("show", "run1/00000300", "--all").stdout
    assert "a_module_of_a_rather_long_name_for_normalisation" in piped
    assert "…" not in "".join(line for line in piped.splitlines() if "text" not in line)
    assert piped.count("kernel") == 12


def test_show_narrows_down(here: Path) -> None:
    lines = run("show", "run1/00000300", "--select", "params/**/kernel", "--select", "params/wte").stdout.splitlines()
    assert lines[1].startswith("  jaxckpt: 13 of 31 leaves, 7.0 KiB of 11.3 KiB, saved ")
    assert [line.split()[0] for line in lines[6:]] == ["params/", "layers/", "0", "kernel", "wte"]
    lines = run("show", "run1/00000300", "--depth", "1").stdout.splitlines()
    assert [line.split()[0] for line in lines[6:]] == ["data", "opt_state/", "params/", "rng", "step", "text"]


def test_steps_of_orbax(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path / "theirs", options=best) as manager:
        for step in (9, 10):
            args = ocp.args.StandardSave({"w": jnp.full(4, step, jnp.float32)})
            manager.save(step, args=args, metrics={"loss": 1 / step})
        manager.wait_until_finished()
    path = str(tmp_path / "theirs")
    found = run_json("ls", path)["checkpoints"]
    told = [(entry["name"], entry["format"], entry["step"], entry["leaves"], entry["metrics"]) for entry in found]
    assert told == [("9", "orbax", 9, 1, {"loss": 1 / 9}), ("10", "orbax", 10, 1, {"loss": 0.1})]
    assert [entry["name"] for entry in run_json("ls", f"{path}/9")["checkpoints"]] == ["9"]
    assert run("cat", f"{path}/9", "w[0]").stdout == "9.0\n"
    run("rm", f"{path}/9", "--yes", code=2)


def test_what_is_wrong_with_a_step_is_told_beside_the_list(here: Path) -> None:
    told = run("ls", "run1").stderr.splitlines()
    assert told[0] == "00000400: a save to it is going on, or never finished"
    assert told[1].startswith("00000500: run1/00000500/manifest.json is damaged")


def test_ls_changes_nothing(here: Path) -> None:
    """A Checkpointer would sweep the folder of the save that never finished."""

    def files() -> list[tuple[str, int]]:
        return [(str(path), path.lstat().st_mtime_ns) for path in sorted(Path("run1").rglob("*"))]

    before = files()
    assert any("data-0000" in path for path, _ in before)
    run("ls", "run1")
    run("ls", "run1", "--json")
    assert files() == before


def test_names_in_a_checkpoint_cannot_drive_the_terminal(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "bad", {"\x1b[2J\nw": np.zeros(3), "日本語" * 9: np.zeros(2)}, metadata="\x1b]0;x\x07")
    shown = run("show", str(tmp_path / "bad"), width=60).stdout
    assert "\x1b" not in shown
    assert "\\x1b[2J\\nw" in shown
    wide = next(line for line in shown.splitlines() if "日" in line)
    assert len(wide) + len(re.findall("[日本語]", wide)) <= 60
    assert "\x1b" not in run("cat", str(tmp_path / "bad"), "\x1b[1Jq", code=2).stderr


@pytest.mark.parametrize("n", [1, 2, 3])
def test_alike_containers_are_one_row_from_three_on(tmp_path: Path, n: int) -> None:
    leaf = np.zeros(4)
    jaxckpt.save(tmp_path / "c", {"blocks": [{"w": leaf} for _ in range(n)], "w1": leaf, "w2": leaf, "w3": leaf})
    shown = run("show", str(tmp_path / "c")).stdout
    assert ("0 … 2/" in shown) == (n == 3)
    assert shown.count("float64[4]") == (n if n < 3 else 1) + 3


def test_unlike_containers_are_not(tmp_path: Path) -> None:
    blocks = [{"w": np.zeros(4)}, {"w": np.zeros(4)}, {"w": np.zeros(4, np.float32)}, {"v": np.zeros(4)}]
    jaxckpt.save(tmp_path / "c", blocks)
    assert run("show", str(tmp_path / "c")).stdout == run("show", str(tmp_path / "c"), "--all").stdout


def test_a_tree_that_is_one_leaf(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", np.arange(6).reshape(2, 3))
    assert "(the tree itself)  int64[2, 3]" in run("show", str(tmp_path / "c")).stdout
    assert run("cat", str(tmp_path / "c"), "[1, ::2]").stdout == "[3, 5]\n"


# JSON -----------------------------------------------------------------------------------------------------


def test_json_of_ls(here: Path) -> None:
    found = run_json("ls", "run1")
    assert found["path"] == "run1"
    first, *_, unfinished, damaged, exported = found["checkpoints"]
    assert first == {
        "name": "00000100",
        "path": "run1/00000100",
        "status": "ok",
        "format": "jaxckpt",
        "step": 100,
        "leaves": 30,
        "bytes": jaxckpt.open("run1/00000100").nbytes,
        "created": SAVED.isoformat(),
        "metrics": {"loss": 0.01, "accuracy": 0.6, "bad": None},
        "dropped": ["opt_state"],
        "problem": None,
    }
    assert (unfinished["status"], unfinished["step"], unfinished["format"]) == ("unfinished", 400, None)
    assert damaged["status"] == "damaged"
    assert "does not match the SHA-256" in damaged["problem"]
    assert (exported["format"], exported["created"], exported["step"]) == ("safetensors", None, None)
    (alone,) = run_json("ls", "run1/00000300")["checkpoints"]
    assert alone["name"] == "00000300"


def test_json_of_show(here: Path) -> None:
    found = run_json("show", "run1/00000300", "--select", "params/layers/1", "--select", "step")
    assert {**found, "save_id": "", "libraries": "", "leaves": ""} == {
        "path": "run1/00000300",
        "format": "jaxckpt",
        "save_id": "",
        "created": SAVED.isoformat(),
        "libraries": "",
        "metadata": None,
        "step": 300,
        "metrics": {"loss": 1 / 300, "accuracy": 0.8, "bad": None},
        "dropped": [],
        "bytes": jaxckpt.open("run1/00000300").nbytes,
        "leaves": "",
    }
    bias, kernel, step = found["leaves"]
    assert kernel == {
        "path": "params/layers/1/kernel",
        "kind": "jax",
        "dtype": "float32",
        "shape": [8, 8],
        "bytes": 256,
        "spec": [["data"], ["model"]],
        "mesh": {"data": 2, "model": 4},
        "layout": "P('data', 'model') on data=2×model=4",
        "value": None,
    }
    assert (bias["dtype"], bias["spec"]) == ("bfloat16", [["model"]])
    assert (step["kind"], step["value"], step["shape"], step["mesh"]) == ("int", 300, None, None)


def test_json_of_cat(here: Path) -> None:
    cat = lambda *args: run_json("cat", *args)  # noqa: E731
    assert cat("small", "w") == {
        "path": "small",
        "leaf": "w",
        "kind": "numpy",
        "dtype": "float64",
        "shape": [2],
        "value": [1.0, "nan"],
    }
    assert cat("small", "z")["value"] == [1.0, 2.0]
    assert (cat("small", "b")["value"], cat("small", "b")["dtype"]) == ("AA==", None)
    assert cat("small", "i")["value"] == 1 << 80
    assert cat("run1/00000300", "params/layers/2/bias[1:3]")["value"] == [2.0, 2.0]
    assert cat("run1/00000300", "rng")["value"] == [0, 7]


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


# Commands -------------------------------------------------------------------------------------------------


def test_cat(here: Path) -> None:
    wte = np.arange(1024, dtype=np.float32).reshape(64, 16)
    for index in ("[3, ::5]", "[-1]", "[..., 0]", "[60:, 14:16]", "[:2,]"):
        shown = run("cat", "run1/00000300", f"params/wte{index}").stdout
        expected = wte[eval(f"np.s_{index}")]
        assert shown == np.array2string(expected, max_line_width=80, separator=", ") + "\n"
    assert run("cat", "run1/00000300", "params/wte[ 2 , 3 ]").stdout == "35.0\n"
    assert run("cat", "run1/00000300", "step").stdout == "300\n"
    assert run("cat", "small", "b").stdout == "b'\\x00'\n"
    assert run("cat", "run1/00000300", "params/layers/3/bias[0]").stdout == "3\n"


def test_cat_of_a_leaf_that_looks_like_an_index(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w[0]": np.arange(3), "w": np.zeros(1)})
    assert run("cat", str(tmp_path / "c"), "w[0]").stdout == "[0, 1, 2]\n"
    assert run("cat", str(tmp_path / "c"), "w[0][1]").stdout == "1\n"


@pytest.mark.parametrize(
    ("leaf", "told"),
    [
        ("params/wtf", "did you mean 'params/wte'?"),
        ("params", "leaves below it"),
        ("params/wte[64]", "leaf 'params/wte' of shape (64, 16): index 64 is out of bounds"),
        ("params/wte[0, 0, 0]", "too many indices"),
        ("params/wte[a]", "expected integers, slices and ..."),
        ("params/wte[]", "expected integers, slices and ..."),
        ("params/wte[::0]", "slice step cannot be zero"),
        ("step[0]", "takes no index"),
    ],
)
def test_cat_of_what_is_not_there(here: Path, leaf: str, told: str) -> None:
    assert told in run("cat", "run1/00000300", leaf, code=2).stderr


def test_cat_reads_no_more_than_people_read(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w": np.zeros((5, 1 << 20))})
    assert "w is 40.0 MiB, too much to print" in run("cat", str(tmp_path / "c"), "w", code=2).stderr
    assert "[0., 0., 0.," in run("cat", str(tmp_path / "c"), "w[1]").stdout


@pytest.mark.parametrize("index", [None, "[1:3, ::2]", "[2, 1]"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_cat_saves_npy(tmp_path: Path, dtype: str, index: str | None) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = (np.arange(20).reshape(5, 4) % 7).astype(kind)
    jaxckpt.save(tmp_path / "c", {"w": array})
    wanted = array if index is None else array[eval(f"np.s_{index}")]
    result = run("cat", str(tmp_path / "c"), f"w{index or ''}", "--save", str(tmp_path / "w.npy"))
    loaded = np.load(tmp_path / "w.npy", allow_pickle=False)
    assert loaded.shape == wanted.shape
    assert np.array_equal(loaded.astype(kind), wanted)
    assert loaded.dtype == {"bfloat16": "float32", "float8_e4m3fn": "float32", "int4": "int8"}.get(dtype, dtype)
    assert ("without loss" in result.stderr) == (loaded.dtype != kind)
    assert [path.name for path in tmp_path.iterdir() if "npy" in path.name] == ["w.npy"]


def test_cat_saves_odd_shapes(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"empty": np.zeros((0, 3)), "number": np.float64(2), "python": 3, "text": "a"})
    for leaf, shape in (("empty", (0, 3)), ("number", ()), ("python", ())):
        run("cat", str(tmp_path / "c"), leaf, "--save", str(tmp_path / "w.npy"))
        assert np.load(tmp_path / "w.npy").shape == shape
    assert "which is no array" in run("cat", str(tmp_path / "c"), "text", "--save", "w.npy", code=2).stderr


def test_plan_by_rules(here: Path) -> None:
    specs = ["--specs", 'params/**/kernel=P(None, ("data", "model"))', "--specs", "P()", "--specs", "params=P('data')"]
    found = run_json("plan", "run1/00000300", "--mesh", "data=2,model=4", *specs)
    wanted = {leaf["path"]: leaf["wanted"]["spec"] for leaf in found["leaves"]}
    assert wanted["params/layers/0/kernel"] == "P(None, ('data', 'model'))"
    assert wanted["params/layers/0/bias"] == wanted["params/wte"] == "P()"
    found = run_json("plan", "run1/00000300", "--mesh", "data=2,model=4", "--specs", "params/wte=P('data')")
    wanted = {leaf["path"]: leaf["wanted"]["spec"] for leaf in found["leaves"]}
    assert wanted["params/wte"] == "P('data')"
    assert wanted["params/layers/0/kernel"] == "P('data', 'model')"  # its own


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--mesh", "data"], "expected axis sizes"),
        (["--mesh", "data=0"], "expected axis sizes"),
        (["--mesh", "data=2,data=2"], "expected axis sizes"),
        (["--mesh", "data=2", "--specs", "wte"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wte=P(1)"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wte=P(__import__('os'))"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wtf=P()"], "no array is there or below"),
        (["--mesh", "data=2", "--specs", "params/wte=P('x')"], "'x'"),
        (["--mesh", "data=3"], "does not divide by 3"),
        ([], "Missing option '--mesh'"),
    ],
)
def test_plan_of_what_cannot_be(here: Path, args: list[str], told: str) -> None:
    assert told in run("plan", "run1/00000300", *args, code=2).stderr


def test_convert(here: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    told = run("convert", "run1/00000300", out, "--mesh", "model=4", "--specs", "weights/wte=P(None, 'model')",
               "--select", "params", "--rename", "params=weights", "--chunk-bytes", "1KiB").stdout  # fmt: skip
    assert told == f"run1/00000300 → {out}\n"
    made = jaxckpt.open(out)
    assert set(made.leaves) == {
        f"weights{path[6:]}" for path in jaxckpt.open("run1/00000300") if path.startswith("params")
    }
    assert made["weights/wte"].spec == PartitionSpec(None, "model")
    assert made["weights/layers/0/kernel"].spec == PartitionSpec(None, "model")  # its own; no axis "data" is there
    assert np.array_equal(made["weights/wte"][...], np.arange(1024).reshape(64, 16))
    assert "--overwrite replaces it" in run("convert", "run1/00000300", out, code=2).stderr
    assert run_json("convert", "small", out, "--overwrite") == {"source": "small", "destination": out}
    assert run_json("diff", "small", out)["identical"]
    tensors = str(tmp_path / "w.safetensors")
    run("convert", "run1/00000300", tensors, "--select", "params")
    assert run_json("show", tensors)["format"] == "safetensors"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--chunk-bytes", "64kb"], "expected bytes"),
        (["--chunk-bytes", "0"], "expected bytes"),
        (["--rename", "params"], "expected OLD=NEW"),
        (["--specs", "P()"], "--specs needs --mesh"),
        (["--format", "pickle"], "expected one of"),
    ],
)
def test_convert_of_what_cannot_be(here: Path, tmp_path: Path, args: list[str], told: str) -> None:
    assert told in run("convert", "run1/00000300", str(tmp_path / "out"), *args, code=2).stderr
    assert not list(tmp_path.iterdir())


def test_report(here: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "report.html")
    rules = ["--mesh", "model=8", "--specs", "params/wte=P(None, 'model')"]
    assert run("report", "run1/00000300", "-o", output, *rules, "--histograms").stdout == f"{output}\n"
    page = Path(output).read_text(encoding="utf-8")
    specs = {"params": {"wte": PartitionSpec(None, "model")}}
    assert page == jaxckpt.report("run1/00000300", mesh={"model": 8}, specs=specs, histograms=True)
    assert run_json("report", "small", "-o", output) == {"path": "small", "output": output}
    assert "--specs needs --mesh" in run("report", "small", "-o", output, "--specs", "P()", code=2).stderr


def test_integrate_takes_the_four_arguments_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mindspore_files.tutorial(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = mindspore_files.DATA["merged"]
    for strategy, new in (("strategy.ckpt", "new"), ("strategy.json", "new.json-strategy")):
        assert run("integrate", "net.ckpt", new, strategy, "4").stdout == f"net.ckpt → {new}\n"
        merged = jaxckpt.load_numpy(new)
        expected = np.array(printed["moments.weight"], np.float32)
        np.testing.assert_array_equal(merged["moments.weight"], expected, strict=True)
        assert merged.keys() == printed.keys()
    assert "--overwrite replaces it" in run("integrate", "net.ckpt", "new", "strategy.ckpt", "4", code=2).stderr
    told = run_json("integrate", "--overwrite", "net.ckpt", "new", "strategy.ckpt", "4")
    assert told == {"source": "net.ckpt", "destination": "new"}


def test_integrate_without_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mindspore_files.tutorial(tmp_path)
    monkeypatch.chdir(tmp_path)
    told = run("integrate", "net.ckpt", "new", "strategy.ckpt", "3", code=3).stderr
    assert told.startswith("jaxckpt: the shards of 'weight' do not make up its [8, 8]:\n  [6:8, 0:8] is in no")
    assert not (tmp_path / "new").exists()
    run("integrate", "net.ckpt", "new", "strategy.ckpt", "0", code=2)


def test_rm_asks(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    jaxckpt.save(path, {"w": np.zeros(3)})
    for answer in ("n\n", "\n", ""):
        asked = run("rm", path, code=1, stdin=answer).stderr
        assert f"delete {path} (jaxckpt: 1 leaves, 24 B" in asked or f"delete {path} (jaxckpt: 1 leaf, 24 B" in asked
        assert "nothing was done" in asked
        assert jaxckpt.verify(path).ok
    assert run("rm", path, stdin="y\n").stdout == f"deleted {path}\n"
    assert not os.path.exists(path)


def test_rm_deletes_what_is_its_own_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"w": np.zeros(3)})
    (path / "notes.txt").write_text("mine")
    (path / "data-raw").mkdir()
    result = run_json("rm", str(path), "--yes")
    assert result == {"path": str(path), "left": ["data-raw", "notes.txt"]}
    assert (path / "notes.txt").read_text() == "mine"
    run("rm", str(path), "--yes", code=4)


def test_rm_refuses_what_is_not_ours(here: Path, tmp_path: Path) -> None:
    told = run("rm", "run1/exported.safetensors", "--yes", code=2).stderr
    assert told == "jaxckpt: " + os.path.abspath("run1/exported.safetensors") + (
        " is a checkpoint of format safetensors; rm deletes jaxckpt's only\n"
    )
    run("rm", "run1", "--yes", code=2)
    run("rm", "empty", "--yes", code=4)
    run("rm", "run1/00000500", "--yes", code=3)
    assert len(run_json("ls", "run1")["checkpoints"]) == 6


def test_a_step_is_taken_from_an_object_store(bucket: servers.Bucket) -> None:
    """By the environment's own settings, and out of the list that a Checkpointer keeps there."""
    url = f"{bucket.url}/run"
    with jaxckpt.Checkpointer(url, background=False) as steps:
        for step in (1, 2):
            steps.save(step, {"w": np.full(3, step)}, metrics={"loss": step})
        assert [entry["step"] for entry in run_json("ls", url)["checkpoints"]] == [1, 2]
        assert run("cat", f"{url}/00000002", "w[1]").stdout == "2\n"
        run("rm", f"{url}/00000002", "--yes")
        assert steps.steps() == [1]
    assert [entry["name"] for entry in run_json("ls", url)["checkpoints"]] == ["00000001"]
    assert set(store_at(url, Options()).folders()) == {"00000001"}
    run("ls", f"{bucket.url}/nothing", code=4)


# Exit codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["show", "small"], 0),
        (["verify", "run1/00000500"], 1),
        (["diff", "small", "other"], 1),
        (["show"], 2),
        (["show", "small", "--nonsense"], 2),
        (["show", "small", "--select", "nothing"], 2),
        (["show", "run1/00000500"], 3),
        (["ls", "run1/00000500"], 0),
        (["show", "nowhere"], 4),
        (["ls", "nowhere"], 4),
        (["ls", "empty"], 4),
        (["verify", "nowhere"], 4),
        (["diff", "small", "nowhere"], 4),
        (["show", "n" * 300], 5),
        (["cat", "small", "w", "--save", "nowhere/w.npy"], 5),
    ],
)
def test_exit_codes(here: Path, args: list[str], code: int) -> None:
    result = run(*args, code=code)
    if code > 1:
        assert not result.stdout
        assert result.stderr
        assert "Traceback" not in result.stderr


@contextlib.contextmanager
def extra_command(error: BaseException) -> Iterator[str]:
    """A command that fails in a way that no other should."""

    @main.command("broken")
    def broken() -> None:
        raise error

    try:
        yield "broken"
    finally:
        del main.commands["broken"]


def test_a_bug_is_told_as_one() -> None:
    with extra_command(RuntimeError("oh")) as name:
        assert (
            run(name, code=70).stderr == "jaxckpt: unexpected RuntimeError: oh\nThis is a bug; --debug shows where.\n"
        )


def test_debug_shows_the_traceback(here: Path) -> None:
    for args in (("--debug", "show", "nowhere"), ("show", "nowhere", "--debug")):
        told = run(*args, code=4).stderr
        assert "Traceback (most recent call last)" in told
        assert "_manifest.py" in told
        assert told.splitlines()[-1] == "jaxckpt: nowhere is not a checkpoint: there is nothing there"


def test_exit_codes_are_documented() -> None:
    documented = set(re.findall(r"^  (?:\s*)(\d+)\s", run("--help").stdout, re.MULTILINE))
    assert documented == {"0", "1", "2", "3", "4", "5", "70", "130", "141"}
    page = (ROOT / "docs/command-line.md").read_text()
    assert set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE)) == documented


def test_an_interrupt_amid_work() -> None:
    with extra_command(KeyboardInterrupt()) as name:
        run(name, code=130)


def test_an_interrupt_at_the_prompt(here: Path) -> None:
    with command("rm", "small", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        guard = threading.Timer(TIMEOUT, child.kill)
        guard.start()
        asked = ""
        while not asked.endswith(": "):
            letter = child.stderr.read(1)
            assert letter, asked
            asked += letter
        time.sleep(0.2)  # until it waits for the answer
        child.send_signal(signal.SIGINT)
        assert child.wait(TIMEOUT) == 130
        guard.cancel()
    assert jaxckpt.verify("small").ok


def test_a_reader_that_goes_away(here: Path) -> None:
    child = command("show", "run1/00000300", "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    child.stdout = None
    _, told = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, told) == (141, "")


# Processes ------------------------------------------------------------------------------------------------


def test_no_command_starts_a_backend(here: Path, tmp_path: Path) -> None:
    """JAX_PLATFORMS names a platform that does not exist: whatever asks for a device fails."""
    commands = [
        ["ls", "run1"],
        ["show", "run1/00000300"],
        ["cat", "run1/00000300", "params/wte[0]"],
        ["cat", "run1/00000300", "rng"],
        ["verify", "run1/00000300"],
        ["diff", "run1/00000300", "run1/00000300"],
        ["plan", "run1/00000300", "--mesh", "data=2,model=2", "--specs", "params/wte=P('data')"],
        ["plan", "small", "--mesh", "data=2,model=2"],
        ["convert", "run1/00000300", str(tmp_path / "a"), "--mesh", "model=2", "--chunk-bytes", "4KiB"],
        ["convert", "run1/00000300", str(tmp_path / "b.safetensors"), "--select", "params"],
        ["report", "run1/00000300", "-o", str(tmp_path / "c.html"), "--mesh", "model=2", "--histograms"],
        ["rm", str(tmp_path / "a"), "--yes"],
    ]
    assert {command[0] for command in commands} >= main.commands.keys() - {"integrate"}
    program = f"""
from jaxckpt._cli import main
for args in {commands!r}:
    assert not main(args, prog_name="jaxckpt", standalone_mode=False), args
import jax
try:
    jax.devices()
except RuntimeError:
    print("no backend is here")
"""
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, text=True, capture_output=True, timeout=TIMEOUT, check=False
    )
    assert done.stdout.endswith("no backend is here\n"), done.stdout + done.stderr


def complete(*words: str) -> list[str]:
    env = {"_JAXCKPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(main, [], env=env, prog_name="jaxckpt")
    return [line.partition(",")[2] for line in result.stdout.splitlines()]


def test_completion(here: Path) -> None:
    assert complete("jaxckpt", "c") == ["cat", "convert"]
    assert "--depth" in complete("jaxckpt", "show", "--")
    assert complete("jaxckpt", "cat", "run1/00000300", "pa") == ["params/"]
    assert complete("jaxckpt", "cat", "run1/00000300", "params/") == [
        "params/a_module_of_a_rather_long_name_for_normalisation",
        "params/layers/",
        "params/wte",
    ]
    assert complete("jaxckpt", "cat", "nowhere", "pa") == complete("jaxckpt", "cat", "s3://none/x", "pa") == [""]


def test_python_m_jaxckpt_in_a_pipe_is_plain(here: Path) -> None:
    with command("show", "run1/00000300", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        shown, told = child.communicate(timeout=TIMEOUT)
    assert (child.returncode, told) == (0, "")
    assert "\x1b" not in shown
    assert "params/" in shown


def test_colour_and_a_bar_are_for_terminals(here: Path) -> None:
    """On a pseudo-terminal of 70 columns."""
    assert "verify" in on_terminal(["verify", "run1/00000300"])
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = on_terminal(["show", "run1/00000300"], **extra)
        assert ("\x1b[1m" in shown) == coloured
        assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).split("\r\n"))) <= 70


def on_terminal(args: list[str], **extra: str) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 70, 0, 0))
    env = {**processes.environment(1), "JAX_PLATFORMS": "absent", "TERM": "xterm", **extra}
    child = subprocess.Popen([sys.executable, "-m", "jaxckpt", *args], env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    guard = threading.Timer(TIMEOUT, child.kill)
    guard.start()
    shown = b""
    with contextlib.suppress(OSError):  # EIO: it has ended
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert child.wait(TIMEOUT) == 0
    guard.cancel()
    return shown.decode()


# The page -------------------------------------------------------------------------------------------------


def commands_of(page: str) -> list[tuple[str, str]]:
    """(command line, what the page shows of its output) of every `$` line in the page's console blocks."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            found.append((line, shown))
    return found


def test_the_page_shows_what_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    (setup,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    env = {**processes.environment(8), "COLUMNS": "100", "PYTHON": sys.executable}
    subprocess.run([sys.executable, "-c", setup], cwd=tmp_path, env=env, timeout=TIMEOUT, check=True)
    commands = commands_of(page)
    assert {line.split()[1] for line, _ in commands if line.startswith("jaxckpt ")} >= main.commands.keys() - {
        "integrate"
    }
    monkeypatch.chdir(tmp_path)
    for line, expected in commands:
        code, output = run_line(line, env)
        assert code in (0, 1), f"{line}\n{output}"
        if expected:
            assert words(output) == words(expected), line


def run_line(line: str, env: dict[str, str]) -> tuple[int, str]:
    """Run a command line, in a shell where that is needed: (exit code, stdout)."""
    name, *args = shlex.split(line)
    if name == "jaxckpt" and "|" not in args:
        result = CliRunner(env={"COLUMNS": env["COLUMNS"]}).invoke(main, args, prog_name="jaxckpt")
        return result.exit_code, result.stdout
    shell = 'jaxckpt() { "$PYTHON" -m jaxckpt "$@"; }\n'
    done = subprocess.run(
        ["bash", "-c", shell + line], env=env, text=True, stdout=subprocess.PIPE, timeout=TIMEOUT, check=False
    )
    return done.returncode, done.stdout


def words(text: str) -> list[list[str]]:
    """But for ages, which have one or two digits, so that the spaces beside them differ too."""
    return [re.sub(r"\b\d+ (s|min)\b", "AGE", line).split() for line in text.splitlines()]


def test_every_key_of_json_is_on_the_page(here: Path) -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", page))

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        # Those of the user's own, and of meshes, devices and libraries, are none of ours.
        free = {"metrics", "mesh", "libraries", "device_bytes", "metadata"}
        return set(value) | set().union(*(keys(item) for name, item in value.items() if name not in free))

    found: set[str] = set()
    for args in (["ls", "run1"], ["show", "small"], ["cat", "small", "w"], ["verify", "run1/00000500"],
                 ["diff", "small", "other"], ["plan", "small", "--mesh", "x=1"]):  # fmt: skip
        found |= keys(json.loads(CliRunner().invoke(main, [*args, "--json"]).stdout))
    assert found <= documented, found - documented
    assert len(found) > 35


def test_every_option_is_on_the_page() -> None:
    page = (ROOT / "docs/command-line.md").read_text()
    for name, found in main.commands.items():
        assert f"jaxckpt {name}" in page
        for parameter in found.params:
            if isinstance(parameter, click.Option):
                assert re.search(rf"[ `]{parameter.opts[0]}\b", page), (name, parameter.opts)
