"""Where the runs of these tests go."""

from __future__ import annotations

from pathlib import Path

import pytest
import servers


@pytest.fixture(params=["folder", *(pytest.param(store, marks=pytest.mark.child) for store in ("s3", "gs"))])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run goes: on a file system, or on an object store."""
    if request.param == "folder":
        return str(tmp_path / "run")
    bucket: servers.Bucket = request.getfixturevalue(request.param)
    return f"{bucket.url}/run"
