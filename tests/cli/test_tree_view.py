"""The tree that `show` draws, the leaves that `cat` prints and saves, and the JSON of both."""

from __future__ import annotations

import functools
import io
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from command_line import SAVED, command, run, run_json
from hostile import edited

import jaxckpt
from jaxckpt._cli import tree_view
from jaxckpt._inspect import open as _open
from jaxckpt._pipeline.progress import show_bytes
from jaxckpt._restore import read_loop as reading

# The tree -------------------------------------------------------------------------------------------------


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
    assert [line.split()[0] for line in lines[6:]] == ["params/", "layers/", "0", "wte"]
    lines = run("show", "run1/00000300", "--depth", "1").stdout.splitlines()
    assert [line.split()[0] for line in lines[6:]] == ["data", "opt_state/", "params/", "rng", "step", "text"]


def test_details_say_who_saved_what(here: Path) -> None:
    lines = run("show", "run1/00000300", "--details").stdout.splitlines()
    checkpoint = jaxckpt.open("run1/00000300")
    ((host, n_bytes),) = checkpoint.processes
    assert f"  saved {checkpoint.created}, save id {checkpoint.save_id}" in lines
    versions = next(line for line in lines if line.startswith("  by jaxckpt "))
    assert f"by jaxckpt {jaxckpt.__version__}, jax {jax.__version__}, jaxlib " in versions
    assert "  from 1 process on 1 host" in lines
    titles = next(number for number, line in enumerate(lines) if line.split()[:2] == ["process", "host"])
    assert lines[titles].split()[2:] == ["wrote", "seconds"]
    assert lines[titles + 1].split()[:5] == ["0", host, *show_bytes(n_bytes).split(), "plan"]
    assert [line for line in run("show", "run1/00000300").stdout.splitlines() if line in lines][-3:] == lines[-3:]
    narrow = run("show", "run1/00000300", "--details", width=60).stdout.splitlines()
    assert max(map(len, narrow)) <= 60


def test_details_of_many_processes_and_of_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "many", {"x": 1})
    processes = [[f"\x1b[2Jhost {process // 8}", process] for process in range(64)]
    edited(tmp_path / "many", lambda manifest: manifest.update(phase_seconds={}, processes=processes))
    shown = run("show", str(tmp_path / "many"), "--details").stdout
    assert "from 64 processes on 8 hosts" in shown
    assert "… and 24 more; --json has all" in shown
    assert "\x1b" not in shown
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    monkeypatch.chdir(tmp_path)
    assert "process" not in run("show", "a.npz", "--details").stdout


def test_names_in_a_checkpoint_cannot_drive_the_terminal(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "bad", {"\x1b[2J\nw": np.zeros(3), "日本語" * 9: np.zeros(2)}, metadata="\x1b]0;x\x07")
    shown = run("show", str(tmp_path / "bad"), width=60).stdout
    assert "\x1b" not in shown
    assert "\\x1b[2J\\nw" in shown
    wide = next(line for line in shown.splitlines() if "日" in line)
    assert len(wide) + len(re.findall("[日本語]", wide)) <= 60
    assert "\x1b" not in run("cat", str(tmp_path / "bad"), "\x1b[1Jq", code=2).stderr


def test_numbers_in_names_sort_by_value_and_may_have_any_length(tmp_path: Path) -> None:
    names = ("10", "2", "0003", "9" * 5000)  # the order by value differs from the order as text
    jaxckpt.save(tmp_path / "long", dict.fromkeys(names, np.zeros(2)))
    assert f"2 … {names[-1]}" in run("show", str(tmp_path / "long")).stdout
    jaxckpt.save(tmp_path / "short", dict.fromkeys(names[:-1], np.zeros(2)))
    assert "2 … 10 " in run("show", str(tmp_path / "short")).stdout


@pytest.mark.parametrize("n", [1, 2, 3])
def test_three_or_more_equal_containers_are_one_row(tmp_path: Path, n: int) -> None:
    leaf = np.zeros(4)
    jaxckpt.save(tmp_path / "c", {"blocks": [{"w": leaf} for _ in range(n)], "w1": leaf, "w2": leaf, "w3": leaf})
    shown = run("show", str(tmp_path / "c")).stdout
    assert ("0 … 2/" in shown) == (n == 3)
    assert shown.count("float64[4]") == (n if n < 3 else 1) + 3


def test_a_chain_of_single_children_is_one_row(tmp_path: Path) -> None:
    layer = {"attn": {"proj": {"kernel": np.zeros(4)}}, "count": {"value": {"n": 1}}}
    layers = [layer, layer, {**layer, "count": {"value": {"n": 2}}}]
    jaxckpt.save(tmp_path / "c", {"params": {"embed": {"kernel": np.zeros(8)}}, "layers": layers, "opt": {"nu": layer}})

    def rows(*options: str) -> list[str]:
        shown = run("show", str(tmp_path / "c"), *options).stdout
        return [" ".join(line.split()) for line in shown.partition("leaf ")[2].splitlines()[1:]]

    assert rows() == [
        "layers/ 6 leaves 96 B",
        "0 … 2/ 3 × 2 leaves 96 B",
        "attn/proj/kernel float64[4] host 32 B",
        "count/value/n int",  # several leaves, so no value is shown
        "opt/nu/ 2 leaves 32 B",
        "attn/proj/kernel float64[4] host 32 B",
        "count/value/n int 1",
        "params/embed/kernel float64[8] host 64 B",
    ]
    assert rows("--depth", "2")[-2:] == ["opt/nu/ 2 leaves 32 B", "params/embed/ 1 leaf 64 B"]
    assert rows("--depth", "1") == ["layers/ 6 leaves 96 B", "opt/ 2 leaves 32 B", "params/ 1 leaf 64 B"]
    assert rows("--all")[-3:] == ["params/ 1 leaf 64 B", "embed/ 1 leaf 64 B", "kernel float64[8] host 64 B"]
    single = run("show", str(tmp_path / "c"), "--select", "layers/**/kernel").stdout
    assert "0 … 2/attn/proj/kernel  3 × float64[4]" in single


def test_show_sorts_each_container(tmp_path: Path) -> None:
    small, large = {"b": np.zeros(2), "w": np.zeros(8)}, {"b": np.zeros(2), "w": np.zeros(99)}
    layers = {f"layer_{n}": small for n in (0, 1, 2, 3, 10)} | {"layer_5": large}
    jaxckpt.save(tmp_path / "c", {"head": np.zeros(50), "a": np.zeros(1), "layers": layers, "step": 1})

    def names(*options: str) -> str:
        rows = run("show", str(tmp_path / "c"), *options).stdout.splitlines()[4:]
        return " ".join(re.split(r"\s{2,}", row.strip())[0] for row in rows)

    assert names() == "a head layers/ layer_0 … layer_10/ b w layer_5/ b w step"
    by_name = "a head layers/ layer_0 … layer_3/ b w layer_5/ b w layer_10/ b w step"
    assert names("--sort", "name") == by_name
    by_bytes = "layers/ layer_5/ w b layer_0 … layer_10/ w b head a step"
    assert names("--sort", "bytes") == by_bytes
    assert names("--sort", "bytes", "--depth", "1") == "layers/ head a step"
    assert names("--sort", "bytes", "--all").startswith("layers/ layer_5/ w b layer_0/ w b layer_1/ w b layer_10/")


def test_json_of_show_sorts_all_leaves(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"x": {"10": np.zeros(1), "9": np.zeros(5)}, "a": np.zeros(3), "b": np.zeros(5)})
    paths = lambda *options: [leaf["path"] for leaf in run_json("show", str(tmp_path / "c"), *options)["leaves"]]  # noqa: E731
    assert paths() == ["a", "b", "x/10", "x/9"]
    assert paths("--sort", "name") == ["a", "b", "x/9", "x/10"]
    assert paths("--sort", "bytes") == ["b", "x/9", "a", "x/10"]  # equal ones keep their order
    assert "'size' is not one of 'name', 'bytes'" in run("show", str(tmp_path / "c"), "--sort", "size", code=2).stderr


def test_different_containers_are_separate_rows(tmp_path: Path) -> None:
    one = np.zeros(4)
    blocks = [{"a": one, "w": one}] * 2 + [{"a": one, "w": np.zeros(4, np.float32)}, {"a": one, "v": one}]
    jaxckpt.save(tmp_path / "c", blocks)
    folded, whole = (run("show", str(tmp_path / "c"), *more).stdout.splitlines() for more in ((), ("--all",)))
    assert folded[2:] == whole[2:]  # the lines above show the age


def test_a_tree_that_is_one_leaf(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", np.arange(6).reshape(2, 3))
    assert "(the tree itself)  int64[2, 3]" in run("show", str(tmp_path / "c")).stdout
    assert run("cat", str(tmp_path / "c"), "[1, ::2]").stdout == "[3, 5]\n"
    saved = run("cat", str(tmp_path / "c"), "", "--save", str(tmp_path / "x.npy")).stdout
    assert saved == f"(the tree itself) → {tmp_path}/x.npy: int64[2, 3], 48 B\n"
    jaxckpt.save(tmp_path / "jax", jnp.zeros(4))
    assert "(the tree itself)  float32[4]" in run("plan", str(tmp_path / "jax"), "--mesh", "a=2").stdout
    jaxckpt.save(tmp_path / "other", jnp.ones(4))
    assert (
        "(the tree itself)  jax float32[4]"
        in run("diff", str(tmp_path / "jax"), str(tmp_path / "other"), code=1).stdout
    )


def test_json_of_show(here: Path) -> None:
    found = run_json("show", "run1/00000300", "--select", "params/layers/1", "--select", "step")
    assert found["libraries"].keys() == {"jaxckpt", "jax", "jaxlib", "numpy", "tensorstore"}
    (process,) = found["processes"]
    assert process["bytes"] == found["bytes"]
    informative = {"libraries": "", "processes": "", "phase_seconds": ""}
    assert {**found, "save_id": "", **informative, "leaves": ""} == {
        "path": "run1/00000300",
        "format": "jaxckpt",
        "save_id": "",
        "created": SAVED.isoformat(),
        "libraries": "",
        "metadata": None,
        "step": 300,
        "metrics": {"loss": 1 / 300, "accuracy": 0.8, "bad": None},
        "dropped": [],
        **informative,
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


# A leaf ---------------------------------------------------------------------------------------------------


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


def test_cat_refuses_to_print_a_large_leaf(tmp_path: Path) -> None:
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
    assert ("without loss" in result.stdout) == (loaded.dtype != kind)
    assert [path.name for path in tmp_path.iterdir() if "npy" in path.name] == ["w.npy"]


@pytest.mark.parametrize("shape", [(1, 1 << 18), (4, 1 << 16), (1 << 18,), (1, 1, 1 << 9, 1 << 9)])
def test_cat_saves_an_array_that_is_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    host_bytes, sizes = 1 << 18, list[int]()
    array = np.arange(1 << 18, dtype=np.float64).reshape(shape)  # 2 MiB
    jaxckpt.save(tmp_path / "c", {"w": array}, options=jaxckpt.Options(chunk_bytes=1 << 14))
    whole = reading.read_box

    def read_box(*arguments: Any) -> Any:
        sizes.append((part := whole(*arguments)).nbytes)
        return part

    monkeypatch.setattr(reading, "read_box", read_box)
    monkeypatch.setattr(_open, "read_box", read_box)
    small = functools.partial(jaxckpt.open, options=jaxckpt.Options(host_bytes=host_bytes))
    monkeypatch.setattr(tree_view, "open_checkpoint", small)
    run("cat", str(tmp_path / "c"), "w", "--save", str(tmp_path / "w.npy"))
    assert np.array_equal(np.load(tmp_path / "w.npy"), array)
    assert max(sizes) <= host_bytes


def test_cat_reports_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jaxckpt.save("c", {"w": np.zeros((8, 4), ml_dtypes.bfloat16), "v": np.ones(3)})
    saved = run("cat", "c", "w[2:6, :3]", "--save", "w.npy")
    assert saved.stdout == "w[2:6, :3] → w.npy: bfloat16[4, 3] as float32, without loss, 48 B\n"
    assert run("cat", "c", "v", "--save", "v.npy").stdout == "v → v.npy: float64[3], 24 B\n"
    assert "w.npy already exists: --overwrite replaces it" in run("cat", "c", "v", "--save", "w.npy", code=2).stderr
    for name in ("v.npz", "v.txt", "v"):
        assert f"{name} does not end in .npy" in run("cat", "c", "v", "--save", name, code=2).stderr
    assert "--overwrite is for --save" in run("cat", "c", "v", "--overwrite", code=2).stderr
    assert run_json("cat", "c", "w", "--save", "w.npy", "--overwrite") == {
        "path": "c",
        "leaf": "w",
        "saved": "w.npy",
        "dtype": "float32",
        "shape": [8, 4],
        "bytes": 128,
    }


def test_cat_never_writes_into_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with jaxckpt.Checkpointer("run") as steps:
        steps.save(3, {"w": np.zeros(3)})
    run("convert", "run@3", "w.safetensors")
    for path, output in (
        ("run", "run/00000003/manifest.json"),
        ("run@3", "run/00000003/w.npy"),
        ("w.safetensors", "w.safetensors"),
    ):
        assert "is in the checkpoint" in run("cat", path, "w", "--save", output, code=2).stderr
    assert jaxckpt.verify("run").ok
    assert jaxckpt.load_numpy("w.safetensors")["w"].tolist() == [0, 0, 0]


ODD = [
    "[bold]x",
    "[/]",
    "[red",
    "a b",
    " lead",
    "new\nline",
    "x\x1b[31m",
    "-dash",
    "*",
    "a[0]",
    "ünï",
    "日本",
    "..",
    "\u202eq",
]


def test_leaves_with_odd_names(tmp_path: Path) -> None:
    """Their names are printed as they are, without control characters, and find the leaves again."""
    path = str(tmp_path / "sp ace [bold]\nx")
    jaxckpt.save(path, {name: np.array([n]) for n, name in enumerate(ODD)})
    shown = run("show", path, "--sort", "name").stdout
    assert "[bold]x" in shown
    assert "new\\nline" in shown
    assert not re.search(r"[^\x20-\uffff\n]|\u202e", shown)
    for leaf in run_json("show", path)["leaves"]:
        number = ODD.index(leaf["path"].replace("~1", "/"))
        assert run("cat", path, "--", leaf["path"]).stdout == f"[{number}]\n"
        assert run("cat", path, "--", f"{leaf['path']}[0]").stdout == f"{number}\n"


@pytest.mark.parametrize("width", [1, 20, 40, 200])
def test_trees_without_leaves_and_with_thousands(tmp_path: Path, width: int) -> None:
    jaxckpt.save(tmp_path / "none", {"a": {}, "b": []})
    assert "0 leaves" in "".join(run("show", str(tmp_path / "none"), width=max(width, 20)).stdout.split("\n")[1])
    run("show", str(tmp_path / "none"), width=width)
    assert run_json("show", str(tmp_path / "none"), "--sort", "bytes")["leaves"] == []
    names = [f"block_{n}_of_the_decoder/norm_{kind}_scale" for n in range(1700) for kind in "abc"]
    jaxckpt.save(tmp_path / "many", dict.fromkeys(names, np.zeros(2)))
    rows = run("show", str(tmp_path / "many"), "--all", width=width).stdout.splitlines()[4:]
    assert len({row.split("  ")[0] for row in rows}) == len(rows) == len(names)


@pytest.mark.child
@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_a_file_written_to_stdout_is_not_mixed_with_text(tmp_path: Path, options: list[str]) -> None:
    jaxckpt.save(tmp_path / "c", {"w": np.arange(1000.0)})
    path = str(tmp_path / "c")
    for args in (["cat", path, "w", "--save", "/dev/stdout"], ["report", path, "-o", "/dev/stdout"]):
        child = command(*args, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="latin-1")
        written, message = child.communicate(timeout=120)
        assert child.returncode == 0, message
        assert "/dev/stdout" in message
        if args[0] == "report":
            assert written.rstrip().endswith("</html>")
        else:
            assert np.array_equal(np.load(io.BytesIO(written.encode("latin-1"))), np.arange(1000.0))


def test_cat_saves_odd_shapes(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"empty": np.zeros((0, 3)), "number": np.float64(2), "python": 3, "text": "a"})
    for leaf, shape in (("empty", (0, 3)), ("number", ()), ("python", ())):
        run("cat", str(tmp_path / "c"), leaf, "--save", str(tmp_path / "w.npy"), "--overwrite")
        assert np.load(tmp_path / "w.npy").shape == shape
    assert "which is not an array" in run("cat", str(tmp_path / "c"), "text", "--save", "t.npy", code=2).stderr


def test_a_flat_list_of_all_leaves(here: Path) -> None:
    lines = run("show", "run1/00000300", "--flat", "--sort", "bytes").stdout.splitlines()[6:]
    assert [line.split()[0] for line in lines[:3]] == ["opt_state/mu", "params/wte", "params/layers/0/kernel"]
    assert len(lines) == len(jaxckpt.open("run1/00000300"))
    by_name = run("show", "run1/00000300", "--flat", "--sort", "name").stdout
    assert by_name.index("params/layers/2/bias") < by_name.index("params/layers/10/bias")
    assert "--flat lists all leaves" in run("show", "small", "--flat", "--depth", "1", code=2).stderr
