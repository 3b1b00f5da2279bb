"""A step that holds the same data as the last one: a warning, and a mark in `ls`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import run as run_command
from command_line import run_json

import jaxckpt

FAST = jaxckpt.Options(sync=False)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "holds the same data" in text]


@pytest.mark.parametrize("reuse", ["auto", None])
def test_a_stuck_run_is_warned_about(tmp_path: Path, reuse: str | None, caplog: pytest.LogCaptureFixture) -> None:
    options = jaxckpt.Options(sync=False, reuse=reuse)  # pyright: ignore[reportArgumentType]
    values = {10: 1.0, 20: 2.0, 30: 2.0, 40: 2.0, 50: 5.0}
    with jaxckpt.Checkpointer(tmp_path, options=options) as checkpoints:
        for step, value in values.items():  # the counter changes, although the parameters do not
            checkpoints.save(step, {"w": np.full(900, value), "count": jnp.asarray(step), "step": step})
    assert [text.split()[1] for text in warnings(caplog)] == ["30", "40"]
    assert all("the same data as step 20" in text for text in warnings(caplog))
    incidents = jaxckpt.Run(tmp_path).incidents()
    assert [(incident.step, incident.kind) for incident in incidents] == [
        (30, "unchanged step"),
        (40, "unchanged step"),
    ]
    listed = run_json("ls", str(tmp_path))["checkpoints"]
    assert [entry["incidents"] for entry in listed] == [[], [], ["unchanged step"], ["unchanged step"], []]
    assert run_command("ls", str(tmp_path)).stdout.count("unchanged step") == 2


def test_frozen_parameters_and_integers_are_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = jnp.ones((64, 64))
    with jaxckpt.Checkpointer(tmp_path / "adapters", options=FAST) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"base": base, "adapter": jnp.full((4, 4), step, jnp.float32)})
    with jaxckpt.Checkpointer(tmp_path / "integers", options=FAST) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"table": np.full(99, step)})
        checkpoints.save(3, {"table": np.full(99, 3)}, overwrite=True)
    assert warnings(caplog) == []
