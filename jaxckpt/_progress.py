"""Bytes done and to do, told to a callback or drawn as a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a save or a restore stands in this process."""

    verb: str
    """"save" or "restore"."""

    done_bytes: int
    """Bytes this process has moved."""

    total_bytes: int
    """Bytes this process will move in all."""

    seconds: float
    """Seconds since it began."""


Report = Callable[[int], None]
"""Called with a number of bytes that have just been moved."""


@contextmanager
def reporting(verb: str, total_bytes: int, progress: bool | Callable[[Progress], None] | None) -> Generator[Report]:
    """A function to call as bytes move; what it shows, if anything, ends with the block."""
    if callable(progress):
        yield _callback(verb, total_bytes, progress)
    elif progress and sys.stderr.isatty():
        with _bar(verb, total_bytes) as report:
            yield report
    else:
        yield lambda moved: None


def _callback(verb: str, total_bytes: int, tell: Callable[[Progress], None]) -> Report:
    begun = time.monotonic()
    done = 0

    def report(moved: int) -> None:
        nonlocal done
        done += moved
        tell(Progress(verb, done, total_bytes, time.monotonic() - begun))

    return report


@contextmanager
def _bar(verb: str, total_bytes: int) -> Generator[Report]:
    # rich takes 50 ms to import: only for those who look.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        f"{verb:>8}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=total_bytes)
        yield lambda moved: bar.advance(task, moved)
