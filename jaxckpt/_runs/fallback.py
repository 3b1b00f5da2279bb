"""What follows when a step cannot be read: `restore_or_init(on_unreadable="previous")`.

every process:   find ─▶ restore ─▶ all meet ─▶ done | an older step, chosen by process 0 ─▶ find ─▶ …
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from jaxckpt._job.call import Call
from jaxckpt._job.rendezvous import cause_of
from jaxckpt._pipeline.lane_log import log as _log
from jaxckpt._run_folder.incidents import IncidentLog
from jaxckpt._run_folder.steps import is_step
from jaxckpt._runs.directory import Directory
from jaxckpt.errors import InputError, StorageError

OnUnreadable = Literal["raise", "previous"]


def require_on_unreadable(value: object) -> OnUnreadable:
    """The argument of a restore. Raises InputError."""
    if value not in ("raise", "previous"):
        raise InputError(f'on_unreadable must be "raise" or "previous", found {value!r}')
    return value


class Fallback:
    """The steps that one call of `restore` has tried. Every process creates one."""

    def __init__(self, directory: Directory, incidents: IncidentLog) -> None:
        self._directory = directory
        self._incidents = incidents
        self._first: int | None = None
        """The newest step that may be restored; None: any."""

        self._first_error: BaseException | None = None

    def next_step(
        self, call: Call, tried: int | None, error: BaseException | None, *, is_of_caller: bool
    ) -> int | None:
        """What follows the attempt to restore a step, the same in every process: the step to try next, or None if the
        step was restored. In a lane.

        `tried` is None if the search for the newest step has failed. Raises the first error if no step is left, or an
        error that does not mean that the step cannot be read, such as one of the caller's functions (`is_of_caller`).
        """
        self._first_error = self._first_error or error
        with call.rendezvous("choosing a step that can be read") as rendezvous:
            if error is not None and (is_of_caller or not cause_of(error)):
                raise error
            texts = rendezvous.gather("" if error is None else f"{type(error).__name__}: {error}")
            chosen = json.dumps([self._choose(tried, texts), [*self._directory.refused]]) if texts else ""
            answer, refused = json.loads(rendezvous.broadcast(chosen))
            self._directory.refused.update(refused)
        if answer is None or isinstance(answer, int):
            return answer
        error = self._first_error or InputError("no error")
        error.add_note(f"jaxckpt: {answer}")
        raise error

    def _choose(self, tried: int | None, texts: list[str]) -> int | str | None:
        """The step to try next; None if none is needed; or a text that says that none is left. In process 0."""
        reason = next(filter(None, texts), None)
        if reason is None:
            return None
        steps = steps_or_errors(self._directory)
        self._first = self._first if self._first is not None else tried if tried is not None else max(steps, default=0)
        if tried is not None:
            self._refuse(tried, reason)
        for step, problem in steps.items():
            if step > self._first or step in self._directory.refused:
                continue
            if problem is None:
                _log.warning("step %d of %s is tried instead", step, self._directory.url)
                return step
            self._refuse(step, f"{type(problem).__name__}: {problem}")
        refused = [step for step in steps if step in self._directory.refused and step <= self._first]
        return f"no step in {self._directory.url} can be read; tried: {refused or 'none'}"

    def _refuse(self, step: int, reason: str) -> None:
        self._directory.refused.add(step)
        self._directory.forget(step)
        message = "step %d of %s cannot be read, and is not restored: %s. It is kept until step %d is saved again"
        _log.error(message, step, self._directory.url, reason, step)
        self._incidents.add(step, "unreadable step", reason)


def steps_or_errors(directory: Directory) -> Mapping[int, StorageError | None]:
    """The steps that exist, newest first, each with the error if jaxckpt cannot tell whether it is published. Raises
    StorageError if the directory itself cannot be listed."""
    store = directory.store
    try:
        folders = store.folders(is_step)
    except StorageError:  # of an object store, which looks at all steps together
        folders: Mapping[str, bool | StorageError] = {}
        for name in store.folders(is_step, known=_Everything()):
            try:
                folders |= store.folders(name.__eq__)
            except StorageError as error:
                folders |= {name: error}
    found = {int(name): None if published is True else published for name, published in folders.items() if published}
    return dict(sorted(found.items(), reverse=True))


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


def other_steps(directory: Directory, step: int | None) -> list[int]:
    """The other published steps, oldest first, for a message."""
    steps = steps_or_errors(directory)
    return sorted(other for other, problem in steps.items() if problem is None and other != step)
