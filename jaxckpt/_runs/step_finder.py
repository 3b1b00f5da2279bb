"""The step that all processes agree to restore: the newest complete step in local folders, or in the storage."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxckpt._job.call import Call
from jaxckpt._job.slow_processes import process_names
from jaxckpt._local_tier.peer_reads import DamagedError
from jaxckpt._local_tier.recovery import LocatedStep, Recovery
from jaxckpt._local_tier.step_files import Candidate, candidates
from jaxckpt._local_tier.tier import LocalSteps
from jaxckpt._local_tier.union_source import UnionCheckpoint
from jaxckpt._options import Options
from jaxckpt._pipeline.lane_log import log as _log
from jaxckpt._runs.directory import Directory
from jaxckpt._sources.format_registry import missing_formats_hint
from jaxckpt.errors import DataError, NotACheckpointError, PathNotSharedError


class StepFinder:
    """Finds the step to restore. Every process creates one."""

    def __init__(self, directory: Directory, local: LocalSteps | None, options: Options) -> None:
        self._directory = directory
        self._local = local
        self._recovery = None if local is None else Recovery(local, options)

    # Agreeing, every process -----------------------------------------------------------------------------

    def find(self, call: Call, step: int | None, *, allow_peers: bool) -> LocatedStep:
        """Find a step, by default the newest, in a lane, when no save is running. Every process calls this.

        Without local folders, a step that is given is not looked for. Without `allow_peers`, a local step counts only
        if each process sees all of its files. Raises DataError if the wanted step exists only in the local folders and
        is damaged there.
        """
        with call.rendezvous("looking for the newest step") as rendezvous:
            self._directory.require_same_folder()
            if step is not None and self._recovery is None:
                rendezvous.barrier()
                return LocatedStep(step)
            local_steps = [] if self._recovery is None else list(self._recovery.steps())
            reported = [local.candidate for local in local_steps if local.candidate]
            # Process 0 looks after the others, so it must find what they have found.
            seen = None if call.index == 0 or step is not None else self._directory.newest_number()
            gathered = rendezvous.gather(json.dumps([reported, seen]))
            storage_step, eligible = json.loads(
                rendezvous.broadcast(self._encode_eligible(gathered, step) if gathered else "")
            )
            for candidate, sender in eligible:
                assert self._recovery is not None
                rendezvous.start_next()
                located = self._recovery.find_whole(
                    rendezvous, self._directory.url, Candidate(*candidate), sender, local_steps, allow_peers=allow_peers
                )
                if located is not None:
                    return located
        if eligible and storage_step is None and step is not None:
            raise DataError(
                f"step {step} is damaged or incomplete in the local folders, and {self._directory.url} does not have it"
                "; see the log for details"
            )
        if eligible and call.index == 0:
            fallback = (
                "no step is left"
                if storage_step is None
                else f"step {storage_step} is restored from {self._directory.url}"
            )
            _log.warning("no step in the local folders can be restored: %s", fallback)
        return LocatedStep(storage_step if step is None else step)

    def _encode_eligible(self, gathered: Sequence[str], step: int | None) -> str:
        """Return, as JSON: the step in the storage (or None), and the local saves to try before it, newest first.

        Each local save comes with the process that sends its manifest to the processes that lack it (None if all have
        it). Only process 0 calls this.
        """
        decoded = [json.loads(text) for text in gathered]
        reports = [[Candidate(*fields) for fields in reported] for reported, _ in decoded]
        steps = self._directory.steps(() if step is None else [step])
        self._require_shared(steps, [seen for _, seen in decoded])
        storage_step = max(steps, default=None) if step is None else step if step in steps else None
        eligible: list[tuple[Candidate, int | None]] = []
        for candidate in candidates(reports):
            if (
                candidate.step != step
                if step is not None
                else storage_step is not None and candidate.step < storage_step
            ):
                continue
            # If the local folders and the storage have different saves of one step, the storage's save counts.
            if candidate.step in steps and self._directory.save_id(candidate.step) not in (None, candidate.save_id):
                continue
            having = [process for process, report in enumerate(reports) if candidate in report]
            eligible.append((candidate, having[0] if len(having) < len(reports) else None))
        return json.dumps((storage_step, eligible))

    def _require_shared(self, steps: Sequence[int], newest: Sequence[int | None]) -> None:
        """Raise PathNotSharedError if a process has seen a newer step than process 0 sees. `newest` has that of each
        process."""
        own = max(steps, default=-1)
        having = [process for process, seen in enumerate(newest) if seen is not None and seen > own]
        if not having:
            return
        seen = max(seen for seen in newest if seen is not None)
        raise PathNotSharedError(
            f"{process_names(having)} of {len(newest)} see{'s' if len(having) == 1 else ''} step {seen} in"
            f" {self._directory.url}, but process 0, which chooses the step to restore, sees"
            f" {f'no step after {own}' if steps else 'no steps'} there: all processes must use one shared folder or"
            " object store"
        )

    # Without communication -------------------------------------------------------------------------------

    def mark_damaged(self, source: UnionCheckpoint, error: DamagedError) -> None:
        """Note damaged files of a local step, so that copies in other processes are used."""
        assert self._recovery is not None
        self._recovery.mark_damaged(source, error)

    def require_found(self, chosen: LocatedStep) -> int:
        """The number of a step that was found. Raises NotACheckpointError if none was."""
        if chosen.step is None:
            raise NotACheckpointError(f"{self._directory.url} has no steps{missing_formats_hint()}")
        return chosen.step

    def record_restored(self, chosen: LocatedStep) -> None:
        """Note that a step was restored. All other steps of an earlier Checkpointer are no longer needed."""
        if self._local is not None:
            self._local.record_restored(chosen.local_save, complete=chosen.has_all_copies)

    def metrics(self, step: int) -> dict[str, float | None]:
        """The metrics of the local step that was restored or saved last. Raises NotACheckpointError."""
        record = None if self._recovery is None else self._recovery.record(step)
        if record is None:
            more = ", and no local step of that number was restored or saved last" if self._local else ""
            raise NotACheckpointError(f"{self._directory.url} has no step {step}{more}")
        return dict(record.metrics)
