"""A slow process has a name: in a log line while the others wait, and in the error if it stops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import PROGRAMS, RunProcesses


@pytest.mark.child
def test_a_slow_process_is_named_with_its_progress(tmp_path: Path, run_processes: RunProcesses) -> None:
    done = run_processes(PROGRAMS / "slow_peer.py", processes=3, devices_per_process=1, args=str(tmp_path))
    (logged, raised, shown), _, (logged_by_2, raised_in_2, shown_in_2) = [
        json.loads(one.stdout.splitlines()[0]) for one in done
    ]
    progress = r"process 1: [1-9][0-9.]* [KM]iB of 6.0 MiB, [0-9.]+ [KM]iB/s"
    named = rf"waited \d+ s for process 1 of 3 while saving:\n  {progress}"
    assert any(re.search(named, line) for line in logged), logged
    assert logged_by_2 == []
    own = 6 << 20
    for in_0, in_2 in zip(shown, shown_in_2, strict=True):  # a save and a restore
        assert in_2[-1] == [own, own]
        assert in_0[-1][1] == 3 * own, "the display of process 0 shows the job"
        assert in_0[-1][0] >= 2 * own
    after_own = {done for done, total in shown[0] if total == 3 * own and done > 2 * own}
    assert len(after_own) >= 2, "also while it waits"
    for error in (raised, raised_in_2):
        assert error.startswith("PeerTimeoutError: process 1 of 3 did not respond"), error
        assert re.search(r"They last reported:\n  process 1: [0-9.]+ [KM]iB of 6.0 MiB", error), error
