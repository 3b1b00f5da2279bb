"""Boxes that no process holds completely, sent to all processes: every dtype, bit for bit."""

from __future__ import annotations

from processes import PROGRAMS, RunProcesses

from jaxckpt._model.dtypes import DTYPES


def test_every_dtype_keeps_its_bits(run_processes: RunProcesses) -> None:
    done = run_processes(PROGRAMS / "exchange_every_dtype.py", processes=2, devices_per_process=2, timeout=200)
    # Two dtypes have every spec, the others have one spec and one box.
    shards = 2 * (5 + 5 + len(DTYPES) - 2)
    assert [one.stdout for one in done] == [f"{shards}\n"] * 2
