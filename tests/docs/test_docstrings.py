"""The examples in docstrings run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import PROGRAMS, environment

import jaxckpt


@pytest.mark.child
def test_the_examples_in_docstrings_run() -> None:
    command = [sys.executable, str(PROGRAMS / "docstring_examples.py"), str(Path(jaxckpt.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment(1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 80
