"""Compare a run of peers.py with an earlier one, and fail if jaxckpt has become slower relative to the other libraries.

    python benchmarks/peers.py --quick --processes 1 --dir /dev/shm --rounds 5 --no-async --json bench.json
    python benchmarks/regressions.py bench.json

The earlier run is results/quick-<date>.json, the newest one. Seconds of two machines cannot be compared, so this
script compares ratios: the time of another contender divided by the time of jaxckpt. For each save and restore, it
takes the median change of this ratio over the contenders, so that one contender that becomes faster changes little.
A quick run on a shared machine varies by up to a factor of two; hence the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
import tables

LIMIT = 3.0
"""The largest accepted slowdown of one operation: the factor by which its ratios may fall."""

OPERATIONS = ("save", "restore", "load_numpy")
"""The beginnings of the names of the operations that are compared. Others take less than a few milliseconds."""

Results = dict[str, Any]


def slowdowns(before: Results, after: Results) -> Iterator[tuple[str, float]]:
    """(case and operation, factor by which jaxckpt has become slower relative to most contenders)."""
    earlier = {_case(run): run["spreads"] for run in before["runs"]}
    for run in after["runs"]:
        for operation, contenders in run["spreads"].items():
            old = earlier.get(_case(run), {}).get(operation, {})
            changes = [
                old[name]["times_jaxckpt"][1] / found["times_jaxckpt"][1]
                for name, found in contenders.items()
                if name in old and not name.startswith(report.OURS)
            ]
            if changes and operation.startswith(OPERATIONS):
                yield f"({run['workload']}) {operation}", statistics.median(changes)


def _case(run: Results) -> tuple[Any, ...]:
    return tuple(run[key] for key in ("workload", "processes", "filesystem", "bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of peers.py")
    parser.add_argument("--against", type=Path, help="an earlier one; default: results/quick-<date>.json, the newest")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"largest accepted slowdown; default: {LIMIT:g}")
    arguments = parser.parse_args()

    before = json.loads(arguments.against.read_text()) if arguments.against else tables.newest("quick-*.json")
    after = json.loads(arguments.results.read_text())
    found = dict(slowdowns(before, after))
    for name, factor in found.items():
        print(f"{name:30} {factor:5.2f} times as slow{'   over the limit' if factor > arguments.limit else ''}")
    failed = [f"({run['workload']}) failed: {run['failed']}" for run in after["runs"] if run["failed"]]
    if not found:
        failed.append("no case is in both files: renew results/quick-<date>.json with the command above")
    if failed or max(found.values()) > arguments.limit:
        raise SystemExit(
            "\n".join(failed) or f"slower than in {before['date']} by more than a factor of {arguments.limit:g}"
        )


if __name__ == "__main__":
    main()
