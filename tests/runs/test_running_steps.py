"""A step that this process is saving: every method of every object of the run sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt
from jaxckpt._store.files import FileWriter

TREE = {"w": np.arange(3 << 16, dtype=np.float32)}
SLOW = jaxckpt.Options(max_bytes_per_second=6 << 20, object_bytes=128 << 10, sync=False)
"""A save in the background takes 0.13 s."""


def second(run: Path) -> jaxckpt.Checkpointer:
    return jaxckpt.Checkpointer(run, options=jaxckpt.Options(sync=False))


READS: dict[str, Callable[[jaxckpt.Run, Path], Any]] = {
    "steps": lambda run, path: run.steps()[-1],
    "latest_step": lambda run, path: run.latest_step(),
    "best_step": lambda run, path: run.best_step("loss", "min"),
    "metrics": lambda run, path: int(run.metrics(2)["loss"] == 0.5) + 1,
    "metrics of latest": lambda run, path: int(run.metrics("latest")["loss"] == 0.5) + 1,
    "add_metrics": lambda run, path: run.add_metrics(2, {"accuracy": 1.0}) or 2,
    "pin": lambda run, path: run.pin(2, "paper"),
    "pin latest": lambda run, path: run.pin("latest", "newest"),
    "fork": lambda run, path: run.fork(path / "forked", step=2),
    "open": lambda run, path: run.open().step,
    "open a number": lambda run, path: run.open(2).step,
    "path": lambda run, path: jaxckpt.open(run.path("latest")).step,
    "restore": lambda run, path: int(run.restore()["step"]),
    "restore a number": lambda run, path: int(run.restore(2)["step"]),
    "jaxckpt.restore": lambda run, path: int(jaxckpt.restore(path / "run")["step"]),
    "jaxckpt.load_numpy": lambda run, path: int(jaxckpt.load_numpy(path / "run" / "00000002")["step"]),
    "jaxckpt.open": lambda run, path: jaxckpt.open(f"{path}/run@2").step,
    "jaxckpt.verify": lambda run, path: 2 if jaxckpt.verify(path / "run" / "00000002").ok else 0,
}


@pytest.mark.parametrize("object_of", ["the same", "a second Checkpointer", "a Run"])
@pytest.mark.parametrize("read", READS)
def test_every_method_of_every_object_sees_the_running_step(tmp_path: Path, read: str, object_of: str) -> None:
    with jaxckpt.Checkpointer(tmp_path / "run", options=SLOW) as writer:
        writer.save(1, TREE | {"step": 1}, metrics={"loss": 1.0})
        writer.wait()
        writer.save(2, TREE | {"step": 2}, metrics={"loss": 0.5})
        assert writer.pending is not None
        assert not writer.pending.done
        match object_of:
            case "the same":
                assert READS[read](writer, tmp_path) == 2
            case "a Run":
                assert READS[read](jaxckpt.Run(tmp_path / "run"), tmp_path) == 2
            case _:
                with second(tmp_path / "run") as other:
                    assert READS[read](other, tmp_path) == 2


def test_a_second_checkpointer_resumes_from_the_running_step(tmp_path: Path) -> None:
    """As a cell of a notebook that is run twice."""
    first = jaxckpt.Checkpointer(tmp_path / "run", options=SLOW)
    first.save(1, TREE | {"step": 1})
    again = second(tmp_path / "run")
    step, tree = again.restore_or_init(lambda: TREE | {"step": 0})
    assert (step, tree["step"]) == (1, 1)
    again.close()
    first.close()


def test_a_running_save_of_one_path_is_read_after_it_ends(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "c", {"step": 1})
    pending = jaxckpt.save_async(tmp_path / "c", TREE | {"step": 2}, overwrite=True, options=SLOW)
    other = jaxckpt.save_async(tmp_path / "d", {"step": 3})
    assert jaxckpt.load_numpy(tmp_path / "c")["step"] == 2
    assert pending.done
    other.wait()


def test_other_paths_are_read_meanwhile(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "run-2", {"step": 1})
    with jaxckpt.Checkpointer(tmp_path / "run", options=SLOW) as writer:
        writer.save(1, TREE)
        assert jaxckpt.load_numpy(tmp_path / "run-2")["step"] == 1
        assert writer.pending is not None
        assert not writer.pending.done


def test_callbacks_of_the_save_read_without_waiting_for_it(tmp_path: Path) -> None:
    seen: list[Any] = []

    def on_done(info: jaxckpt.SaveInfo) -> None:
        seen.append(jaxckpt.Run(tmp_path / "run").latest_step())
        seen.append(jaxckpt.Run(tmp_path / "run").pin("latest", "done"))

    with jaxckpt.Checkpointer(tmp_path / "run") as writer:
        writer.save(1, TREE, on_done=on_done)
    assert seen == [1, 1]
    options = jaxckpt.Options(progress=lambda progress: seen.append(jaxckpt.Run(tmp_path / "run").latest_step()))
    jaxckpt.save(tmp_path / "run" / "other", TREE, options=options)
    assert set(seen[2:]) == {1}


def test_a_failed_step_is_not_seen_and_its_error_stays_with_its_checkpointer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gate = FileWriter.write, threading.Event()

    def fail(self: FileWriter, *arguments: Any) -> Any:
        if "/00000002/" not in self.folder:
            return write(self, *arguments)
        assert gate.wait(60)
        raise jaxckpt.errors.StorageError(28, "no space")

    monkeypatch.setattr(FileWriter, "write", fail)
    writer = jaxckpt.Checkpointer(tmp_path / "run")
    writer.save(1, TREE)
    writer.save(2, {"w": TREE["w"] + 1})  # otherwise it would be linked
    threading.Timer(0.2, gate.set).start()
    other = second(tmp_path / "run")
    assert other.latest_step() == 1
    assert jaxckpt.Run(tmp_path / "run").open().step == 1
    other.close()
    with pytest.raises(jaxckpt.errors.StorageError, match="no space"):
        writer.wait()
    writer.close()
