"""A callback that saves and resumes `keras.Model.fit`. It needs Keras with the JAX backend."""

from __future__ import annotations

from typing import Any, Unpack

import keras

from jaxckpt._restore.restore import RestoreArguments
from jaxckpt._runs.checkpointer import Checkpointer
from jaxckpt.errors import InputError


class Checkpoints(keras.callbacks.Callback):
    """Saves the steps that a `Checkpointer` is due to save, and resumes from its newest step when training begins.

    A step is a batch. Everything that `get_state_tree` returns is saved and restored: weights, optimizer, seeds of
    dropout, and metrics. Under `keras.distribution`, each variable keeps its layout; the mesh may change between runs.

    Args:
        checkpointer: The run. Close it, or leave its `with` block, after `fit`.
        arguments: Keyword arguments of `jaxckpt.restore`, such as `strict=False` for a model with more
            variables than the saved one.

    Raises:
        InputError: `checkpointer` is not a Checkpointer, or when training begins, the backend of Keras is not JAX.

    Examples:
        with jaxckpt.Checkpointer("run", every=1000, keep_last=2) as checkpointer:
            epochs_done = (checkpointer.latest_step() or 0) // 1000  # batches in an epoch
            callbacks = [jaxckpt.keras.Checkpoints(checkpointer)]
            model.fit(data, epochs=10, initial_epoch=epochs_done, callbacks=callbacks)
    """

    def __init__(self, checkpointer: Checkpointer, **arguments: Unpack[RestoreArguments]) -> None:
        super().__init__()
        if not isinstance(checkpointer, Checkpointer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"Checkpoints takes a jaxckpt.Checkpointer, found a {type(checkpointer).__name__}")
        self.checkpointer = checkpointer
        self._arguments = arguments
        self.step = 0
        """Batches that the model has been trained on, including those before the run was resumed."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest step into the model, if there is one."""
        if keras.backend.backend() != "jax":
            raise InputError(
                f"Checkpoints needs Keras' JAX backend, found {keras.backend.backend()!r}: set KERAS_BACKEND=jax before"
                " Keras is imported"
            )
        model: Any = self.model
        last, state = self.checkpointer.restore_or_init(model.get_state_tree, **self._arguments)
        model.set_state_tree(state)
        self.step = self._epoch_start = last or 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the step at which the epoch begins."""
        self._epoch_start = self.step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save the step if it is due. Keras calls this once for `steps_per_execution` batches."""
        model: Any = self.model
        in_epoch = batch + 1  # the last execution of an epoch may have fewer batches than Keras counts
        steps = (self.params or {}).get("steps")
        self.step = self._epoch_start + min(in_epoch, steps or in_epoch)
        # The model copies its state into its variables only when it is asked for, so it is asked only for due steps.
        if self.checkpointer.should_save(self.step):
            self.checkpointer.save(self.step, model.get_state_tree())
