"""Ctrl-C at every moment of a call: nothing hangs, nothing stays locked, and the next save works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_python

PROGRAM = Path(__file__).parents[1] / "programs" / "interrupted.py"

# Tests every nth moment. All 11,821 moments take nine minutes (`--campaign`).
STRIDES = {"save": 23, "save_async": 23, "wait": 1, "restore": 47, "checkpointer": 79}


@pytest.mark.child
@pytest.mark.parametrize("operation", STRIDES)
def test_ctrl_c_at_every_call(tmp_path: Path, request: pytest.FixtureRequest, operation: str) -> None:
    every = bool(request.config.getoption("--campaign"))
    stride = 1 if every else STRIDES[operation]
    arguments = [str(tmp_path), operation, str(0 if every else stride // 2), str(stride)]
    message = json.loads(run_python(PROGRAM, args=arguments, timeout=900 if every else 120).splitlines()[-1])
    print(message)
    assert message["operation"] == operation
    assert message["tried"] >= (1 if operation == "wait" else 40)
    assert message["interrupted"] >= 0.9 * message["tried"]
    assert message["open_files"] < 20
