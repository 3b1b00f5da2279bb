"""`make gpu` works on CPU devices with small arrays, so that simple mistakes are found without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.child
ROOT = Path(__file__).parent.parent.parent


def make_gpu(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "GPU_OUT": str(out), "ARGS": " ".join(arguments)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_every_section_runs_on_cpu_devices(tmp_path: Path) -> None:
    done = make_gpu(tmp_path, "--smoke")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    sections = [found for found in results.values() if isinstance(found, dict)]
    assert len(sections) > 8
    assert not [found["error"] for found in sections if "error" in found]
    assert "bfloat16" in results["every dtype"]["dtypes"]
    assert results["large leaves, /dev/shm"].keys() >= {"jaxckpt", "orbax v0", "orbax v1"}
    assert (tmp_path / "save_async.trace.json.gz").stat().st_size > 0


def test_a_missing_accelerator_is_reported(tmp_path: Path) -> None:
    done = make_gpu(tmp_path)
    assert done.returncode != 0
    assert "no accelerator" in done.stderr
    assert not list(tmp_path.iterdir())
