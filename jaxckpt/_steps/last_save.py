"""The last save of a Checkpointer, until it has been waited for."""

from __future__ import annotations

from jaxckpt._save.background import PendingSave


class LastSave:
    """The last save of a Checkpointer."""

    def __init__(self) -> None:
        self.pending: PendingSave | None = None
        """The save, if it has not been waited for."""

        self.step: int | None = None
        """Its step; None if the save failed, or the step was deleted."""

        self._following: PendingSave | None = None

    def begun(self, pending: PendingSave, step: int, following: PendingSave | None = None) -> None:
        """Note that a save has begun. An error that it took over from `following` is not raised again by `wait`."""
        self.pending, self.step, self._following = pending, step, following

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save until a deadline, and then abandon it.

        Returns whether it has ended. Raises its error.
        """
        pending, self.pending = self.pending, None
        step, self.step = self.step, None  # unless it succeeded
        if pending is not None:
            try:
                pending.wait(seconds)
            except TimeoutError:
                if not pending.done:
                    pending.abandon()
                    return False
            except Exception:
                if not pending.done:
                    raise
            if pending.error is not None:
                if self._following is None or pending.error is not self._following.error:
                    raise pending.error
                step = None
        self.step = step
        return True
