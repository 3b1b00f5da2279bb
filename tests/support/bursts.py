"""Storage that fails in bursts, and a training loop that must survive them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

Burst = tuple[float, float]
"""When the storage fails: the seconds of its begin and of its end."""

SAVE_SECONDS = 0.03
"""How often a step is saved."""


def refuse_files(refused: bool) -> None:
    """Let no write of this process succeed (EFBIG), or all."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if refused else hard, hard))


def fill(ballast: Path) -> Callable[[bool], None]:
    """Fills the file system of a path (ENOSPC), or frees it."""

    def refuse(refused: bool) -> None:
        ballast.unlink(missing_ok=True)
        if refused:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    return refuse


def short_bursts(seed: int, steps: int) -> list[Burst]:
    """Bursts that are shorter than three saves, and over before the last steps."""
    chosen = random.Random(seed)
    begin, bursts = 0.0, list[Burst]()
    while True:
        begin += chosen.uniform(1, 8) * SAVE_SECONDS
        end = begin + chosen.uniform(0.1, 2.9) * SAVE_SECONDS
        if end > (steps - 6) * SAVE_SECONDS:
            return bursts
        bursts.append((begin, end))
        begin = end


@contextlib.contextmanager
def failing(bursts: Sequence[Burst], refuse: Callable[[bool], None]) -> Generator[None]:
    """A block in which the storage fails at these times."""
    ended = threading.Event()
    begun = time.monotonic()

    def alternate() -> None:
        for times in bursts:
            for refused, at in zip((True, False), times, strict=True):
                if ended.wait(max(0.0, begun + at - time.monotonic())):
                    return
                refuse(refused)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        refuse(False)


def pace(begun: float, step: int) -> None:
    """Wait until a step is due."""
    time.sleep(max(0.0, begun + step * SAVE_SECONDS - time.monotonic()))


def unaccounted(directory: str | os.PathLike[str], steps: int) -> list[int]:
    """The steps that were neither published nor reported."""
    import jaxckpt

    run = jaxckpt.Run(directory)
    reported = {incident.step for incident in run.incidents()}
    return sorted({*range(1, steps + 1)} - {*run.steps()} - reported)
