"""Saves the due steps of a run (first in local folders, if configured), and the last step of a preempted job."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxckpt._format.records import StepRecord
from jaxckpt._runtime.errors import JaxckptError, Preempted
from jaxckpt._runtime.options import Options
from jaxckpt._runtime.processes import Call, Group
from jaxckpt._save.background import PendingSave
from jaxckpt._save.describe import Recent
from jaxckpt._save.prepare import SaveRequest, require_on_done
from jaxckpt._save.reuse import Last
from jaxckpt._save.save import start
from jaxckpt._steps.deletion import Deletion
from jaxckpt._steps.directory import Directory
from jaxckpt._steps.schedule import Due
from jaxckpt._steps.flush import Flush
from jaxckpt._steps.last_save import LastSave
from jaxckpt._steps.local import Local
from jaxckpt._steps.metrics import recorded
from jaxckpt._steps.preemption import Notice

_log = logging.getLogger("jaxckpt")


@dataclass(slots=True)
class Saver:
    """Saves the steps of a run. Every process creates one."""

    directory: Directory
    deletion: Deletion
    due: Due
    notice: Notice
    local: Local | None
    options: Options
    background: bool
    fail_fast: bool
    on_preemption: Literal["exit", "continue", "ignore"]
    published: Last
    last: LastSave = field(default_factory=LastSave)
    """The last save: of a local step, if there are local folders."""

    flushed: LastSave = field(default_factory=LastSave)
    """The last flush of a local step."""

    recent: Recent = field(default_factory=Recent)
    preempted: bool = False

    def save(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        request: SaveRequest,
        calling: Callable[..., Group],
        *,
        force: bool,
    ) -> bool:
        """Save a step if it is due. `request` has the caller's arguments. Returns whether it is being saved."""
        last_one = self.on_preemption != "ignore" and not self.preempted and self.notice.reached(step)
        stored = force or last_one or self.due.reached(step, metrics, calling)
        if not (stored or (self.local is not None and self.local.due(step))):
            # Only for a step that is not due: for a due step all processes must make the same calls, even if only some
            # of them know of a failure yet.
            if self.fail_fast and self.last.pending is not None and self.last.pending.done:
                self.last.wait()
            return False
        saved = False
        if last_one:
            self.preempted = True
            saved = self._hurry(step)
        if not saved:
            awaited = not (self.background or last_one)
            saved = self._begin(
                step,
                metrics,
                request,
                functools.partial(calling, step),
                stored=stored,
                last_one=last_one,
                awaited=awaited,
            )
            if saved and stored:
                self.due.saved()
            if awaited:
                self.last.wait()
                self.flushed.wait()
                self.deletion.wait()
        if last_one:
            self._leave(step, saved)
        return saved

    def _begin(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        request: SaveRequest,
        calling: Callable[[], Group],
        *,
        stored: bool,
        last_one: bool,
        awaited: bool,
    ) -> bool:
        """Start to save a step. Returns whether it is being saved."""
        flush = None
        if self.local is not None:
            # The flush is a separate call. Every process counts it before anything can fail, even if the step is not
            # stored, so that processes that disagree on the step still make the same number of calls.
            store = self.directory.child(step)
            group = Group.for_call(self.options, Call.of("flush", store.url))
            if stored:
                rate = None if last_one else self.local.rate or self.options.max_bytes_per_second
                flush = Flush(step, self.local.child(step), store, group, self.options, rate, request.on_done)
        with calling() as group:
            request = self._completed(StepRecord(step, recorded(metrics)), request, stored=stored, last_one=last_one)
            if self.local is not None:
                if flush is None and self.local.is_held_up(step, group):
                    return False
                if flush is not None or (self.flushed.pending is not None and self.flushed.pending.done):
                    self.flushed.wait()
                request = replace(request, path=self.local.child(step).url, spread=self.local.spread(step, flush))
                if flush is not None:
                    require_on_done(request.on_done)
                    flush.overwrite, flush.then = request.overwrite, request.then
                    request = replace(request, then=None, on_done=None)
            pending = start(request, self.options, group, background=not awaited)
        if pending.skipped:
            return False
        self.last.begun(pending, step)
        if flush is not None and self.local is not None:
            self.local.flush = flush
            self.flushed.begun(flush.begin(pending), step, pending)
        return True

    def _completed(self, record: StepRecord, request: SaveRequest, *, stored: bool, last_one: bool) -> SaveRequest:
        """The complete request of a step: the caller's arguments and those of the Checkpointer."""
        request = replace(
            request,
            step=record,
            components=tuple(self.directory.rules.components),
            recent=self.recent,
            last=self.published if self.local is None else None,
            deadline=self.notice.deadline if last_one else None,
        )
        if not stored:
            return request
        check = functools.partial(self._admit, record, overwrite=request.overwrite, last_one=last_one)
        return replace(request, check=check, then=functools.partial(self.deletion.begin, record))

    def _admit(self, record: StepRecord, *, overwrite: bool, last_one: bool) -> None:
        """Raise unless a step may be saved, and protect it from deletion until it is saved. Process 0."""
        if not last_one:
            self.deletion.raise_failure()
        self.deletion.spare(record.number)
        self.directory.admit(record, overwrite=overwrite, last_one=last_one)

    # The last step of a preempted job --------------------------------------------------------------------

    def _hurry(self, step: int) -> bool:
        """Wait for earlier saves before a preemption deadline. Returns whether they have saved this step."""
        if self.local is not None and self.local.flush is not None and self.local.flush.step != step:
            self.local.flush.cancelled = JaxckptError("a newer step is flushed instead, since the job was preempted")
        for last in (self.last, self.flushed):
            try:
                last.wait(self.notice.seconds_left())
            except Exception as error:
                _log.warning("the save before the last one failed: %s", error)
        return step == (self.last if self.local is None else self.flushed).step

    def _leave(self, step: int, saved: bool) -> None:
        here = saved and self.last.wait(self.notice.seconds_left())
        in_time = self.flushed.wait(self.notice.seconds_left()) and here  # otherwise `close` would wait for it forever
        outcome = f"step {step} is saved" if in_time else f"step {step} was not saved within the deadline"
        if here and not in_time:
            outcome = f"step {step} is saved in the local folders, but was not flushed within the deadline"
        _log.warning("the job was preempted: %s", outcome)
        if self.on_preemption == "exit":
            raise Preempted(f"the job was preempted: {outcome} in {self.directory.url}")

    # Waiting ---------------------------------------------------------------------------------------------

    @property
    def pending(self) -> PendingSave | None:
        """The last background save, unless it has been waited for."""
        return self.flushed.pending or self.last.pending

    def wait(self) -> None:
        """Wait until the last save is published. Raises its error."""
        self.last.wait()
        self.flushed.wait()
