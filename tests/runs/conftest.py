"""The places where the runs of these tests are saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import servers


@pytest.fixture(params=["folder", *(pytest.param(store, marks=pytest.mark.child) for store in ("s3", "gs"))])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path of a run: on a file system, or on an object store."""
    if request.param == "folder":
        return str(tmp_path / "run")
    bucket: servers.Bucket = request.getfixturevalue(request.param)
    return f"{bucket.url}/run"
