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

        self._predecessor: PendingSave | None = None

    def set_pending(self, pending: PendingSave, step: int, predecessor: PendingSave | None = None) -> None:
        """Note that a save has begun.

        An error that it inherited from `predecessor`, the save that it waited for, is not raised again by `wait`.
        """
        self.pending, self.step, self._predecessor = pending, step, predecessor

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the save, for at most `seconds`. If it has not ended by then, abandon it.

        Returns whether it has ended. Raises its error. After an interrupt, the next call waits for the same save.
        """
        pending, step = self.pending, self.step
        if pending is None:
            return True
        try:
            pending.wait(seconds)
        except Exception as error:
            if not pending.done:
                self.pending = self.step = None
                if not isinstance(error, TimeoutError):
                    raise
                pending.abandon()
                return False
        self.pending = self.step = None
        if pending.error is None:
            self.step = step
        elif self._predecessor is None or pending.error is not self._predecessor.error:
            raise pending.error
        return True
