"""Which steps are saved: by their number, by the clock, or by a predicate; the same in every process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt._format.records import StepRecord
from jaxckpt._runtime.options import require_seconds, require_whole_number
from jaxckpt._runtime.processes import Group
from jaxckpt._steps.metrics import recorded
from jaxckpt._steps.retention import holds, predicate

_LOOKS = 60
"""How often several processes check process 0's clock during `every_minutes`, if their steps are short enough."""


class Due:
    """Which steps are saved.

    In a job of several processes, the clock and the metrics of process 0 decide. For a predicate, the processes meet at
    every step. For the clock they meet less often: at each meeting, process 0 announces the number of steps until the
    next one, estimated from the duration of past steps. All processes count the same steps, so none misses a meeting.
    """

    def __init__(self, every: object, every_minutes: object, save_if: object, processes: int) -> None:
        """Takes the arguments of a Checkpointer, and the number of processes. Raises InputError."""
        if every is None and every_minutes is None and save_if is None:
            every = 1
        self._every = None if every is None else require_whole_number(every, "every", least=1)
        self._seconds = None if every_minutes is None else 60 * require_seconds(every_minutes, "every_minutes")
        self._save_if = predicate(save_if, "save_if")
        self.settings = {"every": self._every, "every_minutes": every_minutes, "save_if": save_if and "a function"}
        self._alone = processes == 1
        self._clock: Callable[[], float] = time.monotonic
        self._saved = self._met = self._clock()
        self._steps = 0
        self._next = 1
        self._former = ""

    def saved(self) -> None:
        """Note that a save has begun, and restart the count of minutes."""
        self._saved = self._clock()

    def reached(self, step: int, metrics: Mapping[str, Any] | None, calling: Callable[[], Group]) -> bool:
        """Whether to save a step. Every process calls this at every step."""
        if self._every is not None and step % self._every == 0:
            return True
        if self._seconds is None and self._save_if is None:
            return False
        if self._alone:
            return self._decided(step, metrics)
        self._steps += 1
        if self._steps < self._next:
            return False
        with calling() as group, group.meeting("deciding whether to save") as meeting:
            meeting.gather("")
            answer = ""
            if group.index == 0:
                if self._former:  # all processes have left that meeting
                    group.client.key_value_delete(f"{self._former}/")
                self._former = group.prefix
                due = self._decided(step, metrics)
                answer = json.dumps([due, self._steps_ahead()])
            due, self._next = json.loads(meeting.share(answer))
            self._steps = 0
        return due

    def _decided(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        if self._seconds is not None and self._clock() - self._saved >= self._seconds:
            return True
        return self._save_if is not None and holds(self._save_if, "save_if", StepRecord(step, recorded(metrics)))

    def _steps_ahead(self) -> int:
        """The number of steps until the processes meet again.

        At most twice the last number, because the first steps may be fast (queued on the devices) or slow (compiled).
        """
        if self._seconds is None or self._save_if is not None:
            return 1
        now = self._clock()
        seconds_per_step = max((now - self._met) / self._next, 1e-9)
        self._met = now
        left = self._saved + self._seconds - now
        ahead = min(left if left > 0 else self._seconds, self._seconds / _LOOKS)
        return max(1, min(2 * self._next, int(ahead / seconds_per_step)))
