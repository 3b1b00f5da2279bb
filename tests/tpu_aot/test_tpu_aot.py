"""Every program that the library starts on devices compiles for TPUs: collectives, temporary memory, host outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

COLLECTIVES = {"exchange": ["all-reduce"], "gather of few": ["all-reduce"], "gather": ["all-gather"]}
"""The collectives of each program, by the beginning of its name."""

KIB = 1 << 10
MIB = 1 << 20

pytestmark = [
    pytest.mark.child,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, which compiles for TPUs, is not installed: make tpu installs it (137 MB)",
    ),
]


@pytest.fixture(scope="module", params=["v5e:2x4", "v5e:16x16"])
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The compiler's report for each program. It runs in a separate process, because libtpu cannot be unloaded."""
    done = subprocess.run(
        [sys.executable, str(HERE / "programs.py"), request.param, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_program_compiles_and_needs_little_memory(compiled: list[dict[str, Any]]) -> None:
    names = {one["program"] for one in compiled}
    assert names >= {"exchange", "exchange from pinned_host", "exchange of an object", "stack", "split"}
    assert names >= {"copy to pinned_host", "cut", "cut and cast", "streaming update", "streaming bitcast"}
    assert names >= {"gather", "gather in several groups", "gather of few"}
    for one in compiled:
        what = f"{one['program']} of {one['dtype']} on {one['topology']}"
        assert not one["problem"], f"{what}: {one['problem']}"
        # Only programs that exchange data have collectives.
        collective = next((found for name, found in COLLECTIVES.items() if one["program"].startswith(name)), [])
        assert one["collectives"] == collective, what
        assert one["temporary_bytes"] <= _most_temporary_bytes(one), what


def _most_temporary_bytes(one: dict[str, Any]) -> int:
    """Bounds that do not depend on the leaf's size, with one exception."""
    if one["program"].startswith("gather"):
        return 0
    if one["program"] == "exchange of an object":
        return 3 * one["device_output_bytes"]
    if one["program"] in ("exchange", "cut") and one["dtype"] in ("complex64", "int64"):
        # TPUs store these dtypes as two arrays. XLA splits the device's whole piece before it reads from it. For a part
        # of half the piece, as here, it also keeps both halves of the result.
        return one["local_bytes"] * (2 if one["program"] == "exchange" else 3) // 4 + MIB
    return 512 * KIB


def test_copies_to_the_host_are_in_host_memory(compiled: list[dict[str, Any]]) -> None:
    copies = [one for one in compiled if one["program"] == "copy to pinned_host"]
    assert copies
    for one in copies:
        assert (one["host_output_bytes"], one["device_output_bytes"]) == (one["local_bytes"], 0)


def test_streaming_updates_in_place(compiled: list[dict[str, Any]]) -> None:
    updates = [one for one in compiled if one["program"].startswith("streaming")]
    assert updates
    for one in updates:
        assert one["aliased_bytes"] == one["local_bytes"] == one["device_output_bytes"]
