"""Boxes that no process holds whole, brought to all: every dtype, bit for bit."""

from __future__ import annotations

from processes import PROGRAMS, RunProcesses

from jaxckpt._format.dtypes import DTYPES


def test_every_dtype_keeps_its_bits(run_processes: RunProcesses) -> None:
    done = run_processes(PROGRAMS / "exchange_every_dtype.py", processes=2, devices_per_process=2, timeout=200)
    # One dtype with every spec and box, a complex one with every spec, the others with one spec and box.
    shards = 2 * (15 + 5 + len(DTYPES) - 2)
    assert [one.stdout for one in done] == [f"{shards}\n"] * 2
