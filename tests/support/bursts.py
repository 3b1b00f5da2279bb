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
"""When the storage fails: its begin and its end, in steps of the training. The fractions are of `STEP_SECONDS`."""

STEP_SECONDS = 0.03
LONG = 1e9


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
        begin += chosen.uniform(1, 8)
        end = begin + chosen.uniform(0.1, 2.9)
        if end > steps - 4:
            return bursts
        bursts.append((begin, end))
        begin = end


class Training:
    """The steps of a training loop, each of which is saved, while the storage fails in bursts."""

    def __init__(self, bursts: Sequence[Burst], refuse: Callable[[bool], None]) -> None:
        self.step = 0
        self._bursts = bursts
        self._refuse = refuse
        self._ended = threading.Event()

    def steps(self, count: int) -> Generator[int]:
        """The numbers of the steps."""
        thread = threading.Thread(target=self._alternate)
        thread.start()
        try:
            for self.step in range(1, count + 1):
                time.sleep(STEP_SECONDS)
                yield self.step
        finally:
            self._ended.set()
            thread.join()
            self._refuse(False)

    def _alternate(self) -> None:
        for times in self._bursts:
            for refused, at in zip((True, False), times, strict=True):
                begun = time.monotonic()
                while self.step < int(at):
                    if self._ended.wait(0.001):
                        return
                    # A save that waits until it is published does not come to the next step.
                    if not refused and at < LONG and time.monotonic() - begun > 20 * STEP_SECONDS:
                        break
                self._ended.wait(at % 1 * STEP_SECONDS)
                self._refuse(refused)


def unaccounted(directory: str | os.PathLike[str], steps: int) -> list[int]:
    """The steps that were neither published nor reported."""
    import jaxckpt

    run = jaxckpt.Run(directory)
    reported = {incident.step for incident in run.incidents()}
    return sorted({*range(1, steps + 1)} - {*run.steps()} - reported)
