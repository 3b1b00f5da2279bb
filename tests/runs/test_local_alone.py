"""The local tier in a job of one process: folders in unusual states, failed saves and deleted steps."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._job.call import Call
from jaxckpt._local_tier.process_folders import ProcessFolders


def state(step: int) -> dict[str, Any]:
    return {"w": np.full((40, 50), step), "step": step}


def opened(tmp_path: Path, **more: Any) -> jaxckpt.Checkpointer:
    """A run that saves every 5th step locally, and every 10th also in the storage."""
    options = jaxckpt.Options(sync=False, **more)
    tier = jaxckpt.LocalTier(tmp_path / "local", every=5, copies=0)
    return jaxckpt.Checkpointer(tmp_path / "run", every=10, on_preemption="ignore", options=options, local=tier)


def saved(tmp_path: Path, *steps: int) -> Path:
    """The local folder in which these steps were saved, one after another."""
    with opened(tmp_path) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), metrics={"loss": step})
            checkpoints.wait()
    return tmp_path / "local/process-0"


def resumed(tmp_path: Path) -> int | None:
    with opened(tmp_path) as checkpoints:
        step, tree = checkpoints.restore_or_init(lambda: state(0))
    np.testing.assert_array_equal(tree["w"], state(step or 0)["w"])
    return step


def held(own: Path) -> list[str]:
    return sorted(path.name for path in own.iterdir())


def test_a_deleted_step_does_not_come_back_from_the_local_folders(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10, 15, 20)
    with opened(tmp_path) as checkpoints:
        checkpoints.delete(20)
        assert (checkpoints.steps(), checkpoints.latest_step()) == ([10], 15)
        checkpoints.delete(15)
        assert checkpoints.latest_step() == 10
        checkpoints.save(25, state(25))
        checkpoints.wait()
        with pytest.raises(jaxckpt.JaxckptError, match="is the only one"):
            checkpoints.delete(10)
        assert checkpoints.latest_step() == 25
    assert resumed(tmp_path) == 25


def test_a_local_folder_that_was_deleted_during_the_run_is_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoints:
        checkpoints.save(5, state(5))
        checkpoints.wait()
        shutil.rmtree(tmp_path / "local")
        for step in (10, 15):
            checkpoints.save(step, state(step))
            checkpoints.wait()
            assert checkpoints.latest_step() == step
    assert resumed(tmp_path) == 15


def test_a_failed_save_is_reported_once_and_the_next_one_succeeds(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with opened(tmp_path) as checkpoints:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            checkpoints.save(10, state(10))
            with pytest.raises(jaxckpt.errors.StorageError, match="File too large"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        for step in (15, 20):
            assert checkpoints.save(step, state(step))
            checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.latest_step()) == ([20], 20)


def test_local_steps_have_no_other_layout(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    with opened(tmp_path) as checkpoints:
        for arguments in ({"mesh": mesh}, {"mesh": mesh, "specs": P("a")}, {"specs": P("a")}):
            with pytest.raises(jaxckpt.errors.InputError, match=r"needs a Checkpointer without local="):
                checkpoints.save(10, state(10), **arguments)
        assert checkpoints.save(10, state(10))
    assert resumed(tmp_path) == 10


def test_on_done_is_checked_immediately_and_its_errors_are_reported(tmp_path: Path) -> None:
    called: list[jaxckpt.SaveInfo] = []

    def failing(info: jaxckpt.SaveInfo) -> None:
        called.append(info)
        raise RuntimeError("mine")

    with opened(tmp_path) as checkpoints:
        with pytest.raises(jaxckpt.errors.InputError, match="on_done must be a function"):
            checkpoints.save(10, state(10), on_done=3)  # pyright: ignore[reportArgumentType]
        checkpoints.save(10, state(10), on_done=failing)
        with pytest.raises(RuntimeError, match="mine") as found:
            checkpoints.wait()
        assert f"after the checkpoint at {tmp_path}/run/00000010 was published" in found.value.__notes__[0]
        assert ([info.path for info in called], checkpoints.steps()) == ([f"{tmp_path}/run/00000010"], [10])


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_of_on_done_is_raised_only_once(tmp_path: Path, error: type[BaseException]) -> None:
    def failing(_: jaxckpt.SaveInfo) -> None:
        raise error

    with opened(tmp_path) as checkpoints:
        checkpoints.save(10, state(10), on_done=failing)
        with pytest.raises(error):
            checkpoints.wait()
        for step in (20, 30):
            checkpoints.save(step, state(step))
            checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 30]


def test_a_flush_that_was_interrupted_before_its_lane_started_blocks_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Call.start

    def interrupted(call: Call, *arguments: Any, **named: Any) -> Any:
        if call.verb == "flush":
            monkeypatch.undo()
            raise KeyboardInterrupt
        return start(call, *arguments, **named)

    monkeypatch.setattr(Call, "start", interrupted)
    with opened(tmp_path) as checkpoints:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(10, state(10))
        for step in (15, 20):
            assert checkpoints.save(step, state(step))
            checkpoints.wait()
        assert checkpoints.steps() == [20]


def test_the_progress_of_a_step_is_that_of_its_flush(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoints:
        checkpoints.save(10, state(10))
        assert (pending := checkpoints.pending) is not None
        checkpoints.wait()
    assert pending.progress.done_bytes == pending.progress.total_bytes >= state(10)["w"].nbytes


@pytest.mark.parametrize("compression", [None, "zstd", "blosc"])
def test_a_run_whose_only_step_is_damaged_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compression: Literal["zstd", "blosc"] | None
) -> None:
    with opened(tmp_path, compression=compression) as checkpoints:
        checkpoints.save(5, state(5))
    for file in tmp_path.glob("local/*/*/data-*/*/c/**/*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[10] ^= 1
            file.write_bytes(content)
    assert resumed(tmp_path) is None
    assert "no step is left" in caplog.text
    lost = f"step 5 is damaged or incomplete in the local folders, and {tmp_path}/run does not have it"
    with opened(tmp_path) as checkpoints, pytest.raises(jaxckpt.CorruptError, match=lost):
        checkpoints.restore(5)


def test_the_storage_replaces_damaged_data_also_through_rules(tmp_path: Path) -> None:
    own = saved(tmp_path, 10, 15)
    (file,) = own.glob("00000015/data-*/*40x50/c/0/0/0")
    file.write_bytes(file.read_bytes()[:-50] + bytes(50))
    rules = jaxckpt.rules.Rules([jaxckpt.rules.Rule(source="w", target="v", layout="a b -> b a")], drop=["step"])
    with opened(tmp_path) as checkpoints:
        tree = checkpoints.restore(rename=rules)
    np.testing.assert_array_equal(tree["v"], state(10)["w"].T)


def turned_into_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def turned_into_a_link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".real")))


@pytest.mark.parametrize("turned", [turned_into_a_folder, turned_into_a_link])
def test_a_step_whose_manifest_is_not_a_file_is_deleted(tmp_path: Path, turned: Callable[[Path], None]) -> None:
    own = saved(tmp_path, 5, 10, 15)
    turned(own / "00000015/manifest.json")
    (tmp_path / "run/00000010").rename(tmp_path / "elsewhere")
    assert resumed(tmp_path) == 10, "the other step of that folder is complete"
    assert resumed(tmp_path) == 10
    with opened(tmp_path) as checkpoints:
        checkpoints.restore()
        for step in (25, 35):
            checkpoints.save(step, state(step))
            checkpoints.wait()
    assert held(own) == ["00000025", "00000035", "run.json"]


def test_a_folder_of_another_process_that_cannot_be_read_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = saved(tmp_path, 5)
    shutil.copytree(own, own.with_name("process-7"))
    turned_into_a_folder(own.with_name("process-7") / "run.json")
    assert resumed(tmp_path) == 5
    assert "process-7 is ignored: " in caplog.text


def test_a_copied_part_of_another_folder_does_not_hide_a_step(tmp_path: Path) -> None:
    own = saved(tmp_path, 5)
    (own.with_name("process-7") / "00000005").mkdir(parents=True)
    for name in ("run.json", "00000005/manifest.json"):
        shutil.copy(own / name, own.with_name("process-7") / name)
    assert resumed(tmp_path) == 5


def test_a_local_step_is_restored_if_the_storage_s_manifest_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "run/00000010/manifest.json").write_text("")
    assert resumed(tmp_path) == 10


def test_the_folder_of_another_run_is_refused_with_a_remedy(tmp_path: Path) -> None:
    own = saved(tmp_path, 5, 10)
    note = json.loads((own / "run.json").read_text())

    def error() -> str:
        with pytest.raises(jaxckpt.errors.InputError) as found:
            resumed(tmp_path)
        return str(found.value)

    remedy = ": remove that folder, or give another LocalTier.folder"
    (own / "run.json").write_text('{"run"')
    assert error() == f"{own} holds a damaged run.json, so it is unknown which run its steps belong to{remedy}"
    (own / "run.json").write_text(json.dumps({**note, "storage": "gs://other/run"}))
    assert f"another run, which is stored at gs://other/run, expected {tmp_path}/run{remedy}" in error()
    (own / "run.json").write_text(json.dumps(note))
    shutil.rmtree(tmp_path / "run")
    assert error().endswith(f"an earlier run in {tmp_path}/run, which was deleted or replaced since{remedy}")
    (own / "run.json").unlink()
    assert "holds other files, but no run.json" in error()


def test_a_local_save_that_is_owed_is_due_until_one_is_tried(tmp_path: Path) -> None:
    """A restore that lacked copies owes one."""
    with opened(tmp_path) as checkpoints:
        local = checkpoints._local
        assert local is not None
        for step, owed in ((3, True), (4, False), (10, True), (11, False)):  # step 10 is due in any case
            if owed:
                local.record_restored(None, complete=False)
            assert local.is_due(step) == local.is_due(step) == owed
            assert checkpoints.save(step, state(step)) == owed
            checkpoints.wait()
    assert resumed(tmp_path) == 10


def test_a_skipped_local_save_is_still_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as checkpoints:
        local = checkpoints._local
        assert local is not None
        local.record_restored(None, complete=False)
        with monkeypatch.context() as patched:
            patched.setattr(local, "is_blocked_by_flush", lambda *_: True)
            assert not checkpoints.save(3, state(3))
        assert checkpoints.save(4, state(4))
        with pytest.raises(jaxckpt.errors.TreeError):
            checkpoints.save(5, {"w": object()})
        assert not checkpoints.save(6, state(6))


def test_after_the_newest_local_step_was_deleted_the_next_save_deletes_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, state(step))
        checkpoints.delete(15)
        assert checkpoints.latest_step() == 10
        begin = ProcessFolders.publish
        found: list[list[str]] = []

        def publish(folders: ProcessFolders, *arguments: Any) -> Any:
            found.append(held(tmp_path / "local" / "process-0"))
            return begin(folders, *arguments)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ProcessFolders, "publish", publish)
            checkpoints.save(15, state(15))
            checkpoints.wait()
        assert "00000010" in found[0]


@pytest.mark.parametrize("every", [5, 100])
def test_a_step_waits_for_no_flush_if_it_may_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int
) -> None:
    """Steps that are due locally are saved there only. A step that is due for the storage alone is skipped."""
    caplog.set_level(logging.INFO, "jaxckpt")
    gate = threading.Event()
    tier = jaxckpt.LocalTier(tmp_path / "local", every=every, copies=0)
    options = jaxckpt.Options(sync=False, when_busy="skip")
    with jaxckpt.Checkpointer(tmp_path / "run", every=10, options=options, local=tier) as checkpoints:
        assert checkpoints.save(20, state(20), on_done=lambda _: gate.wait(60))  # its flush takes that long
        flush = checkpoints.pending
        assert flush is not None
        saves_locally = every == 5
        checkpoints._saver.last_save.wait()
        assert checkpoints.save(30, state(30)) is saves_locally
        checkpoints._saver.last_save.wait()
        assert not checkpoints.save(40, state(40))  # the folder has room for no third step
        assert not flush.done
        gate.set()
        flush.wait()
        assert checkpoints.latest_step() == (30 if saves_locally else 20)
        assert checkpoints.save(50, state(50))
    assert jaxckpt.Run(tmp_path / "run").steps() == [20, 50]
    assert resumed(tmp_path) == 50
    skipped = [record.args for record in caplog.records if "is skipped, because" in record.message]
    assert skipped == ([(40,)] if saves_locally else [(30,), (40,)])


def test_a_due_step_that_is_only_in_the_local_folders_at_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    tier = jaxckpt.LocalTier(tmp_path / "local", every=5, copies=0)
    checkpoints = jaxckpt.Checkpointer(
        tmp_path / "run", every=10, options=jaxckpt.Options(sync=False, when_busy="skip"), local=tier
    )
    checkpoints.save(20, state(20), on_done=lambda _: gate.wait(60))
    checkpoints._saver.last_save.wait()
    assert checkpoints.save(30, state(30))
    gate.set()
    checkpoints.close()
    assert "step 30 is only in the local folders" in caplog.text
    assert jaxckpt.Run(tmp_path / "run").steps() == [20]
