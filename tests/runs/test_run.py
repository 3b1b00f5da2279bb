"""Run: pins that move, names of steps, and metrics that an evaluator adds afterwards."""

from __future__ import annotations

import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from processes import RunProcesses

import jaxckpt
from jaxckpt import errors
from jaxckpt._run_folder import leases
from jaxckpt._store.folder import Folder

FAST = jaxckpt.Options(sync=False)


def save(path: Path, *numbers: int, **arguments: Any) -> None:
    with jaxckpt.Checkpointer(path, options=FAST, background=False, **arguments) as checkpointer:
        for number in numbers:
            checkpointer.save(number, {"w": np.full(3, number)}, metrics={"loss": float(number)})


def test_a_step_is_given_by_its_number_or_a_name(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, keep_last=9, keep_best=("loss", "min"))
    run = jaxckpt.Run(tmp_path)
    assert run.pin("best", "first") == 1
    assert run.pins() == {"first": 1}
    for step, number in ((2, 2), ("latest", 3), ("best", 1), ("first", 1)):
        assert run.restore(step)["w"].tolist() == [number] * 3
        assert run.open(step).step == number
        assert run.path(step).endswith(f"{number:08d}")
        assert run.metrics(step) == {"loss": number}
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        assert checkpointer.restore("first")["w"].tolist() == [1] * 3
    with pytest.raises(errors.InputError, match=r"no step named 'frist'.*did you mean 'first'"):
        run.restore("frist")
    with pytest.raises(errors.NotACheckpointError, match="does not exist"):
        jaxckpt.Run(tmp_path / "empty").pin("latest", "x")


def test_a_directory_that_does_not_exist_has_no_steps(tmp_path: Path) -> None:
    """Training may start later. What needs a step is an error that names the directory."""
    run = jaxckpt.Run(tmp_path / "typo")
    assert (run.steps(), run.latest_step()) == ([], None)
    assert run.best_step("loss", "min") is None
    calls = (run.open, run.restore, run.best_step, lambda: run.path("latest"))
    for call in calls:
        with pytest.raises(errors.NotACheckpointError, match=f"{tmp_path}/typo is not a .*does not exist, or .* empty"):
            call()
    (tmp_path / "typo/_run").mkdir(parents=True)
    assert run.best_step("loss", "min") is None
    with pytest.raises(errors.NotACheckpointError, match="typo has no steps"):
        run.path("latest")


def test_a_pin_moves_to_a_better_step_without_losing_it(tmp_path: Path) -> None:
    """The evaluator of the report: it moves its pin to each new best step while old steps are deleted."""
    run = jaxckpt.Run(tmp_path, options=FAST)
    with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST) as checkpointer:
        for number in range(6):
            checkpointer.save(number, {"w": np.full(3, number)})
            checkpointer.wait()
            if number in (1, 4):
                run.pin(number, "best-so-far", move=True)
    assert run.pins() == {"best-so-far": 4}
    assert run.steps() == [4, 5]
    with pytest.raises(errors.InputError, match=r"is the name of step 4 .*pass move=True"):
        run.pin(5, "best-so-far")


def test_a_pin_does_not_move_to_a_step_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    run, put = jaxckpt.Run(tmp_path, options=FAST), Folder.put
    run.pin(1, "paper")

    def put_late(store: Folder, key: str, content: bytes, **options: Any) -> None:
        if key == "pin-00000002-paper":
            shutil.rmtree(tmp_path / "00000002")  # `jaxckpt rm` respects no lease
        put(store, key, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "put", put_late)
        with pytest.raises(errors.NotACheckpointError, match="has no step 2: it was deleted"):
            run.pin(2, "paper", move=True)
    assert run.pins() == {"paper": 1}


@pytest.mark.parametrize("losses", [[1.0, 2.0], [math.nan, math.nan]])
def test_a_pin_does_not_move_to_a_step_that_no_metric_has_chosen(tmp_path: Path, losses: list[float]) -> None:
    run = jaxckpt.Run(tmp_path, options=FAST)
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        for number, loss in enumerate(losses):
            checkpointer.save(number, {"w": number}, metrics={"loss": loss, "accuracy": math.nan})
    run.pin(0, "best-eval")
    assert run.best_step("accuracy", "max") is None
    with pytest.raises(errors.InputError, match="found None: best_step"):
        run.pin(run.best_step("accuracy", "max"), "best-eval", move=True)  # type: ignore[arg-type]
    for reader in (run, jaxckpt.Checkpointer(tmp_path, options=FAST)):
        with pytest.raises(errors.InputError) as error:
            reader.best_step("acuracy", "max")
        assert str(error.value) == (
            f"no step in {tmp_path} has a metric 'acuracy'; the steps have 'accuracy', 'loss'; did you mean 'accuracy'?"
        )
    assert run.pins() == {"best-eval": 0}


def test_steps_without_metrics_have_no_best_step(tmp_path: Path) -> None:
    run = jaxckpt.Run(tmp_path, options=FAST)
    assert run.best_step("loss", "min") is None
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        assert checkpointer.best_step("loss", "min") is None
        checkpointer.save(1, {"w": 1})
    assert run.best_step("loss", "min") is None


def test_a_new_rule_has_no_best_step_before_its_first_save(tmp_path: Path) -> None:
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.save(1, {"w": 1}, metrics={"acc": 1.0})
    with jaxckpt.Checkpointer(tmp_path, options=FAST, keep_best=("loss", "min")) as checkpointer:
        assert checkpointer.best_step() is None
        checkpointer.save(2, {"w": 2}, metrics={"loss": 1.0})
        assert checkpointer.best_step() == 2


def test_a_mode_is_missing_or_a_metric_is_mistyped(tmp_path: Path) -> None:
    save(tmp_path, 1, keep_best=("loss", "min"))
    with pytest.raises(errors.InputError, match=r"best_step\('los'\) needs mode=.*did you mean 'loss'\?"):
        jaxckpt.Run(tmp_path).best_step("los")


def test_a_missing_step_is_an_error_that_names_others(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    run = jaxckpt.Run(tmp_path, options=FAST)
    for call in (lambda: run.metrics(31), lambda: run.add_metrics(31, {"x": 1}), lambda: run.pin(31, "x")):
        with pytest.raises(errors.NotACheckpointError, match=r"has no step 31; the newest steps are 1, 2$"):
            call()


def test_steps_are_those_of_the_run_and_not_of_a_folder_beside_it(tmp_path: Path) -> None:
    """run@40 may be a checkpoint, and run@20 another run."""
    path = tmp_path / "run"
    for name in ("40", "best", "paper", "30"):
        jaxckpt.save(f"{path}@{name}", {"w": np.full(3, 99)}, options=FAST)
    save(Path(f"{path}@20"), 7)
    save(path, 10, 20, 40, keep_last=9, keep_best=("loss", "max"))
    run = jaxckpt.Run(path, options=FAST)
    run.pin(10, "paper")
    for step, number in ((40, 40), ("40", 40), ("best", 40), ("paper", 10), (20, 20), ("020", 20), ("latest", 40)):
        assert run.restore(step)["w"].tolist() == [number] * 3
        assert run.open(step).step == number
        assert run.pin(step, "zz", move=True) == number
        assert run.pins()["zz"] == number
        assert run.fork(tmp_path / f"fork-{step!r}", step=step) == number
    with jaxckpt.Checkpointer(path, options=FAST) as checkpointer:
        assert checkpointer.open(40).step == 40
        assert checkpointer.restore(20)["w"].tolist() == [20] * 3
    assert jaxckpt.Run(f"{path}@20").pins() == {}
    for call in (
        lambda: run.open(30),
        lambda: run.restore("30"),
        lambda: run.pin(30, "x"),
        lambda: run.fork("f", step=30),
    ):
        with pytest.raises(errors.NotACheckpointError, match=r"run has no step 30; the newest steps are 10, 20, 40$"):
            call()


@pytest.mark.parametrize("name", ["a/b", "../run@x", "", "@", "1.5"])
def test_a_name_that_no_step_can_have(run: str, name: str) -> None:
    with jaxckpt.Checkpointer(run, options=FAST) as checkpointer:
        checkpointer.save(1, {"w": 1})
    steps = jaxckpt.Run(run)
    for call in (steps.open, steps.restore, steps.metrics, steps.path, lambda name: steps.pin(name, "x")):
        with pytest.raises(errors.InputError) as error:
            call(name)
        assert str(error.value).startswith(
            f"{run} has no step named {name!r}: give a number, as in {run}@1, or one of "
        )


def test_a_run_without_steps_has_none_with_a_number(run: str, tmp_path: Path) -> None:
    with pytest.raises(errors.NotACheckpointError, match="run is not a run: the directory does not exist, or is empty"):
        jaxckpt.Run(run).restore(40)
    jaxckpt.save(tmp_path / "checkpoint", {"w": 1})
    with pytest.raises(errors.InputError, match="is a checkpoint; give the directory of a Checkpointer"):
        jaxckpt.Run(tmp_path / "checkpoint").restore(40)


def test_a_killed_move_leaves_both_steps_protected(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    run = jaxckpt.Run(tmp_path, options=FAST)
    run.pin(1, "paper")
    (tmp_path / "_run" / "pin-00000002-paper").touch()  # as if it had been killed before it removed the old pin
    assert run.pins() == {"paper": 2}
    save(tmp_path, 4, keep_last=1)
    assert run.steps() == [1, 2, 4]
    run.unpin("paper")
    assert run.pins() == {}


def test_a_pinned_step_is_not_deleted_on_request_either(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    run = jaxckpt.Run(tmp_path, options=FAST)
    run.pin(1, "paper")
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        with pytest.raises(errors.InputError, match=r"step 1 of .* is pinned as 'paper', and is not deleted: unpin it"):
            checkpointer.delete(1)
        checkpointer.save(3, {"x": 3})  # the Checkpointer still works
    assert run.steps() == [1, 2, 3]
    run.unpin("paper")
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.delete(1)
    assert run.steps() == [2, 3]


def test_of_two_concurrent_moves_of_a_pin_neither_loses_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    run = jaxckpt.Run(tmp_path, options=FAST)
    list_pins, barrier = leases.all_pins, threading.Barrier(2)

    def list_together(run: Any) -> list[tuple[int, str]]:
        listed = list_pins(run)
        barrier.wait(30)
        return listed

    monkeypatch.setattr(leases, "all_pins", list_together)
    with ThreadPoolExecutor() as threads:
        moves = [threads.submit(run.pin, step, "best-so-far", move=True) for step in (1, 2)]
        assert [move.result(60) for move in moves] == [1, 2]
    monkeypatch.undo()
    save(tmp_path, 3, 4, keep_last=1)
    assert run.steps() == [1, 2, 4]
    run.pin(4, "best-so-far", move=True)
    assert [path.name for path in (tmp_path / "_run").glob("pin-*")] == ["pin-00000004-best-so-far"]


def test_keep_best_and_best_respect_metrics_that_are_added_later(tmp_path: Path) -> None:
    run = jaxckpt.Run(tmp_path, options=FAST)
    with jaxckpt.Checkpointer(tmp_path, keep_last=1, keep_best=("accuracy", "max"), options=FAST) as checkpointer:
        for number, accuracy in enumerate([0.5, 0.9, 0.7, 0.8]):
            checkpointer.save(number, {"w": np.full(3, number)}, metrics={"accuracy": float("nan")})
            checkpointer.wait()
            run.add_metrics(number, {"accuracy": accuracy, "note": 1})
        checkpointer.save(4, {"w": np.full(3, 4)}, metrics={"accuracy": float("nan")})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 4]
        assert checkpointer.best_step() == 1
        assert checkpointer.metrics(1) == {"accuracy": 0.9, "note": 1.0}
    assert run.best_step() == 1
    assert jaxckpt.open(f"{tmp_path}@best").step == 1
    assert [step.metrics["accuracy"] for step in run.follow()] == [0.9, None]
    assert run.best_step("note", "max") == 1
    with pytest.raises(errors.InputError, match='needs mode="min"'):
        run.best_step("note")
    left = [path.name for path in (tmp_path / "_run").glob("metric-*")]
    assert {name[:15] for name in left} == {"metric-00000001"}, "those of deleted steps are deleted"


def test_an_added_metric_does_not_count_for_another_save_of_the_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, keep_last=9, keep_best=("loss", "min"))
    run = jaxckpt.Run(tmp_path, options=FAST)
    run.add_metrics(2, {"loss": 0.0})
    assert run.best_step() == 2
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpointer:
        checkpointer.save(2, {"w": np.zeros(3)}, metrics={"loss": 5.0}, overwrite=True)
    assert run.metrics(2) == {"loss": 5.0}
    assert run.best_step() == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_metrics_of_a_step_that_is_deleted_meanwhile_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    save(tmp_path, 1, 2)
    replace = Folder.replace

    def delete_around(self: Folder, key: str, content: bytes, **options: Any) -> None:
        if when == "after":
            replace(self, key, content, **options)
        monkeypatch.undo()
        save(tmp_path, 3, keep_last=1)
        if when == "before":
            replace(self, key, content, **options)

    monkeypatch.setattr(Folder, "replace", delete_around)
    with pytest.raises(errors.NotACheckpointError, match="no step 1: it was deleted"):
        jaxckpt.Run(tmp_path, options=FAST).add_metrics(1, {"a": 1})
    assert not [*(tmp_path / "_run").glob("metric-*")]


def test_metrics_of_deleted_steps_are_deleted_when_a_checkpointer_opens(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    run = jaxckpt.Run(tmp_path, options=FAST)
    for number in (1, 2, 3):
        run.add_metrics(number, {"a": 1})
    (tmp_path / "_run" / "metric-00000002-0.json.new-0").touch()  # a program was killed while it added metrics
    (tmp_path / "00000002" / "manifest.json").unlink()  # and another while it deleted a step
    shutil.rmtree(tmp_path / "00000002")
    save(tmp_path, 4, keep_last=2, trash=True)  # moves step 1
    left = {path.name[:15] for path in (tmp_path / "_run").glob("metric-*")}
    assert left == {"metric-00000001", "metric-00000003"}
    shutil.rmtree(tmp_path / "_trash")
    save(tmp_path, 5)
    left = {path.name[:15] for path in (tmp_path / "_run").glob("metric-*")}
    assert left == {"metric-00000003"}


def test_a_metric_that_is_added_again_is_never_seen_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the training job could fail with the error of a damaged metric."""
    save(tmp_path, 1)
    run = jaxckpt.Run(tmp_path, options=FAST)
    run.add_metrics(1, {"a": 1})

    def killed(self: Folder, key: str, content: bytes, **_: Any) -> None:
        (Path(self.folder) / key).write_bytes(content[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        run.add_metrics(1, {"a": 2})
    assert run.metrics(1) == {"loss": 1.0, "a": 1.0}
    assert len([*(tmp_path / "_run").glob("metric-*")]) == 1


def test_wrong_and_damaged_metrics_are_errors(tmp_path: Path) -> None:
    save(tmp_path, 1)
    run = jaxckpt.Run(tmp_path, options=FAST)
    with pytest.raises(errors.InputError, match="metric 'a' must be a number"):
        run.add_metrics(1, {"a": "high"})
    with pytest.raises(errors.NotACheckpointError):
        run.add_metrics(7, {"a": 1})
    assert not [*(tmp_path / "_run").glob("metric-*")]
    run.add_metrics(1, {"a/b ü": 1.5})
    (file,) = (tmp_path / "_run").glob("metric-*")
    assert json.loads(file.read_text())["name"] == "a/b ü"
    for content in (b"{", b'{"name":"\xff"}'):
        file.write_bytes(content)
        with pytest.raises(errors.DataError, match="a metric that was added to a step, is damaged"):
            run.metrics(1)


def test_incidents_that_are_nested_too_deep_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "_run" / "incidents.json").write_bytes(b'[{"x": ' + b"[" * 99999 + b"]" * 99999 + b"}]")
    with pytest.raises(errors.DataError, match=r"incidents\.json is damaged: "):
        jaxckpt.Run(tmp_path).incidents()


# Metadata of the run ---------------------------------------------------------------------------------------


def test_metadata_of_a_run_is_written_once(run: str, caplog: pytest.LogCaptureFixture) -> None:
    config = {"model": "gpt-µ", "lr": 1e-3, "layers": [12, None, {"big": 2**70}], "ok": True}
    assert jaxckpt.Run(run).metadata() == {}
    with jaxckpt.Checkpointer(run, options=FAST) as checkpointer:
        assert checkpointer.metadata() == {}
    with jaxckpt.Checkpointer(run, metadata=MappingProxyType(config), options=FAST) as checkpointer:
        checkpointer.save(1, {"x": 1}, metadata="of the step")
        assert checkpointer.metadata() == config
    for again in (dict(reversed(config.items())), None):
        jaxckpt.Checkpointer(run, metadata=again, options=FAST).close()
    assert "metadata" not in caplog.text
    other = {"model": "gpt-µ", "lr": 2e-3, "layers": None, "ok": True, "seed": 0}
    with jaxckpt.Checkpointer(run, metadata=other, options=FAST) as checkpointer:
        assert checkpointer.metadata() == config
    assert "but metadata= differs in 'lr', 'layers', 'seed'" in caplog.text
    found = jaxckpt.Run(run)
    assert (found.metadata(), found.steps(), found.open(1).metadata) == (config, [1], "of the step")
    assert jaxckpt.verify(run).ok


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b'{"a": 1', b'{"a": ' + b"[" * 9999 + b"]" * 9999 + b"}"])
def test_damaged_metadata_is_an_error_for_readers_and_is_written_again(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, metadata={"a": 1})
    (tmp_path / "_run" / "metadata.json").write_bytes(content)
    with pytest.raises(errors.DataError, match=r"metadata\.json, the metadata of the run, is damaged: "):
        jaxckpt.Run(tmp_path).metadata()
    jaxckpt.Checkpointer(tmp_path, options=FAST).close()
    with jaxckpt.Checkpointer(tmp_path, metadata={"a": 2}, options=FAST) as checkpointer:
        assert "is written again" in caplog.text
        assert checkpointer.metadata() == {"a": 2}
        assert checkpointer.restore()["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrong", [[], "config", 1, {1: 2}, {"a": (1,)}, {"a": math.nan}, {"a": {1}}, {"a": "\ud800"}])
def test_metadata_of_a_run_is_a_json_object(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(errors.InputError, match="metadata must be"):
        jaxckpt.Checkpointer(tmp_path / "run", metadata=wrong)
    assert not (tmp_path / "run").exists()


def test_a_fork_describes_itself(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, metadata={"lr": 1})
    jaxckpt.Run(tmp_path / "a").fork(tmp_path / "b")
    assert jaxckpt.Run(tmp_path / "b").metadata() == {}
    save(tmp_path / "b", 2, metadata={"lr": 2})
    assert [jaxckpt.Run(tmp_path / name).metadata() for name in "ab"] == [{"lr": 1}, {"lr": 2}]


def test_all_processes_give_the_same_metadata(run_processes: RunProcesses, tmp_path: Path) -> None:
    program = """
import jaxckpt
for case in ([{"lr": 1}, {"lr": 2}], [{"lr": 1}, None], [{"a": "x" * 500}, {"a": "y" * 500}]):
    try:
        jaxckpt.Checkpointer(args, metadata=case[process_id])
    except jaxckpt.errors.PeersDisagreeError as error:
        print("process 1 created the Checkpointer with metadata=" in str(error), len(str(error)) < 400)
assert jaxckpt.Run(args).metadata() == {}
with jaxckpt.Checkpointer(args, metadata={"a": 1, "b": 2} if process_id else {"b": 2, "a": 1}) as checkpointer:
    print(checkpointer.metadata())
"""
    done = run_processes(program, processes=2, devices_per_process=1, args=str(tmp_path / "s"), timeout=90)
    assert [one.stdout for one in done] == ["True True\n" * 3 + "{'b': 2, 'a': 1}\n"] * 2
