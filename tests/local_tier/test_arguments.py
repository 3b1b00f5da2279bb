"""Invalid arguments of the local tier are errors before anything is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxckpt


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"local_every": 2, "copies": 1}, "local_every=, copies= without local="),
        ({"local": "s3://bucket/steps"}, "local must be a folder on this host, found 's3://bucket/steps'"),
        ({"local": "L", "local_domains": "ab"}, "local_domains must be a sequence of labels, one per process"),
        (
            {"local": "L", "local_domains": ["a", "b"]},
            "local_domains has 2 labels, expected one for each of 1 processes",
        ),
        ({"local": "L", "local_every": 0}, "local_every"),
        ({"local": "L", "copies": -1}, "copies"),
        ({"local": "L", "local_bytes_per_second": 0}, "local_bytes_per_second"),
    ],
)
def test_an_invalid_argument_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        jaxckpt.Checkpointer("run", **arguments)
    assert not any(tmp_path.iterdir())


def test_local_bytes_without_a_local_folder_is_an_error(tmp_path: Path) -> None:
    with (
        jaxckpt.Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(jaxckpt.errors.InputError, match=r"local_bytes\(tree\) needs Checkpointer\(local="),
    ):
        checkpoints.local_bytes({"w": np.zeros(3)})
