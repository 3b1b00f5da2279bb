"""The helpers that start processes, themselves tested."""

from __future__ import annotations

import pytest
from processes import RunProcesses, RunPython


def test_a_child_has_the_devices_it_was_given(run_python: RunPython) -> None:
    assert run_python("import jax; print(len(jax.devices()))", devices=3).strip() == "3"


def test_processes_form_one_job(run_processes: RunProcesses) -> None:
    done = run_processes(
        """
        from jax.experimental import multihost_utils
        import numpy as np
        heard = multihost_utils.process_allgather(np.array([process_id + args]))
        print(heard.ravel().tolist(), jax.device_count())
        """,
        processes=2,
        devices_per_process=2,
        args=10,
    )
    # gloo writes lines of its own to stdout
    assert [one.stdout.splitlines()[-1] for one in done] == ["[10, 11] 4"] * 2


def test_a_hang_is_a_failure(run_python: RunPython) -> None:
    with pytest.raises(AssertionError, match="a hang"):
        run_python("import time; time.sleep(60)", timeout=1)
