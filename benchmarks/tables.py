"""The tables of docs/performance.md, as Markdown, from what peers.py has written.

    python benchmarks/tables.py [benchmarks/results/peers-<date>-tmpfs.json]     by default the newest on tmpfs

One table for each workload and number of processes: jaxckpt's milliseconds, and how many times as long each other took,
medians over rounds. Above 1, jaxckpt is faster. "level": neither was faster in all rounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
OURS = "jaxckpt"
LEFT_OUT = ("a step just after it", "a step alone")


def table(run: dict[str, Any]) -> str:
    peers = run["contenders"]
    processes = f", {run['processes']} processes" if run["processes"] > 1 else ""
    place = "" if run["filesystem"] == "tmpfs" else f", {run['filesystem']}"
    lines = [
        f"| ({run['workload']}) {run['title']}{processes}{place} | {OURS}, ms | {' | '.join(peers)} |",
        f"|---|{'---:|' * (1 + len(peers))}",
    ]
    for operation, found in run["spreads"].items():
        if operation not in LEFT_OUT and OURS in found:
            ratios = [ratio(found[peer]["times_jaxckpt"]) if peer in found else "" for peer in peers]
            lines.append(f"| {operation} | {milliseconds(found[OURS]['seconds'][1])} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


def ratio(times: Sequence[float]) -> str:
    """[least, median, greatest] over rounds."""
    least, median, greatest = times
    if least < 1 < greatest:
        return "level"
    return f"{median:.0f}" if median >= 10 else f"{median:.1f}" if median >= 3 else f"{median:.2f}"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else max(RESULTS.glob("peers-*-tmpfs.json"))
    result = json.loads(path.read_text())
    print(f"{path.name}: {result['machine']['cpu']}, {result['machine']['cores']} cores, {result['date']}\n")
    for run in result["runs"]:
        print(f"{run['rounds']} rounds\n\n{table(run)}\n")


if __name__ == "__main__":
    main()
