"""The last save of a Checkpointer, until it has been waited for."""

from __future__ import annotations

from jaxckpt._save.running_saves import RunningSave


class LastSave:
    """The last save of a Checkpointer."""

    def __init__(self) -> None:
        self.pending: RunningSave | None = None
        """The save, if it has not been waited for."""

        self.step: int | None = None
        """Its step; None if the save failed, or the step was deleted."""

        self._predecessor: RunningSave | None = None

    def set_pending(self, pending: RunningSave, step: int, predecessor: RunningSave | None = None) -> None:
        """Note that a save has begun.

        An error that it inherited from `predecessor`, the save that it waited for, is not raised again by `wait`.
        """
        self.pending, self.step, self._predecessor = pending, step, predecessor

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save, for at most `seconds`. If it has not ended by then, abandon it.

        Returns whether it has ended or is published. Raises its error. After an interrupt, or an error of the wait
        itself, the next call waits for the same save.
        """
        pending, step = self.pending, self.step
        if pending is None:
            return True
        try:
            pending.wait(seconds)
        except BaseException as error:
            if error is not pending.error and not isinstance(error, TimeoutError):
                raise
            if not pending.done:
                self.pending, self.step = None, step if pending.is_published else None
                pending.abandon()
                return pending.is_published
        self.pending, self.step = None, step if pending.is_published else None  # its `on_done` may have failed
        inherited = self._predecessor is not None and pending.error is self._predecessor.error
        if pending.error is not None and not inherited and not pending.is_raised:
            note = f"jaxckpt: this error ended {pending.name}"
            if note not in getattr(pending.error, "__notes__", ()):
                pending.error.add_note(note)
            raise pending.error
        return True

    def hurry(self, seconds: float) -> None:
        """End the limit of the save's rate, and wait for at most `seconds` until it is published. If it is not by then,
        abandon it. Raises its error.

        The error of an `on_done` that is still running is raised by the next save, or reported at exit.
        """
        if self.pending is None:
            return
        self.pending.hurry(seconds)
        if self.pending.is_published and not self.pending.done:
            self.pending = None
        else:
            self.wait(0)

    def forget(self, step: int) -> None:
        """Note that a step was deleted."""
        if self.step == step:
            self.step = None
