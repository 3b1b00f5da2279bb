"""Compare a run of peers.py with an earlier one, and fail if jaxckpt has become slower relative to the other libraries.

    python benchmarks/peers.py --quick --processes 1 --dir /dev/shm --rounds 5 --no-async --json bench.json
    python benchmarks/regressions.py bench.json

The earlier run is results/quick-<date>.json, the newest one. Seconds of two machines cannot be compared, so this
script compares ratios: the time of another contender divided by the time of jaxckpt. For each save and restore, it
takes the median change of this ratio over the contenders, so that one contender that becomes faster changes little.
The ratios of one operation vary by up to a factor of three between quick runs on a shared machine. So its limit is
generous, and the median over all saves, and over all restores, has a narrower one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import report
import tables

LIMIT = 5.0
"""The largest accepted slowdown of one operation: the factor by which its ratios may fall."""

MEDIAN_LIMIT = 2.0
"""The largest accepted slowdown of all saves, or of all restores: the median over at least MIN_SAMPLES operations."""

MIN_SAMPLES = 6

KINDS = {"save": ("save",), "restore": ("restore", "load_numpy")}
"""The beginnings of the names of the operations that are compared. The others are too short in a quick run."""

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
            if changes and operation.startswith(tuple(chain(*KINDS.values()))):
                yield f"({run['workload']}) {operation}", statistics.median(changes)


def medians(found: list[tuple[str, float]]) -> Iterator[tuple[str, float, float]]:
    """(kind of operation, median slowdown, limit)."""
    for kind, beginnings in KINDS.items():
        factors = [factor for name, factor in found if name.partition(" ")[2].startswith(beginnings)]
        if len(factors) >= MIN_SAMPLES:
            yield f"{kind}, median", statistics.median(factors), MEDIAN_LIMIT


def _case(run: Results) -> tuple[Any, ...]:
    return tuple(run[key] for key in ("workload", "processes", "filesystem", "bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of peers.py")
    parser.add_argument("--against", type=Path, help="an earlier one; default: results/quick-<date>.json, the newest")
    arguments = parser.parse_args()

    before = json.loads(arguments.against.read_text()) if arguments.against else tables.newest("quick-*.json")
    after = json.loads(arguments.results.read_text())
    found = list(slowdowns(before, after))
    rows = [*((name, factor, LIMIT) for name, factor in found), *medians(found)]
    print("Time of jaxckpt, relative to the other contenders:")
    for name, factor, limit in rows:
        verdict = f"   over the limit of {limit:g}" if factor > limit else ""
        print(f"{name:30} {factor:5.2f} × the earlier time{verdict}")
    failed = [f"({run['workload']}) failed: {run['failed']}" for run in after["runs"] if run["failed"]]
    if not found:
        failed.append("no case is in both files: renew results/quick-<date>.json with the command above")
    failed += [f"{name}: slower than on {before['date']}" for name, factor, limit in rows if factor > limit]
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
