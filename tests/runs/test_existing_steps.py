"""Steps that existed before a Checkpointer with new rules: it deletes them only after a notice, or never."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt

FAST = jaxckpt.Options(sync=False)


def save(directory: Path, *steps: int, **rules: Any) -> jaxckpt.Checkpointer:
    with jaxckpt.Checkpointer(directory, options=FAST, background=False, **rules) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"w": np.full(9, step)}, metrics={"loss": step})
    return checkpoints


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "existed before" in text]


def test_new_rules_delete_only_after_a_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2, 3)
    assert notices(caplog) == []
    with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST, background=False) as checkpoints:
        assert checkpoints.restore()["w"][0] == 3
        (notice,) = notices(caplog)
        assert "2 steps that existed before: 1, 2." in notice
        assert "keep_existing=True" in notice
        assert checkpoints.steps() == [1, 2, 3]
        checkpoints.save(4, {"w": np.zeros(3)})
        assert checkpoints.steps() == [4]
    save(tmp_path, 5, keep_last=1)  # the same rules, as after a restart
    assert checkpoints.steps() == [5]
    assert len(notices(caplog)) == 1


def test_a_restart_before_the_first_save_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2, 3)
    for n_notices in (1, 2):
        with jaxckpt.Checkpointer(tmp_path, keep_last=1, options=FAST, background=False) as checkpoints:
            assert checkpoints.restore()["w"][0] == 3
        assert jaxckpt.Run(tmp_path).steps() == [1, 2, 3]
        assert len(notices(caplog)) == n_notices


@pytest.mark.parametrize("content", [b"", b'{"rules": 1}', b'{"x": ' + b"[" * 99999 + b"]" * 99999 + b"}"])
def test_a_damaged_record_of_the_rules_counts_as_none(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "_run" / "rules.json").write_bytes(content)
    assert save(tmp_path, 3, keep_last=1).steps() == [3]
    assert "2 steps that existed before: 1, 2." in notices(caplog)[-1]


def test_keep_existing_keeps_them_for_every_restart_with_these_rules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3)
    rules = {"keep_best": ("loss", "min"), "keep_existing": True}
    save(tmp_path, 4, 5, 6, **rules)
    assert save(tmp_path, 7, 8, **rules).steps() == [1, 2, 3, 8]
    assert notices(caplog) == []
    assert save(tmp_path, 9, keep_last=1).steps() == [9]
    assert len(notices(caplog)) == 1


def test_a_migration_loop_with_a_checkpointer_for_each_step_loses_none(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep_best=("loss", "min"), keep_existing=True)
    # Step 1 is the best, and the others were the newest when they were saved.
    assert save(tmp_path).steps() == [1, 5]
