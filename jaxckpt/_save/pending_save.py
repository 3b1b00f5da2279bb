"""The handle of a background save that `save_async` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxckpt._keywords import explain_names
from jaxckpt._pipeline.progress import Progress
from jaxckpt._save.save_info import SaveInfo

if TYPE_CHECKING:
    from jaxckpt._save.running_saves import RunningSave


@explain_names
class PendingSave:
    """A save that runs in a background thread: the result of `save_async`."""

    def __init__(self, save: RunningSave) -> None:
        self._save = save

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""
        return self._save.path

    @property
    def skipped(self) -> bool:
        """Whether nothing is saved, because another save was in progress and `Options.when_busy` is "skip"."""
        return self._save.skipped

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._save.done

    @property
    def error(self) -> BaseException | None:
        """The error of the save, which `wait` raises; None if it has not ended or was successful."""
        return self._save.error

    @property
    def progress(self) -> Progress:
        """Bytes that this process has written, and its total."""
        return self._save.progress

    def wait(self, timeout_seconds: float | None = None) -> SaveInfo:
        """Wait until the checkpoint is published.

        Args:
            timeout_seconds: Seconds to wait at most; None: no limit.

        Returns:
            What was written.

        Raises:
            TimeoutError: The save is not done yet. It continues.
            InputError: The save was skipped.
            Exception: The error of the save; see `save`.
        """
        return self._save.wait(timeout_seconds)

    def __repr__(self) -> str:
        save = self._save
        state = "skipped" if save.skipped else "in progress" if not save.done else "failed" if save.error else "done"
        return f"<PendingSave to {save.path}: {state}>"
