"""What a program can observe of jaxckpt: progress in bytes, log lines, and events of jax.monitoring."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxckpt._pipeline.lanes import Request, in_caller, is_watched, run
from jaxckpt._pipeline.watchdog import Watchdog, current_watchdog

# The log --------------------------------------------------------------------------------------------------
# `logging` takes its locks in Python code. An interrupt of the main thread right after that leaves a lock held, and
# every other thread that logs then waits forever. So lines of the main thread are logged in a lane.

_LOG_SECONDS = 60.0
"""How long a handler may take. The call then continues without it."""


class LaneLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that takes no locks in the main thread."""

    def isEnabledFor(self, level: int) -> bool:
        """Whether lines of this level are logged. `Logger.isEnabledFor` may take a lock."""
        return level >= self.logger.getEffectiveLevel() and level > logging.root.manager.disable

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        write = functools.partial(self._write, level, msg, *args, **kwargs)
        if is_watched() or threading.current_thread() is not threading.main_thread():
            write()
        else:
            run(write, Watchdog(_LOG_SECONDS), until=time.monotonic() + _LOG_SECONDS)

    def _write(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # a handler that raises, as with a closed stderr, must end no save
            self.logger.log(level, msg, *args, **kwargs)


log = LaneLog(logging.getLogger("jaxckpt"))


# Sizes and rates ------------------------------------------------------------------------------------------

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show_bytes(size: float) -> str:
    """A size as people read it: "1.5 MiB"."""
    power, rounded = 0, round(size)
    while power + 1 < len(_UNITS) and rounded >= 1024:
        power += 1
        rounded = round(size / 1024**power, 1)
    return f"{rounded:.{min(power, 1)}f} {_UNITS[power]}"


def show_rate(bytes_per_second: float) -> str:
    """A rate in the units of sizes: "1.5 MiB/s"."""
    return f"{show_bytes(bytes_per_second)}/s"


def parse_bytes(text: str) -> int:
    """A positive number of bytes: "65536", "64KiB", "1 MiB". Raises ValueError."""
    match = re.fullmatch(r"(\d{1,15})\s*(B?|[KMGT]iB)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r}: expected bytes, such as 65536, 64KiB or 1MiB")
    return int(match[1]) << 10 * "bkmgt".index(match[2][:1].lower() or "b")


# Progress -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a save, a restore, a conversion or another read of arrays: of this process, and in process 0 of
    the job, as far as the other processes have reported theirs, every 5 s."""

    verb: str
    """"save", "restore", "verify", "diff", "convert", or "report" while it reads leaves for histograms."""

    done_bytes: int
    """Bytes that have moved."""

    total_bytes: int
    """Bytes that will move in total. In process 0, it grows when another process reports its share."""

    seconds: float
    """Seconds since the start."""

    step: str = ""
    """If the steps of a run are verified: the folder of the step that is read, for example "00000300"."""

    @property
    def bytes_per_second(self) -> float:
        """The average rate so far; 0 before any bytes have moved."""
        return self.done_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated seconds until the end, at the average rate; None before any bytes have moved."""
        rest = self.total_bytes - self.done_bytes
        return rest / self.bytes_per_second if self.bytes_per_second else None

    def __str__(self) -> str:
        """`save: 1.2 GiB of 4.0 GiB, 350.0 MiB/s, 8 s left`."""
        left = "" if self.remaining_seconds is None else f", {self.remaining_seconds:.0f} s left"
        moved = f"{show_bytes(self.done_bytes)} of {show_bytes(self.total_bytes)}"
        return f"{_title(self.verb, self.step)}: {moved}, {show_rate(self.bytes_per_second)}{left}"


def _title(verb: str, step: str) -> str:
    return f"{verb} {step}" if step else verb


Report = Callable[[int], None]
"""A function that is called with the number of bytes that have just moved."""


def report_nothing(moved: int) -> None:
    """Report nothing."""


Show = Callable[[int, int], object]
"""Displays (bytes that have moved, bytes that will move)."""


class Moved(NamedTuple):
    """What one process has moved. A heartbeat carries it, as a JSON array."""

    done_bytes: int
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.done_bytes / self.seconds if self.seconds > 0 else 0.0
        return f"{show_bytes(self.done_bytes)} of {show_bytes(self.total_bytes)}, {show_rate(rate)}"


class Work:
    """What a call moves in this process. In process 0, its display adds what the others have reported."""

    def __init__(self, total_bytes: int, show: Show | None) -> None:
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._begun = time.monotonic()
        self._show = show
        self._others = (0, 0)

    @property
    def is_shown(self) -> bool:
        """Whether it is displayed."""
        return self._show is not None

    @property
    def moved(self) -> Moved:
        return Moved(self._done_bytes, self._total_bytes, time.monotonic() - self._begun)

    def add(self, n_bytes: int) -> None:
        """Count bytes, and display them with those of the others. In a lane."""
        self._done_bytes += n_bytes
        if self._show is not None:
            others_done, others_total = self._others
            self._show(self._done_bytes + others_done, self._total_bytes + others_total)

    def note_others(self, others: Iterable[Moved]) -> None:
        """Note what the other processes have reported. Any thread."""
        reported = [(moved.done_bytes, moved.total_bytes) for moved in others]
        done, total = (sum(column) for column in zip(*reported, strict=True)) if reported else (0, 0)
        self._others = max(self._others[0], done), max(self._others[1], total)

    def end(self) -> None:
        """End the display."""
        self._show = None


def draws_bars() -> bool:
    """Whether stderr is a terminal that can erase what it shows. Elsewhere, progress is shown as lines."""
    stream = sys.stderr
    if stream is None or stream.closed:  # pyright: ignore[reportUnnecessaryComparison]
        return False
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


@contextlib.contextmanager
def display_progress(
    verb: str, total_bytes: int, progress: bool | Callable[[Progress], None] | None, step: str = ""
) -> Generator[Report]:
    """A function to call as bytes move. It updates the display that `progress` selects, which ends with the block.

    `progress` is `Options.progress`. Nothing is displayed if there are no bytes to move. The heartbeats of this process
    tell the others how many bytes have moved. In process 0, the display adds what they tell.
    """
    with contextlib.ExitStack() as display:
        show: Show | None = None
        if callable(progress):
            show = _make_show(verb, progress, step, in_caller)
        elif progress and total_bytes:
            if draws_bars():
                show = display.enter_context(_bar(_title(verb, step), total_bytes))
            else:
                show = _make_show(verb, _LineLogger(), step, operator.call)
        work = Work(total_bytes, show)
        if (watchdog := current_watchdog()) is not None:
            watchdog.work = work
        try:
            yield work.add
        finally:
            work.end()


def _make_show(verb: str, callback: Callable[[Progress], None], step: str, call: Callable[[Request], object]) -> Show:
    begun = time.monotonic()

    def show(done: int, total: int) -> None:
        call(functools.partial(callback, Progress(verb, done, total, time.monotonic() - begun, step)))

    return show


LINE_SECONDS = 10.0


class _LineLogger:
    """Logs a line every `LINE_SECONDS` and one at the end (logger "jaxckpt"), or prints it to stderr if INFO is off."""

    def __init__(self) -> None:
        self._next = LINE_SECONDS
        self._ended = -1

    def __call__(self, progress: Progress) -> None:
        """Other processes may have more to do when it seems that all is done."""
        at_end = progress.done_bytes >= progress.total_bytes > self._ended
        if progress.seconds < self._next and not at_end:
            return
        self._next = progress.seconds + LINE_SECONDS
        if at_end:
            self._ended = progress.total_bytes
        if log.isEnabledFor(logging.INFO):
            log.info("%s", progress)
        else:
            with contextlib.suppress(OSError, ValueError):  # stderr is gone
                print(f"jaxckpt: {progress}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(title: str, total_bytes: int) -> Generator[Show]:
    """A bar that disappears when the block ends. The result of the call says the rest."""
    # Imported only if a bar is drawn, because importing rich takes 50 ms.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column
    from rich.text import Text

    class Figures(ProgressColumn):
        """Rich's own columns show sizes in GiB, but rates in GB/s."""

        def render(self, task: Task) -> Text:
            moved = f"{show_bytes(task.completed)} of {show_bytes(task.total or 0)}"
            return Text(f"{moved}, {show_rate(task.speed)}" if task.speed else moved)

    one_line = Column(no_wrap=True)  # a narrow terminal shortens the bar first
    columns = (
        TextColumn("{task.description}", table_column=one_line.copy()),
        BarColumn(),
        Figures(one_line.copy()),
        TimeRemainingColumn(table_column=one_line.copy()),
    )
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(f"{title:>8}"), total=total_bytes)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# Log lines, and events of jax.monitoring ------------------------------------------------------------------


def record_event(event: str, seconds: float, line: Callable[[], str], *, logged: bool, **counts: int) -> None:
    """Record that something is done: the duration event "/jaxckpt/<event>" with its counts, and a log line (INFO).

    Every process records its own events. `logged` is set only in the process that logs for all.
    """
    jax = sys.modules.get("jax")  # in a program that has not imported JAX, nothing listens
    try:
        if jax is not None:
            jax.monitoring.record_event_duration_secs(f"/jaxckpt/{event}", seconds, **counts)
    except Exception as error:
        log.warning("a jax.monitoring listener failed after %s: %r", event, error)
    if logged and log.isEnabledFor(logging.INFO):
        log.info("%s", line())


def log_kept(url: str, name: str) -> None:
    """Log that data whose manifest was lost is not deleted."""
    log.warning(
        "%s has lost its manifest.json; %s in it was published, and is kept until a checkpoint replaces it", url, name
    )


def log_swept(url: str, name: str) -> None:
    """Log that the remains of a save or of a deletion were deleted."""
    log.info("deleted %s/%s, left by a save that failed or was replaced, or by a deletion", url, name)
