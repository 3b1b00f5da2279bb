"""Parsing of arguments: indices, meshes, specs, sizes, names; errors for invalid ones; completion."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from command_line import run, run_json

import jaxckpt
from jaxckpt._cli.arguments import FORMATS, similar_path_hint
from jaxckpt._cli.main import main


def test_cat_of_a_leaf_that_looks_like_an_index(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"w[0]": np.arange(3), "w": np.zeros(1)})
    assert run("cat", str(tmp_path / "c"), "w[0]").stdout == "[0, 1, 2]\n"
    assert run("cat", str(tmp_path / "c"), "w[0][1]").stdout == "1\n"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("params/wtf", "did you mean 'params/wte'?"),
        ("params", "leaves below it"),
        ("params/wte[64]", "leaf 'params/wte' of shape (64, 16): index 64 is out of bounds"),
        ("params/wte[0, 0, 0]", "too many indices"),
        ("params/wte[a]", "expected integers, slices and ..."),
        ("params/wte[]", "expected integers, slices and ..."),
        ("params/wte[8:11", "index [8:11 of leaf 'params/wte': the bracket is not closed, expected params/wte[8:11]"),
        ("params/wte[", "index [ of leaf 'params/wte': the bracket is not closed, expected params/wte[0]"),
        ("params/wte[1:2:3:4]", "expected integers, slices and ..."),
        ("params/wte[::0]", "slice step cannot be zero"),
        ("step[0]", "takes no index"),
    ],
)
def test_cat_of_a_missing_leaf_or_an_invalid_index(here: Path, leaf: str, message: str) -> None:
    assert message in run("cat", "run1/00000300", leaf, code=2).stderr


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["show", "run1/300"], "did you mean run1/00000300?"),
        (["verify", "run1/0300"], "did you mean run1/00000300?"),
        (["diff", "small", "othr"], "did you mean other?"),
        (["cat", "rnu1/00000300", "step"], "did you mean run1?"),
        (["show", "s3://none/run1/300"], ""),
        (["show", "run1@7"], ""),
    ],
)
def test_a_path_that_does_not_exist(here: Path, command: list[str], hint: str) -> None:
    if hint:
        assert run(*command, code=4).stderr.endswith(f"; {hint}\n")
    else:
        assert similar_path_hint(command[1]) == ""


def test_a_destination_is_no_misspelled_source(here: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "did you mean" not in run("convert", str(tmp_path / "notes.txt"), "othr", code=4).stderr


def test_plan_by_rules(here: Path) -> None:
    specs = ["--specs", 'params/**/kernel=P(None, ("data", "model"))', "--specs", "P()", "--specs", "params=P('data')"]
    found = run_json("plan", "run1/00000300", "--mesh", "data=2,model=4", *specs)
    wanted = {leaf["path"]: leaf["wanted"]["spec"] for leaf in found["leaves"]}
    assert wanted["params/layers/0/kernel"] == "P(None, ('data', 'model'))"
    assert wanted["params/layers/0/bias"] == wanted["params/wte"] == "P()"
    found = run_json("plan", "run1/00000300", "--mesh", "data=2,model=4", "--specs", "params/wte=P('data')")
    wanted = {leaf["path"]: leaf["wanted"]["spec"] for leaf in found["leaves"]}
    assert wanted["params/wte"] == "P('data')"
    assert wanted["params/layers/0/kernel"] == "P('data', 'model')"  # the saved spec


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "data"], "expected axis sizes"),
        (["--mesh", "data=0"], "gives the axis 'data' the size 0"),
        (["--mesh", "data=-1"], "expected axis sizes"),
        (["--mesh", "data=4 model=2"], "expected axis sizes"),
        (["--mesh", "data=2,data=2"], "has the axis 'data' twice"),
        (["--mesh", "data=2", "--specs", "wte"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wte=P(1)"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wte=P({[]: 1})"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wte=P(__import__('os'))"], "expected a spec"),
        (["--mesh", "data=2", "--specs", "wtf=P()"], "--specs wtf: matches no array"),
        (["--mesh", "data=2", "--specs", "kernel=P()"], "did you mean '**/kernel'?"),
        (["--mesh", "data=2", "--specs", "params/wtf=P()"], "did you mean 'params/wte'?"),
        (["--mesh", "data=2", "--specs", "params/wte=P('x')"], "'x'"),
        (["--mesh", "data=3"], "is not divisible by 3"),
        ([], "Missing option '--mesh'"),
    ],
)
def test_invalid_arguments_of_plan(here: Path, args: list[str], message: str) -> None:
    assert message in run("plan", "run1/00000300", *args, code=2).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--chunk-bytes", "64kb"], "expected bytes"),
        (["--chunk-bytes", "0"], "expected bytes"),
        (["--rename", "params"], "expected OLD=NEW"),
        (["--rename", "params=a", "--rename", "params=b"], "gives 'params' two new paths, 'a' and 'b'"),
        (["--specs", "P()"], "--specs needs --mesh"),
        (["--format", "pickle"], "expected one of jaxckpt, npz"),
    ],
)
def test_invalid_arguments_of_convert(here: Path, tmp_path: Path, args: list[str], message: str) -> None:
    assert message in run("convert", "run1/00000300", str(tmp_path / "out"), *args, code=2).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--no-progress", "verify", "run1"], "as in jaxckpt verify --no-progress\n"),
        (["--no-progress", "ls", "run1"], "as in jaxckpt cat --no-progress\n"),
        (["--nothing", "ls", "run1"], "No such option '--nothing'"),
    ],
)
def test_an_option_of_a_command_before_it(args: list[str], message: str) -> None:
    assert message in run(*args, code=2).stderr


REPEATED = [
    (name, option)
    for name, command in main.commands.items()
    for option in command.params
    if isinstance(option, click.Option) and not option.multiple and not option.is_flag
]


@pytest.mark.parametrize(("name", "option"), REPEATED, ids=[f"{name} {option.name}" for name, option in REPEATED])
def test_an_option_with_one_value_is_given_once(name: str, option: click.Option) -> None:
    """click would use the last value."""
    (flag, *_), values = option.opts, {"mesh": ("data=4", "model=2"), "depth": ("1", "2")}
    first, second = values.get(option.name or "", ("x", "y"))
    found = run(name, flag, first, "run", f"{flag}={second}", code=2).stderr
    assert f"{option.opts[-1]} takes one value, but was given 2 times: give it once" in found


def test_a_repeated_mesh_shows_how_to_give_several_axes() -> None:
    found = run("plan", "run1", "--mesh", "data=4", "--mesh", "model=2", code=2).stderr
    assert found.endswith("Error: --mesh takes one value, but was given 2 times: give it once, as --mesh AXIS=SIZE,…\n")


def test_a_rate_has_a_unit(here: Path) -> None:
    assert (
        "'50' has no unit: give bytes per second as in 50MiB" in run("verify", "small", "--rate", "50", code=2).stderr
    )
    for wrong in ("50 MB", "0B", "1e3MiB", "-1MiB", ""):
        message = run("verify", "small", f"--rate={wrong}", code=2).stderr
        assert (
            f"{wrong!r}: expected a whole number of bytes per second, at least 1, with a unit, such as 50MiB" in message
        )
    assert run("verify", "small", "--rate", "500000B").stdout.endswith(": ok\n")


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
    assert complete("jaxckpt", "cat", f"file://{Path.cwd()}/run1/00000300", "w") == [""]
    assert complete("jaxckpt", "cat", f"file://{Path.cwd()}/run1/00000300", "s") == ["step"]
    assert complete("jaxckpt", "cat", "run1/exported.safetensors", "p") == ["params/"]
    assert complete("jaxckpt", "diff", "small", "other", "--select", "") == ["b", "i", "w", "z"]
    assert complete("jaxckpt", "cat", "nowhere", "pa") == complete("jaxckpt", "cat", "s3://none/x", "pa") == [""]


def test_completed_formats_are_the_formats_that_convert_writes() -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=", ".join(FORMATS)):
        jaxckpt.convert("a", "b", format="pickle")
