"""What `ls` finds in a folder, its JSON, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from command_line import SAVED, run, run_json

import jaxckpt


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
        "steps": None,
        "leaves": 30,
        "bytes": jaxckpt.open("run1/00000100").nbytes,
        "created": SAVED.isoformat(),
        "metrics": {"loss": 0.01, "accuracy": 0.6, "bad": None},
        "dropped": ["opt_state"],
        "pinned": [],
        "incidents": [],
        "problem": None,
    }
    assert (unfinished["status"], unfinished["step"], unfinished["format"]) == ("unfinished", 400, None)
    assert damaged["status"] == "damaged"
    assert "does not match the SHA-256" in damaged["problem"]
    assert (exported["format"], exported["created"], exported["step"]) == ("safetensors", None, None)
    (alone,) = run_json("ls", "run1/00000300")["checkpoints"]
    assert alone["name"] == "00000300"


def test_the_problem_of_a_step_is_reported_next_to_the_list(here: Path) -> None:
    message = run("ls", "run1").stderr.splitlines()
    assert message[0] == "00000400: a save is in progress or was interrupted"
    assert message[1].startswith("00000500: run1/00000500/manifest.json is damaged")


def test_pinned_steps_show_their_names(here: Path) -> None:
    jaxckpt.Run("run1").pin(100, "paper")
    jaxckpt.Run("run1").pin(100, "figure-2")
    assert run_json("ls", "run1")["checkpoints"][0]["pinned"] == ["figure-2", "paper"]
    title, first, second, *_ = run("ls", "run1").stdout.splitlines()
    assert "pinned" in title
    assert "figure-2, paper" in first
    assert "paper" not in second


def test_ls_changes_nothing(here: Path) -> None:
    """A Checkpointer would delete the folder of the unfinished save."""

    def files() -> list[tuple[str, int]]:
        return [(str(path), path.lstat().st_mtime_ns) for path in sorted(Path("run1").rglob("*"))]

    before = files()
    assert any("data-0000" in path for path, _ in before)
    run("ls", "run1")
    run("ls", "run1", "--json")
    assert files() == before


def test_metrics_that_were_added_to_a_step(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "runs" / "one") as steps:
        for step in (1, 2):
            steps.save(step, {"w": jnp.zeros(3)}, metrics={"loss": step})
            steps.add_metrics(step, {"accuracy": step / 4, "loss": 3})
    where = str(tmp_path / "runs" / "one")
    expected = [{"loss": 3.0, "accuracy": step / 4} for step in (1, 2)]
    assert [entry["metrics"] for entry in run_json("ls", where)["checkpoints"]] == expected
    assert [entry["metrics"] for entry in run_json("ls", str(tmp_path / "runs"))["checkpoints"]] == expected[1:]
    assert [entry["metrics"] for entry in run_json("ls", f"{where}/00000001")["checkpoints"]] == expected[:1]
    assert run_json("show", f"{where}@1")["metrics"] == expected[0]
    assert "loss=3, accuracy=0.5" in run("show", where).stdout


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
    message = [(entry["name"], entry["format"], entry["step"], entry["leaves"], entry["metrics"]) for entry in found]
    assert message == [("9", "orbax", 9, 1, {"loss": 1 / 9}), ("10", "orbax", 10, 1, {"loss": 0.1})]
    assert [entry["name"] for entry in run_json("ls", f"{path}/9")["checkpoints"]] == ["9"]
    assert run("cat", f"{path}/9", "w[0]").stdout == "9.0\n"
    run("rm", f"{path}/9", "--yes", code=2)
