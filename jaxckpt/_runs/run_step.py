"""A step of a run, as the destination of a save."""

from __future__ import annotations

from collections.abc import Iterable

from jaxckpt._model.records import StepRecord
from jaxckpt._model.stacks import Stack
from jaxckpt._runs.deletion import Deletion
from jaxckpt._runs.directory import Directory
from jaxckpt._save.request import SaveRequest
from jaxckpt._save.shared_path import SharedPath
from jaxckpt._store.transaction import Transaction


class RunStep(SharedPath):
    """A step of a run. Its publication makes older steps subject to the rules of retention."""

    def __init__(self, directory: Directory, deletion: Deletion, step: int, *, overwrite: bool) -> None:
        super().__init__(directory.child(step), overwrite=overwrite)
        self._directory = directory
        self._deletion = deletion

    def check(self, request: SaveRequest) -> None:
        """Raise unless the step may be saved, and protect it from deletion until it is saved."""
        assert request.step is not None, "a Checkpointer saves steps"
        if not request.is_last_step:
            self._deletion.raise_failure()
        self._deletion.protect(request.step.number)
        try:
            self._directory.require_savable(request.step, overwrite=self.overwrite, is_last_step=request.is_last_step)
        except BaseException:
            self._deletion.end_protection()
            raise

    def claim(self, stacks: Iterable[Stack], save_id: str) -> Transaction:
        self._directory.require_same_folder()
        return super().claim(stacks, save_id)

    def record_published(self, step: StepRecord | None, save_id: str, created: str) -> None:
        assert step is not None, "a Checkpointer saves steps"
        self._deletion.handle_published(step, save_id, created)
