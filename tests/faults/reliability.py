"""Counts the results of the fault campaign and writes them to results.json and docs/reliability.md."""

from __future__ import annotations

import collections
import datetime
import functools
import importlib.metadata
import json
import platform
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

_RESULTS = Path(__file__).parent / "results.json"
_PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
_BEGIN, _END = "<!-- written by make faults: {} -->", "<!-- end of {} -->"


T = TypeVar("T")


class Fault:
    """One kind of fault: its number of rounds, and their outcomes."""

    def __init__(
        self, number: int, title: str, promise: str, quick: int, full: int | None, system: str, campaign: bool
    ):
        self.number = number
        self.title = title
        self.promise = promise
        self.system = system
        self.campaign = campaign
        """Whether all rounds are run, instead of a few."""

        self.seed = random.SystemRandom().randrange(1 << 32) if campaign else number
        self.random = random.Random(self.seed)
        self.outcomes = collections.Counter[str]()
        self.silents: list[str] = []
        self._quick, self._full = quick, full

    def rounds(self, cases: Sequence[T] | None = None) -> Iterator[T | int]:
        """The cases of this run: `full` of them in the campaign (all if that is None), otherwise `quick` of them.

        Without cases, yields numbers. If there are more cases than rounds, picks cases spread evenly over them.
        """
        wanted = self._full if self.campaign else self._quick
        if cases is None:
            assert wanted is not None, "a fault without cases must say how many rounds it takes"
            yield from range(wanted)
            return
        count = len(cases) if wanted is None else min(wanted, len(cases))
        # The step is at least one case, so no case is taken twice.
        yield from (cases[int((number + 0.5) * len(cases) / count)] for number in range(count))

    def saw(self, outcome: str) -> None:
        """Count a round with an allowed outcome."""
        self.outcomes[outcome] += 1

    def silent(self, what: str) -> None:
        """Count a round that returned wrong data, or reported success without having it, without an error."""
        self.silents.append(what)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one test of the campaign."""

    number: int
    system: str
    test: str
    title: str
    promise: str
    rounds: int
    outcomes: dict[str, int]
    silents: list[str]
    silent: int
    failure: str | None
    seconds: float
    seed: int


def record(row: Row) -> None:
    """Write a row to results.json. It replaces the previous row of the same test."""
    rows = [found for found in _load() if found["test"] != row.test]
    rows.append({**asdict(row), **circumstances()})
    rows.sort(key=lambda found: (found["number"], found["system"], found["test"]))
    _RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def write() -> None:
    """Write the tables into docs/reliability.md, between their markers."""
    rows = _load()
    text = _PAGE.read_text()
    for system in ("jaxckpt", "orbax"):
        begin, end = _BEGIN.format(system), _END.format(system)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{_table([row for row in rows if row['system'] == system])}\n{end}{after}"
    _PAGE.write_text(text)


def _load() -> list[dict[str, Any]]:
    return json.loads(_RESULTS.read_text()) if _RESULTS.exists() else []


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Not run yet."
    lines = ["| | fault | promised | rounds | outcome | silent |", "|---:|---|---|---:|---|---:|"]
    for row in rows:
        outcomes = sorted(row["outcomes"].items(), key=lambda item: -item[1])
        said = "; ".join(f"{name}: {count:,}" for name, count in outcomes)
        if row["failure"]:
            said = f"**FAILED** {row['failure']} {said}"
        cells = (row["number"], row["title"], row["promise"], f"{row['rounds']:,}", said, row["silent"])
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    silent, rounds = sum(row["silent"] for row in rows), sum(row["rounds"] for row in rows)
    lines.append(f"| | **all** | | **{rounds:,}** | | **{silent}** |")
    days = sorted({row["date"] for row in rows})
    where = sorted({row["where"] for row in rows})
    lines += ["", f"Run {' to '.join(days[:: max(1, len(days) - 1)])} with {'; '.join(where)}."]
    return "\n".join(lines)


@functools.cache
def circumstances() -> dict[str, str]:
    """The date, commit and versions at which a row was counted."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_PAGE.parent, capture_output=True, text=True, check=False
    )
    libraries = ("jax", "tensorstore", "orbax-checkpoint")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "where": f"Python {platform.python_version()}, {versions}, {platform.system()} {platform.release()}",
    }
