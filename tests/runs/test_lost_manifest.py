"""A published checkpoint that has lost its manifest: reads raise, nothing deletes it, and `repair` restores it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
from command_line import run, run_json
from processes import environment

import jaxckpt
from jaxckpt import weights
from jaxckpt._inspect import verify
from jaxckpt._inspect.verify import repair
from jaxckpt._model.file_names import COPY, MANIFEST, WRITER
from jaxckpt._store.folder import Folder
from jaxckpt._store.store import Store
from jaxckpt._store.store_path import store_at
from jaxckpt._store.transaction import Transaction
from jaxckpt.errors import CheckpointExistsError, DataError, InputError, ManifestError, NotACheckpointError

pytestmark = pytest.mark.child

FAST = jaxckpt.Options(sync=False)
BEST, PINNED, NEWEST = 2, 1, 3
STEPS = [1, 2, 3]


@pytest.fixture(params=["folder", "s3", "gs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new path on each kind of store."""
    return str(tmp_path) if request.param == "folder" else request.getfixturevalue(request.param).url


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((4, 5), step), "step": step}


def at(path: str) -> Store:
    return store_at(path, FAST)


def step_path(directory: str, step: int) -> str:
    return f"{directory}/{step:08d}"


def lose(path: str, content: bytes | None = None) -> None:
    """Delete the manifest, or replace it by this content."""
    if content is None:
        at(path).remove(MANIFEST)
    else:
        at(path).put(MANIFEST, content)


def opened(directory: str, **more: Any) -> jaxckpt.Checkpointer:
    return jaxckpt.Checkpointer(
        directory, keep_best=("loss", "min"), on_preemption="ignore", background=False, options=FAST, **more
    )


def saved(place: str) -> str:
    """A run of three steps, of which step 2 is the best, and step 1 is pinned."""
    directory = f"{place}/run"
    with opened(directory, keep_last=3) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, state(step), metrics={"loss": abs(step - BEST)})
        checkpoints.pin(PINNED, "paper")
    return directory


READS: dict[str, tuple[int, Callable[[jaxckpt.Run, str], Any]]] = {
    "restore": (NEWEST, lambda run, url: jaxckpt.restore(url)),
    "restore run@3": (NEWEST, lambda run, url: jaxckpt.restore(f"{url}@3")),
    "restore run@latest": (NEWEST, lambda run, url: jaxckpt.restore(f"{url}@latest")),
    "restore the step's path": (NEWEST, lambda run, url: jaxckpt.restore(step_path(url, 3))),
    "load_numpy": (NEWEST, lambda run, url: jaxckpt.load_numpy(url)),
    "open": (NEWEST, lambda run, url: jaxckpt.open(url)),
    "diff": (NEWEST, lambda run, url: jaxckpt.diff(f"{url}@1", url)),
    "Run.restore": (NEWEST, lambda run, url: run.restore()),
    "Run.restore of the newest step": (NEWEST, lambda run, url: run.restore(run.latest_step())),
    "Run.open": (NEWEST, lambda run, url: run.open()),
    "Run.metrics": (NEWEST, lambda run, url: run.metrics("latest")),
    "Run.pin": (NEWEST, lambda run, url: run.pin("latest", "broken")),
    "follow": (NEWEST, lambda run, url: list(run.follow(timeout_seconds=0.01))),
    "run@best": (BEST, lambda run, url: jaxckpt.restore(f"{url}@best")),
    "Run.best_step": (BEST, lambda run, url: run.best_step()),
    "Run.restore of the best": (BEST, lambda run, url: run.restore("best")),
    "Checkpointer.best_step": (BEST, lambda run, url: opened(url).best_step()),
    "run@pin": (PINNED, lambda run, url: jaxckpt.restore(f"{url}@paper")),
    "Run.restore of a pin": (PINNED, lambda run, url: run.restore("paper")),
    "Checkpointer.restore": (NEWEST, lambda run, url: opened(url).restore()),
    "Checkpointer.restore_or_init": (NEWEST, lambda run, url: opened(url).restore_or_init(lambda: state(0))),
    "Checkpointer.restore of an older step": (PINNED, lambda run, url: opened(url).restore(PINNED)),
    "fork": (NEWEST, lambda run, url: run.fork(f"{url}-2")),
}


@pytest.mark.parametrize("content", [None, b"", b'{"format":"jaxckpt"'], ids=["deleted", "emptied", "torn"])
def test_every_read_raises(place: str, content: bytes | None) -> None:
    directory = saved(place)
    reader = jaxckpt.Run(directory)
    manifests = {step: at(step_path(directory, step)).read(MANIFEST) for step in STEPS}
    for step, read in READS.values():
        lose(step_path(directory, step), content)
        with pytest.raises(ManifestError, match=step_path(directory, step)):
            read(reader, directory)
        assert (reader.steps(), reader.latest_step()) == (STEPS, NEWEST)
        lose(step_path(directory, step), manifests[step])
    assert reader.restore()["step"] == NEWEST


@pytest.mark.parametrize("lost", STEPS)
def test_nothing_deletes_it_and_repair_restores_it(place: str, lost: int, caplog: pytest.LogCaptureFixture) -> None:
    """By turns the pinned, the best, and the newest step."""
    caplog.set_level(logging.INFO, "jaxckpt")
    directory = saved(place)
    path = step_path(directory, lost)
    lose(path)
    with opened(directory, keep_last=1) as checkpoints:
        assert f"{path} cannot be read, and no rule deletes it" in caplog.text
        with pytest.raises(CheckpointExistsError):
            checkpoints.save(lost, state(lost), metrics={"loss": 5.0})
        for step in (4, 5, 6):
            checkpoints.save(step, state(step), metrics={"loss": 5.0})
        checkpoints.wait()
        assert {lost, 6} <= {*checkpoints.steps()}
    opened(directory, keep_last=1).close()
    report = jaxckpt.verify(directory)
    (problem,) = report.problems
    assert not report.ok
    assert f"{path} has lost its {MANIFEST}" in problem.reason
    assert report.unfinished_steps == ()
    (repaired,) = repair(directory, FAST)
    assert (repaired.path, repaired.ok) == (path, True)
    np.testing.assert_array_equal(jaxckpt.load_numpy(path)["w"], state(lost)["w"])
    assert jaxckpt.verify(directory).ok
    assert repair(directory, FAST) == []


@pytest.mark.parametrize("content", [None, b""], ids=["deleted", "emptied"])
@pytest.mark.parametrize("rules", [{"keep_last": 1}, {"keep_last": 9, "keep_last_of": {"w": 1}}], ids=["all", "part"])
def test_no_rule_deletes_what_was_lost_while_the_checkpointer_is_open(
    tmp_path: Path, content: bytes | None, rules: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory = str(tmp_path / "run")
    with jaxckpt.Checkpointer(directory, background=False, options=FAST, **rules) as checkpoints:
        checkpoints.save(1, state(1))
        lose(step_path(directory, 1), content)
        for step in (2, 3):
            checkpoints.save(step, state(step))
        checkpoints.wait()
    assert "keeping step 1: " in caplog.text
    assert repair(directory, FAST)
    assert jaxckpt.load_numpy(step_path(directory, 1))["w"].shape == (4, 5)


def test_a_damaged_step_is_deleted_or_replaced_only_on_request(place: str) -> None:
    directory = saved(place)
    lose(step_path(directory, 1))
    lose(step_path(directory, 3))
    jaxckpt.Run(directory).unpin("paper")
    with opened(directory) as checkpoints:
        checkpoints.delete(1)
        assert (checkpoints.steps(), at(step_path(directory, 1)).names()) == ([2, 3], [])
        checkpoints.save(3, state(30), metrics={"loss": 0.0}, overwrite=True)
        assert checkpoints.restore()["step"] == 30
    data, manifest = at(step_path(directory, 3)).names()
    assert (data[:5], manifest) == ("data-", MANIFEST)
    assert jaxckpt.verify(directory).ok


@pytest.mark.parametrize("content", [None, b""], ids=["deleted", "emptied"])
def test_a_single_checkpoint(place: str, content: bytes | None) -> None:
    path = f"{place}/one"
    jaxckpt.save(path, state(1))
    lose(path, content)
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ManifestError, lambda: jaxckpt.restore(path)),
        (CheckpointExistsError, lambda: jaxckpt.save(path, state(2))),
        (InputError, lambda: opened(path)),
        (InputError, lambda: jaxckpt.Run(path).steps()),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert not jaxckpt.verify(path, quick=True)
    assert repair(path, FAST)
    assert jaxckpt.restore(path)["step"] == 1
    lose(path, content)
    jaxckpt.save(path, state(2), overwrite=True)
    assert jaxckpt.restore(path)["step"] == 2
    assert len(at(path).names()) == 2, "the damaged checkpoint is deleted after it was replaced"


def test_forks_and_conversions_never_replace_it(tmp_path: Path) -> None:
    directory, path = saved(str(tmp_path)), str(tmp_path / "one")
    jaxckpt.save(path, state(1))
    lose(path)
    with pytest.raises(CheckpointExistsError, match="is a checkpoint"):
        jaxckpt.Run(directory).fork(path)
    with pytest.raises(CheckpointExistsError):
        jaxckpt.convert(f"{directory}@latest", path, format="safetensors", overwrite=True)
    assert repair(path, FAST)


def test_a_subscriber_raises(place: str) -> None:
    url = f"{place}/weights"
    with weights.Publisher(url, anchor_every=2) as publisher:
        for step in STEPS:
            publisher.publish(step, {"w": np.full(300, step, np.float32)})
    lose(step_path(url, 2))
    found: list[int] = []
    with pytest.raises(ManifestError, match="00000002"):
        found += (step for step, _ in weights.subscribe(url, timeout_seconds=0.01))


# What is not lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["after the copy", "after the manifest"])
def test_a_save_that_was_killed_is_swept(place: str, moment: str) -> None:
    """After the copy, it was not published. After the manifest it was, and the next Checkpointer completes it."""
    directory = f"{place}/run"
    path = step_path(directory, 1)
    jaxckpt.Checkpointer(directory, options=FAST).close()
    jaxckpt.save(f"{place}/other", state(1))
    content = at(f"{place}/other").read(MANIFEST) or b""
    save_id = jaxckpt.open(f"{place}/other").save_id
    at(directory).mark("00000001")
    transaction = Transaction(at(path), save_id, None)
    at(path).put(f"{transaction.data}/object", b"data")
    at(path).put(f"{transaction.data}/{MANIFEST}", content)  # in a folder, the draft
    at(path).put(f"{transaction.data}/{COPY}", content)
    if moment == "after the manifest":
        transaction.commit(content, sync=False)
    if transaction.handle is not None:
        at(path).unlock(transaction.handle)
    published = moment == "after the manifest"
    assert jaxckpt.Run(directory).steps() == [1] * published
    with opened(directory):
        assert jaxckpt.verify(directory).unfinished_steps == () if published else True
    if published:
        lose(path)
        with pytest.raises(ManifestError):
            jaxckpt.restore(directory)
    else:
        with pytest.raises(NotACheckpointError):
            jaxckpt.restore(directory)
        with opened(directory) as checkpoints:
            checkpoints.save(2, state(2), metrics={"loss": 1.0})
        assert at(path).names() == []


@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_a_save_that_was_killed_after_it_published_is_repaired(tmp_path: Path, before: str) -> None:
    """Its note still exists, but not its draft."""
    path = str(tmp_path / "one")
    if before == "a checkpoint":
        jaxckpt.save(path, state(1))
    save_and_die = f"""
import os, sys, jaxckpt, numpy as np

def audit(event, arguments):
    if event == "os.remove" and str(arguments[0]).endswith("{WRITER}"):
        os._exit(9)

sys.addaudithook(audit)
jaxckpt.save({path!r}, {{"w": np.full((4, 5), 2), "step": 2}}, overwrite=True)
"""
    done = subprocess.run([sys.executable, "-c", save_and_die], env=environment(1), timeout=120, check=False)
    assert done.returncode == 9
    lose(path)
    with pytest.raises(ManifestError, match="jaxckpt repair"):
        jaxckpt.restore(path)
    with pytest.raises(CheckpointExistsError, match="jaxckpt repair"):
        jaxckpt.save(path, state(3))
    assert repair(Path(path), FAST)
    assert jaxckpt.load_numpy(path)["step"] == 2
    jaxckpt.save(path, state(3), overwrite=True)
    assert [name[:5] for name in sorted(os.listdir(path))] == ["data-", MANIFEST[:5]]


def test_an_interrupted_deletion_is_swept(place: str) -> None:
    directory = saved(place)
    at(step_path(directory, 1)).unpublish(sync=True)  # and the process is killed
    assert jaxckpt.Run(directory).steps() == [2, 3]
    assert jaxckpt.verify(directory).ok
    with opened(directory) as checkpoints:
        checkpoints.save(4, state(4), metrics={"loss": 1.0})
    assert at(step_path(directory, 1)).names() == []


def test_an_interrupted_overwrite_is_swept(place: str) -> None:
    """Even if its old data is still complete, and the new checkpoint is deleted in the meantime."""
    path = f"{place}/one"
    jaxckpt.save(path, state(1))
    before = at(path).read(MANIFEST) or b""
    jaxckpt.save(f"{place}/other", state(2))
    content = at(f"{place}/other").read(MANIFEST) or b""
    store = at(path)
    transaction = Transaction(store, jaxckpt.open(f"{place}/other").save_id, before)
    store.publish(transaction.data, content, before, sync=True)  # and the process is killed
    if transaction.handle is not None:
        store.unlock(transaction.handle)
    store.unpublish(sync=True)
    with pytest.raises(NotACheckpointError):
        jaxckpt.restore(path)
    store.clear()
    assert store.names() == []


def test_a_checkpoint_of_0_1_has_no_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is read, deleted and overwritten. Without its manifest, it looks like an interrupted deletion."""
    caplog.set_level(logging.INFO, "jaxckpt")
    directory = tmp_path / "run"
    shutil.copytree(golden.FOLDER / "0.1" / "run", directory)
    last = jaxckpt.Run(directory).latest_step() or 0
    for name in jaxckpt.Run(directory).pins():
        jaxckpt.Run(directory).unpin(name)
    assert not list(directory.glob(f"*/data-*/{COPY}"))
    with jaxckpt.Checkpointer(directory, options=FAST) as checkpoints:
        checkpoints.delete(last)
        last = checkpoints.latest_step() or 0
    lose(step_path(str(directory), last))
    with pytest.raises(NotACheckpointError, match="never finished"):
        jaxckpt.restore(step_path(str(directory), last))
    assert jaxckpt.verify(directory).unfinished_steps == (last,)
    jaxckpt.Checkpointer(directory, options=FAST).close()
    assert f"deleted {directory}/{last:08d}/data-" in caplog.text


# Repairing ------------------------------------------------------------------------------------------------


def data_of(path: str) -> Path:
    (data,) = Path(path).glob("data-*")
    return data


def damage_object(path: str) -> None:
    next(file for file in data_of(path).glob("*/c/**/*") if file.is_file()).write_bytes(b"")


def damage_copy(path: str) -> None:
    copy = data_of(path) / COPY
    copy.write_bytes(copy.read_bytes()[:-9])


def two_copies(path: str) -> None:
    other = Path(path) / ("data-" + "0" * 32)
    shutil.copytree(data_of(path), other)


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (damage_object, DataError, "was not repaired, because data-.* is damaged"),
        (damage_copy, ManifestError, f"{COPY} is damaged or was edited"),
        (two_copies, ManifestError, "2 data folders with a copy"),
        (lambda path: (data_of(path) / COPY).unlink(), NotACheckpointError, "is not a checkpoint"),
    ],
)
def test_repair_refuses(tmp_path: Path, harm: Callable[[str], object], error: type[Exception], message: str) -> None:
    path = str(tmp_path / "one")
    jaxckpt.save(path, state(1))
    lose(path)
    harm(path)
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(error, match=message):
        repair(path, FAST)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_a_step_that_cannot_be_repaired_does_not_affect_the_others(tmp_path: Path) -> None:
    directory = saved(str(tmp_path))
    for step in STEPS:
        lose(step_path(directory, step))
    damage_copy(step_path(directory, 2))
    with pytest.raises(ManifestError, match=r"1 step of .* cannot be repaired; repaired: .*1, .*3") as caught:
        repair(directory, FAST)
    assert f"{COPY} is damaged" in str(caught.value)
    assert jaxckpt.load_numpy(directory)["step"] == 3
    with jaxckpt.Checkpointer(directory, options=FAST) as checkpoints:
        checkpoints.delete(2)
    assert jaxckpt.verify(directory).ok


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("content", [None, b"", b"{}"], ids=["deleted", "emptied", "changed"])
def test_verify_reports_a_lost_copy_and_repair_writes_it_again(place: str, content: bytes | None, quick: bool) -> None:
    path = f"{place}/one"
    jaxckpt.save(path, state(1))
    manifest = at(path).read(MANIFEST)
    copy = f"data-{jaxckpt.open(path).save_id}/{COPY}"
    if content is None:
        at(path).remove(copy)
    else:
        at(path).put(copy, content)
    assert jaxckpt.restore(path)["step"] == 1
    (problem,) = jaxckpt.verify(path, quick=quick).problems
    assert (problem.leaf, problem.object) == (None, copy)
    assert f"`jaxckpt repair {path}` writes" in problem.reason
    assert [report.ok for report in repair(path, FAST)] == [True]
    assert at(path).read(copy) == at(path).read(MANIFEST) == manifest
    assert jaxckpt.verify(path, quick=quick).ok
    assert repair(path, FAST) == []


def test_a_step_without_either_manifest_names_the_way_out(tmp_path: Path) -> None:
    directory = saved(str(tmp_path))
    lose(step_path(directory, 3), b"{}")
    (data_of(step_path(directory, 3)) / COPY).unlink()
    for arguments in (("repair", directory), ("repair", step_path(directory, 3)), ("rm", f"{directory}@3", "--yes")):
        assert f"jaxckpt.Checkpointer('{directory}').delete(3) gives the step up" in run(*arguments, code=3).stderr
    with jaxckpt.Checkpointer(directory, options=FAST) as checkpoints:
        checkpoints.delete(3)
    assert jaxckpt.verify(directory).ok


def test_a_step_that_is_deleted_during_its_verification_has_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion removes the copy first."""
    directory = saved(str(tmp_path))
    (data_of(step_path(directory, 2)) / COPY).unlink()
    monkeypatch.setattr("time.sleep", lambda seconds: lose(step_path(directory, 2)))
    report = jaxckpt.verify(directory)
    assert (report.ok, report.leaves) == (True, 4)


def test_repair_never_replaces_a_checkpoint_that_was_saved_meanwhile(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{place}/one"
    jaxckpt.save(path, state(1))
    lose(path)
    kind = type(at(path))
    publish_copy = kind.publish_copy

    def overtaken(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(kind, "publish_copy", publish_copy)
        jaxckpt.save(path, state(2), overwrite=True)
        publish_copy(*arguments, **named)

    monkeypatch.setattr(kind, "publish_copy", overtaken)
    with pytest.raises((CheckpointExistsError, jaxckpt.errors.StorageError)):
        repair(path, FAST)
    assert jaxckpt.restore(path)["step"] == 2


def test_the_command_line(tmp_path: Path) -> None:
    directory = saved(str(tmp_path))
    manifest = at(step_path(directory, 3)).read(MANIFEST)
    lose(step_path(directory, 3))
    assert run("verify", directory, code=1).stdout.count("has lost its manifest.json") == 1
    assert f"jaxckpt repair {step_path(directory, 3)}" in run("show", directory, code=3).stderr
    assert run_json("ls", directory)["checkpoints"][-1]["status"] == "damaged"
    run("rm", step_path(directory, 3), "--yes", code=3)
    assert run("repair", f"{directory}@3").stdout.startswith(f"repaired {step_path(directory, 3)}: 2 leaves")
    assert at(step_path(directory, 3)).read(MANIFEST) == manifest
    assert run("repair", directory).stdout.startswith(f"{directory} has lost no metadata, and data is not repaired")
    lose(step_path(directory, 3), b"")
    lose(step_path(directory, 1))
    repaired = run_json("repair", directory)["repaired"]
    assert repaired == [step_path(directory, 1), step_path(directory, 3)]
    run("verify", directory)
    run("repair", str(tmp_path / "nothing"), code=4)
    jaxckpt.convert(step_path(directory, 1), tmp_path / "w.npz", select="w")
    assert "is a checkpoint of format npz" in run("repair", str(tmp_path / "w.npz"), code=2).stderr


# Costs, and other owners ----------------------------------------------------------------------------------


def test_a_save_writes_one_more_small_file_and_a_restore_reads_none(bucket: Any) -> None:
    def requests(call: Callable[[], Any]) -> list[str]:
        bucket.proxy.clear()
        call()
        return [f"{request.method} {request.key.rpartition('/')[2]}" for request in bucket.proxy.requests]

    saves = requests(lambda: jaxckpt.save(bucket.url, state(1)))
    assert sum(COPY in request for request in saves) == 1
    restores = requests(lambda: jaxckpt.restore(bucket.url))
    assert not [request for request in restores if COPY in request or "data-" in request]


def test_dropped_subtrees_stay_dropped_after_a_repair(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    tree = {"params": np.arange(6.0), "moments": np.arange(8.0)}
    with jaxckpt.Checkpointer(directory, keep_last_of={"moments": 1}, background=False, options=FAST) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree)
    lose(step_path(directory, 1))
    (report,) = repair(directory, FAST)
    assert report.leaves == 1
    assert [*jaxckpt.load_numpy(f"{directory}@1")] == ["params"]


def test_a_local_step_uses_its_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = jaxckpt.LocalTier(tmp_path / "local", every=5, copies=0)
    options: dict[str, Any] = {"local": tier, "every": 10, "on_preemption": "ignore"}
    with jaxckpt.Checkpointer(tmp_path / "run", options=FAST, **options) as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, state(step))
            checkpoints.wait()
    own = tmp_path / "local/process-0/00000015"
    for content in (None, b""):
        lose(str(own), content)
        with jaxckpt.Checkpointer(tmp_path / "run", options=FAST, **options) as checkpoints:
            assert checkpoints.restore_or_init(lambda: state(0))[0] == 15
        assert f"{own} had lost its {MANIFEST}" in caplog.text
        caplog.clear()
        assert json.loads((own / MANIFEST).read_bytes())["step"]["number"] == 15


def test_a_copy_that_cannot_be_listed_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxckpt.save(tmp_path / "one", state(1))
    lose(str(tmp_path / "one"), b"")

    def refused(self: Folder) -> list[str]:
        raise jaxckpt.errors.StorageError(13, "no permission")

    monkeypatch.setattr(Folder, "published_data", refused)
    with pytest.raises(ManifestError, match="does not match"):
        jaxckpt.restore(tmp_path / "one")


def test_repair_leaves_the_copy_of_a_step_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with jaxckpt.Checkpointer(run, keep_last_of={"opt": 1}) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3), "opt": np.ones(4)})
        checkpoints.wait()
        load = verify.load_manifest

        def load_before_a_drop(store: Any) -> Any:
            loaded = load(store)
            if checkpoints.latest_step() == 1:
                checkpoints.save(2, {"w": np.ones(3), "opt": np.ones(4)})
                checkpoints.wait()
            return loaded

        monkeypatch.setattr(verify, "load_manifest", load_before_a_drop)
        with pytest.raises(jaxckpt.errors.NotACheckpointError, match="replaced while it was being repaired"):
            verify.repair(run / "00000001", jaxckpt.Options())
    monkeypatch.undo()
    assert jaxckpt.verify(run / "00000001").ok


def test_repair_writes_no_copy_while_another_process_deletes_the_checkpoint(tmp_path: Path) -> None:
    """A copy that is written between the first two steps of a deletion would show a checkpoint that has lost its
    manifest."""
    path = tmp_path / "c"
    jaxckpt.save(path, {"w": np.ones(3)})
    (copy,) = path.glob("data-*/manifest-copy.json")
    copy.unlink()
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    errors: list[BaseException] = []

    def repair_meanwhile() -> None:
        try:
            repair(path, jaxckpt.Options())
        except jaxckpt.errors.NotACheckpointError as error:
            errors.append(error)

    repairing = threading.Thread(target=repair_meanwhile)
    repairing.start()
    repairing.join(1)
    assert not copy.exists()
    (path / MANIFEST).unlink()
    os.close(lock)
    repairing.join(30)
    assert "deleted or replaced while it was being repaired" in str(errors[0])
    assert not copy.exists()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_a_lost_zarr_json_is_written_again(damage: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"a//b": np.arange(6.0), "n": np.arange(4)})
    files = {file: file.read_bytes() for file in path.glob("data-*/*/zarr.json")}
    assert len(files) == 2
    for file in files:
        damage(file)
    with pytest.raises(DataError, match=f"`jaxckpt repair {path}` writes what is lost again"):
        jaxckpt.restore(path)
    assert run("repair", str(path)).stdout.startswith(f"repaired {path}: 2 leaves in 2 objects")
    assert {file: file.read_bytes() for file in files} == files
    assert jaxckpt.verify(path).ok
    assert "has lost no metadata" in run("repair", str(path)).stdout
    assert jaxckpt.restore(path)["n"].tolist() == [0, 1, 2, 3]


def test_a_repair_that_fails_keeps_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"n": np.arange(4)})
    (path / MANIFEST).unlink()
    fsync, failing = os.fsync, [True]

    def fails_once(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}") == str(path) and failing:
            failing.clear()
            raise OSError(5, "an injected error")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails_once)
    with pytest.raises(jaxckpt.errors.StorageError, match="an injected error"):
        repair(path, jaxckpt.Options())
    assert not failing
    assert repair(path, jaxckpt.Options())
    assert jaxckpt.restore(path)["n"].tolist() == [0, 1, 2, 3]


def test_a_lost_stack_does_not_prevent_the_repair_of_others(tmp_path: Path) -> None:
    path = tmp_path / "c"
    jaxckpt.save(path, {"a": np.arange(6.0), "n": np.arange(4)})
    first, second = sorted(path.glob("data-*/*/"))
    shutil.rmtree(first)
    (second / "zarr.json").unlink()
    assert repair(path, jaxckpt.Options())
    assert (second / "zarr.json").exists()
    assert not first.exists()
