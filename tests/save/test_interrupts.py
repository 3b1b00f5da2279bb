"""Ctrl-C at every moment of a call: nothing hangs, nothing stays locked, and the next save works."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import run_python

PROGRAM = Path(__file__).parents[1] / "programs" / "interrupted.py"

# Tests every nth moment of the main thread, or all (`--campaign`).
STRIDES = {"save": 13, "save_async": 12, "wait": 1, "restore": 13, "checkpointer": 41}


@pytest.mark.child
@pytest.mark.parametrize("operation", STRIDES)
def test_ctrl_c_at_every_call(tmp_path: Path, request: pytest.FixtureRequest, operation: str) -> None:
    every = bool(request.config.getoption("--campaign"))
    stride = 1 if every else STRIDES[operation]
    arguments = [str(tmp_path), operation, str(0 if every else stride // 2), str(stride)]
    message = json.loads(run_python(PROGRAM, args=arguments, timeout=900 if every else 120).splitlines()[-1])
    print(message)
    assert message["operation"] == operation
    assert message["tried"] >= (1 if operation == "wait" else 30)
    assert message["interrupted"] >= 0.9 * message["tried"]
    assert message["open_files"] < 20


COLD_STRIDES = {"save": 211, "save_async": 211, "restore": 97, "load_numpy": 19, "verify": 7, "checkpointer": 701}


@pytest.mark.child
@pytest.mark.parametrize("operation", COLD_STRIDES)
def test_ctrl_c_in_the_first_call_of_a_process(tmp_path: Path, request: pytest.FixtureRequest, operation: str) -> None:
    """The process starts its threads, and JAX its backend, in this call. Also the exit must not hang."""
    every = bool(request.config.getoption("--campaign"))
    stride = 1 if every else COLD_STRIDES[operation]
    program = PROGRAM.with_name("cold_interrupts.py")
    arguments = [str(tmp_path), operation, str(0 if every else stride // 2), str(stride)]
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600 if every else 200, check=True)
    message = json.loads(done.stdout.splitlines()[-1])
    print(message)
    assert not message["wrong"], "\n".join(message["wrong"])
    assert message["interrupted"] >= 3


@pytest.mark.child
def test_ctrl_c_during_the_first_imports(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The first save imports JAX, tensorstore and most of jaxckpt. An interrupted import must not break later ones."""
    moments = 250 if request.config.getoption("--campaign") else 5
    outcomes: Counter[str] = Counter()
    for moment in range(moments):
        path = tmp_path / str(moment)
        path.mkdir()
        program = PROGRAM.with_name("interrupted_imports.py")
        process = subprocess.Popen(
            [sys.executable, str(program), str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(2.0 * (moment + 0.5) / moments)  # the imports take about two seconds
        process.send_signal(signal.SIGINT)
        try:
            printed, errors = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        is_over = process.returncode in (-signal.SIGINT, 130) and printed.strip() in ("saved", "")
        assert is_over or (process.returncode == 0 and printed), (moment, process.returncode, printed, errors)
        outcomes[printed.strip()] += 1
    print(outcomes)
    assert outcomes["interrupted"]
