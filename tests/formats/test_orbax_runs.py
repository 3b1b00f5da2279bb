"""Runs of Orbax's CheckpointManager: readers see their steps by number, and a Checkpointer does not overlook them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from command_line import run as run_command
from command_line import run_json

import jaxckpt
import jaxckpt.orbax
from jaxckpt.errors import NotACheckpointError

Save = Callable[[Path, tuple[int, ...]], None]


def save_with_orbax(path: Path, steps: tuple[int, ...]) -> None:
    with ocp.CheckpointManager(path) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))


def save_with_handler(path: Path, steps: tuple[int, ...]) -> None:
    with ocp.CheckpointManager(path, handler_registry=jaxckpt.orbax.handler_registry()) as manager:
        for step in steps:
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))


@pytest.fixture(params=[save_with_orbax, save_with_handler])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run of three steps, which Orbax or jaxckpt's handler has written."""
    request.param(tmp_path / "theirs", (5, 25, 30))
    return str(tmp_path / "theirs")


def all_files(path: str) -> list[Path]:
    return sorted(Path(path).rglob("*"))


def test_a_checkpointer_names_the_steps_that_it_would_overlook(theirs: str) -> None:
    before = all_files(theirs)
    expected = r"theirs has 3 steps of Orbax, and the newest are 5, 25, 30\..*docs/coming-from-orbax\.md"
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        jaxckpt.Checkpointer(theirs)
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        jaxckpt.weights.Publisher(theirs)
    assert all_files(theirs) == before


def test_a_checkpointer_continues_a_newer_run_of_its_own_in_that_directory(theirs: str) -> None:
    jaxckpt.convert(f"{theirs}@30", f"{theirs}/00000030")
    with jaxckpt.Checkpointer(theirs) as checkpoints:
        assert checkpoints.steps() == [30]
        assert checkpoints.restore()["w"][0] == 30
    os.rename(f"{theirs}/00000030", f"{theirs}/00000029")
    with pytest.raises(jaxckpt.errors.InputError, match="3 steps of Orbax"):
        jaxckpt.Checkpointer(theirs)


def test_steps_and_latest_step(theirs: str, tmp_path: Path) -> None:
    assert jaxckpt.Run(theirs).steps() == [5, 25, 30]
    assert jaxckpt.Run(theirs).latest_step() == 30
    (tmp_path / "theirs" / "30").rename(tmp_path / "theirs" / "30.orbax-checkpoint-tmp-1")
    assert jaxckpt.Run(theirs).steps() == [5, 25]
    assert jaxckpt.Run(tmp_path / "missing").latest_step() is None


def test_all_steps_are_written_back_for_a_manager_without_the_handler(tmp_path: Path) -> None:
    """Their metrics count for Orbax's retention."""
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min", max_to_keep=2)
    path, back = tmp_path / "run", tmp_path / "back"
    registry = jaxckpt.orbax.handler_registry()
    with ocp.CheckpointManager(path, options=options, handler_registry=registry) as manager:
        for step in (5, 25):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}), metrics={"loss": step})
    with ocp.CheckpointManager(path) as manager, pytest.raises(FileNotFoundError):
        manager.restore(25, args=ocp.args.StandardRestore({"w": np.zeros(3, int)}))
    jaxckpt.convert(path, back, format="orbax")
    with ocp.CheckpointManager(back, options=options) as manager:
        for step in (5, 25):
            restored = manager.restore(step, args=ocp.args.StandardRestore({"w": np.zeros(3, int)}))
            assert restored["w"].tolist() == [step] * 3
            assert manager.metrics(step) == {"loss": step}
        manager.save(30, args=ocp.args.StandardSave({"w": np.full(3, 30)}), metrics={"loss": 1})
        manager.wait_until_finished()
        assert manager.all_steps() == [5, 30]
    assert jaxckpt.open(back / "5").metadata["metrics"] == {"loss": 5}


def test_followers_do_not_wait_for_a_run_of_orbax(theirs: str) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="theirs is a run of Orbax"):
        next(jaxckpt.Run(theirs).follow())
    with pytest.raises(jaxckpt.errors.InputError, match=r"is not a step in a run's directory|is a run of Orbax"):
        jaxckpt.Run(theirs).pin(25, "paper")


def test_every_function_that_reads_accepts_the_number_of_a_step(theirs: str, tmp_path: Path) -> None:
    path = f"{theirs}@25"
    expected = {"w": np.full(3, 25)}
    np.testing.assert_equal(jaxckpt.load_numpy(path), expected)
    np.testing.assert_equal(jaxckpt.load_numpy(f"file://{path}"), expected)
    assert jaxckpt.restore(path)["w"][0] == 25
    assert jaxckpt.load_numpy(f"{theirs}@latest")["w"][0] == 30
    assert jaxckpt.open(path).path.startswith(f"{theirs}/25")
    assert jaxckpt.open(path).plan(mesh={"x": 2})
    assert jaxckpt.verify(path).ok
    quick = jaxckpt.verify(path, quick=True)
    assert quick.ok
    is_ours = jaxckpt.open(path).format == "jaxckpt"
    assert ("existence and lengths only" if is_ours else "metadata only") in str(quick)
    assert jaxckpt.diff(path, f"{theirs}/25").identical
    assert not jaxckpt.diff(path, f"{theirs}@5").identical
    assert "w" in jaxckpt.report(path)
    assert jaxckpt.Run(theirs).open(25).step == jaxckpt.open(path).step == 25
    assert jaxckpt.Run(theirs).open(25).metrics == jaxckpt.open(path).metrics == jaxckpt.Run(theirs).metrics(25)
    jaxckpt.convert(path, tmp_path / "ours")
    assert jaxckpt.open(tmp_path / "ours").step == 25
    jaxckpt.convert(path, tmp_path / "ours.npz")
    for converted in ("ours", "ours.npz"):
        np.testing.assert_equal(jaxckpt.load_numpy(tmp_path / converted), expected)


def test_every_command_that_reads_accepts_the_number_of_a_step(theirs: str, tmp_path: Path) -> None:
    path = f"{theirs}@25"
    assert run_command("cat", path, "w[0]").stdout == "25\n"
    for command in (
        ["show", path],
        ["verify", path],
        ["plan", path, "--mesh", "x=2"],
        ["diff", path, f"{theirs}/25"],
        ["report", path, "-o", str(tmp_path / "report.html")],
        ["convert", path, str(tmp_path / "ours")],
    ):
        run_command(*command)
    (entry,) = run_json("ls", path)["checkpoints"]
    assert (entry["name"], entry["leaves"], entry["status"]) == ("theirs@25", 1, "ok")


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("26", jaxckpt.errors.NotACheckpointError, r"theirs has no step 26; the newest steps are 5, 25, 30"),
        ("best", jaxckpt.errors.InputError, "does not record which step is the best"),
        ("lates", jaxckpt.errors.InputError, "no step named 'lates'.*latest"),
    ],
)
def test_a_name_that_no_step_has(theirs: str, name: str, kind: Any, expected: str) -> None:
    for function in (jaxckpt.open, jaxckpt.load_numpy, jaxckpt.verify):
        with pytest.raises(kind, match=expected):
            function(f"{theirs}@{name}")


def test_a_checkpoint_at_exactly_the_path_takes_precedence(theirs: str) -> None:
    jaxckpt.convert(f"{theirs}@5", f"{theirs}@25")
    assert jaxckpt.load_numpy(f"{theirs}@25")["w"][0] == 5


# ls -------------------------------------------------------------------------------------------------------


def test_ls_lists_the_runs_and_checkpoints_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    for name, steps in (("a", (1, 2)), ("b", (7,))):
        with jaxckpt.Checkpointer(folder / name) as checkpoints:
            for step in steps:
                checkpoints.save(step, {"w": np.ones(step)}, metrics={"loss": step})
    jaxckpt.Run(folder / "a").pin(1, "paper")

    def listed() -> list[Any]:
        found = run_json("ls", str(folder))["checkpoints"]
        return [(entry["name"], entry["format"], entry["steps"], entry["step"], entry["pinned"]) for entry in found]

    ours = [("a", "jaxckpt", 2, 2, ["paper"]), ("b", "jaxckpt", 1, 7, [])]
    assert listed() == ours
    title, first, *_ = run_command("ls", str(folder)).stdout.splitlines()
    assert title.split() == ["name", "format", "steps", "leaves", "size", "age", "metrics", "pinned"]
    assert first.split()[:3] == ["a", "jaxckpt", "2"]
    save_with_orbax(folder / "c", (5, 25))
    assert listed() == [*ours, ("c", "orbax", 2, 25, [])]
    jaxckpt.save(folder / "d", {"w": 1})
    assert listed() == [*ours, ("c", "orbax", 2, 25, []), ("d", "jaxckpt", None, None, [])]
    for name in "ef":  # the folder then looks like a step of an old version of Orbax with two items
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / name, {"w": np.ones(3)})
        assert [entry[0] for entry in listed()] == ["a", "b", "c", "d", *"ef"[: "ef".index(name) + 1]]


def test_ls_of_a_folder_with_a_model_and_a_run(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "model" / "run") as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})
    jaxckpt.convert(f"{tmp_path}/model/run@1", tmp_path / "model" / "x.safetensors")
    names = [entry["name"] for entry in run_json("ls", str(tmp_path / "model"))["checkpoints"]]
    assert names == ["run", "x.safetensors"]


def test_ls_of_separate_checkpoints_of_orbax(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"w": np.ones(3)})
    assert [entry["name"] for entry in run_json("ls", str(tmp_path))["checkpoints"]] == ["first", "second"]


def test_runs_and_checkpoints_with_different_prefixes_are_not_one_run(tmp_path: Path) -> None:
    for prefix, step in (("ema", 5), ("raw", 7)):
        options = ocp.CheckpointManagerOptions(step_prefix=prefix)
        with ocp.CheckpointManager(tmp_path / "runs", options=options) as manager:
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(3, step)}))
    with ocp.StandardCheckpointer() as checkpointer:
        for name in ("base_7", "tuned_3"):
            checkpointer.save(tmp_path / "single" / name, {"w": np.full(3, 7)})
    for folder, two in (("runs", "raw_7 and ema_5"), ("single", "base_7 and tuned_3")):
        message = f"several runs or checkpoints, such as {two}: open one of them"
        for read in (jaxckpt.open, jaxckpt.Checkpointer, lambda path: jaxckpt.convert(path, tmp_path / "ours")):
            with pytest.raises(NotACheckpointError, match=message):
                read(tmp_path / folder)
    assert run_json("ls", str(tmp_path / "single" / "base_7"))["checkpoints"][0]["status"] == "ok"
    found = run_json("ls", str(tmp_path / "single"))["checkpoints"]
    assert [(entry["name"], entry["status"]) for entry in found] == [("base_7", "ok"), ("tuned_3", "ok")]
    with jaxckpt.Checkpointer(tmp_path / "ours") as ours:  # exports next to the steps of a run of ours do no harm
        ours.save(9, {"w": np.ones(3)})
    for name in ("base_7", "tuned_3"):
        shutil.copytree(tmp_path / "single" / name, tmp_path / "ours" / name)
    with jaxckpt.Checkpointer(tmp_path / "ours") as ours:
        assert ours.latest_step() == 9
    run = jaxckpt.Run(tmp_path / "ours")
    assert run.best_step("loss", "min") is None
    assert [step.number for step in run.follow(timeout_seconds=0.1)] == [9]
    (tmp_path / "single" / "tuned_3" / "_METADATA").unlink()
    (tmp_path / "single" / "tuned_3" / "_CHECKPOINT_METADATA").unlink()
    assert jaxckpt.open(tmp_path / "single").step == 7


@pytest.mark.parametrize("path", ["run@30", "run/00000030", "run@paper"])
def test_ls_of_a_pinned_step_shows_its_names(tmp_path: Path, path: str) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (30, 40):
            checkpoints.save(step, {"w": step})
    jaxckpt.Run(tmp_path / "run").pin(30, "paper")
    (entry,) = run_json("ls", f"{tmp_path}/{path}")["checkpoints"]
    assert (entry["step"], entry["pinned"]) == (30, ["paper"])


def test_a_save_that_was_killed_while_it_published_is_no_step_of_orbax(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.arange(3)})
    killed = tmp_path / "00000002" / f"data-{'0' * 32}"
    killed.mkdir(parents=True)
    (killed / "manifest.json").write_bytes((tmp_path / "00000001" / "manifest.json").read_bytes())
    with jaxckpt.Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]


def test_a_checkpointer_refuses_the_name_of_a_step(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(10, {"w": 10})
    with pytest.raises(jaxckpt.errors.InputError, match="names a step of the run"):
        jaxckpt.Checkpointer(tmp_path / "run@10")
    assert not (tmp_path / "run@10").exists()
    jaxckpt.Checkpointer(tmp_path / "a@b").close()
