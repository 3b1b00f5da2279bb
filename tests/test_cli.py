"""The command line, as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore_files import DATA, tutorial

import jaxckpt

pytest.importorskip("typer", reason="the command line needs it")


def jaxckpt_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from jaxckpt._cli import run; sys.argv[0] = 'jaxckpt'; run()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_integrate_takes_the_four_arguments_of_the_tutorial(tmp_path: Path) -> None:
    tutorial(tmp_path)
    for strategy, new in (("strategy.ckpt", "new"), ("strategy.json", "new.json-strategy")):
        done = jaxckpt_command(tmp_path, "integrate", "net.ckpt", new, strategy, "4")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        merged = jaxckpt.load_numpy(tmp_path / new)
        printed = np.array(DATA["merged"]["moments.weight"], np.float32)
        np.testing.assert_array_equal(merged["moments.weight"], printed, strict=True)
        assert merged.keys() == DATA["merged"].keys()
    again = jaxckpt_command(tmp_path, "integrate", "net.ckpt", "new", "strategy.ckpt", "4")
    assert again.returncode == 1
    assert again.stderr.startswith("jaxckpt: ")
    assert (
        jaxckpt_command(tmp_path, "integrate", "--overwrite", "net.ckpt", "new", "strategy.ckpt", "4").returncode == 0
    )


def test_a_missing_rank_is_told_without_a_traceback(tmp_path: Path) -> None:
    tutorial(tmp_path)
    done = jaxckpt_command(tmp_path, "integrate", "net.ckpt", "new", "strategy.ckpt", "3")
    assert done.returncode == 1
    assert done.stderr.startswith("jaxckpt: the shards of 'weight' do not make up its [8, 8]:\n  [6:8, 0:8] is in no")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()
    assert jaxckpt_command(tmp_path, "integrate", "net.ckpt", "new", "strategy.ckpt", "0").returncode == 2
