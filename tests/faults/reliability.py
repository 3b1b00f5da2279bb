"""Counts the results of the fault campaign and writes them to results.json and docs/reliability.md."""

from __future__ import annotations

import collections
import datetime
import functools
import importlib.metadata
import itertools
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

_OLD_OR_NEW = "the old or the new checkpoint, complete"
_ERROR = "an error that names it, or correct bits"
_OTHERS_RAISE = "the others raise, naming it, or JAX aborts them"
_TYPED = "a typed error in bounded time; never wrong data"
_SUMMARY = {
    1: ("`kill -9` at a random moment", "the last acknowledged save is restored"),
    2: ("`kill -9` at each system call of a save", _OLD_OR_NEW),
    3: ("EIO or ENOSPC at any system call", "the error is raised; nothing is published or left behind"),
    4: ("power lost at any system call: unsynced data is lost", "each acknowledged step is published and complete"),
    5: ("no space or no inodes left", "the earlier checkpoint stays intact"),
    6: ("a read-only folder or file system", "an error before anything is copied"),
    7: ("a bit flipped in a byte of any kind", _ERROR),
    8: ("any file or folder deleted", _ERROR),
    9: ("any file truncated, emptied, extended or replaced", _ERROR),
    10: ("manifests or objects swapped", "`verify`, and reads of whole objects: an error"),
    11: ("a manifest or `zarr.json` edited, also with a valid checksum", "an error, or one with `manifest_sha256=`"),
    12: ("zeros, −0.0, NaN payloads, subnormals, empty arrays", "the same bits"),
    13: ("several threads, processes or hosts save to one path", "no mix; an acknowledged save stays complete"),
    14: ("a suspended save resumes after another one took over", "it neither publishes nor deletes"),
    15: ("one of 4 processes is killed at each phase", _OTHERS_RAISE),
    16: ("processes of 4 are stopped, slow, or make no call", "a slow one is waited for; otherwise as above"),
    17: ("no space left in some of 4 processes", "all raise, with the cause"),
    18: ("SIGTERM in a background save", "committed or cleanly abandoned; the process exits"),
    19: ("`kill -9` at each system call of a deletion", "the step is gone or complete"),
    20: ("restores while another process overwrites or deletes", "exact, or `NotACheckpointError`"),
    21: ("the clock and all file times are off by a day", "order and retention unchanged"),
    22: ("S3, GCS: errors, delays, short or flipped answers to any request", _TYPED),
    23: ("S3, GCS: the answer to any request of a save is lost", "success, and exactly one checkpoint"),
    24: ("S3, GCS: a server that ignores conditions", "refused, with the reason"),
    25: ("hostile manifests, states and files, and a fuzzer", _TYPED),
    26: ("any sequence of operations and crashes", "the same result as a plain dict"),
    27: ("storage fails in bursts during training", "no stop; each step published or reported"),
}
"""What the page says of all tests of a fault: (fault, promise)."""


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
        found = [row for row in rows if row["system"] == system]
        table = _summary(found) if system == "jaxckpt" else _tests(found)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    _PAGE.write_text(text)


def _load() -> list[dict[str, Any]]:
    return json.loads(_RESULTS.read_text()) if _RESULTS.exists() else []


def _summary(rows: list[dict[str, Any]]) -> str:
    """One line for each fault, with the sums of its tests."""
    by_number = itertools.groupby(rows, key=lambda row: row["number"])
    lines = ["| | fault | promised | rounds | silent |", "|---:|---|---|---:|---:|"]
    for number, (*tests,) in by_number:
        fault, promise = _SUMMARY[number]
        failures = "".join(f" **FAILED** {row['failure']}" for row in tests if row["failure"])
        lines.append(_line(number, fault, promise + failures, _rounds(tests), _silent(tests)))
    lines.append(_line("", "**all**", "", f"**{_rounds(rows)}**", f"**{_silent(rows)}**"))
    return "\n".join([*lines, "", _when(rows)])


def _tests(rows: list[dict[str, Any]]) -> str:
    """One line for each test."""
    lines = ["| | fault | rounds | silent |", "|---:|---|---:|---:|"]
    lines += [_line(row["number"], row["title"], _rounds([row]), row["silent"]) for row in rows]
    return "\n".join(lines)


def _line(*cells: object) -> str:
    shown = " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {shown} |"


def _rounds(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['rounds'] for row in rows):,}"


def _silent(rows: list[dict[str, Any]]) -> int:
    return sum(row["silent"] for row in rows)


def _when(rows: list[dict[str, Any]]) -> str:
    days = sorted({row["date"] for row in rows})
    where = sorted({row["where"] for row in rows})
    return f"Run {' to '.join(days[:: max(1, len(days) - 1)])} with {'; '.join(where)}."


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
