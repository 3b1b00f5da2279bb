"""Conversion of whole runs: ours to ours, to Orbax and back, resumed after an interruption, with metrics and notes."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest
from command_line import run as run_command

import jaxckpt
import jaxckpt.orbax
from jaxckpt._convert import convert as _convert
from jaxckpt.errors import CheckpointExistsError, InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax raises various warnings


def state(step: int) -> dict[str, Any]:
    return {
        "w": jnp.full((4, 3), float(step)),
        "layers": [np.arange(step), {"b": np.full(2, step, np.float16)}],
        "step": step,
    }


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A run of three steps with metrics, one of which is not finite, and one was added later."""
    rules: dict[str, Any] = {"keep_best": ("loss", "min", 3), "keep_last": 3}
    with jaxckpt.Checkpointer(tmp_path / "ours", metadata={"model": "tiny"}, **rules) as run:
        for step, loss in ((10, 0.5), (20, float("nan")), (30, 0.25)):
            run.save(step, state(step), metrics={"loss": loss})
        run.wait()
        run.pin(20, "paper")
        run.add_metrics(30, {"accuracy": 0.9})
    return tmp_path / "ours"


def same(path: Any, step: int) -> bool:
    found, expected = jaxckpt.load_numpy(path), state(step)
    return (
        np.array_equal(found["w"], expected["w"])
        and np.array_equal(found["layers"][0], expected["layers"][0])
        and np.array_equal(found["layers"][1]["b"], expected["layers"][1]["b"])
        and found["step"] == step
    )


METRICS = {10: {"loss": 0.5}, 20: {"loss": None}, 30: {"loss": 0.25, "accuracy": 0.9}}


def test_orbax_accepts_every_step_with_its_metrics(ours: Path, tmp_path: Path) -> None:
    """The installed CheckpointManager, with `best_fn`."""
    theirs = tmp_path / "theirs"
    jaxckpt.convert(ours, theirs, format="orbax")
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(theirs, options=options) as manager:
        assert manager.all_steps() == [10, 20, 30]
        assert manager.best_step() == 30
        assert manager.metrics(30) == METRICS[30]
        assert np.isnan(manager.metrics(20)["loss"])
        assert manager.restore(20, args=ocp.args.StandardRestore())["step"] == 20
    with v1.training.Checkpointer(theirs) as checkpointer:
        assert checkpointer.load(20, checkpointable_name="default")["step"] == 20, "as for every run of a manager"
    require_read(theirs, [10, 20, 30])


def require_read(theirs: Path, steps: list[int]) -> None:
    """Require that jaxckpt reads a converted run as it reads one of Orbax."""
    run = jaxckpt.Run(theirs)
    assert run.steps() == steps
    for step, metrics in METRICS.items():
        assert same(run.path(step), step)
        assert run.open(step).metrics == run.metrics(step) == metrics
        assert run.open(step).step == step
    assert run.best_step("loss", "min") == 30


def test_orbax_v1_accepts_every_step_with_its_metrics(ours: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    with v1.training.Checkpointer(theirs) as checkpointer:
        assert checkpointer.save(40, state(40), metrics={"loss": 1.0}, force=True)
    with pytest.raises(CheckpointExistsError, match="another run, with the steps 40"):
        jaxckpt.convert(ours, theirs, format="orbax-v1")
    jaxckpt.convert(f"{ours}@10", theirs / "10", format="orbax-v1")  # a single step, into their run
    jaxckpt.convert(ours, theirs, format="orbax-v1")
    with v1.training.Checkpointer(theirs) as checkpointer:
        assert [found.step for found in checkpointer.checkpoints] == [10, 20, 30, 40]
        assert checkpointer.checkpoints[2].metrics == METRICS[30]
        assert checkpointer.metadata(20).metadata["w"].shape == (4, 3)
        loaded = checkpointer.load(20)
        assert loaded["step"] == 20
        assert np.array_equal(loaded["w"], state(20)["w"])
        assert checkpointer.load(30, state(0))["layers"][0].shape == (30,)
        assert checkpointer.save(50, {"w": np.ones(2)}, force=True)
    assert v1.load(theirs / "30")["step"] == 30
    require_read(theirs, [10, 20, 30, 40, 50])


def test_there_and_back(ours: Path, tmp_path: Path) -> None:
    jaxckpt.convert(ours, tmp_path / "theirs", format="orbax")
    jaxckpt.convert(tmp_path / "theirs", tmp_path / "back")
    run = jaxckpt.Run(tmp_path / "back")
    assert run.steps() == [10, 20, 30]
    for step, metrics in METRICS.items():
        assert same(run.path(step), step)
        assert (run.metrics(step), run.open(step).step, run.open(step).metadata) == (metrics, step, None)
    with jaxckpt.Checkpointer(tmp_path / "back", keep_best=("loss", "min", 2)) as more:
        more.save(40, state(40), metrics={"loss": 0.1})
        more.wait()
        assert more.steps() == [30, 40]


def test_a_copy_of_a_run_has_its_notes(ours: Path, tmp_path: Path) -> None:
    jaxckpt.convert(ours, tmp_path / "copy", mesh={"x": 2}, select=["w", "step"])
    run = jaxckpt.Run(tmp_path / "copy")
    assert run.metadata() == {"model": "tiny"}
    assert run.pins() == {"paper": 20}
    assert run.best_step() == 30
    assert {step: run.metrics(step) for step in run.steps()} == METRICS
    assert list(run.open("paper")) == ["step", "w"]
    url = "memory://converted/run"
    jaxckpt.convert(ours, url)
    assert jaxckpt.Run(url).steps() == [10, 20, 30]
    assert jaxckpt.Run(url).pins() == {"paper": 20}


@pytest.mark.parametrize("item", ["default", "state"])
def test_runs_that_orbax_wrote(tmp_path: Path, item: str) -> None:
    theirs = tmp_path / "theirs"
    if item == "default":
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
        with ocp.CheckpointManager(theirs, options=options) as manager:
            for step in (5, 25):
                manager.save(step, args=ocp.args.StandardSave(state(step)), metrics={"loss": 1 / step})
    else:
        with v1.training.Checkpointer(theirs) as checkpointer:
            for step in (5, 25):
                checkpointer.save(step, state(step), metrics={"loss": 1 / step}, force=True)
    jaxckpt.convert(theirs, tmp_path / "ours")
    run = jaxckpt.Run(tmp_path / "ours")
    assert {step: run.metrics(step) for step in run.steps()} == {5: {"loss": 0.2}, 25: {"loss": 0.04}}
    assert same(run.path(25), 25)
    assert not list(theirs.glob("_run")), "a lease of a reader does not belong to Orbax's run"
    with ThreadPoolExecutor(1) as executor:
        jaxckpt.convert(theirs, tmp_path / "by workers", executor=executor)
    assert jaxckpt.Run(tmp_path / "by workers").metrics(25) == {"loss": 0.04}
    assert same(f"{tmp_path}/by workers@25", 25)


def test_a_step_that_orbax_deletes_meanwhile_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convert_one = _convert._convert  # pyright: ignore[reportPrivateUsage]
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path / "theirs", options=options) as manager:

        def saving(*args: Any, **named: Any) -> None:
            convert_one(*args, **named)
            if manager.latest_step() == 25:
                for step in (35, 45):
                    manager.save(step, args=ocp.args.StandardSave(state(step)))
                manager.wait_until_finished()

        for step in (5, 25):
            manager.save(step, args=ocp.args.StandardSave(state(step)))
        manager.wait_until_finished()
        monkeypatch.setattr(_convert, "_convert", saving)
        jaxckpt.convert(tmp_path / "theirs", tmp_path / "ours")
    assert jaxckpt.Run(tmp_path / "ours").steps() == [5]
    assert "step 25 of" in caplog.text


@pytest.mark.parametrize("format", ["jaxckpt", "orbax"])
def test_an_interrupted_conversion_is_resumed(
    ours: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete steps are skipped; the one that was being written is written again."""
    target = tmp_path / "target"
    convert_one, done = _convert._convert, list[str]()

    def interrupted(*args: Any, **named: Any) -> None:
        done.append(Path(args[4]).name)
        if len(done) == 2:
            with monkeypatch.context() as patch:  # ends in the middle of the data of the second step
                patch.setattr("jaxckpt._restore.read_loop.StoredArray.__getitem__", _fail)
                convert_one(*args, **named)
        convert_one(*args, **named)

    monkeypatch.setattr(_convert, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        jaxckpt.convert(ours, target, format=format)
    assert jaxckpt.Run(target).steps() == [10]
    before = {path: path.stat().st_mtime_ns for path in (target / done[0]).rglob("*")}
    jaxckpt.convert(ours, target, format=format)
    assert jaxckpt.Run(target).steps() == [10, 20, 30]
    assert len(done) == 4, done
    assert {path: path.stat().st_mtime_ns for path in (target / done[0]).rglob("*")} == before
    assert all(same(f"{target}@{step}", step) for step in (10, 20, 30))
    jaxckpt.convert(ours, target, format=format, overwrite=True)
    assert len(done) == 7, "overwrite=True converts every step again"
    assert {step: jaxckpt.Run(target).metrics(step) for step in (10, 20, 30)} == METRICS


def test_a_step_that_is_deleted_meanwhile_is_skipped(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the rules of a Checkpointer do not delete the step that is being converted."""
    convert_one, held = _convert._convert, list[list[str]]()  # pyright: ignore[reportPrivateUsage]

    def deleting(*args: Any, **named: Any) -> None:
        held.append([path.name[:14] for path in (ours / "_run").iterdir() if path.name.startswith("lease")])
        if len(held) == 1:
            shutil.rmtree(ours / "00000020")
        convert_one(*args, **named)

    monkeypatch.setattr(_convert, "_convert", deleting)
    jaxckpt.convert(ours, tmp_path / "target")
    assert jaxckpt.Run(tmp_path / "target").steps() == [10, 30]
    assert "step 20 of" in caplog.text
    assert held == [["lease-00000010"], ["lease-00000030"]]
    assert not [path for path in (ours / "_run").iterdir() if path.name.startswith("lease")]


def _fail(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_steps_of_another_run_are_not_taken_for_converted_ones(ours: Path, tmp_path: Path) -> None:
    for step, tree, problem in (
        (20, {**state(20), "w": np.ones(2)}, "'w' has the shape"),
        (20, {"other": 1}, "only one of them has the leaf"),
        (20, state(20), r"it has the metrics \{\}"),
        (21, state(21), "another run, with the steps 21"),
    ):
        target = tmp_path / f"{step}-{len(tree)}-{problem[:4]}"
        with jaxckpt.Checkpointer(target) as other:
            other.save(step, tree)
        with pytest.raises(CheckpointExistsError, match=problem):
            jaxckpt.convert(ours, target)
        assert jaxckpt.Run(target).steps() == [step]
    jaxckpt.convert(ours, tmp_path / "theirs", format="orbax")
    with pytest.raises(CheckpointExistsError, match="another run, with the steps 10, 20, 30"):
        jaxckpt.convert(ours, tmp_path / "theirs")
    with pytest.raises(InputError, match="is the run itself"):
        jaxckpt.convert(ours, ours)
    jaxckpt.save(tmp_path / "single", {"w": 1})
    with pytest.raises(InputError, match="is a checkpoint"):
        jaxckpt.convert(ours, tmp_path / "single")


def test_a_run_is_never_converted_to_one_file_in_silence(ours: Path, tmp_path: Path) -> None:
    expected = r"is a run with 3 steps, but .*'safetensors' is one step.*ours@30 or .*ours@latest"
    with pytest.raises(InputError, match=expected):
        jaxckpt.convert(ours, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    jaxckpt.convert(f"{ours}@latest", tmp_path / "model.npz", select="w")
    assert jaxckpt.load_numpy(tmp_path / "model.npz")["w"][0, 0] == 30
    jaxckpt.convert(f"{ours}@best", tmp_path / "single")
    assert jaxckpt.open(tmp_path / "single").step == 30


def test_the_command_converts_runs(ours: Path, tmp_path: Path) -> None:
    done = run_command("convert", str(ours), str(tmp_path / "theirs"), "--format", "orbax")
    assert done.exit_code == 0
    record = json.loads((tmp_path / "theirs" / "20" / "_CHECKPOINT_METADATA").read_text())
    assert record["item_handlers"].keys() == {"default", "metrics"}


@pytest.mark.parametrize("format", ["orbax", "orbax-v1"])
def test_metadata_goes_to_orbax_and_back(tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture) -> None:
    """What Orbax has no place for is named."""
    with jaxckpt.Checkpointer(tmp_path / "ours", metadata={"model": "tiny"}, keep_best=("loss", "min", 1)) as run:
        run.save(1, state(1), metadata={"commit": "abc"}, metrics={"loss": 1}, process_state={"data": 1})
        run.wait()
        run.pin(1, "paper")
    jaxckpt.convert(tmp_path / "ours", tmp_path / "theirs", format=format)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.endswith("no place for them: keep_best; pin 'paper'; process_state")
    if format == "orbax":
        with ocp.CheckpointManager(tmp_path / "theirs") as manager:
            assert manager.metadata().custom_metadata == {"model": "tiny"}
            assert manager.metadata(1).custom_metadata == {"commit": "abc"}
    else:
        with v1.training.Checkpointer(tmp_path / "theirs") as checkpointer:
            assert checkpointer.root_metadata().custom_metadata == {"model": "tiny"}
            assert checkpointer.metadata(1).custom_metadata == {"commit": "abc"}
    jaxckpt.convert(tmp_path / "theirs", tmp_path / "back")
    for path in ("theirs", "back"):
        assert jaxckpt.Run(tmp_path / path).metadata() == {"model": "tiny"}
    assert jaxckpt.Run(tmp_path / "back").open(1).metadata == {"commit": "abc"}
    with pytest.raises(InputError, match=r"best_step\(\"loss\", \"min\"\)"):
        jaxckpt.open(f"{tmp_path / 'back'}@best")


@pytest.mark.parametrize("format", ["orbax", "orbax-v1"])
@pytest.mark.parametrize("metadata", [[1, {"a": None}], "text", 0, {}])
def test_metadata_that_is_not_a_dict_comes_back_from_orbax(tmp_path: Path, metadata: Any, format: str) -> None:
    with jaxckpt.Checkpointer(tmp_path / "ours") as run:
        run.save(1, state(1), metadata=metadata)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "theirs", format=format)
    jaxckpt.convert(tmp_path / "theirs", tmp_path / "back")
    assert jaxckpt.Run(tmp_path / "back").open(1).metadata == metadata


@pytest.mark.parametrize("registry", [None, jaxckpt.orbax.handler_registry()])
def test_the_metadata_of_a_run_of_orbax_is_kept(
    tmp_path: Path, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(
        tmp_path / "theirs", options=options, metadata={"lr": float("inf")}, handler_registry=registry
    ) as manager:
        metrics = {"loss": 0.5, "eval": {"loss": 0.25}, "name": "x"}
        args = ocp.args.StandardSave({"w": np.ones(2)})
        manager.save(1, args=args, metrics=metrics, custom_metadata={"most": float("inf")})
    jaxckpt.convert(tmp_path / "theirs", tmp_path / "ours")
    (warning,) = (record.getMessage() for record in caplog.records if "lacks" in record.getMessage())
    assert warning.endswith("no place for them: metric 'eval', not a number; metric 'name', not a number")
    run = jaxckpt.Run(tmp_path / "ours")
    assert (run.metadata(), run.metrics(1)) == ({"lr": "Infinity"}, {"loss": 0.5})
    assert run.open(1).metadata == jaxckpt.open(tmp_path / "theirs").metadata["custom_metadata"] == {"most": "Infinity"}


def test_a_refused_step_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path / "ours") as run:
        run.save(7, {"n": 1 << 80})
    with pytest.raises(jaxckpt.errors.TreeError, match=r"ours/00000007: Orbax cannot store 1 of these leaves"):
        jaxckpt.convert(tmp_path / "ours", tmp_path / "new" / "theirs", format="orbax")
    assert not (tmp_path / "new").exists()
