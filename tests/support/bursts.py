"""Storage that fails in bursts, and a training loop that must survive them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

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


def failing_calls(switch: Path) -> Callable[[bool], None]:
    """Lets every system call of this process that changes a file fail (EIO), or none: `failing_calls.c` looks at the
    file `switch` before each call."""
    with switch.open("r+b") as file:
        error_code = mmap.mmap(file.fileno(), 1)

    def refuse(refused: bool) -> None:
        error_code[0] = errno.EIO if refused else 0

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
        self._published: int | None = None
        """Saves that were published, if the loop notes them."""

        self._longest = 0
        self._begun_at: int | None = None
        """The step at which the burst began that has not ended."""

        self._bursts = bursts
        self._refuse = refuse
        self._ended = threading.Event()

    @property
    def longest_burst(self) -> int:
        """Steps from the begin to the end of the longest burst, or until now."""
        return max(self._longest, 0 if self._begun_at is None else self.step - self._begun_at)

    def note_published(self, _: object) -> None:
        """Note that a save was published. A burst then begins only after two more of these, of which one may be late:
        on a busy machine, two bursts without a save between them would be one that is too long."""
        self._published = (self._published or 0) + 1

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
        published = None
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
                while refused and published is not None and (self._published or 0) < published + 2:
                    if self._ended.wait(0.001):
                        return
                if refused and self.step >= times[1]:
                    break  # the training was faster: a late burst could end after the last step
                self._refuse(refused)
                published = self._published
                self._longest = self.longest_burst
                self._begun_at = self.step if refused else None


def unaccounted(directory: str | os.PathLike[str], steps: int) -> list[int]:
    """The steps that were neither published nor reported."""
    import jaxckpt

    run = jaxckpt.Run(directory)
    reported = {incident.step for incident in run.incidents()}
    return sorted({*range(1, steps + 1)} - {*run.steps()} - reported)


STEPS, FAILURES = 24, 5

TOO_LONG = "a burst was longer than three saves"
"""The outcome of a round in which a busy machine has stretched a burst. It shows nothing."""


def train(
    directory: str, policy: str, seed: int, refuse: Callable[[bool], None], options: Any, *, is_long: bool, **more: Any
) -> str:
    """Train for `STEPS` steps, and say what has become of them: what is wrong, "all accounted for", or "stopped" if
    the last burst `is_long`."""
    import numpy as np

    import jaxckpt

    plan = short_bursts(seed, STEPS)
    if is_long:
        plan = [*plan[: len(plan) // 2], (STEPS / 2, LONG)]
    background, step = seed % 4 != 3 or is_long, 0
    training = Training(plan, refuse)
    policies: dict[str, Any] = {"on_failure": policy, "max_failures": FAILURES, "keep_last": 50, **more}
    try:
        with jaxckpt.Checkpointer(directory, background=background, options=options, **policies) as checkpoints:
            for step in training.steps(STEPS):
                state = {"w": np.full(5000, step), "step": step}
                checkpoints.save(step, state, on_done=training.note_published)
    except jaxckpt.errors.StorageError as error:
        reported = [incident.step for incident in jaxckpt.Run(directory).incidents()]
        notes = " ".join(getattr(error, "__notes__", ()))
        if "max_failures" not in notes:
            return f"{error}: {notes}"
        if training.longest_burst > 3 and not is_long:
            return TOO_LONG
        if len(reported) < FAILURES or step > (reported[-1] or 0) + 3:
            return f"stopped at step {step}: {reported}"
        return "stopped"
    due = [*range(1, STEPS + 1)][more.get("every", 1) - 1 :: more.get("every", 1)]
    if missing := [step for step in unaccounted(directory, STEPS) if step in due]:
        return f"neither published nor reported: {missing}"
    for number in jaxckpt.Run(directory).steps():
        saved = jaxckpt.load_numpy(f"{directory}/{number:08d}")
        if saved["step"] != number or set(saved["w"].tolist()) != {number}:
            return f"step {number} has other values"
    return "all accounted for"
