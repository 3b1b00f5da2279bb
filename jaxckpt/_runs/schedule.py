"""Which steps are saved: by their number, by the clock, or by a predicate; the same in every process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxckpt._job.call import Call
from jaxckpt._model.records import StepRecord
from jaxckpt._options import optional, require_seconds, require_whole_number
from jaxckpt._run_folder.metrics import recorded_metrics
from jaxckpt._runs.retention import evaluate_predicate, require_predicate

_CLOCK_CHECKS = 60
"""How often several processes check process 0's clock during `every_seconds`, if their steps are short enough."""


class SaveSchedule:
    """Which steps are saved.

    In a job of several processes, the clock and the metrics of process 0 decide. For a predicate, the processes meet at
    every step. For the clock they meet less often: at each rendezvous, process 0 announces the number of steps until
    the next one, estimated from the duration of past steps. All processes count the same steps, so none misses a
    rendezvous.
    """

    def __init__(self, every: object, every_seconds: object, save_if: object, processes: int) -> None:
        """Takes the arguments of a Checkpointer, and the number of processes. Raises InputError."""
        if every is None and every_seconds is None and save_if is None:
            every = 1
        self._every = optional(require_whole_number, every, "every", minimum=1)
        self._seconds = optional(require_seconds, every_seconds, "every_seconds")
        self._save_if = require_predicate(save_if, "save_if")
        is_given = "a function" if self._save_if else None
        self.settings = {"every": self._every, "every_seconds": self._seconds, "save_if": is_given}
        """The arguments as JSON values, which all processes must give alike."""

        self._is_single_process = processes == 1
        self._clock: Callable[[], float] = time.monotonic
        self._saved_at = self._met_at = self._clock()
        self._steps_since_rendezvous = 0
        self._steps_to_rendezvous = 1
        self._decided: tuple[int, bool] | None = None
        """A step and the decision about it, until the step is saved or skipped."""

    def record_save(self) -> None:
        """Note that a save has begun, and restart the count of seconds."""
        self._saved_at = self._clock()
        self._decided = None

    def repeat(self, step: int) -> None:
        """Note that a due step was not saved, and is due if it comes next."""
        self._decided = step, True

    def is_due(
        self, step: int, metrics: Mapping[str, Any] | None, begin_call: Callable[[], Call], *, remember: bool = False
    ) -> bool:
        """Whether to save a step. Every process calls this at every step.

        With `remember`, the next call for the same step returns the same decision, without communication.
        """
        decided, self._decided = self._decided, None
        due = decided[1] if decided and decided[0] == step else self._decide(step, metrics, begin_call)
        if remember:
            self._decided = step, due
        return due

    def _decide(self, step: int, metrics: Mapping[str, Any] | None, begin_call: Callable[[], Call]) -> bool:
        if self._every is not None and step % self._every == 0:
            return True
        if self._seconds is None and self._save_if is None:
            return False
        if self._is_single_process:
            return self._is_due_locally(step, metrics)
        self._steps_since_rendezvous += 1
        if self._steps_since_rendezvous < self._steps_to_rendezvous:
            return False
        with begin_call() as call:
            own = (False, 0)
            if call.index == 0:
                own = call.here(lambda: (self._is_due_locally(step, metrics), self._plan_next_rendezvous()))
            due, self._steps_to_rendezvous = call.in_process_0("deciding whether to save", lambda: own)
            self._steps_since_rendezvous = 0
        return due

    def _is_due_locally(self, step: int, metrics: Mapping[str, Any] | None) -> bool:
        if self._seconds is not None and self._clock() - self._saved_at >= self._seconds:
            return True
        return self._save_if is not None and evaluate_predicate(
            self._save_if, "save_if", StepRecord(step, recorded_metrics(metrics))
        )

    def _plan_next_rendezvous(self) -> int:
        """The number of steps until the processes meet again.

        At most twice the last number, because the first steps may be fast (queued on the devices) or slow (compiled).
        """
        if self._seconds is None or self._save_if is not None:
            return 1
        now = self._clock()
        seconds_per_step = max((now - self._met_at) / self._steps_to_rendezvous, 1e-9)
        self._met_at = now
        left = self._saved_at + self._seconds - now
        ahead = min(left if left > 0 else self._seconds, self._seconds / _CLOCK_CHECKS)
        return max(1, min(2 * self._steps_to_rendezvous, int(ahead / seconds_per_step)))
