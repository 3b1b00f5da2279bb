"""A newest step that cannot be read: an error that lists the others, or an older one with `on_unreadable`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import servers
import unreadable
from command_line import run_json
from processes import PROGRAMS, RunProcesses, run_python
from servers import Bucket

import jaxckpt
from jaxckpt.errors import CorruptError, InputError, StorageError

FAST = jaxckpt.Options(sync=False, storage={"retry_seconds": 1})


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((64, 8), float(step))}


def filled(directory: str | Path) -> str:
    with jaxckpt.Checkpointer(directory, options=FAST) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, state(step))
    return str(directory)


def never() -> dict[str, Any]:
    raise AssertionError("the run has steps, so it must not start from scratch")


def shapes() -> dict[str, Any]:
    return state(0)


@pytest.mark.parametrize("kind", unreadable.DAMAGES)
def test_the_previous_step_is_restored_and_training_continues(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    unreadable.DAMAGES[kind](tmp_path / "00000030")
    with jaxckpt.Checkpointer(tmp_path, every=10, keep_last=2, options=FAST) as checkpoints:
        last, restored = checkpoints.restore_or_init(shapes, on_unreadable="previous")
        assert last == 20
        assert float(restored["w"][0, 0]) == 20.0
        assert checkpoints.steps() == [10, 20]
        assert checkpoints.latest_step() == 20
        (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert said.getMessage().startswith(f"step 30 of {tmp_path} cannot be read, and is not restored")
        assert "is tried instead. A step that cannot be read is kept until it is saved again" in caplog.text
        for step in range(21, 41):
            checkpoints.save(step, state(step))
    warned = [
        record.getMessage() for record in caplog.records if "could not be read, is deleted" in record.getMessage()
    ]
    assert warned == [f"step 30 of {tmp_path}, which could not be read, is deleted after it has been saved again"]
    assert checkpoints.steps() == [30, 40]
    assert float(checkpoints.restore(30)["w"][0, 0]) == 30.0
    (incident,) = jaxckpt.Run(tmp_path).incidents()
    assert (incident.step, incident.kind) == (30, "unreadable step")
    assert [entry["incidents"] for entry in run_json("ls", str(tmp_path))["checkpoints"]] == [[], []]


def test_ls_shows_an_unreadable_step_until_it_is_saved_again(tmp_path: Path) -> None:
    filled(tmp_path)
    unreadable.flip(tmp_path / "00000030")
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        checkpoints.restore_or_init(shapes, on_unreadable="previous")
        assert [entry["incidents"] for entry in run_json("ls", str(tmp_path))["checkpoints"]] == [
            [], [], ["unreadable step"]
        ]  # fmt: skip
        checkpoints.save(30, state(30))
    assert [entry["incidents"] for entry in run_json("ls", str(tmp_path))["checkpoints"]] == [[], [], []]


@pytest.mark.parametrize("kind", unreadable.DAMAGES)
def test_by_default_the_error_lists_the_other_steps(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    unreadable.DAMAGES[kind](tmp_path / "00000030")
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        with pytest.raises(CorruptError) as raised:
            checkpoints.restore_or_init(shapes)
        assert "other steps in" in raised.value.__notes__[-1]
        assert "[10, 20]" in raised.value.__notes__[-1]
        assert not any("ignoring" in record.getMessage() for record in caplog.records)
        assert float(checkpoints.restore(20)["w"][0, 0]) == 20.0
        with pytest.raises(CorruptError):  # nothing was passed over
            checkpoints.restore()


def test_if_no_step_can_be_read_nothing_is_initialized(tmp_path: Path) -> None:
    filled(tmp_path)
    for step, damage in zip((10, 20, 30), unreadable.DAMAGES.values(), strict=False):
        damage(tmp_path / f"{step:08d}")
    before = sorted(path for path in tmp_path.rglob("*") if "_run" not in path.parts)
    checkpoints = jaxckpt.Checkpointer(tmp_path, options=FAST)
    with pytest.raises(CorruptError) as raised:
        checkpoints.restore_or_init(shapes, on_unreadable="previous")
    assert "no step in" in raised.value.__notes__[-1]
    assert "[30, 20, 10]" in raised.value.__notes__[-1]
    assert [incident.step for incident in checkpoints.incidents()] == [30, 20, 10]
    with pytest.raises(CorruptError):  # as after a pause, in case the storage recovers
        checkpoints.restore_or_init(shapes, on_unreadable="previous")
    assert checkpoints.steps() == [10, 20, 30]
    with pytest.raises(jaxckpt.errors.CheckpointExistsError):
        checkpoints.save(10, {"w": jnp.zeros(3)})
    checkpoints.close()
    assert sorted(path for path in tmp_path.rglob("*") if "_run" not in path.parts) == before


def test_an_older_step_is_the_first_that_is_tried(tmp_path: Path) -> None:
    filled(tmp_path)
    unreadable.flip(tmp_path / "00000020")
    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        assert float(checkpoints.restore(20, on_unreadable="previous")["w"][0, 0]) == 10.0
        assert float(checkpoints.restore(on_unreadable="previous")["w"][0, 0]) == 30.0


def test_an_error_of_the_caller_passes_over_nothing(tmp_path: Path) -> None:
    filled(tmp_path)

    def broken() -> dict[str, Any]:
        raise CorruptError("of another checkpoint, from which init starts")

    with jaxckpt.Checkpointer(tmp_path, options=FAST) as checkpoints:
        with pytest.raises(CorruptError, match="of another checkpoint"):
            checkpoints.restore_or_init(broken, on_unreadable="previous")
        with pytest.raises(InputError):
            checkpoints.restore_or_init(lambda: {"w": jnp.zeros(3)}, on_unreadable="previous")
        with pytest.raises(InputError, match="on_unreadable must be"):
            checkpoints.restore_or_init(shapes, on_unreadable="older")  # pyright: ignore[reportArgumentType]
        assert checkpoints.incidents() == []
        assert checkpoints.latest_step() == 30
    with jaxckpt.Checkpointer(tmp_path / "new", options=FAST) as checkpoints:
        assert checkpoints.restore_or_init(shapes, on_unreadable="previous")[0] is None


@pytest.mark.child
def test_a_step_that_a_bucket_refuses(bucket: Bucket) -> None:
    filled(bucket.url)
    bucket.proxy.on("(GET|HEAD) .*", forbidden(bucket))
    checkpoints = jaxckpt.Checkpointer(bucket.url, options=FAST)
    with pytest.raises(StorageError) as raised:
        checkpoints.restore_or_init(shapes)
    assert "[10, 20]" in raised.value.__notes__[-1]
    last, restored = checkpoints.restore_or_init(shapes, on_unreadable="previous")
    assert last == 20
    assert float(restored["w"][0, 0]) == 20.0
    checkpoints.close()


@pytest.mark.child
def test_all_processes_pass_over_a_step_that_a_bucket_refuses(s3: Bucket, run_processes: RunProcesses) -> None:
    filled(f"{s3.url}/refused")
    s3.proxy.on("(GET|HEAD) .*", forbidden(s3))
    args = {"folder": s3.url, "kinds": ["refused"]}
    done = run_processes(PROGRAMS / "unreadable_steps.py", processes=4, devices_per_process=1, args=args)
    assert [json.loads(one.stdout.splitlines()[-1]) for one in done] == [{"refused": [True, 20, [20.0]]}] * 4


def forbidden(bucket: Bucket) -> Callable[[servers.Exchange], None]:
    refuse = servers.status(403, "AccessDenied")

    def spoil(exchange: servers.Exchange) -> None:
        if "00000030/" in exchange.key:
            refuse(exchange)
        else:
            exchange.send(exchange.forward())

    return spoil


@pytest.mark.child
def test_all_processes_choose_the_same_step(tmp_path: Path, run_processes: RunProcesses) -> None:
    is_root = os.getuid() == 0
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    kinds = ["an object missing", "the manifest flipped"]  # found while it is read, and when it is opened
    for kind in [*kinds, "refused"]:
        filled(tmp_path / kind)
        if kind != "refused":
            unreadable.DAMAGES[kind](tmp_path / kind / "00000030")
    (tmp_path / "refused" / "00000030").chmod(0o700)  # to process 2, which has another user
    args = {"folder": str(tmp_path), "kinds": [*kinds, *(["refused"] if is_root else [])]}
    done = run_processes(PROGRAMS / "unreadable_steps.py", processes=3, devices_per_process=1, args=args)
    outcomes = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for kind, (others, last, values) in outcomes[0].items():
        assert others is True, kind
        assert (last, values) == (20, [20.0]), kind


NOBODY = """
import os, sys
import jax.numpy as jnp
import jaxckpt

os.setegid(65534)
os.seteuid(65534)
with jaxckpt.Checkpointer(sys.argv[1]) as checkpoints:
    last, state = checkpoints.restore_or_init(lambda: {"w": jnp.zeros((64, 8))}, on_unreadable="previous")
    assert (last, float(state["w"][0, 0])) == (20, 20.0)
    checkpoints.save(40, state)
print(jaxckpt.open(sys.argv[1] + "@40").step)
"""


@pytest.mark.child
@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a program as another user")
@pytest.mark.parametrize("hidden", ["00000030", "00000030/data-*"])
def test_a_step_in_a_folder_that_may_not_be_listed(hidden: str, tmp_path: Path) -> None:
    filled(tmp_path / "run")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        os.chown(path, 65534, 65534)
    (folder,) = (tmp_path / "run").glob(hidden)
    folder.chmod(0)
    assert "40" in run_python(NOBODY, args=[str(tmp_path / "run")])


OLD_STEP = """
import os, sys
import jax.numpy as jnp
import jaxckpt

os.setegid(65534)
os.seteuid(65534)
with jaxckpt.Checkpointer(sys.argv[1], keep_last=2) as checkpoints:
    last, state = checkpoints.restore_or_init(lambda: {"w": jnp.zeros((64, 8))})
    assert (last, float(state["w"][0, 0])) == (30, 30.0)
    for step in (40, 50, 60):
        checkpoints.save(step, state)
assert jaxckpt.Run(sys.argv[1]).steps() == [10, 50, 60]
report = jaxckpt.verify(sys.argv[1])
assert [problem.object for problem in report.problems] == ["00000010/manifest.json"], report
assert report.leaves == 2
print("all checks passed")
"""


@pytest.mark.child
@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a program as another user")
def test_an_old_step_in_a_folder_that_may_not_be_listed_concerns_no_other(tmp_path: Path) -> None:
    filled(tmp_path / "run")
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):
        folder.chmod(0o755)
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        os.chown(path, 65534, 65534)
    (tmp_path / "run" / "00000010").chmod(0)
    run_python(OLD_STEP, args=[str(tmp_path / "run")], word="all checks passed")
