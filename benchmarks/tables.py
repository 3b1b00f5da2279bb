"""The tables of docs/performance.md, from the results of peers.py.

    python benchmarks/tables.py            print all tables
    python benchmarks/tables.py --write    write those that the page shows into it

One table for each workload, file system and number of processes shows jaxckpt's time in milliseconds, and the time of
each other contender relative to it. The page has the most important ones, with fewer rows. Two more tables show the CPU
time of the larger workloads, and the bytes that several processes read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- written by benchmarks/tables.py -->", "<!-- end of the tables -->"

OURS, FLOOR, RAW = "jaxckpt", "one plain file", "Orbax raw"
LABELS = {
    "Orbax OCDBT": "Orbax",
    "Orbax no OCDBT": "Orbax, no OCDBT",
    "Orbax raw": "Orbax, not compressed",
    "Orbax chunks": "Orbax, chunks of 1 MiB",
    "DCP one thread": "DCP",
}
"""How the page shows the names of contenders."""

LEFT_OUT = ("a step just after it", "a step alone")
ON_THE_PAGE = [("e", 1, "tmpfs")]
"""The runs that the page shows: (workload, processes, file system)."""
LARGE = ("a", "c", "e", "f")

Run = Mapping[str, Any]


def newest(pattern: str) -> Any:
    """The newest results whose file names match; the date is in the name."""
    return json.loads(max(RESULTS.glob(pattern)).read_text())


def runs() -> list[Run]:
    """All runs in the newest result file of peers.py."""
    return newest("peers-*.json")["runs"]


def all_tables() -> str:
    found = sorted(runs(), key=lambda run: (run["filesystem"] != "tmpfs", run["processes"], run["workload"]))
    tables = [table(run, run["spreads"]) for run in found]
    return "\n\n".join(filter(None, [*tables, cpu_table(found), over_read_table(found)]))


def tables_of_the_page() -> str:
    found = {(run["workload"], run["processes"], run["filesystem"]): run for run in runs()}
    return "\n\n".join(table(found[key], short(found[key])) for key in ON_THE_PAGE)


def short(run: Run) -> list[str]:
    """Saves, restores onto the saved mesh, onto the next one and onto one device, `load_numpy` and `open`."""
    restores = [operation for operation in run["spreads"] if operation.startswith("restore")]
    shown = {"save_async, until it returns", "save", *restores[:2], "restore, one device", "load_numpy", "open"}
    return [operation for operation in run["spreads"] if operation in shown]


def table(run: Run, operations: Iterable[str]) -> str:
    peers = run["contenders"]
    where = "" if run["filesystem"] == "tmpfs" else f", on a disk ({run['filesystem']})"
    processes = f", {run['processes']} processes" if run["processes"] > 1 else ""
    rows = (
        [operation, milliseconds(found[OURS]["seconds"][1]), *(ratio(found.get(peer)) for peer in peers)]
        for operation in operations
        if operation not in LEFT_OUT and OURS in (found := run["spreads"][operation])
    )
    names = [LABELS.get(peer, peer) for peer in peers]
    return markdown([f"({run['workload']}) {run['title']}{processes}{where}", f"{OURS}, ms", *names], rows)


def cpu_table(found: Sequence[Run]) -> str:
    """CPU seconds per GiB of saves and restores, in one process on tmpfs."""
    some = [run for run in found if run["workload"] in LARGE and (run["processes"], run["filesystem"]) == (1, "tmpfs")]

    def rows() -> Iterator[list[str]]:
        for run in some:
            for operation, spreads in run["spreads"].items():
                if operation == "save" or operation.startswith(("restore", "load")):
                    yield [
                        f"({run['workload']}) {operation}",
                        *(
                            f"{spreads[name]['cpu_seconds'][1] * 2**30 / run['bytes']:.2f}" if name in spreads else ""
                            for name in (OURS, RAW, FLOOR)
                        ),
                    ]

    return markdown(["CPU seconds per GiB", OURS, LABELS[RAW], FLOOR], rows())


def over_read_table(found: Sequence[Run]) -> str:
    """Bytes that each of several processes reads, divided by the bytes that it needs."""
    return markdown(
        ["bytes read ÷ bytes needed, each of four processes", "minimum", "maximum"],
        (
            [f"({run['workload']}) onto {layout}", f"{min(by_process):.2f}", f"{max(by_process):.2f}"]
            for run in found
            if run["processes"] > 1
            for layout, by_process in run["over_read"].items()
        ),
    )


def markdown(heading: Sequence[str], rows: Iterator[list[str]]) -> str:
    """A table, or "" if it has no rows."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "" if len(lines) == 2 else "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


def ratio(found: Run | None) -> str:
    """The median over rounds; "level" if neither was faster in all rounds."""
    if found is None:
        return ""
    least, median, greatest = found["times_jaxckpt"]
    if least < 1 < greatest:
        return "level"
    return f"{median:.0f}" if median >= 10 else f"{median:.1f}" if median >= 3 else f"{median:.2f}"


def main() -> None:
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{tables_of_the_page()}\n\n{END}{after}")
    else:
        print(all_tables())


if __name__ == "__main__":
    main()
