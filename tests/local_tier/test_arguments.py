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
        ({"folder": "s3://bucket/steps"}, "LocalTier.folder must be a folder on this host, found 's3://bucket/steps'"),
        ({"domains": "ab"}, "LocalTier.domains must be a sequence of labels, one per process"),
        ({"domains": ["a", "b"]}, "LocalTier.domains has 2 labels, expected one for each of 1 processes"),
        ({"every": 0}, r"LocalTier\.every must be a whole number above zero, found 0"),
        ({"copies": -1}, r"LocalTier\.copies must be a whole number not below 0, found -1"),
        ({"max_bytes_per_second": 0}, r"LocalTier\.max_bytes_per_second must be a number above zero"),
    ],
)
def test_an_invalid_argument_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(jaxckpt.errors.InputError, match=expected):
        jaxckpt.Checkpointer("run", local=jaxckpt.LocalTier(**{"folder": "L", **arguments}))
    assert not any(tmp_path.iterdir())


def test_a_path_in_place_of_a_local_tier_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.InputError, match=r"pass local=jaxckpt.LocalTier\('/dev/shm/x'\)"):
        jaxckpt.Checkpointer(tmp_path / "run", local="/dev/shm/x")  # pyright: ignore[reportArgumentType]
    assert not any(tmp_path.iterdir())


def test_local_bytes_without_a_local_folder_is_an_error(tmp_path: Path) -> None:
    with (
        jaxckpt.Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(jaxckpt.errors.InputError, match=r"local_bytes\(tree\) needs Checkpointer\(local="),
    ):
        checkpoints.local_bytes({"w": np.zeros(3)})
