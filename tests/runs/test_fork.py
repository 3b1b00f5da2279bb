"""A fork gets a step of another run as links."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import jaxckpt
from jaxckpt._cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps, whose objects are several files, with metrics and process states."""
    with jaxckpt.Checkpointer(tmp_path / "run", keep_best=("loss", "min"), keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            tree = {"w": jnp.arange(1000.0) + step, "n": np.arange(10), "step": step}
            checkpoints.save(step, tree, metrics={"loss": abs(step - 2)}, process_state={"data": step})
    return tmp_path / "run"


def files(path: Path) -> dict[str, os.stat_result]:
    found = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.stat() for file in found}


@pytest.mark.one_device
@pytest.mark.parametrize(
    ("step", "expected"), [({}, 3), ({"step": 1}, 1), ({"step": "best"}, 2), ({"step": "latest"}, 3)]
)
def test_a_fork_starts_from_a_step(run: Path, tmp_path: Path, step: dict[str, Any], expected: int) -> None:
    assert jaxckpt.Run(run).fork(tmp_path / "new", **step) == expected
    assert jaxckpt.Run(tmp_path / "new").steps() == [expected]
    assert jaxckpt.verify(tmp_path / "new").ok
    before, after = (files(path / f"{expected:08d}") for path in (run, tmp_path / "new"))
    assert before.keys() == after.keys()
    for name in before:
        assert os.path.samestat(before[name], after[name]) == ("/c/" in name)
    with jaxckpt.Checkpointer(tmp_path / "new") as checkpoints:
        assert checkpoints.restore()["step"] == expected
        assert checkpoints.metrics(expected) == {"loss": abs(expected - 2)}
        assert checkpoints.process_state("data") == expected
        checkpoints.save(expected + 1, {"w": jnp.zeros(3)})
    assert jaxckpt.Run(run).steps() == [1, 2, 3]


@pytest.mark.one_device
def test_a_fork_of_no_step_is_an_error(run: Path, tmp_path: Path) -> None:
    """As from best_step(), if no step has a value."""
    with pytest.raises(jaxckpt.errors.InputError, match=r"found None: best_step\(\)"):
        jaxckpt.Run(run).fork(tmp_path / "new", step=None)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.one_device
def test_a_fork_without_a_subtree_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", keep_last_of={"opt_state": 1}) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3), "opt_state": jnp.full(3, float(step))})
    run = jaxckpt.Run(tmp_path / "run")
    run.fork(tmp_path / "newest")
    assert "without" not in caplog.text
    run.fork(tmp_path / "older", step=1)
    assert "00000001 is without 'opt_state', which keep_last_of has deleted" in caplog.text
    with jaxckpt.Checkpointer(tmp_path / "older") as checkpoints:
        init = {"w": jnp.zeros(3), "opt_state": jnp.zeros(3)}
        step, tree = checkpoints.restore_or_init(lambda: init, strict=False)
    assert step == 1
    assert (tree["w"].tolist(), tree["opt_state"].tolist()) == ([1.0] * 3, [0.0] * 3)


@pytest.mark.one_device
def test_either_run_may_be_deleted(run: Path, tmp_path: Path) -> None:
    jaxckpt.Run(run).fork(tmp_path / "a")
    jaxckpt.Run(tmp_path / "a").fork(tmp_path / "b")
    shutil.rmtree(run)
    with jaxckpt.Checkpointer(tmp_path / "a", keep_last=1) as checkpoints:
        checkpoints.save(4, {"w": jnp.zeros(3)})
        checkpoints.wait()
        assert checkpoints.steps() == [4]
    assert jaxckpt.verify(tmp_path / "b").ok
    assert jaxckpt.load_numpy(tmp_path / "b")["w"][0] == 3


@pytest.mark.one_device
def test_an_impossible_fork_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="has 3 steps"):
        jaxckpt.Run(run).fork(run)
    (tmp_path / "file").write_text("x")
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="is a file"):
        jaxckpt.Run(run).fork(tmp_path / "file")
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match="no step 7"):
        jaxckpt.Run(run).fork(tmp_path / "new", step=7)
    with pytest.raises(jaxckpt.errors.NotACheckpointError):
        jaxckpt.Run(tmp_path / "none").fork(tmp_path / "new")
    jaxckpt.save(tmp_path / "alone", {"w": jnp.zeros(3)})
    with pytest.raises(jaxckpt.errors.InputError, match="not a step in a run's directory"):
        jaxckpt.Run(tmp_path / "alone").fork(tmp_path / "new")
    with pytest.raises(jaxckpt.errors.InputError, match=r"cannot be linked.*convert\("):
        jaxckpt.Run(run).fork("memory://fork/new")
    for path in (b"run", 5, None):
        with pytest.raises(jaxckpt.errors.InputError, match="must be a non-empty str or PathLike"):
            jaxckpt.Run(path).fork(tmp_path / "new", step=1)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.one_device
def test_a_fork_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link
    calls: list[int] = []

    def refuse(*paths: Any, **how: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise OSError(18, "Invalid cross-device link")
        link(*paths, **how)

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(jaxckpt.errors.InputError, match="hard links"):
        jaxckpt.Run(run).fork(tmp_path / "new")
    assert not files(tmp_path / "new")
    monkeypatch.undo()
    assert jaxckpt.Run(run).fork(tmp_path / "new") == 3


@pytest.mark.one_device
def test_a_damaged_step_is_not_forked(run: Path, tmp_path: Path) -> None:
    victim = next((run / "00000003").glob("data-*/*/c/0/*"))
    victim.write_bytes(b"cut")
    with pytest.raises(jaxckpt.errors.DataError, match="is 3 bytes long"):
        jaxckpt.Run(run).fork(tmp_path / "new")
    victim.unlink()
    with pytest.raises(jaxckpt.errors.DataError, match="is missing"):
        jaxckpt.Run(run).fork(tmp_path / "new")
    next((run / "00000002").glob("data-*/process-0.json")).unlink()
    with pytest.raises(jaxckpt.errors.DataError, match=r"process-0\.json is missing"):
        jaxckpt.Run(run).fork(tmp_path / "new", step=2)
    assert not files(tmp_path / "new")


@pytest.mark.one_device
def test_the_command(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["fork", f"{run}@2", str(tmp_path / "new"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"run": f"{run}@2", "new_run": str(tmp_path / "new"), "step": 2}
    result = CliRunner().invoke(main, ["fork", str(run), str(tmp_path / "new")])
    assert result.exit_code == 2


@pytest.mark.one_device
def test_a_checkpoint_does_not_become_a_run(run: Path, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "alone", {"w": jnp.zeros(3)})
    before = files(tmp_path / "alone").keys()
    with pytest.raises(jaxckpt.errors.CheckpointExistsError, match="alone is a checkpoint"):
        jaxckpt.Run(run).fork(tmp_path / "alone")
    assert files(tmp_path / "alone").keys() == before


def test_a_fork_has_the_metrics_that_were_added(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(2, {"w": np.ones(3)}, metrics={"loss": 0.5})
    run = jaxckpt.Run(tmp_path / "run")
    run.add_metrics(2, {"accuracy": 0.9, "loss": 0.25})
    run.fork(tmp_path / "fork", step=2)
    assert jaxckpt.Run(tmp_path / "fork").metrics(2) == {"accuracy": 0.9, "loss": 0.25}
