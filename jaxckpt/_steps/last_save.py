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

    def begun(self, pending: PendingSave, step: int) -> None:
        """Note that a later save has begun."""
        self.pending, self.step = pending, step

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
                pending.wait()  # it has just ended, or its own error is a TimeoutError
        self.step = step
        return True
