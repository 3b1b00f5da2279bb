"""`Checkpointer(on_failure=…)`; tests/faults/test_failing_saves.py has storage that fails at random."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import time
from collections.abc import Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import servers
from servers import Bucket

import jaxckpt
from jaxckpt._runs.saving import RunStep
from jaxckpt._save import staging
from jaxckpt._store import files
from jaxckpt.errors import InputError, StorageError

FAST = jaxckpt.Options(sync=False)


@pytest.mark.child
def test_a_bucket_that_is_busy_for_one_step(bucket: Bucket) -> None:
    options = jaxckpt.Options(storage={"retry_seconds": 0.5})
    events: list[tuple[str, int]] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **counts: events.append((event, counts)))  # pyright: ignore
    busy = False

    def spoil(exchange: servers.Exchange) -> None:
        servers.status(503)(exchange) if busy else exchange.send(exchange.forward())

    bucket.proxy.on(".*", spoil)
    with jaxckpt.Checkpointer(bucket.url, on_failure="continue", background=False, options=options) as checkpoints:
        for step in (1, 2, 3):
            busy = step == 2
            assert checkpoints.save(step, {"w": np.full(9, step)}) == (step != 2)
        assert checkpoints.steps() == [1, 3]
    (incident,) = jaxckpt.Run(bucket.url).incidents()
    assert (incident.step, incident.kind) == (2, "failed save")
    assert "StorageError" in incident.reason
    assert [counts["step"] for event, counts in events if event == "/jaxckpt/failed_save"] == [2]  # type: ignore[call-overload]


@pytest.mark.child
def test_an_incident_whose_write_seemed_to_fail_is_listed_once(bucket: Bucket) -> None:
    options = jaxckpt.Options(storage={"retry_seconds": 0.5})
    with jaxckpt.Checkpointer(bucket.url, on_failure="continue", background=False, options=options) as checkpoints:
        bucket.proxy.on("PUT incidents.json", servers.applied(503))
        bucket.proxy.on("PUT .*", servers.status(503))
        assert not checkpoints.save(1, {"w": np.zeros(9)})
        bucket.proxy.clear()
        assert [incident.step for incident in checkpoints.incidents()] == [1]
        assert checkpoints.save(2, {"w": np.ones(9)})
    assert [incident.step for incident in jaxckpt.Run(bucket.url).incidents()] == [1]


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on_failure must be"):
        jaxckpt.Checkpointer(tmp_path, on_failure="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="staging_bytes must be None"):
        jaxckpt.Checkpointer(tmp_path, on_failure="retry", options=jaxckpt.Options(staging_bytes=1 << 20))


def test_the_end_of_the_run_raises_the_error_of_its_last_step(tmp_path: Path) -> None:
    checkpoints = jaxckpt.Checkpointer(tmp_path, on_failure="continue", options=jaxckpt.Options(sync=False))
    checkpoints.save(1, {"w": np.zeros(3)})
    checkpoints.wait()
    (tmp_path / "00000002").write_text("a file in the way")
    checkpoints.save(2, {"w": np.zeros(3)})
    with pytest.raises((StorageError, jaxckpt.errors.CheckpointExistsError)):
        checkpoints.close()


@contextlib.contextmanager
def full_disk() -> Generator[None]:
    """Files cannot grow beyond 4 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("lost", ["steps", "directory"])
def test_local_steps_do_not_hide_that_the_directory_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    run = tmp_path / "run"
    local = jaxckpt.LocalTier(tmp_path / "local", every=5, copies=0)
    with jaxckpt.Checkpointer(run, every=10, on_failure="continue", local=local, options=FAST) as checkpoints:
        checkpoints.save(10, {"w": np.zeros(3)})
        checkpoints.wait()
        if lost == "steps":
            monkeypatch.setattr(RunStep, "claim", lambda *_: (_ for _ in ()).throw(StorageError(28, "no space")))
        else:
            run.rename(tmp_path / "away")
            run.write_text("not a folder")
        for step in (20, 25, 30, 35, 40):
            checkpoints.save(step, {"w": np.full(3, step)})
        with pytest.raises(StorageError) as raised:  # noqa: PT012
            checkpoints._saver.last_flush.pending.join()  # pyright: ignore[reportOptionalMemberAccess]
            checkpoints.save(45, {"w": np.zeros(3)})
        assert "3 steps in a row" in " ".join(raised.value.__notes__)
        assert "call save(45, …) again" in " ".join(raised.value.__notes__)
        assert checkpoints.save(45, {"w": np.full(3, 45)})
        assert checkpoints._saver.last_save.wait()
        if lost == "directory":
            run.unlink()
            (tmp_path / "away").rename(run)
    assert {path.name for path in (tmp_path / "local" / "process-0").iterdir()} >= {"00000045"}


@pytest.mark.parametrize("background", [True, False])
def test_one_line_says_why_training_continues_without_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    options = jaxckpt.Options(sync=False)
    with jaxckpt.Checkpointer(tmp_path, on_failure="continue", background=background, options=options) as checkpoints:
        with full_disk():
            checkpoints.save(1, {"w": np.zeros(9999)})
            if (pending := checkpoints.pending) is not None:
                pending._save.join()
        assert checkpoints.save(2, {"w": np.zeros(9999)})
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (line.levelname, line.args and line.args[-2:]) == ("ERROR", (1, 3))  # type: ignore[index]
    assert "step 1 was not saved, and training continues without it: " in line.message
    assert "File too large" in line.message


def test_another_attempt_is_logged_with_the_time_of_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with jaxckpt.Checkpointer(tmp_path, on_failure="retry", options=jaxckpt.Options(sync=False)) as checkpoints:
        with full_disk():
            checkpoints.save(1, {"small": np.zeros(9), "w": np.zeros(9999)})
            assert (pending := checkpoints.pending) is not None
            until = time.monotonic() + 20
            while "attempt 1 of 12" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
        checkpoints.wait()
        assert checkpoints.steps() == [1]
    assert pending.progress.done_bytes == pending.progress.total_bytes == 8 * (9 + 9999), "of the last attempt"
    assert "attempt 1 of 12, and is tried again in 0.1 s, the last time in 162 s: " in caplog.text


@pytest.mark.one_device
def test_another_attempt_writes_an_object_that_can_no_longer_be_linked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is staged only when the link has failed, in each attempt."""
    monkeypatch.setattr(staging, "is_in_host_memory", lambda value: False)  # where identity proves that data is equal
    tree = {"w": jnp.arange(9999.0), "v": jnp.arange(9999)}
    with jaxckpt.Checkpointer(tmp_path, on_failure="retry", options=jaxckpt.Options(sync=False)) as checkpoints:
        checkpoints.save(1, tree)
        checkpoints.wait()
        link = files._link
        monkeypatch.setattr(
            files, "_link", lambda old, *new: link(f"{old} that was deleted" if "/c/" in old else old, *new)
        )
        with full_disk():
            checkpoints.save(2, tree)
            until = time.monotonic() + 20
            while "attempt 1 of 12" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
        checkpoints.wait()
        assert "attempt 1 of 12" in caplog.text
        restored = checkpoints.restore(2)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)
